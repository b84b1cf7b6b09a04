"""The same random numbers for every run of a comparison, of torch, Python and numpy, and none used up by it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy
import torch


@contextlib.contextmanager
def same_random_state() -> Iterator[Callable[[], None]]:
    """Yields a function that rewinds the global generators; they end as they began."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    python, arrays = random.getstate(), numpy.random.get_state()

    def rewind() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy.random.set_state(arrays)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    try:
        yield rewind
    finally:
        rewind()
