"""W' = m (W + s U D) / ||W + s U D||, row by row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array, by_weight, own_tensors


def direction(weight: Array, p: Mapping[str, Array]) -> Array:
    """W + s U D, every entry a sum over the rank."""
    change = np.zeros_like(weight)
    for channel in range(p["down"].shape[0]):
        column = p["up"][:, channel].reshape(-1)
        change += np.multiply.outer(column, p["down"][channel])
    return weight + p["scale"] * change


def norms(module: nn.Module, p: Mapping[str, Array]) -> dict[str, Array]:
    """What the paper holds constant in the backward pass: the norm of each row."""
    rows = direction(own_tensors(module)[0], p)
    return {"norm": np.array([np.sqrt((row**2).sum()) for row in rows])}


def _weight(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    rows = direction(weight, p)
    norm = p["norm"] if "norm" in p else norms(module, p)["norm"]
    return np.stack([row * (magnitude / length) for row, magnitude, length in zip(rows, p["magnitude"], norm)]), bias


dora = by_weight(_weight)
"""The adapted layer's output; ``p`` holds ``down``, ``up``, ``magnitude``, ``scale`` and perhaps a constant ``norm``."""
