"""Every method on every layer: equal to its reference, differentiable, the same as a weight and beside one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, Case
from cases import METHODS as METHOD_CASES
from onegraph.adapters.run import run, run_rows
from onegraph.errors import ConfigurationError, OnegraphError, TargetError
from onegraph.layers import describe
from onegraph.methods import METHODS, LoRA
from onegraph.methods.dropouts import dropped
from onegraph.methods.inits import kaiming

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_equals_the_reference(case: Case) -> None:
    module, layer, x, p = case.build()
    expected = case.method_case.reference(module, x.numpy(), {name: value.numpy() for name, value in p.items()})
    np.testing.assert_allclose(case.run(module, layer, x, p).numpy(), expected, rtol=1e-12, atol=1e-12)


@every_case
def test_gradients(case: Case) -> None:
    module, layer, x, p = case.build()
    specs = {**case.method.parameters(layer), **case.method.shared_parameters()}
    trained = [name for name, spec in specs.items() if spec.trained]
    values = [p[name].requires_grad_() for name in trained]
    if x.is_floating_point():
        x.requires_grad_()
    # padding_idx keeps a row of the table out of the gradient on purpose: not a derivative, so another index is looked up.
    if getattr(module, "padding_idx", None) is not None:
        x = torch.where(x == module.padding_idx, 0, x)
    inputs = [x, *values] if x.is_floating_point() else values

    def function(*tensors: Tensor) -> Tensor:
        given = dict(zip(trained, tensors[-len(trained) :]))
        return case.run(module, layer, tensors[0] if x.is_floating_point() else x, {**p, **given})

    if case.method_case.held_constant is None:
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        return
    # The gradients are those of the reference, by central differences, with what the method holds constant fixed.
    numbers = {name: value.detach().numpy() for name, value in p.items()}
    constants = case.method_case.held_constant(module, numbers)
    found = function(*inputs)
    output_weights, directions = torch.randn_like(found), [torch.randn_like(tensor) for tensor in inputs]
    gradients = torch.autograd.grad(found, inputs, output_weights)

    def reference_along(distance: float) -> float:
        moved = [(tensor + distance * direction).detach().numpy() for tensor, direction in zip(inputs, directions)]
        all_p = {**numbers, **dict(zip(trained, moved[-len(trained) :])), **constants}
        y = case.method_case.reference(module, moved[0] if x.is_floating_point() else x.numpy(), all_p)
        return float((y * output_weights.numpy()).sum())

    expected = (reference_along(1e-5) - reference_along(-1e-5)) / 2e-5
    along = sum(float((gradient * direction).sum()) for gradient, direction in zip(gradients, directions))
    assert along == pytest.approx(expected, rel=1e-7, abs=1e-6)


@every_case
def test_weight_form_agrees(case: Case) -> None:
    module, layer, x, p = case.build()
    base = layer.base_tensors(module)
    if layer.groups > 1 and isinstance(case.method, LoRA):
        with pytest.raises(TargetError) as raised:
            case.method.adapt_tensors(base, p, layer)
        assert raised.value.code == "grouped-weight"
        return
    adapted = case.method.adapt_tensors(base, p, layer)
    assert {name: value.shape for name, value in adapted.items() if name in base} == {name: value.shape for name, value in base.items()}
    torch.testing.assert_close(layer.call(module, adapted, x), case.run(module, layer, x, p), rtol=1e-11, atol=1e-11)


@every_case
def test_identity_and_start_change_nothing_at_all(case: Case) -> None:
    module, layer, x, p = case.build()
    method = case.method
    identity = {name: value.double() for name, value in method.identity(layer).items()}
    off = {name: torch.zeros((), dtype=torch.float64) for name in method.settings(layer)}
    shared = {name: p[name] for name in method.shared_parameters()}
    assert torch.equal(case.run(module, layer, x, {**shared, **identity, **off}), module(x))
    if not case.method_case.starts_elsewhere:
        generator = torch.Generator().manual_seed(1)
        start = {name: value.double() for name, value in method.initial(layer, case.weight(module, layer), generator).items()}
        assert start.keys() == method.parameters(layer).keys()
        torch.testing.assert_close(case.run(module, layer, x, {**p, **start}), module(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(case.run(module, layer, x, p), module(x))  # random tensors do change it


@every_case
def test_works_row_by_row(case: Case) -> None:
    """What a batch with an adapter a row is made of: each row with tensors of its own."""
    module, layer, x, _ = case.build()
    if x.dim() < 2:
        return
    rows = [case.build()[3] for _ in range(len(x))]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = run_rows([(case.method, stacked)], layer, module, x, training=False)
    expected = torch.cat([case.run(module, layer, x[i : i + 1], row) for i, row in enumerate(rows)])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@every_case
def test_an_empty_batch(case: Case) -> None:
    """As experts get one that no token was sent to."""
    module, layer, x, p = case.build()
    if x.dim() < 2:
        return
    parameters = [value.requires_grad_() for value in p.values()]
    y = case.run(module, layer, x[:0], p)
    assert y.shape == module(x[:0]).shape
    gradients = torch.autograd.grad(y.sum(), parameters, allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@every_case
def test_a_seed_decides_the_start(case: Case) -> None:
    module, layer, _, _ = case.build()
    one, same, other = (case.method.initial(layer, case.weight(module, layer), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert case.method_case.starts_at_fixed_values or any(not torch.equal(one[name], other[name]) for name in one)
    for name, spec in case.method.parameters(layer).items():
        assert tuple(one[name].shape) == spec.shape


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())
def test_structure_forgets_what_may_differ(kind: type) -> None:
    method = kind()
    assert method.structure() == method.structure().structure()
    assert hash(method.structure()) == hash(kind().structure())
    assert method.per_adapter <= set(method.__dataclass_fields__)


def test_structures_of_lora() -> None:
    assert LoRA(rank=4, alpha=3, dropout=0.1, init="gaussian", rslora=True).structure() == LoRA(rank=16).structure()
    assert LoRA(bias=True).structure() != LoRA().structure()


def test_kaiming_is_what_torch_draws() -> None:
    expected = torch.empty(7, 5, 3)
    nn.init.kaiming_uniform_(expected, a=5**0.5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(kaiming((7, 5, 3), torch.Generator().manual_seed(3)), expected)


# Dropouts


def _lora_case(kind: str, **settings: float) -> tuple[LoRA, nn.Module, Tensor, dict[str, Tensor]]:
    module, x = {"linear": (nn.Linear(5, 7), torch.randn(3, 4, 5)), "conv": (nn.Conv2d(4, 6, 3), torch.randn(3, 4, 5, 5))}[kind]
    module, x = module.double().requires_grad_(False), x.double()
    method = LoRA(rank=4, alpha=8, **settings)
    layer = describe(module)
    assert layer is not None
    p = {name: torch.randn(spec.shape, dtype=torch.float64) for name, spec in method.parameters(layer).items()}
    return method, module, x, p | {name: torch.tensor(value, dtype=torch.float64) for name, value in method.settings(layer).items()}


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("setting", ["dropout", "input_dropout", "rank_dropout", "module_dropout"])
def test_dropouts_are_masks(kind: str, setting: str) -> None:
    method, module, x, p = _lora_case(kind, **{setting: 0.4})
    layer = describe(module)
    assert layer is not None
    rank_last = {"linear": (3, 4, 4), "conv": (3, 4, 3, 3)}[kind]
    per_sample = {"linear": (3, 1, 4), "conv": (3, 4, 1, 1)}[kind]
    shape = {"dropout": rank_last, "input_dropout": tuple(x.shape), "rank_dropout": per_sample, "module_dropout": ()}[setting]
    for seed in range(4):
        torch.manual_seed(seed)
        kept = (torch.rand(shape) >= 0.4).double()
        factor = 1.0 if setting == "module_dropout" else 1 / 0.6
        mask = kept * factor
        h = layer.project(x * mask if setting == "input_dropout" else x, p["down"])
        if setting != "input_dropout":
            h = h * mask
        expected = module(x) + layer.expand(h, p["up"]) * 2
        torch.manual_seed(seed)
        found = method.after(x, module(x), p, layer, training=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("setting", ["dropout", "input_dropout", "rank_dropout", "module_dropout"])
def test_dropouts_only_in_training_and_off_at_zero(setting: str) -> None:
    method, module, x, p = _lora_case("linear", **{setting: 0.4})
    layer = describe(module)
    assert layer is not None
    plain = LoRA(rank=4, alpha=8).after(x, module(x), {name: p[name] for name in ("down", "up", "scale")}, layer, training=True)
    state = torch.get_rng_state()
    torch.testing.assert_close(method.after(x, module(x), p, layer, training=False), plain)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    torch.testing.assert_close(method.after(x, module(x), {**p, setting: torch.zeros(())}, layer, training=True), plain)
    differs = [not torch.equal(method.after(x, module(x), p, layer, training=True), plain) for _ in range(20)]
    assert any(differs)


def test_dropout_keeps_the_mean() -> None:
    values = torch.ones(200_000, dtype=torch.bfloat16)
    found = dropped(values, torch.tensor(0.1), values.shape)
    assert found.dtype == torch.bfloat16
    assert found.float().mean().item() == pytest.approx(1.0, abs=0.01)
    assert (found == 0).float().mean().item() == pytest.approx(0.1, abs=0.005)


def test_settings_that_are_not_used_are_absent() -> None:
    layer = describe(nn.Linear(2, 2))
    table = describe(nn.Embedding(2, 2))
    assert layer is not None
    assert table is not None
    assert LoRA().settings(layer) == {"scale": 1.0}
    assert LoRA(dropout=0.5, rank_dropout=0.25).settings(layer) == {"scale": 1.0, "dropout": 0.5, "rank_dropout": 0.25}
    assert LoRA(input_dropout=0.5).settings(table) == {"scale": 1.0}


# Precision and memory


class _Created(TorchDispatchMode):
    """The dtype and size of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.seen.append((value.dtype, value.numel()))
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", ["linear", "conv", "embedding"])
def test_half_precision_base_with_a_float32_adapter(kind: str, autocast: bool, dtype: torch.dtype) -> None:
    module, x = {
        "linear": (nn.Linear(32, 24), torch.randn(4, 64, 32)),
        "conv": (nn.Conv2d(32, 24, 3, padding=1), torch.randn(2, 32, 8, 8)),
        "embedding": (nn.Embedding(64, 24), torch.randint(0, 64, (4, 64))),
    }[kind]
    module = module.to(dtype).requires_grad_(False)
    layer = describe(module)
    assert layer is not None
    if x.is_floating_point():
        x = x.to(dtype).requires_grad_()
    method = LoRA(rank=4)
    p = {name: torch.randn(spec.shape).mul_(0.1).requires_grad_() for name, spec in method.parameters(layer).items()}
    p["scale"] = torch.tensor(1.0)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        y = module(x)
        with _Created() as forward:
            found = method.after(x, y, p, layer, training=True)
    assert found.dtype == y.dtype == dtype
    found.float().square().sum().backward()
    limit = min(y.numel(), x.numel()) if x.is_floating_point() else y.numel()
    assert all(value.numel() < limit for value in p.values())
    full = [size for kind_, size in forward.seen if kind_ == torch.float32 and size >= limit]
    assert not full, f"float32 tensors as large as an activation: {full}"
    assert p["down"].grad is not None
    assert p["down"].grad.dtype == torch.float32
    exact = method.adapt(layer.canonical(module.weight).double(), {name: value.detach().double() for name, value in p.items()}, layer)
    expected = layer.call(module.double(), {"weight": exact}, x.detach().double() if x.is_floating_point() else x)
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


