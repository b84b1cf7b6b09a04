"""Checks of fields that several methods have. Each returns what is wrong, so that a method raises all of it at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

from onegraph.errors import ConfigurationError, OnegraphError, nearest


def raise_all(*problems: list[OnegraphError]) -> None:
    """Raise everything that the checks found, together; nothing found: go on."""
    found = [problem for group in problems for problem in group]
    if found:
        raise ConfigurationError.collected(found)


def is_whole(value: object, least: int = 1) -> bool:
    """Whether it is a whole number (True and False aren't) of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def rank_problems(value: object, *, name: str = "rank") -> list[OnegraphError]:
    """A rank is a whole number, at least 1. Code ``rank``."""
    if is_whole(value):
        return []
    return [
        ConfigurationError(
            f"{name}={value!r} is not a rank",
            why="The rank is the number of channels between the two factors: a whole number, at least 1.",
            hint="4, 8, 16 and 32 are usual",
            code="rank",
        )
    ]


def whole_problems(name: str, value: object, *, least: int = 1, why: str, hint: str = "") -> list[OnegraphError]:
    """A whole number of at least ``least``. Code ``whole-number``."""
    if is_whole(value, least):
        return []
    return [ConfigurationError(f"{name}={value!r} is not a whole number of at least {least}", why=why, hint=hint, code="whole-number")]


def finite_problems(name: str, value: object, *, why: str, hint: str = "", code: str = "finite-number") -> list[OnegraphError]:
    """A finite number. Code ``finite-number``, unless another is given."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return []
    return [ConfigurationError(f"{name}={value!r} is not a finite number", why=why, hint=hint, code=code)]


def alpha_problems(value: float | None) -> list[OnegraphError]:
    """Alpha is a finite number, or None for the rank. Code ``alpha``."""
    if value is None:
        return []
    why = "The adapter's output is multiplied by alpha / rank."
    return finite_problems("alpha", value, why=why, hint="alpha=None means alpha = rank, so that the factor is 1", code="alpha")


def probability_problems(method: object, names: Iterable[str]) -> list[OnegraphError]:
    """The named fields are probabilities of dropping, in [0, 1). Code ``probability``."""
    return [
        ConfigurationError(
            f"{name}={getattr(method, name)!r} is not in [0, 1)",
            why="It is the probability of dropping; at 1 nothing would be left to train.",
            hint=f"{name}=0.1 drops one in ten",
            code="probability",
        )
        for name in names
        if not 0.0 <= getattr(method, name) < 1.0
    ]


def choice_problems(name: str, value: str, choices: Iterable[str]) -> list[OnegraphError]:
    """One of a few words. The code is the field's name."""
    known = list(choices)
    if value in known:
        return []
    return [ConfigurationError(f"{name}={value!r} is unknown", hint=f"use {' or '.join(nearest(value, known) or known)}", code=name)]
