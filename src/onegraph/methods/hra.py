"""HRA: the layer's input is reflected at a few planes, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.fields import raise_all, rank_problems
from onegraph.methods.inits import kaiming
from onegraph.methods.precision import full_precision
from onegraph.methods.rotations import turns_activations

_DEPENDENT = 1e-5
"""The part of a unit vector outside the space of those before it below which it counts as inside: what rounding leaves over."""


@dataclass(frozen=True, kw_only=True)
class HRA(Method):
    """W' = W (I - s U T U^T), the product of the reflections I - 2 u u^T / (u^T u) from left to right at s = 1.

    U is ``vectors``, and T^-1 = triu(U^T U, 1) + diag(U^T U) / 2: their lengths cancel out. A column of zeros reflects nothing. With
    ``gram_schmidt``, U is made orthonormal first, and T = 2 I. y = W (x - s (x U) T^T U^T) + b; by convolutions with a kernel,
    y = W x - s (W U) (T U^T x) + b.

    Shapes:
        x (..., I), ``vectors`` (I / groups * points of the kernel, R), y (..., O). U and T are computed in the dtype of ``vectors`` and
        cast to that of x.

    Args:
        rank: R, the number of reflections. An even number, in equal pairs, starts as the identity. An odd number of reflections never is
            the identity: there one more is drawn.
        gram_schmidt: Whether the vectors are made orthonormal. A vector in the space of those before it then reflects nothing. Such an
            adapter never starts as the identity: the vectors are drawn each by itself.

    Raises:
        ConfigurationError: ``rank``.

    Source:
        Yuan et al. 2024, https://arxiv.org/abs/2405.17484; compact form: Schreiber and Van Loan 1989. PEFT divides by zero where a vector
        lies in the space of the others.
    """

    name: ClassVar[str] = "hra"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank"})
    reads_base: ClassVar[bool] = True  # with a kernel: W U is small, another weight would need a gradient as large as W
    additive: ClassVar[bool] = False

    rank: int = 8
    gram_schmidt: bool = False

    def __post_init__(self) -> None:
        raise_all(rank_problems(self.rank))

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``vectors``."""
        return {"vectors": ParameterSpec(shape=(layer.num_weight_columns, self.rank), rank_axes=(1,))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Every vector twice: two equal reflections are none."""
        size = layer.num_weight_columns
        if self.gram_schmidt:
            return {"vectors": kaiming((size, self.rank), generator)}
        half = kaiming((size, (self.rank + 1) // 2), generator)
        return {"vectors": half.repeat_interleave(2, dim=1)[:, : self.rank].contiguous()}

    def beside(self, layer: Layer) -> bool:
        """Everywhere but with groups, whose weight has fewer columns than the input has channels."""
        return layer.groups == 1

    def before(self, x: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """X - s (x U) T^T U^T, where activations can be reflected."""
        if not turns_activations(layer):
            return x
        directions, after = self._factors(p, transposed=True)
        directions, after = directions.to(x.dtype), after.to(x.dtype)
        axis = layer.channel_axis % x.dim()
        if axis != x.dim() - 1:
            parts = x.flatten(axis + 1)
            return x - (after.t() @ (directions @ parts)).reshape(x.shape).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        h = functional.linear(rows, directions)
        found = torch.addmm(rows, h, after, alpha=-1) if h.dtype == x.dtype else rows - (h @ after).to(x.dtype)
        return found.reshape(x.shape)

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """With a kernel: y - (W U) (s T U^T x)."""
        if turns_activations(layer):
            return y
        assert base is not None
        directions, after = self._factors(p, transposed=False)
        weight = base["weight"].flatten(1)
        up = -functional.linear(weight, directions.to(weight.dtype))
        h = layer.project(x, after.reshape(-1, layer.in_features, *layer.kernel_size))
        return layer.add_expanded(y, h, up.reshape(layer.up_shape(up.shape[-1])))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W - s (W U) T U^T."""
        directions, after = self._factors(p, transposed=False)
        rows = weight.flatten(1)
        change = functional.linear(rows, directions.to(rows.dtype)) @ after.to(rows.dtype)
        return (rows - change.to(rows.dtype)).reshape(weight.shape)

    def _factors(self, p: Mapping[str, Tensor], *, transposed: bool) -> tuple[Tensor, Tensor]:
        """U^T (R, n) and s T U^T (R, n), or s T^T U^T. Rows, since thin products with columns, and their gradients, take far longer."""
        vectors = p["vectors"]
        with full_precision(vectors):
            scale = p["scale"].to(vectors.dtype)
            directions = vectors.mT.contiguous()
            if self.gram_schmidt:
                directions = _orthonormal(_unit(directions))
                return directions, directions * (2 * scale)
            products = directions @ directions.mT
            identity = torch.eye(products.shape[0], dtype=products.dtype, device=products.device)
            above = torch.ones_like(identity).triu(1)
            inverse = products * (above + 0.5 * identity) + identity * (products == 0)
            if transposed:
                return directions, torch.linalg.solve_triangular(inverse.mT, directions * scale, upper=False)
            return directions, torch.linalg.solve_triangular(inverse, directions * scale, upper=True)


def _unit(directions: Tensor, least: float = 0.0) -> Tensor:
    """Rows of norm 1; those with a norm of at most ``least`` are zeros, without a gradient."""
    squared = directions.square().sum(-1, keepdim=True)
    kept = squared > least**2
    return directions * torch.where(kept, torch.where(kept, squared, 1.0).rsqrt(), 0.0)


def _orthonormal(directions: Tensor) -> Tensor:
    """Unit rows, each without its part in the space of those before it; zeros where nothing is left."""
    done = [directions[:1]]
    for place in range(1, directions.shape[0]):
        basis = torch.cat(done)
        rest = directions[place : place + 1]
        rest = rest - (rest @ basis.mT) @ basis
        done.append(_unit(rest, _DEPENDENT))
    return torch.cat(done)
