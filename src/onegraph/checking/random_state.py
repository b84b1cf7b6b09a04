"""The same random numbers for every run of a comparison, and none used up by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def same_random_state() -> Iterator[Callable[[], None]]:
    """Yields a function that rewinds torch's generators; they end as they began."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def rewind() -> None:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    try:
        yield rewind
    finally:
        rewind()
