"""The loop: optimiser steps over trained tokens, the loss on held-out rows, the best adapter, early stopping, saving."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from onegraph.training.interruption import Interruption
from onegraph.training.loop import AnyLoop, AnyOutcome, AnyTraining
from onegraph.training.places import evaluation_weights, remove
from onegraph.training.text.batches import Batch, Batches
from onegraph.training.text.configuration import TextConfiguration
from onegraph.training.text.recipe import Recipe
from onegraph.training.text.saving import AdapterWriter, SavePlan, When


@dataclass(kw_only=True)
class Evaluations:
    """What the held-out rows have said so far.

    Args:
        found: Optimiser steps done, and the loss then.
        lowest: The lowest loss.
        num_stale: Evaluations since then.
    """

    found: list[tuple[int, float]] = field(default_factory=list)
    lowest: float = math.inf
    num_stale: int = 0

    def add(self, step: int, loss: float, min_improvement: float) -> bool:
        """Takes a loss; True for a new lowest."""
        self.found.append((step, loss))
        if loss < self.lowest - min_improvement:
            self.lowest, self.num_stale = loss, 0
            return True
        self.num_stale += 1
        return False

    def notes(self) -> dict[str, Any]:
        """For a state."""
        return {"held_out_loss": [list(pair) for pair in self.found], "num_stale": self.num_stale}

    @classmethod
    def read(cls, notes: dict[str, Any], min_improvement: float) -> Evaluations:
        """From a state."""
        made = cls()
        for step, loss in notes.get("held_out_loss", ()):
            made.add(int(step), float(loss), min_improvement)
        return made


@dataclass(kw_only=True)
class Training(AnyTraining[Batch]):
    """Everything the loop moves, and what it calls between the steps.

    Args:
        held_out: Batches to evaluate on; None: no evaluation.
        writer: Writes the adapter.
        evaluations: Those of the run that is resumed.
        check: Compares compiled with eager on a batch, before each file; None for no comparison during training.
    """

    batches: Batches
    configuration: TextConfiguration
    recipe: Recipe
    plan: SavePlan
    writer: AdapterWriter
    held_out: Batches | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    check: Callable[[Batch], object] | None = None


@dataclass(kw_only=True)
class Outcome(AnyOutcome):
    """How a run ended.

    Args:
        adapter: The last folder that was written.
        best: The folder with the lowest held-out loss.
        evaluations: The loss on held-out rows, by optimiser step.
        early: True when the held-out loss ended the run.
        num_tokens: Tokens with a loss that were learnt from.
    """

    adapter: Path | None = None
    best: Path | None = None
    evaluations: Evaluations
    early: bool = False
    num_tokens: int = 0


class Loop(AnyLoop[Batch, Training, Outcome]):
    """Runs a ``Training`` from its position to its end, to the end of its patience, or until a signal.

    Args:
        training: What to move.
    """

    gradient_hint = "a lower optimizer.learning_rate (--learning-rate), run.max_grad_norm = 1, or precision.mixed_precision = no"
    loss_hint = "a lower optimizer.learning_rate (--learning-rate), or precision.mixed_precision = no (--precision no)"

    def __init__(self, training: Training) -> None:
        super().__init__(training, Outcome(position=training.position, evaluations=training.evaluations))

    def _before_steps(self) -> None:
        if self.training.configuration.evaluation.at_first and self.training.position.step == 0:
            self._evaluate()

    def _step(self, batches: Sequence[Batch]) -> float:
        """One optimiser step; returns the mean loss of its tokens, each of which counts the same whatever batch it is in."""
        training = self.training
        num_tokens = sum(batch["num_trained_by_all"] for batch in batches)
        losses: list[Tensor] = []
        for batch in batches:
            # the mean over the processes of what each divides by its equal part is the mean over all tokens
            loss = training.recipe.loss(batch, num_tokens / training.ranks.count)
            self.update.backward(loss)
            losses.append(loss.detach())
        values = self._take_step(losses, batches)
        self.update.forget()
        self.outcome.num_tokens += num_tokens
        return sum(values)

    def _stopped_early(self) -> bool:
        patience = self.training.configuration.evaluation.patience
        return patience is not None and self.training.evaluations.num_stale >= patience

    def _between_steps(self, *, epoch_ended: bool) -> None:
        training, position = self.training, self.training.position
        finished = position.step >= training.num_steps
        settings = training.configuration.evaluation
        if settings.every_n_steps is not None:
            due = position.step % settings.every_n_steps == 0
        else:
            due = epoch_ended and position.epoch % (settings.every_n_epochs or 1) == 0
        if due or finished:
            self._evaluate()
        if finished or self._stopped_early():
            return  # the folder at the end is the same
        if training.plan.due("step", position.step):
            self._save("step", position.step)
        if epoch_ended and training.plan.due("epoch", position.epoch):
            self._save("epoch", position.epoch)

    def _evaluate(self) -> None:
        """The loss on the held-out rows; a new lowest is saved."""
        training, step = self.training, self.training.position.step
        if training.held_out is None:
            return
        with evaluation_weights(training.optimizer, training.parameters):
            loss = training.recipe.mean_loss(training.held_out.epoch(0), training.ranks)
        lowest = training.evaluations.add(step, loss, training.configuration.evaluation.min_improvement)
        if training.board is not None:
            training.board.write(step, {"loss/held_out": loss})
        training.progress.say(f"step {step}: held-out loss {loss:.4f}{', the lowest so far' if lowest and step else ''}")
        if lowest and step:
            self._write_adapter(training.plan.best, say=False)
            self.outcome.best = training.plan.best

    def _save(self, when: When, number: int) -> None:
        adapter = self.training.plan.adapter(when, number)
        self._write_adapter(adapter)
        if self.training.configuration.saving.save_state:
            self._write_state(self.training.plan.state(adapter))
        if self.training.ranks.first:
            remove(self.training.plan.outdated(when, number))

    def _save_at_end(self, interruption: Interruption, *, finished: bool) -> None:
        training = self.training
        if not finished and not self.outcome.losses:
            training.progress.say(f"{interruption.name}: stopped before the first step, nothing to save")
            return
        self.outcome.early = finished and training.position.step < training.num_steps
        self._write_adapter(training.plan.final)
        self.outcome.adapter = training.plan.final
        if training.configuration.saving.save_state or not finished:
            self._write_state(training.plan.state(training.plan.final))
        if not finished:
            training.progress.say(
                f"{interruption.name}: stopped after step {training.position.step} of {training.num_steps}; "
                f"go on with --resume {self.outcome.state}"
            )

    def _write_adapter(self, folder: Path, *, say: bool = True) -> None:
        training = self.training
        if training.check is not None:
            with training.ranks.together():
                training.check(next(training.batches.epoch(training.position.epoch, training.position.batch)))
        write = partial(training.writer.write, folder, step=training.position.step, epoch=self._epoch_number())
        with evaluation_weights(training.optimizer, training.parameters):
            ranks = None if training.allocation is None else training.allocation.ranks()
            training.ranks.first_does(partial(write, evaluations=training.evaluations.found, ranks=ranks))
        self.outcome.adapter = folder
        if say:
            training.progress.say(f"saved {folder}")

    def _notes(self) -> dict[str, Any]:
        return self.training.evaluations.notes()

    def _named(self, item: Batch) -> tuple[Sequence[str], str]:
        return item["places"], self.training.recipe.first_not_finite(item)

    def _last_good(self) -> str:
        adapter = self.outcome.adapter
        return f"The last good adapter is {adapter}." if adapter is not None else "No adapter was written before."
