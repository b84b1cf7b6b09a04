"""The matrix as a page and as JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from matrix.features import FEATURES
from onegraph.methods import METHODS

Results = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Method -> feature, mode -> library -> record."""

_SIGNS = {"pass": "✓", "recompiles": "↻", "fail": "✗", "none": "–"}
_NAMES = {"onegraph": "onegraph", "peft": "PEFT 0.21.2"}


def write(new: Results, seconds: float, page: Path, data: Path) -> None:
    """Write both: what is new, in what was there."""
    before = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
    results: Results = before.get("cells", {})
    for method, cells in new.items():
        for key, libraries in cells.items():
            results.setdefault(method, {}).setdefault(key, {}).update(libraries)
    keys = [f"{feature}, {mode}" if mode else feature for feature, modes in FEATURES.items() for mode in modes]
    not_run = {library: {"verdict": "none", "missing": "not run"} for library in _NAMES}
    results = {
        method: {key: {**not_run, **results[method][key]} for key in keys if key in results[method]}
        for method in METHODS
        if method in results
    }
    head = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": "aot_eager",
        "seconds": {**before.get("seconds", {}), **{method: round(seconds) for method in new}},
    }
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps({**head, "cells": results}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(markdown(results, head), encoding="utf-8")


def markdown(results: Results, head: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# Every method, every feature",
        "",
        f"Written by `bash scripts/matrix` (torch {head['torch']}, backend aot_eager, float32, two small blocks and a head).",
        "Each cell was run, not looked up: every output and gradient is compared with that of a freshly built eager model that holds",
        "this one adapter, and Watch counts what was compiled.",
        "",
        "- ✓ right, on the graphs that were there",
        "- ↻ right, but it compiled again or broke the graph",
        "- ✗ wrong, or an error",
        "- – nothing to measure, with the reason below",
        "",
    ]
    for library, title in _NAMES.items():
        counts = dict.fromkeys(_SIGNS, 0)
        for cells in results.values():
            for cell in cells.values():
                counts[cell[library]["verdict"]] += 1
        lines += [f"## {title}", ""]
        own = [cell[library] for cells in results.values() for cell in cells.values()]
        totals = {key: sum(record.get(key, 0) for record in own) for key in ("breaks", "recompiles")}
        signs = ", ".join(f"{count} {_SIGNS[verdict]}" for verdict, count in counts.items())
        allowed = sum(min(record.get("recompiles", 0), record["allowed"]) for record in own if "allowed" in record)
        lines += [
            f"{signs}; {totals['breaks']} graph breaks, {totals['recompiles'] - allowed} recompilations that weren't part of the work",
            "",
        ]
        lines += _grid(results, library)
    lines += [
        "## Figures",
        "",
        "Errors are the largest difference over the largest element: of the output / of the gradients. Then graphs captured, graph breaks,",
        "recompilations.",
        "",
    ]
    for method, cells in results.items():
        lines += [f"### {method}", "", "| feature | mode | onegraph | | PEFT | |", "| --- | --- | --- | --- | --- | --- |"]
        for key, cell in cells.items():
            feature, _, mode = key.partition(", ")
            own = " | ".join(_shown(cell[library]) for library in _NAMES)
            lines.append(f"| {feature} | {mode} | {own} |")
        lines.append("")
    return "\n".join(lines)


def _grid(results: Results, library: str) -> list[str]:
    lines = [f"| | {' | '.join(results)} |", f"| --- |{' --- |' * len(results)}"]
    for feature, modes in FEATURES.items():
        keys = [f"{feature}, {mode}" if mode else feature for mode in modes]
        if not any(key in cells for cells in results.values() for key in keys):
            continue
        signs = []
        for cells in results.values():
            found = [_SIGNS[cells[key][library]["verdict"]] for key in keys if key in cells]
            signs.append(found[0] if len(set(found)) == 1 else "/".join(found))
        lines.append(f"| {feature} | {' | '.join(signs)} |")
    return [*lines, ""]


def _shown(record: dict[str, Any]) -> str:
    """Sign | figures and what there is to say."""
    parts = []
    errors = [f"{record[key]:.0e}" if record[key] else "0" for key in ("output_error", "gradient_error") if key in record]
    if errors:
        parts.append(" / ".join(errors))
    if "graphs" in record:
        parts.append(f"{record['graphs']} graphs, {record['breaks']} breaks, {record['recompiles']} recompiles")
    parts += [_escaped(record[key]) for key in ("error", "missing", "note") if key in record]
    return f"{_SIGNS[record['verdict']]} | {'; '.join(parts)}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
