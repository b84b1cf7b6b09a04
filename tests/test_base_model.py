"""Base models from files and folders: what loads, what is refused and how it is named."""

from __future__ import annotations

import hashlib
import json
import socket
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import tiny_diffusion as tiny
from onegraph.errors import ModelFileError
from onegraph.training.diffusion.base_model import CONFIG_KEY, load_base_model
from onegraph.training.diffusion.families import SD_V1, SD_V2, Components, clip_tokenizer
from onegraph.training.diffusion.single_file import save_checkpoint, save_single_file

PARTS = ("unet", "vae", "text_encoder")


@pytest.fixture(scope="module")
def components() -> Components:
    return tiny.configuration()


@pytest.fixture(scope="module")
def tensors(components: Components) -> dict[str, Tensor]:
    """A whole model under original keys."""
    return tiny.original_tensors(components)


@pytest.fixture
def file(tmp_path: Path, components: Components, tensors: dict[str, Tensor]) -> Path:
    return written(tmp_path / "model.safetensors", tensors, components)


def written(path: Path, tensors: dict[str, Tensor], components: Any = None) -> Path:
    save_file(tensors, str(path), metadata=None if components is None else {CONFIG_KEY: json.dumps(components)})
    return path


def folder(path: Path, components: Components, *, prefix: str = "", tokenizer: bool = False) -> Path:
    """A diffusers folder; ``prefix`` as transformers 4 wrote text encoders."""
    for part in PARTS:
        (path / part).mkdir(parents=True)
        (path / part / "config.json").write_text(json.dumps(components[part]))
        state = tiny.build(part, components[part]).state_dict()
        name = "model.safetensors" if part == "text_encoder" else "diffusion_pytorch_model.safetensors"
        extra = prefix if part == "text_encoder" else ""
        save_file({extra + key: tensor for key, tensor in state.items()}, str(path / part / name))
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(components["scheduler"]))
    if tokenizer:
        clip_tokenizer().save_pretrained(str(path / "tokenizer"))
    return path


def assert_same_weights(left: Any, right: Any) -> None:
    for part in PARTS:
        ours, theirs = getattr(left, part).state_dict(), getattr(right, part).state_dict()
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"{part}.{name}"


