"""W' = diag(g) W R^T with R a product of permuted block-diagonal matrices, dense."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array


def permutation(size: int, block: int, stage: int) -> Array:
    """The matrix that takes, in each group of block * 2^stage, the chunks of block / 2 with an even number first."""
    order: list[int] = []
    group, chunk = block * 2**stage, block // 2
    for start in range(0, size, group):
        chunks = [list(range(at, at + chunk)) for at in range(start, start + group, chunk)]
        for part in chunks[0::2] + chunks[1::2]:
            order += part
    matrix = np.zeros((size, size))
    for row, column in enumerate(order):
        matrix[row, column] = 1.0
    return matrix


def butterfly(rotation: Array, scale: float) -> Array:
    """B_{N-1} ... B_0."""
    num_stages, num_blocks, block, _ = rotation.shape
    total = np.eye(num_blocks * block)
    for stage in range(num_stages):
        matrix = np.zeros_like(total)
        for place, free in enumerate(rotation[stage]):
            s = (free - free.T) / 2 * scale
            q = np.linalg.inv((np.eye(block) + s).T) @ (np.eye(block) - s).T  # the transpose of (I - S) (I + S)^-1
            matrix[place * block : (place + 1) * block, place * block : (place + 1) * block] = q.T
        if stage:
            p = permutation(len(total), block, stage)
            matrix = p @ matrix @ p.T
        total = matrix @ total
    return total


def boft(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """The adapted weight; the bias stays."""
    gain = 1 + p["scale"] * (p["gain"] - 1)
    matrix = weight.reshape(len(weight), -1) @ butterfly(p["rotation"], float(p["scale"])).T
    return (np.diag(gain) @ matrix).reshape(weight.shape), bias


def boft_on_output(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """W' = diag(g) R W; without a gain, R W."""
    gain = 1 + p["scale"] * (p["gain"] - 1) if "gain" in p else np.ones(len(weight))
    matrix = butterfly(p["rotation"], float(p["scale"])) @ weight.reshape(len(weight), -1)
    return (np.diag(gain) @ matrix).reshape(weight.shape), bias
