"""Who is told that a model got its first adapter: rooms above hang their own parts on the model then."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_told: list[Callable[[nn.Module], None]] = []


def when_adapted(function: Callable[[nn.Module], None]) -> None:
    """Call a function with every model that gets its first adapter from now on."""
    if function not in _told:
        _told.append(function)


def tell_adapted(model: nn.Module) -> None:
    """Call them all."""
    for function in _told:
        function(model)
