"""VeRA: two frozen random projections that all layers share, and two trained vectors a layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_input, used_probabilities
from onegraph.methods.fields import finite_problems, probability_problems, raise_all, rank_problems, whole_problems


@dataclass(frozen=True, kw_only=True)
class VeRA(Method):
    """y = W x + b + s (b_up * B[:O] (b_down * A[:, :I] drop(x))), with s = 1.

    Shapes:
        x (..., I), ``gain_down`` (R,), ``gain_up`` (O,), y (..., O); shared and never trained: A ``projection_down`` (R, in_width) and
        B ``projection_up`` (out_width, R). They are cast to the dtype of x; y keeps the base layer's dtype.

    Args:
        rank: R, at least 1. It is larger than LoRA's: a channel costs one trained number.
        d_initial: What ``gain_down`` starts at.
        projection_key: Seed of A and B: the same key gives PEFT's projections, bit for bit.
        input_dropout: Probability in [0, 1) that an element of x is dropped on its way to A.
        in_width: Columns of A, at least the input features of every layer; None: of the widest, which ``settled`` fills in.
        out_width: Rows of B, likewise.

    Raises:
        ConfigurationError: ``rank``, ``finite-number``, ``whole-number``, ``probability``; ``unsettled-width`` where the width of the
            shared tensors is asked for before it is known.

    Source:
        Kopiczko et al. 2023, https://arxiv.org/abs/2310.11454, equation 2.
    """

    name: ClassVar[str] = "vera"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "d_initial", "projection_key", "input_dropout", "in_width", "out_width"})
    random_settings: ClassVar[frozenset[str]] = frozenset({"input_dropout"})

    rank: int = 256
    d_initial: float = 0.1
    projection_key: int = 0
    input_dropout: float = 0.0
    in_width: int | None = None
    out_width: int | None = None

    def __post_init__(self) -> None:
        widths: list[OnegraphError] = []
        for name in ("in_width", "out_width"):
            if getattr(self, name) is not None:
                widths += whole_problems(name, getattr(self, name), why="It is a size of the projections that all layers share.")
        raise_all(
            rank_problems(self.rank),
            finite_problems("d_initial", self.d_initial, why="The vector at the rank starts at it.", hint="0.1 is usual"),
            whole_problems("projection_key", self.projection_key, least=0, why="It is the seed of the shared projections."),
            probability_problems(self, ("input_dropout",)),
            widths,
        )

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``gain_down`` and ``gain_up``."""
        return {
            "gain_down": ParameterSpec(shape=(self.rank,), rank_axes=(0,)),
            "gain_up": ParameterSpec(shape=(layer.out_features,)),
        }

    def shared_parameters(self) -> dict[str, ParameterSpec]:
        """``projection_down`` and ``projection_up``, never trained."""
        in_width, out_width = self._widths()
        return {
            "projection_down": ParameterSpec(shape=(self.rank, in_width), rank_axes=(0,), trained=False),
            "projection_up": ParameterSpec(shape=(out_width, self.rank), rank_axes=(1,), trained=False),
        }

    def with_room_for(self, other: Method) -> Self:
        """With the larger widths: a layer reads only as much of A and B as it is wide."""
        assert isinstance(other, VeRA)
        wide = {name: max(getattr(self, name) or 0, getattr(other, name) or 0) or None for name in ("in_width", "out_width")}
        return dataclasses.replace(self, **wide)  # type: ignore[arg-type]

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, and the dropout where it is used."""
        return {"scale": 1.0, **used_probabilities(self, layer, ("input_dropout",))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """``gain_down`` at ``d_initial``, ``gain_up`` 0: the adapter starts as the identity."""
        return {"gain_down": torch.full((self.rank,), self.d_initial), "gain_up": torch.zeros(layer.out_features)}

    def initial_shared(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Kaiming uniform (gain sqrt 2), A before B, from a generator of their own that the key seeds."""
        in_width, out_width = self._widths()
        own = torch.Generator().manual_seed(self.projection_key)
        return {"projection_down": _drawn((self.rank, in_width), own), "projection_up": _drawn((out_width, self.rank), own)}

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Project, gain, expand by the gained projection, added to y in the same operation.

        A gain on the activations of the output side would be one more pass over them forward and one backward; on B (O, R) it costs the
        gradient of B, a product, and nothing that is kept.
        """
        down, up = _own_part(p, layer)
        h = layer.project(dropped_input(x, p, training=training), down) * p["gain_down"].to(x.dtype)
        return layer.add_expanded(y, h, up * (p["gain_up"] * p["scale"]).unsqueeze(1))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s diag(b_up) B diag(b_down) A."""
        down, up = _own_part(p, layer)
        change = layer.compose(down * p["gain_down"].unsqueeze(1), up * (p["gain_up"] * p["scale"]).unsqueeze(1))
        return (weight + change).to(weight.dtype)

    def check(self, layer: Layer) -> str | None:
        """It may not be wider than projections whose width was given."""
        if (reason := super().check(layer)) is not None:
            return reason
        for name, size in (("in_width", layer.in_features), ("out_width", layer.out_features)):
            width = getattr(self, name)
            if width is not None and size > width:
                return f"the shared projections have {name}={width}, the layer needs {size}"
        return None

    def settled(self, layer: Layer, layers: Sequence[Layer]) -> Self:
        """With the widths of the widest layers, where they were not given."""
        return dataclasses.replace(
            self,
            in_width=self.in_width or max(other.in_features for other in layers),
            out_width=self.out_width or max(other.out_features for other in layers),
        )

    def _widths(self) -> tuple[int, int]:
        if self.in_width is None or self.out_width is None:
            raise ConfigurationError(
                f"in_width={self.in_width}, out_width={self.out_width}: the size of the shared projections isn't known",
                why="It is that of the widest layer.",
                hint="settled(layer, layers) fills it in",
                code="unsettled-width",
            )
        return self.in_width, self.out_width


def _own_part(p: Mapping[str, Tensor], layer: Layer) -> tuple[Tensor, Tensor]:
    """The part of the shared projections that is as large as the layer, and its rank."""
    rank = p["gain_down"].shape[-1]
    return p["projection_down"][:rank, : layer.in_features], p["projection_up"][: layer.out_features, :rank]


def _drawn(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    deviation = math.sqrt(2) / math.sqrt(shape[1])
    bound = math.sqrt(3.0) * deviation  # in this order: a file may hold the key alone, so the bits matter
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
