"""The adapters of a model and their values: tensors and settings, read and written in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.checks import check_finite, check_tensors, is_known, merged_error, sharded_error, unknown_adapter, unknown_setting
from onegraph.adapters.growth import Structure
from onegraph.adapters.plan import Plan, PlanEntry
from onegraph.adapters.records import Record
from onegraph.adapters.slots import Slots
from onegraph.adapters.surgery import Surgery
from onegraph.errors import AdapterError
from onegraph.methods import Method

SHARED = ""
"""The path under which tensors stand that all layers of an adapter have in common."""


class AdapterValues:
    """What adapters there are, and what they hold. ``Adapters`` is this and all that changes which of them run."""

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None) -> None:
        self.model = model
        self.layers: dict[str, Adapted] = {}
        self._dtype = dtype
        self._records: dict[str, Record] = {}
        self._structures: dict[Method, Structure] = {}
        self._active: str | None = None
        self._merged: dict[str, float] = {}
        self._rows: tuple[str | None, ...] | None = None
        self._surgery = Surgery(model)
        self._assignments: list[dict[str, Method]] = []
        self.listeners: list[Callable[[], None]] = []

    # What is there

    @property
    def names(self) -> list[str]:
        """The adapters, in the order they were added."""
        return list(self._records)

    @property
    def active(self) -> str | None:
        """The adapter that runs; None: the base model."""
        return self._active

    @property
    def plan(self) -> Plan:
        """The layers of the active adapter, or of the first when none is active."""
        name = self._active or next(iter(self._records), None)
        if name is None:
            return Plan(())
        return Plan(tuple(PlanEntry(path, self.layers[path].layer, method) for path, method in self._records[name].methods.items()))

    def methods(self, name: str) -> dict[str, Method]:
        """The method on each layer of an adapter, with that layer's rank and alpha."""
        return dict(self._record(name).methods)

    def parameters(self, name: str | None = None) -> dict[str, nn.Parameter]:
        """What an adapter trains: "path.parameter" -> Parameter. None means the active one.

        Raises:
            AdapterError: ``unknown-adapter``; ``no-active-adapter``.
        """
        chosen = self._active_name() if name is None else name
        names = {path: method.parameters(self.layers[path].layer) for path, method in self._record(chosen).methods.items()}
        found = {}
        for key, value in self.held(chosen).items():
            path, dot, parameter = key.rpartition(".")
            if value.requires_grad and (not dot or parameter in names[path]):
                found[key] = value
        return found

    def held(self, name: str) -> dict[str, nn.Parameter]:
        """Every Parameter of an adapter's slots by the same names, also those of a form that its method doesn't use: they hold zeros."""
        record = self._record(name)
        found = {
            f"{path}.{parameter}": value
            for path in record.methods
            for parameter, value in self._slots(path, record).parameters(self._slot(path, record)).items()
        }
        for structure in record.shared():
            tensors = self._shared(structure).parameters(record.slots[structure])
            found |= tensors
        return found

    def parameters_by_layer(self, name: str | None = None) -> dict[str, dict[str, nn.Parameter]]:
        """The same, path -> parameter -> Parameter: what ``RankAllocator`` and ``orthogonality`` take."""
        found: dict[str, dict[str, nn.Parameter]] = {}
        for key, value in self.parameters(name).items():
            path, _, parameter = key.rpartition(".")
            found.setdefault(path, {})[parameter] = value
        return found

    def tensors(self, name: str) -> dict[str, dict[str, Tensor]]:
        """An adapter's tensors, path -> name -> tensor, cut to the true rank: views of the storage where the layout allows.

        Those that all its layers have in common stand under the path "".
        """
        record = self._record(name)
        found = {
            path: self._slots(path, record).read(self._slot(path, record), method.rank_on(self.layers[path].layer), method)
            for path, method in record.methods.items()
        }
        for structure, method in record.shared().items():
            found.setdefault(SHARED, {}).update(self._shared(structure).read(record.slots[structure], _rank(method), method))
        return found

    def running_leaves(self) -> Iterator[Tensor]:
        """Where a backward pass ends now: the trained Parameters of the active adapter; in ``rows``, the memory of all of them."""
        if self._active in self._records:
            yield from self.parameters(self._active).values()
        if self._rows is not None:
            for slots in self.storages():
                yield from slots.leaves

    def storages(self) -> Iterator[Slots]:
        """The storage of every structure on every layer, and what its layers have in common."""
        for layer in self.layers.values():
            yield from layer.structures.values()
        for state in self._structures.values():
            if state.shared is not None:
                yield state.shared

    # Values

    def load_tensors(self, name: str, tensors: Mapping[str, Mapping[str, Tensor]], *, partial: bool = False) -> None:
        """Copy tensors of the true rank into an adapter, in place. All are checked first; on an error nothing has changed.

        Args:
            tensors: path -> name -> tensor.
            partial: Whether layers or tensors of the adapter may be missing; they keep their values.

        Raises:
            AdapterError: ``unknown-adapter``, ``tensor-unknown``, ``tensor-missing``, ``tensor-shape``; several are collected.
            NumericsError: ``not-finite``.
        """
        record = self._record(name)
        self._not_in_weights(name)
        expected = {path: (method, method.parameters(self.layers[path].layer)) for path, method in record.methods.items()}
        shared = record.shared()
        for method in shared.values():
            expected[SHARED] = (method, {**expected.get(SHARED, (method, {}))[1], **method.shared_parameters()})
        check_tensors(name, expected, tensors, partial=partial)
        for path, given in tensors.items():
            if path != SHARED:
                method = record.methods[path]
                self._slots(path, record).write(self._slot(path, record), method.rank_on(self.layers[path].layer), given, method)
        for structure, method in shared.items():
            given = tensors.get(SHARED, {})
            own = {key: given[key] for key in method.shared_parameters() if key in given}
            self._shared(structure).write(record.slots[structure], _rank(method), own, method)

    def setting_names(self, name: str) -> list[str]:
        """The settings that an adapter's structures keep."""
        return sorted({setting for structure in self._record(name).slots for setting in self._structures[structure].settings})

    def settings_of(self, name: str, setting: str) -> dict[str, float]:
        """The value of a setting on each layer of an adapter; empty when no structure of it keeps it."""
        record = self._record(name)
        return {
            path: float(self._slots(path, record).block.setting(setting, self._slot(path, record)))
            for path, structure in record.structures.items()
            if setting in self._structures[structure].settings
        }

    def set_setting(self, name: str, setting: str, value: float | Mapping[str, float]) -> None:
        """Set a setting on all layers of an adapter that keep it, or on each by its path; in place, never a recompile.

        Raises:
            AdapterError: ``unknown-adapter``, ``not-finite-value``; ``unknown-setting`` for one that no layer keeps (0 is fine: it is
                without effect anyway).
        """
        record = self._record(name)
        self._not_in_weights(name)
        values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(record.methods, float(value))
        kept = {path for path, structure in record.structures.items() if setting in self._structures[structure].settings}
        for path, number in values.items():
            check_finite(number, f"{setting} of {name!r} on {path}")
            if path not in record.methods:
                raise AdapterError(f"adapter {name!r} is not on {path!r}", code="tensor-unknown")
            if number and path not in kept and (isinstance(value, Mapping) or not kept):
                raise unknown_setting(record.structures[path].name, setting, self._structures[record.structures[path]].settings)
        self._write_setting(record, setting, {path: values[path] for path in values.keys() & kept})

    @contextlib.contextmanager
    def without_randomness(self) -> Iterator[None]:
        """Inside, nothing is drawn at random, whichever adapters run: every dropout is 0, in place, on the same graph."""
        before = [
            (name, record, setting, self.settings_of(name, setting))
            for name, record in self._records.items()
            for setting in sorted({setting for structure in record.slots for setting in structure.random_settings})
        ]
        for _, record, setting, values in before:
            self._write_setting(record, setting, dict.fromkeys(values, 0.0))
        try:
            yield
        finally:
            for name, record, setting, values in before:
                if self._records.get(name) is record:
                    self._write_setting(record, setting, values)

    # Inside

    def __getstate__(self) -> dict[str, Any]:
        """A copy is outside of the rows that the original is inside of: its layers are, too."""
        return {**self.__dict__, "_rows": None, "listeners": []}

    def _write_setting(self, record: Record, setting: str, values: Mapping[str, float]) -> None:
        """Without any check; merged adapters too, whose weights hold nothing random."""
        for path, value in values.items():
            self._slots(path, record).set(self._slot(path, record), setting, value)

    def _alive(self) -> None:
        if self._surgery.undone:
            raise AdapterError("these adapters were detached from their model", hint="attach new ones", code="detached")
        for path, layer in self.layers.items():
            if layer.replaced_parameters():
                raise sharded_error(path)

    def _changed(self) -> None:
        """Tell those who listen that other Parameters may run now."""
        for call in self.listeners:
            call()

    def _record(self, name: str) -> Record:
        self._alive()
        if not is_known(name, self._records):
            raise unknown_adapter(name, self._records)
        return self._records[name]

    def _active_name(self) -> str:
        if self._active is None:
            raise AdapterError("no adapter is active", hint="name one, or use() one first", code="no-active-adapter")
        return self._active

    def _not_in_weights(self, name: str) -> None:
        if name in self._merged:
            raise merged_error(f"adapter {name!r} can't be changed", self._merged)

    def _slots(self, path: str, record: Record) -> Slots:
        return self.layers[path].structures[record.structures[path]]

    def _slot(self, path: str, record: Record) -> int:
        return record.slots[record.structures[path]]

    def _shared(self, structure: Method) -> Slots:
        shared = self._structures[structure].shared
        assert shared is not None
        return shared


def _rank(method: Method) -> int | None:
    rank = getattr(method, "rank", None)
    return rank if isinstance(rank, int) else None
