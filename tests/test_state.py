"""States: written whole or not at all, read back exactly, refused where the rest of the run would be another run."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from onegraph.errors import CheckpointError, ConfigurationError, OutputError
from onegraph.training.diffusion.configuration import (
    OptimizerSettings,
    RunSettings,
    SavingSettings,
    ScheduleSettings,
    TrainingConfiguration,
)
from onegraph.training.diffusion.resuming import FREEDOM
from onegraph.training.state import (
    Position,
    SavedState,
    check_fingerprints,
    check_resumable,
    random_states,
    read_state,
    restore,
    restore_random_states,
    save_state,
    write_folder,
)

CONFIGURATION = TrainingConfiguration(run=RunSettings(max_train_steps=20), saving=SavingSettings(output_dir="a"))
POSITION = Position(step=3, epoch=1, batch=2, micro_step=6)


class Run:
    """Two parameters with an AdamW and a cosine schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parameters = {f"unet.{name}": torch.nn.Parameter(torch.randn(3, 4)) for name in ("down", "up")}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.training = {"optimizer": self.optimizer, "schedule": self.schedule}

    def steps(self, count: int) -> None:
        for _ in range(count):
            sum((value * torch.rand(())).square().sum() for value in self.parameters.values()).backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path, configuration: TrainingConfiguration = CONFIGURATION) -> SavedState[TrainingConfiguration]:
        save_state(
            folder,
            position=POSITION,
            configuration=configuration,
            seed=5,
            fingerprints={"base model": "aa", "data set": "bb"},
            parameters=self.parameters,
            training=self.training,
            losses=[0.5, 0.25],
        )
        return read_state(folder, TrainingConfiguration)


@pytest.fixture
def saved(tmp_path: Path) -> SavedState[TrainingConfiguration]:
    run = Run()
    run.steps(3)
    return run.save(tmp_path / "x-state")


def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = Run()
    straight.steps(3)
    saved = straight.save(tmp_path / "x-state")
    straight.steps(4)

    resumed = Run()
    torch.manual_seed(99)
    restore(saved, parameters=resumed.parameters, training=resumed.training)
    resumed.steps(4)
    for name, value in straight.parameters.items():
        assert torch.equal(value, resumed.parameters[name])
    assert resumed.schedule.get_last_lr() == straight.schedule.get_last_lr()

    without = Run()
    without.steps(4)
    assert not torch.equal(without.parameters["unet.up"], straight.parameters["unet.up"])


def test_state_json_says_where_the_run_stands(saved: SavedState[TrainingConfiguration]) -> None:
    assert saved.position == POSITION
    assert saved.seed == 5
    assert list(saved.losses) == [0.5, 0.25]
    assert saved.configuration == CONFIGURATION


def test_every_global_generator_is_put_back() -> None:
    states = random_states()
    before = (torch.rand(3).tolist(), random.random(), random.gauss(), numpy.random.rand(3).tolist())
    restore_random_states(states)
    assert (torch.rand(3).tolist(), random.random(), random.gauss(), numpy.random.rand(3).tolist()) == before


def test_replacing_a_state_leaves_one_folder(saved: SavedState[TrainingConfiguration]) -> None:
    run = Run()
    run.steps(1)
    run.save(saved.folder)
    assert [path.name for path in saved.folder.parent.iterdir()] == ["x-state"]


def _fail_with_full_disk(folder: Path) -> None:
    (folder / "half").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def _fail_as_torch_does(folder: Path) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


def _fail_as_torch_does_at_the_end(folder: Path) -> None:
    raise RuntimeError("basic_ios::clear: iostream error")


@pytest.mark.parametrize("write", [_fail_with_full_disk, _fail_as_torch_does, _fail_as_torch_does_at_the_end])
def test_full_disk_keeps_the_old_state(saved: SavedState[TrainingConfiguration], write: Callable[[Path], None]) -> None:
    with pytest.raises(OutputError) as caught:
        write_folder(saved.folder, write)
    assert caught.value.code == "state-not-written"
    assert [path.name for path in saved.folder.parent.iterdir()] == ["x-state"]
    assert read_state(saved.folder, TrainingConfiguration).position == POSITION


