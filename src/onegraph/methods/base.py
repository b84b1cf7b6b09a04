"""The method contract: a frozen record of settings, and pure functions over named tensors.

Dimensions in names: B row of the batch, T position, I input features, O output features, R rank, S slot, G block.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from onegraph.layers.base import Layer


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One tensor of a method on one layer.

    Args:
        shape: Its shape at the method's own rank.
        rank_axes: The axes that grow with the rank. They are padded with zeros to the capacity; no axis: the shape is fixed.
        rank_blocks: Blocks that the rank axes are made of; each block is padded by itself (grouped convolutions).
        trained: Whether it gets a gradient.
    """

    shape: tuple[int, ...]
    rank_axes: tuple[int, ...] = ()
    rank_blocks: int = 1
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """An adapter method: its configuration, and what it computes.

    Two adapters share a graph when their ``structure()`` is equal. Functions that run inside a graph (``before``, ``after``, ``adapt``)
    read no field named in ``per_adapter``: such values reach them as tensors in ``p``, and whether a setting is there at all
    is asked with ``in p``. ``p`` maps names to tensors: parameters, shared parameters and settings together.

    A layer runs in one of two ways, decided by ``beside(layer)`` from shapes alone: beside the base layer, as
    ``after(x, base(before(x)))``, or by the weight, as the base layer with ``adapt``'s weight in place of its own.
    """

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv", "embedding"})
    """The kinds of layers it can adapt."""
    per_adapter: ClassVar[frozenset[str]] = frozenset()
    """The fields that may differ between adapters of one graph."""
    random_settings: ClassVar[frozenset[str]] = frozenset()
    """The settings that draw random numbers in training; 0 turns each of them off."""
    ways: ClassVar[frozenset[str]] = frozenset()
    """The fields that choose how the same function is computed: an adapter takes over what a layer has already, to share its graph."""
    room: ClassVar[frozenset[str]] = frozenset()
    """Those of them that ``with_room`` sets: no part of what an adapter is, so that no file holds them."""
    reads_base: ClassVar[bool] = False
    """Whether ``after`` needs the base layer's own tensors (a quantised weight is expanded for it)."""
    additive: ClassVar[bool] = True
    """Whether the change of the weight is the same whatever the base weight is."""

    @abstractmethod
    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """The tensors of this method on this layer."""

    def shared_parameters(self) -> dict[str, ParameterSpec]:
        """The tensors that all layers of an adapter have in common, of a method that ``settled`` has seen."""
        return {}

    def with_room_for(self, other: Method) -> Self:
        """The method whose shared tensors hold this one's and those of another one of the same structure, padded with zeros."""
        return self

    def settings(self, layer: Layer) -> dict[str, float]:
        """Scalars of one adapter on this layer, kept as 0-d tensors; only those that are used. 0 must mean "without effect" for each.

        Every method has ``scale``, its strength: with 0 the layer is the base layer, bit for bit.
        """
        return {"scale": 1.0}

    @abstractmethod
    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The tensors a new adapter starts from, drawn on the CPU so that a seed means the same on every device; ``weight`` canonical."""

    def initial_shared(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The shared tensors a new adapter starts from."""
        return {}

    def identity(self, layer: Layer) -> dict[str, Tensor]:
        """Tensors that change nothing when every setting is 0: what a disabled or missing adapter is."""
        return {name: torch.zeros(spec.shape) for name, spec in self.parameters(layer).items()}

    def beside(self, layer: Layer) -> bool:
        """Whether it runs beside the base layer (``before`` and ``after``) rather than by a new weight: what is cheaper here."""
        return True

    def before(self, x: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """The input that the base layer sees, in the dtype of ``x``."""
        return x

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The output, in the dtype of ``y``.

        Args:
            x: The layer's input, as ``before`` left it.
            y: The base layer's output.
            base: The base layer's ``weight``, canonical, and ``bias``, for methods with ``reads_base``.
        """
        return y

    @abstractmethod
    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The definition: the weight with which the plain layer computes the same, in the dtype of ``weight``; both canonical.

        ``training`` draws the dropouts that a method which runs by the weight has.
        """

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        """The bias that goes with ``adapt``'s weight."""
        return bias

    def adapt_tensors(
        self, base: Mapping[str, Tensor], p: Mapping[str, Tensor], layer: Layer, *, training: bool = False
    ) -> dict[str, Tensor]:
        """All tensors of the layer, adapted: what running by the weight and merging use."""
        tensors = {"weight": self.adapt(base["weight"], p, layer, training=training)}
        bias = self.adapt_bias(base.get("bias"), p, layer)
        if bias is not None:
            tensors["bias"] = bias
        return tensors

    @classmethod
    def concatenated(
        cls, methods: Sequence[Method], tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float], layer: Layer
    ) -> tuple[Method, dict[str, Tensor]] | None:
        """The adapter of this class whose change is the weighted sum of several others', with nothing lost; None: there is none.

        Args:
            methods: All of this class.
            tensors: Parameters, shared parameters and settings of each.
            weights: How much of each; 0 and negative ones too.
        """
        return None

    def check(self, layer: Layer) -> str | None:
        """Why this layer can't take this method, or None when it can."""
        if layer.kind in self.kinds:
            return None
        return f"it is of the kind {layer.kind}; {self.name} is for {', '.join(sorted(self.kinds))}"

    def settled(self, layer: Layer, layers: Sequence[Layer]) -> Self:
        """This method with the structural fields filled in that the layer's shape, or all ``layers`` of the adapter, decide."""
        return self

    def structure(self) -> Self:
        """This method with every per-adapter field at its default: equal for adapters that share a graph, and hashable."""
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self) if field.name in self.per_adapter}
        return dataclasses.replace(self, **defaults)

    def computed_as(self, others: Iterable[Method]) -> Self:
        """This method computed in the way of the first of the others that is the same but for its ``ways``."""
        for other in others:
            if self.ways and type(other) is type(self):
                same = dataclasses.replace(self, **{field: getattr(other, field) for field in self.ways})
                if same.structure() == other.structure():
                    return same
        return self

    def with_room(self, layer: Layer, rank: int) -> Self:
        """The same function, computed so that adapters of any rank up to this one share its graph: itself, where they do anyway.

        What that costs is paid only by those who ask for it, with ``capacity=`` or ``reserve(rank=)``.
        """
        return self

    def without_room(self) -> Self:
        """The same, computed for its own rank."""
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self) if field.name in self.room}
        return dataclasses.replace(self, **defaults) if defaults else self

    def rank_on(self, layer: Layer) -> int | None:
        """The rank, None for methods that have none."""
        rank = getattr(self, "rank", None)
        return rank if isinstance(rank, int) else None

    def with_rank(self, rank: int | None) -> Self:
        """The same method at another rank: how the padded shapes are found."""
        changes: dict[str, Any] = {"rank": rank}
        return self if rank is None else dataclasses.replace(self, **changes)
