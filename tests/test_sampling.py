"""Sample images: the same as diffusers' pipeline draws, and nothing left behind; files of sample prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image

import tiny_diffusion as tiny
from onegraph.errors import ConfigurationError
from onegraph.training.diffusion.base_model import BaseModel
from onegraph.training.diffusion.families import SD_V1
from onegraph.training.diffusion.sample_prompts import read_sample_prompts
from onegraph.training.diffusion.sampling import SAMPLERS, SamplePrompt, sample, scheduler_for


@pytest.fixture(scope="module")
def base() -> BaseModel:
    components: Any = tiny.configuration()
    modules: dict[str, Any] = {part: tiny.build(part, components[part]) for part in ("unet", "vae", "text_encoder")}
    return BaseModel(
        **modules,
        tokenizer=SD_V1.tokenizer(),
        family=SD_V1,
        prediction_type="epsilon",
        scheduler_config=components["scheduler"],
        scaling_factor=0.18215,
        name="tiny",
        path=Path("tiny"),
        configuration=components,
    )


def largest_difference(left: Image.Image, right: Image.Image) -> int:
    """In levels of 256."""
    return int(np.abs(np.asarray(left, dtype=int) - np.asarray(right, dtype=int)).max())


SETTINGS: dict[str, Any] = {"width": 32, "height": 64, "steps": 3, "guidance": 4.0, "seed": 5}


def test_it_is_what_the_pipeline_draws(base: BaseModel) -> None:
    pipeline = StableDiffusionPipeline(
        vae=base.vae,
        text_encoder=base.text_encoder,
        tokenizer=base.tokenizer,
        unet=base.unet,
        scheduler=DDIMScheduler.from_config(base.scheduler_config),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        "a cat",
        negative_prompt="a dog",
        width=32,
        height=64,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    (ours,) = sample(base, ["a cat"], negative="a dog", **SETTINGS)
    assert ours.size == (32, 64)
    assert largest_difference(ours, theirs) <= 1, "round-off of the last bit"
    (other,) = sample(base, ["a cat"], negative="a dog", **{**SETTINGS, "seed": 6})
    assert largest_difference(ours, other) > 20


def test_clip_skip_and_long_prompts_reach_the_picture(base: BaseModel) -> None:
    # A random UNet hardly listens: its cross attention is turned up until the prompt shows.
    base = replace(base, unet=tiny.build("unet", base.configuration["unet"]))
    with torch.no_grad():
        for name, parameter in base.unet.named_parameters():
            if "attn2.to_out" in name or "proj_out" in name:
                parameter.mul_(30)
    prompt = "cat " * 60 + "dog " * 60
    pictures = [
        np.asarray(sample(base, [prompt], clip_skip=skip, max_token_length=length, **SETTINGS)[0])
        for skip, length in ((None, None), (1, 77), (2, None), (None, 150))
    ]
    assert np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])
    assert not np.array_equal(pictures[0], pictures[3])


def test_modes_random_state_and_flags_are_as_before(base: BaseModel, capfd: pytest.CaptureFixture[str]) -> None:
    base.unet.train()
    base.unet.conv_in.eval()
    before = {name: module.training for name, module in base.unet.named_modules()}
    flags = {name: parameter.requires_grad for name, parameter in base.unet.named_parameters()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    inside: list[str] = []

    @contextlib.contextmanager
    def running() -> Iterator[None]:
        inside.append("entered")
        yield
        inside.append("left")

    modes: list[bool] = []
    hook = base.unet.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    try:
        sample(base, ["a", "b"], sampler="euler_a", running=running(), **{**SETTINGS, "seed": None})
    finally:
        hook.remove()
        base.unet.eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert inside == ["entered", "left"]
    assert modes
    assert not any(modes)
    assert before == {name: before[name] for name, _ in base.unet.named_modules()}
    assert flags == {name: parameter.requires_grad for name, parameter in base.unet.named_parameters()}
    assert capfd.readouterr().err == ""


def test_modes_come_back_after_a_failure(base: BaseModel) -> None:
    base.unet.train()

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    hook = base.unet.register_forward_pre_hook(stop)
    try:
        with pytest.raises(RuntimeError, match="stopped"):
            sample(base, ["a"], **SETTINGS)
        assert all(module.training for module in base.unet.modules())
    finally:
        hook.remove()
        base.unet.eval()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws(base: BaseModel, sampler: str) -> None:
    if sampler == "lms":
        pytest.importorskip("scipy")
    (picture,) = sample(base, ["a"], sampler=sampler, **SETTINGS)
    assert picture.size == (32, 64)


def test_a_sampler_keeps_the_models_noise_schedule_and_prediction() -> None:
    config = {**SD_V1.configuration()["scheduler"], "prediction_type": "v_prediction", "beta_end": 0.02}
    scheduler = scheduler_for("k_euler_a", config)
    assert scheduler.config.prediction_type == "v_prediction"
    assert scheduler.config.beta_end == 0.02
    assert scheduler.config.beta_schedule == "scaled_linear"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="the noise that it draws in bfloat16 is another than in float32")
def test_half_precision_weights_run_under_autocast(base: BaseModel) -> None:
    components = base.configuration
    modules: dict[str, Any] = {part: tiny.build(part, components[part]).to(torch.bfloat16) for part in ("unet", "vae", "text_encoder")}
    half = replace(base, **modules)
    (picture,) = sample(half, ["a"], **SETTINGS)
    (full,) = sample(base, ["a"], **SETTINGS)
    difference = np.abs(np.asarray(picture, dtype=int) - np.asarray(full, dtype=int))
    assert difference.mean() < 8


def test_bad_settings_are_all_named_before_anything_is_drawn(base: BaseModel) -> None:
    prompts = [SamplePrompt(prompt="a", width=30, steps=0, sampler="eular")]
    with pytest.raises(ConfigurationError) as caught:
        sample(base, prompts, **SETTINGS)
    text = str(caught.value)
    assert "width is 30" in text
    assert "steps is 0" in text
    assert "eular" in text
    assert "euler" in text


TEXT = """\
# a comment
a cat, sitting --n a dog --w 512 --h 256 --d 7 --s 20 --l 4.5

