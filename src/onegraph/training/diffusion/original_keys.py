"""Original (LDM) key names <-> diffusers: one table, both directions, driven by the configuration.

A model is a list of module pairs ``(original prefix, diffusers prefix)``; everything below a pair keeps its own name.
Reading looks the longest original prefix up, writing the longest diffusers prefix, so one table serves both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Part = Literal["unet", "vae", "text_encoder"]
Pair = tuple[str, str]
Config = Mapping[str, Any]

PREFIXES: dict[Part, str] = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "cond_stage_model.transformer.text_model.",
}
OPENCLIP_PREFIX = "cond_stage_model.model."
BARE_CLIP_PREFIX = "cond_stage_model.transformer."

# Inside one residual block of the UNet and of the VAE.
UNET_RESNET: tuple[Pair, ...] = (
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
    ("skip_connection", "conv_shortcut"),
)
VAE_RESNET: tuple[Pair, ...] = (
    ("norm1", "norm1"),
    ("conv1", "conv1"),
    ("norm2", "norm2"),
    ("conv2", "conv2"),
    ("nin_shortcut", "conv_shortcut"),
)
# The VAE's one attention: 1x1 convolutions in the original, linear layers in diffusers.
VAE_ATTENTION: tuple[Pair, ...] = (
    ("norm", "group_norm"),
    ("q", "to_q"),
    ("k", "to_k"),
    ("v", "to_v"),
    ("proj_out", "to_out.0"),
)
# diffusers folders written before 2023 name the same four layers so.
OLD_VAE_ATTENTION: tuple[Pair, ...] = (
    ("query", "to_q"),
    ("key", "to_k"),
    ("value", "to_v"),
    ("proj_attn", "to_out.0"),
)
UNET_ENDS: tuple[Pair, ...] = (
    ("time_embed.0", "time_embedding.linear_1"),
    ("time_embed.2", "time_embedding.linear_2"),
    ("input_blocks.0.0", "conv_in"),
    ("out.0", "conv_norm_out"),
    ("out.2", "conv_out"),
)
VAE_ENDS: tuple[Pair, ...] = (("quant_conv", "quant_conv"), ("post_quant_conv", "post_quant_conv"))
# OpenCLIP's text tower (SD 2.x); its attention keeps q, k and v in one tensor, `attn.in_proj_weight`.
OPENCLIP_ENDS: tuple[Pair, ...] = (
    ("token_embedding", "embeddings.token_embedding"),
    ("positional_embedding", "embeddings.position_embedding.weight"),
    ("ln_final", "final_layer_norm"),
)
OPENCLIP_LAYER: tuple[Pair, ...] = (
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)
FUSED = ("q_proj", "k_proj", "v_proj")

# Beside the weights in some files, and no part of the diffusers modules.
IGNORED_TEXT = ("embeddings.position_ids", "logit_scale", "text_projection", "attn_mask", "text_projection.weight")


def unet_pairs(config: Config) -> list[Pair]:
    """The UNet's module pairs for a diffusers configuration.

    Args:
        config: ``down_block_types``, ``up_block_types`` and ``layers_per_block`` (one number, or one a level).
    """
    down, up = config["down_block_types"], config["up_block_types"]
    per_block = config.get("layers_per_block", 2)
    layers = [per_block] * len(down) if isinstance(per_block, int) else list(per_block)
    pairs = list(UNET_ENDS)
    block = 1
    for level, kind in enumerate(down):
        for layer in range(layers[level]):
            pairs += _inside(f"input_blocks.{block}.0", f"down_blocks.{level}.resnets.{layer}", UNET_RESNET)
            if _has_attention(kind):
                pairs.append((f"input_blocks.{block}.1", f"down_blocks.{level}.attentions.{layer}"))
            block += 1
        if level < len(down) - 1:
            pairs.append((f"input_blocks.{block}.0.op", f"down_blocks.{level}.downsamplers.0.conv"))
            block += 1
    pairs += _inside("middle_block.0", "mid_block.resnets.0", UNET_RESNET)
    pairs.append(("middle_block.1", "mid_block.attentions.0"))
    pairs += _inside("middle_block.2", "mid_block.resnets.1", UNET_RESNET)
    block = 0
    for level, kind in enumerate(up):
        for layer in range(layers[len(down) - 1 - level] + 1):
            pairs += _inside(f"output_blocks.{block}.0", f"up_blocks.{level}.resnets.{layer}", UNET_RESNET)
            if _has_attention(kind):
                pairs.append((f"output_blocks.{block}.1", f"up_blocks.{level}.attentions.{layer}"))
            block += 1
        if level < len(up) - 1:
            place = 2 if _has_attention(kind) else 1
            pairs.append((f"output_blocks.{block - 1}.{place}.conv", f"up_blocks.{level}.upsamplers.0.conv"))
    return pairs


def vae_pairs(config: Config) -> list[Pair]:
    """The autoencoder's module pairs for a diffusers configuration.

    Args:
        config: ``down_block_types``, ``up_block_types`` and ``layers_per_block``.
    """
    layers = config.get("layers_per_block", 1)
    down, up = len(config["down_block_types"]), len(config["up_block_types"])
    pairs = list(VAE_ENDS)
    for side in ("encoder", "decoder"):
        pairs += [(f"{side}.conv_in", f"{side}.conv_in"), (f"{side}.conv_out", f"{side}.conv_out")]
        pairs.append((f"{side}.norm_out", f"{side}.conv_norm_out"))
        for block in (1, 2):
            pairs += _inside(f"{side}.mid.block_{block}", f"{side}.mid_block.resnets.{block - 1}", VAE_RESNET)
        pairs += _inside(f"{side}.mid.attn_1", f"{side}.mid_block.attentions.0", VAE_ATTENTION)
    for level in range(down):
        for layer in range(layers):
            pairs += _inside(f"encoder.down.{level}.block.{layer}", f"encoder.down_blocks.{level}.resnets.{layer}", VAE_RESNET)
        pairs.append((f"encoder.down.{level}.downsample.conv", f"encoder.down_blocks.{level}.downsamplers.0.conv"))
    for level in range(up):
        original = f"decoder.up.{up - 1 - level}"
        for layer in range(layers + 1):
            pairs += _inside(f"{original}.block.{layer}", f"decoder.up_blocks.{level}.resnets.{layer}", VAE_RESNET)
        pairs.append((f"{original}.upsample.conv", f"decoder.up_blocks.{level}.upsamplers.0.conv"))
    return pairs


def openclip_pairs(config: Config) -> list[Pair]:
    """The module pairs of OpenCLIP's text tower; the fused attention input is taken apart by ``to_diffusers``."""
    pairs = list(OPENCLIP_ENDS)
    for layer in range(config["num_hidden_layers"]):
        pairs += _inside(f"transformer.resblocks.{layer}", f"encoder.layers.{layer}", OPENCLIP_LAYER)
    return pairs


