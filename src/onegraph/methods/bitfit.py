"""BitFit: a difference of the bias, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dense import summed_differences


@dataclass(frozen=True, kw_only=True)
class BitFit(Method):
    """b' = b + s db; s = 1.

    Shapes:
        ``bias_difference`` (O,); y keeps the base layer's dtype.

    Source:
        Ben Zaken et al. 2022, https://arxiv.org/abs/2106.10199.
    """

    name: ClassVar[str] = "bitfit"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv", "norm"})

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``bias_difference``."""
        return {"bias_difference": ParameterSpec(shape=(layer.out_features,))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Zeros."""
        return self.identity(layer)

    def beside(self, layer: Layer) -> bool:
        """A vector added to the output; a norm is run with its new bias, which only it knows how to add."""
        return layer.kind != "norm"

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The output plus the difference."""
        return y + layer.per_channel(p["bias_difference"] * p["scale"]).to(y.dtype)

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight as it is."""
        return weight

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        """The bias, b + s db."""
        return None if bias is None else (bias + p["bias_difference"] * p["scale"]).to(bias.dtype)

    @classmethod
    def concatenated(
        cls, methods: Sequence[Method], tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float], layer: Layer
    ) -> tuple[Method, dict[str, Tensor]] | None:
        """The sum of the differences is a difference."""
        return cls(), summed_differences(cls().parameters(layer), tensors, weights)

    def check(self, layer: Layer) -> str | None:
        """It takes a bias."""
        if (reason := super().check(layer)) is not None:
            return reason
        return None if layer.has_bias else "it has no bias, and bitfit trains nothing but biases"