def test_errors_that_are_no_full_disk_pass_through(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        write_folder(tmp_path / "x-state", write)
    assert not list(tmp_path.iterdir())


def test_killed_while_writing_leaves_no_half_state(saved: SavedState[TrainingConfiguration]) -> None:
    program = f"""
import os, signal
from pathlib import Path
from onegraph.training.state import write_folder
def write(folder):
    (folder / "state.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
write_folder(Path({str(saved.folder)!r}), write)
"""
    source = Path(__file__).parents[1] / "src"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(source)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_state(saved.folder, TrainingConfiguration).position == POSITION
    assert len(list(saved.folder.parent.iterdir())) == 2

    Run().save(saved.folder)
    assert [path.name for path in saved.folder.parent.iterdir()] == ["x-state"]


def test_killed_between_the_two_renames_keeps_the_old_state(saved: SavedState[TrainingConfiguration]) -> None:
    saved.folder.rename(saved.folder.with_name(".x-state.old"))
    with pytest.raises(CheckpointError) as caught:
        read_state(saved.folder, TrainingConfiguration)
    assert ".x-state.old" in caught.value.hint
    with pytest.raises(OutputError):
        write_folder(saved.folder, _fail_with_full_disk)
    assert read_state(saved.folder, TrainingConfiguration).position == POSITION


def test_missing_state_names_the_ones_beside_it(saved: SavedState[TrainingConfiguration]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_state(saved.folder.parent / "y-state", TrainingConfiguration)
    assert caught.value.code == "state-not-found"
    assert "x-state" in caught.value.hint


def test_half_a_state_is_refused(saved: SavedState[TrainingConfiguration]) -> None:
    (saved.folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_state(saved.folder, TrainingConfiguration)
    assert caught.value.code == "state-incomplete"
    assert "optimizer.pt" in str(caught.value)


def test_damaged_tensors_are_refused(saved: SavedState[TrainingConfiguration]) -> None:
    (saved.folder / "optimizer.pt").write_bytes(b"nothing")
    run = Run()
    with pytest.raises(CheckpointError) as caught:
        restore(saved, parameters=run.parameters, training=run.training)
    assert caught.value.code == "state-incomplete"


def test_another_format_is_refused(saved: SavedState[TrainingConfiguration]) -> None:
    record = json.loads((saved.folder / "state.json").read_text())
    (saved.folder / "state.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(CheckpointError) as caught:
        read_state(saved.folder, TrainingConfiguration)
    assert caught.value.code == "state-format"


@pytest.mark.parametrize(
    "change", [{"position": {"step": "3"}}, {"fingerprints": 3}, {"losses": "many"}, {"notes": 7}, {"position": []}], ids=str
)
def test_a_record_with_odd_values_is_refused(saved: SavedState[TrainingConfiguration], change: dict[str, object]) -> None:
    record = json.loads((saved.folder / "state.json").read_text())
    (saved.folder / "state.json").write_text(json.dumps(record | change))
    with pytest.raises(CheckpointError) as caught:
        read_state(saved.folder, TrainingConfiguration)
    assert caught.value.code == "state-format"


@pytest.mark.parametrize("name", ["optimizer.pt", "random.pt"])
def test_tensors_of_something_else_are_refused(saved: SavedState[TrainingConfiguration], name: str) -> None:
    odd = {"optimizer": {"state": {}, "param_groups": []}, "schedule": {}} if name == "optimizer.pt" else {"other": 1}
    torch.save(odd, saved.folder / name)
    run = Run()
    with pytest.raises(CheckpointError) as caught:
        restore(saved, parameters=run.parameters, training=run.training)
    assert caught.value.code == "state-differs"


def test_other_parameters_are_refused(saved: SavedState[TrainingConfiguration]) -> None:
    run = Run()
    run.parameters["unet.more"] = run.parameters.pop("unet.down")
    with pytest.raises(CheckpointError) as caught:
        restore(saved, parameters=run.parameters, training=run.training)
    assert caught.value.code == "state-differs"
    assert "unet.down" in str(caught.value)
    assert "unet.more" in str(caught.value)


def test_settings_that_change_the_rest_of_the_run_are_all_named(saved: SavedState[TrainingConfiguration]) -> None:
    now = replace(CONFIGURATION, optimizer=OptimizerSettings(name="Lion", learning_rate=0.1), run=replace(CONFIGURATION.run, seed=6))
    with pytest.raises(ConfigurationError) as caught:
        check_resumable(saved, now, FREEDOM)
    assert caught.value.code == "resume-differs"
    for path in ("optimizer.name", "optimizer.learning_rate", "run.seed"):
        assert path in str(caught.value)


def test_settings_that_change_no_weight_are_listed(saved: SavedState[TrainingConfiguration]) -> None:
    now = replace(CONFIGURATION, saving=SavingSettings(output_dir="b"), run=replace(CONFIGURATION.run, seed=5, resume="here"))
    assert check_resumable(saved, now, FREEDOM) == ["saving.output_dir: 'a' in the state, 'b' now"]


def test_a_longer_run_needs_a_schedule_without_a_length(tmp_path: Path) -> None:
    longer = replace(CONFIGURATION, run=RunSettings(max_train_steps=40))
    assert len(check_resumable(Run().save(tmp_path / "constant-state"), longer, FREEDOM)) == 1

    cosine = replace(CONFIGURATION, schedule=ScheduleSettings(name="cosine"))
    with pytest.raises(ConfigurationError) as caught:
        check_resumable(Run().save(tmp_path / "cosine-state", cosine), replace(longer, schedule=cosine.schedule), FREEDOM)
    assert "max_train_steps" in str(caught.value)


def test_another_base_model_is_refused(saved: SavedState[TrainingConfiguration]) -> None:
    check_fingerprints(saved, {"base model": "aa", "data set": "bb"}, FREEDOM)
    with pytest.raises(ConfigurationError) as caught:
        check_fingerprints(saved, {"base model": "zz", "data set": "bb"}, FREEDOM)
    assert "base model" in str(caught.value)
    assert "data set" not in str(caught.value)
