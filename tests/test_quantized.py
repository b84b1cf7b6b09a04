"""Quantised bases: every method beside and by the weight, forward, backward, compiled, merged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onegraph
from cases import METHODS, MethodCase
from onegraph.adapters import Adapters, adapters_of, attach
from onegraph.errors import OnegraphError
from onegraph.layers import QuantizedLinear, describe
from onegraph.methods import DoRA, LoHa, LoRA, MiSS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.library.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FIRST = {type(case.method): case for case in reversed(METHODS.values()) if "linear" in case.method.kinds}
every_method = pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.method.name)
WIDTH, INNER = (
    64,
    128,
)  # multiples of 64: for others bitsandbytes 0.50.2 lays its blocks out in two ways on a CPU, and reads the wrong scales
TOLERANCE = 1e-5
"""The expanded weight gives the same numbers to round-off wherever the library's product rounds no activations."""
ACTIVATIONS = 0.02
"""8-bit inference rounds the input to 127 steps a row: off by about 1 / 254 of its largest value, a hundredth of the output."""


def _eight_bit(sizes: tuple[int, int], **options: Any) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    module: nn.Module = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False, **options).to("cpu")
    return module


def _four_bit(sizes: tuple[int, int], **options: Any) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    module: nn.Module = bitsandbytes.nn.Linear4bit(*sizes, **({"compute_dtype": torch.float32} | options)).to("cpu")
    return module


def _torchao(sizes: tuple[int, int], **options: Any) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    module = nn.Sequential(nn.Linear(*sizes, **options))
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    return module[0]


def _torchao_groups(sizes: tuple[int, int]) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    module = nn.Sequential(nn.Linear(*sizes))
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32)))
    return module[0]


