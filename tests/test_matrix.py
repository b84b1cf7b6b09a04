"""The matrix leaves nothing out, and a cell that is wrong can't look right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("peft")

from matrix import ours_files, report, theirs  # noqa: E402 - the path comes first
from matrix.__main__ import run_cell  # noqa: E402
from matrix.features import FEATURES  # noqa: E402
from matrix.ours import FEATURES as OURS  # noqa: E402
from matrix.session import Ours, Session, randomise  # noqa: E402
from matrix.work import CASES, Cell, NoSuchFeatureError, case_of, difference  # noqa: E402


def test_every_method_and_feature_has_a_cell() -> None:
    assert CASES.keys() == METHODS.keys()
    assert OURS.keys() == FEATURES.keys() == theirs.FEATURES.keys() | theirs.MISSING.keys()
    assert not theirs.FEATURES.keys() & theirs.MISSING.keys()
    assert all(case.peft is not None or case.no_peft for case in CASES.values())


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (Cell(output_error=1e-6, gradient_error=1e-6, graphs=1, breaks=0, recompiles=0), "pass"),
        (Cell(output_error=0.1), "fail"),
        (Cell(output_error=0.0, gradient_error=0.1), "fail"),
        (Cell(output_error=0.0, breaks=1, recompiles=0), "recompiles"),
        (Cell(output_error=0.0, breaks=0, recompiles=2, allowed=1), "recompiles"),
        (Cell(output_error=0.0, breaks=0, recompiles=1, allowed=1), "pass"),
        (Cell(error="RuntimeError: no"), "fail"),
        (Cell(missing="no such feature"), "none"),
    ],
    ids=str,
)
def test_verdicts(cell: Cell, verdict: str) -> None:
    assert cell.verdict == cell.record["verdict"] == verdict


def test_not_a_number_is_wrong() -> None:
    cell = Cell()
    cell.see(difference(torch.tensor([float("nan")]), torch.ones(1)))
    assert cell.verdict == "fail"


@pytest.mark.parametrize("library", [theirs.Theirs, lambda case: Ours(case, OURS)], ids=["PEFT", "onegraph"])
def test_an_error_is_a_failed_cell(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runner: object, cell: Cell, mode: str) -> None:
        raise RuntimeError("the first line\nthe second")

    def absent(runner: object, cell: Cell, mode: str) -> None:
        raise NoSuchFeatureError("not here")

    runner = library(case_of("lora"))
    for table in (OURS, theirs.FEATURES):
        monkeypatch.setitem(table, "use", broken)
        monkeypatch.setitem(table, "scale", absent)
    assert run_cell(runner, "use", "train").record["error"] == "RuntimeError: the first line"
    assert run_cell(runner, "scale", "train").record == {"verdict": "none", "allowed": 0, "missing": "not here"}


def test_a_cell_sees_another_adapters_values() -> None:
    """The control: the session, eager, right and then with the values of another adapter."""
    session = Session(case_of("lora"))
    right, wrong = Cell(), Cell()
    session.compare(right, "a", "train")
    assert right.verdict == "pass"
    assert right.gradient_error is not None
    randomise(session.adapters, "a", 99)
    session.compare(wrong, "a", "train")
    assert wrong.verdict == "fail"
    with pytest.raises(AssertionError, match="has changed"):
        session.untouched("a")


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_files_and_copies(method: str) -> None:
    runner = Ours(case_of(method), OURS)
    runner._session = Session(case_of(method))
    for feature in (ours_files.copies, ours_files.state_dict, ours_files.native_file):
        cell = Cell()
        feature(runner, cell, "")
        assert cell.verdict == "pass", (feature, cell)


def test_the_page_is_what_the_cells_say(tmp_path: Path) -> None:
    page, data = tmp_path / "matrix.md", tmp_path / "matrix.json"
    good = Cell(output_error=1e-7, graphs=1, breaks=0, recompiles=0).record
    report.write({"lora": {"use, train": {"onegraph": good}}}, 1.0, page, data)
    report.write(
        {"lora": {"use, train": {"peft": Cell(error="KeyError: a | b").record}}, "ia3": {"file": {"onegraph": good}}}, 2.0, page, data
    )
    cells = json.loads(data.read_text(encoding="utf-8"))["cells"]
    assert cells["lora"]["use, train"]["onegraph"] == good
    assert cells["ia3"]["file"]["peft"]["missing"] == "not run"
    text = page.read_text(encoding="utf-8")
    assert "| use | train | ✓ | 1e-07; 1 graphs, 0 breaks, 0 recompiles | ✗ | KeyError: a \\| b |" in text
