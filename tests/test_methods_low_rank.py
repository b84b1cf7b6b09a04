"""DoRA, AdaLoRA, VeRA and VB-LoRA: what the contract tests don't show, and PEFT beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, Case
from onegraph.adapters.run import run, run_rows
from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers import Layer, describe
from onegraph.methods import AdaLoRA, DoRA, LoRA, Method, VBLoRA, VeRA
from onegraph.methods.dora import weight_norm

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(12, 8), lambda: torch.randn(3, 5, 12)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1), lambda: torch.randn(3, 4, 5, 4)),
    "embedding": (lambda: nn.Embedding(9, 6), lambda: torch.randint(0, 9, (3, 4))),
}
MINE: dict[str, tuple[Method, str]] = {
    "dora-linear": (DoRA(rank=3, alpha=6), "linear"),
    "dora-conv": (DoRA(rank=3, alpha=6), "conv"),
    "dora-embedding": (DoRA(rank=3, alpha=6), "embedding"),
    "adalora-linear": (AdaLoRA(rank=3, alpha=6), "linear"),
    "adalora-conv": (AdaLoRA(rank=3, alpha=6), "conv"),
    "vera-linear": (VeRA(rank=5), "linear"),
    "vblora-linear": (VBLoRA(rank=3, num_vectors=6, vector_length=4), "linear"),
}
every_method = pytest.mark.parametrize(("method", "kind"), MINE.values(), ids=MINE.keys())


def described(module: nn.Module) -> Layer:
    layer = describe(module)
    assert layer is not None
    return layer


def drawn(method: Method, layer: Layer, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    specs = {**method.parameters(layer), **method.shared_parameters()}
    p = {name: torch.randn(spec.shape, dtype=dtype).requires_grad_(spec.trained) for name, spec in specs.items()}
    return p | {name: torch.tensor(value, dtype=dtype) for name, value in method.settings(layer).items()}


def built(method: Method, kind: str, dtype: torch.dtype = torch.float64) -> tuple[Method, nn.Module, Layer, Tensor, dict[str, Tensor]]:
    make_module, make_x = MODULES[kind]
    module, x = make_module().to(dtype).requires_grad_(False), make_x()
    layer = described(module)
    method = method.settled(layer, [layer])
    return method, module, layer, x.to(dtype) if x.is_floating_point() else x, drawn(method, layer, dtype)


# In a graph


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@every_method
def test_one_graph_in_training_with_every_dropout(method: Method, kind: str) -> None:
    method = dataclasses.replace(method, **dict.fromkeys(method.random_settings, 0.3))
    method, module, layer, x, p = built(method, kind)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(x: Tensor, p: dict[str, Tensor]) -> Tensor:
        return run(method, layer, module, x, p, training=True)

    for _ in range(3):  # other tensors, the same graph
        names = [name for name, value in p.items() if value.requires_grad]
        torch.manual_seed(3)
        found = step(x, p)
        gradients = torch.autograd.grad(found.square().sum(), [p[name] for name in names])
        torch.manual_seed(3)
        expected = run(method, layer, module, x, p, training=True)
        wanted = torch.autograd.grad(expected.square().sum(), [p[name] for name in names])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for gradient, want in zip(gradients, wanted):
            torch.testing.assert_close(gradient, want, rtol=1e-11, atol=1e-11)
        p = drawn(method, layer) | {name: torch.tensor(0.6, dtype=torch.float64) for name in method.settings(layer)}
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh_dynamo")
@every_method
def test_one_graph_of_joint_kernels_with_a_row_each(method: Method, kind: str) -> None:
    method, module, layer, x, _ = built(method, kind)
    rows = [drawn(method, layer) for _ in range(len(x))]
    stacked = {name: torch.stack([row[name].detach() for row in rows]).requires_grad_() for name in rows[0]}

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor, stacked: dict[str, Tensor]) -> Tensor:
        return run_rows([(method, stacked)], layer, module, x, training=True)

    expected = torch.cat([run(method, layer, module, x[i : i + 1], row, training=False) for i, row in enumerate(rows)])
    found = step(x, stacked)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    trained = [name for name, value in rows[0].items() if value.requires_grad]
    gradients = torch.autograd.grad(found.square().sum(), [stacked[name] for name in trained])
    wanted = torch.autograd.grad(expected.square().sum(), [row[name] for name in trained for row in rows])
    for i in range(len(trained)):
        torch.testing.assert_close(gradients[i], torch.stack(wanted[i * len(rows) : (i + 1) * len(rows)]), rtol=1e-10, atol=1e-10)
    assert counters["stats"]["unique_graphs"] == 1


# Padding


@every_method
def test_padding_is_exact_and_gets_no_gradient(method: Method, kind: str) -> None:
    method, module, layer, x, p = built(method, kind)
    larger = method.with_rank(7)
    padded = {**p}
    for name, spec in {**larger.parameters(layer), **larger.shared_parameters()}.items():
        wide = torch.zeros(spec.shape, dtype=torch.float64)
        wide[tuple(slice(size) for size in p[name].shape)] = p[name].detach()
        padded[name] = wide.requires_grad_(spec.trained)
    found = run(larger, layer, module, x, padded, training=True)
    torch.testing.assert_close(found, run(method, layer, module, x, p, training=True), rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    for name, value in padded.items():
        if value.requires_grad:
            beyond = value.grad.clone()
            beyond[tuple(slice(size) for size in p[name].shape)] = 0
            assert not beyond.any(), name
            assert value.grad.any(), name


# Off


@every_method
def test_without_strength_it_is_the_base_layer_whatever_was_trained(method: Method, kind: str) -> None:
    method, module, layer, x, p = built(method, kind, torch.float32)
    off = {**p, "scale": torch.zeros(())}
    assert torch.equal(run(method, layer, module, x, off, training=True), module(x))
    assert not torch.equal(run(method, layer, module, x, p, training=True), module(x))
    adapted = method.adapt_tensors(layer.base_tensors(module), off, layer)
    assert torch.equal(adapted["weight"], layer.base_tensors(module)["weight"])


@pytest.mark.parametrize("kind", MODULES)
def test_dora_without_its_magnitude_is_lora(kind: str) -> None:
    method, module, layer, x, p = built(DoRA(rank=3, alpha=6), kind)
    off = {**p, "enabled": torch.zeros((), dtype=torch.float64)}
    expected = run(LoRA(rank=3, alpha=6), layer, module, x, {name: p[name] for name in ("down", "up", "scale")}, training=False)
    torch.testing.assert_close(run(method, layer, module, x, off, training=True), expected, rtol=1e-12, atol=1e-12)


# Precision


class Made(TorchDispatchMode):
    """Every tensor that an operation makes: operation, dtype, shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.seen.append((func.overloadpacket.__name__, value.dtype, tuple(value.shape)))
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@every_method
def test_half_precision_base_with_a_float32_adapter(method: Method, kind: str, autocast: bool, dtype: torch.dtype) -> None:
    make_module, make_x = {
        "linear": (lambda: nn.Linear(32, 24), lambda: torch.randn(8, 64, 32)),
        "conv": (lambda: nn.Conv2d(8, 12, 3, padding=1), lambda: torch.randn(16, 8, 8, 8)),
        "embedding": (lambda: nn.Embedding(64, 24), lambda: torch.randint(0, 64, (8, 64))),
    }[kind]
    module, x = make_module().to(dtype).requires_grad_(False), make_x()
    layer = described(module)
    method = method.settled(layer, [layer])
    if x.is_floating_point():
        x = x.to(dtype).requires_grad_()
    p = {name: (value.detach() * 0.1).requires_grad_(value.requires_grad) for name, value in drawn(method, layer, torch.float32).items()}
    p |= {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    base = layer.base_tensors(module)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        y = module(x)
        with Made() as forward:
            found = method.after(x, y, p, layer, training=True, base=base)
    assert found.dtype == y.dtype == dtype
    limit = min(y.numel(), x.numel()) if x.is_floating_point() else y.numel()
    assert base["weight"].numel() < limit
    full = [entry for entry in forward.seen if entry[1] == torch.float32 and np.prod(entry[2]) >= limit]
    assert not full, f"float32 tensors as large as an activation: {full}"
    found.float().square().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in p.values() if value.requires_grad)
    exact = method.adapt(base["weight"].double(), {name: value.detach().double() for name, value in p.items()}, layer)
    expected = layer.call(module.double(), {"weight": exact}, x.detach().double() if x.is_floating_point() else x)
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


