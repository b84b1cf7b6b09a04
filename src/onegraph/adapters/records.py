"""What is known of one adapter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from onegraph.adapters.plan import PlanEntry
from onegraph.methods import Method


@dataclass
class Record:
    """One adapter: its method on each layer, and its slot in each structure, the same on every layer.

    Args:
        methods: Path -> method, with that layer's rank and settings, and without the room that it was given.
        structures: Path -> the method's structure, with the room.
        slots: Structure -> slot.
    """

    methods: dict[str, Method]
    structures: dict[str, Method]
    slots: dict[Method, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[PlanEntry]) -> Record:
        """Without slots yet."""
        methods = {entry.path: entry.method for entry in entries}
        # One object for all layers that share it, whatever their ranks: a graph depends on which of its objects are the same one.
        known: dict[Method, Method] = {}
        structures = {path: method.structure() for path, method in methods.items()}
        plain = {path: method.without_room() for path, method in methods.items()}
        return cls(plain, {path: known.setdefault(structure, structure) for path, structure in structures.items()})

    def by_structure(self) -> dict[Method, list[str]]:
        """Structure -> paths."""
        paths: dict[Method, list[str]] = {}
        for path, structure in self.structures.items():
            paths.setdefault(structure, []).append(path)
        return paths

    def shared(self) -> dict[Method, Method]:
        """Structure -> the adapter's method, for the structures whose layers have tensors in common."""
        found: dict[Method, Method] = {}
        for path, structure in self.structures.items():
            if structure not in found and self.methods[path].shared_parameters():
                found[structure] = self.methods[path]
        return found
