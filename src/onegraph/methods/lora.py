"""LoRA: a low-rank difference beside the frozen weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError, nearest
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.inits import Init, gaussian, kaiming, normal

_INITS: dict[str, Init] = {"kaiming": kaiming, "gaussian": gaussian}
_PROBABILITIES = ("dropout", "input_dropout", "rank_dropout", "module_dropout")


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
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "rslora", "init", *_PROBABILITIES})
    random_settings: ClassVar[frozenset[str]] = frozenset(_PROBABILITIES)

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
        problems: list[OnegraphError] = []
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            problems.append(
                ConfigurationError(
                    f"rank={self.rank!r} is not a rank",
                    why="The rank is the number of channels between the two factors: a whole number, at least 1.",
                    hint="4, 8, 16 and 32 are usual",
                    code="rank",
                )
            )
        elif self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))
        if self.alpha is not None and not math.isfinite(self.alpha):
            problems.append(
                ConfigurationError(
                    f"alpha={self.alpha!r} is not a finite number",
                    why="The adapter's output is multiplied by alpha / rank.",
                    hint="alpha=None means alpha = rank, so that the factor is 1",
                    code="alpha",
                )
            )
        for name in _PROBABILITIES:
            if not 0.0 <= getattr(self, name) < 1.0:
                problems.append(
                    ConfigurationError(
                        f"{name}={getattr(self, name)!r} is not in [0, 1)",
                        why="It is the probability of dropping; at 1 nothing would be left to train.",
                        hint=f"{name}=0.1 drops one in ten",
                        code="probability",
                    )
                )
        if self.init not in _INITS:
            names = nearest(self.init, _INITS) or list(_INITS)
            problems.append(ConfigurationError(f"init={self.init!r} is unknown", hint=f"use {' or '.join(names)}", code="init"))
        if problems:
            raise ConfigurationError.collected(problems)

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
        used = {name: getattr(self, name) for name in _PROBABILITIES if getattr(self, name) > 0}
        if layer.kind == "embedding":
            used.pop("input_dropout", None)  # ids can't be dropped elementwise
        return {"scale": self.scale, **used}

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
        if training and "input_dropout" in p and x.is_floating_point():  # ids have no elements to drop
            x = dropped(x, p["input_dropout"], x.shape)
        h = layer.project(x, p["down"])
        if training and "dropout" in p:
            h = dropped(h, p["dropout"], h.shape)
        if training and "rank_dropout" in p:
            axis = layer.channel_axis % h.dim()
            h = dropped(h, p["rank_dropout"], [size if position in (0, axis) else 1 for position, size in enumerate(h.shape)])
        scale = p["scale"]
        if training and "module_dropout" in p:
            scale = scale * (torch.rand((), device=scale.device) >= p["module_dropout"])
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


def dropped(values: Tensor, probability: Tensor, shape: torch.Size | list[int]) -> Tensor:
    """``values`` with elements of ``shape`` (broadcast) set to 0 with a probability held in a 0-d tensor, the rest times 1 / (1 - p)."""
    kept = torch.rand(shape, device=values.device) >= probability
    return values * kept * (1 / (1 - probability))
