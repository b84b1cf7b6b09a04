"""Adapter methods: pure math, one file a method. A new method is a file and a line in this table."""

from __future__ import annotations

from onegraph.methods.adalora import AdaLoRA
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.bitfit import BitFit
from onegraph.methods.boft import BOFT
from onegraph.methods.dense import Dense
from onegraph.methods.dora import DoRA
from onegraph.methods.hra import HRA
from onegraph.methods.ia3 import IA3
from onegraph.methods.loha import LoHa
from onegraph.methods.lokr import LoKr
from onegraph.methods.lora import LoRA
from onegraph.methods.miss import MiSS
from onegraph.methods.norm_tuning import NormTuning
from onegraph.methods.oft import OFT
from onegraph.methods.rank_allocation import RankAllocator, orthogonality, rank_masks
from onegraph.methods.vblora import VBLoRA
from onegraph.methods.vera import VeRA
from onegraph.methods.with_bias import WithBias

__all__ = [
    "BOFT",
    "HRA",
    "IA3",
    "METHODS",
    "OFT",
    "AdaLoRA",
    "BitFit",
    "Dense",
    "DoRA",
    "LoHa",
    "LoKr",
    "LoRA",
    "Method",
    "MiSS",
    "NormTuning",
    "ParameterSpec",
    "RankAllocator",
    "VBLoRA",
    "VeRA",
    "WithBias",
    "orthogonality",
    "rank_masks",
]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (LoRA, DoRA, AdaLoRA, VeRA, VBLoRA, OFT, BOFT, HRA, IA3, MiSS, BitFit, Dense, LoHa, LoKr, NormTuning, WithBias)
}
