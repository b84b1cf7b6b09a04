"""Embeddings: a lookup in a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from onegraph.layers.base import ProductLayer
from onegraph.layers.linear import by_rows


@dataclass(frozen=True, kw_only=True)
class EmbeddingLayer(ProductLayer):
    """``y = W[ids] * output_scale``. Shapes: ids (...) integer, W (I, O), y (..., O).

    Args:
        padding_idx: The row that gets no gradient.
        output_scale: What the module multiplies its rows by (``embed_scale`` in Gemma and its like).
    """

    kind: ClassVar[str] = "embedding"

    padding_idx: int | None = None
    output_scale: float = 1.0

    @property
    def channel_axis(self) -> int:
        """Features are the last axis."""
        return -1

    def down_shape(self, rank: int) -> tuple[int, ...]:
        """(R, I): a column for each row of the table."""
        return (rank, self.in_features)

    def up_shape(self, rank: int) -> tuple[int, ...]:
        """(O, R)."""
        return (self.out_features, rank)

    def without_padding_gradient(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Rows (..., O) found for ids (...), those of ``padding_idx`` without a gradient: as torch leaves that row of a table."""
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """From ids (...), down (R, I) -> (..., R) in the dtype of ``down``: it is cheaper to cast what is found than all."""
        h = functional.embedding(x, down.t(), self.padding_idx)
        return h if self.output_scale == 1.0 else h * self.output_scale

    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """From h (..., R), up (O, R) -> (..., O)."""
        return by_rows(h, up.to(h.dtype))

    def per_channel(self, vector: Tensor) -> Tensor:
        """(O,) as it is."""
        return vector

    def compose(self, down: Tensor, up: Tensor) -> Tensor:
        """From down (R, I), up (O, R) -> (O, I)."""
        return up @ down

    def canonical(self, weight: Tensor) -> Tensor:
        """(I, O) -> (O, I)."""
        return weight.t()

    def stored(self, weight: Tensor) -> Tensor:
        """(O, I) -> (I, O)."""
        return weight.t()


def describe_embedding(module: nn.Module) -> EmbeddingLayer | None:
    """The description of an ``nn.Embedding``, plain or scaled; None for anything else."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None  # max_norm rewrites the table inside forward: there is no fixed function to adapt
    scale = getattr(module, "embed_scale", None)
    if scale is None and type(module).forward is not nn.Embedding.forward:
        return None
    return EmbeddingLayer(
        in_features=module.num_embeddings,
        out_features=module.embedding_dim,
        weight_shape=(module.num_embeddings, module.embedding_dim),
        padding_idx=module.padding_idx,
        output_scale=1.0 if scale is None else float(scale),
    )
