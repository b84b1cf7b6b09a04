"""W' = W + s M, element by element."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from reference.layers import Array


def balance(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """The block repeated over the columns; with a narrow block ("mini") over the rows too."""
    block, new = p["block"], weight.copy()
    rank, width = block.shape
    for out in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            new[out, column] += p["scale"] * block[column % rank, out % width]
    return new, bias


def bat(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """For every square of the weight, square @ block + block."""
    blocks, new = p["block"], weight.copy()
    rank = blocks.shape[-1]
    for k, block in enumerate(blocks):
        for start in range(0, weight.shape[1], rank):
            square = weight[k * rank : (k + 1) * rank, start : start + rank]
            new[k * rank : (k + 1) * rank, start : start + rank] += p["scale"] * (square @ block + block)
    return new, bias