def test_one_file_with_its_configuration_inside(file: Path, components: Components) -> None:
    base = load_base_model(file)
    for part in PARTS:
        expected = tiny.build(part, components[part]).state_dict()
        got = getattr(base, part).state_dict()
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in got)
        module = getattr(base, part)
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())
        assert all(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers()))
    assert base.family == SD_V1
    assert base.prediction_type == base.scheduler_config["prediction_type"] == "epsilon"
    assert base.scaling_factor == 0.18215
    assert base.name == "model.safetensors"
    assert base.tokenizer("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
    with torch.no_grad():
        assert base.text_encoder(torch.zeros(1, 77, dtype=torch.int64)).last_hidden_state.shape == (1, 77, 8)


def test_hashes_are_those_of_the_file_and_a_folder_has_none(tmp_path: Path, file: Path, components: Components) -> None:
    content = file.read_bytes()
    assert len(content) > 0x100000
    base = load_base_model(file)
    assert base.model_hash() == hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert base.new_model_hash() == hashlib.sha256(content).hexdigest()
    base = load_base_model(folder(tmp_path / "folder", components))
    assert base.model_hash() is None
    assert base.new_model_hash() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_that_of_every_weight_whatever_the_file_has(tmp_path: Path, components: Components, tensors: Any, dtype: Any) -> None:
    half = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    path = written(tmp_path / "m.safetensors", half, components)
    base = load_base_model(path, dtype=dtype)
    for part in PARTS:
        assert {parameter.dtype for parameter in getattr(base, part).parameters()} == {dtype}
    assert {parameter.dtype for parameter in load_base_model(path).unet.parameters()} == {torch.float32}


def test_the_weights_are_copies_so_training_never_writes_into_the_file(file: Path) -> None:
    before = file.read_bytes()
    base = load_base_model(file)
    with torch.no_grad():
        for parameter in base.unet.parameters():
            parameter.add_(1)
    assert file.read_bytes() == before
    weight = base.unet.conv_in.weight.clone()
    file.unlink()
    assert torch.equal(base.unet.conv_in.weight, weight)


def test_folder_file_and_ckpt_give_the_same_model(tmp_path: Path, components: Components) -> None:
    from_folder = load_base_model(folder(tmp_path / "tiny", components, tokenizer=True))
    assert from_folder.name == "tiny"
    assert from_folder.tokenizer("a photo of a cat").input_ids[1:-1] == [320, 1125, 539, 320, 2368]
    single, pickled = tmp_path / "m.safetensors", tmp_path / "n.ckpt"
    save_single_file(from_folder, single, dtype=torch.float32)
    save_checkpoint(single, pickled, beside={"global_step": 7, "hyper_parameters": {"path": Path("x")}})
    from_file, from_ckpt = load_base_model(single), load_base_model(pickled)
    assert_same_weights(from_folder, from_file)
    assert_same_weights(from_folder, from_ckpt)
    assert from_file.scheduler_config == from_folder.scheduler_config
    assert "PosixPath" in from_ckpt.notes[0]
    assert from_ckpt.scaling_factor == from_folder.scaling_factor


def test_folders_of_transformers_4_and_of_torch_files(tmp_path: Path, components: Components) -> None:
    new = load_base_model(folder(tmp_path / "new", components))
    old_path = folder(tmp_path / "old", components, prefix="text_model.")
    weights = old_path / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(dict(tiny.build("unet", components["unet"]).state_dict()), weights.with_suffix(".bin"))
    weights.unlink()
    assert_same_weights(new, load_base_model(old_path))


def test_sharded_folder(tmp_path: Path, components: Components) -> None:
    path = folder(tmp_path / "m", components)
    whole = load_base_model(path)
    state = dict(whole.unet.state_dict())
    names = sorted(state)
    (path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, keys in shards.items():
        save_file({key: state[key] for key in keys}, str(path / "unet" / shard))
    index = {"weight_map": {key: shard for shard, keys in shards.items() for key in keys}}
    (path / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_weights(whole, load_base_model(path))


def test_configuration_beside_the_file_and_by_argument(tmp_path: Path, components: Components, tensors: Any) -> None:
    path = written(tmp_path / "m.safetensors", tensors)
    with pytest.raises(ModelFileError) as caught:
        load_base_model(path)
    assert caught.value.code == "model-shapes"
    assert "(8, 4, 3, 3), the model wants (320, 4, 3, 3)" in str(caught.value)
    assert "shipped configuration of Stable Diffusion 1.x" in str(caught.value)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(components))
    given = load_base_model(path, model_config=other)
    (tmp_path / "m.json").write_text(json.dumps(components))
    assert_same_weights(given, load_base_model(path))
    (tmp_path / "m.json").write_text(json.dumps({"description": "of another program"}))
    with pytest.raises(ModelFileError):
        load_base_model(path)
    assert_same_weights(given, load_base_model(path, model_config=folder(tmp_path / "folder", components)))


def test_prediction_type_by_file_and_by_flag(tmp_path: Path, components: Components, tensors: Any) -> None:
    said = {**components, "scheduler": {**components["scheduler"], "prediction_type": "v_prediction"}}
    path = written(tmp_path / "m.safetensors", tensors, said)
    assert load_base_model(path).prediction_type == "v_prediction"
    base = load_base_model(path, v_parameterization=False)
    assert base.prediction_type == base.scheduler_config["prediction_type"] == "epsilon"
    path = written(tmp_path / "n.safetensors", tensors, components)
    assert load_base_model(path, v_parameterization=True).prediction_type == "v_prediction"


def test_stable_diffusion_2_with_openclips_layout(tmp_path: Path) -> None:
    components = tiny.configuration(SD_V2)
    tensors = tiny.original_tensors(components)
    text = {name for name in tensors if name.startswith("cond_stage_model.")}
    model: Any = tiny.build("text_encoder", components["text_encoder"])
    tensors = {name: tensor for name, tensor in tensors.items() if name not in text} | tiny.openclip_tensors(model)
    path = written(tmp_path / "m.safetensors", tensors, components)
    base = load_base_model(path, v2=True)
    assert base.family == SD_V2
    assert base.tokenizer.pad_token_id == 0
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in base.text_encoder.state_dict().items())
    assert load_base_model(path, v_parameterization=True).family.name == "sd_v2_v"


def test_v2_asked_of_a_1x_model_is_an_error(file: Path) -> None:
    with pytest.raises(ModelFileError, match=r"is Stable Diffusion 1\.x, not 2\.x") as caught:
        load_base_model(file, v2=True)
    assert caught.value.code == "model-family"
    assert load_base_model(file, v2=False).family == SD_V1


def test_ema_weights_beside_are_left_alone(tmp_path: Path, components: Components, tensors: Any) -> None:
    ema = {
        "model_ema." + name.removeprefix("model.").replace(".", ""): tensor + 1 for name, tensor in tensors.items() if "diffusion" in name
    }
    more = {
        **tensors,
        **ema,
        "betas": torch.zeros(1000),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77),
    }
    path = written(tmp_path / "m.safetensors", more, components)
    assert_same_weights(load_base_model(path), load_base_model(written(tmp_path / "n.safetensors", tensors, components)))


