"""``Adapters``: all adapters of one model, by name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onegraph.adapters.adding import prepare
from onegraph.adapters.checks import check_finite, check_name, check_rows, merged_error, no_rows_error
from onegraph.adapters.combine import Combination, combine
from onegraph.adapters.files import file_functions
from onegraph.adapters.generating import repeated_by_generate
from onegraph.adapters.graphs import Graphs
from onegraph.adapters.growth import grow
from onegraph.adapters.merge import merge, merge_and_unload, unmerge
from onegraph.adapters.records import Record
from onegraph.adapters.select import Targets, select
from onegraph.adapters.sharing import share_ranks
from onegraph.adapters.status import status
from onegraph.adapters.values import AdapterValues
from onegraph.adapters.walk import plain_class
from onegraph.errors import AdapterError, ConfigurationError
from onegraph.methods import Method

if TYPE_CHECKING:
    from pathlib import Path

SCALE = "scale"


class Adapters(AdapterValues):
    """The adapters of a model. Made by ``attach``; found again with ``adapters_of``.

    ``layers`` maps a path, as in the model before attaching, to its adapted layer. Switching, disabling and rescaling never recompile;
    adding does only where a tensor gets another shape (a rank above the capacity), a new layer is adapted or a new setting is used,
    and then says so in the log of "onegraph".
    """

    @property
    def graphs(self) -> Graphs:
        """How many graphs a compiled region can come to, whatever is switched: print it."""
        return Graphs.of({name: self._assignment(record) for name, record in self._records.items()})

    def __str__(self) -> str:
        return status(self._records, self.layers, active=self._active, merged=self._merged, rows=self._rows or ())

    def __repr__(self) -> str:
        names = ", ".join(f"{name} (active)" if name == self._active else name for name in self.names)
        return f"<Adapters of {plain_class(self.model).__name__}, {len(self.layers)} layers: {names or 'none'}>"

    # Which one runs

    def use(self, name: str | None) -> None:
        """Make an adapter the active one; None: the base model alone. A pointer swap, never a recompile within one structure.

        Raises:
            AdapterError: ``unknown-adapter``.
        """
        self._alive()
        if name is None:
            for layer in self.layers.values():
                layer.activate(None, 0)
        else:
            record = self._record(name)
            self._not_merged(f"adapter {name!r} can't run")
            for path, structure in self._assignment(record).items():
                slot = record.slots.get(structure, 0)
                self.layers[path].activate(structure, slot if path in record.methods else 0, slot)
        self._active = name
        self._changed()

    def _assignment(self, record: Record) -> dict[str, Method]:
        """The structure that each layer runs with an adapter: its own; elsewhere, as the identity, what gives it the graph of another one.

        Where no other adapter has these on these layers, it is a structure that the adapter has elsewhere.
        """
        if not self._assignments:
            for each in self._records.values():
                self._assigned_as(each)
        return self._assigned_as(record)

    def _assigned_as(self, record: Record) -> dict[str, Method]:
        """One of the assignments that there are, or one more: they stay, so that no adapter changes its graph when others come or go."""
        for known in self._assignments:
            if all(known[path] == structure for path, structure in record.structures.items()):
                return known
        found = {
            path: record.structures.get(path) or next((s for s in record.slots if s in layer.structures), next(iter(layer.structures)))
            for path, layer in self.layers.items()
        }
        self._assignments.append(found)
        return found

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the base model runs alone: every layer is on its identity slot, inside ``rows`` too.

        Raises:
            AdapterError: ``merged``: what is written into the weights can't be switched off.
        """
        self._not_merged("the base model alone can't run")
        before, rows = self._active, self._rows
        self.use(None)
        self._rows = None
        self._assign_rows()
        try:
            yield
        finally:
            self._rows = rows
            self.use(before if before in self._records else None)
            self._assign_rows()

    @contextlib.contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[None]:
        """Inside, every row of the batch runs with its own adapter; None: the base model. No recompile as the assignment changes.

        Gradients reach the Parameters of every adapter in the batch through ``backward()``. ``generate`` of transformers repeats
        the adapter of a row with the row, for beams and further sequences.

        Args:
            names: The adapter of each row, in order.

        Raises:
            AdapterError: ``unknown-adapter``, ``merged``; inside, ``row-count`` for a batch with another number of rows.
            ConfigurationError: ``rows`` for no row at all.
        """
        self._alive()
        check_rows(names, self._records)
        self._not_merged("rows can't run")
        before, self._rows = self._rows, tuple(names)
        try:
            self._assign_rows()
            with repeated_by_generate(self):
                yield
        finally:
            self._rows = before
            if not self._surgery.undone:
                self._assign_rows()

    def _assign_rows(self) -> None:
        """Tell every layer which slot each row reads, in each structure that it has."""
        if self._rows is None:
            for layer in self.layers.values():
                layer.assign_rows(None)
            return
        records, batch = [None if name is None else self._records.get(name) for name in self._rows], object()
        for path, layer in self.layers.items():
            assigned: dict[Method, tuple[Tensor, set[int]]] = {}
            for structure, slots in layer.structures.items():
                numbers = [0 if r is None or r.structures.get(path) != structure else r.slots[structure] for r in records]
                # A tensor for each layer: a graph depends on which of its inputs are the same one.
                assigned[structure] = (torch.tensor(numbers, device=slots.device), set(numbers) - {0})
            if not layer.layer.takes_rows and any(slots for _, slots in assigned.values()):
                owner, _, name = path.rpartition(".")
                if owner not in self.layers or name not in self.layers[owner].layer.reads:
                    raise no_rows_error(path)
            layer.assign_rows(assigned, batch)
        self._changed()

    def scale(self, name: str, factor: float) -> None:
        """Let an adapter act with ``factor`` times the strength it was trained with; 1 puts it back.

        Raises:
            AdapterError: ``unknown-adapter``; ``not-finite-value``.
        """
        record = self._record(name)
        check_finite(factor, f"the factor for {name!r}")
        settings = {path: method.settings(self.layers[path].layer) for path, method in record.methods.items()}
        self.set_setting(name, SCALE, {path: values[SCALE] * factor for path, values in settings.items()})

    # In the weights

    @property
    def merged(self) -> list[str]:
        """The adapters that are written into the weights now."""
        return list(self._merged)

    def merge(
        self,
        names: str | Sequence[str] | None = None,
        *,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        safe: bool = True,
    ) -> None:
        """Write adapters (the active one by default) into the weights of the base: see ``onegraph.adapters.merge.merge``."""
        self._alive()
        merge(self, names, weights=weights, safe=safe)

    def unmerge(self) -> None:
        """Hang the very same Parameters back that ``merge`` put aside, and use the adapter that was active."""
        self._alive()
        unmerge(self)

    def merge_and_unload(
        self,
        names: str | Sequence[str] | None = None,
        *,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        safe: bool = True,
    ) -> nn.Module:
        """Merge, unless that is done, and return the plain model with the new weights; these adapters are gone."""
        self._alive()
        return merge_and_unload(self, names, weights=weights, safe=safe)

    def combine(self, name: str, weights: Mapping[str, float], how: str = "sum", **options: Any) -> Combination:
        """Add an adapter that is a weighted sum of others: see ``onegraph.adapters.combine.combine``."""
        self._alive()
        return combine(self, name, weights, how, **options)

    # Adding and deleting

    def add(
        self,
        name: str,
        method: Method,
        *,
        targets: Targets | None = None,
        exclude: Targets = (),
        overrides: Mapping[str, Method] | None = None,
        also: Mapping[str, Method] | None = None,
        capacity: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Add an adapter; it isn't active before ``use``. On an error nothing has changed.

        Args:
            name: A new name.
            method: What it computes.
            targets: Which layers, as for ``attach``; None: those that are adapted already.
            exclude: Taken out again.
            overrides: Another rank, or another method, for some of these layers.
            also: Further layers, each with its method: ``{"classifier": Dense()}``.
            capacity: Rank to pad to; None: what the structure has, or the method's rank.
            generator: Draws the initial tensors, on the CPU.

        Raises:
            AdapterError: ``adapter-exists``, ``adapter-name``, ``rank-above-capacity``, ``adapted-elsewhere``, ``nothing-adapted``.
            TargetError: See ``attach``.
        """
        self._alive()
        self._add(name, method, targets, exclude, overrides, also, capacity, generator)

    def _add(
        self,
        name: str,
        method: Method,
        targets: Targets | None,
        exclude: Targets = (),
        overrides: Mapping[str, Method] | None = None,
        also: Mapping[str, Method] | None = None,
        capacity: int | None = None,
        generator: torch.Generator | None = None,
        room: int | None = None,
    ) -> None:
        check_name(name, self._records)
        if targets is None:
            if not self.layers:
                raise AdapterError("no layer is adapted yet", hint="say which: targets=[...]", code="nothing-adapted")
            chosen = set(self.layers)

            def targets(path: str, module: nn.Module) -> bool:
                return path in chosen

        self._not_merged("no adapter can be added")
        plan, found = select(self.model, method, targets, exclude=exclude, overrides=overrides, also=also)
        addition = prepare(plan, found, self.layers, self._structures, capacity=capacity, generator=generator, dtype=self._dtype, room=room)
        self._records[name] = addition.commit(name, self.layers, self._structures, self._surgery)
        if addition.wraps:
            self._assignments.clear()
        self._refresh()

    def delete(self, name: str) -> None:
        """Remove an adapter. Its slot becomes the identity and is free again; an active adapter is switched off first.

        Raises:
            AdapterError: ``unknown-adapter``.
        """
        record = self._record(name)
        if name in self._merged:
            raise merged_error(f"adapter {name!r} can't be deleted", self._merged)
        if self._active == name:
            self.use(None)
        for path in record.methods:
            self._slots(path, record).reset(self._slot(path, record))
        for structure in record.shared():
            self._shared(structure).reset(record.slots[structure])
        for structure, slot in record.slots.items():
            state = self._structures[structure]
            state.free = sorted([slot, *state.free])
        del self._records[name]
        self._refresh()

    def reserve(
        self,
        *,
        num_adapters: int | None = None,
        rank: int | None = None,
        method: Method | None = None,
        targets: Targets | None = None,
    ) -> None:
        """Make room at once for adapters to come, so that adding them changes no shape and no layer.

        Args:
            num_adapters: How many adapters there will be, in each structure.
            rank: The highest rank there will be. Adapters of MiSS and LoKr, there or to come, then share a graph whatever their ranks.
            method: Also for this method, with the settings (dropouts) that it has.
            targets: On these layers, as for ``attach``; None: those that are adapted already.

        Raises:
            ConfigurationError: ``reserve`` for a number below 1, or targets without a method. Otherwise as ``add``.
        """
        self._alive()
        for option, number in {"num_adapters": num_adapters, "rank": rank}.items():
            if number is not None and number < 1:
                raise ConfigurationError(
                    f"reserve({option}={number}) is room for less than one", hint="a whole number, 1 or more", code="reserve"
                )
        if targets is not None and method is None:
            raise ConfigurationError(
                "reserve(targets=...) says where, but not for which method",
                hint="reserve(method=LoRA(rank=16), targets=...)",
                code="reserve",
            )
        if method is not None:
            name = next(name for number in itertools.count() if (name := f"reserved {number}") not in self._records)
            self._add(name, method, targets, room=rank)
            self.delete(name)
        if rank is not None:
            share_ranks(self.layers, self._structures, self._records, rank)
            self._assignments.clear()
        wanted = (num_adapters or 0) + 1
        growths = [
            grow(
                self.layers.items(),
                structure,
                num_slots=max(state.num_slots, wanted),
                settings=state.settings,
                ranks={},
                floor=max(rank or 0, state.capacity or 0),
                shared=state.shared,
            )
            for structure, state in self._structures.items()
        ]
        for growth, state in zip(growths, self._structures.values()):
            growth.commit()
            state.widen(max(state.num_slots, wanted))
            state.capacity = max(rank or 0, state.capacity or 0) or None
        self._refresh()

    def detach(self) -> nn.Module:
        """Put the plain layers back and let the base parameters train again that did before. Returns the model; these adapters are gone."""
        self._alive()
        self._not_merged("adapters can't be detached")
        self._surgery.undo()
        self.layers, self._records, self._structures, self._active, self._assignments = {}, {}, {}, None, []
        return self.model

    # Files

    def save(self, path: str | Path, name: str | None = None, format: str = "native", **options: Any) -> Any:
        """Write an adapter (the active one by default): see ``onegraph.checkpoint.save``."""
        chosen = self._active_name() if name is None else name
        self._record(chosen)
        return file_functions().save(self, path, name=chosen, format=format, **options)

    def load(self, path: str | Path, name: str = "default", format: str | None = None) -> None:
        """Add the adapter that a file or folder holds: see ``onegraph.checkpoint.load``."""
        self._alive()
        file_functions().load(self.model, path, name=name, format=format)

    # Inside

    def _not_merged(self, what: str) -> None:
        if self._merged:
            raise merged_error(what, self._merged)

    def _refresh(self) -> None:
        """Hang in again what runs, after storage was replaced."""
        self.use(self._active)
        if self._rows is not None:
            self._assign_rows()
