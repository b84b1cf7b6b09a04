"""How documents are laid into rows: packed into rows of one width, or padded to one of a few widths."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy

_STEP = 8
_MOST_CANDIDATES = 128


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Which documents share a row: best fit, the longest first.

    Args:
        lengths: Of each document, at most ``width``.
        width: Tokens in a row.

    Returns:
        Rows of numbers of documents, the longest document first in each.

    Example:
        >>> pack([3, 5, 2, 6], 8)
        [[3, 2], [1, 0]]
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # space that is left in a row, and the row; in order
    for number in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect.bisect_left(free, (lengths[number], -1))
        if place < len(free):
            space, row = free.pop(place)
            rows[row].append(number)
        else:
            space, row = width, len(rows)
            rows.append([number])
        if space > lengths[number]:
            bisect.insort(free, (space - lengths[number], row))
    return rows


def choose_widths(lengths: Sequence[int], num_widths: int, limit: int) -> list[int]:
    """The widths that make the fewest padding tokens, at most ``num_widths`` of them, each a multiple of 8 or ``limit``.

    Args:
        lengths: Of each document, at most ``limit``.
        num_widths: How many there may be.
        limit: The largest there may be.

    Returns:
        In order; the last is as long as the longest document needs.

    Example:
        >>> choose_widths([3, 5, 8, 30, 31], 2, 64)
        [8, 32]
    """
    limit = min(limit, -(-max(lengths) // _STEP) * _STEP)  # a limit far above all documents makes no coarser steps
    step = max(_STEP, -(-limit // (_MOST_CANDIDATES * _STEP)) * _STEP)
    rounded = numpy.minimum(-(-numpy.asarray(lengths) // step) * step, limit)
    candidates, counts = numpy.unique(rounded, return_counts=True)
    total = numpy.concatenate([[0], numpy.cumsum(counts)])
    # cost[i]: tokens of all documents up to candidate i, when candidate i - 1 is the last width
    best = numpy.concatenate([[0], candidates * total[1:]]).astype(numpy.int64)
    choices: list[numpy.ndarray] = []
    for _ in range(min(num_widths, len(candidates)) - 1):
        costs = best[:-1, None] + candidates[None, :] * (total[None, 1:] - total[:-1, None])
        costs[numpy.tril_indices(len(candidates), -1)] = numpy.iinfo(numpy.int64).max
        choice = costs.argmin(axis=0)
        choices.append(choice)
        best = numpy.concatenate([[0], costs.min(axis=0)])
    widths, end = [], len(candidates)
    for choice in reversed(choices):
        widths.append(int(candidates[end - 1]))
        end = int(choice[end - 1])
        if end == 0:
            break
    else:
        widths.append(int(candidates[end - 1]))
    return sorted(widths)
