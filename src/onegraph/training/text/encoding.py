"""Rows as tokens: which ids, and which of them have a loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
from transformers import PreTrainedTokenizerBase

from onegraph.errors import DataError, ModelFileError
from onegraph.training.text.chat import Span, answers, render, require_template
from onegraph.training.text.configuration import DataSettings
from onegraph.training.text.records import Record

_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """Tokens that belong together.

    Shapes:
        ids: (T,) int64
        trained: (T,) bool; the first is never True, since nothing predicts it

    Args:
        place: Where it is from: "data.jsonl:12".
    """

    ids: numpy.ndarray
    trained: numpy.ndarray
    place: str

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The documents of some rows; ``str()`` of it is the line to print.

    Args:
        documents: Those that have something to learn.
        num_rows: Rows that there were.
        num_long: Rows longer than max_length.
        num_left_out: Rows of which nothing is left to learn.
        long: What was done with the long ones.
    """

    documents: Sequence[Document]
    num_rows: int
    num_long: int = 0
    num_left_out: int = 0
    long: str = "truncate"

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return sum(map(len, self.documents))

    @property
    def num_trained(self) -> int:
        """Tokens that have a loss."""
        return sum(int(document.trained.sum()) for document in self.documents)

    def __str__(self) -> str:
        lengths = [len(document) for document in self.documents]
        text = f"{self.num_rows} rows, {self.num_tokens:,} tokens ({min(lengths)} to {max(lengths)} a document), "
        text += f"{self.num_trained:,} of them with a loss"
        done = {"truncate": "cut", "drop": "left out", "split": "split"}[self.long]
        text += f"; {self.num_long} longer than max_length, {done}" if self.num_long else ""
        return text + (f"; {self.num_left_out} left out, nothing in them is learnt" if self.num_left_out else "")


def encode(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> Encoded:
    """Tokens and losses of every row.

    A token has a loss when it lies within what is to be learnt; one that reaches over its beginning has none, since the prompt alone
    would be cut into other tokens there.

    Args:
        records: The rows.
        tokenizer: A fast one.
        settings: What is learnt, and how long a document may be.

    Raises:
        DataError: ``chat-template``, ``text-row``; ``nothing-to-learn``: no row has anything to learn.
        ModelFileError: ``tokenizer``: a tokenizer that doesn't say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise ModelFileError(
            f"The tokenizer {type(tokenizer).__name__} doesn't say which characters a token stands for.",
            why="So it can't be told which tokens are an answer.",
            hint="a model with a tokenizer.json",
            code="tokenizer",
        )
    # the last place of a packed row is padding, which sets one row apart from the next
    limit = settings.max_length - 1 if settings.packing else settings.max_length
    documents: list[Document] = []
    num_long = num_left_out = 0
    for document in _documents(records, tokenizer, settings):
        num_long += len(document) > limit
        pieces = [piece for piece in _shortened(document, limit, settings.long) if piece.trained.any()]
        documents += pieces
        num_left_out += not pieces
    if not documents:
        raise DataError(
            f"None of {len(records)} rows has anything to learn.",
            why=f"{num_long} are longer than max_length={settings.max_length}, and what is left of them is prompt."
            if num_long
            else "As they are written out, no token of them is what the assistant said.",
            hint="a larger max_length"
            if num_long
            else 'look at the chat template; data.train_on = "all" (--train-on all) learns every token',
            code="nothing-to-learn",
        )
    return Encoded(documents=documents, num_rows=len(records), num_long=num_long, num_left_out=num_left_out, long=settings.long)


def _documents(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> Iterator[Document]:
    """Every row whole, however long."""
    for first in range(0, len(records), _AT_ONCE):
        for is_chat, group in itertools.groupby(records[first : first + _AT_ONCE], key=lambda record: record.is_chat):
            some = list(group)
            written = [_written(record, tokenizer, settings.train_on) for record in some]
            # a template writes the special tokens itself
            encoded = tokenizer([text for text, _ in written], add_special_tokens=not is_chat, return_offsets_mapping=True, verbose=False)
            for record, (_, spans), ids, offsets in zip(some, written, encoded["input_ids"], encoded["offset_mapping"]):
                yield _document(record, ids, offsets, spans, None if is_chat else tokenizer.eos_token_id)


def _written(record: Record, tokenizer: PreTrainedTokenizerBase, train_on: str) -> tuple[str, list[Span]]:
    """A row as text, and the spans of it that are learnt."""
    if not record.is_chat:
        text = record.prompt + record.completion
        return text, [(0 if train_on == "all" else len(record.prompt), len(text))]
    require_template(tokenizer, record)
    if train_on == "all":
        text = render(tokenizer, record, record.messages)
        return text, [(0, len(text))]
    return answers(tokenizer, record, last_only=train_on == "last_answer")


def _document(record: Record, ids: list[int], offsets: list[Span], spans: list[Span], end: int | None) -> Document:
    """The tokens of a text, its end token added where it has none."""
    starts, ends = numpy.asarray(offsets, dtype=numpy.int64).reshape(-1, 2).T
    trained = numpy.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        trained |= (starts >= start) & (ends <= stop) & (ends > starts)
    if end is not None:
        if not ids or ids[-1] != end:
            ids, trained = [*ids, end], numpy.append(trained, True)
        trained[-1] = True
    trained[:1] = False
    return Document(ids=numpy.asarray(ids, dtype=numpy.int64), trained=trained, place=record.place)


def _shortened(document: Document, limit: int, how: str) -> list[Document]:
    """A document as pieces of at most ``limit`` tokens."""
    if len(document) <= limit:
        return [document]
    if how == "drop":
        return []
    pieces = []
    for start in range(0, len(document) if how == "split" else 1, limit):
        trained = document.trained[start : start + limit].copy()
        trained[:1] = False
        pieces.append(Document(ids=document.ids[start : start + limit], trained=trained, place=document.place))
    return pieces
