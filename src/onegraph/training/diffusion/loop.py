"""The loop: accumulation windows, optimiser steps, saving, sampling, stopping.

An optimiser step takes ``gradient_accumulation_steps`` batches, fewer at the end of an epoch; its loss is the mean over them. Steps are
optimiser steps everywhere: accumulation never changes how many the user asked for. Files and states are only written between two of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onegraph.compiling import Watch
from onegraph.errors import NumericsError, OutputError
from onegraph.training.diffusion.batches import Batch, Batches
from onegraph.training.diffusion.configuration import TrainingConfiguration
from onegraph.training.diffusion.recipe import Draws, Recipe
from onegraph.training.diffusion.saving import SavePlan, When
from onegraph.training.interruption import Interruption
from onegraph.training.metrics import MovingAverage, ProgressDisplay, TensorBoard, Timings
from onegraph.training.optimizers import before_training
from onegraph.training.places import evaluation_weights, remove
from onegraph.training.randomness import random_states, restore_random_states
from onegraph.training.state import Position, Stateful, save_state

_NAMED = 5


@dataclass(kw_only=True)
class Training:
    """Everything the loop moves, and what it calls between the steps.

    Args:
        parameters: ``part.path.parameter`` -> trained parameter.
        num_steps: Optimiser steps of the whole run, those before a resume included.
        save_network: Writes a network file: path, optimiser steps done, epoch (from 1).
        sample: Writes sample images for the steps and epochs done; None for no samples.
        check: Compares compiled with eager on a batch's draws; None for no comparison during training (only ``strict`` compares here).
        after_update: Called after each optimiser step, for a limit on the adapters' norms.
        watch: Counts what is compiled; its warm-up has ended.
        say: Prints a line for the user, beside the progress.
    """

    configuration: TrainingConfiguration
    recipe: Recipe
    batches: Batches
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: GradScaler | None
    plan: SavePlan
    num_steps: int
    num_epochs: int
    seed: int
    fingerprints: Mapping[str, str]
    save_network: Callable[[Path, int, int], None]
    progress: ProgressDisplay
    watch: Watch
    position: Position = field(default_factory=Position)
    losses: Sequence[float] = ()
    sample: Callable[[int, int], Sequence[Path]] | None = None
    check: Callable[[Draws], object] | None = None
    after_update: Callable[[], None] | None = None
    board: TensorBoard | None = None
    timings: Timings = field(default_factory=Timings)

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What a state keeps beside the adapters."""
        parts: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self.schedule}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        return parts


