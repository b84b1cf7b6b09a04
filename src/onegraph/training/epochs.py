"""Batches by epoch and place: how large they are, how many steps they make, and going on from any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from onegraph.training.ranks import Ranks

B = TypeVar("B")


class Epochs(ABC, Generic[B]):
    """The batches of every epoch, whatever is trained; every epoch has equally many.

    Args:
        batch_size: Of a batch of one process.
        ranks: The processes of the run: each gets its part of the batches that one process would have for all.
    """

    def __init__(self, batch_size: int, ranks: Ranks | None = None) -> None:
        self.batch_size = batch_size
        self.ranks = ranks or Ranks()
        self.whole_batch_size = batch_size * self.ranks.count

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[B]:
        """The batches of an epoch (from 0), from batch ``start`` on."""

    @property
    def size_text(self) -> str:
        """For people: how large a batch is; the batches of each process, where there are several."""
        return f"{self.ranks.count} x {self.batch_size}" if self.ranks.several else str(self.batch_size)

    def steps_per_epoch(self, accumulation: int) -> int:
        """Optimiser steps in an epoch; the last one may have fewer batches."""
        return -(-len(self) // accumulation)

    def num_epochs(self, num_steps: int, accumulation: int) -> int:
        """Epochs that so many optimiser steps reach into."""
        return -(-num_steps // self.steps_per_epoch(accumulation))

    def forever(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, int, B]]:
        """Epoch, place and batch from that one on, epoch after epoch."""
        while True:
            for place, batch in enumerate(self.epoch(epoch, start), start):
                yield epoch, place, batch
            epoch, start = epoch + 1, 0
