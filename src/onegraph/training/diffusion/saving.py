"""Which files a run writes, under which names, and which older ones go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch

from onegraph.checkpoint.atomic import check_name, check_writable
from onegraph.errors import OutputError
from onegraph.training.diffusion.configuration import SavingSettings

When = Literal["step", "epoch"]

DTYPES: Mapping[str, torch.dtype] = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The names that ``save_precision`` takes."""

NETWORK_ENDING = ".safetensors"
_UNNAMED: Mapping[str, str] = {"step": "at", "epoch": "epoch"}


class SavePlan:
    """The names and the timing of a run's files, the field's conventions.

    ``last.safetensors`` or ``NAME.safetensors`` at the end, ``NAME-000001`` after an epoch, ``NAME-step00000100`` after a step, states the
    same with ``-state``; a run without a name writes ``epoch-000001`` and ``at-step00000100``.

    Args:
        settings: The saving branch of the configuration.
        num_epochs: Of the whole run; the last epoch's file is the final one.
    """

    def __init__(self, settings: SavingSettings, *, num_epochs: int) -> None:
        self.settings = settings
        self.num_epochs = num_epochs
        self.folder = Path(settings.output_dir)
        self.every_epochs = settings.save_every_n_epochs
        if settings.save_n_epoch_ratio is not None:
            self.every_epochs = max(1, math.floor(num_epochs / settings.save_n_epoch_ratio))

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the saved tensors."""
        return DTYPES[self.settings.save_precision or "float"]

    @property
    def final_network(self) -> Path:
        """The file at the end of the run."""
        return self.folder / f"{self.settings.name}{NETWORK_ENDING}"

    @property
    def final_state(self) -> Path:
        """The state at the end of the run."""
        return self.folder / f"{self.settings.name}-state"

    def network(self, when: When, number: int) -> Path:
        """The file after optimiser step or epoch ``number`` (from 1)."""
        return self.folder / f"{self._stem(when, number)}{NETWORK_ENDING}"

    def state(self, when: When, number: int) -> Path:
        """The state after optimiser step or epoch ``number`` (from 1)."""
        return self.folder / f"{self._stem(when, number)}-state"

    def check_places(self) -> None:
        """Raises OutputError now if a name of this run can't be written later: too long, or something else stands there."""
        check_name(self.network("step", 0))
        for path in (self.final_network, self.network("step", 0)):
            check_writable(path)
        for folder in (self.final_state, self.state("step", 0)):
            if folder.exists() and not folder.is_dir():
                raise OutputError(
                    f"{folder} is a file, and the state of this run goes there.",
                    hint="move it away, or choose another --output_name",
                    code="is-a-file",
                )

    def due_after_step(self, step: int) -> bool:
        """True when a file is to be written after optimiser step ``step``."""
        every = self.settings.save_every_n_steps
        return every is not None and step % every == 0

    def due_after_epoch(self, epoch: int) -> bool:
        """True when a file is to be written after epoch ``epoch``; the last epoch is the run's end and has the final file."""
        return self.every_epochs is not None and epoch % self.every_epochs == 0 and epoch < self.num_epochs

    def outdated(self, when: When, number: int) -> list[Path]:
        """The files and states that may go once those of ``number`` are written.

        Names come from arithmetic, never from a search: a file of another run is not ours to remove. ``save_last_n_epochs`` counts saved
        epochs, ``save_last_n_steps`` counts optimiser steps.
        """
        settings = self.settings
        keep = settings.save_last_n_steps if when == "step" else settings.save_last_n_epochs
        keep_state = settings.save_last_n_steps_state if when == "step" else settings.save_last_n_epochs_state
        oldest = self._outdated_numbers(when, number, keep)
        oldest_state = self._outdated_numbers(when, number, keep if keep_state is None else keep_state)
        paths = [self.network(when, old) for old in oldest] + [self.state(when, old) for old in oldest_state]
        return [path for path in paths if path.exists()]

    def _outdated_numbers(self, when: When, number: int, keep: int | None) -> Iterable[int]:
        every = self.settings.save_every_n_steps if when == "step" else self.every_epochs
        if keep is None or every is None:
            return ()
        last = number - keep - 1 if when == "step" else number - every * keep
        return range(every, last + 1, every)

    def _stem(self, when: When, number: int) -> str:
        name = self.settings.output_name or _UNNAMED[when]
        return f"{name}-step{number:08d}" if when == "step" else f"{name}-{number:06d}"
