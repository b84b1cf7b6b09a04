"""Random numbers that depend only on the seed and on what they are for.

Every decision about the data (order, captions, flips, crops, sampled latents) draws from a stream named by its place, for instance
``(seed, "flip", epoch, index)``. There is no state to save, so a resumed run repeats the decisions of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import random


def stream_seed(seed: int, *key: int | str) -> int:
    """A 63-bit number that is a pure function of the seed and the key."""
    name = "\x1f".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *key: int | str) -> random.Random:
    """A random generator that is a pure function of the seed and the key."""
    return random.Random(stream_seed(seed, *key))
