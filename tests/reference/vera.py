"""y = W x + b + s diag(b_up) B diag(b_down) A x, with the layer's own part of A and B."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array, linear, own_tensors


def vera(module: nn.Module, x: Array, p: Mapping[str, Array]) -> Array:
    """The adapted layer's output."""
    weight, bias = own_tensors(module)
    outs, ins = weight.shape
    left = np.diag(p["gain_up"]) @ p["projection_up"][:outs]
    right = np.diag(p["gain_down"]) @ p["projection_down"][:, :ins]
    return linear(x, weight, bias) + p["scale"] * linear(linear(x, right), left)