@pytest.mark.parametrize("form", ["original", "bare original", "diffusers file", "vae folder", "model folder", "ckpt"])
def test_another_vae(tmp_path: Path, file: Path, components: Components, form: str) -> None:
    from onegraph.training.diffusion.original_keys import to_original

    other = tiny.build("vae", components["vae"], seed=9)
    state = dict(other.state_dict())
    original = {name: tensor.contiguous() for name, tensor in to_original("vae", components["vae"], state).items()}
    bare = {name.removeprefix("first_stage_model."): tensor for name, tensor in original.items()}
    path = tmp_path / "vae.safetensors"
    if form == "original":
        save_file(original, str(path))
    elif form == "bare original":
        save_file({**bare, "loss.logvar": torch.zeros(1)}, str(path))
    elif form == "diffusers file":
        save_file(state, str(path))
    elif form == "ckpt":
        path = tmp_path / "vae.ckpt"
        torch.save({"state_dict": bare}, path)
    else:
        path = folder(tmp_path / "other", components)
        save_file(state, str(path / "vae" / "diffusion_pytorch_model.safetensors"))
        path = path / "vae" if form == "vae folder" else path
    base = load_base_model(file, vae=path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.vae.state_dict().items())
    assert not torch.equal(load_base_model(file).vae.quant_conv.weight, state["quant_conv.weight"])


def test_a_model_without_its_vae_needs_one(tmp_path: Path, components: Components, tensors: Any, file: Path) -> None:
    path = written(tmp_path / "m.safetensors", {name: t for name, t in tensors.items() if "first_stage" not in name}, components)
    with pytest.raises(ModelFileError, match=r"lacks the VAE \(first_stage_model\.\*\)") as caught:
        load_base_model(path)
    assert caught.value.code == "model-incomplete"
    assert "--vae" in caught.value.hint
    assert load_base_model(path, vae=file).scaling_factor == 0.18215


def test_mismatches_are_named(tmp_path: Path, components: Components, tensors: Any) -> None:
    root = "model.diffusion_model."
    altered = dict(tensors)
    altered[root + "time_embed.0.weight"] = torch.zeros(2, 2)
    altered[root + "label_emb.0.0.weight"] = torch.zeros(1)
    del altered[root + "out.0.bias"]
    with pytest.raises(ModelFileError) as caught:
        load_base_model(written(tmp_path / "m.safetensors", altered, components))
    text = str(caught.value)
    assert caught.value.code == "model-shapes"
    assert f"{root}time_embed.0.weight is (2, 2), the model wants (32, 8)" in text
    assert f"{root}label_emb.0.0.weight has no place in the model" in text
    assert "conv_norm_out.bias is missing" in text


def test_weights_that_are_whole_numbers_are_refused(tmp_path: Path, components: Components, tensors: Any) -> None:
    key = "model.diffusion_model.time_embed.0.weight"
    altered = {**tensors, key: tensors[key].to(torch.int8)}
    with pytest.raises(ModelFileError, match=f"{key} holds int8, the model wants") as caught:
        load_base_model(written(tmp_path / "m.safetensors", altered, components))
    assert caught.value.code == "model-shapes"


def first_layer(tensors: dict[str, Tensor], channels: int) -> dict[str, Tensor]:
    key = "model.diffusion_model.input_blocks.0.0.weight"
    return {**tensors, key: torch.zeros(8, channels, 3, 3)}


