"""Tiny random Stable Diffusion models in several shapes, for tests of files and loading."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from onegraph.training.diffusion.families import SD_V1, SD_V2, Components, Family
from onegraph.training.diffusion.original_keys import to_original

CROSS, PLAIN = "CrossAttn", ""


def unet_config(*, channels: tuple[int, ...] = (8, 16), attention: str = "x.", layers: int = 1, **more: Any) -> dict[str, Any]:
    """``attention``: one letter a level from the top, ``x`` with cross attention."""
    config = SD_V1.configuration()["unet"]
    config.update(
        block_out_channels=list(channels),
        down_block_types=[f"{CROSS if letter == 'x' else PLAIN}DownBlock2D" for letter in attention],
        up_block_types=[f"{CROSS if letter == 'x' else PLAIN}UpBlock2D" for letter in reversed(attention)],
        layers_per_block=layers,
        attention_head_dim=2,
        cross_attention_dim=8,
        norm_num_groups=4,
        sample_size=8,
    )
    config.update(more)
    return config


def vae_config(*, channels: tuple[int, ...] = (8, 16), layers: int = 1) -> dict[str, Any]:
    config = SD_V1.configuration()["vae"]
    config.update(
        block_out_channels=list(channels),
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
        layers_per_block=layers,
        norm_num_groups=4,
        sample_size=32,
    )
    return config


def text_config(*, layers: int = 2, family: Family = SD_V1) -> dict[str, Any]:
    config = family.configuration()["text_encoder"]
    config.update(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=layers, projection_dim=8)
    return config


def configuration(family: Family = SD_V1) -> Components:
    """The smallest model with everything in it."""
    scheduler = family.configuration()["scheduler"]
    unet = unet_config(use_linear_projection=family.is_v2)
    return {"unet": unet, "vae": vae_config(channels=(8, 8, 8, 8)), "text_encoder": text_config(family=family), "scheduler": scheduler}


def build(part: str, config: dict[str, Any], *, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    if part == "text_encoder":
        return CLIPTextModel(CLIPTextConfig.from_dict(dict(config))).eval()
    kind: Any = UNet2DConditionModel if part == "unet" else AutoencoderKL
    return kind.from_config(dict(config)).eval()


def original_tensors(components: Components) -> dict[str, torch.Tensor]:
    """A whole random model under original keys."""
    tensors: dict[str, torch.Tensor] = {}
    for part in ("unet", "vae", "text_encoder"):
        tensors.update(to_original(part, components[part], build(part, components[part]).state_dict()))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def openclip_tensors(model: torch.nn.Module, *, extra_blocks: int = 1) -> dict[str, torch.Tensor]:
    """A CLIP text model as an SD 2.x file keeps it: OpenCLIP's names, q, k and v in one tensor, and the block that isn't used."""
    prefix = "cond_stage_model.model."
    state = model.state_dict()
    layers = int(model.config.num_hidden_layers)
    tensors = {
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "text_projection": torch.randn(8, 8),
        "logit_scale": torch.tensor(1.0),
    }
    names = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "self_attn.out_proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for block in range(layers + extra_blocks):
        source = f"encoder.layers.{min(block, layers - 1)}"
        target = f"transformer.resblocks.{block}"
        for leaf in ("weight", "bias"):
            for theirs, ours in names.items():
                tensors[f"{target}.{ours}.{leaf}"] = state[f"{source}.{theirs}.{leaf}"]
            fused = torch.cat([state[f"{source}.self_attn.{letter}_proj.{leaf}"] for letter in "qkv"])
            tensors[f"{target}.attn.in_proj_{leaf}"] = fused
    return {prefix + name: tensor.clone() for name, tensor in tensors.items()}


__all__ = ["SD_V1", "SD_V2", "build", "configuration", "openclip_tensors", "original_tensors", "text_config", "unet_config", "vae_config"]
