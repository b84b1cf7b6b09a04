"""How the tensors of a new adapter are drawn: on the CPU, in float32, from one generator."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Init = Callable[[tuple[int, ...], torch.Generator | None], Tensor]


def kaiming(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Uniform in +-1/sqrt(fan_in): what ``kaiming_uniform_`` with a = sqrt(5) gives; fan_in is all but the first axis."""
    bound = 1 / math.sqrt(max(1, math.prod(shape[1:])))
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def gaussian(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Normal with standard deviation 1/rank, the rank being the first axis."""
    return torch.randn(shape, generator=generator) / shape[0]


def normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Standard normal."""
    return torch.randn(shape, generator=generator)
