"""Known faults of torch's compiler, and the switch that keeps a compiled result right in spite of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config
from packaging.version import Version

_TORCH = Version(Version(torch.__version__).base_version)


@dataclass(frozen=True, kw_only=True)
class Protection:
    """One fault and its switch.

    Args:
        name: The failure's name in the catalogue.
        needed: Given the backend's name, True where this torch has the fault.
        options: Inductor options that avoid it, passed to torch.compile: scoped to our graphs, and part of the cache key.
        prepare: Called before compiling, for what no option can do.
        why: What goes wrong without it.
    """

    name: str
    needed: Callable[[str], bool]
    options: Mapping[str, Any]
    why: str
    prepare: Callable[[], None] = lambda: None


# Inductor's default is 16. One more changes nothing but the cache key, and tells our graphs from others in the same process.
_MARK = 17


@functools.cache
def _refuse_vectorised_outer_loops() -> None:
    """Makes inductor give up the fusion of outer loops that are vectorised; for graphs with our mark only.

    Inductor has no option for it. It then generates the loops one after the other, with the buffer in memory.
    """
    from torch._inductor.codegen import cpp

    fused = getattr(cpp, "OuterLoopFusedSchedulerNode", None)
    plain = getattr(fused, "check_outer_fusion_loop_level_attr", None)
    if fused is None or plain is None:
        return  # another torch, whose fusion works in another way

    def check(self: Any, proxies: Any, depth: int) -> bool:
        if torch._inductor.config.cpp.max_horizontal_fusion_size == _MARK and any(
            loop.steps != 1 for proxy in proxies for loop in proxy.loop_nest.loops[:depth]
        ):
            return False
        return bool(plain(self, proxies, depth))

    fused.check_outer_fusion_loop_level_attr = check


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
        name="outer-loop-one-row-buffer",
        needed=lambda backend: backend == "inductor",
        options={"cpp.max_horizontal_fusion_size": _MARK},
        prepare=_refuse_vectorised_outer_loops,
        why=(
            "inductor's CPU code may fuse outer loops around a buffer of one row and then take 16 rows at a time (pytorch #185702): behind "
            "an input that is read transposed, as a transformer block in a UNet reads it, outputs or gradients are off without an error"
        ),
    ),
)


def protections_for(backend: str) -> tuple[Protection, ...]:
    """The protections that this torch needs with this backend."""
    return tuple(protection for protection in PROTECTIONS if protection.needed(backend))