@dataclass
class Converted:
    """What came out of a file for one model.

    ``tensors`` are named as in diffusers, ``origin`` tells which key of the file each came from,
    ``leftover`` are keys below the model's prefix that no row of the table knows.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    leftover: list[str] = field(default_factory=list)


def to_diffusers(part: Part, config: Config, tensors: Mapping[str, Tensor]) -> Converted:
    """One model's tensors out of an original file, named and shaped as in diffusers.

    Shapes: VAE attention (O, I, 1, 1) -> (O, I); OpenCLIP ``in_proj`` (3C, C) -> three (C, C); all others unchanged, dtype kept.

    Args:
        part: Which model.
        config: Its diffusers (or transformers) configuration.
        tensors: The whole file, original keys; for a VAE also a file without the ``first_stage_model.`` prefix.
    """
    prefix = text_prefix(tensors) if part == "text_encoder" else PREFIXES[part]
    if part == "vae" and not any(key.startswith(prefix) for key in tensors):
        prefix = ""
    own = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    if part == "text_encoder" and prefix == OPENCLIP_PREFIX:
        return _from_openclip(config, own, tensors)
    names = {} if part == "text_encoder" else dict(unet_pairs(config) if part == "unet" else vae_pairs(config))
    result = Converted()
    for name, key in own.items():
        # CLIP's text model has the same names on both sides.
        target = name if part == "text_encoder" else rename(name, names)
        if part == "text_encoder" and name in IGNORED_TEXT:
            continue
        if target is None or target in result.tensors:
            result.leftover.append(key)
            continue
        result.tensors[target] = _linear(target, tensors[key]) if part == "vae" else tensors[key]
        result.origin[target] = key
    return result


def to_original(part: Part, config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a diffusers model under the original file's keys: the exact inverse of ``to_diffusers``.

    Shapes: VAE attention (O, I) -> (O, I, 1, 1); all others unchanged, dtype kept. Text encoders are written in CLIP's layout.

    Args:
        part: Which model.
        config: Its diffusers (or transformers) configuration.
        tensors: ``model.state_dict()``.

    Raises:
        KeyError: A tensor that the original layout has no name for.
    """
    prefix = PREFIXES[part]
    if part == "text_encoder":
        return {prefix + clip_name(name): tensor for name, tensor in tensors.items() if clip_name(name) not in IGNORED_TEXT}
    names = {theirs: original for original, theirs in (unet_pairs(config) if part == "unet" else vae_pairs(config))}
    result = {}
    for name, tensor in tensors.items():
        target = rename(name, names)
        if target is None:
            raise KeyError(f"{part}: {name} has no name in the original layout")
        if part == "vae" and _is_attention_weight(name) and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        result[prefix + target] = tensor
    return result


