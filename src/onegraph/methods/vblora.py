"""VB-LoRA: low-rank factors put together from one bank of vectors that all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_input, used_probabilities
from onegraph.methods.fields import finite_problems, probability_problems, raise_all, rank_problems, whole_problems
from onegraph.methods.inits import normal


@dataclass(frozen=True, kw_only=True)
class VBLoRA(Method):
    """y = W x + b + s U D drop(x), with s = 1; each stretch of V numbers in D and U is a mixture of k vectors of a bank of N.

    The weights of a mixture are the softmax of its k largest logits. Logits of 0 are a mixture too: where the rank is padded, what is
    beyond the setting ``rank`` is taken out of U.

    Shapes:
        x (..., I), ``logits_down`` (R, I / V, N), ``logits_up`` (O / V, R, N), y (..., O); shared and trained: ``vector_bank`` (N, V).
        D and U are cast to the dtype of x; y keeps the base layer's dtype.

    Args:
        rank: R, at least 1.
        topk: k, in 1 to ``num_vectors``.
        num_vectors: N, vectors of the bank.
        vector_length: V; it divides the input and the output features of every layer.
        input_dropout: Probability in [0, 1) that an element of x is dropped on its way to D.
        bank_bound: The bank starts uniform in +-``bank_bound``.
        logits_deviation: The logits start normal with this standard deviation.

    Raises:
        ConfigurationError: ``rank``, ``whole-number``, ``topk``, ``probability``, ``finite-number``.

    Source:
        Li et al. 2024, https://arxiv.org/abs/2405.15179, equations 3 to 5. As in PEFT it doesn't start as the identity.
    """

    name: ClassVar[str] = "vblora"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "input_dropout", "bank_bound", "logits_deviation"})
    random_settings: ClassVar[frozenset[str]] = frozenset({"input_dropout"})

    rank: int = 4
    topk: int = 2
    num_vectors: int = 256
    vector_length: int = 256
    input_dropout: float = 0.0
    bank_bound: float = 0.02
    logits_deviation: float = 0.1

    def __post_init__(self) -> None:
        wholes = [
            *whole_problems("topk", self.topk, why="It is the number of vectors that a mixture is of.", hint="topk=2 is usual"),
            *whole_problems("num_vectors", self.num_vectors, why="It is the number of vectors in the bank.", hint="256 is usual"),
            *whole_problems("vector_length", self.vector_length, why="It is the length of the vectors in the bank."),
        ]
        too_many: list[OnegraphError] = []
        if not wholes and self.topk > self.num_vectors:
            too_many = [
                ConfigurationError(
                    f"topk={self.topk} is more than num_vectors={self.num_vectors}",
                    why="A mixture is of different vectors of the bank.",
                    hint=f"topk at most {self.num_vectors}; 2 is usual",
                    code="topk",
                )
            ]
        raise_all(
            rank_problems(self.rank),
            wholes,
            too_many,
            probability_problems(self, ("input_dropout",)),
            finite_problems("bank_bound", self.bank_bound, why="The bank starts uniform in +-bank_bound.", hint="0.02 is usual"),
            finite_problems("logits_deviation", self.logits_deviation, why="It is the deviation of the first logits.", hint="0.1 is usual"),
        )

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``logits_down`` and ``logits_up``."""
        length = self.vector_length
        return {
            "logits_down": ParameterSpec(shape=(self.rank, layer.in_features // length, self.num_vectors), rank_axes=(0,)),
            "logits_up": ParameterSpec(shape=(layer.out_features // length, self.rank, self.num_vectors), rank_axes=(1,)),
        }

    def shared_parameters(self) -> dict[str, ParameterSpec]:
        """``vector_bank``, trained."""
        return {"vector_bank": ParameterSpec(shape=(self.num_vectors, self.vector_length))}

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, the ``rank``, and the dropout where it is used."""
        return {"scale": 1.0, "rank": float(self.rank), **used_probabilities(self, layer, ("input_dropout",))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Normal logits: the adapter does not start as the identity."""
        return {name: normal(spec.shape, generator) * self.logits_deviation for name, spec in self.parameters(layer).items()}

    def initial_shared(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """A uniform bank."""
        return {"vector_bank": (torch.rand(self.num_vectors, self.vector_length, generator=generator) * 2 - 1) * self.bank_bound}

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Down, up."""
        down, up = self.factors(p)
        h = layer.project(dropped_input(x, p, training=training), down)
        return layer.add_expanded(y, h, up * _strengths(p).to(up.dtype))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s U D."""
        down, up = self.factors(p)
        return (weight + layer.compose(down, up * _strengths(p).to(up.dtype))).to(weight.dtype)

    def factors(self, p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """D (R, I) and U (O, R), without the scale.

        The mixtures of both are one product with the bank: nothing is gathered, so that no gradient of the bank is scattered.
        """
        down, up = p["logits_down"], p["logits_up"]
        logits = torch.cat([down.flatten(0, 1), up.flatten(0, 1)])
        largest, places = logits.topk(self.topk, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, places, largest.softmax(-1))
        mixtures = weights.to(p["vector_bank"].dtype) @ p["vector_bank"]
        num_down = down.shape[0] * down.shape[1]
        found_down = mixtures[:num_down].reshape(down.shape[0], -1)  # (R I / V, V) -> (R, I)
        found_up = mixtures[num_down:].reshape(*up.shape[:2], -1).transpose(1, 2).flatten(0, 1)  # (O / V, R, V) -> (O, R)
        return found_down, found_up

    def check(self, layer: Layer) -> str | None:
        """Input and output are whole numbers of vectors."""
        if (reason := super().check(layer)) is not None:
            return reason
        for side, size in (("input", layer.in_features), ("output", layer.out_features)):
            if size % self.vector_length:
                return f"its {size} {side} features are no multiple of vector_length={self.vector_length}"
        return None


def _strengths(p: Mapping[str, Tensor]) -> Tensor:
    """(R,): the scale for every channel of the adapter, 0 for those that only the padding has. Their logits get no gradient then."""
    num_ranks = p["logits_down"].shape[-3]
    return p["scale"] * (torch.arange(num_ranks, device=p["rank"].device) < p["rank"])
