"""Which modules of a Stable Diffusion model get an adapter, with which rank and alpha; starting from a file; the norm limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from onegraph.checkpoint import save_kohya
from onegraph.errors import CheckpointError, ConfigurationError
from onegraph.methods import LoRA
from onegraph.training.diffusion.configuration import NetworkSettings, OptimizerSettings
from onegraph.training.diffusion.network import NUM_BLOCKS, attach_networks, block_of, limit_norms, text_encoder_plan, unet_plan


def make_unet(channels: tuple[int, ...] = (320, 640, 1280, 1280), **changes: object) -> UNet2DConditionModel:
    """Stable Diffusion 1.x's topology; its width is the last detail that counts modules."""
    return UNet2DConditionModel(
        block_out_channels=channels,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=changes.pop("norm_num_groups", 32),
        **changes,
    )


def make_small_unet() -> UNet2DConditionModel:
    """Two levels of one layer: 4 transformers."""
    return make_unet(
        (8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def make_text_encoder(layers: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4)
    )


@dataclass
class Models:
    unet: nn.Module
    text_encoder: nn.Module


@pytest.fixture(scope="module")
def sd1_unet() -> UNet2DConditionModel:
    with init_empty_weights():
        return make_unet()


@pytest.fixture
def tiny() -> Models:
    return Models(make_small_unet(), make_text_encoder(2))


def test_sd1_has_192_unet_modules(sd1_unet: UNet2DConditionModel) -> None:
    plan = unet_plan(sd1_unet, NetworkSettings())
    assert len(plan) == 192
    ends = Counter(".".join(path.split(".")[-2:]) for path in plan)
    assert ends["attn1.to_q"] == ends["attn2.to_v"] == ends["to_out.0"] / 2 == 16
    assert not [path for path in plan if "resnets" in path or "samplers" in path or path.startswith(("conv_", "time_embedding"))]
    assert sum(type(sd1_unet.get_submodule(path)) is nn.Conv2d for path in plan) == 32  # proj_in and proj_out


def test_sd2_projects_with_linear_layers_and_has_192_too() -> None:
    with init_empty_weights():
        unet = make_unet(use_linear_projection=True)
    plan = unet_plan(unet, NetworkSettings())
    assert len(plan) == 192
    assert all(type(unet.get_submodule(path)) is nn.Linear for path in plan)


@pytest.mark.parametrize(("layers", "modules"), [(12, 72), (23, 138)], ids=["SD1", "SD2"])
def test_text_encoder_modules(layers: int, modules: int) -> None:
    with init_empty_weights():
        encoder = make_text_encoder(layers)
    plan = text_encoder_plan(encoder, NetworkSettings(dim=8, alpha=2.0))
    assert len(plan) == modules
    assert {path.rpartition(".")[2] for path in plan} == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}
    assert set(plan.values()) == {LoRA(rank=8, alpha=2.0)}


def test_conv_dim_adds_resnets_and_samplers(sd1_unet: UNet2DConditionModel) -> None:
    plan = unet_plan(sd1_unet, NetworkSettings(dim=8, alpha=4.0, conv_dim=2))
    assert len(plan) == 278
    wide = {path: method for path, method in plan.items() if path.endswith(("conv1", "conv2", "samplers.0.conv"))}
    assert len(wide) == 22 * 2 + 3 + 3
    assert set(wide.values()) == {LoRA(rank=2, alpha=1.0)}, "3x3 convolutions: conv_dim, and 1 as alpha where none is given"
    others = {method for path, method in plan.items() if path not in wide}
    assert others == {LoRA(rank=8, alpha=4.0)}
    assert sum(path.endswith("conv_shortcut") for path in plan) == 14
    assert sum(path.endswith("time_emb_proj") for path in plan) == 22


@pytest.mark.parametrize("alpha", [0.0, None], ids=["zero", "none"])
def test_alpha_of_zero_or_none_is_the_rank(alpha: float | None, sd1_unet: UNet2DConditionModel) -> None:
    assert set(unet_plan(sd1_unet, NetworkSettings(dim=8, alpha=alpha)).values()) == {LoRA(rank=8, alpha=8.0)}
    wide = unet_plan(sd1_unet, NetworkSettings(dim=8, conv_dim=2, conv_alpha=0.0))["mid_block.resnets.0.conv1"]
    assert wide == LoRA(rank=2, alpha=2.0)