KINDS: dict[str, Callable[[tuple[int, int]], nn.Module]] = {
    "8bit": _eight_bit,
    "8bit-threshold": lambda sizes: _eight_bit(sizes, threshold=2.0),
    "nf4": lambda sizes: _four_bit(sizes, quant_type="nf4", compress_statistics=False),
    "nf4-double": lambda sizes: _four_bit(sizes, quant_type="nf4"),
    "nf4-no-bias": lambda sizes: _four_bit(sizes, quant_type="nf4", bias=False),
    "nf4-dtype-of-input": lambda sizes: _four_bit(sizes, quant_type="nf4", compute_dtype=None),
    "fp4": lambda sizes: _four_bit(sizes, quant_type="fp4"),
    "torchao-int8": _torchao,
    "torchao-int8-groups": _torchao_groups,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
main_kinds = pytest.mark.parametrize("kind", ["8bit", "nf4-double", "torchao-int8"])


class Model(nn.Module):
    """Two quantised layers and something between them."""

    def __init__(self, build: Callable[[tuple[int, int]], nn.Module]) -> None:
        super().__init__()
        self.up = build((WIDTH, INNER))
        self.norm = nn.LayerNorm(INNER)
        self.down = build((INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.norm(self.up(x))))
        return y


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def randomise(adapters: Adapters, name: str = "default") -> None:
    """Tensors that matter, whatever the start."""
    with torch.no_grad():
        for parameter in adapters.parameters(name).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def quantised(kind: str, method: Any) -> tuple[nn.Module, Adapters, Tensor]:
    """A model with an adapter of random tensors, and an input."""
    torch.manual_seed(5)
    model = Model(KINDS[kind])
    adapters = attach(model, method, targets=["up", "down"])
    randomise(adapters)
    return model, adapters, torch.randn(2, 5, WIDTH)


def dense(adapters: Adapters) -> tuple[nn.Module, Adapters]:
    """The same adapter on plain layers with the expanded weights."""
    plain = Model(lambda sizes: nn.Linear(*sizes, bias=adapters.layers["up"].layer.has_bias))
    plain.norm = copy.deepcopy(adapters.model.norm)
    with torch.no_grad():
        for path, layer in adapters.layers.items():
            for name, value in layer.layer.base_tensors(layer.base_layer).items():
                plain.get_parameter(f"{path}.{name}").copy_(value)
    others = attach(plain, next(iter(adapters.methods("default").values())), targets=["up", "down"], overrides=adapters.methods("default"))
    others.load_tensors("default", adapters.tensors("default"))
    return plain, others


def step(model: nn.Module, adapters: Adapters, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the input and of the adapter."""
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.square().mean(), [x, *adapters.parameters().values()]))


def close(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], tolerance: float) -> None:
    """Equal, beside the largest number of each tensor."""
    for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert (one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6)


@every_kind
def test_descriptions(kind: str) -> None:
    module = KINDS[kind]((WIDTH, INNER))
    layer = describe(module)
    assert isinstance(layer, QuantizedLinear)
    assert (layer.kind, layer.in_features, layer.out_features, layer.weight_shape) == ("linear", WIDTH, INNER, (INNER, WIDTH))
    assert layer.has_bias == (module.bias is not None)
    assert layer == describe(KINDS[kind]((WIDTH, INNER)))
    assert hash(layer) == hash(describe(KINDS[kind]((WIDTH, INNER))))
    tensors = layer.base_tensors(module)
    assert layer.tensor_shapes() == {name: tuple(value.shape) for name, value in tensors.items()}
    assert tensors["weight"].dtype == torch.float32
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(layer.call(module, tensors, x), layer.forward(module.train(), x), rtol=1e-5, atol=1e-5)


@every_kind
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_runs_as_the_module_runs(kind: str, training: bool) -> None:
    """Bit for bit the library's numbers; for 4 bits on a CPU in inference without its packing, which rounds the scales."""
    module = KINDS[kind]((WIDTH, INNER)).train(training)
    layer = describe(module)
    assert layer is not None
    x = torch.randn(3, 4, WIDTH).requires_grad_(training or kind[:3] in ("nf4", "fp4"))
    assert torch.equal(layer.forward(module, x), copy.deepcopy(module)(x))


@every_kind
@pytest.mark.parametrize("method", [LoRA(rank=3), DoRA(rank=3)], ids=["lora", "dora"])
def test_every_kind_equals_the_expanded_model(kind: str, method: Any) -> None:
    model, adapters, x = quantised(kind, method)
    plain, others = dense(adapters)
    close(step(model, adapters, x), step(plain, others, x), TOLERANCE)
    model.eval()
    found, expected = step(model, adapters, x), step(plain.eval(), others, x)
    close(found, expected, 5 * ACTIVATIONS if kind.startswith("8bit") else TOLERANCE)
    close((found[0], []), (expected[0], []), ACTIVATIONS if kind.startswith("8bit") else TOLERANCE)


@every_method
@main_kinds
def test_every_method_compiled(kind: str, case: MethodCase) -> None:
    """Equal to the expanded model, forward and backward; on one graph whichever adapter runs."""
    model, adapters, x = quantised(kind, case.method)
    plain, others = dense(adapters)
    expected = step(plain, others, x)
    close(step(model, adapters, x), expected, TOLERANCE)
    adapters.add("other", case.method)
    randomise(adapters, "other")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    adapters.use("other")
    step(compiled, adapters, x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for chosen in (None, "other", "default"):
            adapters.use(chosen)
            compiled(x.clone().requires_grad_())
        close(step(compiled, adapters, x), expected, TOLERANCE)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("8bit", LoHa(rank=3, form="weight")),
        ("8bit", MiSS(rank=8, form="bat")),
        ("8bit-threshold", LoHa(rank=3, form="weight")),
        ("nf4-double", MiSS(rank=8, form="bat")),
        ("torchao-int8", LoHa(rank=3, form="weight")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_by_the_weight_an_adapter_that_is_off_is_the_layer(kind: str, method: Any, training: bool) -> None:
    """Bit for bit, rows without one too; torchao's product with one scale a row differs from that of the expanded weight by round-off."""
    model, adapters, x = quantised(kind, method)
    model.train(training)
    adapters.use(None)
    base = [layer.base_layer for layer in adapters.layers.values()]
    x.requires_grad_(kind.startswith("nf4"))  # without, the library packs 4 bits for its kernel on a CPU in inference
    expected = base[1](functional.gelu(model.norm(base[0](x))))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    # With a threshold, which columns the library rounds depends on every row of the batch: there the other row is without one, too.
    with adapters.rows([None, None if kind == "8bit-threshold" else "default"]):
        rows = model(x)[0]
    for found, wanted in ((model(x), expected), (compiled(x), expected), (rows, expected[0])):
        if kind == "torchao-int8":
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-6)
        else:
            assert torch.equal(found, wanted)
    adapters.use("default")
    assert not torch.allclose(model(x), expected, atol=1e-2)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@main_kinds
def test_one_graph_in_inference_and_rows(kind: str) -> None:
    model, adapters, x = quantised(kind, LoRA(rank=3))
    adapters.add("dora", DoRA(rank=2))
    randomise(adapters, "dora")
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        adapters.use("default")
        compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(x), model(x))
            adapters.use(None)
            torch.testing.assert_close(compiled(x), model(x))
    model.train()
    with adapters.rows(["dora", "default"]):
        found = compiled(x)
        found.sum().backward()
    for i, name in enumerate(["dora", "default"]):
        adapters.use(name)
        torch.testing.assert_close(found[i : i + 1], model(x[i : i + 1]), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_recompiled_fails_here() -> None:
    """The control: the library's own forward, run for the first time inside a graph, changes what that graph is guarded on."""
    module = KINDS["8bit"]((WIDTH, INNER))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(2, WIDTH))
    with pytest.raises(RuntimeError, match="recompile"), torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(2, WIDTH))


def test_gradients_after_an_inference_that_packed_the_weight() -> None:
    """On CPUs with bfloat16 the library packs 4-bit weights in inference; no gradient passes through them from then on."""
    model = Model(KINDS["nf4-double"]).eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        model(x)
    adapters = attach(model.train(), LoRA(rank=3), targets=["up", "down"])
    randomise(adapters)
    plain, others = dense(adapters)
    close(step(model, adapters, x), step(plain, others, x), TOLERANCE)
    model.eval()
    with torch.no_grad():
        model(x)
    close(step(model.train(), adapters, x), step(plain.train(), others, x), TOLERANCE)


@pytest.mark.parametrize("kind", ["8bit", "nf4-double"])
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "has-run"])
def test_copies_moves_and_state_dict(kind: str, ran: bool) -> None:
    torch.manual_seed(5)
    model = Model(KINDS[kind])
    x = torch.randn(2, 5, WIDTH)
    if ran:
        model(x)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapters = attach(model, LoRA(rank=3), targets=["up", "down"])
    randomise(adapters)
    assert all(parameter.dtype == torch.float32 for parameter in adapters.parameters().values())
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "base_layer" in name)
    expected = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    model.to("cpu")
    torch.testing.assert_close(model(x), expected)
    keys = model.state_dict().keys()
    assert any(key.startswith("up.base_layer.weight") for key in keys)
    assert any("SCB" in key or "absmax" in key for key in keys)
    torch.testing.assert_close(model(x), expected)
    adapters.use(None)
    base = model(x)
    adapters.detach()
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    torch.testing.assert_close(model(x), base)


