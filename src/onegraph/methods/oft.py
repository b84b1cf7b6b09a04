"""OFT: the layer's input is rotated, block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import used_probabilities
from onegraph.methods.fields import probability_problems, raise_all, whole_problems
from onegraph.methods.precision import full_precision
from onegraph.methods.rotations import (
    block_problems,
    block_product,
    cayley_change,
    skew_symmetric,
    split_problem,
    turned,
    turns_activations,
    widened,
)

_DEFAULT_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class OFT(Method):
    """W' = W R^T with R = blockdiag(R_1, R_2, ...), R_g a rotation made of the skew-symmetric s Q_g; y = W (x R) + b.

    With ``on_output``, and by embeddings, the output is rotated: W' = R^T W, y = (W x) R + b.

    Shapes:
        x (..., I), ``rotation`` (blocks, b(b-1)/2) or with ``block_share`` (1, b(b-1)/2): what is above the diagonal of Q_g, row by row.
        Convolutions rotate the columns of the weight as a matrix (O, I / groups * points of the kernel).
        R is computed in the dtype of ``rotation``, R - I cast to that of x; x keeps its dtype.

    Args:
        block_size: b, at least 2; it divides the number of columns. 32 where neither it nor ``num_blocks`` is given.
        num_blocks: Number of blocks instead of their size.
        exact: R = (I - Q)(I + Q)^-1 exactly. Otherwise R = I + 2 Q + 2 Q^2 + ... + Q^k, which costs less, is a rotation only nearly, and is
            near to the *inverse* of the exact one: the two don't mean the same on one file.
        num_terms: Of that series with the identity, k + 1; at least 2. 3 and 4 are the same series (k = 3), as PEFT computes
            them since 0.18; with ``last_term_twice`` 3 is k = 2.
        last_term_twice: The last term has the factor 2 as the others: PEFT 0.16 and 0.17.
        block_share: One rotation for all blocks.
        on_output: Whether the output is rotated rather than the input, but for the bias: PEFT up to 0.13.
        coft: ||Q_g|| is at most eps / sqrt(number of rotations).
        eps: See ``coft``.
        module_dropout: Probability in [0, 1) that a block isn't rotated, drawn for each block in training.

    Raises:
        ConfigurationError: ``whole-number``, ``blocks``, ``probability``, ``eps``.

    Source:
        Qiu et al. 2023, https://arxiv.org/abs/2306.07280; series: Qiu et al. 2025, https://arxiv.org/abs/2506.19847. The dropout draws
        every block by itself; PEFT has the option but no effect of it. The bound of ``coft`` is part of the function: the tensor is not
        overwritten with the bounded one, and the gradient is that of the bounded one.
    """

    name: ClassVar[str] = "oft"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv", "embedding"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"module_dropout"})
    random_settings: ClassVar[frozenset[str]] = frozenset({"module_dropout"})
    additive: ClassVar[bool] = False

    block_size: int | None = None
    num_blocks: int | None = None
    exact: bool = False
    num_terms: int = 5
    last_term_twice: bool = False
    block_share: bool = False
    on_output: bool = False
    coft: bool = False
    eps: float = 6e-5
    module_dropout: float = 0.0

    def __post_init__(self) -> None:
        why = "It is the number of terms of the series, the identity included; with one there is nothing to train."
        raise_all(
            block_problems(self.block_size, self.num_blocks),
            whole_problems("num_terms", self.num_terms, least=2, why=why, hint="5 is usual; exact=True needs no series"),
            _eps_problems(self.eps),
            probability_problems(self, ("module_dropout",)),
        )
        if self.num_blocks is None and self.block_size is None:
            object.__setattr__(self, "block_size", _DEFAULT_BLOCK)

    @property
    def reads_base(self) -> bool:  # type: ignore[override]
        """The bias isn't rotated."""
        return self.on_output

    def block_size_on(self, layer: Layer) -> int:
        """Columns of a block."""
        return self.block_size or self._columns(layer) // (self.num_blocks or 1)

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``rotation``."""
        size = self.block_size_on(layer)
        num_blocks = 1 if self.block_share else self._columns(layer) // size
        return {"rotation": ParameterSpec(shape=(num_blocks, size * (size - 1) // 2))}

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, a factor of the Q_g, so that every strength is a rotation; ``module_dropout`` where it is used."""
        return {"scale": 1.0, **used_probabilities(self, layer, ("module_dropout",))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Q = 0: R is the identity."""
        return self.identity(layer)

    def beside(self, layer: Layer) -> bool:
        """Activations are rotated where that is the same as rotating the weight."""
        return self._turns_output(layer) or turns_activations(layer)

    def before(self, x: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """X R, where the input is rotated."""
        return x if self._turns_output(layer) else turned(x, self._change(p, layer, training=training), layer)

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Where the output is rotated, (y - b) R + b."""
        if not self._turns_output(layer):
            return y
        change = self._change(p, layer, training=training)
        bias = None if base is None else base.get("bias")
        return turned(y, change, layer, y if bias is None else y - layer.per_channel(bias).to(y.dtype))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W R^T; where the output is rotated, R^T W."""
        change = self._change(p, layer, training=training)
        rows = weight.flatten(1)
        if self._turns_output(layer):
            return (rows + block_product(rows.t(), change).t().to(rows.dtype)).reshape(weight.shape)
        return (rows + block_product(rows, change.mT).to(rows.dtype)).reshape(weight.shape)

    def check(self, layer: Layer) -> str | None:
        """The blocks have to fill the columns."""
        if (reason := super().check(layer)) is not None:
            return reason
        if self.on_output and layer.groups > 1:
            return f"a rotation of the output mixes its {layer.groups} groups; on_output=False rotates the input of each group"
        return split_problem(self._columns(layer), self.block_size, self.num_blocks)

    def _turns_output(self, layer: Layer) -> bool:
        return self.on_output or layer.kind == "embedding"

    def _columns(self, layer: Layer) -> int:
        """How many features are rotated."""
        return layer.out_features if self._turns_output(layer) else layer.num_weight_columns

    def _change(self, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """R - I, as blocks."""
        vectors = p["rotation"]
        size = self.block_size_on(layer)
        with full_precision(vectors):
            if self.coft:
                vectors = vectors * _bound(vectors, self.eps / math.sqrt(vectors.shape[0]))
            generator = skew_symmetric(vectors * p["scale"].to(vectors.dtype), size)
            change = cayley_change(generator) if self.exact else self._series(generator)
            if training and "module_dropout" in p:
                # With a shared rotation each of its places is drawn.
                kept = torch.rand(self._columns(layer) // size, 1, 1, device=change.device) >= p["module_dropout"]
                change = change * kept
            return widened(change)

    def _series(self, generator: Tensor) -> Tensor:
        """2 Q + 2 Q^2 + ... + Q^k, two powers a step: S = Q^2, and each step is h <- 2 Q + 2 S + S h."""
        if self.num_terms == 2:
            return 2 * generator
        last = (self.num_terms if self.last_term_twice else max(self.num_terms, 4)) - 1
        square = generator @ generator
        both = 2 * generator + 2 * square
        if last % 2:
            total, done = 2 * generator if self.last_term_twice else generator, 1
        else:
            total, done = both if self.last_term_twice else both - square, 2
        for _ in range(done, last, 2):
            total = torch.baddbmm(both, square, total)
        return total


def _bound(vectors: Tensor, limit: float) -> Tensor:
    """The factor that brings the Frobenius norm of each skew-symmetric matrix down to the limit: 1 for those below."""
    squared = 2 * vectors.square().sum(-1, keepdim=True)
    beyond = squared > limit**2
    return torch.where(beyond, limit * torch.where(beyond, squared, 1.0).rsqrt(), 1.0)


def _eps_problems(value: object) -> list[OnegraphError]:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return []
    return [
        ConfigurationError(f"eps={value!r} is not a positive number", why="coft bounds the rotation by it.", hint="eps=6e-5", code="eps")
    ]
