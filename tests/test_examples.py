"""The programs in examples/ run, their losses fall, and what they save is an adapter."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from onegraph.compiling import Watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
]


def example(root: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", root / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("adapter"))


def test_plain_loop(root: Path, tmp_path: Path) -> None:
    with Watch() as watch:
        losses = example(root, "plain_loop").main(["--backend", "eager", "--steps", "12", "--output", str(tmp_path)])
    assert losses[-1] < losses[0] - 0.1
    assert watch.graphs == 2  # the first block's input needs no gradient
    assert saved(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]


def test_accelerate_loop(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with Watch() as watch:
        losses = example(root, "accelerate_loop").main(["--steps", "16", "--output", str(tmp_path)])
    assert torch.accelerator.is_available() or PartialState()._cpu  # else two processes would train an adapter each
    assert losses[-1] < losses[0] - 0.1
    assert watch.graphs == 2
    assert saved(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]


def test_trainer(root: Path, tmp_path: Path) -> None:
    module = example(root, "trainer")
    first = module.main(["--backend", "eager", "--steps", "8", "--output", str(tmp_path)])
    shutil.rmtree(tmp_path / "checkpoint-8")  # as if it had been stopped before
    again = module.main(["--backend", "eager", "--steps", "8", "--output", str(tmp_path), "--resume"])
    entries = [[entry for entry in trainer.state.log_history if "loss" in entry] for trainer in (first, again)]
    assert entries[1] == entries[0]
    assert entries[0][-1]["loss"] < entries[0][0]["loss"] - 0.1
    assert saved(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]


def test_sft(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    with Watch() as watch:
        trainer = example(root, "sft").main(["--backend", "eager", "--steps", "6", "--output", str(tmp_path)])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    assert 0 < watch.graphs <= 2, watch.compilations
    assert saved(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]
    assert torch.isfinite(torch.tensor(losses)).all()