# DoRA


def test_the_gradient_is_not_the_derivative_of_a_moving_norm() -> None:
    """The control of the gradient test: with the norm moving, the reference's derivative is another number."""
    case = CASES["dora-on-linear"]
    module, layer, x, p = case.build()
    up = p["up"].requires_grad_()
    found = case.run(module, layer, x, p)
    weights, direction = torch.randn_like(found), torch.randn_like(up)
    (gradient,) = torch.autograd.grad(found, up, weights)
    numbers = {name: value.detach().numpy() for name, value in p.items()}

    def along(distance: float, constants: Mapping[str, np.ndarray]) -> float:
        moved = {**numbers, "up": (up + distance * direction).detach().numpy(), **constants}
        return float((case.method_case.reference(module, x.numpy(), moved) * weights.numpy()).sum())

    assert case.method_case.held_constant is not None
    held = case.method_case.held_constant(module, numbers)
    fixed, moving = ((along(1e-5, constants) - along(-1e-5, constants)) / 2e-5 for constants in (held, {}))
    assert float((gradient * direction).sum()) == pytest.approx(fixed, rel=1e-7)
    assert moving != pytest.approx(fixed, rel=1e-3)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_the_norm_is_precise_without_the_product_of_the_factors(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    method, module, layer, x, p = built(DoRA(rank=2, alpha=3), kind, torch.float32)
    module = module.to(dtype)
    weight = layer.base_tensors(module)["weight"]
    exact = weight.double() + layer.compose(p["down"].double(), p["up"].double() * p["scale"].double())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        norm = weight_norm(weight, p)
        with Made() as forward:
            method.after(
                x.to(dtype) if x.is_floating_point() else x,
                module(x.to(dtype) if x.is_floating_point() else x),
                p,
                layer,
                training=True,
                base=layer.base_tensors(module),
            )
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact.flatten(1).norm(dim=1), rtol=2e-6, atol=0)
    assert not norm.requires_grad
    products = [entry for entry in forward.seen if entry[0] in ("mm", "addmm", "bmm", "matmul") and entry[2][-1] == weight[0].numel()]
    assert not products, f"the product of the factors: {products}"
    with Made() as formed:
        method.adapt(weight, p, layer)
    assert any(entry[0] in ("mm", "addmm") and entry[2][-1] == weight[0].numel() for entry in formed.seen)  # what the watch would see


