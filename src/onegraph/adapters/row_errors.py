"""Batches that don't fit the rows that were named: the errors, and how they come out of a compiled graph.

An exception of ours can't be made inside a graph. A graph checks, and fails with a text; who called the graph finds the error by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onegraph.errors import AdapterError


def require_rows(fits: bool, num_rows: int, shape: Sequence[int]) -> None:
    """A layer's input has as many rows as were named.

    Raises:
        AdapterError: ``row-count``; in a graph a RuntimeError with its text.
    """
    _require(fits, "row-count", lambda: row_count(f"{num_rows} rows were named, but a layer got an input of shape {tuple(shape)}"))


def require_one_meaning(clear: bool, num_rows: int) -> None:
    """Numbers in one axis that an embedding gets are positions of all rows.

    Raises:
        AdapterError: ``rows-ambiguous``; in a graph a RuntimeError with its text.
    """
    _require(
        clear,
        "rows-ambiguous",
        lambda: rows_ambiguous(f"{num_rows} rows were named, and an embedding got {num_rows} numbers in one axis"),
    )


def row_count(what: str) -> AdapterError:
    """Another number of rows than the batch has."""
    return AdapterError(
        what,
        why="rows() names the adapter of every row of the batch, and the first axis of a layer's input is the batch.",
        hint="name as many rows as the batch has; leave layers that see another batch axis out with exclude=",
        code="row-count",
    )


def rows_ambiguous(what: str) -> AdapterError:
    """Positions of all rows, or a class for each."""
    return AdapterError(
        what,
        why="They can be one for each row, or positions that are the same for every row; the outputs have different shapes.",
        hint="give positions a batch axis, positions[None], and classes a second one, classes[:, None], "
        "or leave the layer out with exclude=",
        code="rows-ambiguous",
    )


_IN_GRAPHS = {
    "row-count": ("adapters.rows(): another number of rows were named than the batch of a layer has", row_count),
    "rows-ambiguous": ("adapters.rows(): an embedding got as many numbers in one axis as rows were named", rows_ambiguous),
}
_TEXTS = {code: f"{what} [{code}]" for code, (what, _) in _IN_GRAPHS.items()}


def error_in(text: str) -> AdapterError | None:
    """The error that a graph failed with, by the text of what torch raised; None for another failure."""
    for code, (what, make) in _IN_GRAPHS.items():
        if _TEXTS[code] in text:
            return make(what)
    return None


def _require(holds: bool, code: str, error: Callable[[], AdapterError]) -> None:
    if not torch.compiler.is_compiling():
        if not holds:
            raise error()
    elif code == "row-count":  # torch before 2.12 takes no text out of a variable around the function
        torch._check(holds, lambda: _TEXTS["row-count"])  # type: ignore[no-untyped-call]
    else:
        torch._check(holds, lambda: _TEXTS["rows-ambiguous"])  # type: ignore[no-untyped-call]
