"""Runs of a training loop that tests watch: how each of them ended, and acting between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onegraph.training.loop import AnyLoop


def outcomes_of(loop: type[AnyLoop[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How each run from here on ended."""
    found: list[Any] = []
    run = loop.run

    def remember(self: AnyLoop[Any, Any, Any]) -> Any:
        found.append(run(self))
        return found[-1]

    monkeypatch.setattr(loop, "run", remember)
    return found


def after_step(loop: type[AnyLoop[Any, Any, Any]], number: int, act: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Acts in the middle of optimiser step ``number`` + 1, or right after step ``number``: between reporting it and what follows."""
    report = loop._report

    def reported(self: AnyLoop[Any, Any, Any], *arguments: Any) -> None:
        report(self, *arguments)
        if self.training.position.step == number:
            act(self)

    monkeypatch.setattr(loop, "_report", reported)
