"""LoHa, LoKr, Dense, BitFit and NormTuning beside PEFT's, padded, with their dropouts and in graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import peft
import pytest
import torch
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from cases import Affine, OwnRMSNorm
from onegraph.adapters import attach
from onegraph.adapters.run import run
from onegraph.errors import OnegraphError, TargetError
from onegraph.layers import Layer, describe, describe_any
from onegraph.methods import BitFit, Dense, LoHa, LoKr, Method, NormTuning
from onegraph.methods.factorise import factor_pair

# PEFT

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 24), (2, 5, 12)),
    "linear-prime": (lambda: nn.Linear(7, 11), (3, 7)),
    "conv2d": (lambda: nn.Conv2d(12, 10, 3, stride=2, padding=1), (2, 12, 5, 5)),
    "conv2d-1x1": (lambda: nn.Conv2d(6, 8, 1), (2, 6, 3, 3)),
    "conv1d": (lambda: nn.Conv1d(12, 10, 3, padding=2), (2, 12, 5)),
}
OURS_TO_PEFT = {
    "loha": {"first_up": "hada_w1_a", "first_down": "hada_w1_b", "second_up": "hada_w2_a", "second_down": "hada_w2_b"}
    | {"first_core": "hada_t1", "second_core": "hada_t2"},
    "lokr": {"first": "lokr_w1", "first_up": "lokr_w1_a", "first_down": "lokr_w1_b", "second": "lokr_w2"}
    | {"second_up": "lokr_w2_a", "second_down": "lokr_w2_b", "second_core": "lokr_t2"},
}
SETTINGS: dict[str, tuple[Method, peft.PeftConfig]] = {
    "loha": (LoHa(rank=3, alpha=6.0), peft.LoHaConfig(r=3, alpha=6, target_modules=["layer"])),
    "loha-effective": (
        LoHa(rank=3, alpha=6.0, effective_conv=True),
        peft.LoHaConfig(r=3, alpha=6, use_effective_conv2d=True, target_modules=["layer"]),
    ),
    "lokr": (LoKr(rank=1, alpha=2.0), peft.LoKrConfig(r=1, alpha=2, target_modules=["layer"])),
    "lokr-full": (LoKr(rank=8, alpha=2.0), peft.LoKrConfig(r=8, alpha=2, target_modules=["layer"])),
    "lokr-both": (
        LoKr(rank=1, alpha=3.0, decompose_both=True, decompose_factor=4),
        peft.LoKrConfig(r=1, alpha=3, decompose_both=True, decompose_factor=4, target_modules=["layer"]),
    ),
    "lokr-factor": (LoKr(rank=2, decompose_factor=3), peft.LoKrConfig(r=2, alpha=2, decompose_factor=3, target_modules=["layer"])),
    "lokr-effective": (
        LoKr(rank=2, effective_conv=True),
        peft.LoKrConfig(r=2, alpha=2, use_effective_conv2d=True, target_modules=["layer"]),
    ),
}


class _One(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def _described(module: nn.Module) -> Layer:
    layer = describe_any(module)
    assert layer is not None
    return layer


def _tensors(method: Method, layer: Layer) -> dict[str, Tensor]:
    p = {name: torch.randn(spec.shape, dtype=torch.float64) for name, spec in method.parameters(layer).items()}
    return p | {name: torch.tensor(value, dtype=torch.float64) for name, value in method.settings(layer).items()}


def _has_core(name: str, tensors: Mapping[str, object]) -> bool:
    """Whether it is the outer factor beside a core: PEFT has its rank first."""
    return name.endswith("_up") and f"{name.removesuffix('_up')}_core" in tensors


@pytest.mark.parametrize("form", [None, "beside", "weight"])
@pytest.mark.parametrize("module_name", MODULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_peft(name: str, module_name: str, form: str | None) -> None:
    method, config = SETTINGS[name]
    build, shape = MODULES[module_name]
    module = build().double()
    model = peft.get_peft_model(_One(copy.deepcopy(module)), copy.deepcopy(config)).double()
    theirs = model.base_model.model.layer
    layer = _described(module.requires_grad_(False))
    settled = type(method)(**{**method.__dict__, "form": form}).settled(layer, [layer])
    p = _tensors(settled, layer)
    names = list(settled.parameters(layer))
    for own in names:
        parameter = getattr(theirs, OURS_TO_PEFT[settled.name][own])["default"]
        value = p[own].t() if _has_core(own, p) else p[own]
        assert value.numel() == parameter.numel()
        parameter.data = value.reshape(parameter.shape).clone(memory_format=torch.contiguous_format)
        p[own].requires_grad_()
    assert len(list(theirs.parameters())) - len(list(module.parameters())) == len(names)  # nothing of theirs is left out
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x_theirs = x.detach().clone().requires_grad_()
    found, expected = run(settled, layer, module, x, p, training=True), model(x_theirs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(found)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, x_theirs.grad, rtol=1e-10, atol=1e-10)
    for own in names:
        parameter = getattr(theirs, OURS_TO_PEFT[settled.name][own])["default"]
        gradient = parameter.grad.t() if _has_core(own, p) else parameter.grad
        if _has_core(own, p) and settled.name == "loha":
            # PEFT's own backward multiplies this one by the other pair's core: no gradient of what its forward computes.
            assert not torch.allclose(gradient, p[own].grad)
            continue
        torch.testing.assert_close(p[own].grad, gradient.reshape(p[own].shape), rtol=1e-9, atol=1e-9)
    weight = settled.adapt(layer.base_tensors(module)["weight"], {key: value.detach() for key, value in p.items()}, layer)
    merged = model.merge_and_unload().layer
    torch.testing.assert_close(layer.stored(weight), merged.weight.detach(), rtol=1e-10, atol=1e-10)


def test_the_layouts_of_peft_cover_both_forms() -> None:
    """The table above meets each tensor of each method at least once."""
    met: set[tuple[str, str]] = set()
    for method, _ in SETTINGS.values():
        for build, _ in MODULES.values():
            layer = _described(build())
            met |= {(method.name, name) for name in method.settled(layer, [layer]).parameters(layer)}
    assert met == {(method, name) for method, table in OURS_TO_PEFT.items() for name in table}


def test_factor_pairs_are_those_of_peft() -> None:
    for size in [*range(1, 130), 320, 768, 1280, 2048, 3072, 49408]:
        for factor in (-1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 100):
            assert factor_pair(size, factor) == factorization(size, factor), (size, factor)


@pytest.mark.parametrize("module_name", ["linear", "conv2d", "conv1d"])
@pytest.mark.parametrize("name", ["loha", "loha-effective", "lokr", "lokr-full", "lokr-both", "lokr-effective"])
@pytest.mark.parametrize("start", ["zero", "lycoris", "random"])
def test_starts_are_those_of_peft(name: str, module_name: str, start: str) -> None:
    """The same tensors are 0, and the others as wide: uniform, so the largest of many is close to the bound."""
    method, config = SETTINGS[name]
    if start == "lycoris" and method.name == "loha":
        return
    build, _ = MODULES[module_name]
    layer = _described(build())
    method = type(method)(**{**method.__dict__, "init": start}).settled(layer, [layer])
    config = copy.deepcopy(config)
    config.init_weights = {"zero": True, "lycoris": "lycoris", "random": False}[start]
    largest: dict[str, float] = {}
    expected: dict[str, float] = {}
    for seed in range(12):
        drawn = method.initial(layer, torch.zeros(layer.canonical_shape), torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        theirs = peft.get_peft_model(_One(build()), config).base_model.model.layer
        for own, value in drawn.items():
            other = getattr(theirs, OURS_TO_PEFT[method.name][own])["default"]
            largest[own] = max(largest.get(own, 0.0), value.abs().max().item())
            expected[own] = max(expected.get(own, 0.0), other.detach().abs().max().item())
    assert largest == {own: pytest.approx(value, rel=0.25) for own, value in expected.items()}


# Padding and forms

PADDED: list[tuple[Method, str]] = [
    (method, module) for method in (LoHa(rank=2, effective_conv=True), LoKr(rank=2, decompose_both=True)) for module in MODULES
]


def _padded(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    larger = torch.zeros(shape, dtype=value.dtype)
    larger[tuple(slice(0, size) for size in value.shape)] = value
    return larger


@pytest.mark.parametrize("form", ["beside", "weight"])
@pytest.mark.parametrize(("method", "module_name"), PADDED, ids=lambda value: value if isinstance(value, str) else value.name)
def test_padding_the_rank_is_exact_and_stays_zero(method: Method, module_name: str, form: str) -> None:
    build, shape = MODULES[module_name]
    module = build().double().requires_grad_(False)
    layer, x = _described(module), torch.randn(shape, dtype=torch.float64)
    settled = type(method)(**{**method.__dict__, "form": form}).settled(layer, [layer])
    p = _tensors(settled, layer)
    at_capacity = settled.structure().with_rank(32)  # the structure is what runs
    assert at_capacity.beside(layer) == settled.beside(layer)
    specs, wide = settled.parameters(layer), at_capacity.parameters(layer)
    assert specs.keys() == wide.keys()
    for name, spec in specs.items():  # only the axes named grow
        grown = tuple(32 if axis in spec.rank_axes else size for axis, size in enumerate(spec.shape))
        assert wide[name].shape == grown
    padded = {name: _padded(value, wide[name].shape) if name in wide else value for name, value in p.items()}
    for name in specs:
        p[name].requires_grad_()
        padded[name].requires_grad_()
    y, y_padded = run(settled, layer, module, x, p, training=True), run(at_capacity, layer, module, x, padded, training=True)
    torch.testing.assert_close(y_padded, y, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    y_padded.square().sum().backward()
    for name in specs:
        gradient = p[name].grad
        assert gradient is not None
        assert gradient.abs().max() > 0
        torch.testing.assert_close(padded[name].grad, _padded(gradient, wide[name].shape), rtol=1e-11, atol=1e-11)


def test_forms_follow_the_rank_once_and_for_all() -> None:
    layer = _described(nn.Linear(768, 768))  # (24, 32) x (24, 32)
    forms = {rank: LoKr(rank=rank, decompose_both=True).settled(layer, [layer]) for rank in (4, 11, 12, 15, 16)}
    assert {rank: (method.first_form, method.second_form) for rank, method in forms.items()} == {
        4: ("factorised", "factorised"),
        11: ("factorised", "factorised"),
        12: ("full", "factorised"),
        15: ("full", "factorised"),
        16: ("full", "full"),
    }
    assert forms[4].structure() == forms[11].structure()
    assert len({method.structure() for method in forms.values()}) == 3
    assert forms[4].with_rank(512).parameters(layer).keys() == forms[4].parameters(layer).keys()
    assert (forms[15].rank_on(layer), forms[16].rank_on(layer)) == (15, None)  # nothing is padded where both are full
    assert LoKr(rank=4).settled(layer, [layer]).structure() == LoKr(rank=8, alpha=1.0, rank_dropout=0.1).settled(layer, [layer]).structure()


@pytest.mark.parametrize(
    ("method", "module", "beside"),
    [
        (LoHa(rank=8), nn.Linear(768, 768), True),  # 3 x 64 x 1536 of 589,824
        (LoHa(rank=16), nn.Linear(768, 768), False),
        (LoHa(rank=8), nn.Embedding(100, 8), True),
        (LoHa(rank=2), nn.Conv2d(64, 64, 3, groups=2), False),
        (LoHa(rank=2), nn.Conv2d(64, 64, 3), True),
        (LoKr(rank=16), nn.Linear(768, 2048), True),
        (LoKr(rank=16), nn.Conv2d(320, 320, 3), True),
        (LoKr(rank=16), nn.Conv2d(320, 320, 3, groups=2), False),
        (LoKr(rank=512), nn.Conv1d(64, 64, 3), False),  # a full S mixes the kernel in
        (LoKr(rank=1), nn.Conv1d(64, 64, 3), True),
        (LoKr(rank=512, decompose_factor=1), nn.Linear(64, 64), False),  # S is as large as the weight
        (LoKr(rank=4), nn.Embedding(100, 8), True),
    ],
    ids=str,
)
def test_which_way_a_layer_runs(method: Method, module: nn.Module, beside: bool) -> None:
    layer = _described(module)
    settled = method.settled(layer, [layer])
    assert settled.beside(layer) is beside
    assert settled.structure().beside(layer) is beside  # no field that adapters may differ in is asked


# Dropouts


@pytest.mark.parametrize("form", ["beside", "weight"])
@pytest.mark.parametrize("module_name", ["linear", "conv2d"])
@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("name", ["loha", "lokr", "lokr-full"])
def test_rank_dropout_drops_rows_of_the_difference(name: str, rescaled: bool, module_name: str, form: str) -> None:
    build, shape = MODULES[module_name]
    module = build().double().requires_grad_(False)
    layer, x = _described(module), torch.randn(shape, dtype=torch.float64)
    extra = {"rank_dropout_scale": rescaled} if name.startswith("lokr") else {}
    method = type(SETTINGS[name][0])(**{**SETTINGS[name][0].__dict__, "form": form, "rank_dropout": 0.4, **extra}).settled(layer, [layer])
    p = _tensors(method, layer)
    base = layer.base_tensors(module)
    change = method.adapt(base["weight"], p, layer) - base["weight"]
    num_dropped = 0
    for seed in range(5):
        torch.manual_seed(seed)
        kept = (torch.rand(layer.out_features) >= 0.4).double()
        num_dropped += int((kept == 0).sum())
        mask = kept / kept.mean() if rescaled or name == "loha" else kept
        changed = base["weight"] + change * mask.reshape(-1, *(1 for _ in change.shape[1:]))
        torch.manual_seed(seed)
        found = run(method, layer, module, x, p, training=True)
        torch.testing.assert_close(found, layer.call(module, {**base, "weight": changed}, x), rtol=1e-10, atol=1e-10)
    assert num_dropped
    state = torch.get_rng_state()
    torch.testing.assert_close(
        run(method, layer, module, x, p, training=False), layer.call(module, {**base, "weight": base["weight"] + change}, x)
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("form", ["beside", "weight"])
@pytest.mark.parametrize("method", [LoHa(rank=2, module_dropout=0.5), LoKr(rank=1, module_dropout=0.5)], ids=lambda method: method.name)
def test_module_dropout_leaves_the_adapter_out(method: Method, form: str) -> None:
    module = nn.Linear(12, 24).double().requires_grad_(False)
    layer, x = _described(module), torch.randn(3, 12, dtype=torch.float64)
    method = type(method)(**{**method.__dict__, "form": form}).settled(layer, [layer])
    p = _tensors(method, layer)
    plain, whole = module(x), run(method, layer, module, x, p, training=False)
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        found = run(method, layer, module, x, p, training=True)
        is_left_out = torch.equal(found, plain)
        assert is_left_out or torch.allclose(found, whole)
        seen.add(is_left_out)
    assert seen == {True, False}
    off = {**p, "module_dropout": torch.zeros((), dtype=torch.float64)}
    torch.testing.assert_close(run(method, layer, module, x, off, training=True), whole)


def test_dropping_every_row_is_the_base_layer() -> None:
    module = nn.Linear(4, 2).requires_grad_(False)
    layer, x = _described(module), torch.randn(3, 4)
    method = LoHa(rank=1, rank_dropout=0.9).settled(layer, [layer])
    p = {name: value.float() for name, value in _tensors(method, layer).items()}
    p["rank_dropout"] = torch.tensor(1.0)
    assert torch.equal(run(method, layer, module, x, p, training=True), module(x))


def test_settings_that_are_not_used_are_absent() -> None:
    layer = _described(nn.Linear(4, 4))
    assert LoHa().settings(layer) == {"scale": 1.0}
    assert LoKr(rank_dropout_scale=True).settings(layer) == {"scale": 1.0}
    assert LoKr(rank=4, alpha=2, rank_dropout=0.5).settings(layer) == {"scale": 0.5, "rank_dropout": 0.5}
    assert LoKr(rank_dropout=0.5, rank_dropout_scale=True).settings(layer) == {
        "scale": 1.0,
        "rank_dropout": 0.5,
        "rank_dropout_scale": 1.0,
    }


# Embeddings


@pytest.mark.parametrize("method", [LoHa(rank=2), LoKr(rank=1), LoKr(rank=64)], ids=["loha", "lokr", "lokr-full"])
def test_scaled_embeddings_and_their_padding_row(method: Method) -> None:
    module = nn.Embedding(12, 8, padding_idx=3).double().requires_grad_(False)
    module.embed_scale = 2.5
    type_of = type("Scaled", (nn.Embedding,), {"forward": lambda self, ids: nn.Embedding.forward(self, ids) * self.embed_scale})
    module.__class__ = type_of
    layer, ids = _described(module), torch.tensor([[0, 3, 11], [5, 3, 7]])
    settled = method.settled(layer, [layer])
    p = {name: value.requires_grad_() for name, value in _tensors(settled, layer).items()}
    names = list(settled.parameters(layer))
    base = layer.base_tensors(module)
    found = run(settled, layer, module, ids, p, training=True)
    expected = layer.call(module, settled.adapt_tensors(base, p, layer), ids)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(found)
    ours = torch.autograd.grad((found * direction).sum(), [p[name] for name in names])
    theirs = torch.autograd.grad((expected * direction).sum(), [p[name] for name in names])
    for one, other in zip(ours, theirs):  # torch keeps the padding row of the new table out of the gradient
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("module_name", ["linear", "conv2d", "conv1d"])
@pytest.mark.parametrize(
    "method",
    [LoHa(rank=2, form="beside"), LoHa(rank=2, form="weight"), LoKr(rank=1, form="beside"), LoKr(rank=64), Dense(), BitFit()],
    ids=str,
)
def test_half_precision_base_with_float32_tensors(method: Method, module_name: str, dtype: torch.dtype) -> None:
    build, shape = MODULES[module_name]
    module = build().to(dtype).requires_grad_(False)
    layer, x = _described(module), torch.randn(shape).to(dtype).requires_grad_()
    settled = method.settled(layer, [layer])
    p = {name: (0.3 * value).float() for name, value in _tensors(settled, layer).items()}
    names = list(settled.parameters(layer))
    for name in names:
        p[name].requires_grad_()
    found = run(settled, layer, module, x, p, training=True)
    assert found.dtype == dtype
    found.float().square().sum().backward()
    assert all(p[name].grad is not None and p[name].grad.dtype == torch.float32 for name in names)
    exact = settled.adapt_tensors(
        {name: value.double() for name, value in layer.base_tensors(module).items()},
        {name: value.detach().double() for name, value in p.items()},
        layer,
    )
    expected = layer.call(module.double(), exact, x.detach().double())
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


# Differences


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_norm_tuning_equals_peft() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), OwnRMSNorm(6)).double()
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LNTuningConfig(target_modules=["0", "2"])).double()
    adapters = attach(model, NormTuning(), targets=["0", "2"], dtype=torch.float64)
    tuned = [module for module in theirs.modules() if type(module).__name__ == "LNTuningLayer"]
    differences: dict[str, dict[str, Tensor]] = {}
    for path, layer in zip(("0", "2"), tuned):
        own = layer.ln_tuning_layers["default"]
        change = {name: torch.randn_like(value) for name, value in own.named_parameters()}
        for name, value in own.named_parameters():
            value.data += change[name]
        differences[path] = {f"{name}_difference": value for name, value in change.items()}
    adapters.load_tensors("default", differences)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_dense_equals_modules_to_save() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(4, 4), "head": nn.Linear(4, 3)})
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["layer"], modules_to_save=["head"]))
    head = theirs.base_model.model["head"].modules_to_save["default"]
    adapters = attach(model, Dense(), targets=["head"])
    change = {name: torch.randn_like(value) for name, value in head.named_parameters()}
    for name, value in head.named_parameters():
        value.data += change[name]
    adapters.load_tensors("default", {"head": {f"{name}_difference": value for name, value in change.items()}})
    x = torch.randn(2, 4)
    torch.testing.assert_close(model["head"](x), head(x))


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.GroupNorm(2, 4), Affine(4)], ids=lambda module: type(module).__name__)
def test_the_sum_of_differences_is_one(module: nn.Module) -> None:
    layer = _described(module.double())
    one, other = _tensors(Dense(), layer), _tensors(Dense(), layer)
    one["scale"] = torch.tensor(0.5, dtype=torch.float64)
    found = Dense.concatenated([Dense()] * 3, [one, {}, other], [2.0, 0.0, -3.0], layer)
    assert found is not None
    method, tensors = found
    assert tensors.keys() == method.parameters(layer).keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value.double(), one[name] - 3 * other[name])


def test_what_they_refuse() -> None:
    no_bias, norm, table = (_described(module) for module in (nn.Linear(2, 2, bias=False), nn.LayerNorm(2), nn.Embedding(2, 2)))
    assert BitFit().check(_described(nn.Linear(2, 2))) is None
    assert "no bias" in str(BitFit().check(no_bias))
    assert "kind embedding" in str(BitFit().check(table))
    assert NormTuning().check(norm) is None
    assert "kind linear" in str(NormTuning().check(no_bias))
    assert all("kind norm" in str(method.check(norm)) for method in (LoHa(), LoKr()))
    assert "kind module" in str(LoHa().check(_described(Affine(2))))
    with pytest.raises(TargetError) as raised:
        attach(nn.Sequential(nn.Linear(2, 2, bias=False)), BitFit(), targets=["0"])
    assert raised.value.code == "unsupported-layer"


@pytest.mark.parametrize("kind", [LoHa, LoKr])
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": float("nan")}, "alpha"),
        ({"rank_dropout": 1.0}, "probability"),
        ({"module_dropout": -1}, "probability"),
        ({"init": "zeros"}, "init"),
        ({"form": "besides"}, "form"),
        ({"first_form": "half"}, "first_form"),
        ({"second_form": "half"}, "second_form"),
        ({"decompose_factor": 0}, "whole-number"),
        ({"decompose_factor": True}, "whole-number"),
    ],
    ids=str,
)
def test_bad_settings(kind: type[Method], settings: dict[str, object], code: str) -> None:
    if kind is LoHa and not settings.keys() <= set(LoHa.__dataclass_fields__):
        return
    with pytest.raises(OnegraphError) as raised:
        kind(**settings)  # type: ignore[arg-type]
    assert raised.value.code == code
    assert repr(next(iter(settings.values()))) in str(raised.value)


# Graphs


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.conv = nn.Conv1d(12, 6, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.conv(self.up(self.norm(self.table(ids))).transpose(1, 2))
        return found


PRODUCTS = ["table", "up", "conv"]


@pytest.mark.parametrize(
    ("one", "other", "targets"),
    [
        (LoHa(rank=2), LoHa(rank=1, alpha=3.0), PRODUCTS),
        (LoHa(rank=2, form="weight"), LoHa(rank=1, form="weight"), PRODUCTS),
        (LoKr(rank=1, second_form="factorised"), LoKr(rank=2, alpha=1.0, second_form="factorised"), PRODUCTS),
        (LoKr(rank=8), LoKr(rank=16, init="lycoris"), PRODUCTS),
        (Dense(), Dense(), [*PRODUCTS, "norm"]),
        (BitFit(), BitFit(), ["up", "conv", "norm"]),
        (NormTuning(), NormTuning(), ["norm"]),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else None,
)
def test_one_graph_for_all_adapters(one: Method, other: Method, targets: list[str]) -> None:
    torch._dynamo.reset()
    model = _Model()
    plain = copy.deepcopy(model)
    adapters = attach(model, one, targets=targets, name="one", capacity=4)
    adapters.add("other", other)
    for name in adapters.names:
        adapters.load_tensors(
            name, {path: {key: torch.randn_like(value) for key, value in own.items()} for path, own in adapters.tensors(name).items()}
        )
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ids = torch.randint(0, 12, (2, 5))
    outputs = []
    for name in ("one", "other", None, "one"):
        adapters.use(name)
        outputs.append(compiled(ids))
        torch.testing.assert_close(outputs[-1], model(ids))
        if name is not None:
            outputs[-1].sum().backward()
            assert all(parameter.grad is not None for parameter in adapters.parameters(name).values())
    assert counter.frame_count == 1
    assert torch.equal(outputs[2], plain(ids))
    torch.testing.assert_close(outputs[0], outputs[3])
    assert not torch.allclose(outputs[0], outputs[1])


class _Shifted(nn.Module):
    """No kind of layer, but it has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


def test_dense_on_a_module_of_no_kind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Shifted())
    x = torch.randn(2, 4)
    before = model(x)
    adapters = attach(model, Dense(), targets=["1"])
    assert torch.equal(model(x), before)
    weight, shift = torch.randn(4), torch.randn(2, 4)
    adapters.load_tensors("default", {"1": {"weight_difference": weight, "shift_difference": shift}})
    base = adapters.layers["1"].base_layer
    torch.testing.assert_close(model(x), model[0](x) * (base.weight + weight) + base.shift + shift)


def test_describe_still_leaves_other_modules_alone() -> None:
    assert describe(Affine(4)) is None
