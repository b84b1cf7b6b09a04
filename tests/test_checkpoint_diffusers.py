"""diffusers takes our network files whole and computes the same with them; and its own LoRA files are read and written."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from onegraph import LoRA, adapters_of, attach, load
from onegraph.adapters import Adapters
from onegraph.checkpoint import load_parts, read, save, save_kohya
from onegraph.checkpoint.dialects import diffusers as dialect
from onegraph.errors import CheckpointError
from test_checkpoint_kohya import TEXT_TARGETS, UNET_TARGETS, randomise, run_text, run_unet, text_encoder, unet

# diffusers passes a tokenizer on that isn't there, and peft and transformers have names they gave up.
pytestmark = [pytest.mark.filterwarnings("ignore:.*is deprecated"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def pipeline() -> StableDiffusionPipeline:
    torch.manual_seed(4)
    vae = AutoencoderKL(
        block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), norm_num_groups=4
    )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder(),
        tokenizer=None,
        unet=unet(),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def adapters_for(overrides: dict[str, LoRA]) -> dict[str, Adapters]:
    return {
        "unet": randomise(attach(unet(), LoRA(rank=4, alpha=2), targets=UNET_TARGETS, overrides=overrides)),
        "text_encoder": randomise(attach(text_encoder(), LoRA(rank=4, alpha=2), targets=TEXT_TARGETS)),
    }


class Messages(logging.Handler):
    """diffusers keeps its records to itself: its loggers don't propagate."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def complaints(path: Path, pipe: StableDiffusionPipeline) -> list[str]:
    """Load a file, and what diffusers says of keys that it has no use for, or misses."""
    messages, logger = Messages(), logging.getLogger("diffusers")
    logger.addHandler(messages)
    try:
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="style")
    finally:
        logger.removeHandler(messages)
    return [text for text in messages.texts if "key" in text.lower()]


def assert_same_function(pipe: StableDiffusionPipeline, ours: dict[str, Adapters]) -> None:
    for found, own, plain in (
        (run_unet(pipe.unet), run_unet(ours["unet"].model), run_unet(unet())),
        (run_text(pipe.text_encoder), run_text(ours["text_encoder"].model), run_text(text_encoder())),
    ):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        assert (own - plain).abs().max() > 1e-2, "the adapter must do something"


RANKS = {
    "one rank": {},
    "other ranks": {"to_k": LoRA(rank=2, alpha=2), "ff.net.2": LoRA(rank=3, alpha=2)},
    "another alpha on convolutions": {"proj_in": LoRA(rank=3, alpha=7)},
}


@pytest.mark.parametrize("kind", RANKS)
def test_diffusers_takes_our_kohya_file_with_no_leftover_key(tmp_path: Path, kind: str) -> None:
    ours = adapters_for(RANKS[kind])
    save_kohya(ours, tmp_path / "style.safetensors")
    pipe = pipeline()
    assert complaints(tmp_path / "style.safetensors", pipe) == []
    assert_same_function(pipe, ours)


def test_diffusers_takes_adapters_on_resnets_and_samplers(tmp_path: Path) -> None:
    """What conv_dim and conv_alpha train: 3x3 convolutions with a rank and an alpha of their own."""
    small = LoRA(rank=2, alpha=1)
    convolutions = ["conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv"]
    targets = [*UNET_TARGETS, *convolutions, "time_emb_proj", "conv_shortcut"]
    ours = adapters_for({})
    ours["unet"] = randomise(attach(unet(), LoRA(rank=4, alpha=2), targets=targets, overrides=dict.fromkeys(convolutions, small)))
    save_kohya(ours, tmp_path / "style.safetensors")
    pipe = pipeline()
    assert complaints(tmp_path / "style.safetensors", pipe) == []
    assert_same_function(pipe, ours)


