"""What a layer is read as, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from cases import LAYERS, Affine, LayerCase, OwnRMSNorm
from onegraph.errors import TargetError
from onegraph.layers import ConvLayer, EmbeddingLayer, LinearLayer, ModuleLayer, NormLayer, ProductLayer, describe, describe_any

PRODUCTS = {name: case for name, case in LAYERS.items() if isinstance(describe(case.module()), ProductLayer)}
OTHERS = {name: case for name, case in LAYERS.items() if name not in PRODUCTS}


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
def test_description(case: LayerCase) -> None:
    module = case.module()
    layer = describe_any(module)
    assert layer is not None
    assert layer.has_bias == (getattr(module, "bias", None) is not None)
    assert layer == describe_any(case.module())  # equal for equal modules: it carries nothing of the one it was read from
    assert hash(layer) == hash(describe_any(case.module()))
    tensors = layer.base_tensors(module)
    assert layer.tensor_shapes() == {name: tuple(value.shape) for name, value in tensors.items()}
    assert torch.equal(layer.call(module, tensors, x := case.x()), module(x))
    if layer.kind != "module":
        assert layer.weight_shape == tuple(module.weight.shape)
        assert layer.canonical_shape == tuple(tensors["weight"].shape)
        assert torch.equal(layer.stored(tensors["weight"]), module.weight)


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
def test_runs_with_other_tensors(case: LayerCase) -> None:
    """Other tensors give what the module gives with them in place of its own, and its own stay."""
    module, x = case.module(), case.x()
    layer = describe_any(module)
    assert layer is not None
    before = module(x)
    others = {name: torch.randn(shape) for name, shape in layer.tensor_shapes().items()}
    found = layer.call(module, others, x)
    assert torch.equal(module(x), before)
    changed = copy.deepcopy(module)
    with torch.no_grad():
        for name, value in others.items():
            getattr(changed, name).copy_(layer.stored(value) if name == "weight" else value.reshape(getattr(changed, name).shape))
    torch.testing.assert_close(changed(x), found)
    assert not torch.allclose(found, before)


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_features_and_their_axis(case: LayerCase) -> None:
    module = case.module()
    layer = describe(module)
    assert layer is not None
    y = module(case.x())
    assert y.shape[layer.channel_axis] == layer.out_features
    assert torch.equal(y + layer.per_channel(torch.zeros(layer.out_features)), y)


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_layers_without_a_product_say_so(case: LayerCase) -> None:
    layer = describe_any(case.module())
    assert layer is not None
    assert layer.kind in {"norm", "module"}
    x = torch.randn(1, 4)
    asked = [
        lambda: layer.channel_axis,
        lambda: layer.down_shape(2),
        lambda: layer.up_shape(2),
        lambda: layer.project(x, x),
        lambda: layer.expand(x, x),
        lambda: layer.add_expanded(x, x, x),
        lambda: layer.per_channel(x),
        lambda: layer.compose(x, x),
    ]
    for ask in asked:
        with pytest.raises(TargetError, match=f"kind {layer.kind} has no") as raised:
            ask()
        assert raised.value.code == "layer-without-product"


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_composed_weight_does_both_steps_in_one(case: LayerCase) -> None:
    module, x = case.module().double(), case.x()
    x = x.double() if x.is_floating_point() else x
    layer = describe(module)
    assert layer is not None
    down = torch.randn(layer.down_shape(4), dtype=torch.float64)
    up = torch.randn(layer.up_shape(4), dtype=torch.float64)
    two = layer.expand(layer.project(x, down), up)
    torch.testing.assert_close(layer.add_expanded(module(x), layer.project(x, down), up), module(x) + two)
    if layer.groups > 1:
        with pytest.raises(TargetError, match="2 groups"):
            layer.compose(down, up)
        return
    weights = {"weight": layer.compose(down, up)}
    if layer.has_bias:
        weights["bias"] = torch.zeros(layer.out_features, dtype=torch.float64)
    torch.testing.assert_close(layer.call(module, weights, x), two)


def test_weight_is_cast_never_the_input() -> None:
    for case in PRODUCTS.values():
        layer, x = describe(case.module()), case.x()
        assert layer is not None
        if x.is_floating_point():
            assert layer.project(x.bfloat16(), torch.randn(layer.down_shape(4))).dtype == torch.bfloat16


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Named(nn.Linear):
    pass


class _Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(5, 4)
        self.register_buffer("embed_scale", torch.tensor(3.0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(4, elementwise_affine=False),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Bilinear(2, 2, 2),
        _Doubled(4, 4),
        nn.Embedding(4, 4, max_norm=1.0),
        nn.Sequential(nn.Linear(2, 2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_not_adaptable(module: nn.Module) -> None:
    assert describe(module) is None


def test_kinds() -> None:
    assert isinstance(describe(nn.Linear(2, 2)), LinearLayer)
    assert isinstance(describe(_Named(2, 2)), LinearLayer)  # a subclass that runs the same forward
    assert isinstance(describe(nn.Conv3d(2, 2, 1)), ConvLayer)
    assert isinstance(describe(nn.Embedding(2, 2)), EmbeddingLayer)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, Qwen3RMSNorm, T5LayerNorm, OwnRMSNorm])
def test_norms_that_models_define(kind: type[nn.Module]) -> None:
    layer = describe(kind(6))
    assert isinstance(layer, NormLayer)
    assert (layer.canonical_shape, layer.has_bias) == ((6,), False)


class _NormAndMore(nn.Module):
    """Its name is a norm's, but it has a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.matrix = nn.Parameter(torch.ones(4, 4))


