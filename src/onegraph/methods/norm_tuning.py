"""Tuning of norms: a difference of their weight and bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onegraph.methods.dense import Dense


@dataclass(frozen=True, kw_only=True)
class NormTuning(Dense):
    """w' = w + s dw and b' = b + s db, for norms alone; s = 1.

    Shapes:
        ``weight_difference`` (F,), ``bias_difference`` (F,) where the norm has a bias.

    Source:
        Zhao et al. 2024, https://arxiv.org/abs/2312.11420; PEFT's ``LNTuningConfig`` keeps w' and b' themselves.
    """

    name: ClassVar[str] = "norm_tuning"
    kinds: ClassVar[frozenset[str]] = frozenset({"norm"})
