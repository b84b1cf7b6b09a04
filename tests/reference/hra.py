"""W' = W R with R a product of reflections, one at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array


def reflections(vectors: Array) -> Array:
    """(I - 2 u_1 u_1^T) (I - 2 u_2 u_2^T) ... with unit vectors."""
    total = np.eye(len(vectors))
    for vector in vectors.T:
        unit = vector / np.linalg.norm(vector)
        total = total @ (np.eye(len(vectors)) - 2 * np.outer(unit, unit))
    return total


def orthogonal_reflections(vectors: Array) -> Array:
    """The same of orthonormal vectors that span the same space: I - 2 times the projection onto it."""
    left, values, _ = np.linalg.svd(vectors, full_matrices=False)
    basis = left[:, values > 1e-9 * values[0]]
    return np.eye(len(vectors)) - 2 * basis @ basis.T


def hra(*, gram_schmidt: bool = False):  # type: ignore[no-untyped-def]
    """The reference for one setting."""

    def adapted(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
        r = orthogonal_reflections(p["vectors"]) if gram_schmidt else reflections(p["vectors"])
        r = (1 - p["scale"]) * np.eye(len(r)) + p["scale"] * r
        return (weight.reshape(len(weight), -1) @ r).reshape(weight.shape), bias

    return adapted
