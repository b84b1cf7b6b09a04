"""sd-scripts network files: keys, shapes, alpha, metadata and hashes to the letter; and loading them onto a UNet and a text encoder."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes
from torch import nn

from onegraph import LoRA, adapters_of, attach, load
from onegraph.adapters import Adapters
from onegraph.checkpoint import load_parts, network_hashes, read, save, save_kohya
from onegraph.errors import AdapterError, CheckpointError, OutputError

TEXT_WIDTH = 32
UNET_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"]
TEXT_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


def unet(width: int = TEXT_WIDTH, *, linear: bool = False, blocks: tuple[int, ...] = (32, 64)) -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=blocks,
        down_block_types=("CrossAttnDownBlock2D",) * len(blocks),
        up_block_types=("CrossAttnUpBlock2D",) * len(blocks),
        cross_attention_dim=width,
        attention_head_dim=8,
        norm_num_groups=8,
        use_linear_projection=linear,
    ).eval()


def text_encoder(width: int = TEXT_WIDTH) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(1)
    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=99,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config).eval()


def randomise(adapters: Adapters) -> Adapters:
    generator = torch.Generator().manual_seed(2)
    for value in adapters.parameters().values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return adapters


def unet_adapters(**options: Any) -> Adapters:
    method = LoRA(rank=4, alpha=2)
    overrides = {"to_k": LoRA(rank=2, alpha=1), "mid_block.attentions.0.proj_in": LoRA(rank=3, alpha=6)}
    return randomise(attach(unet(**options), method, targets=UNET_TARGETS, overrides=overrides))


def text_adapters() -> Adapters:
    return randomise(attach(text_encoder(), LoRA(rank=4, alpha=4), targets=TEXT_TARGETS))


def run_unet(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    sample, context = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, TEXT_WIDTH, generator=generator)
    with torch.no_grad():
        return model(sample, torch.tensor([7]), context).sample


def run_text(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(10).reshape(1, 10) + 2).last_hidden_state


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kohya") / "style.safetensors"
    save_kohya(
        {"unet": unet_adapters(), "text_encoder": text_adapters()}, path, metadata={"ss_output_name": "style", "modelspec.title": "Style"}
    )
    return path


def test_keys_and_shapes_are_those_of_the_field(written: Path) -> None:
    tensors = load_file(written)
    text = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    query = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    out = "lora_unet_up_blocks_1_attentions_1_transformer_blocks_0_attn2_to_out_0"
    convolution = "lora_unet_mid_block_attentions_0_proj_in"
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert shapes[f"{text}.lora_down.weight"] == (4, 32)
    assert shapes[f"{text}.lora_up.weight"] == (32, 4)
    assert shapes[f"{query}.lora_down.weight"] == (4, 32)
    assert shapes[f"{out}.alpha"] == ()
    assert shapes[f"{convolution}.lora_down.weight"] == (3, 64, 1, 1)
    assert shapes[f"{convolution}.lora_up.weight"] == (64, 3, 1, 1)
    assert float(tensors[f"{convolution}.alpha"]) == 6
    assert float(tensors[f"{query}.alpha"]) == 2
    assert {key.partition(".")[2] for key in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
    assert len(tensors) == 3 * (len(unet_adapters().layers) + len(text_adapters().layers))


def test_a_real_sized_unet_and_text_encoder_have_192_and_72_modules() -> None:
    """The counts of SD 1.x, on models without memory."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    from onegraph.adapters import select

    with torch.device("meta"):
        large, text = UNet2DConditionModel(cross_attention_dim=768), CLIPTextModel(CLIPTextConfig(hidden_size=768, num_hidden_layers=12))
    assert len(select(large, LoRA(rank=4), UNET_TARGETS)[0]) == 192
    assert len(select(text, LoRA(rank=4), TEXT_TARGETS)[0]) == 72


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_tensor_has_the_dtype_asked_for_alpha_too(tmp_path: Path, dtype: torch.dtype) -> None:
    save_kohya({"text_encoder": text_adapters()}, tmp_path / "a.safetensors", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "a.safetensors").values()} == {dtype}


