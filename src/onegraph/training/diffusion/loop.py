"""The loop: optimiser steps of Stable Diffusion's recipe, saving, sampling. A step's loss is the mean over its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from onegraph.training.diffusion.batches import Batch, Batches
from onegraph.training.diffusion.configuration import TrainingConfiguration
from onegraph.training.diffusion.recipe import Draws, Recipe
from onegraph.training.diffusion.saving import SavePlan, When
from onegraph.training.interruption import Interruption
from onegraph.training.loop import AnyLoop, AnyOutcome, AnyTraining
from onegraph.training.places import evaluation_weights, remove
from onegraph.training.randomness import random_states, restore_random_states


@dataclass(kw_only=True)
class Training(AnyTraining[Batch]):
    """Everything the loop moves, and what it calls between the steps.

    Args:
        save_network: Writes a network file: path, optimiser steps done, epoch (from 1).
        sample: Writes sample images for the steps and epochs done; None for no samples.
        check: Compares compiled with eager on a batch's draws; None for no comparison during training (only ``strict`` compares here).
        after_update: Called after each optimiser step, for a limit on the adapters' norms.
    """

    batches: Batches
    configuration: TrainingConfiguration
    recipe: Recipe
    plan: SavePlan
    save_network: Callable[[Path, int, int], None]
    sample: Callable[[int, int], Sequence[Path]] | None = None
    check: Callable[[Draws], object] | None = None
    after_update: Callable[[], None] | None = None


@dataclass(kw_only=True)
class Outcome(AnyOutcome):
    """How a run ended.

    Args:
        network: The last network file that was written.
        samples: Sample images.
    """

    network: Path | None = None
    samples: list[Path] = field(default_factory=list)


class Loop(AnyLoop[Batch, Training, Outcome]):
    """Runs a ``Training`` from its position to its end, or until a signal.

    Args:
        training: What to move.
    """

    gradient_hint = "a lower --learning_rate, --max_grad_norm=1, or --mixed_precision=no to see whether the number format is too narrow"
    loss_hint = "a lower --learning_rate, or --mixed_precision=no to see whether the number format is too narrow"

    def __init__(self, training: Training) -> None:
        super().__init__(training, Outcome(position=training.position))

    def _before_steps(self) -> None:
        if self.training.configuration.sampling.at_first and self.training.position.step == 0:
            self._sample()

    def _step(self, batches: Sequence[Batch]) -> float:
        """One optimiser step; returns the mean loss of its batches."""
        training = self.training
        drawn: list[Draws] = []
        losses: list[torch.Tensor] = []
        for offset, batch in enumerate(batches):
            draws = training.recipe.draw(batch, training.position.micro_step + offset)
            loss = training.recipe.loss(draws)
            self.update.backward(loss / len(batches))
            drawn.append(draws)
            losses.append(loss.detach())
        values = self._take_step(losses, drawn)
        if training.after_update is not None:
            training.after_update()
        self.update.forget()
        return sum(values) / len(values)

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
            drawn = training.ranks.first_does(partial(training.sample, training.position.step, self._epoch_number()))
            self.outcome.samples += drawn or ()
        restore_random_states(states)

    def _save(self, when: When, number: int) -> None:
        training = self.training
        self._write_network(training.plan.network(when, number))
        if training.configuration.saving.save_state:
            self._write_state(training.plan.state(when, number))
        if training.ranks.first:
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
            with training.ranks.together():
                batch = next(training.batches.epoch(training.position.epoch, training.position.batch))
                training.check(training.recipe.draw(batch, training.position.micro_step))
        with evaluation_weights(training.optimizer, training.parameters):
            training.ranks.first_does(partial(training.save_network, path, training.position.step, self._epoch_number()))
        self.outcome.network = path
        training.progress.say(f"saved {path}")

    def _named(self, item: Draws) -> tuple[Sequence[str], str]:
        return item.paths, self.training.recipe.first_not_finite(item)

    def _last_good(self) -> str:
        network = self.outcome.network
        return f"The last good file is {network}." if network is not None else "No file was written before."
