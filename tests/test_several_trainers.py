"""The commands that train, in two processes: the adapter of one process with the whole batch, one voice, one writer, one end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_text
from process_programs import broken, diffusion, language
from processes import free_port, run_in
from tiny_run import Ingredients, assert_same_weights, make_images, make_ingredients, metadata, weights

RUN = ("--max_train_steps=4", "--learning_rate=1e-2", "--optimizer_type=AdamW", "--gradient_accumulation_steps=2", "--noise_offset=0.1")


@pytest.fixture(scope="module")
def ingredients(tmp_path_factory: pytest.TempPathFactory) -> Ingredients:
    """Images of two shapes: every process has to be at the same one."""
    made = make_ingredients(tmp_path_factory.mktemp("ingredients"), num_images=4)
    make_images(made.images / "2_wide", 2, size=(128, 64), seed=1)
    return made


def flags(made: Ingredients, output: Path, batch_size: int, *more: str) -> list[str]:
    buckets = ("--enable_bucket", "--min_bucket_reso=64", "--max_bucket_reso=128", "--bucket_reso_steps=32")
    return made.flags(output, f"--train_batch_size={batch_size}", *buckets, *RUN, *more, size=96)


def distance(left: Path, right: Path) -> float:
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


def test_stable_diffusion_compiled(ingredients: Ingredients, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more = ("--max_train_steps=2", "--learning_rate=1e-2", "--gradient_accumulation_steps=2", "--network_train_unet_only")
    square = ingredients.images.parent / "square"
    make_images(square / "1_thing", 4)
    run_in(1, diffusion, ingredients.flags(one, "--train_batch_size=2", "--dynamo_backend=no", *more, images=square))
    compiled = ("--train_batch_size=1", "--dynamo_backend=aot_eager", "--compile_check=off", *more)
    first, second = run_in(2, diffusion, ingredients.flags(two, *compiled, images=square))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "0 recompiles during training" in first[1]
    assert distance(one / "last.safetensors", two / "last.safetensors") < 1e-3


def test_stable_diffusion(ingredients: Ingredients, tmp_path: Path) -> None:
    one, two, rest = (tmp_path / name / "last.safetensors" for name in ("one", "two", "rest"))
    eager = "--dynamo_backend=no"
    ((status, said, _),) = run_in(1, diffusion, flags(ingredients, one.parent, 2, eager))
    assert status == 0, said
    (first, second) = run_in(2, diffusion, flags(ingredients, two.parent, 1, eager))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    # Adam divides small gradients by their own size: what rounding does to them shows in full
    assert distance(one, two) < 1e-3
    assert "2 x 1" in first[1]
    assert "2 shapes" in first[1]
    assert second[1:] == ("", "")
    assert sorted(path.name for path in two.parent.iterdir()) == ["last.safetensors"]
    assert metadata(two)["ss_total_batch_size"] == metadata(one)["ss_total_batch_size"] == "2"
    # one process with the same small batch is another run
    run_in(1, diffusion, flags(ingredients, tmp_path / "other", 1, eager))
    assert distance(one, tmp_path / "other" / "last.safetensors") > 1e-2
    dropout = "--network_dropout=0.5"
    # a signal to one process ends both after the same step, and both go on where they were
    stopped = run_in(2, diffusion, flags(ingredients, rest.parent, 1, "--save_state", eager, dropout), 2)
    assert [status for status, _, _ in stopped] == [143, 143], stopped
    resume = f"--resume={rest.parent / 'last-state'}"
    assert [found[0] for found in run_in(2, diffusion, flags(ingredients, rest.parent, 1, eager, dropout, resume))] == [0, 0]
    run_in(2, diffusion, flags(ingredients, tmp_path / "whole", 1, eager, dropout))
    assert_same_weights(rest, tmp_path / "whole" / "last.safetensors")
    ((status, _, said),) = run_in(1, diffusion, flags(ingredients, rest.parent, 1, eager, dropout, resume))
    assert status == 2
    assert "another number of processes" in said


@pytest.mark.parametrize(("where", "status", "code"), [("model", 2, "model-not-found"), ("loss", 1, "loss-not-finite")])
def test_what_goes_wrong_in_one_process_ends_both(ingredients: Ingredients, tmp_path: Path, where: str, status: int, code: str) -> None:
    first, second = run_in(2, broken, flags(ingredients, tmp_path, 1, "--dynamo_backend=no"), where)
    assert (first[0], second[0]) == (status, status)
    assert f"[{code}]" in first[2]
    assert second[2].startswith("process 1: error: ")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_language_model(tmp_path: Path) -> None:
    model, rows = tiny_text.write_model(tmp_path / "model"), tiny_text.write_rows(tmp_path / "rows.jsonl", tiny_text.pairs(11))
    more = ("--validation-share", "0.2", "--evaluate-every", "2", "--accumulation", "2", "--backend", "aot_eager")
    ((status, alone, said),) = run_in(1, language, [*tiny_text.flags(model, rows, tmp_path / "one"), "--batch-size", "4", *more])
    assert status == 0, said
    first, second = run_in(2, language, [*tiny_text.flags(model, rows, tmp_path / "two"), "--batch-size", "2", *more])
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert second[1:] == ("", "")
    files = [next((tmp_path / name).rglob("adapter_model.safetensors")) for name in ("one", "two")]
    assert distance(*files) < 1e-3
    assert [line for line in first[1].splitlines() if "held out  " in line] == [line for line in alone.splitlines() if "held out  " in line]


@pytest.mark.slow
def test_the_launcher_of_accelerate(ingredients: Ingredients, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += [f"--main_process_port={free_port()}", "--mixed_precision=no", "--dynamo_backend=no", "-m", "onegraph.train_network"]
    done = subprocess.run(
        [*launch, *flags(ingredients, tmp_path, 1)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished after 4 of 4 steps") == 1
    run_in(1, diffusion, flags(ingredients, tmp_path / "one", 2, "--dynamo_backend=no"))
    assert distance(tmp_path / "last.safetensors", tmp_path / "one" / "last.safetensors") < 1e-3


def test_one_process_where_several_were_asked_for(ingredients: Ingredients, tmp_path: Path) -> None:
    """Without MPI accelerate's launcher starts one process on a CPU, whatever it was told."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    command = [*launch, "--mixed_precision=no", "--dynamo_backend=no", "-m", "onegraph.train_network", *flags(ingredients, tmp_path, 1)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "[launcher-one-process]" in done.stderr
    assert not (tmp_path / "last.safetensors").exists()
