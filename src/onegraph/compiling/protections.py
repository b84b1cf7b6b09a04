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
)


def protections_for(backend: str) -> tuple[Protection, ...]:
    """The protections that this torch needs with this backend."""
    return tuple(protection for protection in PROTECTIONS if protection.needed(backend))
