"""Runs the matrix: method x feature x mode, for both libraries. A cell that raises is a failed cell, never the end.

bash scripts/matrix                                      all of it; writes docs/matrix.md and docs/results/matrix.json
bash scripts/matrix --methods lora,dora --features rows  a part of it, merged into what was written before
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from matrix import report
from matrix.features import FEATURES
from matrix.ours import FEATURES as OURS
from matrix.session import Ours
from matrix.theirs import Theirs
from matrix.work import Cell, NoSuchFeatureError, case_of, first_line
from onegraph.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGE, DATA = ROOT / "docs" / "matrix.md", ROOT / "docs" / "results" / "matrix.json"


def run_cell(library: Any, feature: str, mode: str) -> Cell:
    """One cell; whatever it raises is what it says."""
    torch.manual_seed(0)
    try:
        cell: Cell = library.run(feature, mode)
    except NoSuchFeatureError as reason:
        return Cell(missing=str(reason))
    except Exception as error:
        cell = Cell(error=first_line(error))
    if cell.verdict != "pass":
        library.forget()
    return cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/matrix", description="Method x feature x mode, for onegraph and PEFT on the same work.")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma separated; all of them when omitted")
    parser.add_argument("--features", default=",".join(FEATURES), help="comma separated; all of them when omitted")
    parser.add_argument("--libraries", default="onegraph,peft", help="onegraph, peft or both; what isn't run keeps its earlier cells")
    given = parser.parse_args()
    methods, features, libraries = (value.split(",") for value in (given.methods, given.features, given.libraries))
    unknown = [name for name in methods if name not in METHODS] + [name for name in features if name not in FEATURES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}. Methods: {', '.join(METHODS)}. Features: {', '.join(FEATURES)}")
    logging.getLogger("onegraph").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    failed = 0
    for name in methods:
        case, started = case_of(name), time.perf_counter()
        results: dict[str, dict[str, dict[str, Any]]] = {}
        # One library after the other: what one compiles would be lost when the other begins anew.
        for library, runner in (("onegraph", Ours(case, OURS)), ("peft", Theirs(case))):
            for feature in features if library in libraries else ():
                for mode in FEATURES[feature]:
                    key = f"{feature}, {mode}" if mode else feature
                    cell = run_cell(runner, feature, mode)
                    results.setdefault(key, {})[library] = cell.record
                    if library == "onegraph" and cell.verdict not in {"pass", "none"}:
                        failed += 1
                        print(f"  {name}, {key}: {cell.verdict}: {cell.error or cell.record}", flush=True)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        report.write({name: results}, time.perf_counter() - started, PAGE, DATA)
    print(f"{PAGE.relative_to(ROOT)} and {DATA.relative_to(ROOT)}: {failed} cells of onegraph aren't a pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
