"""What every training loop does: windows of batches, optimiser steps, reporting, recompiles, the position, stopping on a signal.

An optimiser step takes ``gradient_accumulation_steps`` batches, fewer at the end of an epoch. Steps are optimiser steps everywhere:
accumulation never changes how many the user asked for. Files and states are only written between two of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onegraph.compiling import Watch
from onegraph.errors import NumericsError, OutputError
from onegraph.training.allocation import Allocation
from onegraph.training.epochs import Epochs
from onegraph.training.interruption import Interruption
from onegraph.training.metrics import MovingAverage, ProgressDisplay, TensorBoard, Timings
from onegraph.training.optimizers import before_training
from onegraph.training.ranks import OwnRandomness, Ranks, own_randomness
from onegraph.training.state import Position, Resumable, SavedState, Stateful, restore, save_state
from onegraph.training.update import Update

_NAMED = 5

B = TypeVar("B")


@dataclass(kw_only=True)
class AnyTraining(Generic[B]):
    """Everything that a loop moves, whatever is trained.

    Args:
        batches: The training batches.
        configuration: The settings, which a state records.
        parameters: Name -> trained parameter.
        num_steps: Optimiser steps of the whole run, those before a resume included.
        accumulation: Batches in an optimiser step.
        progress: What people watch.
        watch: Counts what is compiled; its warm-up has ended.
        losses: The recent losses of a resumed run.
        ranks: The processes of the run.
        own_randomness: The random generators of each of several processes, which a state keeps.
        allocation: What AdaLoRA has more in every step.
    """

    batches: Epochs[B]
    configuration: Resumable
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: GradScaler | None
    accumulation: int
    max_grad_norm: float
    num_steps: int
    num_epochs: int
    seed: int
    fingerprints: Mapping[str, str]
    progress: ProgressDisplay
    watch: Watch
    position: Position = field(default_factory=Position)
    losses: Sequence[float] = ()
    board: TensorBoard | None = None
    timings: Timings = field(default_factory=Timings)
    ranks: Ranks = field(default_factory=Ranks)
    own_randomness: OwnRandomness | None = None
    allocation: Allocation | None = None

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What a state keeps beside the adapters."""
        parts: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self.schedule}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        if self.own_randomness is not None:
            parts["random"] = self.own_randomness
        if self.allocation is not None:
            parts["allocation"] = self.allocation
        return parts

    def begin(self, saved: SavedState[Any] | None) -> None:
        """Takes this process's random generators, and everything of a run that is resumed.

        The generators are last, after all that may have used them.
        """
        self.own_randomness = own_randomness(self.ranks, self.seed)
        if saved is None:
            return
        restore(saved, parameters=self.parameters, training=self.stateful)
        if self.own_randomness is not None:
            self.own_randomness.put_back()
        self.position, self.losses = saved.position, saved.losses


@dataclass(kw_only=True)
class AnyOutcome:
    """How a run ended.

    Args:
        position: Where it stands.
        interrupted: The signal that ended it, or an empty text.
        exit_status: 0, or 128 + the signal's number.
        loss: Moving average at the end.
        losses: The loss of every optimiser step of this process.
        state: The last state that was written.
        recompiles: Each compilation after the warm-up, with its cause.
        num_skipped: Optimiser steps that the gradient scaler left out because of an overflow.
    """

    position: Position
    interrupted: str = ""
    exit_status: int = 0
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    state: Path | None = None
    recompiles: list[str] = field(default_factory=list)
    num_skipped: int = 0


T = TypeVar("T", bound=AnyTraining)  # type: ignore[type-arg]
O = TypeVar("O", bound=AnyOutcome)  # noqa: E741