@pytest.mark.parametrize("kind", MODULES)
def test_dora_is_peft_s(kind: str) -> None:
    module, x = MODULES[kind][0](), MODULES[kind][1]()
    layer = described(module)
    model = nn.Sequential(module)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=3, lora_alpha=6, use_dora=True))
    theirs = wrapped.base_model.model[0]
    method = DoRA(rank=3, alpha=6)
    start = method.initial(layer, layer.base_tensors(theirs.base_layer)["weight"], None)
    magnitude = theirs.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(start["magnitude"], magnitude.detach().flatten(), rtol=1e-6, atol=0)
    if kind == "embedding":
        factors = (theirs.lora_embedding_A["default"], theirs.lora_embedding_B["default"])
    else:
        factors = (theirs.lora_A["default"].weight, theirs.lora_B["default"].weight)
    with torch.no_grad():
        for tensor in (*factors, magnitude):
            tensor.copy_(torch.randn_like(tensor))
    p = {name: tensor.detach().clone().requires_grad_() for name, tensor in zip(("down", "up"), factors)}
    p["magnitude"] = magnitude.detach().flatten().clone().requires_grad_()
    settings = {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    found = run(method, layer, theirs.base_layer, x, {**p, **settings}, training=True)
    expected = theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad(found, list(p.values()), weights)
    wanted = torch.autograd.grad(expected, [*factors, magnitude], weights)
    for gradient, want in zip(gradients, wanted):
        torch.testing.assert_close(gradient, want.reshape(gradient.shape), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("setting", ["dropout", "input_dropout", "rank_dropout"])
def test_dora_drops_only_on_the_low_rank_path(kind: str, setting: str) -> None:
    method, module, layer, x, p = built(DoRA(rank=3, alpha=6, **{setting: 0.4}), kind)
    plain = {name: value.detach() for name, value in p.items() if name != setting}
    gain = plain["magnitude"] / weight_norm(layer.base_tensors(module)["weight"], plain)
    lora = {"down": p["down"].detach(), "up": p["up"].detach(), "scale": p["scale"], setting: p[setting]}
    base = layer.call(module, {"weight": layer.base_tensors(module)["weight"], "bias": torch.zeros_like(module.bias)}, x)
    torch.manual_seed(5)
    change = LoRA(rank=3).after(x, torch.zeros_like(base), lora, layer, training=True)
    torch.manual_seed(5)
    found = run(method, layer, module, x, p, training=True)
    expected = layer.per_channel(gain) * (base + change) + layer.per_channel(module.bias)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-11, atol=1e-11)
    torch.manual_seed(6)
    assert not torch.equal(run(method, layer, module, x, p, training=True), found)


def test_dora_left_out_for_a_batch_is_the_base_layer() -> None:
    method, module, layer, x, p = built(DoRA(rank=3, module_dropout=0.5), "linear")
    outputs = [run(method, layer, module, x, p, training=True) for _ in range(20)]
    whole = run(method, layer, module, x, p, training=False)
    left_out = [torch.equal(output, module(x)) for output in outputs]
    assert any(left_out)
    assert not all(left_out)
    assert all(torch.equal(output, whole) for output, out in zip(outputs, left_out) if not out)


def test_dora_on_rows_of_zeros_has_no_nan() -> None:
    """A layer whose output is 0 at the start, as the last ones of a ControlNet: PEFT gives 0 / 0."""
    module = nn.Linear(5, 4)
    nn.init.zeros_(module.weight)
    module.requires_grad_(False)
    layer = described(module)
    method = DoRA(rank=2)
    p = {name: value.requires_grad_() for name, value in method.initial(layer, module.weight, None).items()}
    p |= {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    x = torch.randn(3, 5)
    y = run(method, layer, module, x, p, training=True)
    assert torch.equal(y, module(x))
    y.square().sum().backward()
    assert all(value.grad.isfinite().all() for value in p.values() if value.requires_grad)
    assert p["up"].grad.any()


def test_dora_keeps_small_changes_of_the_magnitude_in_bfloat16() -> None:
    """A gain of 1.0035 is 1 in bfloat16; the output must still change by as much as its own rounding allows."""
    module = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False)
    layer = described(module)
    method = DoRA(rank=2)
    p = method.initial(layer, module.weight, None)
    p["magnitude"] = p["magnitude"] * 1.0035
    p |= {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    x = torch.randn(256, 64).bfloat16()
    y = module(x)
    exact = (y.double() * 1.0035).bfloat16()
    assert (run(method, layer, module, x, p, training=False) == exact).double().mean() > 0.97
    assert (y * torch.tensor(1.0035).bfloat16() == exact).double().mean() < 0.5


def test_dora_refuses_groups() -> None:
    reason = DoRA(rank=4).check(described(nn.Conv2d(4, 4, 3, groups=2)))
    assert reason is not None
    assert "2 groups" in reason
    assert AdaLoRA(rank=4).check(described(nn.Conv2d(4, 4, 3, groups=2))) is not None


# AdaLoRA


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("alpha", [8.0, 0.0])
def test_adalora_is_peft_s(kind: str, alpha: float) -> None:
    module, x = MODULES[kind][0](), MODULES[kind][1]()
    layer = described(module)
    config = peft.AdaLoraConfig(target_modules=["0"], init_r=3, lora_alpha=alpha, total_step=10)
    theirs = peft.get_peft_model(nn.Sequential(module), config).base_model.model[0]
    factors = {name: getattr(theirs, f"lora_{letter}")["default"] for name, letter in (("down", "A"), ("up", "B"), ("singular", "E"))}
    with torch.no_grad():
        for tensor in factors.values():
            tensor.copy_(torch.randn_like(tensor))
    method = AdaLoRA(rank=3, alpha=alpha)
    p = {name: factors[name].detach().reshape(spec.shape) for name, spec in method.parameters(layer).items()}
    p |= {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    torch.testing.assert_close(run(method, layer, theirs.base_layer, x, p, training=True), theirs(x), rtol=1e-5, atol=1e-5)


def test_adalora_keeps_its_strength_when_triplets_are_cut_away() -> None:
    layer = described(nn.Linear(12, 8))
    whole, cut = AdaLoRA(rank=6, alpha=3.0), AdaLoRA(rank=6, alpha=3.0, kept_rank=2)
    assert cut.scale == whole.scale == 3.0 / (6 + 1e-5)
    assert cut.rank_on(layer) == 2
    assert {name: spec.shape for name, spec in cut.parameters(layer).items()} == {"down": (2, 12), "up": (8, 2), "singular": (2,)}
    assert cut.with_rank(9).parameters(layer)["singular"].shape == (9,)
    assert cut.structure() == whole.structure()


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_adalora_s_weighted_sum_is_one_of_more_triplets(kind: str) -> None:
    method, module, layer, _, p = built(AdaLoRA(rank=3, alpha=6), kind)
    other = AdaLoRA(rank=5, alpha=2)
    tensors = [p, drawn(other, layer), {}]
    weight = layer.base_tensors(module)["weight"]
    found = AdaLoRA.concatenated([method, other, other], tensors, [0.7, -1.5, 0.0], layer)
    assert found is not None
    assert found[0] == AdaLoRA(rank=8)
    changes = [own.adapt(weight, q, layer) - weight for own, q in zip((method, other), tensors)]
    settings = {name: torch.tensor(value, dtype=torch.float64) for name, value in found[0].settings(layer).items()}
    whole = found[0].adapt(weight, {**found[1], **settings}, layer) - weight
    torch.testing.assert_close(whole, 0.7 * changes[0] - 1.5 * changes[1], rtol=1e-11, atol=1e-11)
    nothing = AdaLoRA.concatenated([method], [p], [0.0], layer)
    assert nothing is not None
    assert not nothing[1]["singular"].any()


def test_adalora_starts_small() -> None:
    layer = described(nn.Linear(400, 300))
    start = AdaLoRA(rank=8).initial(layer, torch.zeros(300, 400), torch.Generator().manual_seed(0))
    assert not start["singular"].any()
    for name in ("down", "up"):
        assert start[name].std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(start[name].mean().item()) < 0.002


# VeRA


class TwoSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("key", [0, 17])
def test_vera_is_peft_s_with_its_projections_bit_for_bit(key: int) -> None:
    config = peft.VeraConfig(target_modules=["first", "second"], r=7, projection_prng_key=key, d_initial=0.3)
    wrapped = peft.get_peft_model(TwoSizes(), config)
    theirs = wrapped.base_model
    names = ("first", "second")
    layers = {name: described(getattr(theirs.model, name).base_layer) for name in names}
    method = VeRA(rank=7, projection_key=key, d_initial=0.3)
    for name in names:
        settled = method.settled(layers[name], list(layers.values()))
        assert (settled.in_width, settled.out_width) == (10, 10)
        shared = settled.initial_shared(None)
        assert {name: tuple(value.shape) for name, value in shared.items()} == {
            name: spec.shape for name, spec in settled.shared_parameters().items()
        }
        assert torch.equal(shared["projection_down"], theirs.vera_A["default"])
        assert torch.equal(shared["projection_up"], theirs.vera_B["default"])
        their = getattr(theirs.model, name)
        start = settled.initial(layers[name], torch.zeros(0), None)
        assert torch.equal(start["gain_down"], their.vera_lambda_d["default"])
        assert torch.equal(start["gain_up"], their.vera_lambda_b["default"])
        with torch.no_grad():
            their.vera_lambda_d["default"].normal_()
            their.vera_lambda_b["default"].normal_()
        p = {"gain_down": their.vera_lambda_d["default"], "gain_up": their.vera_lambda_b["default"], "scale": torch.tensor(1.0), **shared}
        x = torch.randn(3, layers[name].in_features)
        found = run(settled, layers[name], their.base_layer, x, p, training=True)
        torch.testing.assert_close(found, their(x), rtol=1e-5, atol=1e-5)
    other = dataclasses.replace(settled, projection_key=key + 1).initial_shared(None)
    assert not torch.equal(other["projection_down"], theirs.vera_A["default"])


def test_vera_takes_the_generator_s_numbers_from_nobody() -> None:
    generator, state = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1).get_state()
    before = torch.get_rng_state()
    VeRA(rank=2, in_width=3, out_width=4).initial_shared(generator)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_vera_needs_widths_and_layers_that_fit() -> None:
    with pytest.raises(ConfigurationError) as raised:
        VeRA().shared_parameters()
    assert raised.value.code == "unsettled-width"
    narrow = VeRA(in_width=4, out_width=9)
    assert narrow.check(described(nn.Linear(5, 7))) == "the shared projections have in_width=4, the layer needs 5"
    assert narrow.check(described(nn.Linear(4, 9))) is None
    layer = described(nn.Linear(4, 9))
    assert narrow.settled(layer, [layer]) == narrow


def test_vera_takes_no_gradient_product_of_the_projection_that_its_input_meets() -> None:
    method, module, layer, x, p = built(VeRA(rank=5), "linear")
    y = run(method, layer, module, x, p, training=True)
    with Made() as backward:
        y.square().sum().backward()
    shapes = [entry[2] for entry in backward.seen if entry[0] in ("mm", "addmm", "bmm")]
    assert not {(5, 12), (12, 5)} & set(shapes)
    assert {(8, 5), (5, 8)} & set(shapes)  # of the other one: it carries a gain


# VB-LoRA


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_vblora_is_peft_s(topk: int) -> None:
    config = peft.VBLoRAConfig(target_modules=["0"], r=3, num_vectors=6, vector_length=4, topk=topk)
    wrapped = peft.get_peft_model(nn.Sequential(nn.Linear(12, 8)), config)
    theirs = wrapped.base_model.model[0]
    layer = described(theirs.base_layer)
    method = VBLoRA(rank=3, num_vectors=6, vector_length=4, topk=topk)
    tensors = {
        "logits_down": theirs.vblora_logits_A["default"],
        "logits_up": theirs.vblora_logits_B["default"],
        "vector_bank": wrapped.base_model.vblora_vector_bank["default"],
    }
    specs = {**method.parameters(layer), **method.shared_parameters()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {name: spec.shape for name, spec in specs.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.randn_like(tensor))
    p = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    x = torch.randn(3, 5, 12)
    settings = {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    found = run(method, layer, theirs.base_layer, x, {**p, **settings}, training=True)
    expected = theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad(found, list(p.values()), weights)
    wanted = torch.autograd.grad(expected, list(tensors.values()), weights)
    for gradient, want in zip(gradients, wanted):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-4)


def test_vblora_runs_logits_that_a_file_left_only_the_largest_of() -> None:
    """PEFT can write the k largest alone; the others come back as minus infinity."""
    method, module, layer, x, p = built(VBLoRA(rank=3, num_vectors=6, vector_length=4), "linear")
    cut = dict(p)
    for name in ("logits_down", "logits_up"):
        logits, places = p[name].detach().topk(2)
        cut[name] = torch.full_like(p[name], -torch.inf).scatter(-1, places, logits.log_softmax(-1)).requires_grad_()
    found = run(method, layer, module, x, cut, training=True)
    torch.testing.assert_close(found, run(method, layer, module, x, p, training=True), rtol=1e-11, atol=1e-11)
    found.square().sum().backward()
    assert cut["logits_down"].grad.isfinite().all()


def test_vblora_starts_as_peft_draws_it() -> None:
    method = VBLoRA(rank=4, num_vectors=300, vector_length=100, bank_bound=0.05, logits_deviation=0.2)
    layer = described(nn.Linear(200, 300))
    start = method.initial(layer, torch.zeros(0), torch.Generator().manual_seed(0))
    assert start["logits_down"].std().item() == pytest.approx(0.2, rel=0.05)
    bank = method.initial_shared(torch.Generator().manual_seed(0))["vector_bank"]
    assert bank.abs().max().item() == pytest.approx(0.05, rel=0.01)
    assert bank.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert torch.equal(bank, method.initial_shared(torch.Generator().manual_seed(0))["vector_bank"])


def test_vblora_needs_whole_numbers_of_vectors() -> None:
    method = VBLoRA(vector_length=4)
    assert method.check(described(nn.Linear(12, 8))) is None
    assert method.check(described(nn.Linear(12, 7))) == "its 7 output features are no multiple of vector_length=4"
    assert method.check(described(nn.Linear(10, 8))) == "its 10 input features are no multiple of vector_length=4"
    assert VBLoRA(rank=2).structure() == VBLoRA(rank=3).structure()
    assert VBLoRA(topk=2).structure() != VBLoRA(topk=3).structure()


# Bad settings


@pytest.mark.parametrize(
    ("kind", "settings", "codes"),
    [
        (DoRA, {"rank": 0}, ["rank"]),
        (DoRA, {"alpha": float("nan"), "input_dropout": 1.0}, ["alpha", "probability"]),
        (DoRA, {"init": "kaimng"}, ["init"]),
        (AdaLoRA, {"rank": True}, ["rank"]),
        (AdaLoRA, {"alpha": float("inf"), "input_dropout": -1.0}, ["alpha", "probability"]),
        (AdaLoRA, {"rank": 4, "kept_rank": 5}, ["kept-rank"]),
        (AdaLoRA, {"rank": 4, "kept_rank": 0}, ["kept-rank"]),
        (VeRA, {"rank": 1.5, "d_initial": float("nan"), "projection_key": -1}, ["rank", "finite-number", "whole-number"]),
        (VeRA, {"in_width": 0}, ["whole-number"]),
        (VeRA, {"input_dropout": 1.0}, ["probability"]),
        (VBLoRA, {"topk": 0}, ["whole-number"]),
        (VBLoRA, {"topk": 5, "num_vectors": 4}, ["topk"]),
        (VBLoRA, {"rank": 0, "vector_length": -1, "bank_bound": float("nan")}, ["rank", "whole-number", "finite-number"]),
    ],
    ids=str,
)
def test_bad_settings(kind: type[Method], settings: dict[str, Any], codes: list[str]) -> None:
    with pytest.raises(OnegraphError) as raised:
        kind(**settings)
    problems = getattr(raised.value, "problems", ()) or (raised.value,)
    assert [problem.code for problem in problems] == codes
    assert all(f"{name}={value!r}" in str(raised.value) for name, value in settings.items() if codes != ["topk"] or name == "topk")


def test_cases_cover_what_each_method_takes() -> None:
    def layers(method: str) -> set[str]:
        return {case.layer_case.module().__class__.__name__ for name, case in CASES.items() if name.startswith(f"{method}-on-")}

    assert layers("dora") == {"Linear", "Conv1D", "Embedding", "Conv1d", "Conv2d", "Conv3d"}
    assert layers("adalora") == {"Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d"}
    assert layers("vera") == {"Linear", "Conv1D"}
    assert layers("vblora-topk") == {"Linear", "Conv1D"}
    assert isinstance(CASES["vblora-on-linear-even"], Case)
