"""What a layer is read as, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from cases import LAYERS, LayerCase
from onegraph.errors import TargetError
from onegraph.layers import ConvLayer, EmbeddingLayer, LinearLayer, describe


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
def test_description(case: LayerCase) -> None:
    module = case.module()
    layer = describe(module)
    assert layer is not None
    assert layer.weight_shape == tuple(module.weight.shape)
    assert layer.has_bias == (getattr(module, "bias", None) is not None)
    assert layer == describe(case.module())  # equal for equal modules: it carries nothing of the one it was read from
    assert hash(layer) == hash(describe(case.module()))
    y = module(case.x())
    assert y.shape[layer.channel_axis] == layer.out_features
    assert torch.equal(y + layer.per_channel(torch.zeros(layer.out_features)), y)


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
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
    for case in LAYERS.values():
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
        nn.LayerNorm(4),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Bilinear(2, 2, 2),
        _Doubled(4, 4),
        nn.MultiheadAttention(4, 1).out_proj,
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
