"""How AdaLoRA's ranks are taken away in a run, as settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from onegraph.training.settings import setting


@dataclass(frozen=True, kw_only=True)
class AllocationSettings:
    """Only for AdaLoRA: how ranks are taken away in training. All counts are optimizer steps."""

    target_rank: int | None = setting(None, "triplets a layer at the end, on average; none is taken away when absent", low=0)
    warm_up_steps: int = setting(0, "steps at the start that take nothing away; PEFT's tinit", low=0)
    final_steps: int = setting(0, "steps at the end in which the choice is fixed; PEFT's tfinal", low=0)
    interval: int = setting(1, "steps between two choices; PEFT's deltaT", low=1)
    beta1: float = setting(0.85, "smoothing of the importance of a weight", above=0.0, below=1.0)
    beta2: float = setting(0.85, "smoothing of its deviation", above=0.0, below=1.0)
    orthogonality: float = setting(0.5, "weight of the loss that keeps the factors orthogonal; PEFT's orth_reg_weight", low=0.0)