OTHERS: dict[str, tuple[dict[str, Tensor], str, str]] = {
    "LoRA of sd-scripts": ({"lora_unet_x.lora_down.weight": torch.zeros(1)}, "a LoRA network file", "not-a-model"),
    "LoRA of PEFT": ({"base_model.model.q_proj.lora_A.weight": torch.zeros(1)}, "a LoRA network file", "not-a-model"),
    "LoHa": ({"lora_unet_x.hada_w1_a": torch.zeros(1)}, "a LoRA network file", "not-a-model"),
    "textual inversion": ({"emb_params": torch.zeros(1, 768)}, "a textual inversion", "not-a-model"),
    "SDXL": (
        {
            "conditioner.embedders.0.transformer.x": torch.zeros(1),
            "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(320, 4, 3, 3),
        },
        "a Stable Diffusion XL model",
        "not-supported",
    ),
    "SD 3": ({"model.diffusion_model.joint_blocks.0.x": torch.zeros(1)}, "a Stable Diffusion 3 model", "not-supported"),
    "Flux": ({"double_blocks.0.img_attn.norm.key_norm.scale": torch.zeros(1)}, "a Flux model", "not-supported"),
    "ControlNet": ({"control_model.input_blocks.0.0.weight": torch.zeros(1)}, "a ControlNet", "not-a-model"),
    "VAE": ({"first_stage.decoder": torch.zeros(1), "encoder.down.0.block.0.norm1.weight": torch.zeros(1)}, "a VAE alone", "not-a-model"),
    "diffusers UNet": ({"down_blocks.0.resnets.0.time_emb_proj.weight": torch.zeros(1)}, "a UNet alone", "not-a-model"),
    "language model": ({"model.embed_tokens.weight": torch.zeros(1)}, "a language model", "not-a-model"),
    "something else": ({"fc.weight": torch.zeros(1)}, "no Stable Diffusion model has", "not-a-model"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_says_what_it_is(tmp_path: Path, name: str) -> None:
    tensors, what, code = OTHERS[name]
    with pytest.raises(ModelFileError) as caught:
        load_base_model(written(tmp_path / "m.safetensors", tensors))
    assert what in caught.value.what
    assert caught.value.code == code
    assert ("not supported yet" in caught.value.hint) == (code == "not-supported")


@pytest.mark.parametrize(("channels", "what"), [(9, "an inpainting model"), (8, "an instruction"), (7, "an upscaler")])
def test_a_unet_with_other_inputs_says_so(tmp_path: Path, components: Components, tensors: Any, channels: int, what: str) -> None:
    path = written(tmp_path / "m.safetensors", first_layer(tensors, channels), components)
    with pytest.raises(ModelFileError, match=f"takes {channels} channels, not 4") as caught:
        load_base_model(path)
    assert what in caught.value.what
    assert caught.value.code == "not-supported"


NOT_MODELS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "web page": (b"<!DOCTYPE html><html>Sign in</html>", "is a web page"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 4\n", "is a git-lfs pointer"),
    "JSON": (b'{"error": "not found"}', "is a JSON file"),
    "text": (b"hello there, nothing to see\n", "is a text file"),
    "GGUF": (b"GGUF\x03\x00\x00\x00", "is a GGUF model"),
    "RAR": (b"Rar!\x1a\x07\x01\x00", "is a RAR archive"),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("name", NOT_MODELS)
def test_a_file_that_is_no_model_says_what_it_is(tmp_path: Path, name: str, suffix: str) -> None:
    content, message = NOT_MODELS[name]
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_base_model(path)
    assert caught.value.code == "not-a-model"
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_says_that_it_is_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.safetensors"
    Image.new("RGB", (4, 4)).save(path, kind)
    with pytest.raises(ModelFileError, match="image, not a model"):
        load_base_model(path)


def test_a_zip_and_code_as_text_under_a_models_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.safetensors", "x")
    with pytest.raises(ModelFileError, match="is a zip archive, not a model"):
        load_base_model(path)
    path = tmp_path / "m.ckpt"
    path.write_bytes(b"cposix\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(ModelFileError, match=r"posix\.system") as caught:
        load_base_model(path)
    assert caught.value.code == "pickle-runs-code"


@pytest.mark.parametrize("kept", [5, 12, 200, 0.2, 0.9, -1])
def test_a_truncated_safetensors_file_says_how_much_is_missing(file: Path, kept: float) -> None:
    content = file.read_bytes()
    length = int(kept) if kept > 1 else len(content) - 1 if kept < 0 else int(len(content) * kept)
    file.write_bytes(content[:length])
    with pytest.raises(ModelFileError) as caught:
        load_base_model(file)
    assert caught.value.code == "model-file-truncated"
    if length > 12:
        assert f"{length:,} bytes of" in str(caught.value)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((20).to_bytes(8, "little") + b"{" * 20)
    with pytest.raises(ModelFileError, match="damaged safetensors header"):
        load_base_model(path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":["0","x"]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,4]}}',
    ],
    ids=["deep", "text for a number", "negative shape", "unknown dtype", "overflow"],
)
def test_an_impossible_header_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelFileError) as caught:
        load_base_model(path)
    assert caught.value.code == "model-file-damaged"


def test_a_folder_that_is_no_model(tmp_path: Path, file: Path, components: Components) -> None:
    with pytest.raises(ModelFileError, match="is a folder with model files in it") as caught:
        load_base_model(tmp_path)
    assert str(file) in caught.value.hint
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelFileError, match=r"lacks the unet/config\.json, the vae/config\.json, the text_encoder/config\.json"):
        load_base_model(empty)
    broken = folder(tmp_path / "broken", components)
    (broken / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"lacks the UNet") as caught:
        load_base_model(broken)
    (broken / "text_encoder_2").mkdir()
    with pytest.raises(ModelFileError, match="Stable Diffusion XL") as caught:
        load_base_model(broken)
    assert caught.value.code == "not-supported"


def test_a_missing_file_offers_the_nearest_name(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ModelFileError, match=r"modle\.safetensors does not exist") as caught:
        load_base_model(tmp_path / "modle.safetensors")
    assert str(file) in caught.value.hint
    with pytest.raises(ModelFileError, match="does not exist") as caught:
        load_base_model("/no/such/folder/model.ckpt")
    assert caught.value.code == "not-found"


def test_a_hub_name_offline_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(ModelFileError, match="can't be fetched from the hub") as caught:
        load_base_model("someone/some-model")
    assert caught.value.code == "hub-unreachable"
    assert "HF_HUB_OFFLINE" in str(caught.value)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("network", ["refuses", "never answers"])
def test_a_hub_name_without_a_network_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    from huggingface_hub import constants

    from onegraph.training.diffusion import hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if network == "never answers":
            server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ModelFileError) as caught:
            hub.download("someone/some-model", timeout_seconds=0.5)
        assert time.monotonic() - started < 5
    assert caught.value.code == "hub-unreachable"
    assert "pass its folder" in caught.value.hint


