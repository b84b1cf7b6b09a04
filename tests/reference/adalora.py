"""W' = W + s sum_r U_r e_r D_r: triplets, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array, by_weight


def _weight(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    change = np.zeros_like(weight)
    for left, value, right in zip(p["up"].T, p["singular"], p["down"]):
        change += value * np.multiply.outer(left, right)
    return weight + p["scale"] * change, bias


adalora = by_weight(_weight)
"""The adapted layer's output; ``p`` holds ``down`` (R, I, *kernel), ``up`` (O, R), ``singular`` (R,) and ``scale``."""
