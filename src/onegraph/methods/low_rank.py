"""What LoRA and the methods made from it share: two factors beside the layer, their strength, start and dropouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import PROBABILITIES, used_probabilities
from onegraph.methods.fields import alpha_problems, choice_problems, probability_problems, raise_all, rank_problems
from onegraph.methods.inits import Init, gaussian, kaiming, normal

_INITS: dict[str, Init] = {"kaiming": kaiming, "gaussian": gaussian}


@dataclass(frozen=True, kw_only=True)
class LowRank(Method):
    """A method with the factors D ``down`` (R, I, *kernel) and U ``up`` (O, R / groups, 1...), and the strength s = alpha / rank.

    Args:
        rank: R, at least 1; with a grouped convolution a multiple of its groups.
        alpha: Strength; None means ``rank``, so that s = 1.
        rslora: s = alpha / sqrt(rank) instead.
        dropout: Probability in [0, 1) that an element of D x is dropped (sd-scripts).
        input_dropout: Probability in [0, 1) that an element of x is dropped on its way to D (PEFT's ``lora_dropout``). Not on embeddings.
        rank_dropout: Probability in [0, 1) that a rank channel is dropped for a whole sample (sd-scripts).
        module_dropout: Probability in [0, 1) that the adapter is left out for the whole batch, without rescaling (sd-scripts).
        init: "kaiming" (uniform, a = sqrt 5) or "gaussian" (deviation 1 / rank) for D; U starts at 0. Embeddings start with D = 0 and a
            standard normal U.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability`` or ``init`` out of range.
    """

    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "rslora", "init", *PROBABILITIES})
    random_settings: ClassVar[frozenset[str]] = frozenset(PROBABILITIES)

    rank: int = 8
    alpha: float | None = None
    rslora: bool = False
    dropout: float = 0.0
    input_dropout: float = 0.0
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    init: str = "kaiming"

    def __post_init__(self) -> None:
        raise_all(
            rank_problems(self.rank),
            alpha_problems(self.alpha),
            probability_problems(self, PROBABILITIES),
            choice_problems("init", self.init, _INITS),
        )
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """s: alpha / rank, or alpha / sqrt(rank) with ``rslora``."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``down`` and ``up``."""
        return {
            "down": ParameterSpec(shape=layer.down_shape(self.rank), rank_axes=(0,), rank_blocks=layer.groups),
            "up": ParameterSpec(shape=layer.up_shape(self.rank), rank_axes=(1,)),
        }

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, and each dropout that is used."""
        return {"scale": self.scale, **used_probabilities(self, layer)}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """One factor drawn, the other 0: the adapter starts as the identity."""
        tensors = self.identity(layer)
        if layer.kind == "embedding":
            tensors["up"] = normal(layer.up_shape(self.rank), generator)
        else:
            tensors["down"] = _INITS[self.init](layer.down_shape(self.rank), generator)
        return tensors

    def check(self, layer: Layer) -> str | None:
        """With groups, the rank channels are shared out evenly."""
        if (reason := super().check(layer)) is not None:
            return reason
        if self.rank % layer.groups:
            return f"its {layer.groups} groups need a rank that is a multiple of {layer.groups}, not {self.rank}"
        return None
