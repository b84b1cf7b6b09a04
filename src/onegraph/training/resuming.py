"""Going on from a state: which one, and whether anything is left to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from onegraph.errors import ConfigurationError
from onegraph.training.state import Freedom, Resumable, SavedState, check_resumable, read_state

C = TypeVar("C", bound=Resumable)


def resumed(configuration: C, freedom: Freedom, say: Callable[[str], None]) -> SavedState[C] | None:
    """The state that a run goes on from, read and compared with its settings; None for a new run.

    Raises:
        CheckpointError, ConfigurationError: As ``read_state`` and ``check_resumable``.
    """
    if configuration.run.resume is None:
        return None
    saved = read_state(Path(configuration.run.resume), type(configuration))
    for line in check_resumable(saved, configuration, freedom):
        say(f"resuming with another setting, {line}")
    return saved


def require_steps_left(saved: SavedState[C] | None, num_steps: int, flag: str) -> None:
    """Raises ConfigurationError (``nothing-left``) when a resumed run has all its steps behind it; ``flag`` is how steps are asked for."""
    if saved is not None and saved.position.step >= num_steps:
        raise ConfigurationError(
            f"{saved.folder} has {saved.position.step} of {num_steps} steps behind it: nothing is left to train.",
            hint=f"a larger number, such as {flag}{2 * saved.position.step} (with a constant learning rate)",
            code="nothing-left",
        )
