"""Rotations made of small blocks, for the methods that turn a layer's input: R, and E = R - I, with which everything is computed.

x + x E is x bit for bit where E is 0, in whatever precision the product is computed; and E, which is small, is rounded finely, where
rounding the diagonal of R, which is near 1, would give every feature a gain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.methods.fields import whole_problems

_WIDE = 32
"""Columns below which blocks are put together: a product of many 8 x 8 blocks takes longer than one of 32 x 32 with zeros."""


def block_problems(block_size: int | None, num_blocks: int | None) -> list[OnegraphError]:
    """One of the two says how the columns are split. Codes ``whole-number``, ``blocks``."""
    problems: list[OnegraphError] = []
    if block_size is not None:
        why = "It is how many columns turn together: one alone has no direction to turn to."
        problems += whole_problems("block_size", block_size, least=2, why=why, hint="8 and 32 are usual")
    if num_blocks is not None:
        problems += whole_problems(
            "num_blocks", num_blocks, why="It is how many blocks the columns are split into.", hint="block_size= instead"
        )
    if block_size is not None and num_blocks is not None:
        problems.append(
            ConfigurationError(
                f"block_size={block_size!r} and num_blocks={num_blocks!r} are given both",
                why="One decides the other: their product is the number of columns.",
                hint="give one of them",
                code="blocks",
            )
        )
    return problems


def split_problem(columns: int, block_size: int | None, num_blocks: int | None, *, multiple: int = 1, even: bool = False) -> str | None:
    """Why so many columns can't be split that way, naming what divides them; None when they can.

    Args:
        multiple: The number of blocks must be a multiple of it.
        even: Whether a block must have an even size.
    """

    def fits(size: int) -> bool:
        return size > 1 and columns % size == 0 and columns // size % multiple == 0 and not (even and size % 2)

    sizes = [size for size in range(2, columns + 1) if fits(size)]
    if block_size is not None:
        if block_size in sizes:
            return None
        asked, possible = f"blocks of {block_size}", sizes
    else:
        assert num_blocks is not None
        counts = [columns // size for size in reversed(sizes)]
        if num_blocks in counts:
            return None
        asked, possible = f"{num_blocks} blocks", counts
    name = "num_blocks" if block_size is None else "block_size"
    rest = f"{name} can be {', '.join(map(str, possible))}" if possible else "no size can"
    return f"its {columns} columns can't be split into {asked}; {rest}"


def turns_activations(layer: Layer) -> bool:
    """Whether turning the columns of the weight is the same as turning activations: not where a kernel gathers several points."""
    return layer.groups == 1 and all(size == 1 for size in layer.kernel_size)


def skew_symmetric(vectors: Tensor, size: int) -> Tensor:
    """From what is above the diagonal, row by row, (..., b(b-1)/2), the matrix (..., b, b) with its negative below."""
    rows, columns = torch.triu_indices(size, size, 1, device=vectors.device)
    # Both halves in one copy: a matrix minus its transpose is code that takes a C++ compiler long, forward and backward.
    places = torch.cat([rows * size + columns, columns * size + rows])
    flat = torch.zeros(*vectors.shape[:-1], size * size, dtype=vectors.dtype, device=vectors.device)
    return flat.index_copy(-1, places, torch.cat([vectors, -vectors], dim=-1)).reshape(*vectors.shape[:-1], size, size)


def cayley_change(generator: Tensor) -> Tensor:
    """E = (I - Q)(I + Q)^-1 - I = -2 Q (I + Q)^-1 of skew-symmetric Q (..., b, b): exact, and never singular."""
    identity = torch.eye(generator.shape[-1], dtype=generator.dtype, device=generator.device)
    # solve_ex asks for no result on the host, as solve does to see whether the matrix was singular.
    solved: Tensor = torch.linalg.solve_ex(identity + generator, -2 * generator, left=False)[0]
    return solved


def block_product(rows: Tensor, blocks: Tensor) -> Tensor:
    """Rows (T, n) times the block-diagonal matrix of blocks (G, b, b), or of one that all G places share (1, b, b)."""
    num_blocks, size, _ = blocks.shape
    blocks = blocks.to(rows.dtype)
    if num_blocks == 1:
        return (rows.reshape(-1, size) @ blocks[0]).reshape(rows.shape)
    parts = rows.reshape(-1, num_blocks, size).transpose(0, 1)
    return torch.bmm(parts, blocks).transpose(0, 1).reshape(rows.shape)


def widened(blocks: Tensor) -> Tensor:
    """The same block-diagonal matrix in blocks of up to 32 columns."""
    num_blocks, size, _ = blocks.shape
    together = max(1, _WIDE // size)
    while num_blocks % together:
        together -= 1
    if together == 1:
        return blocks
    places = torch.eye(together, dtype=blocks.dtype, device=blocks.device)
    spread = blocks.reshape(-1, together, size, 1, size) * places[:, None, :, None]
    return spread.reshape(-1, together * size, together * size)


def turned(x: Tensor, blocks: Tensor, layer: Layer, part: Tensor | None = None) -> Tensor:
    """Activations with their features turned, x + x E, in the dtype of ``x``; E block-diagonal. Only ``part`` of x turns, where given."""
    part = x if part is None else part
    axis = layer.channel_axis % x.dim()
    if axis == x.dim() - 1:
        return x + block_product(part.reshape(-1, x.shape[-1]), blocks).reshape(x.shape).to(x.dtype)
    size = blocks.shape[-1]
    parts = part.reshape(*x.shape[:axis], x.shape[axis] // size, size, math.prod(x.shape[axis + 1 :]))
    return x + (blocks.mT.to(x.dtype) @ parts).reshape(x.shape).to(x.dtype)