a dog -- with dashes --ss euler_a
"""
EXPECTED = [
    SamplePrompt(prompt="a cat, sitting", negative="a dog", width=512, height=256, seed=7, steps=20, guidance=4.5),
    SamplePrompt(prompt="a dog -- with dashes", sampler="euler_a"),
]
TOML = """\
[prompt]
width = 512
height = 256
[[prompt.subset]]
prompt = "a cat"
scale = 4.5
[[prompt.subset]]
prompt = "a dog"
width = 64
"""


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text(TEXT)
    assert read_sample_prompts(text) == EXPECTED
    table = tmp_path / "prompts.json"
    entry = {
        "prompt": "a cat",
        "negative_prompt": "a dog",
        "width": 64,
        "seed": 7,
        "sample_steps": 20,
        "scale": 4,
        "sample_sampler": "ddim",
    }
    table.write_text(json.dumps([entry, "a bear --w 128"]))
    assert read_sample_prompts(table) == [
        SamplePrompt(prompt="a cat", negative="a dog", width=64, seed=7, steps=20, guidance=4.0, sampler="ddim"),
        SamplePrompt(prompt="a bear", width=128),
    ]
    toml = tmp_path / "prompts.toml"
    toml.write_text(TOML)
    assert read_sample_prompts(toml) == [
        SamplePrompt(prompt="a cat", width=512, height=256, guidance=4.5),
        SamplePrompt(prompt="a dog", width=64, height=256),
    ]


def test_all_mistakes_of_a_prompt_file_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat --w wide --q 3\n\na dog --s\n")
    with pytest.raises(ConfigurationError) as caught:
        read_sample_prompts(path)
    text = str(caught.value)
    assert f"{path}, line 1: --w is 'wide'" in text
    assert f"{path}, line 1: unknown option --q" in text
    assert f"{path}, line 3: --s is ''" in text
    assert "It takes a whole number." in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"# nothing\n", "holds no prompt"),
        ("p.txt", b"caf\xe9", "is not UTF-8 text"),
        ("p.json", b"[{", "can't be parsed"),
        ("p.toml", b"[[", "can't be parsed"),
        ("p.json", b'[{"prompt": "a", "widht": 3}]', "unknown key widht"),
        ("p.json", b"[3]", "prompt 1 is a int"),
    ],
)
def test_a_prompt_file_that_is_none_says_why(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        read_sample_prompts(path)
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_sample_prompts(tmp_path / "missing.txt")
