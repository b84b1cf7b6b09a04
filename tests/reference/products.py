"""Differences of a layer's tensors: elementwise and Kronecker products of small matrices, and whole ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from reference.layers import Array, own_tensors, plain


def _with_kernel(up: Array, core: Array, down: Array) -> Array:
    """W[o, i, *k] = sum over a, b of up[o, a] core[a, b, *k] down[b, i]."""
    return np.einsum("oa,ab...,bi->oi...", up, core, down)


def loha(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """W + s (U1 D1) * (U2 D2)."""
    factors = []
    for pair in ("first", "second"):
        up, down = p[f"{pair}_up"], p[f"{pair}_down"]
        whole = _with_kernel(up, p[f"{pair}_core"], down) if f"{pair}_core" in p else np.einsum("or,rc->oc", up, down)
        factors.append(whole.reshape(weight.shape))
    return weight + p["scale"] * factors[0] * factors[1], bias


def lokr(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """W + s F (x) S, block by block."""
    first = p["first"] if "first" in p else np.einsum("lr,rm->lm", p["first_up"], p["first_down"])
    if "second" in p and p["second"].ndim == 3:  # PEFT's Conv1d: F has an axis of size 1 in front
        second = p["second"]
        blocks = np.einsum("lm,knc->klnmc", first, second)
        return weight + p["scale"] * blocks.reshape(weight.shape), bias
    if "second" in p:
        second = p["second"]
    elif "second_core" in p:
        second = _with_kernel(p["second_up"], p["second_core"], p["second_down"])
    else:
        second = np.einsum("kr,rc->kc", p["second_up"], p["second_down"])
    num_rows = second.shape[0]
    second = second.reshape(num_rows, -1, *weight.shape[2:])
    num_columns = second.shape[1]
    change = np.zeros_like(weight)
    for row in range(first.shape[0]):
        for column in range(first.shape[1]):
            rows = slice(row * num_rows, (row + 1) * num_rows)
            columns = slice(column * num_columns, (column + 1) * num_columns)
            change[rows, columns] = first[row, column] * second
    return weight + p["scale"] * change, bias


def difference(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """W + s dW, b + s db."""
    new = weight + p["scale"] * p["weight_difference"] if "weight_difference" in p else weight
    return new, None if bias is None else bias + p["scale"] * p["bias_difference"]


def dense(module: nn.Module, x: Array, p: Mapping[str, Array]) -> Array:
    """Every tensor with its difference; the one module of no kind that the tests have is written out."""
    if "matrix_difference" in p:
        matrix = module.matrix.detach().double().numpy() + p["scale"] * p["matrix_difference"]
        gain = module.gain.detach().double().numpy() + p["scale"] * p["gain_difference"]
        found: Array = gain * np.einsum("...i,oi->...o", x, matrix) + float(module.times) * matrix.sum(1)
        return found
    return plain(module, x, *difference(*own_tensors(module), p, module))
