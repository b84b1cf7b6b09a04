"""Matrices made of smaller ones: what LoHa and LoKr are built from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.methods.fields import is_whole


def factor_pair(size: int, factor: int = -1) -> tuple[int, int]:
    """``size`` as a product of two whole numbers.

    A ``factor`` that divides it comes first. Otherwise the first is the largest divisor that is neither above the square root nor,
    unless it is -1, above ``factor``; the second is never the smaller one then.

    Example:
        >>> factor_pair(768), factor_pair(128, 4), factor_pair(20, 3)
        ((24, 32), (4, 32), (2, 10))
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = math.isqrt(size) if factor == -1 else min(math.isqrt(size), factor)
    first = next((number for number in range(limit, 0, -1) if size % number == 0), 1)
    return first, size // first


def factor_problems(name: str, value: object) -> list[OnegraphError]:
    """A factor is a whole number of at least 1, or -1. Code ``whole-number``."""
    if is_whole(value) or (value == -1 and isinstance(value, int)):
        return []
    return [
        ConfigurationError(
            f"{name}={value!r} is neither a whole number of at least 1 nor -1",
            why="It is the size of the first Kronecker factor where it divides a layer's size, and its upper limit elsewhere.",
            hint=f"{name}=-1 splits a size near its square root",
            code="whole-number",
        )
    ]


def has_core(layer: Layer, *, wanted: bool) -> bool:
    """Whether a factor pair of this layer has a core between them: only a kernel of more than one point is worth one."""
    return wanted and math.prod(layer.kernel_size) > 1


def with_core(core: Tensor, down: Tensor) -> Tensor:
    """Core (R, R', *kernel) and down (R', I) as one: (R, I * points), the sum over b of core[a, b, *kernel] down[b, i]."""
    inner = torch.movedim(core, 1, -1) @ down  # (R, *kernel, I)
    return torch.movedim(inner, -1, 1).flatten(1)


def kept_outputs(p: Mapping[str, Tensor], num_outputs: int, rescale: Tensor | float) -> Tensor:
    """A mask over the output features with the probability ``rank_dropout``: what is dropped is a row of the difference, for the call.

    Args:
        rescale: 1: what is left is divided by the share that is left; 0: it isn't.
    """
    probability = p["rank_dropout"]
    kept = (torch.rand(num_outputs, device=probability.device) >= probability).to(probability.dtype)
    share = kept.mean().clamp_min(1 / num_outputs)  # nothing left: 0, not 0 / 0
    return kept * (1 + rescale * (1 / share - 1))
