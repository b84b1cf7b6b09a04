"""AdaLoRA: a difference in the form of a singular value decomposition, whose triplets share one budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_input, used_probabilities
from onegraph.methods.fields import alpha_problems, is_whole, probability_problems, raise_all, rank_problems
from onegraph.methods.inits import normal

_DEVIATION = 0.02
_OFFSET = 1e-5
"""What PEFT adds to the rank that it divides by; a file means the same here."""


@dataclass(frozen=True, kw_only=True)
class AdaLoRA(Method):
    """y = W x + b + s U (e * D drop(x)), with s = alpha / (rank + 0.00001).

    What takes triplets away in training is ``RankAllocator``; ``orthogonality`` is the loss that keeps D and U near orthogonal.

    Shapes:
        x (..., I), D ``down`` (R, I, *kernel), U ``up`` (O, R), e ``singular`` (R,), y (..., O). D, U and e are cast to the dtype of x; y
        keeps the base layer's dtype.

    Args:
        rank: R that training starts from, at least 1; s is made with it as long as the adapter lives.
        alpha: Strength; None, and as in PEFT 0 and below, mean ``rank``.
        input_dropout: Probability in [0, 1) that an element of x is dropped on its way to D.
        kept_rank: Triplets that are left, where the others were cut away, at most ``rank``; None: all.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability``, ``kept-rank``.

    Source:
        Zhang et al. 2023, https://arxiv.org/abs/2303.10512, equation 3; the strength as PEFT defines it.
    """

    name: ClassVar[str] = "adalora"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "input_dropout", "kept_rank"})
    random_settings: ClassVar[frozenset[str]] = frozenset({"input_dropout"})

    rank: int = 12
    alpha: float | None = None
    input_dropout: float = 0.0
    kept_rank: int | None = None

    def __post_init__(self) -> None:
        raise_all(
            rank_problems(self.rank),
            alpha_problems(self.alpha),
            probability_problems(self, ("input_dropout",)),
        )
        if self.kept_rank is not None and not (is_whole(self.kept_rank) and self.kept_rank <= self.rank):
            raise ConfigurationError(
                f"kept_rank={self.kept_rank!r} is not in 1 to rank={self.rank}",
                why="It is the number of triplets that are left of the rank that training started from.",
                hint="a layer that lost all of them keeps one whose singular value is 0",
                code="kept-rank",
            )
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """s: alpha / (rank + 0.00001)."""
        alpha = float(self.rank) if self.alpha is None or self.alpha <= 0 else self.alpha
        return alpha / (self.rank + _OFFSET)

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``down``, ``up`` and ``singular``."""
        rank = self.rank if self.kept_rank is None else self.kept_rank
        return {
            "down": ParameterSpec(shape=layer.down_shape(rank), rank_axes=(0,)),
            "up": ParameterSpec(shape=(layer.out_features, rank), rank_axes=(1,)),
            "singular": ParameterSpec(shape=(rank,), rank_axes=(0,)),
        }

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, and the dropout where it is used."""
        return {"scale": self.scale, **used_probabilities(self, layer, ("input_dropout",))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """D and U normal with deviation 0.02, e = 0: the adapter starts as the identity."""
        tensors = self.identity(layer)
        for name in ("down", "up"):
            tensors[name] = normal(tuple(tensors[name].shape), generator) * _DEVIATION
        return tensors

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Down, up. The singular values and the scale are folded into ``up``, which is smaller than any activation."""
        h = layer.project(dropped_input(x, p, training=training), p["down"])
        return layer.add_expanded(y, h, _scaled_up(p, layer))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s U diag(e) D."""
        return (weight + layer.compose(p["down"], _scaled_up(p, layer))).to(weight.dtype)

    @classmethod
    def concatenated(
        cls, methods: Sequence[Method], tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float], layer: Layer
    ) -> tuple[Method, dict[str, Tensor]] | None:
        """All triplets beside each other: the ranks add up, and the strengths are in the singular values. It has no dropout."""
        present = [(p, weight * p["scale"]) for p, weight in zip(tensors, weights) if weight]
        present = present or [(tensors[0], 0 * tensors[0]["scale"])]  # a rank is at least 1
        method = cls(rank=sum(len(p["singular"]) for p, _ in present))
        return method, {
            "down": torch.cat([p["down"] for p, _ in present]),
            "up": torch.cat([p["up"] for p, _ in present], dim=1),
            "singular": torch.cat([p["singular"] * size for p, size in present]) / method.scale,
        }

    def check(self, layer: Layer) -> str | None:
        """Not with groups: a triplet is one of the whole weight."""
        if (reason := super().check(layer)) is not None:
            return reason
        if layer.groups > 1:
            return f"it has {layer.groups} groups: a triplet reads all input channels, which no grouped weight does"
        return None

    def rank_on(self, layer: Layer) -> int:
        """The number of triplets that there are."""
        return self.rank if self.kept_rank is None else self.kept_rank

    def with_rank(self, rank: int | None) -> Self:
        """The same method with another number of triplets."""
        return self if rank is None else dataclasses.replace(self, rank=rank, kept_rank=None)


def _scaled_up(p: Mapping[str, Tensor], layer: Layer) -> Tensor:
    up = p["up"] * (p["singular"] * p["scale"])
    return up.reshape(layer.up_shape(up.shape[-1]))
