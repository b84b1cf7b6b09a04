"""LoHa: the elementwise product of two low-rank matrices, a difference of rank up to R^2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from onegraph.layers.base import Layer
from onegraph.layers.embedding import EmbeddingLayer
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dropouts import dropped_scale, used_probabilities
from onegraph.methods.factorise import has_core, kept_outputs, with_core
from onegraph.methods.fields import alpha_problems, choice_problems, probability_problems, raise_all, rank_problems
from onegraph.methods.inits import kaiming, normal

_PROBABILITIES = ("rank_dropout", "module_dropout")
_INITS = ("zero", "lycoris", "random")


@dataclass(frozen=True, kw_only=True)
class LoHa(Method):
    """W' = W + s (U1 D1) * (U2 D2), elementwise, with s = alpha / rank.

    Shapes:
        U ``first_up``, ``second_up`` (O, R), D ``first_down``, ``second_down`` (R, I / groups * points of the kernel). With a core,
        U (O, R), C ``first_core``, ``second_core`` (R, R, *kernel), D (R, I / groups), and a factor is the sum over a and b of
        U[o, a] C[a, b, *kernel] D[b, i]. By the weight, the new weight is rounded once to the dtype of W.

    Args:
        rank: R, at least 1.
        alpha: Strength; None means ``rank``, so that s = 1.
        rank_dropout: Probability in [0, 1) that an output feature gets no difference, drawn for each call; those left are divided by their
            share.
        module_dropout: Probability in [0, 1) that the adapter is left out for the whole batch, without rescaling.
        effective_conv: Whether convolutions with more than one kernel point have cores (PEFT's ``use_effective_conv2d``).
        init: "zero" (``second_down`` starts at 0, the rest uniform as ``kaiming_uniform_`` with a = sqrt 5), "lycoris" (``second_up`` at
            0, the rest normal, D with deviation 1, U and C with 0.1) or "random" (all uniform: not the identity).
        form: "beside" the base layer or by the "weight"; None lets each layer's shape decide.

    Raises:
        ConfigurationError: ``rank``, ``alpha``, ``probability``, ``init`` or ``form`` out of range.

    Source:
        Hyeon-Woo et al. 2022 (FedPara), https://arxiv.org/abs/2108.06098, propositions 1 and 3; scale and dropouts as in LyCORIS.
    """

    name: ClassVar[str] = "loha"
    per_adapter: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "init", *_PROBABILITIES})
    ways: ClassVar[frozenset[str]] = frozenset({"form"})
    random_settings: ClassVar[frozenset[str]] = frozenset(_PROBABILITIES)

    rank: int = 8
    alpha: float | None = None
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    effective_conv: bool = False
    init: str = "zero"
    form: str | None = None

    def __post_init__(self) -> None:
        raise_all(
            rank_problems(self.rank),
            alpha_problems(self.alpha),
            probability_problems(self, _PROBABILITIES),
            choice_problems("init", self.init, _INITS),
            choice_problems("form", self.form, ("beside", "weight")) if self.form is not None else [],
        )
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """s: alpha / rank."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """Two pairs of factors, each with a core where that is asked for and the layer has a kernel."""
        core = has_core(layer, wanted=self.effective_conv)
        columns = layer.in_features // layer.groups if core else layer.num_weight_columns
        specs: dict[str, ParameterSpec] = {}
        for pair in ("first", "second"):
            specs[f"{pair}_up"] = ParameterSpec(shape=(layer.out_features, self.rank), rank_axes=(1,))
            if core:
                specs[f"{pair}_core"] = ParameterSpec(shape=(self.rank, self.rank, *layer.kernel_size), rank_axes=(0, 1))
            specs[f"{pair}_down"] = ParameterSpec(shape=(self.rank, columns), rank_axes=(0,))
        return specs

    def settings(self, layer: Layer) -> dict[str, float]:
        """``scale``, and each dropout that is used."""
        return {"scale": self.scale, **used_probabilities(self, layer, _PROBABILITIES)}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """All but one drawn: the adapter starts as the identity, unless it is asked not to."""
        specs = self.parameters(layer)
        if self.init == "lycoris":
            drawn = {name: normal(spec.shape, generator) * (1.0 if name.endswith("down") else 0.1) for name, spec in specs.items()}
            return {**drawn, "second_up": torch.zeros(specs["second_up"].shape)}
        tensors = {name: kaiming(spec.shape, generator) for name, spec in specs.items()}
        if has_core(layer, wanted=self.effective_conv):
            for name in ("first_up", "second_up"):  # beside a core the bound is that of (R, O)
                tensors[name] = kaiming((self.rank, layer.out_features), generator).t().contiguous()
        if self.init == "zero":
            tensors["second_down"].zero_()
        return tensors

    def settled(self, layer: Layer, layers: Sequence[Layer]) -> Self:
        """The ``form``: what costs fewer operations in training, T being positions times batch, m = O, n = columns of the weight.

        Beside, it is a LoRA of rank R^2 (the Khatri-Rao products of the factors): 2 T R^2 (m + n) forward and twice that backward.
        By the weight, the product for the weight's gradient comes on top of the frozen layer's two: 2 T m n, and 12 R m n for the
        factors, whatever T is. With T unknown, but large beside R, the first is less for 3 R^2 (m + n) < m n. (768 x 768 at R = 16:
        2.0 times the frozen layer beside, 1.6 by the weight with T = 512.)
        """
        if self.form is not None:
            return self
        rows, columns = layer.out_features, layer.num_weight_columns
        fewer = 3 * self.rank**2 * (rows + columns) < rows * columns
        form = "beside" if layer.kind == "embedding" or (fewer and layer.groups == 1) else "weight"
        return dataclasses.replace(self, form=form)

    def beside(self, layer: Layer) -> bool:
        """As ``settled`` chose. Embeddings always: two lookups at rank R; grouped convolutions never."""
        if layer.kind == "embedding" or layer.groups > 1:
            return layer.groups == 1
        return self.settled(layer, [layer]).form == "beside"

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """A LoRA of rank R^2; on embeddings the elementwise product of two of rank R."""
        first_up = self._scaled_up(p, layer, training=training)
        if isinstance(layer, EmbeddingLayer):
            first = layer.expand(layer.project(x, p["first_down"]).to(y.dtype), first_up)
            second = layer.expand(functional.embedding(x, p["second_down"].t()).to(y.dtype), p["second_up"])
            return y + layer.without_padding_gradient(x, first * second)
        down = _khatri_rao(self._down(p, "first"), self._down(p, "second"))
        up = _khatri_rao(first_up.t(), p["second_up"].t()).t()
        num_ranks = down.shape[0]
        h = layer.project(x, down.reshape(num_ranks, layer.in_features, *layer.kernel_size))
        return layer.add_expanded(y, h, up.reshape(layer.up_shape(num_ranks)))

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, W + s (U1 D1) * (U2 D2)."""
        first = self._scaled_up(p, layer, training=training) @ self._down(p, "first")
        second = p["second_up"] @ self._down(p, "second")
        return (weight + (first * second).reshape(weight.shape)).to(weight.dtype)

    def _scaled_up(self, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """U1 with everything that multiplies whole rows of the difference: scale and dropouts."""
        up = p["first_up"] * dropped_scale(p, training=training)
        if training and "rank_dropout" in p:
            up = up * kept_outputs(p, layer.out_features, rescale=1.0).unsqueeze(1)
        return up

    def _down(self, p: Mapping[str, Tensor], pair: str) -> Tensor:
        down, core = p[f"{pair}_down"], p.get(f"{pair}_core")
        return down if core is None else with_core(core, down)


def _khatri_rao(first: Tensor, second: Tensor) -> Tensor:
    """From (R, N) twice to (R^2, N): the product of every row with every row."""
    return (first.unsqueeze(1) * second.unsqueeze(0)).flatten(0, 1)
