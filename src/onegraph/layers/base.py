"""How a kind of layer is described and run: shapes, and the layer's own operation with another weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """What a method may know of the layer it adapts: numbers only, no weights.

    A compiled graph guards on these fields, so they hold nothing that tells two layers of one shape apart.

    Methods see every weight in its canonical form: (O, I / groups, *kernel), output features first. Layers that store theirs
    another way (an embedding's table, a transposed Linear) turn it round in ``canonical`` and ``stored``.

    Args:
        in_features: Size of the input; input channels of a convolution; rows of an embedding's table.
        out_features: Size of the output; output channels of a convolution; width of an embedding.
        weight_shape: Shape of the layer's own weight, as it is stored.
        kernel_size: Kernel of a convolution, () for the others.
        groups: Groups of a convolution, 1 for the others.
        has_bias: Whether the layer adds a bias.
    """

    kind: ClassVar[str]

    in_features: int
    out_features: int
    weight_shape: tuple[int, ...]
    kernel_size: tuple[int, ...] = ()
    groups: int = 1
    has_bias: bool = False

    @property
    def num_weight_columns(self) -> int:
        """Columns of the canonical weight as a matrix: input features of one output, times the points of the kernel."""
        return math.prod((self.in_features // self.groups, *self.kernel_size))

    def canonical(self, weight: Tensor) -> Tensor:
        """A weight as it is stored -> (O, I / groups, *kernel)."""
        return weight

    def stored(self, weight: Tensor) -> Tensor:
        """The inverse of ``canonical``."""
        return weight

    def base_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The layer's own ``weight``, canonical, and its ``bias`` where it has one."""
        own = {name: value for name in ("weight", "bias") if isinstance(value := getattr(module, name, None), Tensor)}
        return {**own, "weight": self.canonical(own["weight"])}

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run the module with other tensors (canonical, named as ``base_tensors`` names them) in place of its own."""
        own = {**tensors, "weight": self.stored(tensors["weight"])}
        extra = None if self.has_bias else own.pop("bias", None)
        y: Tensor = functional_call(module, own, args, kwargs)
        return y if extra is None else y + self.per_channel(extra).to(y.dtype)

    @property
    @abstractmethod
    def channel_axis(self) -> int:
        """The axis of activations that holds features, counted from the end."""

    @abstractmethod
    def down_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a weight that ``project`` takes: from the input to ``rank`` channels."""

    @abstractmethod
    def up_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a weight that ``expand`` takes: from ``rank`` channels to the output."""

    @abstractmethod
    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """The layer's own operation (stride, padding, dilation, lookup) with the weight ``down`` and no bias.

        ``down`` is cast to the dtype of ``x``, never ``x`` to the dtype of ``down``: the weight is the small one.
        """

    @abstractmethod
    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """The pointwise operation from R to O channels, in the dtype of ``h``."""

    def add_expanded(self, y: Tensor, h: Tensor, up: Tensor) -> Tensor:
        """``y + expand(h, up)`` in the dtype of ``y``, in one operation where there is one."""
        return (y + self.expand(h.to(y.dtype), up)).to(y.dtype)

    @abstractmethod
    def per_channel(self, vector: Tensor) -> Tensor:
        """A vector over the output features, shaped to be broadcast against the output."""

    @abstractmethod
    def compose(self, down: Tensor, up: Tensor) -> Tensor:
        """The canonical weight of the layer that does ``expand(project(x, down), up)`` in one operation.

        Raises:
            TargetError: ``grouped-weight``: with groups > 1 no grouped weight does that.
        """
