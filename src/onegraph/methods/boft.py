"""BOFT: the layer's input, or its output, is rotated by a product of sparse stages, a butterfly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import used_probabilities
from onegraph.methods.fields import probability_problems, raise_all, whole_problems
from onegraph.methods.precision import full_precision
from onegraph.methods.rotations import (
    block_problems,
    block_product,
    cayley_change,
    split_problem,
    turned,
    turns_activations,
    widened,
)

_DEFAULT_BLOCK = 4
_FUSED = 64
"""Columns up to which the first stages are multiplied out into one block: stage i stays within groups of b 2^i columns."""


@dataclass(frozen=True, kw_only=True)
class BOFT(Method):
    """W' = diag(g) W R^T with R = B_{N-1} ... B_1 B_0, B_i = P_i blockdiag(Q_{i,1}, Q_{i,2}, ...) P_i^T; y = g (W (x R)) + b.

    Q = (I - S)(I + S)^-1 with S = s (X - X^T) / 2. P_i shuffles within groups of b 2^i columns: chunks of b / 2, those with an even
    number first; P_0 = I. The gain is 1 + s (g - 1). No n x n matrix is formed: a stage is a reshape and a product of small blocks.
    With ``on_output`` the output is rotated: W' = diag(g) R W, y = g (R W x) + b.

    Shapes:
        x (..., I), X ``rotation`` (N, D, b, b) with D b columns (with ``on_output`` D b = O), ``gain`` (O,), y (..., O). Convolutions
        rotate the columns of the weight as a matrix (O, I / groups * points of the kernel). R is computed in the dtype of
        ``rotation``, R - I cast to that of x.

    Args:
        block_size: b, at least 2, even with more than one stage; D is a multiple of 2^(N - 1). 4 where neither it nor ``num_blocks``
            is given.
        num_blocks: D instead of b.
        num_factors: N, the number of stages.
        on_output: Whether the output is rotated rather than the input, but for the bias: LyCORIS. With one stage it is OFT's rotation.
        with_gain: Whether there is a ``gain``.
        block_dropout: Probability in [0, 1) that a block isn't rotated; in training, in one stage drawn for the whole batch.

    Raises:
        ConfigurationError: ``whole-number``, ``blocks``, ``probability``.

    Source:
        Liu et al. 2023, https://arxiv.org/abs/2311.06243. The dropout draws every block of the stage by itself; PEFT takes a fixed number.
    """

    name: ClassVar[str] = "boft"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv"})
    per_adapter: ClassVar[frozenset[str]] = frozenset({"block_dropout"})
    random_settings: ClassVar[frozenset[str]] = frozenset({"block_dropout"})
    additive: ClassVar[bool] = False

    block_size: int | None = None
    num_blocks: int | None = None
    num_factors: int = 1
    on_output: bool = False
    with_gain: bool = True
    block_dropout: float = 0.0

    def __post_init__(self) -> None:
        raise_all(
            block_problems(self.block_size, self.num_blocks),
            whole_problems("num_factors", self.num_factors, why="It is the number of stages of the butterfly.", hint="1 or 2 are usual"),
            probability_problems(self, ("block_dropout",)),
        )
        if self.num_blocks is None and self.block_size is None:
            object.__setattr__(self, "block_size", _DEFAULT_BLOCK)

    @property
    def reads_base(self) -> bool:  # type: ignore[override]
        """The bias is neither rotated nor has it a gain."""
        return self.on_output or self.with_gain

    def block_size_on(self, layer: Layer) -> int:
        """Columns of a block."""
        return self.block_size or self._columns(layer) // (self.num_blocks or 1)

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``rotation``, and ``gain`` where there is one."""
        size = self.block_size_on(layer)
        specs = {"rotation": ParameterSpec(shape=(self.num_factors, self._columns(layer) // size, size, size))}
        if self.with_gain:
            specs["gain"] = ParameterSpec(shape=(layer.out_features,))
        return specs

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, a factor of every S, so that each strength is a rotation; ``block_dropout`` where it is used."""
        return {"scale": 1.0, **used_probabilities(self, layer, ("block_dropout",))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """X = 0 and g = 1: no rotation, no gain."""
        return self.identity(layer)

    def identity(self, layer: Layer) -> dict[str, Tensor]:
        """X = 0 and g = 1."""
        gain = {"gain": torch.ones(layer.out_features)} if self.with_gain else {}
        return {**super().identity(layer), **gain}

    def beside(self, layer: Layer) -> bool:
        """Activations are rotated where that is the same as rotating columns."""
        return self.on_output or turns_activations(layer)

    def before(self, x: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """X R, where the input is rotated: the last stages one by one, then the first ones together."""
        if self.on_output:
            return x
        changes = self._changes(p, training=training)
        num_fused = self._num_fused(layer)
        if num_fused < self.num_factors:
            rows = x.movedim(layer.channel_axis, -1)
            flat = rows.reshape(-1, rows.shape[-1])
            for stage in reversed(range(num_fused, self.num_factors)):
                flat = flat + _stage(flat, changes[stage], stage, wide=True)
            x = flat.reshape(rows.shape).movedim(-1, layer.channel_axis)
        return turned(x, self._fused(changes, num_fused), layer)

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The gain, and where the output is rotated y R^T before it: the first stages together, then the others. Not of the bias."""
        bias = None if base is None else base.get("bias")

        def part(y: Tensor) -> Tensor:
            return y if bias is None else y - layer.per_channel(bias).to(y.dtype)

        if self.on_output:
            changes = self._changes(p, training=training)
            num_fused = self._num_fused(layer)
            y = turned(y, self._fused(changes, num_fused).mT, layer, part(y))
            for stage in range(num_fused, self.num_factors):
                rows = part(y).movedim(layer.channel_axis, -1)
                change = _stage(rows.reshape(-1, rows.shape[-1]), changes[stage].mT, stage, wide=True)
                y = y + change.reshape(rows.shape).movedim(-1, layer.channel_axis)
        if "gain" not in p:
            return y
        return y + part(y) * layer.per_channel(_gain_change(p)).to(y.dtype)

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, diag(g) W R^T: the first stages first, each one transposed; where the output is rotated, diag(g) R W."""
        changes = self._changes(p, training=training)
        num_fused = self._num_fused(layer)
        rows = weight.flatten(1).t() if self.on_output else weight.flatten(1)
        rows = rows + block_product(rows, self._fused(changes, num_fused).mT).to(rows.dtype)
        for stage in range(num_fused, self.num_factors):
            rows = rows + _stage(rows, changes[stage].mT, stage, wide=True)
        rows = rows.t() if self.on_output else rows
        if "gain" in p:
            rows = rows + rows * _gain_change(p).to(rows.dtype)[:, None]
        return rows.reshape(weight.shape)

    def check(self, layer: Layer) -> str | None:
        """The blocks have to fill the columns, and the stages' groups too."""
        if (reason := super().check(layer)) is not None:
            return reason
        if self.on_output and layer.groups > 1:
            return f"a rotation of the output mixes its {layer.groups} groups; on_output=False rotates the input of each group"
        several = self.num_factors > 1
        return split_problem(self._columns(layer), self.block_size, self.num_blocks, multiple=2 ** (self.num_factors - 1), even=several)

    def _columns(self, layer: Layer) -> int:
        """How many features are rotated."""
        return layer.out_features if self.on_output else layer.num_weight_columns

    def _num_fused(self, layer: Layer) -> int:
        """How many of the first stages are multiplied out."""
        size = self.block_size_on(layer)
        num_fused = 1
        while num_fused < self.num_factors and size * 2**num_fused <= _FUSED:
            num_fused += 1
        return num_fused

    def _changes(self, p: Mapping[str, Tensor], *, training: bool) -> Tensor:
        """Q - I of every block of every stage."""
        free = p["rotation"]
        with full_precision(free):
            changes = cayley_change((free - free.mT) * (0.5 * p["scale"].to(free.dtype)))
            if training and "block_dropout" in p:
                num_stages, num_blocks = changes.shape[:2]
                stages = torch.arange(num_stages, device=changes.device).view(-1, 1, 1, 1)
                chosen = torch.randint(num_stages, (), device=changes.device)
                kept = torch.rand(num_blocks, 1, 1, device=changes.device) >= p["block_dropout"]
                changes = changes * (kept | (stages != chosen))
            return changes

    def _fused(self, changes: Tensor, num_fused: int) -> Tensor:
        """B_{k-1} ... B_0 - I of the first stages, as blocks of b 2^(k - 1) columns."""
        if num_fused == 1:
            # of a single stage all is taken: the gradient of a part is a copy into zeros
            return widened(changes.flatten(0, 1) if changes.shape[0] == 1 else changes[0])
        with full_precision(changes):
            size = changes.shape[-1] * 2 ** (num_fused - 1)
            num_groups = changes.shape[1] * changes.shape[-1] // size
            # The identity's rows of every group, side by side: a stage never leaves its group, so that it acts on all of them at once.
            identities = torch.eye(size, dtype=changes.dtype, device=changes.device).repeat(1, num_groups)
            total = _stage(identities, changes[num_fused - 1], num_fused - 1)
            for stage in reversed(range(num_fused - 1)):
                total = total + _stage(identities + total, changes[stage], stage)
            return widened(total.reshape(size, num_groups, size).transpose(0, 1))


def _stage(rows: Tensor, blocks: Tensor, stage: int, *, wide: bool = False) -> Tensor:
    """Rows (T, n) times P blockdiag(blocks) P^T of one stage."""
    half = blocks.shape[-1] // 2
    if stage:
        rows = rows.reshape(rows.shape[0], -1, 2, 2**stage, half).transpose(2, 3)
    found = block_product(rows.reshape(rows.shape[0], -1), widened(blocks) if wide else blocks).to(rows.dtype)
    if stage:
        found = found.reshape(rows.shape[0], -1, 2**stage, 2, half).transpose(2, 3).reshape(rows.shape[0], -1)
    return found


def _gain_change(p: Mapping[str, Tensor]) -> Tensor:
    return (p["gain"] - 1) * p["scale"].to(p["gain"].dtype)