def test_the_watch_for_float32_copies_sees_one() -> None:
    with _Created() as made:
        nn.functional.linear(torch.randn(64, 32, dtype=torch.bfloat16).float(), torch.randn(4, 32))
    assert (torch.float32, 64 * 32) in made.seen


def test_backward_keeps_only_the_rank_wide_product() -> None:
    layer = describe(nn.Linear(32, 24))
    assert layer is not None
    x = torch.randn(64, 32, requires_grad=True)
    y = torch.randn(64, 24, requires_grad=True)
    p = {"down": torch.randn(4, 32, requires_grad=True), "up": torch.randn(24, 4, requires_grad=True), "scale": torch.tensor(0.5)}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        LoRA(rank=4).after(x, y, p, layer, training=True)
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, p["down"], p["up"], p["scale"])}
    extra = sorted({tuple(t.shape) for t in saved if t.untyped_storage().data_ptr() not in own}, key=len)
    assert all(numel <= 24 * 4 or shape == (64, 4) for shape in extra for numel in [int(np.prod(shape))]), extra
    assert (64, 24) not in extra
    assert (64, 32) not in extra


# Bad settings


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -3}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"rank": True}, "rank"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": float("inf")}, "alpha"),
        ({"dropout": 1.0}, "probability"),
        ({"input_dropout": -0.1}, "probability"),
        ({"rank_dropout": 2}, "probability"),
        ({"module_dropout": float("nan")}, "probability"),
        ({"init": "kaimng"}, "init"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, object], code: str) -> None:
    with pytest.raises(OnegraphError) as raised:
        LoRA(**settings)  # type: ignore[arg-type]
    assert raised.value.code == code
    assert repr(next(iter(settings.values()))) in str(raised.value)


