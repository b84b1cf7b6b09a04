"""How a kind of layer is described and run: shapes, and the layer's own operation with another weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onegraph.errors import TargetError


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """What a method may know of the layer it adapts: numbers only, no weights.

    A compiled graph guards on these fields, so they hold nothing that tells two layers of one shape apart.

    Methods see every weight in its canonical form: (O, I / groups, *kernel), output features first. Layers that store theirs
    another way (an embedding's table, a transposed Linear) turn it round in ``canonical`` and ``stored``.

    Layers that multiply by their weight are a ``ProductLayer``; the others have tensors and run, but neither ``project`` nor
    ``expand`` nor what goes with them, and say so.

    Args:
        in_features: Size of the input; input channels of a convolution; rows of an embedding's table; size of a norm; 0: it has none.
        out_features: Size of the output; output channels of a convolution; width of an embedding; size of a norm; 0: it has none.
        weight_shape: Shape of the layer's own weight, as it is stored.
        kernel_size: Kernel of a convolution, () for the others.
        groups: Groups of a convolution, 1 for the others.
        has_bias: Whether the layer adds a bias.
    """

    kind: ClassVar[str]
    by_weight: ClassVar[bool] = False
    """Whether it only ever runs with other tensors in place of its own: nothing can be put beside its product."""
    adds_change: ClassVar[bool] = False
    """Whether a new weight runs as its own product plus one with what has changed: its own rounds as no other product does."""
    is_read: ClassVar[bool] = False
    """Whether its owner reads ``weight`` and ``bias`` and multiplies by itself: the adapted layer hands out adapted ones."""
    takes_rows: ClassVar[bool] = True
    """Whether it can run with an adapter for every row of the batch."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The modules in it that it reads and never calls: with rows it runs with their tensors too."""
    input_name: ClassVar[str] = "input"
    """What its first argument is called, for callers that name it."""

    in_features: int
    out_features: int
    weight_shape: tuple[int, ...]
    kernel_size: tuple[int, ...] = ()
    groups: int = 1
    has_bias: bool = False

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """Shape of the canonical weight."""
        return (self.out_features, self.in_features // self.groups, *self.kernel_size)

    @property
    def num_weight_columns(self) -> int:
        """Columns of the canonical weight as a matrix: input features of one output, times the points of the kernel."""
        return math.prod(self.canonical_shape[1:])

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of what ``base_tensors`` gives."""
        return {"weight": self.canonical_shape, **({"bias": (self.out_features,)} if self.has_bias else {})}

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

    def attribute(self, name: str) -> str:
        """What the module calls the tensor that ``base_tensors`` calls ``name``."""
        return name

    def weight_parameter(self, module: nn.Module, merged: Tensor) -> nn.Parameter:
        """What hangs in the module for a new weight, canonical and in any precision: of the stored weight's dtype and layout.

        Raises:
            TargetError: ``quantised-merge`` where the module can't hold it.
        """
        present = module._parameters[self.attribute("weight")]
        assert present is not None
        return nn.Parameter(torch.empty_like(present.detach()).copy_(self.stored(merged)), requires_grad=False)

    def settle(self, module: nn.Module) -> None:  # noqa: B027 - most kinds keep nothing
        """Bring what a module keeps between calls into the form that ``forward`` reads, once, before it is adapted."""

    def forward(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the module as it is."""
        return module(x, *args, **kwargs)

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run the module with other tensors (canonical, named as ``base_tensors`` names them) in place of its own."""
        own = {**tensors, "weight": self.stored(tensors["weight"])}
        extra = None if self.has_bias else own.pop("bias", None)
        y: Tensor = functional_call(module, own, args, kwargs)
        return y if extra is None else y + self.per_channel(extra).to(y.dtype)

    def call_rows(
        self,
        module: nn.Module,
        adapted: Callable[..., Mapping[str, Tensor]],
        rows: Sequence[Mapping[str, Tensor]],
        x: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the module with other tensors for every row of the batch; for kinds that are ``by_weight``.

        Args:
            adapted: From the tensors of one row, in each method, to those of the layer.
            rows: These, with a leading row axis, for each method.
        """
        self._lacks("run with an adapter for every row")

    @property
    def batch_axis(self) -> int:
        """The axis of the input that holds the batch."""
        return 0

    @property
    def channel_axis(self) -> int:
        """The axis of activations that holds features, counted from the end."""
        self._lacks("axis of features")

    def down_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a weight that ``project`` takes: from the input to ``rank`` channels."""
        self._lacks("product")

    def up_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a weight that ``expand`` takes: from ``rank`` channels to the output."""
        self._lacks("product")

    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """The layer's own operation (stride, padding, dilation, lookup) with the weight ``down`` and no bias.

        ``down`` is cast to the dtype of ``x``, never ``x`` to the dtype of ``down``: the weight is the small one.
        """
        self._lacks("product")

    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """The pointwise operation from R to O channels, in the dtype of ``h``."""
        self._lacks("product")

    def add_expanded(self, y: Tensor, h: Tensor, up: Tensor) -> Tensor:
        """``y + expand(h, up)`` in the dtype of ``y``, in one operation where there is one."""
        return (y + self.expand(h.to(y.dtype), up)).to(y.dtype)

    def per_channel(self, vector: Tensor) -> Tensor:
        """A vector over the output features, shaped to be broadcast against the output."""
        self._lacks("axis of features")

    def compose(self, down: Tensor, up: Tensor) -> Tensor:
        """The canonical weight of the layer that does ``expand(project(x, down), up)`` in one operation.

        Raises:
            TargetError: ``grouped-weight``: with groups > 1 no grouped weight does that.
        """
        self._lacks("product")

    def _lacks(self, what: str) -> NoReturn:
        raise TargetError(
            f"a layer of the kind {self.kind} has no {what}",
            why="It doesn't multiply its input by a matrix.",
            hint="a method for such layers changes their tensors by themselves: see adapt_tensors",
            code="layer-without-product",
        )


@dataclass(frozen=True, kw_only=True)
class ProductLayer(Layer):
    """A layer that multiplies by its weight, the canonical (O, I / groups, *kernel), and can do so with factors of another one."""

    @property
    @abstractmethod
    def channel_axis(self) -> int:
        """The axis of activations that holds features, counted from the end."""

    @abstractmethod
    def down_shape(self, rank: int) -> tuple[int, ...]:
        """From the input to ``rank`` channels."""

    @abstractmethod
    def up_shape(self, rank: int) -> tuple[int, ...]:
        """From ``rank`` channels to the output."""

    @abstractmethod
    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """The layer's own operation with another weight."""

    @abstractmethod
    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """The pointwise operation from R to O channels."""

    @abstractmethod
    def per_channel(self, vector: Tensor) -> Tensor:
        """A vector over the output features, to be broadcast."""

    @abstractmethod
    def compose(self, down: Tensor, up: Tensor) -> Tensor:
        """Both factors as one canonical weight."""