class AnyLoop(ABC, Generic[B, T, O]):
    """Runs a training from its position to its end, or until a signal.

    Args:
        training: What to move.
        outcome: What is told at the end; filled on the way.
    """

    gradient_hint = "a lower learning rate, max_grad_norm of 1, or no mixed precision to see whether the number format is too narrow"
    loss_hint = "a lower learning rate, or no mixed precision to see whether the number format is too narrow"

    def __init__(self, training: T, outcome: O) -> None:
        self.training = training
        self.outcome = outcome
        self.update = Update(
            parameters=training.parameters,
            optimizer=training.optimizer,
            schedule=training.schedule,
            scaler=training.scaler,
            max_grad_norm=training.max_grad_norm,
            ranks=training.ranks,
        )
        self._average = MovingAverage(len(training.batches))
        for loss in training.losses:
            self._average.add(loss)
        self._num_reported = len(training.watch.recompiles)

    @abstractmethod
    def _step(self, batches: Sequence[B]) -> float:
        """One optimiser step; returns its loss."""

    @abstractmethod
    def _between_steps(self, *, epoch_ended: bool) -> None:
        """What is due after a step."""

    @abstractmethod
    def _save_at_end(self, interruption: Interruption, *, finished: bool) -> None:
        """The last files."""

    @abstractmethod
    def _named(self, item: Any) -> tuple[Sequence[str], str]:
        """What a loss that isn't finite was of: names of images or rows, and a sentence about where it came from."""

    @abstractmethod
    def _last_good(self) -> str:
        """A sentence about the last file that was written."""

    def _before_steps(self) -> None:
        """What is due before the first step."""

    def _notes(self) -> dict[str, Any]:
        """What a state keeps of this kind of run; plain JSON."""
        return {}

    def _stopped_early(self) -> bool:
        """Whether the run has reached its end before its last step."""
        return False

    def run(self) -> O:
        """Trains and saves.

        Raises:
            NumericsError: ``loss-not-finite`` or ``gradient-not-finite``, before the weights are touched; the last good file stays.
            OutputError: A file could not be written; the old one is still there.
            MismatchError: A strict check found compiled and eager to differ.
        """
        training = self.training
        training.progress.start()
        try:
            with Interruption() as interruption:
                before_training(training.optimizer)
                self._before_steps()
                self._train(interruption)
                finished = training.position.step >= training.num_steps or self._stopped_early()
                self._save_at_end(interruption, finished=finished)
            if interruption and not finished:
                self.outcome.interrupted = interruption.name
                self.outcome.exit_status = interruption.exit_status
        except BaseException:
            # what went wrong is worth more than the end of the curves
            self._close(quietly=True)
            raise
        self._close(quietly=False)
        self.outcome.position = training.position
        self.outcome.loss = self._average.mean
        return self.outcome

    def _close(self, *, quietly: bool) -> None:
        self.training.progress.close()
        if self.training.board is not None:
            with contextlib.suppress(OutputError) if quietly else contextlib.nullcontext():
                self.training.board.close()

    def _train(self, interruption: Interruption) -> None:
        training = self.training
        stream = training.batches.forever(training.position.epoch, training.position.batch)
        while training.position.step < training.num_steps and not self._interrupted(interruption) and not self._stopped_early():
            started, compiled_before = time.perf_counter(), training.watch.compile_seconds
            window = self._window(stream)
            rates = self._rates()
            loss = self._step([batch for _, _, batch in window])
            epoch, number, _ = window[-1]
            self._advance(epoch, number, len(window))
            compile_seconds = training.watch.compile_seconds - compiled_before
            training.timings.add_step(time.perf_counter() - started, compile_seconds)
            self._report(loss, rates)
            if compile_seconds > 0:
                self._report_recompiles()
            self._between_steps(epoch_ended=training.position.batch == 0)

    def _interrupted(self, interruption: Interruption) -> bool:
        """Whether any process got a signal: all of them stop after the same step."""
        ranks = self.training.ranks
        if not ranks.any(bool(interruption)):
            return False
        if ranks.several:
            interruption.signal_number = next(number for number in ranks.all(interruption.signal_number) if number is not None)
        return True

    def _window(self, stream: Iterator[tuple[int, int, B]]) -> list[tuple[int, int, B]]:
        """The batches of one optimiser step; a window never reaches into the next epoch."""
        left = len(self.training.batches) - self.training.position.batch
        return list(itertools.islice(stream, min(self.training.accumulation, left)))

    def _take_step(self, losses: Sequence[Tensor], items: Sequence[Any]) -> list[float]:
        """The optimiser step from gradients that are there; returns the losses as numbers.

        Args:
            losses: Of the batches of the step.
            items: What each loss was of, for ``_named``.
        """
        allocation = self.training.allocation
        if allocation is not None and (loss := allocation.loss) is not None:
            self.update.backward(loss)
        values, norm, norm_value = self.update.measured(losses)
        if not all(math.isfinite(value) for value in values):
            self._stop_on_loss(items, [float(loss) for loss in losses], values)
        if not math.isfinite(norm_value) and self.training.scaler is None:
            self._stop_on_gradients(values)
        if not self.update.take(norm):
            self.outcome.num_skipped += 1
            if self.update.overflows_at_every_scale:
                self._stop_on_gradients([])
        elif allocation is not None:
            allocation.step(self.training.position.step + 1)
        return values

    def _advance(self, epoch: int, number: int, num_batches: int) -> None:
        """Moves the position past batch ``number`` of ``epoch``."""
        training = self.training
        ended = number + 1 == len(training.batches)
        training.position = replace(
            training.position,
            step=training.position.step + 1,
            epoch=epoch + 1 if ended else epoch,
            batch=0 if ended else number + 1,
            micro_step=training.position.micro_step + num_batches,
        )

    def _rates(self) -> dict[str, float]:
        """Learning rate of each parameter group, by its name in the logs."""
        groups = self.training.optimizer.param_groups
        names = [str(group.get("name", index)).replace("text_encoder", "textencoder") for index, group in enumerate(groups)]
        return dict(zip(names, (float(rate) for rate in self.training.schedule.get_last_lr()), strict=True))

    def _report(self, loss: float, rates: Mapping[str, float]) -> None:
        training = self.training
        step, average = training.position.step, self._average.add(loss)
        self.outcome.losses.append(loss)
        if training.board is not None:
            scalars = {"loss/current": loss, "loss/average": average} | {f"lr/{name}": rate for name, rate in rates.items()}
            for name, group in zip(rates, training.optimizer.param_groups, strict=True):
                if "d" in group:  # optimizers that find their own step size multiply the rate by it
                    scalars[f"lr/d*lr/{name}"] = float(group["d"]) * rates[name]
            training.board.write(step, scalars)
        training.progress.update(step, self._epoch_number(), average, rates, training.timings)

    def _report_recompiles(self) -> None:
        training = self.training
        recompiles = training.watch.recompiles
        for recompile in recompiles[self._num_reported :]:
            text = f"recompiled in step {training.position.step}: {recompile}"
            self.outcome.recompiles.append(text)
            training.progress.say(text)
        self._num_reported = len(recompiles)

    def _epoch_number(self) -> int:
        """The epoch of the last batch, from 1."""
        position = self.training.position
        return max(1, position.epoch if position.batch == 0 else position.epoch + 1)

    def _write_state(self, folder: Path) -> None:
        training = self.training
        if training.own_randomness is not None:
            training.own_randomness.collect()
        training.ranks.first_does(
            partial(
                save_state,
                folder,
                position=training.position,
                configuration=training.configuration,
                seed=training.seed,
                fingerprints=training.fingerprints,
                parameters=training.parameters,
                training=training.stateful,
                losses=self._average.values,
                notes=self._notes(),
            )
        )
        self.outcome.state = folder
        training.progress.say(f"saved {folder}")

    def _stop_on_loss(self, items: Sequence[Any], own: Sequence[float], values: Sequence[float]) -> NoReturn:
        """Every process gets here; the first that has such a loss of its own says what it is."""
        place = next((index for index, value in enumerate(own) if not math.isfinite(value)), None)
        told = None
        if place is not None:
            names, why = self._named(items[place])
            told = own[place], ", ".join(names[:_NAMED]), why
        everyone = [one for one in self.training.ranks.all(told) if one is not None]
        value, shown, why = everyone[0] if everyone else (max(values), "the batches of several processes", "Only their mean overflows.")
        self.update.forget()
        raise NumericsError(
            f"Step {self.training.position.step + 1}: the loss is {value}, for {shown}.",
            why=f"{why} The weights were not changed by this step. {self._last_good()}",
            hint=self.loss_hint,
            code="loss-not-finite",
        )

    def _stop_on_gradients(self, values: Sequence[float]) -> NoReturn:
        wrong = self.update.not_finite()
        self.update.forget()
        shown = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
        loss = f"; its loss is {values[0]:.6g}" if values else " at every loss scale down to 1"
        raise NumericsError(
            f"Step {self.training.position.step + 1}: {len(wrong)} of {len(self.training.parameters)} gradients are NaN or infinite{loss}.",
            why=f"They are of {shown}. The weights were not changed by this step. {self._last_good()}",
            hint=self.gradient_hint,
            code="gradient-not-finite",
        )
