"""The command end to end, in miniature: files, states, resuming, stopping, samples, mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_processor import Attention
from PIL import Image
from torch.utils._pytree import tree_leaves

from onegraph.training.diffusion import loop
from onegraph.training.update import Update
from tiny_run import Ingredients, assert_same_weights, differ, make_images, make_ingredients, metadata, train, weights
from watched_runs import outcomes_of

LOADER = "onegraph.training.diffusion.preparation.load_base_model"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Ingredients:
    return make_ingredients(tmp_path_factory.mktemp("tiny"))


# What a run writes


def test_a_run_writes_a_network_that_changed(tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tiny.flags(tmp_path, "--max_train_steps=3", "--save_precision=fp16", "--clip_skip=2", "--network_dim=2")) == 0
    found = weights(tmp_path / "last.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float16}
    assert any(key.startswith("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q.") for key in found)
    assert any(key.startswith("lora_te_text_model_encoder_layers_0_self_attn_q_proj.") for key in found)
    ups = {key: value for key, value in found.items() if "lora_up" in key}
    trained = [key for key in ups if key.startswith("lora_unet_") or "_layers_0_" in key]
    assert all(bool(ups[key].any()) for key in trained)
    # clip_skip=2 leaves out the last of the two layers: its adapter stays the identity
    assert not any(bool(ups[key].any()) for key in ups if "_layers_1_" in key)
    strings = metadata(tmp_path / "last.safetensors")
    assert strings["ss_steps"] == "3"
    assert strings["ss_seed"] == "3"
    assert strings["ss_network_dim"] == "2"
    assert strings["ss_num_train_images"] == "6"
    assert json.loads(strings["ss_tag_frequency"])["1_thing"]["blue"] == 6
    assert re.fullmatch("[0-9a-f]{64}", strings["sshs_model_hash"])
    said = capsys.readouterr()
    assert "nothing is compiled" in said.out
    assert "layers, rank 2, " in said.out
    assert "(1 epoch of 6 batches of 1)" in said.out
    assert str(tmp_path / "last.safetensors") in said.out
    assert "step 1/3" in said.err
    assert "step 3/3" in said.err


def test_names_and_what_is_kept(tiny: Ingredients, tmp_path: Path) -> None:
    flags = ["--output_name=cat", "--save_every_n_steps=2", "--save_last_n_steps=3", "--save_every_n_epochs=1", "--save_state"]
    assert train(tiny.flags(tmp_path, "--max_train_epochs=2", *flags)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cat-000001-state",
        "cat-000001.safetensors",
        "cat-state",
        "cat-step00000010-state",
        "cat-step00000010.safetensors",
        "cat-step00000012-state",
        "cat-step00000012.safetensors",
        "cat.safetensors",
    ]
    assert metadata(tmp_path / "cat-000001.safetensors")["ss_epoch"] == "1"
    assert metadata(tmp_path / "cat.safetensors")["ss_epoch"] == "2"


def test_no_metadata_and_another_seed(tiny: Ingredients, tmp_path: Path) -> None:
    assert train(tiny.flags(tmp_path / "a", "--max_train_steps=2", "--no_metadata")) == 0
    assert train(tiny.flags(tmp_path / "b", "--max_train_steps=2", seed=4)) == 0
    assert train(tiny.flags(tmp_path / "c", "--max_train_steps=2")) == 0
    assert "ss_steps" not in metadata(tmp_path / "a" / "last.safetensors")
    assert_same_weights(tmp_path / "a" / "last.safetensors", tmp_path / "c" / "last.safetensors")
    assert differ(tmp_path / "a" / "last.safetensors", tmp_path / "b" / "last.safetensors")


# Resuming

VARIED = ["--shuffle_caption", "--caption_tag_dropout_rate=0.3", "--flip_aug", "--noise_offset=0.05", "--network_dropout=0.3"]
OPTIMIZERS = {
    "AdamW": ["--optimizer_type=AdamW", "--lr_scheduler=cosine", "--learning_rate=1e-2"],
    "AdamW8bit": ["--use_8bit_adam", "--lr_scheduler=cosine_with_restarts", "--lr_scheduler_num_cycles=2", "--network_dim=64"],
    "Prodigy": ["--optimizer_type=Prodigy"],
    "AdamWScheduleFree": ["--optimizer_type=AdamWScheduleFree", "--learning_rate=1e-2"],
    "fp16": ["--mixed_precision=fp16", "--allow_fp16_on_cpu", "--learning_rate=1e-2"],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_stopped_and_resumed_ends_with_the_same_weights(tiny: Ingredients, tmp_path: Path, optimizer: str) -> None:
    # 6 images, batches of one, two a step: 3 steps an epoch, so the state after step 4 lies inside the second epoch
    flags = [*OPTIMIZERS[optimizer], *VARIED, "--gradient_accumulation_steps=2", "--max_train_steps=7", "--save_state"]
    assert train(tiny.flags(tmp_path / "straight", *flags)) == 0
    assert train(tiny.flags(tmp_path / "first", *flags, "--save_every_n_steps=4")) == 0
    state = tmp_path / "first" / "at-step00000004-state"
    assert json.loads((state / "state.json").read_text())["position"] == {"step": 4, "epoch": 1, "batch": 2, "micro_step": 8}
    kept = torch.load(state / "optimizer.pt", weights_only=True)
    dtypes = {value.dtype for value in tree_leaves(kept["optimizer"]["state"]) if isinstance(value, torch.Tensor)}
    assert (torch.uint8 in dtypes) == (optimizer == "AdamW8bit")
    assert ("scaler" in kept) == (optimizer == "fp16")
    assert train(tiny.flags(tmp_path / "second", *flags, f"--resume={state}")) == 0
    assert_same_weights(tmp_path / "straight" / "last.safetensors", tmp_path / "second" / "last.safetensors")
    assert differ(tmp_path / "straight" / "last.safetensors", tmp_path / "first" / "at-step00000004.safetensors")


def test_resuming_needs_the_random_generators(tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: dropout masks come from the global generator, and without it the weights differ."""
    flags = [*VARIED, "--max_train_steps=4", "--save_state", "--learning_rate=1e-2"]
    assert train(tiny.flags(tmp_path / "straight", *flags, "--save_every_n_steps=2")) == 0
    monkeypatch.setattr("onegraph.training.state.restore_random_states", lambda states: None)
    assert train(tiny.flags(tmp_path / "second", *flags, f"--resume={tmp_path / 'straight' / 'at-step00000002-state'}")) == 0
    assert differ(tmp_path / "straight" / "last.safetensors", tmp_path / "second" / "last.safetensors")


