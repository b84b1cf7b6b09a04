"""DoRA: a low-rank difference of the weight's direction, and its magnitude trained apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import ParameterSpec
from onegraph.methods.dropouts import dropped_input, dropped_ranks, dropped_scale
from onegraph.methods.low_rank import LowRank
from onegraph.methods.precision import full_precision


@dataclass(frozen=True, kw_only=True)
class DoRA(LowRank):
    """y = g (W x + s U drop(D drop_in(x))) + b, with g = m / ||W + s U D|| for each output feature.

    The norm is a constant in the backward pass, as in the paper. Where s is 0, or the norm is, g is 1: the layer is the base layer.

    Shapes:
        As LoRA's, and m ``magnitude`` (O,). The norm is computed in float32 at least, without forming U D.

    Args:
        rank: And all other fields: those of ``LowRank``.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability`` or ``init`` out of range.

    Source:
        Liu et al. 2024, https://arxiv.org/abs/2402.09353, equation 5, and section 4.3 for the constant norm. PEFT's dropout also
        drops the input of W; here, as in the paper's equation for LoRA, only the low-rank path has dropouts.
    """

    name: ClassVar[str] = "dora"
    reads_base: ClassVar[bool] = True
    additive: ClassVar[bool] = False

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``down``, ``up`` and ``magnitude``."""
        return {**super().parameters(layer), "magnitude": ParameterSpec(shape=(layer.out_features,))}

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, ``enabled`` (with 0 the magnitude is without effect too), and each dropout that is used."""
        return {"enabled": 1.0, **super().settings(layer)}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """As LoRA, with the weight's own magnitude."""
        precise = weight.detach().to(_precision(weight, torch.float32))
        return {**super().initial(layer, weight, generator), "magnitude": _row_norm(precise)}

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Down, drop, up beside the layer; then the sum gets g - 1 times itself, which keeps its digits in bfloat16."""
        assert base is not None
        scale = dropped_scale(p, training=training)
        gain = self._gain(weight_norm(base["weight"], p), p, scale)
        h = layer.project(dropped_input(x, p, training=training), p["down"])
        h = dropped_ranks(h, p, layer, training=training)
        y = layer.add_expanded(y, h, p["up"] * scale)
        product = y
        if (bias := base.get("bias")) is not None:
            product = y - layer.per_channel(bias).to(y.dtype)
        return torch.addcmul(y, product, layer.per_channel(gain - 1).to(y.dtype))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, m (W + s U D) / ||W + s U D||."""
        direction = weight + layer.compose(p["down"], p["up"] * p["scale"])
        norm = _row_norm(direction.detach())
        return (direction * _leading(self._gain(norm, p, p["scale"]), direction)).to(weight.dtype)

    def check(self, layer: Layer) -> str | None:
        """Not with groups: there is no grouped weight whose norm it could be."""
        if (reason := super().check(layer)) is not None:
            return reason
        if layer.groups > 1:
            return (
                f"it has {layer.groups} groups: the low-rank difference reads all input channels, so the sum has no grouped weight's norm"
            )
        return None

    def _gain(self, norm: Tensor, p: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """What W + s U D is multiplied by: m / norm, or 1 where the adapter is off or its norm is 0 (such a row would start at 0 / 0)."""
        acts = (p["enabled"] != 0) & (scale != 0) & (norm > 0)
        return torch.where(acts, p["magnitude"] / torch.where(norm > 0, norm, 1), 1)


def weight_norm(weight: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    """||W + s U D|| of each output feature, from products as narrow as the rank: a constant, outside every gradient.

    ||w||^2 + 2 s (W D^T . U) + s^2 (U (D D^T) . U), summed over each row.

    Shapes:
        weight (O, I, *kernel), ``down`` (R, I, *kernel), ``up`` (O, R, 1...) -> (O,), in float32 at least.
    """
    dtype = _precision(weight, p["down"].dtype)
    w, d, u = (tensor.detach().flatten(1).to(dtype) for tensor in (weight, p["down"], p["up"]))
    u = u * p["scale"].to(dtype)
    with full_precision(weight):  # it would take the products in half precision
        across = torch.addmm(u @ (d @ d.t()), w, d.t(), alpha=2)
    # Rounding may leave a row that cancels out slightly below 0.
    return (w.square().sum(1) + (across * u).sum(1)).clamp(min=0).sqrt()


def _row_norm(weight: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return norm


def _precision(weight: Tensor, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.promote_types(weight.dtype, other), torch.float32)


def _leading(vector: Tensor, like: Tensor) -> Tensor:
    """A vector over the first axis of ``like``, shaped to be broadcast against it."""
    return vector.reshape(-1, *(1 for _ in like.shape[1:]))
