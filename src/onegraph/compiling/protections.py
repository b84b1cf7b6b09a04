"""Known faults of torch's compiler, and the switch that keeps a compiled result right in spite of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version

_TORCH = Version(Version(torch.__version__).base_version)


@dataclass(frozen=True, kw_only=True)
class Protection:
    """One fault and its switch.

    Args:
        name: The failure's name in the catalogue.
        needed: Given the backend's name, True where this torch has the fault.
        options: Inductor options that avoid it, passed to torch.compile: scoped to our graphs, and part of the cache key.
        why: What goes wrong without it.
    """

    name: str
    needed: Callable[[str], bool]
    options: Mapping[str, Any]
    why: str


PROTECTIONS = (
    Protection(
        name="scatter-order-zero-gradients",
        needed=lambda backend: backend == "inductor" and Version("2.14") > _TORCH,
        options={"reorder_for_peak_memory": False},
        why=(
            "inductor before torch 2.14 may schedule a read of a scattered buffer before the scatter (pytorch #185509), "
            "and gradients upstream of nearest upsampling become zero without an error"
        ),
    ),
    Protection(
        name="horizontal-fusion-wrong-gradients",
        needed=lambda backend: backend == "inductor",
        options={"cpp.max_horizontal_fusion_size": 1},
        why=(
            "inductor's CPU code for loops that it fused side by side can be wrong when it is vectorised: in a transformer block with its "
            "norm and projections, fp32, 32 channels, gradients were off by 8 % without an error (torch 2.13); other sizes were right"
        ),
    ),
)


def protections_for(backend: str) -> tuple[Protection, ...]:
    """The protections that this torch needs with this backend."""
    return tuple(protection for protection in PROTECTIONS if protection.needed(backend))