def test_other_settings_and_other_images_are_refused_on_resume(
    tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tiny.flags(tmp_path, "--max_train_steps=2", "--save_state")) == 0
    resume = f"--resume={tmp_path / 'last-state'}"
    assert train(tiny.flags(tmp_path, "--max_train_steps=4", "--learning_rate=1", resume)) == 2
    assert "optimizer.learning_rate: None in the state, 1.0 now" in capsys.readouterr().err
    assert train(tiny.flags(tmp_path, "--max_train_steps=2", resume)) == 2
    assert "nothing is left to train" in capsys.readouterr().err
    make_images(tmp_path / "others" / "1_thing", 6, seed=1)
    assert train(tiny.flags(tmp_path, "--max_train_steps=4", resume, images=tmp_path / "others")) == 2
    assert "another data set" in capsys.readouterr().err


# Steps


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_never_changes_the_number_of_steps(tiny: Ingredients, tmp_path: Path, accumulation: int) -> None:
    assert train(tiny.flags(tmp_path, "--max_train_steps=3", f"--gradient_accumulation_steps={accumulation}")) == 0
    assert metadata(tmp_path / "last.safetensors")["ss_steps"] == "3"


def test_two_accumulated_batches_are_one_batch_of_two(tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the mean is the mean of the gradients; both take SGD's step along it."""
    # the order of the batches differs with their size, so every image is the same one
    images = tmp_path / "images"
    make_images(images / "1_thing", 1)
    for number in range(1, 4):
        for ending in ("png", "caption"):
            (images / "1_thing" / f"{number}.{ending}").write_bytes((images / "1_thing" / f"0.{ending}").read_bytes())
    same = tiny.flags(tmp_path / "out", "--optimizer_type=SGD", "--learning_rate=1", images=images)
    gradients: list[dict[str, torch.Tensor]] = []

    def remember(self: Update, norm: torch.Tensor) -> bool:
        gradients.append({name: value.grad.clone() for name, value in self.parameters.items() if value.grad is not None})
        return True

    monkeypatch.setattr(Update, "take", remember)
    # noise differs by its place in a batch: take a timestep range of one and no noise, so that only the images count
    monkeypatch.setattr("onegraph.training.diffusion.noise.draw_noise", lambda latents, settings, generator: torch.ones_like(latents))
    fixed = ["--min_timestep=500", "--max_timestep=501", "--max_train_steps=1", "--max_grad_norm=0"]
    assert train([*same, *fixed, "--gradient_accumulation_steps=2"]) == 0
    assert train([*same, *fixed, "--train_batch_size=2"]) == 0
    assert train([*same, *fixed]) == 0
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(value, gradients[2][name], rtol=1e-4, atol=1e-7)


# Compiled


def curve(tiny: Ingredients, output: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[list[float], loop.Outcome]:
    with monkeypatch.context() as patch:
        outcomes: list[loop.Outcome] = outcomes_of(loop.Loop, patch)
        assert train(tiny.flags(output, *flags)) == 0
    return outcomes[0].losses, outcomes[0]


@pytest.mark.slow
def test_fifty_steps_compiled_and_eager_have_one_loss_curve(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max_train_steps=50", "--learning_rate=3e-3"]
    eager, _ = curve(tiny, tmp_path / "eager", monkeypatch, *flags)
    compiled, outcome = curve(tiny, tmp_path / "compiled", monkeypatch, *flags, "--dynamo_backend=aot_eager")
    said = capsys.readouterr().out
    assert len(eager) == len(compiled) == 50
    assert max(abs(left - right) / right for left, right in zip(compiled, eager, strict=True)) < 1e-4
    assert outcome.recompiles == []
    assert "compiled and eager agree" in said
    assert re.search(r"result +[1-9]\d* graphs for 1 image size, 0 graph breaks, 0 recompiles, [\d.]+ s compiling", said)
    other, _ = curve(tiny, tmp_path / "other", monkeypatch, "--max_train_steps=50", "--learning_rate=3e-2")
    assert max(abs(left - right) / right for left, right in zip(other, eager, strict=True)) > 1e-4


# Variants that have to run


@pytest.mark.parametrize(
    "flags",
    [
        ["--network_train_unet_only"],
        ["--network_train_text_encoder_only", "--gradient_checkpointing"],
        ["--mixed_precision=bf16", "--min_snr_gamma=5"],
        ["--mixed_precision=fp16", "--allow_fp16_on_cpu"],
        ["--network_args", "conv_dim=2", "loraplus_lr_ratio=4", "--scale_weight_norms=1"],
        ["--max_token_length=150", "--multires_noise_iterations=2", "--v_parameterization", "--zero_terminal_snr"],
        ["--lr_scheduler=cosine", "--lr_warmup_steps=1", "--optimizer_type=Lion"],
        ["--train_batch_size=4", "--cache_latents_to_disk"],
    ],
    ids=lambda flags: flags[0].removeprefix("--"),
)
def test_it_runs(tiny: Ingredients, tmp_path: Path, flags: list[str]) -> None:
    images = tmp_path / "images"
    make_images(images / "1_thing", 6)
    assert train(tiny.flags(tmp_path / "out", "--max_train_steps=2", *flags, images=images)) == 0
    found = weights(tmp_path / "out" / "last.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert any(bool(value.any()) for key, value in found.items() if "lora_up" in key)
    parts = {key[: key.index("_", 5)] for key in found}
    expected = {"--network_train_unet_only": {"lora_unet"}, "--network_train_text_encoder_only": {"lora_te"}}
    assert parts == expected.get(flags[0], {"lora_unet", "lora_te"})


def test_images_that_are_not_cached_resume_exactly_too(tiny: Ingredients, tmp_path: Path) -> None:
    flags = ["--max_train_steps=4", "--save_state", "--save_every_n_steps=2", "--learning_rate=1e-2", "--random_crop", "--flip_aug"]
    assert train(tiny.flags(tmp_path / "a", *flags, cached=False)) == 0
    assert train(tiny.flags(tmp_path / "b", *flags, f"--resume={tmp_path / 'a' / 'at-step00000002-state'}", cached=False)) == 0
    assert_same_weights(tmp_path / "a" / "last.safetensors", tmp_path / "b" / "last.safetensors")


def test_gradient_checkpointing_changes_memory_only(tiny: Ingredients, tmp_path: Path) -> None:
    flags = ["--max_train_steps=3", "--learning_rate=1e-2", "--network_dropout=0.2"]
    assert train(tiny.flags(tmp_path / "a", *flags)) == 0
    assert train(tiny.flags(tmp_path / "b", *flags, "--gradient_checkpointing")) == 0
    assert_same_weights(tmp_path / "a" / "last.safetensors", tmp_path / "b" / "last.safetensors")


def test_regularisation_images_weigh_what_was_asked(tiny: Ingredients, tmp_path: Path) -> None:
    make_images(tmp_path / "reg" / "1_other", 6, seed=5)
    flags = ["--max_train_epochs=1", f"--reg_data_dir={tmp_path / 'reg'}", "--learning_rate=1e-2"]
    assert train(tiny.flags(tmp_path / "one", *flags)) == 0
    assert train(tiny.flags(tmp_path / "half", *flags, "--prior_loss_weight=0.5")) == 0
    assert metadata(tmp_path / "one" / "last.safetensors")["ss_num_reg_images"] == "6"
    assert differ(tmp_path / "one" / "last.safetensors", tmp_path / "half" / "last.safetensors")


def test_training_goes_on_from_a_network_file(tiny: Ingredients, tmp_path: Path) -> None:
    assert train(tiny.flags(tmp_path, "--max_train_steps=2", "--output_name=first", "--learning_rate=1e-2")) == 0
    first = tmp_path / "first.safetensors"
    assert train(tiny.flags(tmp_path, "--max_train_steps=1", f"--network_weights={first}", "--learning_rate=1e-9")) == 0
    before, after = weights(first), weights(tmp_path / "last.safetensors")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


def test_tensorboard_curves_have_the_names_of_the_field(tiny: Ingredients, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--max_train_steps=3", "--unet_lr=1e-3", "--text_encoder_lr=1e-4", f"--logging_dir={tmp_path / 'logs'}", "--log_prefix=x-"]
    assert train(tiny.flags(tmp_path / "out", *flags)) == 0
    (run,) = (tmp_path / "logs").iterdir()
    assert run.name.startswith("x-")
    events = EventAccumulator(str(run / "network_train"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {"loss/current", "loss/average", "lr/unet", "lr/textencoder"}
    assert [round(event.value, 9) for event in events.Scalars("lr/textencoder")] == [1e-4] * 3


def test_the_file_of_a_schedule_free_optimizer_holds_the_averaged_weights(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--max_train_steps=4", "--optimizer_type=AdamWScheduleFree", "--learning_rate=1e-2"]
    assert train(tiny.flags(tmp_path / "a", *flags, "--save_every_n_steps=2")) == 0
    with monkeypatch.context() as patch:
        patch.setattr("onegraph.training.places.before_saving", lambda optimizer: None)
        patch.setattr("onegraph.training.places.before_training", lambda optimizer: None)
        assert train(tiny.flags(tmp_path / "b", *flags)) == 0
    assert differ(tmp_path / "a" / "last.safetensors", tmp_path / "b" / "last.safetensors")
    # saving in between left no trace
    assert train(tiny.flags(tmp_path / "c", *flags)) == 0
    assert_same_weights(tmp_path / "a" / "last.safetensors", tmp_path / "c" / "last.safetensors")


# Mistakes


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--max_trian_steps=3"], {}, ["--max_trian_steps", "--max_train_steps", "[unknown-flag]"]),
        (["--mixed_precision=fp16"], {}, ["--mixed_precision=bf16", "[fp16-on-cpu]"]),
        ([], {"ACCELERATE_MIXED_PRECISION": "fp16"}, ["[fp16-on-cpu]"]),
        ([], {"ACCELERATE_MIXED_PRECISION": "fp8"}, ["fp8", "--mixed_precision=bf16"]),
        ([], {"ACCELERATE_USE_FSDP": "true"}, ["FSDP", "[several-processes]"]),
        ([], {"ACCELERATE_DYNAMO_BACKEND": "NVFUSER"}, ["NVFUSER", "dynamo_backend=inductor"]),
        (["--resume=nowhere-state"], {}, ["nowhere-state", "[state-not-found]"]),
        (["--clip_skip=9"], {}, ["clip_skip is 9", "[clip-skip]"]),
        (["--learning_rate=-1", "--max_train_steps=0"], {}, ["2 problems", "learning_rate", "max_train_steps"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "".join(value),
)
def test_a_mistake_is_told_before_any_work(
    tiny: Ingredients,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    environment: dict[str, str],
    words: list[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert train(tiny.flags(tmp_path / "out", *flags)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_missing_compiler_is_found_before_the_model_is_loaded(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(LOADER, lambda *values, **named: pytest.fail("the model was loaded"))
    assert train(tiny.flags(tmp_path, "--dynamo_backend=inductor")) == 2
    assert "no-such-compiler" in capsys.readouterr().err


def test_images_are_checked_before_the_model_is_loaded(
    tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    make_images(images / "1_thing", 3)
    bad = images / "1_thing" / "1.png"
    bad.write_bytes(bad.read_bytes()[:200])
    with monkeypatch.context() as patch:
        patch.setattr(LOADER, lambda *values, **named: pytest.fail("the model was loaded"))
        assert train(tiny.flags(tmp_path / "out", images=images)) == 2
    assert str(bad) in capsys.readouterr().err
    assert train(tiny.flags(tmp_path / "out", "--skip_bad_images", "--max_train_steps=1", images=images)) == 0
    assert "1 bad image" in capsys.readouterr().out


def test_an_output_folder_that_is_a_file(tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert train(tiny.flags(tmp_path / "out")) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "there", "code"),
    [
        ("x" * 240, "", "name-too-long"),
        ("x" * 400, "", "name-too-long"),
        ("cat", "cat.safetensors/folder", "is-a-folder"),
        ("cat", "cat-state", "is-a-file"),
        ("cat", "sample", "is-a-file"),
    ],
    ids=["name too long while it is written", "name too long", "a folder there", "a file in the state's place", "a file for samples"],
)
def test_what_can_not_be_written_in_the_end_is_found_in_the_beginning(
    tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, there: str, code: str
) -> None:
    if there.endswith("folder"):
        (tmp_path / there).mkdir(parents=True)
    elif there:
        (tmp_path / there).write_text("mine")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat")
    flags = ["--max_train_steps=1", f"--output_name={name}", "--save_state", f"--sample_prompts={prompts}", "--sample_every_n_steps=1"]
    assert train(tiny.flags(tmp_path, *flags)) == 2
    said = capsys.readouterr()
    assert f"[{code}]" in said.err
    assert "adapters on" not in said.out  # no model was loaded


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize("num_kilobytes", [4, 40, 100, 160, 280])
@pytest.mark.parametrize("written", ["states", "curves", "samples"])
def test_a_full_disk_is_one_clear_error_and_leaves_whole_files(
    tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, num_kilobytes: int
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_kilobytes}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user can't mount a small file system")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --s 1 --w 64 --h 64")
    flags = {
        "states": ["--save_state"],
        "curves": [f"--logging_dir={disk / 'logs'}"],
        "samples": [f"--sample_prompts={prompts}", "--sample_every_n_steps=1"],
    }
    try:
        assert train(tiny.flags(disk, "--max_train_steps=20", "--save_every_n_steps=1", "--network_dim=1", *flags[written])) in {1, 2}
        error = capsys.readouterr().err
        assert re.search(r"\[(disk-full|state-not-written|log-not-written)\]", error)
        for path in disk.rglob("*"):
            assert not path.name.startswith("."), "a temporary file was left"
            if path.suffix == ".safetensors":
                weights(path)
            elif path.suffix == ".png":
                Image.open(path).load()
        assert all((state / "state.json").exists() for state in disk.glob("*-state"))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_data_folder_whose_name_is_no_utf8(tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images" / os.fsdecode(b"1_gr\xf6\xdfe")
    try:
        make_images(folder, 2)
    except OSError:
        pytest.skip("this file system only takes names in UTF-8")
    flags = ["--max_train_steps=2", "--save_state", f"--logging_dir={tmp_path / 'logs'}"]
    assert train(tiny.flags(tmp_path / "out", *flags, images=tmp_path / "images")) == 0
    assert r"1_gr\udcf6\udcdfe" in metadata(tmp_path / "out" / "last.safetensors")["ss_dataset_dirs"]
    (folder / "0.caption").unlink()  # now the folder's name is a caption
    assert train(tiny.flags(tmp_path / "out", *flags, images=tmp_path / "images")) == 2
    assert "[data-folder-names]" in capsys.readouterr().err


def test_a_second_run_of_that_name_is_refused_while_the_first_one_goes(
    tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tiny.flags(tmp_path / "out", "--max_train_steps=2")
    statuses: list[int] = []
    original = loop.Loop._advance

    def meanwhile(self: loop.Loop, *given: int) -> None:
        if not statuses:
            statuses.append(0)  # the inner runs advance too
            statuses.extend((train(flags), train([*flags, "--output_name=other"])))
        original(self, *given)

    monkeypatch.setattr(loop.Loop, "_advance", meanwhile)
    assert train(flags) == 0
    assert statuses == [0, 2, 0]
    error = capsys.readouterr().err
    assert "[in-use]" in error
    assert f"process {os.getpid()}" in error
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["last.safetensors", "other.safetensors"]
    assert train(flags) == 0


@pytest.mark.parametrize("moment", ["before the first step", "in a later step"])
def test_a_compilation_that_fails_is_one_clear_error(
    tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    forward = Attention.forward
    calls = 0

    def breaks(self: Attention, *arguments: object, **keywords: object) -> object:
        torch._dynamo.graph_break()
        return forward(self, *arguments, **keywords)  # type: ignore[arg-type]

    def breaks_later(step: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            monkeypatch.setattr(Attention, "forward", breaks)
            torch._dynamo.reset()

    if moment == "in a later step":
        original = loop.Loop._advance
        monkeypatch.setattr(loop.Loop, "_advance", lambda self, *given: (breaks_later(1), original(self, *given))[1])
    else:
        monkeypatch.setattr(Attention, "forward", breaks)
    flags = ["--max_train_steps=4", "--save_every_n_steps=1", "--dynamo_backend=eager", "--compile_check=off"]
    assert train(tiny.flags(tmp_path, *flags)) == (1 if moment == "in a later step" else 2)
    error = capsys.readouterr().err
    assert "[graph-break]" in error
    assert "--dynamo_use_fullgraph=no" in error
    assert "in breaks (" in error
    assert (tmp_path / "at-step00000002.safetensors").exists() == (moment == "in a later step")
    assert not (tmp_path / "last.safetensors").exists()


def test_an_unexpected_error_keeps_its_traceback(tiny: Ingredients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*values: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(loop.Loop, "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        train(tiny.flags(tmp_path, "--max_train_steps=1"))
