"""Every global random generator: seeded, read, put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn


def seed_everything(seed: int) -> None:
    """Every global random generator: torch on each device, Python, NumPy."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """The state of every global random generator: torch (each device), Python, NumPy."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Puts back what ``random_states`` read."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
    python, generator = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = generator["keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state((generator["kind"], keys, generator["place"], generator["has_gauss"], generator["cached"]))


@contextlib.contextmanager
def nothing_changed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Afterwards the random generators are where they were, and no gradient is left."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)
        for parameter in parameters:
            parameter.grad = None
