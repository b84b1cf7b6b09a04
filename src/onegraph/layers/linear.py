"""Linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from onegraph.layers.base import ProductLayer


def by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """X W^T as one product of matrices: torch before 2.12 can't trace one of more axes under vmap where a length is symbolic.

    Shapes:
        x (..., I), weight (O, I) -> (..., O).
    """
    if x.dim() < 3:
        return functional.linear(x, weight)
    return functional.linear(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[0])


@dataclass(frozen=True, kw_only=True)
class LinearLayer(ProductLayer):
    """``y = x W^T + b``. Shapes: x (..., I), W (O, I), y (..., O).

    Args:
        transposed: Whether the weight is stored as (I, O): ``Conv1D`` of transformers, in GPT-2 and its like.
    """

    kind: ClassVar[str] = "linear"

    transposed: bool = False

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
        return by_rows(x, down.to(x.dtype))

    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """From h (..., R), up (O, R) -> (..., O)."""
        return by_rows(h, up.to(h.dtype))

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

    def canonical(self, weight: Tensor) -> Tensor:
        """As it is, or (I, O) -> (O, I)."""
        return weight.t() if self.transposed else weight

    def stored(self, weight: Tensor) -> Tensor:
        """As it is, or (O, I) -> (I, O)."""
        return weight.t() if self.transposed else weight


def describe_linear(module: nn.Module) -> LinearLayer | None:
    """The description of an ``nn.Linear``, or of the ``Conv1D`` of transformers, that runs as one; None for anything else."""
    if (transposed := _describe_transposed(module)) is not None:
        return transposed
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


def _describe_transposed(module: nn.Module) -> LinearLayer | None:
    # Known by its name: transformers isn't imported for a model that has nothing of it.
    kind = next((base for base in type(module).__mro__ if base.__name__ == "Conv1D" and base.__module__.startswith("transformers.")), None)
    if kind is None or type(module).forward is not vars(kind).get("forward"):
        return None
    weight, out_features = getattr(module, "weight", None), getattr(module, "nf", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != out_features:
        return None
    return LinearLayer(
        in_features=weight.shape[0],
        out_features=weight.shape[1],
        weight_shape=tuple(weight.shape),
        has_bias=getattr(module, "bias", None) is not None,
        transposed=True,
    )
