"""Modules hung in the place of others, and taken back."""

from __future__ import annotations

from torch import nn


class Replacement:
    """What was hung where something else was, in order, so that it can be undone to the very objects."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, str, nn.Module | None]] = []

    def hang(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Put a module where another one is."""
        self._before.append((parent, name, parent._modules[name]))
        parent._modules[name] = module

    def undo(self) -> None:
        """Hang back what was there."""
        for parent, name, module in reversed(self._before):
            parent._modules[name] = module
        self._before = []
