"""What happens between and around the steps: stopping, saving, sampling, numbers that are not finite, what was compiled."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onegraph.training.diffusion import loop, recipe
from tiny_run import Ingredients, assert_same_weights, differ, make_images, make_ingredients, train, weights
from watched_runs import after_step, outcomes_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Ingredients:
    return make_ingredients(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[loop.Outcome]:
    """How each run of this test ended."""
    return outcomes_of(loop.Loop, monkeypatch)


# Signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_can_go_on(
    tiny: Ingredients,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    status: int,
) -> None:
    flags = ["--max_train_steps=6", "--save_state", "--learning_rate=1e-2", "--network_dropout=0.2"]
    assert train(tiny.flags(tmp_path / "straight", *flags)) == 0
    with monkeypatch.context() as patch:
        after_step(loop.Loop, 2, lambda _: os.kill(os.getpid(), number), patch)
        assert train(tiny.flags(tmp_path / "stopped", *flags)) == status
    said = capsys.readouterr()
    assert f"stopped by {number.name} after 2 of 6 steps" in said.out
    assert f"--resume={tmp_path / 'stopped' / 'last-state'}" in said.err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert differ(tmp_path / "straight" / "last.safetensors", tmp_path / "stopped" / "last.safetensors")
    assert train(tiny.flags(tmp_path / "stopped", *flags, f"--resume={tmp_path / 'stopped' / 'last-state'}")) == 0
    assert_same_weights(tmp_path / "straight" / "last.safetensors", tmp_path / "stopped" / "last.safetensors")


def test_a_signal_inside_an_accumulation_window_waits_for_its_end(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--max_train_steps=4", "--gradient_accumulation_steps=4", "--save_state_on_train_end", "--learning_rate=1e-2"]
    assert train(tiny.flags(tmp_path / "straight", *flags)) == 0
    draw = recipe.Recipe.draw
    with monkeypatch.context() as patch:

        def interrupted(self: recipe.Recipe, batch: object, micro_step: int) -> recipe.Draws:
            if micro_step == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return draw(self, batch, micro_step)  # type: ignore[arg-type]

        patch.setattr(recipe.Recipe, "draw", interrupted)
        assert train(tiny.flags(tmp_path / "stopped", *flags)) == 130
    assert train(tiny.flags(tmp_path / "stopped", *flags, f"--resume={tmp_path / 'stopped' / 'last-state'}")) == 0
    assert_same_weights(tmp_path / "straight" / "last.safetensors", tmp_path / "stopped" / "last.safetensors")


@pytest.mark.slow
def test_a_real_process_ends_with_143_on_sigterm(tiny: Ingredients, tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-m", "onegraph.train_network", *tiny.flags(tmp_path, "--max_train_steps=100000")]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step "):
                break
        time.sleep(0.2)
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 143
    assert "SIGTERM" in rest
    assert (tmp_path / "last.safetensors").is_file()


# Numbers that are not finite


def test_a_loss_that_is_not_finite_stops_with_step_and_cause(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_a_layer(self: loop.Loop) -> None:
        with torch.no_grad():
            dict(self.training.recipe.unet.named_parameters())["mid_block.resnets.0.conv1.weight"].fill_(float("inf"))

    after_step(loop.Loop, 2, break_a_layer, monkeypatch)
    assert train(tiny.flags(tmp_path, "--max_train_steps=5", "--save_every_n_steps=2")) == 1
    said = capsys.readouterr().err
    assert "Step 3: the loss is nan" in said
    assert "The first module with a NaN or infinite output is mid_block.resnets.0.conv1 of the UNet." in said
    assert f"The last good file is {tmp_path / 'at-step00000002.safetensors'}" in said
    assert "[loss-not-finite]" in said
    assert [path.name for path in tmp_path.iterdir()] == ["at-step00000002.safetensors"]
    assert all(bool(value.isfinite().all()) for value in weights(tmp_path / "at-step00000002.safetensors").values())


def test_adapters_that_ran_away_are_named(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_away(self: loop.Loop) -> None:
        with torch.no_grad():
            next(iter(self.training.parameters.values())).fill_(float("nan"))

    after_step(loop.Loop, 1, run_away, monkeypatch)
    assert train(tiny.flags(tmp_path, "--max_train_steps=3")) == 1
    assert "The adapters' own weights are not finite any more" in capsys.readouterr().err


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: dict[str, torch.Tensor] = {}
    trainings: list[loop.Training] = []

    def break_a_gradient(self: loop.Loop) -> None:
        parameter = next(value for name, value in self.training.parameters.items() if name.endswith("to_q.up"))
        parameter.register_hook(lambda gradient: gradient * float("nan"))
        kept.update({name: value.detach().clone() for name, value in self.training.parameters.items()})
        trainings.append(self.training)

    after_step(loop.Loop, 1, break_a_gradient, monkeypatch)
    assert train(tiny.flags(tmp_path, "--max_train_steps=3")) == 1
    said = capsys.readouterr().err
    assert re.search(r"Step 2: 1 of \d+ gradients are NaN or infinite; its loss is [\d.]+", said)
    assert "attn1.to_q.up" in said
    assert "[gradient-not-finite]" in said
    assert all(torch.equal(value, kept[name]) for name, value in trainings[0].parameters.items())


# Disks


def test_a_full_disk_keeps_the_old_file(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tiny.flags(tmp_path, "--max_train_steps=1")) == 0
    before = (tmp_path / "last.safetensors").read_bytes()

    def full(data: bytes, path: Path) -> None:
        path.write_bytes(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(importlib.import_module("onegraph.checkpoint.save"), "write_bytes", full)
    assert train(tiny.flags(tmp_path, "--max_train_steps=2")) == 1
    said = capsys.readouterr().err
    assert "The disk is full" in said
    assert str(tmp_path / "last.safetensors") in said
    assert [path.name for path in tmp_path.iterdir()] == ["last.safetensors"]
    assert (tmp_path / "last.safetensors").read_bytes() == before


# Samples


def test_samples_change_no_weight(tiny: Ingredients, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a thing --s 1 --d 5\nanother thing --w 64 --h 72 --s 1\n")
    flags = ["--max_train_steps=4", "--network_dropout=0.3", "--learning_rate=1e-2", "--output_name=cat"]
    samples = [f"--sample_prompts={prompts}", "--sample_every_n_steps=2", "--sample_at_first"]
    assert train(tiny.flags(tmp_path / "without", *flags)) == 0
    assert train(tiny.flags(tmp_path / "with", *flags, *samples)) == 0
    assert_same_weights(tmp_path / "without" / "cat.safetensors", tmp_path / "with" / "cat.safetensors")
    assert sorted(path.name for path in (tmp_path / "with" / "sample").iterdir()) == [
        f"cat_{step:06d}_{number:02d}_{seed}.png" for step in (0, 2, 4) for number, seed in ((0, 5), (1, 3))
    ]


@pytest.mark.slow
def test_samples_recompile_nothing(tiny: Ingredients, tmp_path: Path, outcomes: list[loop.Outcome]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a thing --w 72 --h 64 --s 1\n")
    samples = [f"--sample_prompts={prompts}", "--sample_every_n_epochs=1"]
    assert train(tiny.flags(tmp_path, "--dynamo_backend=eager", "--max_train_epochs=2", *samples)) == 0
    assert outcomes[0].recompiles == []
    assert len(outcomes[0].samples) == 2


# What was compiled


@pytest.mark.slow
def test_a_recompile_is_shown_with_its_cause(
    tiny: Ingredients, tmp_path: Path, outcomes: list[loop.Outcome], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = recipe.Recipe.draw

    def smaller(self: recipe.Recipe, batch: dict[str, torch.Tensor], micro_step: int) -> recipe.Draws:
        changed = {**batch, "latents": batch["latents"][:, :, :4]} if micro_step == 2 else batch
        return draw(self, changed, micro_step)  # type: ignore[arg-type]

    monkeypatch.setattr(recipe.Recipe, "draw", smaller)
    assert train(tiny.flags(tmp_path, "--dynamo_backend=eager", "--max_train_steps=4")) == 0
    said = capsys.readouterr().err
    assert outcomes[0].recompiles
    assert all(text.startswith("recompiled in step 3: ") for text in outcomes[0].recompiles)
    assert outcomes[0].recompiles[0].splitlines()[0] in said


@pytest.mark.slow
@pytest.mark.parametrize("check", ["start", "strict"])
def test_every_size_is_compiled_before_the_first_step(
    tiny: Ingredients, tmp_path: Path, outcomes: list[loop.Outcome], capsys: pytest.CaptureFixture[str], check: str
) -> None:
    images = tmp_path / "images"
    make_images(images / "1_wide", 2, size=(128, 64))
    make_images(images / "1_tall", 2, size=(64, 128))
    buckets = ["--enable_bucket", "--min_bucket_reso=64", "--max_bucket_reso=128", f"--compile_check={check}"]
    assert train(tiny.flags(tmp_path / "out", "--dynamo_backend=eager", "--max_train_epochs=1", *buckets, size=96, images=images)) == 0
    said = capsys.readouterr().out
    assert "2 image sizes" in said
    assert said.count("compiled and eager agree") == {"start": 1, "strict": 2}[check]
    assert outcomes[0].recompiles == []


@pytest.mark.slow
def test_the_check_and_the_compilation_change_nothing(tiny: Ingredients, tmp_path: Path) -> None:
    flags = ["--max_train_steps=3", "--network_dropout=0.3", "--learning_rate=1e-2"]
    assert train(tiny.flags(tmp_path / "eager", *flags)) == 0
    assert train(tiny.flags(tmp_path / "compiled", *flags, "--dynamo_backend=eager", "--compile_check=strict")) == 0
    assert_same_weights(tmp_path / "eager" / "last.safetensors", tmp_path / "compiled" / "last.safetensors")


class Doubled(torch.autograd.Function):
    """The right value and twice the right gradient: what only a comparison of gradients finds."""

    @staticmethod
    def forward(context: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def doubling(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    return lambda *values: tuple(Doubled.apply(value) if value.requires_grad else value for value in graph(*values))


@pytest.mark.slow
@pytest.mark.parametrize(("check", "status"), [("start", 1), ("off", 0)])
def test_wrong_gradients_stop_the_run_before_the_first_step(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], check: str, status: int
) -> None:
    doubling._tags = ()  # type: ignore[attr-defined]
    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "doubling", None)
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "doubling", doubling)
    flags = ["--dynamo_backend=doubling", f"--compile_check={check}", "--max_train_steps=2"]
    assert train(tiny.flags(tmp_path, *flags)) == status
    said = capsys.readouterr()
    assert ("compiled-differs-from-eager" in said.err) == (status == 1)
    assert ("gradients are wrong" in said.err) == (status == 1)
    assert (tmp_path / "last.safetensors").exists() == (status == 0)