@dataclass(kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        position: Where it stands.
        interrupted: The signal that ended it, or an empty text.
        exit_status: 0, or 128 + the signal's number.
        loss: Moving average at the end.
        losses: The loss of every optimiser step of this process.
        network: The last network file that was written.
        state: The last state that was written.
        samples: Sample images.
        recompiles: Each compilation after the warm-up, with its cause.
        num_skipped: Optimiser steps that the gradient scaler left out because of an overflow.
    """

    position: Position
    interrupted: str = ""
    exit_status: int = 0
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    network: Path | None = None
    state: Path | None = None
    samples: list[Path] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    num_skipped: int = 0


class Loop:
    """Runs a ``Training`` from its position to its end, or until a signal.

    Args:
        training: What to move.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.outcome = Outcome(position=training.position)
        self._average = MovingAverage(len(training.batches))
        for loss in training.losses:
            self._average.add(loss)
        self._num_reported = len(training.watch.recompiles)

    def run(self) -> Outcome:
        """Trains, saves, samples.

        Raises:
            NumericsError: ``loss-not-finite`` or ``gradient-not-finite``, before the weights are touched; the last good file stays.
            OutputError: A file could not be written; the old one is still there.
            MismatchError: ``--compile_check=strict`` found a difference.
        """
        training = self.training
        training.progress.start()
        try:
            with Interruption() as interruption:
                before_training(training.optimizer)
                if training.configuration.sampling.at_first and training.position.step == 0:
                    self._sample()
                self._train(interruption)
                finished = training.position.step >= training.num_steps
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
        while training.position.step < training.num_steps and not interruption:
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

    def _window(self, stream: Iterator[tuple[int, int, Batch]]) -> list[tuple[int, int, Batch]]:
        """The batches of one optimiser step; a window never reaches into the next epoch."""
        wanted = self.training.configuration.run.gradient_accumulation_steps
        left = len(self.training.batches) - self.training.position.batch
        return list(itertools.islice(stream, min(wanted, left)))

    def _step(self, batches: Sequence[Batch]) -> float:
        """One optimiser step; returns the mean loss of its batches."""
        training = self.training
        drawn: list[Draws] = []
        losses: list[torch.Tensor] = []
        for offset, batch in enumerate(batches):
            draws = training.recipe.draw(batch, training.position.micro_step + offset)
            loss = training.recipe.loss(draws)
            scaled = loss / len(batches)
            if training.scaler is not None:
                scaled = training.scaler.scale(scaled)
            scaled.backward()  # type: ignore[no-untyped-call]
            drawn.append(draws)
            losses.append(loss.detach())
        if training.scaler is not None:
            training.scaler.unscale_(training.optimizer)
        gradients = [parameter.grad for parameter in training.parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # one wait for the device a step: the losses and the norm together
        read: list[float] = torch.stack([*(loss.float() for loss in losses), norm.to(losses[0].device).float()]).tolist()
        values, norm_value = read[:-1], read[-1]
        if not all(math.isfinite(value) for value in values):
            self._stop_on_loss(drawn, values)
        if not math.isfinite(norm_value) and training.scaler is None:
            self._stop_on_gradients(values)
        limit = training.configuration.run.max_grad_norm
        if limit > 0:
            torch.nn.utils.clip_grads_with_norm_(training.parameters.values(), limit, norm)
        self._update()
        return sum(values) / len(values)

    def _update(self) -> None:
        training = self.training
        if training.scaler is None:
            training.optimizer.step()
            training.schedule.step()
        else:
            before = training.scaler.get_scale()
            training.scaler.step(training.optimizer)
            training.scaler.update()
            after = training.scaler.get_scale()
            if after >= before:
                training.schedule.step()
            else:
                self.outcome.num_skipped += 1
                if after < 1.0:
                    self._stop_on_gradients([])
        if training.after_update is not None:
            training.after_update()
        training.optimizer.zero_grad(set_to_none=True)

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

    def _between_steps(self, *, epoch_ended: bool) -> None:
        """Files, states and samples that are due after this step."""
        training, position = self.training, self.training.position
        sampling = training.configuration.sampling
        finished = position.step >= training.num_steps
        if training.plan.due_after_step(position.step):
            self._save("step", position.step)
        if epoch_ended and not finished and training.plan.due_after_epoch(position.epoch):
            self._save("epoch", position.epoch)
        if sampling.every_n_epochs is not None:
            due = epoch_ended and position.epoch % sampling.every_n_epochs == 0
        else:
            due = sampling.every_n_steps is not None and position.step % sampling.every_n_steps == 0
        if due:
            self._sample()

    def _sample(self) -> None:
        training = self.training
        if training.sample is None:
            return
        states = random_states()
        with evaluation_weights(training.optimizer, training.parameters):
            self.outcome.samples += training.sample(training.position.step, self._epoch_number())
        restore_random_states(states)

    def _save(self, when: When, number: int) -> None:
        training = self.training
        self._write_network(training.plan.network(when, number))
        if training.configuration.saving.save_state:
            self._write_state(training.plan.state(when, number))
        remove(training.plan.outdated(when, number))

    def _save_at_end(self, interruption: Interruption, *, finished: bool) -> None:
        training, saving = self.training, self.training.configuration.saving
        if not finished and not self.outcome.losses:
            training.progress.say(f"{interruption.name}: stopped before the first step, nothing to save")
            return
        self._write_network(training.plan.final_network)
        if saving.save_state or saving.save_state_on_train_end:
            self._write_state(training.plan.final_state)
        if not finished:
            resume = f"go on with --resume={self.outcome.state}" if self.outcome.state else "with --save_state it could be resumed"
            training.progress.say(f"{interruption.name}: stopped after step {training.position.step} of {training.num_steps}; {resume}")

    def _write_network(self, path: Path) -> None:
        training = self.training
        if training.check is not None:
            batch = next(training.batches.epoch(training.position.epoch, training.position.batch))
            training.check(training.recipe.draw(batch, training.position.micro_step))
        with evaluation_weights(training.optimizer, training.parameters):
            training.save_network(path, training.position.step, self._epoch_number())
        self.outcome.network = path
        training.progress.say(f"saved {path}")

    def _write_state(self, folder: Path) -> None:
        training = self.training
        self.outcome.state = save_state(
            folder,
            position=training.position,
            configuration=training.configuration,
            seed=training.seed,
            fingerprints=training.fingerprints,
            parameters=training.parameters,
            training=training.stateful,
            losses=self._average.values,
        )
        training.progress.say(f"saved {folder}")

    def _stop_on_loss(self, drawn: Sequence[Draws], values: Sequence[float]) -> None:
        place, value = next((index, value) for index, value in enumerate(values) if not math.isfinite(value))
        self.training.optimizer.zero_grad(set_to_none=True)
        raise NumericsError(
            f"Step {self.training.position.step + 1}: the loss is {value}, for {', '.join(drawn[place].paths[:_NAMED])}.",
            why=f"{self.training.recipe.first_not_finite(drawn[place])} The weights were not changed by this step. {self._last_good()}",
            hint="a lower --learning_rate, or --mixed_precision=no to see whether the number format is too narrow",
            code="loss-not-finite",
        )

    def _stop_on_gradients(self, values: Sequence[float]) -> None:
        training = self.training
        wrong = [name for name, value in training.parameters.items() if value.grad is not None and not bool(value.grad.isfinite().all())]
        training.optimizer.zero_grad(set_to_none=True)
        shown = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
        loss = f"; its loss is {values[0]:.6g}" if values else " at every loss scale down to 1"
        raise NumericsError(
            f"Step {training.position.step + 1}: {len(wrong)} of {len(training.parameters)} gradients are NaN or infinite{loss}.",
            why=f"They are of {shown}. The weights were not changed by this step. {self._last_good()}",
            hint="a lower --learning_rate, --max_grad_norm=1, or --mixed_precision=no to see whether the number format is too narrow",
            code="gradient-not-finite",
        )

    def _last_good(self) -> str:
        network = self.outcome.network
        return f"The last good file is {network}." if network is not None else "No file was written before."
