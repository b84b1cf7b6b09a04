"""IA3: a learned gain of every output or input feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onegraph.layers.base import Layer
from onegraph.methods.base import Method, ParameterSpec


@dataclass(frozen=True, kw_only=True)
class IA3(Method):
    """y = g (W x + b), or with ``on_input`` y = W (g x) + b; g = 1 + s (gain - 1).

    Shapes:
        x (..., I), ``gain`` (O,), or (I,) with ``on_input``, y (..., O). s (gain - 1) is cast to the dtype of what it multiplies, so that a
        gain near 1 isn't rounded to 1 in half precision.

    Args:
        on_input: Whether the input is scaled rather than the output: PEFT's ``feedforward_modules``. Not on embeddings.
        scales_bias: Whether a gain of the output is one of the bias too, as in PEFT; LyCORIS scales the weight alone.

    Source:
        Liu et al. 2022, https://arxiv.org/abs/2205.05638, section 3.3.
    """

    name: ClassVar[str] = "ia3"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv", "embedding"})
    additive: ClassVar[bool] = False

    on_input: bool = False
    scales_bias: bool = True

    @property
    def reads_base(self) -> bool:  # type: ignore[override]
        """For a bias that is left as it is."""
        return not self.scales_bias

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        """``gain``."""
        return {"gain": ParameterSpec(shape=(layer.in_features if self.on_input else layer.out_features,))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """A gain of 1."""
        return self.identity(layer)

    def identity(self, layer: Layer) -> dict[str, Tensor]:
        """A gain of 1."""
        return {name: torch.ones(spec.shape) for name, spec in self.parameters(layer).items()}

    def before(self, x: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
        """With ``on_input``, g x."""
        return x + x * layer.per_channel(_change(p)).to(x.dtype) if self.on_input else x

    def after(
        self, x: Tensor, y: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Without ``on_input``, g y; without ``scales_bias`` g (y - b) + b."""
        if self.on_input:
            return y
        bias = None if self.scales_bias or base is None else base.get("bias")
        scaled = y if bias is None else y - layer.per_channel(bias).to(y.dtype)
        return y + scaled * layer.per_channel(_change(p)).to(y.dtype)

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        """The weight, diag(g) W or W diag(g)."""
        change = _change(p).to(weight.dtype)
        behind = [1] * (weight.dim() - 1)
        if not self.on_input:
            return weight + weight * change.reshape(-1, *behind)
        # An output feature reads the inputs of its own group.
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        return (grouped + grouped * change.reshape(layer.groups, 1, -1, *behind[1:])).reshape(weight.shape)

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        """The bias, scaled as the output is."""
        return bias if bias is None or self.on_input or not self.scales_bias else bias + bias * _change(p).to(bias.dtype)

    def settled(self, layer: Layer, layers: Sequence[Layer]) -> Self:
        """With ``scales_bias`` where it makes no difference: without a bias, and for a gain of the input."""
        return dataclasses.replace(self, scales_bias=True) if self.on_input or not layer.has_bias else self

    def check(self, layer: Layer) -> str | None:
        """Ids can't be scaled."""
        if (reason := super().check(layer)) is not None:
            return reason
        if self.on_input and layer.kind == "embedding":
            return "its input is ids, which can't be scaled; on_input=False scales its output"
        return None


def _change(p: Mapping[str, Tensor]) -> Tensor:
    return (p["gain"] - 1) * p["scale"].to(p["gain"].dtype)
