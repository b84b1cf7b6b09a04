"""Adding an adapter in two parts: everything that can fail first, then everything that changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onegraph.adapters.adapted import Adapted, base_weight
from onegraph.adapters.checks import check_capacity
from onegraph.adapters.growth import Growth, Structure, grow, grown_rank
from onegraph.adapters.plan import Plan, PlanEntry
from onegraph.adapters.records import Record
from onegraph.adapters.select import already_adapted_elsewhere
from onegraph.adapters.slots import Slots
from onegraph.adapters.walk import Place
from onegraph.methods import Method

if TYPE_CHECKING:
    from onegraph.adapters.surgery import Surgery

logger = logging.getLogger("onegraph")


@dataclass(frozen=True)
class Part:
    """What changes for one structure of a new adapter."""

    state: Structure
    entries: list[PlanEntry]
    growth: Growth
    fresh: dict[str, Slots]
    shared: Slots | None
    initial_shared: dict[str, Tensor]
    settings: set[str]
    num_slots: int
    floor: int | None
    reasons: list[str]


@dataclass(frozen=True)
class Addition:
    """An adapter that is ready to be added."""

    record: Record
    parts: dict[Method, Part]
    wraps: dict[str, Adapted]
    places: dict[str, Place]
    initial: dict[str, dict[str, Tensor]]

    def commit(self, name: str, layers: dict[str, Adapted], structures: dict[Method, Structure], surgery: Surgery) -> Record:
        """Put it in place; nothing here can fail."""
        reasons = [reason for part in self.parts.values() for reason in part.reasons]
        if self.wraps and structures:
            reasons.append(f"it is on {len(self.wraps)} layers that were not adapted before")
        if reasons:
            logger.info("adapter %r: %s. A compiled model compiles once more; reserve() or capacity= avoids it.", name, "; ".join(reasons))
        for structure, part in self.parts.items():
            part.growth.commit()
            part.state.widen(part.num_slots)
            part.state.settings, part.state.capacity, part.state.shared = part.settings, part.floor, part.shared
            structures[structure] = part.state
            for path, slots in part.fresh.items():
                layer = self.wraps[path] if path in self.wraps else layers[path]
                layer.structures[structure] = slots
                if part.shared is not None:
                    layer.shared[structure] = part.shared
        for layer in self.wraps.values():
            layer.activate(next(iter(layer.structures)), 0)
        surgery.wrap({path: (self.places[path], layer) for path, layer in self.wraps.items()})
        layers.update(self.wraps)
        for structure, part in self.parts.items():
            slot = self.record.slots[structure] = part.state.free.pop(0)
            for entry in part.entries:
                slots = layers[entry.path].structures[structure]
                slots.write(slot, entry.rank, self.initial[entry.path], entry.method)
                for setting, value in entry.method.settings(entry.layer).items():
                    slots.set(slot, setting, value)
            if part.shared is not None:
                rank = max((entry.rank for entry in part.entries if entry.rank is not None), default=None)
                part.shared.write(slot, rank, part.initial_shared, part.entries[0].method)
        return self.record


def prepare(
    plan: Plan,
    places: dict[str, Place],
    layers: Mapping[str, Adapted],
    structures: Mapping[Method, Structure],
    *,
    capacity: int | None,
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
    room: int | None = None,
) -> Addition:
    """Make everything that a new adapter needs; the model isn't touched.

    Args:
        plan: Layers and methods.
        places: Path -> where the module hangs.
        layers: What is adapted already.
        structures: What is there of each structure.
        capacity: Rank to pad to.
        generator: Draws the initial tensors.
        dtype: Of the parameters; None: the base layer's.
        room: The highest rank of adapters that are to share a graph with this one; None: the capacity, or what was asked for before.

    Raises:
        AdapterError: ``rank-above-capacity``, ``adapted-elsewhere``.
    """
    wraps: dict[str, Adapted] = {}
    for entry in plan:
        module = places[entry.path].module
        if not isinstance(module, Adapted):
            wraps[entry.path] = Adapted(module, entry.layer)
        elif layers.get(entry.path) is not module:
            raise already_adapted_elsewhere(entry.path)
    check_capacity(plan, capacity)
    present = {path: list(layer.structures) for path, layer in layers.items()}

    def shared(entry: PlanEntry) -> Method:
        method = entry.method.computed_as(present.get(entry.path, ()))
        # What was asked for once holds for the layers that come later, too.
        asked = [rank for kind, state in structures.items() if type(kind) is type(method) and (rank := state.capacity)]
        rank = room or capacity or max(asked, default=None)
        return method if rank is None else method.with_room(entry.layer, rank)

    plan = Plan(tuple(replace(entry, method=shared(entry)) for entry in plan))
    weights: dict[str, Tensor] = {}
    initial: dict[str, dict[str, Tensor]] = {}
    for entry in plan:
        weight = base_weight(places[entry.path].module, entry.layer)
        initial[entry.path] = entry.method.initial(entry.layer, weight, generator)
        weights[entry.path] = weight.new_empty(0)  # dtype and device: quantised weights are not kept expanded, all at once
    record = Record.of(plan)
    by_path = {entry.path: entry for entry in plan}
    parts = {
        structure: _part(
            structure, [by_path[path] for path in paths], layers, structures.get(structure), weights, capacity, generator, dtype
        )
        for structure, paths in record.by_structure().items()
    }
    return Addition(record, parts, wraps, places, initial)


def _part(
    structure: Method,
    entries: list[PlanEntry],
    layers: Mapping[str, Adapted],
    present: Structure | None,
    weights: Mapping[str, Tensor],
    capacity: int | None,
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
) -> Part:
    settings = {setting for entry in entries for setting in entry.method.settings(entry.layer)}
    state = present or Structure(num_slots=2, settings=settings, free=[1])
    kept = state.settings | settings
    num_slots = state.num_slots if state.free else 2 * state.num_slots
    floor = max((asked for asked in (state.capacity, capacity) if asked is not None), default=None)
    ranks = {entry.path: entry.rank for entry in entries}
    method = entries[0].method
    growth = grow(
        layers.items(), structure, num_slots=num_slots, settings=kept, ranks=ranks, floor=floor, shared=state.shared, sizes=method
    )
    first = weights[entries[0].path]
    shared = state.shared
    if shared is None and method.shared_parameters():
        largest = max((rank for rank in ranks.values() if rank is not None), default=None)
        shared = Slots(
            structure,
            None,
            rank=grown_rank(largest, largest, floor),
            num_slots=num_slots,
            settings=(),
            dtype=_dtype_of(first, dtype),
            device=first.device,
            sizes=structure.with_room_for(method),
        )
    fresh = {
        entry.path: Slots(
            structure,
            entry.layer,
            rank=_first_capacity(structure, entry, floor),
            num_slots=num_slots,
            settings=sorted(kept),
            dtype=_dtype_of(weights[entry.path], dtype),
            device=weights[entry.path].device,
        )
        for entry in entries
        if entry.path not in layers or structure not in layers[entry.path].structures
    }
    reasons = growth.reasons() if present is not None else []
    initial_shared = method.initial_shared(generator) if method.shared_parameters() else {}
    return Part(state, entries, growth, fresh, shared, initial_shared, kept, num_slots, floor, reasons)


def _first_capacity(structure: Method, entry: PlanEntry, floor: int | None) -> int | None:
    """A structure may have a rank where its first adapter, of a form that isn't padded, has none."""
    if entry.rank is None and structure.rank_on(entry.layer) is not None:
        return floor or 1
    return grown_rank(entry.rank, entry.rank, floor)


def _dtype_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """A quantised weight has no dtype that could be trained."""
    if dtype is not None:
        return dtype
    return weight.dtype if weight.is_floating_point() else torch.float32
