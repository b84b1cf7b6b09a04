"""One training step: a batch becomes a sum of losses, to be divided by the tokens of all batches of the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onegraph.compiling import eager
from onegraph.errors import ModelFileError
from onegraph.training.finite import finite, watched
from onegraph.training.ranks import Ranks
from onegraph.training.text.batches import IGNORED, Batch

_CHECKED_LENGTH = 6
_SEEN = 1e-3


@dataclass(kw_only=True)
class Recipe:
    """Next-token prediction, loss = sum over trained tokens of -log p(token | what stands before it in its document).

    Args:
        model: With its adapters.
        device: Where it is.
        precision: What is computed in: fp32, or the dtype of autocast.
    """

    model: nn.Module
    device: torch.device
    precision: torch.dtype = torch.float32

    def loss(self, batch: Batch, num_tokens: float | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The loss of a batch over ``num_tokens``, a scalar in fp32.

        Args:
            batch: Rows of one width.
            num_tokens: What the sum is divided by: the trained tokens of the whole step; those of the batch when omitted.
            dtype: None to compute as in training; else compute in this dtype, to which the model was raised, without autocast.
        """
        logits = self.logits(batch, dtype)
        labels = batch["labels"][:, 1:].to(self.device)
        trained = labels != IGNORED
        total = F.cross_entropy(logits[:, :-1][trained].to(dtype or torch.float32), labels[trained], reduction="sum")
        return total / (num_tokens or max(1, batch["num_trained"]))

    def logits(self, batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
        """(B, T, vocabulary)."""
        # no mask: padding stands last, and positions that begin again tell transformers where a document ends
        positions = {"position_ids": batch["position_ids"].to(self.device)} if "position_ids" in batch else {}
        with self._autocast(dtype):
            output = self.model(input_ids=batch["input_ids"].to(self.device), use_cache=False, **positions)
        logits: Tensor = output.logits
        return logits

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[Batch], ranks: Ranks | None = None) -> float:
        """The loss over all trained tokens of some batches (those of all processes), without dropout and gradients."""
        was_training = self.model.training
        self.model.eval()
        try:
            total, num_trained = 0.0, 0
            for batch in batches:
                total += float(self.loss(batch, 1))
                num_trained += batch["num_trained"]
        finally:
            self.model.train(was_training)
        mean, tokens = (ranks or Ranks()).mean(torch.tensor([total, num_trained], dtype=torch.float64, device=self.device)).tolist()
        return float(mean / (tokens or 1))

    def first_not_finite(self, batch: Batch) -> str:
        """A sentence that names the first thing that is NaN or infinite when this loss is computed, run eager."""
        wrong = [name for name, value in self.model.named_parameters() if value.requires_grad and not finite(value)]
        if wrong:
            return f"The adapter's own weights are not finite any more: {wrong[0]} and {len(wrong) - 1} others."
        found: list[str] = []
        with eager(), torch.no_grad(), watched({"model": self.model}, found):
            loss = float(self.loss(batch))
        if found:
            return f"The first module with a NaN or infinite output is {found[0]}."
        if math.isfinite(loss):
            return f"Run eager, the same batch has the loss {loss:.6g}: the compiled model is wrong. Go on with --backend no."
        return "Every module's output is finite; the loss itself overflows."

    def _autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
        """Entered outside the compiled modules, so that it is part of what they are compiled for and no graph break."""
        if dtype is not None or self.precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision)


@torch.no_grad()
def require_looking_back(recipe: Recipe, vocabulary: int) -> None:
    """Runs two short texts that differ in their last token: what stands before it must not notice.

    Raises:
        ModelFileError: ``looks-ahead``: a model that sees the token it is to predict.
    """
    ids = torch.randint(0, vocabulary, (1, _CHECKED_LENGTH), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % vocabulary
    was_training = recipe.model.training
    recipe.model.eval()
    try:
        with eager():
            one, another = (recipe.logits(_bare(each))[:, :-1].float() for each in (ids, other))
    finally:
        recipe.model.train(was_training)
    difference = float((one - another).norm() / one.norm())
    if difference > _tolerance(recipe):
        raise ModelFileError(
            f"{type(recipe.model).__name__} sees the token that it is to predict: another last token changes what it says before by"
            f" {difference:.1%}.",
            why="Its attention looks ahead. The loss would fall to nothing, and nothing would be learnt that generates text.",
            hint="a language model that looks back only; for models such as BERT, is_decoder = true in config.json makes it one",
            code="looks-ahead",
        )


def _tolerance(recipe: Recipe) -> float:
    return max(_SEEN, 4 * torch.finfo(recipe.precision).eps)


@torch.no_grad()
def require_separate_documents(recipe: Recipe, vocabulary: int) -> None:
    """Runs two short documents packed and alone: the second must not notice the first.

    Raises:
        ModelFileError: ``packing-leaks``: this model mixes the documents of a row.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, vocabulary, (2, 1, _CHECKED_LENGTH), generator=generator)
    positions = torch.arange(_CHECKED_LENGTH)[None]
    was_training = recipe.model.training
    recipe.model.eval()
    try:
        with eager():
            alone = recipe.logits(_bare(second, positions))
            packed = recipe.logits(_bare(torch.cat([first, second], dim=1), torch.cat([positions, positions], dim=1)))
    except TypeError as error:
        raise _leaks(recipe, f"it takes no position_ids ({error})") from error
    finally:
        recipe.model.train(was_training)
    difference = (packed[:, _CHECKED_LENGTH:] - alone).float().norm() / alone.float().norm()
    if not float(difference) <= _tolerance(recipe):
        raise _leaks(recipe, f"the second one's output changes by {float(difference):.1%}")


def _leaks(recipe: Recipe, what: str) -> ModelFileError:
    return ModelFileError(
        f"{type(recipe.model).__name__} can't keep documents apart that share a row: {what}.",
        why="Packing needs attention that positions which begin again keep apart; this architecture has something else.",
        hint="data.packing = false (--no-packing)",
        code="packing-leaks",
    )


def _bare(ids: Tensor, positions: Tensor | None = None) -> Batch:
    batch = Batch(input_ids=ids, labels=torch.full_like(ids, IGNORED), num_trained=0, num_trained_by_all=0, places=())
    if positions is not None:
        batch["position_ids"] = positions
    return batch
