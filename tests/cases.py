"""The one table of methods x layers. A new method is a row of METHODS, a new kind of layer a row of LAYERS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from onegraph.adapters.run import run
from onegraph.layers import Layer, describe_any
from onegraph.methods import (
    BOFT,
    HRA,
    IA3,
    OFT,
    AdaLoRA,
    BitFit,
    Dense,
    DoRA,
    LoHa,
    LoKr,
    LoRA,
    Method,
    MiSS,
    NormTuning,
    VBLoRA,
    VeRA,
    WithBias,
)
from reference.adalora import adalora
from reference.boft import boft, boft_on_output
from reference.dora import dora, norms
from reference.hra import hra
from reference.ia3 import on_input, on_output, on_output_alone
from reference.layers import by_weight
from reference.lora import lora
from reference.miss import balance, bat
from reference.oft import oft
from reference.products import dense, difference, loha, lokr
from reference.vblora import vblora
from reference.vera import vera
from reference.with_bias import with_bias


class OwnRMSNorm(nn.Module):
    """y = (1 + w) x / rms(x): a norm that a model defines for itself, as Gemma does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return (1.0 + self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Affine(nn.Module):
    """y = g (x A^T) + A 1: a module of no kind, with parameters of its own and a number that isn't trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(size, size))
        self.gain = nn.Parameter(torch.randn(()))
        self.times = nn.Parameter(torch.tensor(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.matrix.t()) + self.times * self.matrix.sum(1)


Reference = Callable[[nn.Module, NDArray[np.float64], Mapping[str, NDArray[np.float64]]], NDArray[np.float64]]


@dataclass(frozen=True)
class LayerCase:
    """A small layer and an input for it."""

    module: Callable[[], nn.Module]
    x: Callable[[], Tensor]


LAYERS: dict[str, LayerCase] = {
    "linear": LayerCase(lambda: nn.Linear(5, 7), lambda: torch.randn(2, 3, 5)),
    "linear-no-bias": LayerCase(lambda: nn.Linear(5, 7, bias=False), lambda: torch.randn(3, 5)),
    "linear-wide": LayerCase(lambda: nn.Linear(16, 8), lambda: torch.randn(2, 3, 16)),
    "linear-vector": LayerCase(lambda: nn.Linear(5, 7), lambda: torch.randn(5)),
    "linear-even": LayerCase(lambda: nn.Linear(12, 8), lambda: torch.randn(2, 12)),
    "linear-transposed": LayerCase(lambda: Conv1D(8, 6), lambda: torch.randn(2, 3, 6)),
    "embedding": LayerCase(lambda: nn.Embedding(9, 6), lambda: torch.randint(0, 9, (2, 4))),
    "embedding-padding": LayerCase(lambda: nn.Embedding(9, 6, padding_idx=2), lambda: torch.tensor([[0, 2, 5], [8, 2, 2]])),
    "conv1d": LayerCase(lambda: nn.Conv1d(4, 6, 3, padding=1), lambda: torch.randn(2, 4, 5)),
    "conv1d-same-dilated": LayerCase(lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), lambda: torch.randn(2, 4, 9)),
    "conv2d-1x1": LayerCase(lambda: nn.Conv2d(4, 6, 1), lambda: torch.randn(2, 4, 3, 3)),
    "conv2d-3x3": LayerCase(lambda: nn.Conv2d(4, 6, 3, padding=1), lambda: torch.randn(2, 4, 4, 3)),
    "conv2d-stride": LayerCase(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), lambda: torch.randn(1, 4, 5, 4)),
    "conv2d-grouped": LayerCase(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), lambda: torch.randn(2, 4, 3, 3)),
    "conv2d-dilated": LayerCase(lambda: nn.Conv2d(4, 6, (3, 2), dilation=(2, 1)), lambda: torch.randn(1, 4, 6, 4)),
    "conv2d-reflect": LayerCase(lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), lambda: torch.randn(1, 4, 4, 4)),
    "conv2d-circular": LayerCase(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), lambda: torch.randn(1, 4, 4, 3)),
    "conv2d-replicate": LayerCase(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), lambda: torch.randn(1, 4, 4, 3)),
    "conv3d": LayerCase(lambda: nn.Conv3d(2, 4, (1, 3, 2), stride=(1, 2, 1), padding=(0, 1, 0)), lambda: torch.randn(1, 2, 2, 4, 3)),
    "norm-layer": LayerCase(lambda: nn.LayerNorm(6), lambda: torch.randn(2, 3, 6)),
    "norm-layer-no-bias": LayerCase(lambda: nn.LayerNorm(6, bias=False), lambda: torch.randn(2, 3, 6)),
    "norm-layer-two-axes": LayerCase(lambda: nn.LayerNorm((2, 3)), lambda: torch.randn(2, 4, 2, 3)),
    "norm-rms": LayerCase(lambda: nn.RMSNorm(6, eps=1e-6), lambda: torch.randn(2, 3, 6)),
    "norm-group": LayerCase(lambda: nn.GroupNorm(2, 6), lambda: torch.randn(2, 6, 3, 2)),
    "norm-own-class": LayerCase(lambda: OwnRMSNorm(6), lambda: torch.randn(2, 3, 6)),
    "module": LayerCase(lambda: Affine(4), lambda: torch.randn(2, 3, 4)),
}


@dataclass(frozen=True)
class MethodCase:
    """A method with settings worth testing, and its float64 reference.

    Args:
        method: The method.
        reference: From the module, an input and all tensors, settings included, to the output.
        random: Random values for a parameter of a shape; a standard normal otherwise.
        starts_elsewhere: True for a method that by its definition doesn't start as the identity.
        starts_at_fixed_values: True for a method whose start draws nothing.
        held_constant: From the module and all tensors to what the method holds constant in the backward pass, by its definition; the
            reference takes it from its tensors where it is there. Its gradients are then those of the reference with it fixed.
    """

    method: Method
    reference: Reference
    random: Callable[[str, tuple[int, ...]], Tensor] = lambda name, shape: torch.randn(shape, dtype=torch.float64)
    starts_elsewhere: bool = False
    starts_at_fixed_values: bool = False
    held_constant: Callable[[nn.Module, Mapping[str, NDArray[np.float64]]], Mapping[str, NDArray[np.float64]]] | None = None


def near_zero(name: str, shape: tuple[int, ...]) -> Tensor:
    """Small enough for a series."""
    return 0.3 * torch.randn(shape, dtype=torch.float64)


METHODS: dict[str, MethodCase] = {
    "lora": MethodCase(LoRA(rank=4, alpha=8.0), lora),
    "lora-rslora": MethodCase(LoRA(rank=4, alpha=3.0, rslora=True), lora),
    "lora-bias": MethodCase(LoRA(rank=2, bias=True), lora),
    "lora-gaussian": MethodCase(LoRA(rank=6, alpha=-2.0, init="gaussian"), lora),
    "dora": MethodCase(DoRA(rank=4, alpha=8.0), dora, held_constant=norms),
    "dora-rslora": MethodCase(DoRA(rank=3, alpha=-1.0, rslora=True), dora, held_constant=norms),
    "dora-gaussian": MethodCase(DoRA(rank=1, init="gaussian"), dora, held_constant=norms),
    "adalora": MethodCase(AdaLoRA(rank=4, alpha=8.0), adalora),
    "adalora-pruned": MethodCase(AdaLoRA(rank=6, alpha=3.0, kept_rank=2), adalora),
    "vera": MethodCase(VeRA(rank=6), vera, starts_at_fixed_values=True),
    "vera-wider": MethodCase(VeRA(rank=3, in_width=16, out_width=9), vera, starts_at_fixed_values=True),
    "vblora": MethodCase(VBLoRA(rank=3, num_vectors=6, vector_length=4), vblora(2), starts_elsewhere=True),
    "vblora-topk": MethodCase(VBLoRA(rank=2, topk=3, num_vectors=5, vector_length=1), vblora(3), starts_elsewhere=True),
    "vblora-one": MethodCase(VBLoRA(rank=2, topk=1, num_vectors=4, vector_length=2), vblora(1), starts_elsewhere=True),
    "oft": MethodCase(OFT(block_size=2), oft(2, num_terms=5), near_zero, starts_at_fixed_values=True),
    "oft-one-block": MethodCase(OFT(block_size=5), oft(5, num_terms=5), near_zero, starts_at_fixed_values=True),
    "oft-exact": MethodCase(OFT(block_size=4, exact=True), oft(4), starts_at_fixed_values=True),
    "oft-exact-three": MethodCase(OFT(block_size=3, exact=True), oft(3), starts_at_fixed_values=True),
    "oft-shared": MethodCase(OFT(block_size=2, exact=True, block_share=True), oft(2), starts_at_fixed_values=True),
    "oft-last-twice": MethodCase(
        OFT(block_size=4, num_terms=6, last_term_twice=True), oft(4, num_terms=6, last=2.0), near_zero, starts_at_fixed_values=True
    ),
    "oft-last-twice-short": MethodCase(
        OFT(block_size=4, num_terms=3, last_term_twice=True), oft(4, num_terms=3, last=2.0), near_zero, starts_at_fixed_values=True
    ),
    "oft-on-output": MethodCase(OFT(block_size=2, exact=True, on_output=True), oft(2, on_output=True), starts_at_fixed_values=True),
    "oft-on-output-seven": MethodCase(
        OFT(block_size=7, on_output=True), oft(7, num_terms=5, on_output=True), near_zero, starts_at_fixed_values=True
    ),
    "oft-coft": MethodCase(OFT(block_size=2, coft=True, eps=0.5), oft(2, num_terms=5, eps=0.5), starts_at_fixed_values=True),
    "boft": MethodCase(BOFT(block_size=4), by_weight(boft), starts_at_fixed_values=True),
    "boft-one-block": MethodCase(BOFT(num_blocks=1), by_weight(boft), starts_at_fixed_values=True),
    "boft-two": MethodCase(BOFT(block_size=2, num_factors=2), by_weight(boft), starts_at_fixed_values=True),
    "boft-three": MethodCase(BOFT(block_size=4, num_factors=3), by_weight(boft), starts_at_fixed_values=True),
    "boft-on-output": MethodCase(BOFT(num_blocks=1, on_output=True), by_weight(boft_on_output), starts_at_fixed_values=True),
    "boft-on-output-two": MethodCase(
        BOFT(block_size=4, num_factors=2, on_output=True, with_gain=False), by_weight(boft_on_output), starts_at_fixed_values=True
    ),
    "hra": MethodCase(HRA(rank=4), by_weight(hra())),
    "hra-odd": MethodCase(HRA(rank=3), by_weight(hra()), starts_elsewhere=True),
    "hra-gram-schmidt": MethodCase(HRA(rank=3, gram_schmidt=True), by_weight(hra(gram_schmidt=True)), starts_elsewhere=True),
    "ia3": MethodCase(IA3(), by_weight(on_output), starts_at_fixed_values=True),
    "ia3-on-input": MethodCase(IA3(on_input=True), by_weight(on_input), starts_at_fixed_values=True),
    "ia3-without-bias": MethodCase(IA3(scales_bias=False), by_weight(on_output_alone), starts_at_fixed_values=True),
    "miss": MethodCase(MiSS(rank=4), by_weight(balance), starts_at_fixed_values=True),
    "miss-uneven": MethodCase(MiSS(rank=3), by_weight(balance), starts_at_fixed_values=True),
    "miss-mini": MethodCase(MiSS(rank=2, form="mini", out_rank=4), by_weight(balance), starts_at_fixed_values=True),
    "miss-mini-one": MethodCase(MiSS(rank=5, form="mini"), by_weight(balance), starts_at_fixed_values=True),
    "miss-any-rank": MethodCase(MiSS(rank=3, any_rank=True), by_weight(balance), starts_at_fixed_values=True),
    "miss-mini-any-rank": MethodCase(MiSS(rank=5, form="mini", out_rank=4, any_rank=True), by_weight(balance), starts_at_fixed_values=True),
    "miss-bat": MethodCase(MiSS(rank=4, form="bat"), by_weight(bat), starts_at_fixed_values=True),
    "loha": MethodCase(LoHa(rank=2, alpha=3.0, form="weight"), by_weight(loha)),
    "loha-beside": MethodCase(LoHa(rank=3, form="beside"), by_weight(loha)),
    "loha-effective": MethodCase(LoHa(rank=2, effective_conv=True, form="weight"), by_weight(loha)),
    "loha-effective-beside": MethodCase(LoHa(rank=2, effective_conv=True, form="beside"), by_weight(loha)),
    "loha-lycoris": MethodCase(LoHa(rank=2, effective_conv=True, init="lycoris"), by_weight(loha)),
    "loha-random": MethodCase(LoHa(rank=1, alpha=-2.0, init="random"), by_weight(loha), starts_elsewhere=True),
    "lokr": MethodCase(LoKr(rank=1, alpha=3.0, form="weight"), by_weight(lokr)),
    "lokr-beside": MethodCase(LoKr(rank=1, form="beside"), by_weight(lokr)),
    "lokr-full": MethodCase(LoKr(rank=4, alpha=2.0, form="weight"), by_weight(lokr)),
    "lokr-full-beside": MethodCase(LoKr(rank=4, decompose_both=True, form="beside"), by_weight(lokr)),
    "lokr-both": MethodCase(LoKr(rank=3, first_form="factorised", second_form="factorised", form="beside"), by_weight(lokr)),
    "lokr-effective": MethodCase(LoKr(rank=2, second_form="factorised", effective_conv=True, form="weight"), by_weight(lokr)),
    "lokr-effective-beside": MethodCase(LoKr(rank=1, effective_conv=True, form="beside"), by_weight(lokr)),
    "lokr-factor": MethodCase(LoKr(rank=1, decompose_factor=4, init="lycoris"), by_weight(lokr)),
    "lokr-outer": MethodCase(LoKr(rank=1, outer=(2, 4), decompose_both=True), by_weight(lokr)),
    "lokr-random": MethodCase(LoKr(rank=2, init="random"), by_weight(lokr), starts_elsewhere=True),
    "dense": MethodCase(Dense(), dense, starts_at_fixed_values=True),
    "bitfit": MethodCase(BitFit(), by_weight(difference), starts_at_fixed_values=True),
    "with-bias": MethodCase(WithBias(inner=AdaLoRA(rank=4, alpha=3.0)), with_bias(adalora)),
    "with-bias-by-weight": MethodCase(WithBias(inner=MiSS(rank=4, form="bat")), with_bias(by_weight(bat)), starts_at_fixed_values=True),
    "norm-tuning": MethodCase(NormTuning(), by_weight(difference), starts_at_fixed_values=True),
}


@dataclass(frozen=True)
class Case:
    """One method on one layer, in float64, with every tensor at random values."""

    method_case: MethodCase
    layer_case: LayerCase

    @property
    def method(self) -> Method:
        """As the layer's shape settles it."""
        layer = describe_any(self.layer_case.module())
        assert layer is not None
        return self.method_case.method.settled(layer, [layer])

    def build(self) -> tuple[nn.Module, Layer, Tensor, dict[str, Tensor]]:
        """The module, its description, an input, and all tensors of the method: random parameters, and settings."""
        module = self.layer_case.module().double().requires_grad_(False)
        layer = describe_any(module)
        assert layer is not None
        x = self.layer_case.x()
        if x.is_floating_point():
            x = x.double()
        specs = {**self.method.parameters(layer), **self.method.shared_parameters()}
        p = {name: self.method_case.random(name, spec.shape).double() for name, spec in specs.items()}
        p |= {name: torch.tensor(value, dtype=torch.float64) for name, value in self.method.settings(layer).items()}
        return module, layer, x, p

    def run(self, module: nn.Module, layer: Layer, x: Tensor, p: Mapping[str, Tensor], *, training: bool = False) -> Tensor:
        """What an adapted layer does."""
        return run(self.method, layer, module, x, p, training=training)

    def weight(self, module: nn.Module, layer: Layer) -> Tensor:
        """The layer's own weight, canonical; of a layer without one, its first tensor."""
        tensors = layer.base_tensors(module)
        return tensors.get("weight", next(iter(tensors.values())))


def supported(method_case: MethodCase, layer_case: LayerCase) -> bool:
    """Whether the method takes the layer."""
    layer = describe_any(layer_case.module())
    return layer is not None and method_case.method.check(layer) is None


CASES: dict[str, Case] = {
    f"{method}-on-{layer}": Case(method_case, layer_case)
    for method, method_case in METHODS.items()
    for layer, layer_case in LAYERS.items()
    if supported(method_case, layer_case)
}
