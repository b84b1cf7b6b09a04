"""LoRA: a low-rank difference beside the frozen weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import PROBABILITIES, dropped_input, dropped_ranks, dropped_scale, used_probabilities
from onegraph.methods.fields import alpha_problems, choice_problems, probability_problems, raise_all, rank_problems
from onegraph.methods.inits import Init, gaussian, kaiming, normal

_INITS: dict[str, Init] = {"kaiming": kaiming, "gaussian": gaussian}


@dataclass(frozen=True, kw_only=True)
class LoRA(Method):
    """y = W x + b + s U drop(D drop_in(x)), with s = alpha / rank.

    Shapes:
        x (..., I), D ``down`` (R, I), U ``up`` (O, R), ``up_bias`` (O,), y (..., O); convolutions carry D (R, I, *kernel) and
        U (O, R / groups, 1...). D and U are cast to the dtype of x; y keeps the base layer's dtype.

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
        bias: Whether U has a bias; it is scaled by s too.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability`` or ``init`` out of range.

    Source:
        Hu et al. 2021, https://arxiv.org/abs/2106.09685, equation 3; rslora: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732.
    """

    name: ClassVar[str] = "lora"
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
    bias: bool = False

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
        """``down``, ``up`` and, where asked for, ``up_bias``."""
        specs = {
            "down": ParameterSpec(shape=layer.down_shape(self.rank), rank_axes=(0,), rank_blocks=layer.groups),
            "up": ParameterSpec(shape=layer.up_shape(self.rank), rank_axes=(1,)),
        }
        if self.bias:
            specs["up_bias"] = ParameterSpec(shape=(layer.out_features,))
        return specs

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

    def check(self, layer: Layer) -> str | None:
        """With groups, the rank channels are shared out evenly."""
        if (reason := super().check(layer)) is not None:
            return reason
        if self.rank % layer.groups:
            return f"its {layer.groups} groups need a rank that is a multiple of {layer.groups}, not {self.rank}"
        return None
