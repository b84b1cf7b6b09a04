"""W' = W R^T with R block-diagonal, as dense matrices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array, by_weight


def skew(vector: Array, size: int) -> Array:
    """The vector above the diagonal row by row, its negative below."""
    matrix = np.zeros((size, size))
    values = iter(vector)
    for i in range(size):
        for j in range(i + 1, size):
            matrix[i, j] = next(values)
            matrix[j, i] = -matrix[i, j]
    return matrix


def cayley(q: Array) -> Array:
    """(I - Q) (I + Q)^-1."""
    identity = np.eye(len(q))
    return (identity - q) @ np.linalg.inv(identity + q)


def series(q: Array, num_terms: int, last: float = 1.0) -> Array:
    """I + 2 Q + 2 Q^2 + ... + last Q^(num_terms - 1)."""
    total = np.eye(len(q))
    for power in range(1, num_terms):
        total += (last if power == num_terms - 1 else 2.0) * np.linalg.matrix_power(q, power)
    return total


def block_diagonal(blocks: list[Array]) -> Array:
    """One square matrix with the blocks along its diagonal."""
    total = sum(len(block) for block in blocks)
    matrix = np.zeros((total, total))
    start = 0
    for block in blocks:
        matrix[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return matrix


def oft(  # type: ignore[no-untyped-def]
    block_size: int, *, num_terms: int | None = None, last: float = 1.0, eps: float | None = None, on_output: bool = False
):
    """The reference for one setting: exact without ``num_terms``, bounded with ``eps``."""

    def adapted(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
        output = on_output or isinstance(module, nn.Embedding)
        matrix = weight.reshape(len(weight), -1)
        matrix = matrix.T if output else matrix
        num_places = matrix.shape[1] // block_size
        vectors = p["rotation"]
        rotations = []
        for place in range(num_places):
            q = skew(vectors[place if len(vectors) > 1 else 0], block_size)
            if eps is not None:
                q *= min(1.0, eps / np.sqrt(len(vectors)) / np.linalg.norm(q))
            q = q * p["scale"]
            rotations.append(cayley(q) if num_terms is None else series(q, num_terms, last))
        r = block_diagonal(rotations)
        new = (matrix @ r).T if output else matrix @ r.T
        return new.reshape(weight.shape), bias

    return by_weight(adapted)
