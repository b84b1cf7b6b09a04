"""AdaLoRA in ``onegraph train text``: ranks are taken away on schedule, in the same graphs, and a resumed run goes on with them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onegraph.methods import RankAllocator
from onegraph.training.text import loop
from onegraph.training.text.saving import NATIVE_NAME
from tiny_text import flags, pairs, train, weights, write_model, write_rows
from watched_runs import after_step, outcomes_of

METHOD = ["--method", "adalora", "--method-arguments", "rank=4", "--targets", "q_proj", "v_proj", "--steps", "8"]
BUDGET = [word for pair in ("target_rank=2", "warm_up_steps=1", "final_steps=2") for word in ("--set", f"allocation.{pair}")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", pairs(12))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[loop.Outcome]:
    """How each run of this test ended."""
    return outcomes_of(loop.Loop, monkeypatch)


def distance_from_orthogonal(folder: Path) -> float:
    factors = [value for name, value in load_file(folder / NATIVE_NAME).items() if name.endswith("down")]
    return sum(float((value @ value.t() - torch.eye(len(value))).norm()) for value in factors)


def test_ranks_fall_in_the_same_graphs_and_the_factors_become_orthogonal(
    model: Path, rows: Path, tmp_path: Path, outcomes: list[loop.Outcome]
) -> None:
    compiled = flags(model, rows, tmp_path / "out", *METHOD, *BUDGET, "--set", "data.num_widths=1")
    compiled[compiled.index("--backend") + 1] = "eager"
    assert train(compiled) == 0
    assert outcomes[0].recompiles == []
    record = json.loads((tmp_path / "out" / "adapter" / "training.json").read_text())
    assert sum(record["ranks"].values()) == 2 * len(record["ranks"]) == 8  # of 16
    singular = {name: value for name, value in weights(tmp_path / "out" / "adapter").items() if "lora_E" in name}
    left = {name: int(value.count_nonzero()) for name, value in singular.items()}
    assert left == {f"base_model.model.{path}.lora_E": count for path, count in record["ranks"].items()}
    assert train(flags(model, rows, tmp_path / "whole", *METHOD, "--set", "allocation.orthogonality=0")) == 0
    whole = [value for name, value in weights(tmp_path / "whole" / "adapter").items() if "lora_E" in name]
    assert all(bool(value.all()) for value in whole)
    assert distance_from_orthogonal(tmp_path / "out" / "adapter") < 0.9 * distance_from_orthogonal(tmp_path / "whole" / "adapter")


def test_a_resumed_run_takes_the_same_ranks_away(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[loop.Outcome]
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert train(flags(model, rows, straight, *METHOD, *BUDGET)) == 0
    with monkeypatch.context() as patch:
        after_step(loop.Loop, 5, lambda _: os.kill(os.getpid(), signal.SIGTERM), patch)
        assert train(flags(model, rows, stopped, *METHOD, *BUDGET)) == 128 + signal.SIGTERM
    resume = flags(model, rows, stopped, *METHOD, *BUDGET, "--resume", str(stopped / "adapter-state"))
    expected = weights(straight / "adapter")
    assert train(resume) == 0
    found = weights(stopped / "adapter")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # the comparison can fail: without what the allocator knew, other triplets go
    monkeypatch.setattr(RankAllocator, "load_state_dict", lambda allocator, state: None)
    assert train(resume) == 0
    assert any(not torch.equal(weights(stopped / "adapter")[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--method", "lora"], "contradiction"),
        (["--set", "allocation.target_rank=5"], "budget-target"),
        (["--set", "allocation.warm_up_steps=6"], "budget-phases"),
        (["--set", "allocation.beta1=1"], "bad-value"),
    ],
)
def test_what_does_not_go_together(
    model: Path, rows: Path, tmp_path: Path, more: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags(model, rows, tmp_path / "out", *METHOD, *BUDGET, *more)
    assert train(given) == 2
    assert f"[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter").exists()
