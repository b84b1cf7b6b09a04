"""Linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from onegraph.layers.base import Layer


@dataclass(frozen=True, kw_only=True)
class LinearLayer(Layer):
    """``y = x W^T + b``. Shapes: x (..., I), W (O, I), y (..., O)."""

    kind: ClassVar[str] = "linear"

    @property
    def channel_axis(self) -> int:
        """Features are the last axis."""
        return -1

    def down_shape(self, rank: int) -> tuple[int, ...]:
        """(R, I)."""
        return (rank, self.in_features)

    def up_shape(self, rank: int) -> tuple[int, ...]:
        """(O, R)."""
        return (self.out_features, rank)

    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """From x (..., I), down (R, I) -> (..., R)."""
        return functional.linear(x, down.to(x.dtype))

    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """From h (..., R), up (O, R) -> (..., O)."""
        return functional.linear(h, up.to(h.dtype))

    def add_expanded(self, y: Tensor, h: Tensor, up: Tensor) -> Tensor:
        """One ``addmm`` instead of a product, a temporary as large as the output, and a sum."""
        if y.dtype != h.dtype or h.dim() < 2:
            return super().add_expanded(y, h, up)
        rows = y.reshape(-1, y.shape[-1]).addmm(h.reshape(-1, h.shape[-1]), up.to(h.dtype).t())
        return rows.reshape(y.shape).to(y.dtype)

    def per_channel(self, vector: Tensor) -> Tensor:
        """(O,) as it is."""
        return vector

    def compose(self, down: Tensor, up: Tensor) -> Tensor:
        """From down (R, I), up (O, R) -> (O, I)."""
        return up @ down


def describe_linear(module: nn.Module) -> LinearLayer | None:
    """The description of an ``nn.Linear`` that runs as one; None for anything else."""
    # The out_proj of nn.MultiheadAttention is a Linear that is never called: its owner reads the weight and
    # multiplies by itself, so an adapter on it would do nothing without a word.
    if not isinstance(module, nn.Linear) or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    if type(module).forward is not nn.Linear.forward:
        return None
    return LinearLayer(
        in_features=module.in_features,
        out_features=module.out_features,
        weight_shape=(module.out_features, module.in_features),
        has_bias=module.bias is not None,
    )