def test_metadata_has_what_readers_need_and_what_was_given(written: Path) -> None:
    with safe_open(written, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["ss_output_name"] == "style"
    assert metadata["modelspec.title"] == "Style"
    needed = {key: metadata[key] for key in ("ss_v2", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha")}
    assert needed == {
        "ss_v2": "False",
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "2",
    }
    assert json.loads(metadata["ss_network_args"]) == {}


def test_a_unet_of_the_second_generation_is_named_so(tmp_path: Path) -> None:
    save_kohya({"unet": unet_adapters(width=1024, linear=True, blocks=(8,))}, tmp_path / "a.safetensors")
    metadata = read(tmp_path / "a.safetensors").metadata
    assert (metadata["ss_v2"], metadata["ss_base_model_version"]) == ("True", "sd_v2")


def test_given_metadata_wins(tmp_path: Path) -> None:
    save_kohya({"text_encoder": text_adapters()}, tmp_path / "a.safetensors", metadata={"ss_base_model_version": "sd_v2_v"})
    assert read(tmp_path / "a.safetensors").metadata["ss_base_model_version"] == "sd_v2_v"


def test_the_hashes_are_those_of_the_file_with_its_ss_metadata_only(written: Path) -> None:
    """Worked out from the definition with the library's own writer; the first covers everything behind the header."""
    with safe_open(written, framework="pt") as file:
        metadata = file.metadata()
    stripped = to_bytes(load_file(written), {key: value for key, value in metadata.items() if key.startswith("ss_")})
    stream = io.BytesIO(stripped)
    stream.seek(8 + int.from_bytes(stream.read(8), "little"))
    assert metadata["sshs_model_hash"] == hashlib.sha256(stream.read()).hexdigest()
    stream.seek(0x100000)
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(stream.read(0x10000)).hexdigest()[:8]


def test_the_hashes_of_a_file_larger_than_a_mebibyte() -> None:
    tensors = {"a": torch.arange(400_000, dtype=torch.float32)}
    metadata = {"ss_steps": "1", "modelspec.title": "left out"}
    data = to_bytes(tensors, {"ss_steps": "1"})
    hashes = network_hashes(tensors, metadata)
    assert hashes["sshs_legacy_hash"] == hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8]
    assert hashes["sshs_legacy_hash"] != network_hashes({"a": tensors["a"] + 1}, metadata)["sshs_legacy_hash"]
    assert hashes == network_hashes(tensors, {**metadata, "modelspec.title": "edited"})


def test_both_parts_load_with_their_ranks_and_compute_the_same(written: Path) -> None:
    first, second = unet_adapters(), text_adapters()
    models = {"unet": unet(), "text_encoder": text_encoder()}
    loaded = load_parts(models, written)
    assert loaded.keys() == models.keys()
    torch.testing.assert_close(run_unet(models["unet"]), run_unet(first.model), rtol=0, atol=0)
    torch.testing.assert_close(run_text(models["text_encoder"]), run_text(second.model), rtol=0, atol=0)
    assert (run_unet(models["unet"]) - run_unet(unet())).abs().max() > 1e-3
    assert loaded["unet"].methods("default") == first.methods("default")


def test_the_part_that_fits_is_found_for_a_single_model(written: Path) -> None:
    model = text_encoder()
    load(model, written, name="style")
    torch.testing.assert_close(run_text(model), run_text(text_adapters().model), rtol=0, atol=0)
    load(unet(), written, part="lora_unet")
    with pytest.raises(CheckpointError) as raised:
        load(model, written, part="lora_te2")
    assert raised.value.code == "adapter-part"


def test_a_part_without_a_model_is_said(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loaded = load_parts({"unet": unet()}, written)
    assert list(loaded) == ["unet"]
    assert any("lora_te" in record.getMessage() for record in caplog.records)


def test_all_parts_load_or_none(written: Path) -> None:
    models = {"unet": unet(), "text_encoder": text_encoder(width=16)}
    with pytest.raises(CheckpointError) as raised:
        load_parts(models, written)
    assert raised.value.code == "adapter-shape"
    assert adapters_of(models["unet"]) is None
    other = {"unet": unet(), "text_encoder": text_encoder()}
    attach(other["text_encoder"], LoRA(rank=1), targets=["fc1"])
    with pytest.raises(AdapterError):
        load_parts(other, written)
    assert adapters_of(other["unet"]) is None, "the first part must be taken back when the second can't be attached"


@pytest.mark.parametrize("level", ["with", "without"])
def test_text_encoder_keys_of_both_levels_are_read(written: Path, tmp_path: Path, level: str) -> None:
    tensors = {key: value for key, value in load_file(written).items() if key.startswith("lora_te_")}
    if level == "without":
        tensors = {key.replace("lora_te_text_model_", "lora_te_"): value for key, value in tensors.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    model = text_encoder()
    load(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(run_text(model), run_text(text_adapters().model), rtol=0, atol=0)


@pytest.mark.parametrize(("written_as", "linear"), [("4-D", True), ("2-D", False)])
def test_a_1x1_convolution_and_a_linear_layer_stand_for_each_other(tmp_path: Path, written_as: str, linear: bool) -> None:
    """proj_in is a convolution in SD 1.x and a Linear in 2.x; files have either shape for either."""
    save_kohya({"unet": unet_adapters()}, tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    if written_as == "2-D":
        tensors = {key: tensor.reshape(tensor.shape[:2]) for key, tensor in tensors.items()}
        save_file(tensors, tmp_path / "a.safetensors")
    loaded = load(unet(linear=linear), tmp_path / "a.safetensors")
    expected = unet_adapters().tensors("default")
    for path, layer in loaded.tensors("default").items():
        for key, tensor in layer.items():
            assert torch.equal(tensor.flatten(), expected[path][key].flatten())
    shape = loaded.tensors("default")["mid_block.attentions.0.proj_in"]["down"].shape
    assert len(shape) == (2 if linear else 4)


def test_alpha_is_the_rank_where_the_file_has_none(written: Path, tmp_path: Path) -> None:
    tensors = {key: value for key, value in load_file(written).items() if key.startswith("lora_te") and not key.endswith(".alpha")}
    save_file(tensors, tmp_path / "a.safetensors")
    methods = read(tmp_path / "a.safetensors").methods["lora_te"]
    assert {method.alpha for method in methods.values()} == {4.0}  # type: ignore[attr-defined]


def test_rslora_is_written_as_the_alpha_of_the_same_strength(tmp_path: Path) -> None:
    adapters = randomise(attach(text_encoder(), LoRA(rank=4, alpha=3, rslora=True), targets=TEXT_TARGETS))
    save(adapters, tmp_path / "a.safetensors", format="kohya")
    model = text_encoder()
    load(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(run_text(model), run_text(adapters.model), rtol=1e-6, atol=1e-6)
    assert float(load_file(tmp_path / "a.safetensors")["lora_te_text_model_encoder_layers_0_mlp_fc1.alpha"]) == 6.0


def change(path: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    tensors = load_file(path)
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, target)
    return target


FC1 = "lora_te_text_model_encoder_layers_0_mlp_fc1"
CHANGES: dict[str, tuple[dict[str, torch.Tensor | None], str, str]] = {
    "no up": ({f"{FC1}.lora_up.weight": None}, "adapter-incomplete", f"{FC1} has only: alpha, down"),
    "only alpha": ({f"{FC1}.lora_up.weight": None, f"{FC1}.lora_down.weight": None}, "adapter-incomplete", f"{FC1} has only: alpha"),
    "ranks differ": ({f"{FC1}.lora_up.weight": torch.ones(64, 3)}, "adapter-shape", "don't share a rank"),
    "alpha is a vector": ({f"{FC1}.alpha": torch.ones(2)}, "adapter-shape", "one number was expected"),
    "unknown parameter": ({f"{FC1}.lora_sideways.weight": torch.ones(2)}, "adapter-keys", "lora_sideways"),
    "unknown module": (
        {"lora_te_absent.lora_up.weight": torch.ones(4, 2), "lora_te_absent.lora_down.weight": torch.ones(2, 4)},
        "adapter-architecture",
        "lora_te_absent",
    ),
    "loha beside it": ({f"{FC1}.hada_w1_a": torch.ones(2, 2)}, "adapter-unsupported", "LoRA and LoHa in one module"),
    "a magnitude of another size": ({f"{FC1}.dora_scale": torch.ones(2)}, "adapter-shape", "dora_scale is (2,)"),
    "wrong width": (
        {f"{FC1}.lora_up.weight": torch.ones(65, 4)},
        "adapter-shape",
        "encoder.layers.0.mlp.fc1: up is (65, 4) in the file, the layer needs (64, 4)",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_file_that_does_not_fit_is_an_error_and_the_model_stays(written: Path, tmp_path: Path, kind: str) -> None:
    changes, code, what = CHANGES[kind]
    path = change(written, tmp_path / "a.safetensors", **changes)
    model = text_encoder()
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    with pytest.raises(CheckpointError) as raised:
        load(model, path, part="lora_te")
    assert raised.value.code == code, str(raised.value)
    assert what in str(raised.value)
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def likely_file(tmp_path: Path, key: str, width: int, metadata: dict[str, str] | None = None) -> Path:
    path = tmp_path / "other.safetensors"
    save_file({f"{key}.lora_down.weight": torch.ones(2, width), f"{key}.lora_up.weight": torch.ones(32, 2)}, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("key", "width", "metadata", "family"),
    [
        ("lora_unet_down_blocks_9_attn2_to_k", 768, None, "Stable Diffusion 1.x"),
        ("lora_unet_down_blocks_9_attn2_to_k", 1024, None, "Stable Diffusion 2.x"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 2048, None, "Stable Diffusion XL"),
        ("lora_unet_input_blocks_4_1_proj_in", 640, None, "Stable Diffusion XL"),
        ("lora_te2_text_model_encoder_layers_0_mlp_fc9", 1280, None, "Stable Diffusion XL"),
        ("lora_unet_anything", 4, {"ss_base_model_version": "sd_v2_v"}, "Stable Diffusion 2.x"),
        ("lora_unet_anything", 4, {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "Stable Diffusion XL"),
        ("lora_unet_double_blocks_0_img_attn_qkv", 4, None, "Flux"),
    ],
)
def test_the_error_for_another_architecture_names_the_likely_model(
    tmp_path: Path, key: str, width: int, metadata: dict[str, str] | None, family: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        load(unet(width=768, blocks=(8,)), likely_file(tmp_path, key, width, metadata))
    assert raised.value.code == "adapter-architecture"
    assert f"probably made for {family}" in str(raised.value)
    assert "This model looks like Stable Diffusion 1.x" in str(raised.value)
    assert key in str(raised.value)


def test_a_file_of_the_other_generation_names_both(tmp_path: Path) -> None:
    save_kohya({"unet": unet_adapters(width=1024, blocks=(8,))}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as raised:
        load(unet(width=768, blocks=(8,)), tmp_path / "a.safetensors")
    assert raised.value.code == "adapter-shape"
    assert "probably made for Stable Diffusion 2.x" in str(raised.value)
    assert "looks like Stable Diffusion 1.x" in str(raised.value)


def test_what_kohya_files_have_no_place_for_is_refused(tmp_path: Path) -> None:
    other = attach(nn.ModuleDict({"layer": nn.Linear(4, 4)}), LoRA(rank=2), targets=["layer"])
    with pytest.raises(CheckpointError, match="ModuleDict"):
        save(other, tmp_path / "a.safetensors", format="kohya")
    with pytest.raises(CheckpointError, match="vae"):
        save_kohya({"vae": other}, tmp_path / "a.safetensors")
    biased = attach(text_encoder(), LoRA(rank=2, bias=True), targets=["fc1"])
    with pytest.raises(CheckpointError, match="bias"):
        save_kohya({"text_encoder": biased}, tmp_path / "a.safetensors")
    wide = attach(unet(width=2048, blocks=(8,)), LoRA(rank=2), targets=["to_k"])
    with pytest.raises(CheckpointError, match="SDXL"):
        save_kohya({"unet": wide}, tmp_path / "a.safetensors")
    with pytest.raises(OutputError):
        save_kohya({"text_encoder": text_adapters()}, tmp_path / "absent" / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_two_text_encoders_get_the_prefixes_of_sdxl_and_are_told_apart_by_their_shapes(tmp_path: Path) -> None:
    small, large = (attach(text_encoder(width=width), LoRA(rank=2), targets=["fc1"]) for width in (16, 32))
    save_kohya({"text_encoder": randomise(small), "text_encoder_2": randomise(large)}, tmp_path / "a.safetensors")
    assert set(read(tmp_path / "a.safetensors").parts) == {"lora_te1", "lora_te2"}
    loaded = load(text_encoder(width=32), tmp_path / "a.safetensors")
    assert torch.equal(
        loaded.tensors("default")["encoder.layers.0.mlp.fc1"]["up"], large.tensors("default")["encoder.layers.0.mlp.fc1"]["up"]
    )
    roles = load_parts({"text_encoder": text_encoder(width=16), "text_encoder_2": text_encoder(width=32)}, tmp_path / "a.safetensors")
    assert set(roles) == {"text_encoder", "text_encoder_2"}


def test_the_file_is_the_same_after_a_round_trip(written: Path, tmp_path: Path) -> None:
    models = {"unet": unet(), "text_encoder": text_encoder()}
    save_kohya(load_parts(models, written), tmp_path / "again.safetensors", metadata=dict(read(written).metadata))
    assert (tmp_path / "again.safetensors").read_bytes() == written.read_bytes()
