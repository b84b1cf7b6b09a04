"""Another method, and the bias of its layer trained beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.lora import LoRA

_BIAS = "bias_change"


@dataclass(frozen=True, kw_only=True)
class WithBias(Method):
    """y = f(x) + s c, f being what ``inner`` computes, and s its strength: PEFT's ``bias="all"`` and ``"lora_only"``.

    Shapes:
        Those of ``inner``, and c ``bias_change`` (O,); y keeps the base layer's dtype.

    Args:
        inner: The method of the layer, any but another one of this kind.

    Raises:
        ConfigurationError: ``inner-method``.
    """

    name: ClassVar[str] = "with_bias"

    inner: Method = dataclasses.field(default_factory=LoRA)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method) or isinstance(self.inner, WithBias):
            raise ConfigurationError(
                f"inner={self.inner!r} is not a method that a bias can be trained beside",
                hint="for example WithBias(inner=LoRA(rank=8))",
                code="inner-method",
            )

    @property
    def kinds(self) -> frozenset[str]:  # type: ignore[override]
        """Those of ``inner``."""
        return self.inner.kinds

    @property
    def random_settings(self) -> frozenset[str]:  # type: ignore[override]
        """Those of ``inner``."""
        return self.inner.random_settings

    @property
    def reads_base(self) -> bool:  # type: ignore[override]
        """As ``inner``."""
        return self.inner.reads_base

    @property
    def additive(self) -> bool:  # type: ignore[override]
        """As ``inner``."""
        return self.inner.additive

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """Those of ``inner``, and ``bias_change``."""
        return {**self.inner.parameters(layer), _BIAS: ParameterSpec(shape=(layer.out_features,))}

    def shared_parameters(self) -> dict[str, ParameterSpec]:
        """Those of ``inner``."""
        return self.inner.shared_parameters()

    def settings(self, layer: Layer) -> dict[str, float]:
        """Those of ``inner``."""
        return self.inner.settings(layer)

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """As ``inner``, with the bias as it is."""
        return {**self.inner.initial(layer, weight, generator), _BIAS: torch.zeros(layer.out_features)}

    def initial_shared(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """As ``inner``."""
        return self.inner.initial_shared(generator)

    def identity(self, layer: Layer) -> dict[str, Tensor]:
        """As ``inner``, with the bias as it is."""
        return {**self.inner.identity(layer), _BIAS: torch.zeros(layer.out_features)}

    def beside(self, layer: Layer) -> bool:
        """As ``inner``."""
        return self.inner.beside(layer)

    def before(self, x: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """As ``inner``."""
        return self.inner.before(x, p, layer, training=training)

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """As ``inner``, plus the change."""
        y = self.inner.after(x, y, p, layer, training=training, base=base)
        return y + layer.per_channel(p[_BIAS] * p["scale"]).to(y.dtype)

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight of ``inner``."""
        return self.inner.adapt(weight, p, layer, training=training)

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        """The bias of ``inner``, plus s c."""
        own = self.inner.adapt_bias(bias, p, layer)
        return None if own is None else (own + p[_BIAS] * p["scale"]).to(own.dtype)

    def check(self, layer: Layer) -> str | None:
        """What ``inner`` takes and has a bias."""
        if (reason := self.inner.check(layer)) is not None:
            return reason
        return None if layer.has_bias else "it has no bias that could be trained"

    def settled(self, layer: Layer, layers: Sequence[Layer]) -> Self:
        """With ``inner`` settled."""
        return dataclasses.replace(self, inner=self.inner.settled(layer, layers))

    def structure(self) -> Self:
        """With the structure of ``inner``."""
        return dataclasses.replace(self, inner=self.inner.structure())

    def computed_as(self, others: Iterable[Method]) -> Self:
        """With ``inner`` computed as the one of another method of this kind."""
        return dataclasses.replace(self, inner=self.inner.computed_as([other.inner for other in others if isinstance(other, WithBias)]))

    def with_room(self, layer: Layer, rank: int) -> Self:
        """With that of ``inner``."""
        return dataclasses.replace(self, inner=self.inner.with_room(layer, rank))

    def without_room(self) -> Self:
        """With ``inner`` as it was."""
        return dataclasses.replace(self, inner=self.inner.without_room())

    def rank_on(self, layer: Layer) -> int | None:
        """That of ``inner``."""
        return self.inner.rank_on(layer)

    def with_rank(self, rank: int | None) -> Self:
        """With ``inner`` at another rank."""
        return dataclasses.replace(self, inner=self.inner.with_rank(rank))
