"""Making ranks data: adapters of a structure that holds one rank move to one that has room for several."""

from __future__ import annotations

from collections.abc import Mapping

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.growth import Structure, grow
from onegraph.adapters.records import Record
from onegraph.adapters.slots import Slots
from onegraph.methods import Method


def share_ranks(layers: Mapping[str, Adapted], structures: dict[Method, Structure], records: Mapping[str, Record], rank: int) -> None:
    """Move every adapter whose structure holds its rank, where its method has a form for several, to that form.

    Parameters stay the same objects, so that an optimizer goes on with them, and slot numbers of all layers agree as before.
    """
    for old in list(structures):
        moves: dict[Method, list[str]] = {}
        for path, layer in layers.items():
            if old in layer.structures:
                users = [record.methods[path] for record in records.values() if record.structures.get(path) == old] or [old]
                rooms = [method.with_room(layer.layer, rank).structure() for method in users]
                new = max(rooms, key=lambda room: len(room.parameters(layer.layer)))  # the one that holds every form of the others
                if new != old:
                    moves.setdefault(new, []).append(path)
        for new, paths in moves.items():
            _move(old, new, {path: layers[path] for path in paths}, layers, structures, records, rank)
        if moves and not any(old in layer.structures for layer in layers.values()):
            del structures[old]
            for record in records.values():
                record.slots.pop(old, None)


def _move(
    old: Method,
    new: Method,
    moved: Mapping[str, Adapted],
    layers: Mapping[str, Adapted],
    structures: dict[Method, Structure],
    records: Mapping[str, Record],
    rank: int,
) -> None:
    users = [record for record in records.values() if any(record.structures.get(path) == old for path in moved)]
    before = structures[old]
    settings = before.settings.union(*(new.settings(layer.layer) for layer in moved.values()))
    state = structures.setdefault(new, Structure(before.num_slots, settings, free=list(range(1, before.num_slots))))
    num_slots = max(state.num_slots, state.num_slots - len(state.free) + len(users))
    state.settings |= settings
    grow(layers.items(), new, num_slots=num_slots, settings=state.settings, ranks={}, floor=rank).commit()
    state.widen(num_slots)
    state.capacity = max(rank, state.capacity or 0)
    for layer in moved.values():
        source = layer.structures[old]
        if new not in layer.structures:
            layer.structures[new] = Slots(
                new,
                layer.layer,
                rank=max(rank, source.rank or 1),
                num_slots=num_slots,
                settings=sorted(state.settings),
                dtype=source.dtype,
                device=source.device,
            )
    for record in users:
        slot = record.slots[new] = state.free.pop(0)
        for path in (path for path in moved if record.structures.get(path) == old):
            _carry(record, path, moved[path], new, slot)
    for layer in moved.values():
        layer.forget(old, new)


def _carry(record: Record, path: str, layer: Adapted, new: Method, slot: int) -> None:
    """One adapter's tensors, settings and Parameters on one layer."""
    old, method = record.structures[path], record.methods[path]
    source, target, number = layer.structures[old], layer.structures[new], record.slots[old]
    own = method.rank_on(layer.layer)
    tensors = {name: value.detach().clone() for name, value in source.read(number, own, method).items()}
    values = {name: float(value) for name, value in source.settings(number).items()}
    parameters = source.handed_over(number)
    target.take(slot, parameters)
    target.write(slot, own, tensors, method)
    for setting, value in {**method.computed_as([new]).settings(layer.layer), **values}.items():
        target.set(slot, setting, value)
    record.structures[path] = new
