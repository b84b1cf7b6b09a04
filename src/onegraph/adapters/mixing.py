"""How several differences of one tensor become one: summed, pruned, voted on; and how much of the result is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError, nearest

_NEGLIGIBLE = 1e-9
"""Singular values below this part of the largest are what float64 leaves of zeros, and far below what float32 factors can hold."""

PRUNING = ("magnitude", "dare", "ties", "dare_ties")
WHOLE = ("sum", "cat", "svd")
SIGNS = ("total", "frequency")


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """One way to combine, with its numbers; checked when it is made. The fields are those of ``combine``.

    Raises:
        ConfigurationError: ``combine-how``, ``combine-rank``, ``combine-energy``, ``combine-density``, ``combine-sign``,
            ``combine-option``; several are collected.
    """

    how: str
    rank: int | None = None
    energy: float | None = None
    density: float | None = None
    majority_sign: str = "total"
    generator: torch.Generator | None = None

    @property
    def prunes(self) -> bool:
        """Whether only a part of each difference is used."""
        return self.how in PRUNING

    @property
    def truncates(self) -> bool:
        """Whether only a part of the result is kept."""
        return self.how not in {"sum", "cat"}

    def __post_init__(self) -> None:
        if self.how not in (*WHOLE, *PRUNING):
            near = nearest(str(self.how), (*WHOLE, *PRUNING)) or [*WHOLE, *PRUNING]
            raise ConfigurationError(f"how={self.how!r} is no way to combine adapters", hint=f"use {', '.join(near)}", code="combine-how")
        problems: list[OnegraphError] = []
        if self.rank is not None and (isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1):
            problems.append(ConfigurationError(f"rank={self.rank!r} is not a rank", hint="a whole number, 1 or more", code="combine-rank"))
        if self.energy is not None and not 0.0 < self.energy <= 1.0:
            what = f"energy={self.energy!r} is not in (0, 1]"
            problems.append(ConfigurationError(what, hint="energy=0.99 keeps 99 % of the square", code="combine-energy"))
        if self.truncates and self.rank is None and self.energy is None:
            problems.append(
                ConfigurationError(
                    f"how={self.how!r} needs a rank",
                    why="The result is a LoRA, of a rank that the adapters don't say.",
                    hint="rank=16, or energy=0.99 for as many as it takes",
                    code="combine-rank",
                )
            )
        if self.prunes and (self.density is None or not 0.0 < self.density <= 1.0):
            what = f"density={self.density!r} is not in (0, 1]"
            why = f"how={self.how!r} uses only a part of each adapter's numbers."
            problems.append(ConfigurationError(what, why=why, hint="density=0.2 uses one in five", code="combine-density"))
        if self.majority_sign not in SIGNS:
            what = f"majority_sign={self.majority_sign!r} is unknown"
            problems.append(ConfigurationError(what, hint=f"use {' or '.join(SIGNS)}", code="combine-sign"))
        without_use = {
            "rank": self.rank is not None and not self.truncates,
            "energy": self.energy is not None and not self.truncates,
            "density": self.density is not None and not self.prunes,
            "majority_sign": self.majority_sign != "total" and not self.how.endswith("ties"),
            "generator": self.generator is not None and not self.how.startswith("dare"),
        }
        for option in (option for option, given in without_use.items() if given):
            what = f"{option}= has no meaning for how={self.how!r}"
            hint = 'how="svd" keeps a part of the sum' if option in {"rank", "energy"} else f"leave {option}= out"
            problems.append(ConfigurationError(what, why="It would be ignored.", hint=hint, code="combine-option"))
        if problems:
            raise ConfigurationError.collected(problems)

    def mixed(self, differences: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """One difference from several of a shape."""
        if self.prunes:
            density = 1.0 if self.density is None else self.density
            random = self.how.startswith("dare")
            differences = [randomly_kept(each, density, self.generator) if random else largest(each, density) for each in differences]
        weighted = torch.stack([weight * each for each, weight in zip(differences, weights, strict=True)])
        return mean_of_majority(weighted, self.majority_sign) if self.how.endswith("ties") else weighted.sum(dim=0)

    def num_kept(self, values: Tensor) -> int:
        """How many singular values, the largest first, are kept: at least one."""
        number = len(values)
        if self.energy is not None:
            held = values.square().cumsum(dim=0)
            number = int((held < self.energy * held[-1]).sum()) + 1
        if self.rank is not None:
            number = min(number, self.rank)
        return max(1, min(number, int((values > _NEGLIGIBLE * values[0]).sum())))


def largest(values: Tensor, density: float) -> Tensor:
    """The part ``density`` of the numbers that is largest in magnitude, at least one; zeros in place of the others."""
    flat = values.flatten()
    kept = flat.abs().topk(max(1, round(density * flat.numel()))).indices
    return torch.zeros_like(flat).index_copy(0, kept, flat[kept]).view(values.shape)


def randomly_kept(values: Tensor, density: float, generator: torch.Generator | None) -> Tensor:
    """Every number with the probability ``density``, divided by it; drawn on the CPU, so that a seed means the same everywhere."""
    kept = torch.rand(values.shape, generator=generator) < density
    return values * kept.to(values.device) / density


def mean_of_majority(stacked: Tensor, majority_sign: str) -> Tensor:
    """The mean over the first axis of the numbers that have the prevailing sign; 0 where none prevails."""
    prevailing = stacked.sum(dim=0).sign()
    if majority_sign == "frequency":
        frequent = stacked.sign().sum(dim=0).sign()
        prevailing = torch.where(frequent == 0, prevailing, frequent)
    agreeing = (stacked.sign() == prevailing) & (prevailing != 0)
    return (stacked * agreeing).sum(dim=0) / agreeing.sum(dim=0).clamp(min=1)