def from_folder(part: Part, tensors: Mapping[str, Tensor]) -> Converted:
    """The tensors of a diffusers folder under today's names: folders of 2022 name the VAE's attention and CLIP's root otherwise."""
    old = dict(OLD_VAE_ATTENTION)
    result = Converted()
    for key, tensor in tensors.items():
        name = clip_name(key) if part == "text_encoder" else key
        if part == "text_encoder" and name in IGNORED_TEXT:
            continue
        if part == "vae" and ".attentions." in key:
            head, layer, leaf = key.rsplit(".", 2)
            name = f"{head}.{old[layer]}.{leaf}" if layer in old else key
            tensor = _linear(name, tensor)
        result.tensors[name] = tensor
        result.origin[name] = key
    return result


def text_prefix(keys: Collection[str]) -> str:
    """The prefix of the text encoder in a file: CLIP's, OpenCLIP's, or CLIP's without the ``text_model`` level."""
    for prefix in (PREFIXES["text_encoder"], OPENCLIP_PREFIX, BARE_CLIP_PREFIX):
        if any(key.startswith(prefix) for key in keys):
            return prefix
    return PREFIXES["text_encoder"]


def clip_name(name: str) -> str:
    """A CLIP text model's tensor name without the ``text_model`` level that transformers dropped in version 5."""
    return name.removeprefix("text_model.")


def rename(name: str, modules: Mapping[str, str]) -> str | None:
    """``name`` with its longest known module prefix replaced, whole path components only; None when there is none."""
    head, tail = name, ""
    while head:
        if head in modules:
            return modules[head] + tail
        head, _, leaf = head.rpartition(".")
        tail = f".{leaf}{tail}"
    return None


def _from_openclip(config: Config, own: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Converted:
    """OpenCLIP's text tower; blocks past the configured depth are left out on purpose, SD 2.x reads the one before the last."""
    names = dict(openclip_pairs(config))
    result = Converted()
    for name, key in own.items():
        if name in IGNORED_TEXT or _block_of(name) >= config["num_hidden_layers"]:
            continue
        for target, tensor in _unfused(name, tensors[key], names):
            if target is None:
                result.leftover.append(key)
            else:
                result.tensors[target] = tensor
                result.origin[target] = key
    return result


def _unfused(name: str, tensor: Tensor, names: Mapping[str, str]) -> Iterator[tuple[str | None, Tensor]]:
    """One OpenCLIP tensor as the one or three tensors it becomes."""
    head, _, leaf = name.rpartition(".attn.in_proj_")
    if not head:
        yield rename(name, names), tensor
        return
    layer = f"encoder.layers.{_block_of(name)}"
    for projection, third in zip(FUSED, torch.chunk(tensor, 3, dim=0), strict=True):
        yield f"{layer}.self_attn.{projection}.{leaf}", third


def _block_of(name: str) -> int:
    """The number behind ``transformer.resblocks.``, or -1."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["transformer", "resblocks"] and len(parts) > 2 and parts[2].isdigit() else -1


def _inside(original: str, theirs: str, pairs: tuple[Pair, ...]) -> list[Pair]:
    """The pairs of one block below its two prefixes."""
    return [(f"{original}.{left}", f"{theirs}.{right}") for left, right in pairs]


def _has_attention(block_type: str) -> bool:
    return "CrossAttn" in block_type


def _is_attention_weight(name: str) -> bool:
    """Whether a diffusers VAE name is one of the four attention projections' weights."""
    return ".attentions." in name and name.endswith(".weight") and "group_norm" not in name


def _linear(name: str, tensor: Tensor) -> Tensor:
    """A 1x1 convolution's weight as a linear layer's where the VAE's attention wants one."""
    return tensor.reshape(tensor.shape[:2]) if _is_attention_weight(name) and tensor.ndim > 2 else tensor