def test_all_bad_settings_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        LoRA(rank=0, alpha=float("nan"), dropout=3)
    assert [problem.code for problem in raised.value.problems] == ["rank", "alpha", "probability"]


ROOMY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(40, 24), lambda: torch.randn(4, 64, 40)),
    "conv": (lambda: nn.Conv2d(20, 24, 1), lambda: torch.randn(4, 20, 8, 8)),
    "embedding": (lambda: nn.Embedding(64, 24), lambda: torch.randint(0, 64, (8, 96))),
    "norm": (lambda: nn.LayerNorm(40), lambda: torch.randn(4, 64, 40)),
}


@pytest.mark.parametrize("kind", ROOMY.keys())
@pytest.mark.parametrize("name", METHOD_CASES.keys())
def test_no_method_makes_a_float32_copy_of_activations(name: str, kind: str) -> None:
    """A bf16 base with an fp32 adapter: the output is bf16, gradients of parameters fp32, and nothing fp32 is as large as an activation."""
    module, x = ROOMY[kind][0]().bfloat16().requires_grad_(False), ROOMY[kind][1]()
    layer = describe(module)
    assert layer is not None
    method = METHOD_CASES[name].method
    if method.check(layer) is not None:
        return
    method = method.settled(layer, [layer])
    if x.is_floating_point():
        x = x.bfloat16().requires_grad_()
    specs = {**method.parameters(layer), **method.shared_parameters()}
    p = {key: METHOD_CASES[name].random(key, spec.shape).float().mul_(0.1).requires_grad_(spec.trained) for key, spec in specs.items()}
    p |= {key: torch.tensor(value) for key, value in method.settings(layer).items()}
    plain = module(x)
    with _Created() as forward:
        found = run(method, layer, module, x, p, training=True)
    assert found.dtype == plain.dtype == torch.bfloat16
    limit = min(plain.numel(), x.numel()) if x.is_floating_point() else plain.numel()
    own = max([*(value.numel() for value in p.values()), module.weight.numel() * 2])
    assert own < limit, "the layer is too small to tell"
    assert not [size for dtype, size in forward.seen if dtype == torch.float32 and size >= limit]
    found.float().square().sum().backward()
    for key, spec in specs.items():
        if spec.trained:
            gradient = p[key].grad
            assert gradient is not None, key
            assert gradient.dtype == torch.float32
            assert bool(torch.isfinite(gradient).all())
