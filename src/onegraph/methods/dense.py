"""Dense: a full difference of every tensor of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec

_SUFFIX = "_difference"


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """W' = W + s dW, and so for the bias and every other tensor that the layer has; s = 1.

    What full fine-tuning of the layer trains, and PEFT's ``modules_to_save``: that copy of a module is this one's tensors plus
    differences, kept apart so that layers can be switched.

    Shapes:
        ``weight_difference`` as the canonical weight, ``bias_difference`` (O,); ``<name>_difference`` for each tensor of another module.
        The new tensors are rounded once to the dtype of the layer's own.
    """

    name: ClassVar[str] = "dense"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv", "embedding", "norm", "module"})

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """A difference for each tensor of the layer."""
        return {f"{name}{_SUFFIX}": ParameterSpec(shape=shape) for name, shape in layer.tensor_shapes().items()}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Zeros."""
        return self.identity(layer)

    def beside(self, layer: Layer) -> bool:
        """Never: beside the layer, another product of the same size would only come on top of the gradient's."""
        return False

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s dW."""
        return _changed("weight", weight, p)

    def adapt_tensors(
        self, base: Mapping[str, Tensor], p: Mapping[str, Tensor], layer: Layer, *, training: bool = False
    ) -> dict[str, Tensor]:
        """Every tensor with its difference."""
        return {name: _changed(name, value, p) for name, value in base.items()}

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        """The bias, b + s db."""
        return None if bias is None else _changed("bias", bias, p)

    @classmethod
    def concatenated(
        cls, methods: Sequence[Method], tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float], layer: Layer
    ) -> tuple[Method, dict[str, Tensor]] | None:
        """The sum of the differences is a difference."""
        return cls(), summed_differences(cls().parameters(layer), tensors, weights)


def summed_differences(
    specs: Mapping[str, ParameterSpec], tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    """The weighted sum of differences, each with its own strength, for a strength of 1."""
    present = [(values, weight * values["scale"]) for values, weight in zip(tensors, weights) if values]
    device = present[0][1].device if present else None
    zeros = {name: torch.zeros(spec.shape, device=device) for name, spec in specs.items()}
    return {name: sum((values[name] * factor for values, factor in present), start) for name, start in zeros.items()}


def _changed(name: str, value: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return (value + p[f"{name}{_SUFFIX}"] * p["scale"]).to(value.dtype)
