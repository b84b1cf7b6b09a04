"""MiSS: a small block, repeated all over the weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_input, used_probabilities
from onegraph.methods.fields import choice_problems, probability_problems, raise_all, rank_problems, whole_problems

_FORMS = ("balance", "mini", "bat")
_DEFAULT_RANK = 64


@dataclass(frozen=True, kw_only=True)
class MiSS(Method):
    """W' = W + s M, M[o, i] = D[i mod R, o]: y = W x + b + s D^T (sum of x over chunks of R).

    ``form="mini"``: M[o, i] = D[i mod R, o mod ``out_rank``]. ``form="bat"``: with W cut into squares W_kc of R x R,
    M_kc = W_kc D_k + D_k.

    Shapes:
        x (..., I), D ``block``: (R, O), with "mini" (R, ``out_rank``), with "bat" (O / R, R, R); y (..., O). D is cast to the dtype of x.

    Args:
        rank: R, at most I. It decides which columns belong together, so adapters of different ranks share no graph, unless ``any_rank``.
        form: "balance", "mini" or "bat".
        out_rank: Width of the block of "mini"; it divides O.
        input_dropout: Probability in [0, 1) that an element of x is dropped on its way to D (PEFT's ``miss_dropout``). Not with "bat".
        any_rank: Whether adapters of all ranks up to the capacity share a graph, which ``capacity=`` and ``reserve(rank=)`` ask for. What
            belongs together is then a number in a tensor, and adding it up a product as wide as LoRA's D. Not with "bat".

    Raises:
        ConfigurationError: ``rank``, ``form``, ``whole-number``, ``probability``, ``miss-form``.

    Source:
        Kang and Yin 2024, https://arxiv.org/abs/2409.15371, and PEFT 0.21, whose three forms these are.
    """

    name: ClassVar[str] = "miss"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"input_dropout"})
    ways: ClassVar[frozenset[str]] = frozenset({"any_rank"})
    room: ClassVar[frozenset[str]] = frozenset({"any_rank"})
    random_settings: ClassVar[frozenset[str]] = frozenset({"input_dropout"})

    rank: int = _DEFAULT_RANK
    form: str = "balance"
    out_rank: int = 1
    input_dropout: float = 0.0
    any_rank: bool = False

    def __post_init__(self) -> None:
        raise_all(
            rank_problems(self.rank),
            choice_problems("form", self.form, _FORMS),
            whole_problems("out_rank", self.out_rank, why='It is the width of the block of form="mini".', hint="it divides the output"),
            probability_problems(self, ("input_dropout",)),
            self._form_problems(),
        )

    @property
    def additive(self) -> bool:  # type: ignore[override]
        """Not where the form is "bat", which multiplies the weight."""
        return self.form != "bat"

    def structure(self) -> Self:
        """With the rank, unless ``any_rank``."""
        same = super().structure()
        return dataclasses.replace(same, rank=_DEFAULT_RANK) if self.any_rank else same

    def with_room(self, layer: Layer, rank: int) -> Self:
        """With ``any_rank``, unless the form is "bat": R of its columns are mixed with each other, by more numbers the larger R is."""
        return self if self.form == "bat" else dataclasses.replace(self, any_rank=True)

    def rank_on(self, layer: Layer) -> int | None:
        """The rank, None where the form is "bat", whose blocks can't be padded."""
        return None if self.form == "bat" else self.rank

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``block``."""
        shapes = {
            "balance": (self.rank, layer.out_features),
            "mini": (self.rank, self.out_rank),
            "bat": (layer.out_features // self.rank, self.rank, self.rank),
        }
        return {"block": ParameterSpec(shape=shapes[self.form], rank_axes=() if self.form == "bat" else (0,))}

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, ``rank`` where it isn't in the structure, and ``input_dropout`` where it is used."""
        own = {"rank": float(self.rank)} if self.any_rank else {}
        return {"scale": 1.0, **own, **used_probabilities(self, layer, ("input_dropout",))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """D = 0."""
        return self.identity(layer)

    def beside(self, layer: Layer) -> bool:
        """Not where the form is "bat": activations would need as many products as the layer itself, the weight far fewer."""
        return self.form != "bat"

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The chunks of x added up, then D."""
        x = dropped_input(x, p, training=training)
        if "rank" in p:
            h = layer.project(x, _places(p, layer))
        else:
            if rest := x.shape[-1] % self.rank:
                x = functional.pad(x, (0, self.rank - rest))
            h = x.reshape(*x.shape[:-1], x.shape[-1] // self.rank, self.rank).sum(-2)
        block = p["block"] * p["scale"].to(p["block"].dtype)
        if self.form == "balance":
            return layer.add_expanded(y, h, block.t())
        narrow = h @ block.to(h.dtype)
        repeated = y.reshape(*y.shape[:-1], y.shape[-1] // self.out_rank, self.out_rank) + narrow.unsqueeze(-2).to(y.dtype)
        return repeated.reshape(y.shape)

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s M."""
        outs, ins = weight.shape
        block = p["block"] * p["scale"].to(p["block"].dtype)
        if self.form == "bat":
            block = block.to(weight.dtype)
            parts = weight.reshape(outs // self.rank, -1, self.rank)  # rows of block k and chunks together: (O / R, R * I / R, R)
            change = (parts @ block).reshape(outs // self.rank, self.rank, -1, self.rank) + block.unsqueeze(-2)
            return weight + change.reshape(outs, ins).to(weight.dtype)
        if "rank" in p:
            columns = (block.t() @ _places(p, layer).to(block.dtype)).repeat(outs // block.shape[1], 1)
        else:
            columns = block.t().repeat(outs // block.shape[1], -(-ins // self.rank))[:, :ins]
        return weight + columns.to(weight.dtype)

    def check(self, layer: Layer) -> str | None:
        """The blocks have to fit into the weight."""
        if (reason := super().check(layer)) is not None:
            return reason
        outs, ins = layer.out_features, layer.in_features
        if self.rank > ins:
            return f"rank={self.rank} is more than its {ins} input features"
        if self.form == "bat" and (ins % self.rank or outs % self.rank):
            both = [size for size in range(1, min(ins, outs) + 1) if ins % size == 0 and outs % size == 0]
            return f'form="bat" needs a rank that divides its {ins} inputs and {outs} outputs: {", ".join(map(str, both))}'
        if self.form == "mini" and outs % self.out_rank:
            divisors = [size for size in range(1, outs + 1) if outs % size == 0]
            return f"out_rank={self.out_rank} doesn't divide its {outs} outputs; it can be {', '.join(map(str, divisors))}"
        return None

    def _form_problems(self) -> list[OnegraphError]:
        problems: list[OnegraphError] = []
        if self.form == "bat" and self.any_rank:
            problems.append(
                ConfigurationError(
                    'form="bat" with any_rank=True',
                    why="Its blocks mix as many columns as the rank says, which can't be a number in a tensor.",
                    hint="leave any_rank out: adapters of the form bat share a graph with those of their rank",
                    code="miss-form",
                )
            )
        if self.form == "bat" and self.input_dropout:
            problems.append(
                ConfigurationError(
                    f'form="bat" with input_dropout={self.input_dropout!r}',
                    why="That form is a new weight: there is no input of its own to drop from.",
                    hint='form="balance" has the dropout',
                    code="miss-form",
                )
            )
        if self.form != "mini" and self.out_rank != 1:
            problems.append(
                ConfigurationError(
                    f'out_rank={self.out_rank!r} with form="{self.form}"',
                    why="Only the block of the form mini has a width of its own.",
                    hint='form="mini"',
                    code="miss-form",
                )
            )
        return problems


def _places(p: Mapping[str, Tensor], layer: Layer) -> Tensor:
    """(R, I): 1 where a column belongs to a row of the block, i mod ``rank``; R is the capacity. Rows beyond the rank have no column."""
    rank = p["rank"].clamp(min=1)  # the identity has none
    rows = torch.arange(p["block"].shape[-2], dtype=rank.dtype, device=rank.device)
    columns = torch.arange(layer.in_features, dtype=rank.dtype, device=rank.device)
    return rows.unsqueeze(1) == torch.remainder(columns, rank)
