"""Making room: larger blocks for the layers of a structure, made first and put in place together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.slots import Block, Slots
from onegraph.methods import Method


@dataclass
class Structure:
    """What adapters of one structure share: the number of slots, the settings kept, the capacity asked for, tensors of all layers."""

    num_slots: int
    settings: set[str]
    capacity: int | None = None
    free: list[int] = field(default_factory=list)
    shared: Slots | None = None

    def widen(self, num_slots: int) -> None:
        """More slots, free ones."""
        self.free += range(self.num_slots, num_slots)
        self.num_slots = max(self.num_slots, num_slots)


@dataclass(frozen=True)
class Growth:
    """Blocks that are ready; nothing has changed yet."""

    blocks: list[tuple[Slots, Block]]

    def commit(self) -> None:
        """Put them in place."""
        for slots, block in self.blocks:
            slots.adopt(block)

    def reasons(self) -> list[str]:
        """Why a compiled model will compile again; empty when it will not. More slots alone change only a graph for rows."""
        reasons: list[str] = []
        ranks = sorted({f"{slots.rank} to {block.rank}" for slots, block in self.blocks if slots.rank != block.rank})
        if ranks:
            reasons.append(
                f"the capacity grows from rank {', '.join(ranks)} (an optimizer made before keeps state of the old shapes: make it anew)"
            )
        new = {name for slots, block in self.blocks for name in block.settings_memory if name not in slots.block.settings_memory}
        if any(slots.block.sizes != block.sizes for slots, block in self.blocks):
            reasons.append("the tensors that all layers share get larger")
        if new:
            reasons.append(f"it is the first to use {', '.join(sorted(new))}")
        return reasons


def grow(
    layers: Iterable[tuple[str, Adapted]],
    structure: Method,
    *,
    num_slots: int,
    settings: set[str],
    ranks: Mapping[str, int | None],
    floor: int | None,
    shared: Slots | None = None,
    sizes: Method | None = None,
) -> Growth:
    """Larger blocks where a layer of the structure needs one.

    Args:
        layers: Path and layer.
        structure: Which storage.
        num_slots: Slots wanted.
        settings: Settings wanted.
        ranks: Path -> rank wanted there.
        floor: A capacity wanted everywhere.
        shared: Tensors that the layers have in common; they have the layers' largest rank.
        sizes: A method that these must have room for.
    """
    blocks: list[tuple[Slots, Block]] = []
    if shared is not None:
        wanted = max((rank for rank in ranks.values() if rank is not None), default=None)
        rank = grown_rank(shared.rank, wanted, floor)
        present = shared.block.sizes
        sizes = present if sizes is None else present.with_room_for(sizes)
        if (rank, num_slots, sizes) != (shared.rank, shared.num_slots, present):
            blocks.append((shared, shared.grown(num_slots, rank, (), sizes)))
    for path, layer in layers:
        slots = layer.structures.get(structure)
        if slots is None:
            continue
        rank = grown_rank(slots.rank, ranks.get(path), floor)
        if (rank, num_slots, settings) != (slots.rank, slots.num_slots, set(slots.block.settings_memory)):
            blocks.append((slots, slots.grown(num_slots, rank, sorted(settings))))
    return Growth(blocks)


def grown_rank(present: int | None, wanted: int | None, floor: int | None) -> int | None:
    """Capacity for a rank: doubled until it fits, and at least what was asked for."""
    if present is None:
        return wanted
    capacity = present
    while wanted is not None and capacity < wanted:
        capacity *= 2
    return max(capacity, floor or 0)