def test_adapter_parameters_of_the_base_layers_dtype_are_floating_point() -> None:
    model = Model(KINDS["nf4-double"])
    adapters = attach(model, LoRA(rank=3), targets=["up"], dtype=None)
    assert all(parameter.dtype == torch.float32 for parameter in adapters.parameters().values())


def test_half_precision() -> None:
    """bfloat16 activations, a bfloat16 product, an fp32 adapter."""
    module = _four_bit((WIDTH, INNER), quant_type="nf4", compute_dtype=torch.bfloat16)
    model = nn.Sequential(module)
    adapters = attach(model, LoRA(rank=3), targets=["0"])
    randomise(adapters)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, WIDTH, dtype=dtype).requires_grad_()
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
    assert module.bias.dtype == torch.float32  # the module's own forward would have cast it for good


# Merging


@every_kind
def test_merging_is_as_exact_as_the_format(kind: str) -> None:
    """Merged is what the expanded, adapted weight becomes when it is quantised the same way, no more; unmerging is exact."""
    model, adapters, x = quantised(kind, LoRA(rank=3))
    expected = model(x)
    wanted = {}
    for path, layer in adapters.layers.items():
        p = {**layer._parameters, **layer._constants}
        wanted[path] = layer._method.adapt(layer.layer.base_tensors(layer.base_layer)["weight"], p, layer.layer).detach()
    stored = {path: layer.base_layer.weight for path, layer in adapters.layers.items()}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    adapters.merge()
    worst = 1 / 127 if "8" in kind else 0.17  # half the widest gap between neighbours of 16 values; 8 bits: a step
    with torch.compiler.set_stance("fail_on_recompile"):
        merged = compiled(x)
    torch.testing.assert_close(merged, model(x))
    for path, layer in adapters.layers.items():
        found = layer.layer.base_tensors(layer.base_layer)["weight"]
        assert type(layer.base_layer.weight) is type(stored[path])
        assert layer.base_layer.weight.shape == stored[path].shape
        assert (found - wanted[path]).abs().max() <= worst * wanted[path].abs().max()
    error = (model(x) - expected).norm() / expected.norm()
    assert error < (0.02 if "8" in kind else 0.2)
    assert error > 1e-4  # it is not exact, and isn't said to be
    adapters.unmerge()
    assert all(layer.base_layer.weight is stored[path] for path, layer in adapters.layers.items())
    assert torch.equal(model(x), expected)
    plain = adapters.merge_and_unload()
    assert type(plain.up) is type(KINDS[kind]((2 * WIDTH, 2 * WIDTH)))
    torch.testing.assert_close(plain(x), merged, rtol=1e-4, atol=1e-4)


