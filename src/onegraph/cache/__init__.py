"""Inductor's cache folder: what is in it, taken to another machine of the same kind, and cleared of what is of no use."""

from onegraph.cache.clearing import Cleared, clear, prune
from onegraph.cache.kind import Difference, MachineKind, differences, machine_kind
from onegraph.cache.packing import Packed, pack
from onegraph.cache.showing import Contents, contents
from onegraph.cache.unpacking import Unpacked, unpack

__all__ = [
    "Cleared",
    "Contents",
    "Difference",
    "MachineKind",
    "Packed",
    "Unpacked",
    "clear",
    "contents",
    "differences",
    "machine_kind",
    "pack",
    "prune",
    "unpack",
]
