"""OFT and BOFT in LyCORIS files: ``oft_blocks`` B, of (blocks, b, b) or (stages, blocks, b, b), and ``rescale``.

With Q = B - B^T and R = (I + Q)(I - Q)^-1 the weight is R^T W block by block, or S_{m-1} ... S_0 W with the R of each stage between
two shuffles. ``alpha`` is a bound: beyond alpha * (output features), the norm of all Q together is brought down to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.checkpoint.dialects.lycoris_form import Read, ShapeError, UnsupportedError
from onegraph.layers import Layer
from onegraph.methods import BOFT, IA3, OFT, Method
from onegraph.methods.rotations import skew_symmetric

_SMALL = 1e-8
"""What LyCORIS adds to the norm that it compares with the bound."""


def read(module: Read) -> tuple[Method, dict[str, Tensor]] | None:
    """The rotation as it acts, its bound applied; None for blocks of one feature, which are 1."""
    blocks, rescale = module.tensors["oft_blocks"].float(), module.tensors.get("rescale")
    if blocks.dim() not in (3, 4) or blocks.shape[-1] != blocks.shape[-2] or 0 in blocks.shape:
        raise ShapeError(f"oft_blocks is {tuple(blocks.shape)}; (blocks, b, b) or (stages, blocks, b, b) was expected")
    size, features = blocks.shape[-1], blocks.shape[-3] * blocks.shape[-1]
    if rescale is not None and rescale.numel() != features:
        raise ShapeError(f"rescale is {tuple(rescale.shape)}, oft_blocks is {tuple(blocks.shape)}")
    gain = {} if rescale is None else {"gain": rescale.float().reshape(-1)}
    blocks = _bounded(blocks, (module.alpha or 0.0) * features)
    if size == 1:
        return (IA3(scales_bias=False), gain) if gain else None
    if blocks.dim() == 4:
        if size % 2 or blocks.shape[1] % 2 ** (blocks.shape[0] - 1):
            raise ShapeError(f"oft_blocks is {tuple(blocks.shape)}; that many stages need other blocks")
        method = BOFT(block_size=size, num_factors=blocks.shape[0], on_output=True, with_gain=bool(gain))
        return method, {"rotation": _halves_first(blocks) * -2, **gain}
    if gain:  # an OFT with a gain is a BOFT of one stage
        return BOFT(block_size=size, on_output=True), {"rotation": blocks.unsqueeze(0) * 2, **gain}
    rows, columns = torch.triu_indices(size, size, 1)
    return OFT(block_size=size, exact=True, on_output=True), {"rotation": (blocks.mT - blocks)[:, rows, columns]}


def write_oft(method: OFT, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """B is what is above the diagonal of -Q."""
    if not method.on_output:
        raise UnsupportedError("their OFT rotates outputs: OFT(on_output=True, exact=True) is theirs")
    if not method.exact:
        raise UnsupportedError("their OFT is the exact rotation and no series: OFT(on_output=True, exact=True) is theirs")
    if method.coft:
        raise UnsupportedError("their bound is one of all blocks together, coft's one of each")
    size = method.block_size_on(layer)
    vectors = tensors["rotation"]
    if method.block_share:
        vectors = vectors.expand(layer.out_features // size, -1)
    _check_size(size, layer.out_features // size)
    return {"oft_blocks": -skew_symmetric(vectors, size).triu(), **_no_bound(vectors)}


def write_boft(method: BOFT, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """In stages, as many as the number of blocks makes; one alone also as an OFT with a gain."""
    if not method.on_output:
        raise UnsupportedError("their BOFT rotates outputs: BOFT(on_output=True) is theirs")
    rotation = tensors["rotation"]
    num_stages, num_blocks, size, _ = rotation.shape
    gain = {"rescale": tensors["gain"].reshape(-1, *(1 for _ in layer.canonical_shape[1:]))} if "gain" in tensors else {}
    if num_stages == 1 and size <= num_blocks:
        return {"oft_blocks": rotation[0] / 2, **gain, **_no_bound(rotation)}
    if size % 2 or num_blocks & (num_blocks - 1):
        raise UnsupportedError(f"their blocks have an even size and are a power of two, these are {num_blocks} of {size}")
    stages = _halves_last(rotation) / -2
    missing = int(math.log2(num_blocks)) + 1 - num_stages  # stages of 0 change nothing
    return {"oft_blocks": torch.nn.functional.pad(stages, (0, 0, 0, 0, 0, 0, 0, missing)), **gain, **_no_bound(rotation)}


def _check_size(size: int, num_blocks: int) -> None:
    if size > num_blocks:
        raise UnsupportedError(f"their blocks are at least as many as they are wide, these are {num_blocks} of {size}")


def _no_bound(like: Tensor) -> dict[str, Tensor]:
    return {"alpha": torch.zeros((), dtype=like.dtype)}


def _bounded(blocks: Tensor, bound: float) -> Tensor:
    """B with its Q brought down to the bound; 0: there is none."""
    norm = float(torch.linalg.vector_norm(blocks - blocks.mT)) + _SMALL
    return blocks * (bound / norm) if 0 < bound < norm else blocks


def _halves_first(blocks: Tensor) -> Tensor:
    """From blocks whose features alternate between the two halves of their group to blocks that hold one half, then the other."""
    half = blocks.shape[-1] // 2
    parts = blocks.reshape(*blocks.shape[:2], half, 2, half, 2)
    return parts.permute(0, 1, 3, 2, 5, 4).reshape(blocks.shape)


def _halves_last(blocks: Tensor) -> Tensor:
    """The inverse."""
    half = blocks.shape[-1] // 2
    parts = blocks.reshape(*blocks.shape[:2], 2, half, 2, half)
    return parts.permute(0, 1, 3, 2, 5, 4).reshape(blocks.shape)
