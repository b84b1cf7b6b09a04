"""y = W x + b + s (U D x + c), for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array, convolution, embedding, linear, own_tensors


def lora(module: nn.Module, x: Array, p: Mapping[str, Array]) -> Array:
    """The adapted layer's output; ``p`` holds ``down``, ``up``, ``scale`` and perhaps ``up_bias``."""
    scale = p["scale"]
    weight, bias = own_tensors(module)
    extra = p.get("up_bias", np.zeros(p["up"].shape[0]))
    if isinstance(module, nn.Embedding):
        return embedding(x.astype(np.int64), weight.T) + scale * (embedding(x.astype(np.int64), p["down"].T) @ p["up"].T + extra)
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return linear(x, weight, bias) + scale * linear(linear(x, p["down"]), p["up"], extra)
    h = convolution(x, p["down"], None, module, groups=1)
    groups, outs, inner = module.groups, p["up"].shape[0] // module.groups, p["up"].shape[1]
    up = p["up"].reshape(p["up"].shape[0], inner)
    change = np.zeros((h.shape[0], up.shape[0], *h.shape[2:]))
    for out in range(up.shape[0]):
        for channel in range(inner):
            change[:, out] += up[out, channel] * h[:, (out // outs) * inner + channel]
    assert groups * inner == h.shape[1]
    return convolution(x, weight, bias, module, groups) + scale * (change + extra.reshape(1, -1, *(1 for _ in h.shape[2:])))
