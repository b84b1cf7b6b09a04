"""``Adapters``: all adapters of one model, by name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onegraph.adapters.adapted import Adapted, base_weight
from onegraph.adapters.checks import check_capacity, check_finite, check_name, check_tensors, unknown_adapter, unknown_setting
from onegraph.adapters.files import file_functions
from onegraph.adapters.growth import Structure, grow, grown_rank
from onegraph.adapters.plan import Plan, PlanEntry
from onegraph.adapters.select import Targets, already_adapted_elsewhere, select
from onegraph.adapters.slots import Slots
from onegraph.adapters.surgery import Surgery
from onegraph.errors import AdapterError, ConfigurationError
from onegraph.methods import Method

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("onegraph")

SCALE = "scale"


@dataclass
class _Record:
    """One adapter: its slot, the same on every layer of its structure, and its method on each layer that it is on."""

    structure: Method
    slot: int
    methods: dict[str, Method]


class Adapters:
    """The adapters of a model. Made by ``attach``; found again with ``adapters_of``.

    ``layers`` maps a path, as in the model before attaching, to its adapted layer. Switching, disabling and rescaling never recompile;
    adding does only where a tensor gets another shape (a rank above the capacity), a new layer is adapted or a new setting is used,
    and then says so in the log of "onegraph".
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None) -> None:
        self.model = model
        self.layers: dict[str, Adapted] = {}
        self._dtype = dtype
        self._records: dict[str, _Record] = {}
        self._structures: dict[Method, Structure] = {}
        self._active: str | None = None
        self._surgery = Surgery(model)

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
        record = self._record(self._active_name() if name is None else name)
        return {
            f"{path}.{parameter}": value
            for path in record.methods
            for parameter, value in self._slots(path, record).parameters(record.slot).items()
            if value.requires_grad
        }

    def tensors(self, name: str) -> dict[str, dict[str, Tensor]]:
        """An adapter's tensors, path -> name -> tensor, cut to the true rank: views of the storage where the layout allows."""
        record = self._record(name)
        return {
            path: self._slots(path, record).read(record.slot, method.rank_on(self.layers[path].layer))
            for path, method in record.methods.items()
        }

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
            for path, layer in self.layers.items():
                if path in record.methods:
                    layer.activate(record.structure, record.slot)
                else:
                    layer.activate(record.structure if record.structure in layer.structures else None, 0)
        self._active = name

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the base model runs alone: every layer is on its identity slot."""
        before = self._active
        self.use(None)
        try:
            yield
        finally:
            self.use(before if before in self._records else None)

    def scale(self, name: str, factor: float) -> None:
        """Let an adapter act with ``factor`` times the strength it was trained with; 1 puts it back.

        Raises:
            AdapterError: ``unknown-adapter``; ``not-finite-value``; ``unknown-setting`` for a method without a scale.
        """
        record = self._record(name)
        check_finite(factor, f"the factor for {name!r}")
        values = {path: method.settings(self.layers[path].layer).get(SCALE) for path, method in record.methods.items()}
        if any(value is None for value in values.values()):
            raise unknown_setting(record.structure.name, SCALE, ())
        self.set_setting(name, SCALE, {path: value * factor for path, value in values.items() if value is not None})

    # Adding and deleting

    def add(
        self,
        name: str,
        method: Method,
        *,
        targets: Targets | None = None,
        exclude: Targets = (),
        overrides: Mapping[str, Method] | None = None,
        capacity: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Add an adapter; it isn't active before ``use``. On an error nothing has changed.

        Args:
            name: A new name.
            method: What it computes.
            targets: Which layers, as for ``attach``; None: those that are adapted already.
            exclude: Taken out again.
            overrides: Another rank or alpha for some layers.
            capacity: Rank to pad to; None: what the structure has, or the method's rank.
            generator: Draws the initial tensors, on the CPU.

        Raises:
            AdapterError: ``adapter-exists``, ``adapter-name``, ``rank-above-capacity``, ``adapted-elsewhere``, ``nothing-adapted``.
            TargetError: See ``attach``.
        """
        self._alive()
        check_name(name, self._records)
        if targets is None:
            if not self.layers:
                raise AdapterError("no layer is adapted yet", hint="say which: targets=[...]", code="nothing-adapted")
            chosen = set(self.layers)

            def targets(path: str, module: nn.Module) -> bool:
                return path in chosen

        plan, found = select(self.model, method, targets, exclude=exclude, overrides=overrides)
        structure = method.structure()
        wraps: dict[str, Adapted] = {}
        for entry in plan:
            module = found[entry.path].module
            if isinstance(module, Adapted):
                if self.layers.get(entry.path) is not module:
                    raise already_adapted_elsewhere(entry.path)
            else:
                wraps[entry.path] = Adapted(module, entry.layer)
        check_capacity(plan, capacity)
        ranks = {entry.path: entry.rank for entry in plan}
        settings = {setting for entry in plan for setting in entry.method.settings(entry.layer)}
        known = structure in self._structures
        shared = self._structures.get(structure) or Structure(num_slots=2, settings=settings, free=[1])
        kept = shared.settings | settings
        num_slots = shared.num_slots if shared.free else 2 * shared.num_slots
        floor = max((asked for asked in (shared.capacity, capacity) if asked is not None), default=None)
        weights = {entry.path: base_weight(found[entry.path].module, entry.layer) for entry in plan}
        initial = {entry.path: entry.method.initial(entry.layer, weights[entry.path], generator) for entry in plan}
        growth = grow(self.layers.items(), structure, num_slots=num_slots, settings=kept, ranks=ranks, floor=floor)
        fresh = {
            entry.path: Slots(
                structure,
                entry.layer,
                rank=grown_rank(entry.rank, entry.rank, floor),
                num_slots=num_slots,
                settings=sorted(kept),
                dtype=weights[entry.path].dtype if self._dtype is None else self._dtype,
                device=weights[entry.path].device,
            )
            for entry in plan
            if entry.path in wraps or structure not in self.layers[entry.path].structures
        }

        # From here on nothing can fail.
        reasons = growth.reasons() + ([f"it is on {len(wraps)} layers that were not adapted before"] if wraps else [])
        if known and reasons:
            logger.info("adapter %r: %s. A compiled model compiles once more; reserve() or capacity= avoids it.", name, "; ".join(reasons))
        growth.commit()
        shared.widen(num_slots)
        shared.settings, shared.capacity = kept, floor
        self._structures[structure] = shared
        for path, slots in fresh.items():
            layer = wraps[path] if path in wraps else self.layers[path]
            layer.structures[structure] = slots
        for layer in wraps.values():
            layer.activate(structure, 0)
        self._surgery.wrap({path: (found[path], layer) for path, layer in wraps.items()})
        self.layers.update(wraps)
        record = _Record(structure, shared.free.pop(0), {entry.path: entry.method for entry in plan})
        self._records[name] = record
        for entry in plan:
            slots = self._slots(entry.path, record)
            slots.write(record.slot, entry.rank, initial[entry.path])
            for setting, value in entry.method.settings(entry.layer).items():
                slots.set(record.slot, setting, value)
        self.use(self._active)

    def delete(self, name: str) -> None:
        """Remove an adapter. Its slot becomes the identity and is free again; an active adapter is switched off first.

        Raises:
            AdapterError: ``unknown-adapter``.
        """
        record = self._record(name)
        if self._active == name:
            self.use(None)
        for path in record.methods:
            self._slots(path, record).reset(record.slot)
        shared = self._structures[record.structure]
        shared.free = sorted([record.slot, *shared.free])
        del self._records[name]

    def reserve(self, *, num_adapters: int | None = None, rank: int | None = None) -> None:
        """Make room at once for adapters to come, so that adding them changes no shape.

        Args:
            num_adapters: How many adapters there will be, in each structure.
            rank: The highest rank there will be.

        Raises:
            ConfigurationError: ``reserve`` for a number below 1.
        """
        self._alive()
        for option, number in {"num_adapters": num_adapters, "rank": rank}.items():
            if number is not None and number < 1:
                raise ConfigurationError(
                    f"reserve({option}={number}) is room for less than one", hint="a whole number, 1 or more", code="reserve"
                )
        wanted = (num_adapters or 0) + 1
        growths = [
            grow(
                self.layers.items(),
                structure,
                num_slots=max(shared.num_slots, wanted),
                settings=shared.settings,
                ranks={},
                floor=max(rank or 0, shared.capacity or 0),
            )
            for structure, shared in self._structures.items()
        ]
        for growth, shared in zip(growths, self._structures.values()):
            growth.commit()
            shared.widen(max(shared.num_slots, wanted))
            shared.capacity = max(rank or 0, shared.capacity or 0) or None
        self.use(self._active)

    def detach(self) -> nn.Module:
        """Put the plain layers back and let the base parameters train again that did before. Returns the model; these adapters are gone."""
        self._alive()
        self._surgery.undo()
        self.layers, self._records, self._structures, self._active = {}, {}, {}, None
        return self.model

    # Values

    def load_tensors(self, name: str, tensors: Mapping[str, Mapping[str, Tensor]], *, partial: bool = False) -> None:
        """Copy tensors of the true rank into an adapter, in place. All are checked first; on an error nothing has changed.

        Args:
            tensors: path -> name -> tensor.
            partial: Whether layers or tensors of the adapter may be missing; they keep their values.

        Raises:
            AdapterError: ``unknown-adapter``, ``tensor-unknown``, ``tensor-missing``, ``tensor-shape``; several are collected.
        """
        record = self._record(name)
        check_tensors(name, {path: (method, self.layers[path].layer) for path, method in record.methods.items()}, tensors, partial=partial)
        for path, given in tensors.items():
            method = record.methods[path]
            self._slots(path, record).write(record.slot, method.rank_on(self.layers[path].layer), given)

    def setting_names(self, name: str) -> list[str]:
        """The settings that an adapter's structure keeps."""
        return sorted(self._structures[self._record(name).structure].settings)

    def settings_of(self, name: str, setting: str) -> dict[str, float]:
        """The value of a setting on each layer of an adapter; empty when the structure doesn't keep it."""
        record = self._record(name)
        if setting not in self._structures[record.structure].settings:
            return {}
        return {path: float(self._slots(path, record).block.setting(setting, record.slot)) for path in record.methods}

    def set_setting(self, name: str, setting: str, value: float | Mapping[str, float]) -> None:
        """Set a setting on all layers of an adapter, or on each by its path; in place, never a recompile.

        Raises:
            AdapterError: ``unknown-adapter``, ``not-finite-value``; ``unknown-setting`` for one that the structure doesn't keep (0 is
                fine: it is without effect anyway).
        """
        record = self._record(name)
        values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(record.methods, float(value))
        for path, number in values.items():
            check_finite(number, f"{setting} of {name!r} on {path}")
            if path not in record.methods:
                raise AdapterError(f"adapter {name!r} is not on {path!r}", code="tensor-unknown")
        kept = self._structures[record.structure].settings
        if setting not in kept:
            if any(values.values()):
                raise unknown_setting(record.structure.name, setting, kept)
            return
        for path, number in values.items():
            self._slots(path, record).set(record.slot, setting, number)

    @contextlib.contextmanager
    def without_randomness(self) -> Iterator[None]:
        """Inside, nothing in the active adapter is drawn at random: every dropout is 0, in place, on the same graph."""
        name = self._active
        if name is None:
            yield
            return
        settings = self._record(name).structure.random_settings
        before = {setting: self.settings_of(name, setting) for setting in sorted(settings)}
        for setting in before:
            self.set_setting(name, setting, 0.0)
        try:
            yield
        finally:
            for setting, values in before.items():
                self.set_setting(name, setting, values)

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

    def _alive(self) -> None:
        if self._surgery.undone:
            raise AdapterError("these adapters were detached from their model", hint="attach new ones", code="detached")

    def _record(self, name: str) -> _Record:
        self._alive()
        if name not in self._records:
            raise unknown_adapter(name, self._records)
        return self._records[name]

    def _active_name(self) -> str:
        if self._active is None:
            raise AdapterError("no adapter is active", hint="name one, or use() one first", code="no-active-adapter")
        return self._active

    def _slots(self, path: str, record: _Record) -> Slots:
        return self.layers[path].structures[record.structure]