@every_kind
def test_what_is_quantised_again_stays(kind: str) -> None:
    """Quantising an expanded weight gives it back: nothing is lost but by the adapter.

    Two do so nearly: scales that are quantised themselves are rounded again, and torchao puts a row's largest weight at 127 of 127.5 steps.
    """
    module = KINDS[kind]((WIDTH, INNER))
    layer = describe(module)
    assert layer is not None
    before = layer.base_tensors(module)["weight"].clone()
    module._parameters["weight"] = layer.weight_parameter(module, before)
    after = layer.base_tensors(module)["weight"]
    assert (after - before).abs().max() <= {"8": 1e-6, "n": 2e-3, "f": 2e-3, "t": 1 / 250}[kind[0]] * before.abs().max()


def test_a_tensor_of_unknown_rule_is_not_merged_into() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(WIDTH, INNER))
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    adapters = attach(model, LoRA(rank=2), targets=["0"])
    randomise(adapters)
    x = torch.randn(4, WIDTH)
    expected = model(x)
    with pytest.raises(OnegraphError) as raised:
        adapters.merge()
    assert "Int8Tensor of torchao" in str(raised.value)
    assert torch.equal(model(x), expected)
    layer = adapters.layers["0"]
    with pytest.raises(OnegraphError) as raised:
        layer.layer.weight_parameter(layer.base_layer, torch.randn(INNER, WIDTH))
    assert raised.value.code == "quantised-merge"


# Refused


def test_what_is_not_quantised_yet_is_refused() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    reasons = {
        "isn't quantised yet": [bitsandbytes.nn.Linear4bit(8, 8), bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)],
        "has_fp16_weights=False": [bitsandbytes.nn.Linear8bitLt(8, 8)],
    }
    for reason, modules in reasons.items():
        for module in modules:
            assert describe(module) is None
            with pytest.raises(OnegraphError) as raised:
                attach(nn.Sequential(module), LoRA(rank=2), targets=["0"])
            assert raised.value.code == "unsupported-layer"
            assert reason in str(raised.value)
            assert adapters_of(nn.Sequential(module)) is None


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.plain = _eight_bit((WIDTH, WIDTH)), _eight_bit((WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.plain(self.inner(x))
        return found


def test_eight_bits_compile_where_the_backward_pass_computes_a_block_again() -> None:
    """A layer without an adapter notes what it quantised on an object; dynamo refuses that under a checkpoint by itself."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(_Block(), _Block())
        adapters = attach(model, LoRA(rank=2), targets=["inner"])
        if compiled:
            onegraph.compile(model, backend="aot_eager", gradient_checkpointing=True)
        optimizer = torch.optim.SGD(adapters.parameters().values(), lr=0.1)
        model.train()
        for _ in range(3):
            loss = model(torch.ones(3, WIDTH, requires_grad=True)).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
