"""The table of original keys against diffusers' own converters, and there and back."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)

import tiny_diffusion as tiny
from onegraph.training.diffusion.original_keys import from_folder, rename, to_diffusers, to_original, unet_pairs

UNETS = {
    "two levels": tiny.unet_config(),
    "attention in the upper three of four": tiny.unet_config(channels=(8, 8, 16, 16), attention="xxx.", layers=2),
    "no attention on top": tiny.unet_config(channels=(8, 8, 16), attention=".xx", layers=2),
    "three layers a block": tiny.unet_config(layers=3),
    "linear projections": tiny.unet_config(use_linear_projection=True),
    "two transformer blocks": tiny.unet_config(transformer_layers_per_block=2),
}
VAES = {
    "one level": tiny.vae_config(channels=(8,)),
    "two levels": tiny.vae_config(),
    "four levels of two": tiny.vae_config(channels=(8, 8, 16, 16), layers=2),
}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("config", UNETS.values(), ids=UNETS)
def test_unet_reads_as_diffusers_converter_does_and_comes_back_exactly(config: dict) -> None:
    state = tiny.build("unet", config).state_dict()
    original = to_original("unet", config, state)
    assert len(original) == len(state)
    assert all(name.startswith("model.diffusion_model.") for name in original)
    assert_same(convert_ldm_unet_checkpoint(original, config), state)
    converted = to_diffusers("unet", config, original)
    assert_same(converted.tensors, state)
    assert not converted.leftover
    assert converted.origin["conv_in.weight"] == "model.diffusion_model.input_blocks.0.0.weight"


@pytest.mark.parametrize("config", VAES.values(), ids=VAES)
def test_vae_reads_as_diffusers_converter_does_and_comes_back_exactly(config: dict) -> None:
    state = tiny.build("vae", config).state_dict()
    original = to_original("vae", config, state)
    assert original["first_stage_model.decoder.mid.attn_1.q.weight"].ndim == 4
    assert_same(convert_ldm_vae_checkpoint(dict(original), config), state)
    assert_same(to_diffusers("vae", config, original).tensors, state)
    bare = {name.removeprefix("first_stage_model."): tensor for name, tensor in original.items()}
    assert_same(to_diffusers("vae", config, bare).tensors, state)


@pytest.mark.parametrize("layers", [1, 3])
def test_clip_reads_as_diffusers_converter_does(layers: int) -> None:
    config = tiny.text_config(layers=layers)
    state = tiny.build("text_encoder", config).state_dict()
    original = to_original("text_encoder", config, state)
    root = "cond_stage_model.transformer.text_model."
    original[root + "embeddings.position_ids"] = torch.arange(77)[None]
    theirs = {name.removeprefix("text_model."): tensor for name, tensor in convert_ldm_clip_checkpoint(original).items()}
    converted = to_diffusers("text_encoder", config, original)
    assert_same(converted.tensors, state)
    assert theirs.keys() - state.keys() == {"embeddings.position_ids"}
    assert_same({name: theirs[name] for name in state}, state)
    without_level = {name.replace("text_model.", ""): tensor for name, tensor in original.items()}
    assert_same(to_diffusers("text_encoder", config, without_level).tensors, state)


def test_openclip_is_taken_apart_as_diffusers_converter_does() -> None:
    config = tiny.text_config(layers=3, family=tiny.SD_V2)
    model = tiny.build("text_encoder", config)
    original = tiny.openclip_tensors(model)
    converted = to_diffusers("text_encoder", config, original)
    assert_same(converted.tensors, dict(model.state_dict()))
    assert not converted.leftover
    # diffusers leaves block 23 out by name; here the extra block is number 3.
    used = {name: tensor for name, tensor in original.items() if ".resblocks.3." not in name}
    theirs = {name.removeprefix("text_model."): tensor for name, tensor in convert_open_clip_checkpoint(model, used).items()}
    assert_same(theirs, converted.tensors)


def test_old_folder_names_are_read() -> None:
    config = tiny.vae_config()
    state = tiny.build("vae", config).state_dict()
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, tensor in state.items():
        for ours, theirs in old_names.items():
            if ".attentions." in name:
                name = name.replace(f".{ours}.", f".{theirs}.")
        old[name] = tensor
    assert old.keys() != state.keys()
    assert_same(from_folder("vae", old).tensors, dict(state))
    text = tiny.build("text_encoder", tiny.text_config()).state_dict()
    old = {f"text_model.{name}": tensor for name, tensor in text.items()}
    assert_same(from_folder("text_encoder", old).tensors, dict(text))


def test_a_key_the_table_does_not_know_is_left_over_not_dropped() -> None:
    config = tiny.unet_config()
    original = to_original("unet", config, tiny.build("unet", config).state_dict())
    original["model.diffusion_model.label_emb.0.0.weight"] = torch.zeros(1)
    assert to_diffusers("unet", config, original).leftover == ["model.diffusion_model.label_emb.0.0.weight"]
    with pytest.raises(KeyError, match=r"add_embedding"):
        to_original("unet", config, {"add_embedding.linear_1.weight": torch.zeros(1)})


def test_names_are_replaced_by_whole_components() -> None:
    names = {"input_blocks.1": "one", "input_blocks.1.1": "inner"}
    assert rename("input_blocks.1.1.weight", names) == "inner.weight"
    assert rename("input_blocks.11.weight", names) is None
    assert rename("input_blocks.1.weight", names) == "one.weight"


def test_full_size_unet_follows_the_published_numbering() -> None:
    names = dict(unet_pairs(tiny.SD_V1.configuration()["unet"]))
    assert names["input_blocks.4.1"] == "down_blocks.1.attentions.0"
    assert names["input_blocks.9.0.op"] == "down_blocks.2.downsamplers.0.conv"
    assert names["input_blocks.11.0.in_layers.2"] == "down_blocks.3.resnets.1.conv1"
    assert names["output_blocks.2.1.conv"] == "up_blocks.0.upsamplers.0.conv"
    assert names["output_blocks.8.2.conv"] == "up_blocks.2.upsamplers.0.conv"
    assert names["output_blocks.11.1"] == "up_blocks.3.attentions.2"
