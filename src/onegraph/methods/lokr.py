"""LoKr: the Kronecker product of two smaller matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.layers.base import Layer
from onegraph.layers.embedding import EmbeddingLayer
from onegraph.layers.linear import by_rows
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_scale, used_probabilities
from onegraph.methods.factorise import factor_pair, factor_problems, has_core, kept_outputs, with_core
from onegraph.methods.fields import alpha_problems, choice_problems, is_whole, probability_problems, raise_all, rank_problems
from onegraph.methods.inits import kaiming

_PROBABILITIES = ("rank_dropout", "module_dropout")
_INITS = {"zero": ("first", "first_up"), "lycoris": ("second", "second_down"), "random": ()}
"""The start -> the tensors that are 0 in it."""
FULL, FACTORISED = "full", "factorised"
EITHER = "either"  # in a structure alone: the tensors of both are there, and each adapter uses one of them


@dataclass(frozen=True, kw_only=True)
class LoKr(Method):
    """W' = W + s F (x) S, the Kronecker product, with s = alpha / rank.

    Shapes:
        O = L K and I / groups = M N as ``decompose_factor`` splits them. F ``first`` (L, M), or the product of ``first_up`` (L, R) and
        ``first_down`` (R, M). S ``second`` (K, N, *kernel), or the product of ``second_up`` (K, R) and ``second_down`` (R, N * points of
        the kernel), or, with a core, the sum over a and b of ``second_up`` [k, a] ``second_core`` [a, b, *kernel] ``second_down`` [b, n].

    Args:
        rank: R, at least 1. A factor is full where R is at least half of its larger side.
        alpha: Strength; None means ``rank``, so that s = 1.
        rank_dropout: Probability in [0, 1) that an output feature gets no difference, drawn for each call.
        rank_dropout_scale: Whether those left are divided by their share.
        module_dropout: Probability in [0, 1) that the adapter is left out for the whole batch, without rescaling.
        decompose_both: Whether F may be two factors as well.
        decompose_factor: L and M where it divides O and I, their upper limit elsewhere; -1 splits near the square root.
        outer: L and M themselves, which divide O and I / groups, in place of ``decompose_factor``.
        effective_conv: Whether convolutions with more than one kernel point have a core (PEFT's ``use_effective_conv2d``).
        init: "zero" (F starts at 0, by ``first_up`` where it is two factors), "lycoris" (S does, by ``second_down``) or "random" (neither:
            not the identity); the rest is uniform as ``kaiming_uniform_`` with a = sqrt 5.
        first_form: "full" or "factorised"; None lets each layer's shape decide. A layer keeps its form when the rank is padded.
        second_form: The same for S.
        form: "beside" the base layer or by the "weight"; None lets each layer's shape decide.
        either: Which of "first" and "second" has room for both forms, so that ranks on both sides of the switch share a graph:
            ``capacity=`` and ``reserve(rank=)`` find them. Such a matrix is multiplied out before it is used.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability``, ``init``, ``whole-number``, ``first_form``, ``second_form`` or ``form``
            out of range.

    Source:
        Yeh et al. 2023 (LyCORIS), https://arxiv.org/abs/2309.14859, section 3; layout as in PEFT. A full S on a Conv1d is (K, N, points)
        against F (1, L, M) there, so that the kernel mixes with the input channels: so it is here.
    """

    name: ClassVar[str] = "lokr"
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "init", "decompose_both", "rank_dropout_scale", *_PROBABILITIES})
    ways: ClassVar[frozenset[str]] = frozenset({"form", "either"})
    room: ClassVar[frozenset[str]] = frozenset({"either"})
    random_settings: ClassVar[frozenset[str]] = frozenset(_PROBABILITIES)

    rank: int = 8
    alpha: float | None = None
    rank_dropout: float = 0.0
    rank_dropout_scale: bool = False
    module_dropout: float = 0.0
    decompose_both: bool = False
    decompose_factor: int = -1
    outer: tuple[int, int] | None = None
    effective_conv: bool = False
    init: str = "zero"
    first_form: str | None = None
    second_form: str | None = None
    form: str | None = None
    either: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        raise_all(
            rank_problems(self.rank),
            alpha_problems(self.alpha),
            probability_problems(self, _PROBABILITIES),
            factor_problems("decompose_factor", self.decompose_factor),
            _outer_problems(self.outer),
            choice_problems("init", self.init, _INITS),
            *(
                choice_problems(name, value, choices)
                for name, choices in {
                    "first_form": (FULL, FACTORISED),
                    "second_form": (FULL, FACTORISED),
                    "form": ("beside", "weight"),
                }.items()
                if (value := getattr(self, name)) not in (None, EITHER)
            ),
        )
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """s: alpha / rank."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def sides(self, layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
        """((L, K), (M, N)): how the output and the input features are split."""
        if self.outer is not None:
            (left, right), columns = self.outer, layer.in_features // layer.groups
            return (left, layer.out_features // left), (right, columns // right)
        return factor_pair(layer.out_features, self.decompose_factor), factor_pair(layer.in_features // layer.groups, self.decompose_factor)

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """Each of the two matrices whole, or its factors."""
        ((outer_out, inner_out), (outer_in, inner_in)), r = self.sides(layer), self.rank
        settled = self.settled(layer, [layer])
        specs: dict[str, ParameterSpec] = {}
        if settled.first_form != FACTORISED:
            specs["first"] = ParameterSpec(shape=(outer_out, outer_in))
        if settled.first_form != FULL:
            specs["first_up"] = ParameterSpec(shape=(outer_out, r), rank_axes=(1,))
            specs["first_down"] = ParameterSpec(shape=(r, outer_in), rank_axes=(0,))
        if settled.second_form != FACTORISED:
            specs["second"] = ParameterSpec(shape=(inner_out, inner_in, *layer.kernel_size))
        if settled.second_form == FULL:
            return specs
        specs["second_up"] = ParameterSpec(shape=(inner_out, r), rank_axes=(1,))
        if has_core(layer, wanted=self.effective_conv):
            specs["second_core"] = ParameterSpec(shape=(r, r, *layer.kernel_size), rank_axes=(0, 1))
            specs["second_down"] = ParameterSpec(shape=(r, inner_in), rank_axes=(0,))
        else:
            specs["second_down"] = ParameterSpec(shape=(r, inner_in * math.prod(layer.kernel_size)), rank_axes=(0,))
        return specs

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, each dropout that is used, whether it is rescaled where it is, and which of two forms is used."""
        rescaled = {"rank_dropout_scale": 1.0} if self.rank_dropout_scale and self.rank_dropout > 0 else {}
        settled = self.settled(layer, [layer])
        used = {f"{name}_full": float(getattr(settled, f"{name}_form") == FULL) for name in self.either}
        return {"scale": self.scale, **used, **used_probabilities(self, layer, _PROBABILITIES), **rescaled}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """All but what ``init`` keeps at 0 drawn."""
        tensors = {name: kaiming(spec.shape, generator) for name, spec in self.parameters(layer).items()}
        if "second_core" in tensors:  # beside a core the bound is that of (R, K)
            tensors["second_up"] = kaiming(tensors["second_up"].shape[::-1], generator).t().contiguous()
        return {name: torch.zeros_like(value) if name in _INITS[self.init] else value for name, value in tensors.items()}

    def settled(self, layer: Layer, layers: Sequence[Layer]) -> Self:
        """Which factors are full, by the true rank, and the ``form`` that costs fewer operations in training."""
        first, second = self._forms_at(layer, self.rank)
        first, second, form = self.first_form or first, self.second_form or second, self.form
        if form is None:
            multiplied = FULL if "second" in self.either else second
            form = "beside" if self._can_be_beside(layer, multiplied) and self._is_cheap_beside(layer, multiplied) else "weight"
        return dataclasses.replace(self, first_form=first, second_form=second, form=form)

    def structure(self) -> Self:
        """With both forms where there is room for both."""
        forms: dict[str, Any] = {f"{name}_form": EITHER for name in self.either}
        return dataclasses.replace(super().structure(), **forms)

    def with_room(self, layer: Layer, rank: int) -> Self:
        """With both forms where the ranks up to this one have both. Not of S on a Conv1d, where the two mean different things."""
        own = self.settled(layer, [layer])
        found = []
        for number, name in enumerate(("first", "second")):
            present = getattr(own, f"{name}_form")
            forms = {present, own._forms_at(layer, 1)[number], own._forms_at(layer, rank)[number]}
            if name in self.either or EITHER in forms or (len(forms) == 2 and not (name == "second" and len(layer.kernel_size) == 1)):
                found.append(name)
        if tuple(found) == self.either:
            return self
        return dataclasses.replace(own, either=tuple(found), form=None).settled(layer, [layer])

    def check(self, layer: Layer) -> str | None:
        """``outer`` has to divide its sides, and every factor is of one form."""
        if (reason := super().check(layer)) is not None:
            return reason
        if EITHER in {self.first_form, self.second_form}:
            return f'a factor of an adapter is "full" or "factorised": "either" is what capacity= makes of it; it is {self}'
        if self.outer is None:
            return None
        shape = (layer.out_features, layer.in_features // layer.groups)
        if any(size % outer for size, outer in zip(shape, self.outer)):
            return f"its output and input features {shape} are no multiples of outer={self.outer}"
        return None

    def rank_on(self, layer: Layer) -> int | None:
        """The rank, None where both matrices are full: nothing there is padded."""
        settled = self.settled(layer, [layer])
        return None if {settled.first_form, settled.second_form} == {FULL} else self.rank

    def beside(self, layer: Layer) -> bool:
        """As ``settled`` chose; embeddings always; never with groups, nor for a full S on a Conv1d."""
        settled = self.settled(layer, [layer])
        return layer.kind == "embedding" or (settled.form == "beside" and self._can_be_beside(layer, settled.second_form))

    def _forms_at(self, layer: Layer, rank: int) -> tuple[str, str]:
        """Which form F and S have at a rank, where nobody said it."""
        (outer_out, inner_out), (outer_in, inner_in) = self.sides(layer)
        both = self.decompose_both or self.first_form == FACTORISED
        first = FACTORISED if both and rank < max(outer_out, outer_in) / 2 else FULL
        return first, FACTORISED if rank < max(inner_out, inner_in) / 2 else FULL

    def _can_be_beside(self, layer: Layer, second_form: str | None) -> bool:
        mixes_kernel = len(layer.kernel_size) == 1 and second_form == FULL
        return layer.groups == 1 and not mixes_kernel

    def _is_cheap_beside(self, layer: Layer, second_form: str | None) -> bool:
        """Whether three products beside the layer take less than one with the shape of its weight.

        For T positions and Q = K (S full) or R channels in between, beside the layer costs 2 T (M N points Q + M Q L) and, with
        factors, 2 T L Q K more, once forward and twice backward; by the weight it is 2 T m n more, for the weight's gradient. At R = 16:
        768 -> 768 is (24, 32) x (24, 32), S is full, 43,008 of 589,824 a position: 1.11 times the frozen layer's operations beside,
        1.5 by the weight. 768 -> 2048 is (32, 64) x (24, 32), S has factors, 57,344 of 1,572,864: 1.05 beside.
        """
        (outer_out, inner_out), (outer_in, inner_in) = self.sides(layer)
        between = self.rank if second_form == FACTORISED else inner_out
        cost = outer_in * inner_in * math.prod(layer.kernel_size) * between + outer_in * between * outer_out
        if second_form == FACTORISED:
            cost += layer.out_features * between
        return 3 * cost < layer.out_features * layer.num_weight_columns

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """D of S, then F while the rows are narrow, then U of S: the Kronecker product is never there."""
        first = _first(p) * dropped_scale(p, training=training)
        if isinstance(layer, EmbeddingLayer):
            return y + self._dropped(_looked_up(x, first, p, layer, y.dtype), p, layer, training=training)
        h = _mixed(x, first, p, layer)
        _, up = _second_factors(p)
        if up is not None:
            up = up.reshape(*up.shape, *(1 for _ in layer.kernel_size))
        if training and "rank_dropout" in p:
            change = (h if up is None else layer.expand(h, up)).reshape(y.shape)
            return y + self._dropped(change, p, layer, training=training).to(y.dtype)
        # The output by parts of K features, so that U adds to it in one operation.
        parts = y.reshape(-1, layer.out_features // first.shape[0], *h.shape[2:])
        return (parts + h.to(y.dtype) if up is None else layer.add_expanded(parts, h, up)).reshape(y.shape)

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s F (x) S."""
        if "second" in p and len(layer.kernel_size) == 1:
            second = p["second"]  # three axes against two: see Source
        else:
            down, up = _second_factors(p)
            second = down if up is None else up @ down
        change = torch.kron(_first(p) * dropped_scale(p, training=training), second).reshape(weight.shape)
        if training and "rank_dropout" in p:
            change = change * self._kept(p, layer).reshape(-1, *(1 for _ in weight.shape[1:]))
        return (weight + change).to(weight.dtype)

    def _kept(self, p: Mapping[str, Tensor], layer: Layer) -> Tensor:
        return kept_outputs(p, layer.out_features, p.get("rank_dropout_scale", 0.0))

    def _dropped(self, change: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        if training and "rank_dropout" in p:
            change = change * layer.per_channel(self._kept(p, layer)).to(change.dtype)
        return change


def _outer_problems(value: object) -> list[OnegraphError]:
    """Two whole numbers of at least 1, or None. Code ``whole-number``."""
    if value is None or (isinstance(value, tuple) and len(value) == 2 and all(is_whole(size) for size in value)):
        return []
    return [
        ConfigurationError(
            f"outer={value!r} is no pair of whole numbers of at least 1",
            why="They are the rows and columns of the first Kronecker factor.",
            hint="decompose_factor=-1 finds them by itself",
            code="whole-number",
        )
    ]


def _first(p: Mapping[str, Tensor]) -> Tensor:
    if "first_up" not in p:
        return p["first"]
    product = p["first_up"] @ p["first_down"]
    return product + _where_full(p, "first") if "first" in p else product


def _second_factors(p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """S as one matrix (Q, N * points), Q = K, or as two, the second (K, Q)."""
    if "second_up" not in p:
        return p["second"].flatten(1), None
    down = with_core(p["second_core"], p["second_down"]) if "second_core" in p else p["second_down"]
    if "second" in p:
        return p["second_up"] @ down + _where_full(p, "second").flatten(1), None
    return down, p["second_up"]


def _where_full(p: Mapping[str, Tensor], name: str) -> Tensor:
    """The full matrix of an adapter that uses it. In one that doesn't it is 0 and gets no gradient; factors of zeros get none anyway."""
    return p[name] * p[f"{name}_full"].to(p[name].dtype)


def _mixed(x: Tensor, first: Tensor, p: Mapping[str, Tensor], layer: Layer) -> Tensor:
    """From x (..., M N) to (T L, Q), or (B, M N, *space) to (B L, Q, *space'): the layer's own operation on parts of N features.

    Products of two operands only: a product of three is split anew for every length. F mixes by a batched product, for which nothing
    has to be turned round.
    """
    down, _ = _second_factors(p)
    num_out, num_in = first.shape
    num_features, axes = layer.in_features // num_in, len(layer.kernel_size)
    parts = x.reshape(-1, num_features, *x.shape[x.dim() - axes :])
    h = layer.project(parts, down.reshape(-1, num_features, *layer.kernel_size))
    shape = h.shape[1:]
    h = h.reshape(-1, num_in, math.prod(shape))
    return torch.bmm(first.to(h.dtype).expand(h.shape[0], num_out, num_in), h).reshape(-1, *shape)


def _looked_up(ids: Tensor, first: Tensor, p: Mapping[str, Tensor], layer: EmbeddingLayer, dtype: torch.dtype) -> Tensor:
    """From ids (...) to (..., L K), in the dtype of the output: column M' N + N' of the product is column M' of F times column N' of S."""
    down, up = _second_factors(p)
    size = down.shape[1]
    outer = functional.embedding(ids // size, first.t()).to(dtype)
    inner = functional.embedding(ids % size, down.t()).to(dtype)
    if up is not None:
        inner = by_rows(inner, up.to(inner.dtype))
    # Every row shares its numbers with others, the padding row too.
    change = layer.without_padding_gradient(ids, (outer.unsqueeze(-1) * inner.unsqueeze(-2)).flatten(-2))
    return change if layer.output_scale == 1.0 else change * layer.output_scale
