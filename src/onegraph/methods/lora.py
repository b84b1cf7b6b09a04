"""LoRA: a low-rank difference beside the frozen weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_input, dropped_ranks, dropped_scale
from onegraph.methods.low_rank import LowRank


@dataclass(frozen=True, kw_only=True)
class LoRA(LowRank):
    """y = W x + b + s U drop(D drop_in(x)), with s = alpha / rank.

    Shapes:
        x (..., I), D ``down`` (R, I), U ``up`` (O, R), ``up_bias`` (O,), y (..., O); convolutions carry D (R, I, *kernel) and
        U (O, R / groups, 1...). D and U are cast to the dtype of x; y keeps the base layer's dtype.

    Args:
        bias: Whether U has a bias; it is scaled by s too. The other fields are those of ``LowRank``.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability`` or ``init`` out of range.

    Source:
        Hu et al. 2021, https://arxiv.org/abs/2106.09685, equation 3; rslora: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732.
    """

    name: ClassVar[str] = "lora"

    bias: bool = False

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``down``, ``up`` and, where asked for, ``up_bias``."""
        specs = super().parameters(layer)
        if self.bias:
            specs["up_bias"] = ParameterSpec(shape=(layer.out_features,))
        return specs

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Down, drop, up. The scale is folded into ``up``, which is smaller than any activation."""
        h = layer.project(dropped_input(x, p, training=training), p["down"])
        h = dropped_ranks(h, p, layer, training=training)
        scale = dropped_scale(p, training=training)
        y = layer.add_expanded(y, h, p["up"] * scale)
        if "up_bias" in p:
            y = y + layer.per_channel(p["up_bias"] * scale).to(y.dtype)
        return y

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s U D."""
        return (weight + layer.compose(p["down"], p["up"] * p["scale"])).to(weight.dtype)

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        """The bias, b + s ``up_bias``."""
        if "up_bias" not in p:
            return bias
        change = p["up_bias"] * p["scale"]
        return change if bias is None else (bias + change).to(bias.dtype)

    @classmethod
    def concatenated(
        cls, methods: Sequence[Method], tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float], layer: Layer
    ) -> tuple[Method, dict[str, Tensor]] | None:
        """sum_i w_i s_i U_i D_i = [w_1 s_1 U_1, ...] [D_1; ...]: the ranks add up, and the strengths are in U. It has no dropout."""
        present = [(p, weight * p["scale"]) for p, weight in zip(tensors, weights) if weight]
        present = present or [(tensors[0], 0 * tensors[0]["scale"])]  # a rank is at least 1
        rank = sum(p["down"].shape[0] for p, _ in present)
        bias = any(isinstance(method, LoRA) and method.bias for method in methods)
        # A grouped convolution has its rank channels in blocks, one a group.
        downs = [p["down"].reshape(layer.groups, -1, *p["down"].shape[1:]) for p, _ in present]
        found = {"down": torch.cat(downs, dim=1).flatten(0, 1), "up": torch.cat([p["up"] * size for p, size in present], dim=1)}
        if bias:
            sums = [p["up_bias"] * size for p, size in present if "up_bias" in p]
            found["up_bias"] = sum(sums, start=torch.zeros_like(found["up"].flatten(1)[:, 0]))
        return cls(rank=rank, bias=bias), found
