"""Norms: a vector that scales what was normalised, and perhaps one that is added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call

from onegraph.layers.base import Layer

_NAMES = frozenset({"weight", "bias"})


@dataclass(frozen=True, kw_only=True)
class NormLayer(Layer):
    """A norm with a weight (F,): LayerNorm, RMSNorm, GroupNorm, and the classes that models define for themselves.

    What it computes is its own: it is run with other tensors in place of its own, so that a norm which scales by 1 + w does that
    with the new w. The weight of a LayerNorm over several axes is stored with these axes, and canonical as one vector.
    """

    kind: ClassVar[str] = "norm"

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """(F,)."""
        return (self.out_features,)

    def canonical(self, weight: Tensor) -> Tensor:
        """Any axes -> (F,)."""
        return weight.reshape(-1)

    def stored(self, weight: Tensor) -> Tensor:
        """(F,) -> the axes as they are stored."""
        return weight.reshape(self.weight_shape)

    def base_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """``weight`` and, where it has one, ``bias``, as vectors."""
        return {name: self.canonical(value) for name, value in super().base_tensors(module).items()}

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run the module with these vectors in place of its own."""
        y: Tensor = functional_call(module, {name: self.stored(value) for name, value in tensors.items()}, args, kwargs)
        return y


def describe_norm(module: nn.Module) -> NormLayer | None:
    """The description of a norm that has a weight: one of torch's, or a class with "Norm" in its name that is built like one."""
    if module._modules or not any("Norm" in base.__name__ for base in type(module).__mro__):
        return None
    own = {name: value for name, value in module._parameters.items() if value is not None}
    weight = own.get("weight")
    if weight is None or not own.keys() <= _NAMES or not all(value.is_floating_point() for value in own.values()):
        return None
    shape = tuple(weight.shape)
    if any(tuple(value.shape) != shape for value in own.values()) or not (len(shape) == 1 or isinstance(module, nn.LayerNorm | nn.RMSNorm)):
        return None
    size = math.prod(shape)
    return NormLayer(in_features=size, out_features=size, weight_shape=shape, has_bias="bias" in own)