def test_defaults_are_rank_4_alpha_1_and_no_dropout(sd1_unet: UNet2DConditionModel) -> None:
    assert set(unet_plan(sd1_unet, NetworkSettings()).values()) == {LoRA(rank=4, alpha=1.0)}
    with_dropout = NetworkSettings(dropout=0.1, rank_dropout=0.2, module_dropout=0.3)
    assert set(unet_plan(sd1_unet, with_dropout).values()) == {LoRA(rank=4, alpha=1.0, dropout=0.1, rank_dropout=0.2, module_dropout=0.3)}


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("down_blocks.0.attentions.0.proj_in", 1),
        ("down_blocks.0.attentions.1.proj_in", 2),
        ("down_blocks.0.downsamplers.0.conv", 3),
        ("down_blocks.2.attentions.1.transformer_blocks.0.ff.net.2", 8),
        ("down_blocks.3.resnets.1.conv1", 11),
        ("mid_block.attentions.0.proj_in", 12),
        ("mid_block.resnets.1.conv2", 12),
        ("up_blocks.0.resnets.0.conv1", 13),
        ("up_blocks.0.upsamplers.0.conv", 15),
        ("up_blocks.3.attentions.2.proj_out", 24),
        ("conv_in", None),
        ("time_embedding.linear_1", None),
    ],
)
def test_block_numbers(path: str, block: int | None) -> None:
    assert block_of(path) == block


def test_every_adapted_module_has_a_block(sd1_unet: UNet2DConditionModel) -> None:
    blocks = {block_of(path) for path in unet_plan(sd1_unet, NetworkSettings(conv_dim=4))}
    assert blocks == set(range(1, NUM_BLOCKS)), "all but block 0, the input convolution"


def test_block_dims_and_alphas(sd1_unet: UNet2DConditionModel) -> None:
    dims, alphas = tuple(range(NUM_BLOCKS)), tuple(10.0 + block for block in range(NUM_BLOCKS))
    settings = NetworkSettings(block_dims=dims, block_alphas=alphas, conv_block_dims=(0,) * 12 + (3,) + (0,) * 12)
    plan = unet_plan(sd1_unet, settings)
    assert plan["down_blocks.0.attentions.0.proj_in"] == LoRA(rank=1, alpha=11.0)
    assert plan["up_blocks.3.attentions.2.proj_out"] == LoRA(rank=24, alpha=34.0)
    assert plan["mid_block.resnets.0.conv1"] == LoRA(rank=3, alpha=1.0)
    assert plan["mid_block.resnets.0.time_emb_proj"] == LoRA(rank=12, alpha=22.0)
    assert "up_blocks.0.resnets.0.conv1" not in plan, "rank 0: no adapter"


def test_blocks_that_learn_nothing_get_no_adapter(sd1_unet: UNet2DConditionModel) -> None:
    down = (1.0,) * 4 + (0.0,) * 8
    plan = unet_plan(sd1_unet, NetworkSettings(), OptimizerSettings(down_lr_weight=down))
    assert {block_of(path) for path in plan if path.startswith("down")} == {1, 2}
    assert sum(path.startswith("up") for path in plan) == 9 * 12


def test_attach_both_and_the_same_seed_gives_the_same_start(tiny: Models) -> None:
    first = attach_networks(tiny, NetworkSettings(dim=2), generator=torch.Generator().manual_seed(3))
    assert {part: len(adapters.layers) for part, adapters in first.items()} == {"unet": 48, "text_encoder": 12}
    assert not any(parameter.requires_grad for name, parameter in tiny.unet.named_parameters() if not name.endswith((".down", ".up")))
    again = Models(make_small_unet(), make_text_encoder(2))
    second = attach_networks(again, NetworkSettings(dim=2), generator=torch.Generator().manual_seed(3))
    other = Models(make_small_unet(), make_text_encoder(2))
    third = attach_networks(other, NetworkSettings(dim=2), generator=torch.Generator().manual_seed(4))
    path = "mid_block.attentions.0.proj_in.down"
    assert torch.equal(first["unet"].parameters()[path], second["unet"].parameters()[path])
    assert not torch.equal(first["unet"].parameters()[path], third["unet"].parameters()[path])
    assert all(not parameter.any() for name, parameter in first["unet"].parameters().items() if name.endswith(".up"))


@pytest.mark.parametrize(("off", "left"), [("train_unet", "text_encoder"), ("train_text_encoder", "unet")])
def test_one_part_only(tiny: Models, off: str, left: str) -> None:
    assert list(attach_networks(tiny, NetworkSettings(**{off: False}))) == [left]


