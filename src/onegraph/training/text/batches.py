"""Batches of documents: of a few widths, in an order that is a function of the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy
import torch
from torch import Tensor

from onegraph.training.epochs import Epochs
from onegraph.training.ranks import Ranks
from onegraph.training.streams import stream
from onegraph.training.text.encoding import Document
from onegraph.training.text.layout import choose_widths, pack

IGNORED = -100
"""The label of a token without a loss."""


class Batch(TypedDict):
    """Rows of one width.

    Shapes:
        input_ids: (B, T) int64
        labels: (B, T) int64, IGNORED where a token has no loss
        position_ids: (B, T) int64, of packed rows only; they begin again with each document, and with the padding

    ``num_trained`` tokens have a loss here, ``num_trained_by_all`` in the parts of all processes together.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: NotRequired[Tensor]
    num_trained: int
    num_trained_by_all: int
    places: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Documents that share a row, by number, and the row's width."""

    documents: tuple[int, ...]
    width: int


class Batches(Epochs[Batch]):
    """The batches of an epoch, again and again.

    Every batch has ``batch_size`` rows: where documents don't suffice, rows of padding fill it up, so that a width is one shape. Padding
    stands behind the documents and has no loss: a model that only looks back never sees it.

    Args:
        documents: What is learnt.
        batch_size: Rows in a batch.
        max_length: Tokens in a row at most; the width of packed rows.
        packing: Several documents in a row.
        num_widths: Widths at most, where nothing is packed.
        pad_id: The token of the padding.
        seed: Of the order; None: the order of the documents, in every epoch.
        widths: Use these, where nothing is packed; chosen from the documents when omitted.
        ranks: The processes of the run: each gets its part of the rows that one process would have with a batch for all.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        batch_size: int,
        max_length: int,
        packing: bool,
        num_widths: int,
        pad_id: int,
        seed: int | None,
        widths: Sequence[int] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(batch_size, ranks)
        self.documents = documents
        self.packing = packing
        self._pad_id = pad_id
        self._seed = seed
        lengths = [len(document) for document in documents]
        if packing:
            self._rows = [Row(documents=tuple(row), width=max_length) for row in pack(lengths, max_length - 1)]
        else:
            longest = max(lengths)
            chosen = [width for width in widths or () if width >= min(lengths)]
            chosen = chosen if chosen and chosen[-1] >= longest else choose_widths(lengths, num_widths, max_length)
            places = numpy.searchsorted(chosen, lengths)
            self._rows = [Row(documents=(number,), width=chosen[place]) for number, place in enumerate(places)]
        self.widths = sorted({row.width for row in self._rows})

    def __len__(self) -> int:
        return sum(-(-sum(row.width == width for row in self._rows) // self.whole_batch_size) for width in self.widths)

    def __str__(self) -> str:
        places = sum(row.width for row in self._rows)
        filled = sum(map(len, self.documents)) / places
        form = f"packed into {len(self._rows)} rows of {self.widths[0]} tokens" if self.packing else f"of {_listed(self.widths)} tokens"
        return f"{len(self)} batches of {self.size_text} rows {form}, {1 - filled:.1%} padding"

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch ``start`` on."""
        groups: list[list[Row]] = []
        random = None if self._seed is None else stream(self._seed, "order", number)
        for width in self.widths:
            rows = [row for row in self._rows if row.width == width]
            if random is not None:
                random.shuffle(rows)
            groups += [rows[first : first + self.whole_batch_size] for first in range(0, len(rows), self.whole_batch_size)]
        if random is not None:
            random.shuffle(groups)
        for group in groups[start:]:
            yield self._batch(group)

    def one_of_each_width(self) -> Iterator[Batch]:
        """A real batch of each width."""
        for width in self.widths:
            yield self._batch([row for row in self._rows if row.width == width][: self.whole_batch_size])

    def _batch(self, rows: Sequence[Row]) -> Batch:
        width = rows[0].width
        shape = (self.whole_batch_size, width)
        ids = numpy.full(shape, self._pad_id, dtype=numpy.int64)
        labels = numpy.full(shape, IGNORED, dtype=numpy.int64)
        positions = numpy.tile(numpy.arange(width), (self.whole_batch_size, 1))
        for line, row in enumerate(rows):
            end = 0
            for number in row.documents:
                document = self.documents[number]
                start, end = end, end + len(document)
                ids[line, start:end] = document.ids
                labels[line, start:end] = numpy.where(document.trained, document.ids, IGNORED)
                positions[line, start:end] = numpy.arange(end - start)
            # the padding is a document too: there is at least one token of it in a packed row, so that every such row has a mask
            positions[line, end:] = numpy.arange(width - end)
        own = self.ranks.part_of_rows
        batch = Batch(
            input_ids=own(torch.from_numpy(ids)),
            labels=own(torch.from_numpy(labels)),
            num_trained=int((own(torch.from_numpy(labels)) != IGNORED).sum()),
            num_trained_by_all=int((labels != IGNORED).sum()),
            places=tuple(self.documents[number].place for row in _part(rows, self.ranks, self.batch_size) for number in row.documents),
        )
        if self.packing:
            batch["position_ids"] = own(torch.from_numpy(positions))
        return batch


def _part(rows: Sequence[Row], ranks: Ranks, size: int) -> Sequence[Row]:
    """This process's rows; the padding that fills a batch up stands behind those of all."""
    return rows[ranks.rank * size : (ranks.rank + 1) * size]


def _listed(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
