"""Functions that no graph takes in: they change what a graph reads, and what they call is compiled by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function, and all that it calls, eager: also where its caller is compiled."""
    wrapped: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function eager, also where its caller is compiled; what it calls is compiled by itself."""
    wrapped: Callable[P, R] = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return wrapped