def test_all_ranks_zero_is_an_error(tiny: Models) -> None:
    with pytest.raises(ConfigurationError, match="no module of the unet") as raised:
        attach_networks(tiny, NetworkSettings(block_dims=(0,) * NUM_BLOCKS))
    assert raised.value.code == "nothing-to-train"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A network of rank 3, alpha 2, with random weights."""
    models = Models(make_small_unet(), make_text_encoder(2))
    parts = attach_networks(models, NetworkSettings(dim=3, alpha=2.0))
    for adapters in parts.values():
        for parameter in adapters.parameters().values():
            nn.init.normal_(parameter)
    path = tmp_path / "start.safetensors"
    save_kohya(parts, path, dtype=torch.float32, metadata={})
    return path


def test_start_from_a_file_with_the_same_settings(tiny: Models, file: Path) -> None:
    parts = attach_networks(tiny, NetworkSettings(dim=3, alpha=2.0, weights=str(file), dropout=0.5))
    assert all(adapters.parameters()[f"{next(iter(adapters.layers))}.up"].any() for adapters in parts.values())
    assert parts["unet"].methods("default")["mid_block.attentions.0.proj_in"] == LoRA(rank=3, alpha=2.0, dropout=0.5)


def test_dim_from_weights_takes_rank_and_alpha_and_keeps_the_dropout(tiny: Models, file: Path) -> None:
    parts = attach_networks(tiny, NetworkSettings(weights=str(file), dim_from_weights=True, dropout=0.5))
    assert set(parts["text_encoder"].methods("default").values()) == {LoRA(rank=3, alpha=2.0, dropout=0.5)}


@pytest.mark.parametrize("settings", [{"dim": 4, "alpha": 2.0}, {"dim": 3, "alpha": 1.0}, {}], ids=["rank", "alpha", "defaults"])
def test_a_file_of_another_shape_is_refused(tiny: Models, file: Path, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="--network_weights") as raised:
        attach_networks(tiny, NetworkSettings(weights=str(file), **settings))
    assert raised.value.code == "network-weights"
    assert "rank 3, alpha 2" in str(raised.value)
    assert "--dim_from_weights" in raised.value.hint
    assert not any("Adapted" in type(module).__name__ for module in tiny.unet.modules()), "the model is unchanged"


def test_a_file_with_modules_that_are_not_adapted_is_refused(tmp_path: Path, tiny: Models) -> None:
    wide = attach_networks(tiny, NetworkSettings(dim=2, conv_dim=2, train_text_encoder=False))
    path = tmp_path / "wide.safetensors"
    save_kohya(wide, path, dtype=torch.float32, metadata={})
    fresh = Models(make_small_unet(), make_text_encoder(2))
    with pytest.raises(ConfigurationError, match="not adapted here"):
        attach_networks(fresh, NetworkSettings(dim=2, weights=str(path)))


def test_a_file_without_the_part_that_is_trained(tmp_path: Path, tiny: Models) -> None:
    parts = attach_networks(tiny, NetworkSettings(dim=2, train_text_encoder=False))
    path = tmp_path / "unet.safetensors"
    save_kohya(parts, path, dtype=torch.float32, metadata={})
    fresh = Models(make_small_unet(), make_text_encoder(2))
    with pytest.raises(CheckpointError, match="nothing for the text encoder"):
        attach_networks(fresh, NetworkSettings(dim=2, weights=str(path), train_unet=False))


def test_norm_limit_against_the_product(tiny: Models) -> None:
    adapters = attach_networks(tiny, NetworkSettings(dim=3, alpha=2.0, conv_dim=2, train_text_encoder=False))["unet"]
    for parameter in adapters.parameters().values():
        nn.init.normal_(parameter)
    before = {path: changes(adapters, path) for path in adapters.layers}
    addresses = {name: parameter.data_ptr() for name, parameter in adapters.parameters().items()}
    norms = sorted(float(delta.norm()) for delta in before.values())
    limit = sum(norms[len(norms) // 2 :][:2]) / 2
    report = limit_norms(adapters, limit)
    for path, old in before.items():
        expected = old * min(1.0, limit / float(old.norm()))
        torch.testing.assert_close(changes(adapters, path), expected, rtol=1e-5, atol=1e-6)
    assert report.num_scaled == sum(norm > limit for norm in norms)
    assert report.largest == pytest.approx(limit, rel=1e-5)
    assert report.mean == pytest.approx(sum(min(norm, limit) for norm in norms) / len(norms), rel=1e-5)
    assert {name: parameter.data_ptr() for name, parameter in adapters.parameters().items()} == addresses


def changes(adapters: object, path: str) -> torch.Tensor:
    """The weight change of one layer, from the definition."""
    layer = adapters.layers[path]  # type: ignore[attr-defined]
    weight = layer.base_layer.weight.detach()
    method = adapters.methods("default")[path]  # type: ignore[attr-defined]
    values = {name: tensor.detach().double() for name, tensor in adapters.tensors("default")[path].items()}  # type: ignore[attr-defined]
    values["scale"] = torch.tensor(method.scale, dtype=torch.float64)
    return (method.adapt(weight.double(), values, layer.layer) - weight.double()).float()
