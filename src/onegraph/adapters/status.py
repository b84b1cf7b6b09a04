"""How the adapters of a model stand, as a table to read at any time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.plan import PlanEntry, aligned
from onegraph.adapters.records import Record

_HEADER = ("adapter", "state", "methods", "ranks", "layers", "parameters", "strength")


def status(
    records: Mapping[str, Record],
    layers: Mapping[str, Adapted],
    *,
    active: str | None,
    merged: Collection[str],
    rows: Collection[str | None],
) -> str:
    """A line for each adapter. ``strength`` is what ``scale`` was given, or how far it goes from layer to layer.

    Args:
        active: The adapter that runs where there are no rows.
        merged: Those that are in the weights.
        rows: Those that a batch has, in ``rows``.
    """
    if not records:
        return "no adapter: the base model"
    lines = [_HEADER]
    for name, record in records.items():
        state = "merged" if name in merged else "in rows" if name in rows else "active" if name == active and not rows else ""
        entries = [PlanEntry(path, layers[path].layer, method) for path, method in record.methods.items()]
        shared = [spec for method in record.shared().values() for spec in method.shared_parameters().values() if spec.trained]
        count = sum(entry.num_parameters for entry in entries) + sum(math.prod(spec.shape) for spec in shared)
        methods = ", ".join(dict.fromkeys(entry.method.name for entry in entries))
        ranks = _range([entry.rank for entry in entries if entry.rank is not None])
        lines.append((name, state, methods, ranks, str(len(entries)), f"{count:,}", _range(_strengths(record, layers))))
    return aligned(lines, right={4, 5, 6})


def _strengths(record: Record, layers: Mapping[str, Adapted]) -> list[float]:
    """The present strength on each layer, over the one it was trained with."""
    found = []
    for path, method in record.methods.items():
        trained = method.settings(layers[path].layer)["scale"]
        structure = record.structures[path]
        present = float(layers[path].structures[structure].block.setting("scale", record.slots[structure]))
        if trained:
            found.append(present / trained)
    return found


def _range(values: Collection[float]) -> str:
    shown = [f"{value:.4g}" for value in ([min(values), max(values)] if values else [])]
    return " to ".join(dict.fromkeys(shown)) or "-"