def test_shipped_configurations_have_the_published_sizes() -> None:
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    def millions(module: Any) -> float:
        return round(sum(parameter.numel() for parameter in module.parameters()) / 1e6, 2)

    sizes = {}
    for family in (SD_V1, SD_V2):
        configuration: Any = family.configuration()
        with init_empty_weights():
            unet = UNet2DConditionModel.from_config(configuration["unet"])
            vae = AutoencoderKL.from_config(configuration["vae"])
            text = CLIPTextModel(CLIPTextConfig.from_dict(configuration["text_encoder"]))
        sizes[family.name] = (millions(unet), millions(vae), millions(text))
    assert sizes == {"sd_v1": (859.52, 83.65, 123.06), "sd_v2": (865.91, 83.65, 340.39)}


def test_the_demo_model_is_whole_and_small(root: Path) -> None:
    path = root / "demo" / "model" / "tiny-sd.safetensors"
    assert path.stat().st_size < 30e6
    base = load_base_model(path)
    assert base.family == SD_V1
    assert base.scaling_factor == pytest.approx(1.0037362774768297)
    assert base.unet.config.block_out_channels == [64, 96, 96, 96]
    assert (path.parent / "README.md").is_file()
    pictures = sorted((root / "demo" / "images" / "10_flat emoji").glob("*.png"))
    assert len(pictures) >= 60
    assert all(picture.with_suffix(".caption").read_text().startswith("a flat emoji of ") for picture in pictures)


def test_2x_files_that_do_not_say_what_they_predict_get_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onegraph.training.diffusion import families

    small = tiny.configuration(SD_V2)
    monkeypatch.setattr(families.Family, "configuration", lambda self: json.loads(json.dumps(small)))
    tensors = tiny.original_tensors(small)
    model = tiny.build("text_encoder", small["text_encoder"])
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("cond_stage_model.")}
    path = written(tmp_path / "m.safetensors", kept | tiny.openclip_tensors(model))
    base = load_base_model(path)
    assert base.family == SD_V2
    assert "--v_parameterization" in base.notes[0]
    assert load_base_model(path, v_parameterization=True).notes == ()