class _AdaptiveNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)


class _NormWithMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize("kind", [_NormAndMore, _AdaptiveNorm, _NormWithMatrix])
def test_what_is_a_norm_by_name_only(kind: type[nn.Module]) -> None:
    assert describe(kind()) is None


def test_a_batch_norm_keeps_its_statistics_itself() -> None:
    module, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    layer = describe(module)
    assert isinstance(layer, NormLayer)
    layer.call(module, {"weight": torch.ones(4), "bias": torch.zeros(4)}, x)
    torch.testing.assert_close(module.running_mean, 0.1 * x.mean(0))
    assert all(parameter.grad_fn is None for parameter in module.parameters())


class _Reordered(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-1))


class _OtherConv1D(nn.Module):
    """A class of the same name from somewhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.nf, self.weight = 4, nn.Parameter(torch.ones(3, 4))


_OtherConv1D.__name__ = "Conv1D"


def test_transposed_linear() -> None:
    module = Conv1D(7, 5)
    layer = describe(module)
    assert isinstance(layer, LinearLayer)
    assert layer.transposed
    assert (layer.in_features, layer.out_features, layer.weight_shape, layer.canonical_shape) == (5, 7, (5, 7), (7, 5))
    assert torch.equal(layer.base_tensors(module)["weight"], module.weight.t())
    assert describe(_Reordered(7, 5)) is None
    assert describe(_OtherConv1D()) is None


def test_any_module_with_parameters_when_asked() -> None:
    module = Affine(4)
    assert describe(module) is None
    layer = describe_any(module)
    assert isinstance(layer, ModuleLayer)
    assert layer.tensor_shapes() == {"matrix": (4, 4), "gain": ()}  # times is no floating-point number
    assert isinstance(describe_any(_Doubled(4, 4)), ModuleLayer)
    assert isinstance(describe_any(nn.Linear(4, 4)), LinearLayer)


@pytest.mark.parametrize(
    "module",
    [nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.LSTM(2, 2), nn.ParameterList([torch.ones(2)])],
    ids=lambda module: type(module).__name__,
)
def test_no_module_that_could_be_adapted_whole(module: nn.Module) -> None:
    assert describe_any(module) is None


def test_scaled_embedding() -> None:
    module = _Scaled()
    layer = describe(module)
    assert isinstance(layer, EmbeddingLayer)
    assert layer.output_scale == 3.0
    down, up, ids = torch.randn(2, 5), torch.randn(4, 2), torch.tensor([1, 4])
    table = module.weight + layer.stored(layer.compose(down, up))
    torch.testing.assert_close(
        functional_call(module, {"weight": table}, ids), layer.add_expanded(module(ids), layer.project(ids, down), up)
    )


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_products_are_of_two_axes(shape: tuple[int, ...]) -> None:
    """With more, torch before 2.12 can't trace rows of batches whose length is symbolic."""

    class Axes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is nn.functional.linear:
                axes.append(args[0].dim())
            return func(*args, **(kwargs or {}))

    axes: list[int] = []
    layer = describe(nn.Linear(8, 5))
    assert isinstance(layer, LinearLayer)
    x, down, up = torch.randn(shape), torch.randn(4, 8), torch.randn(5, 4)
    with Axes():
        h = layer.project(x, down)
        y = layer.expand(h, up)
    torch.testing.assert_close(y, x @ down.t() @ up.t())
    assert axes == [min(len(shape), 2)] * 2
