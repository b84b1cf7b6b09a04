"""y = W x + b + s U D x, where stretches of U and D are mixtures of the bank's vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import nn

from reference.layers import Array, linear, own_tensors


def _mixture(logits: Array, bank: Array, topk: int) -> Array:
    chosen = sorted(range(len(logits)), key=lambda place: -logits[place])[:topk]
    powers = [np.exp(logits[place] - logits[chosen[0]]) for place in chosen]
    return sum(power / sum(powers) * bank[place] for power, place in zip(powers, chosen))  # type: ignore[return-value]


def vblora(topk: int) -> Callable[[nn.Module, Array, Mapping[str, Array]], Array]:
    """A reference for mixtures of so many vectors."""

    def output(module: nn.Module, x: Array, p: Mapping[str, Array]) -> Array:
        weight, bias = own_tensors(module)
        bank, length = p["vector_bank"], p["vector_bank"].shape[1]
        rank = p["logits_down"].shape[0]
        down, up = np.zeros((rank, weight.shape[1])), np.zeros((weight.shape[0], rank))
        for channel in range(rank):
            for tile, logits in enumerate(p["logits_down"][channel]):
                down[channel, tile * length : (tile + 1) * length] = _mixture(logits, bank, topk)
            for tile, logits in enumerate(p["logits_up"][:, channel]):
                up[tile * length : (tile + 1) * length, channel] = _mixture(logits, bank, topk)
        return linear(x, weight, bias) + p["scale"] * linear(linear(x, down), up)

    return output