def test_diffusers_does_complain_about_a_leftover_key(tmp_path: Path) -> None:
    """The other side of the test above: a key it can't rename is an error, a layer it doesn't have a warning."""
    save_kohya(adapters_for({}), tmp_path / "style.safetensors")
    tensors = load_file(tmp_path / "style.safetensors")
    save_file({**tensors, "lora_unet_mid_block_more.diff": torch.ones(2)}, tmp_path / "renamed.safetensors")
    with pytest.raises(ValueError, match="not been correctly renamed"):
        complaints(tmp_path / "renamed.safetensors", pipeline())
    absent = "lora_unet_mid_block_attentions_9_proj_in"
    extra = {f"{absent}.lora_down.weight": torch.ones(4, 64, 1, 1), f"{absent}.lora_up.weight": torch.ones(64, 4, 1, 1)}
    save_file({**tensors, **extra, f"{absent}.alpha": torch.tensor(2.0)}, tmp_path / "absent.safetensors")
    assert any("attentions.9" in text for text in complaints(tmp_path / "absent.safetensors", pipeline()))


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
def test_alphas_that_diffusers_would_lose_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Diffusers 0.42 gives every attention projection and every text encoder layer the commonest alpha of its part."""
    ours = adapters_for({"attn1.to_k": LoRA(rank=2, alpha=9)})
    with caplog.at_level(logging.WARNING, logger="onegraph"):
        save_kohya(ours, tmp_path / "style.safetensors")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.getMessage()]
    pipe = pipeline()
    complaints(tmp_path / "style.safetensors", pipe)
    assert (run_unet(pipe.unet) - run_unet(ours["unet"].model)).abs().max() > 1e-3, "diffusers keeps them now: drop the warning"
    models: dict[str, nn.Module] = {"unet": unet(), "text_encoder": text_encoder()}
    load_parts(models, tmp_path / "style.safetensors")
    torch.testing.assert_close(run_unet(models["unet"]), run_unet(ours["unet"].model), rtol=0, atol=0)


@pytest.mark.parametrize("kind", RANKS)
def test_alphas_that_diffusers_keeps_are_not_mentioned(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="onegraph"):
        save_kohya(adapters_for(RANKS[kind]), tmp_path / "style.safetensors")
    assert not caplog.records


@pytest.mark.parametrize("kind", [*RANKS, "other alphas"])
def test_diffusers_takes_the_file_in_its_own_format(tmp_path: Path, kind: str) -> None:
    """Each part by itself: alpha is in the metadata, where diffusers reads it."""
    overrides = RANKS.get(kind, {"to_k": LoRA(rank=2, alpha=5), "mid_block.attentions.0.proj_in": LoRA(rank=3, alpha=7)})
    ours = adapters_for(overrides)
    pipe = pipeline()
    save(ours["unet"], tmp_path / "unet.safetensors", format="diffusers")
    save(ours["text_encoder"], tmp_path / "text.safetensors", format="diffusers")
    with safe_open(tmp_path / "text.safetensors", framework="pt") as file:
        assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight" in set(file.keys())
        assert json.loads(file.metadata()["lora_adapter_metadata"])["text_encoder.lora_alpha"] == 2
    pipe.load_lora_weights(str(tmp_path), weight_name="unet.safetensors", adapter_name="style")
    pipe.load_lora_weights(str(tmp_path), weight_name="text.safetensors", adapter_name="style")
    assert_same_function(pipe, ours)


@pytest.mark.parametrize("kind", [*RANKS, "other alphas"])
def test_our_own_diffusers_file_comes_back_exactly(tmp_path: Path, kind: str) -> None:
    ours = adapters_for(RANKS.get(kind, {"to_k": LoRA(rank=2, alpha=5)}))
    for adapters, model in ((ours["unet"], unet()), (ours["text_encoder"], text_encoder())):
        save(adapters, tmp_path / "a.safetensors", format="diffusers")
        loaded = load(model, tmp_path / "a.safetensors")
        expected = adapters.tensors("default")
        assert {path: method.settings(loaded.layers[path].layer) for path, method in loaded.methods("default").items()} == {
            path: method.settings(adapters.layers[path].layer) for path, method in adapters.methods("default").items()
        }
        assert all(
            torch.equal(tensor, expected[path][key]) for path, layer in loaded.tensors("default").items() for key, tensor in layer.items()
        )


def test_a_file_that_diffusers_saved_is_read(tmp_path: Path) -> None:
    """Saved by diffusers with its metadata, loaded here by its folder, onto both models."""
    import peft
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft.utils import get_peft_model_state_dict

    pipe = pipeline()
    generator = torch.Generator().manual_seed(5)
    layers, configs = {}, {}
    for part, targets in (("unet", ["to_q", "to_v", "proj_in"]), ("text_encoder", ["q_proj", "fc1"])):
        model = getattr(pipe, part)
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, rank_pattern={targets[0]: 2}))
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.data.copy_(torch.randn(value.shape, generator=generator) * 0.2)
        state = get_peft_model_state_dict(model)
        layers[part] = convert_state_dict_to_diffusers(state) if part == "unet" else state
        configs[part] = model.peft_config["default"].to_dict()
    for config in configs.values():
        config.update({key: sorted(value) for key, value in config.items() if isinstance(value, set)})
    StableDiffusionPipeline.save_lora_weights(
        tmp_path,
        unet_lora_layers=layers["unet"],
        text_encoder_lora_layers=layers["text_encoder"],
        unet_lora_adapter_metadata=configs["unet"],
        text_encoder_lora_adapter_metadata=configs["text_encoder"],
    )
    models: dict[str, nn.Module] = {"unet": unet(), "text_encoder": text_encoder()}
    loaded = load_parts(models, tmp_path)
    assert {method.alpha for method in loaded["unet"].methods("default").values()} == {6.0}  # type: ignore[attr-defined]
    torch.testing.assert_close(run_unet(models["unet"]), run_unet(pipe.unet), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run_text(models["text_encoder"]), run_text(pipe.text_encoder), rtol=1e-5, atol=1e-5)


OLD_KEYS = {
    "attention processors of 2023": [
        ("unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.{}.weight", "attn1.to_q"),
        ("unet.mid_block.attentions.0.transformer_blocks.0.attn2.processor.to_out_lora.{}.weight", "attn2.to_out.0"),
    ],
    "before peft": [("unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora.{}.weight", "attn1.to_q")],
    "text encoder of 2023": [("text_encoder.text_model.encoder.layers.0.self_attn.to_out_lora.{}.weight", "self_attn.out_proj")],
    "text encoder before peft": [("text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.{}.weight", "mlp.fc1")],
}


@pytest.mark.parametrize("kind", OLD_KEYS)
def test_older_spellings_are_read(tmp_path: Path, kind: str) -> None:
    model = text_encoder() if kind.startswith("text") else unet()
    sizes = {path: module.weight.shape for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    tensors, expected = {}, {}
    for key, ending in OLD_KEYS[kind]:
        path = next(path for path in sizes if path.endswith(ending) and ("mid_block" in path or "layers.0" in path))
        tensors[key.format("down")], tensors[key.format("up")] = torch.randn(2, sizes[path][1]), torch.randn(sizes[path][0], 2)
        expected[path] = tensors[key.format("up")]
    save_file(tensors, tmp_path / "a.safetensors")
    loaded = load(model, tmp_path / "a.safetensors")
    assert {path: layer["up"].tolist() for path, layer in loaded.tensors("default").items()} == {
        path: up.tolist() for path, up in expected.items()
    }
    assert {method.alpha for method in loaded.methods("default").values()} == {2.0}  # type: ignore[attr-defined]


def test_a_file_of_one_model_without_a_part_name_is_read(tmp_path: Path) -> None:
    """As save_lora_adapter of a diffusers model writes it."""
    save(adapters_for({})["unet"], tmp_path / "a.safetensors", format="diffusers")
    tensors = {key.removeprefix("unet."): value for key, value in load_file(tmp_path / "a.safetensors").items()}
    save_file(tensors, tmp_path / "b.safetensors", metadata={dialect.METADATA_KEY: json.dumps({"r": 4, "lora_alpha": 3})})
    methods = load(unet(), tmp_path / "b.safetensors").methods("default")
    assert {method.alpha for method in methods.values()} == {3.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("metadata", ["{", "[1]", '{"unet.r": "four"}'])
def test_metadata_that_cannot_be_read_is_an_error(tmp_path: Path, metadata: str) -> None:
    save(adapters_for({})["unet"], tmp_path / "a.safetensors", format="diffusers")
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", metadata={dialect.METADATA_KEY: metadata})
    model = unet()
    with pytest.raises(CheckpointError) as raised:
        load(model, tmp_path / "b.safetensors")
    assert raised.value.code == "adapter-config"
    assert adapters_of(model) is None


def test_the_file_in_a_folder_is_found(tmp_path: Path) -> None:
    save(adapters_for({})["unet"], tmp_path / dialect.WEIGHTS_NAME, format="diffusers")
    assert read(tmp_path).format == "diffusers"
