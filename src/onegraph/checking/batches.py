"""A batch for a model of diffusers or transformers, made from its configuration: fixed random numbers of the right shapes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.errors import ConfigurationError

_TOKENS = 77  # what text encoders of diffusion models give
_LABELLED = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def batch_for(model: nn.Module, *, rows: int = 2, length: int = 32, size: int = 16, seed: int = 0) -> dict[str, Any]:
    """Keywords to call the model with, in its dtype and on its device.

    Args:
        model: A model of diffusers or transformers.
        rows: Batch size.
        length: Tokens of a text, cut to what the model takes.
        size: Height and width of latents; of images of a model that doesn't say its own.
        seed: Of the random numbers.

    Raises:
        ConfigurationError: ``batch-unknown``: a model whose inputs aren't known here.
    """
    makers = {
        "UNet2DConditionModel": _unet,
        "UNet2DModel": _plain_unet,
        "AutoencoderKL": _autoencoder,
        "SD3Transformer2DModel": _sd3,
        "FluxTransformer2DModel": _flux,
    }
    maker = makers.get(type(model).__name__)
    generator = torch.Generator().manual_seed(seed)
    if maker is not None:
        batch = maker(model.config, rows, size, generator)
    elif hasattr(model, "main_input_name") and hasattr(model, "config"):
        batch = _transformers(model, rows, length, size, generator)
    else:
        raise _unknown(model)
    first = next(model.parameters())

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(first.device, first.dtype) if value.is_floating_point() else value.to(first.device)
        return {name: placed(inner) for name, inner in value.items()} if isinstance(value, dict) else value

    return {name: placed(value) for name, value in batch.items()}


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _times(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 1000, (rows,), generator=generator)


def _unet(config: Any, rows: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    width = config.cross_attention_dim
    width = width[0] if isinstance(width, list | tuple) else width
    batch: dict[str, Any] = {
        "sample": _normal(generator, rows, config.in_channels, size, size),
        "timestep": _times(rows, generator),
        "encoder_hidden_states": _normal(generator, rows, _TOKENS, config.encoder_hid_dim or width),
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        sizes = torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]]).repeat(rows, 1)
        batch["added_cond_kwargs"] = {"text_embeds": _normal(generator, rows, pooled), "time_ids": sizes}
    return batch


def _plain_unet(config: Any, rows: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    return {"sample": _normal(generator, rows, config.in_channels, size, size), "timestep": _times(rows, generator)}


def _autoencoder(config: Any, rows: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    return {"sample": _normal(generator, rows, config.in_channels, 2 * size, 2 * size)}


def _sd3(config: Any, rows: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _normal(generator, rows, config.in_channels, size, size),
        "encoder_hidden_states": _normal(generator, rows, _TOKENS, config.joint_attention_dim),
        "pooled_projections": _normal(generator, rows, config.pooled_projection_dim),
        "timestep": _times(rows, generator),
    }


def _flux(config: Any, rows: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    side = size // 2
    line = torch.arange(side, dtype=torch.float32)
    places = torch.stack(torch.meshgrid(torch.zeros(1), line, line, indexing="ij"), dim=-1)
    batch: dict[str, Any] = {
        "hidden_states": _normal(generator, rows, side * side, config.in_channels),
        "encoder_hidden_states": _normal(generator, rows, _TOKENS, config.joint_attention_dim),
        "pooled_projections": _normal(generator, rows, config.pooled_projection_dim),
        "timestep": torch.rand(rows, generator=generator),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(_TOKENS, 3),
    }
    if config.guidance_embeds:
        batch["guidance"] = torch.full((rows,), 3.5)
    return batch


def _transformers(model: Any, rows: int, length: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    known = inspect.signature(model.forward).parameters
    name = type(model).__name__
    batch: dict[str, Any] = {}
    if "pixel_values" in known:
        vision = getattr(model.config, "vision_config", model.config)
        side = getattr(vision, "image_size", None) or size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        batch["pixel_values"] = _normal(generator, rows, getattr(vision, "num_channels", 3), height, width)
    if "input_ids" in known:
        text = model.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or length
        # 0 to 2 are often padding and the like
        batch["input_ids"] = torch.randint(min(3, text.vocab_size - 1), text.vocab_size, (rows, min(length, most)), generator=generator)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if "labels" in known and name.endswith(_LABELLED):
            batch["labels"] = batch["input_ids"]
        if "decoder_input_ids" in known and getattr(model.config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = batch["input_ids"]
        if "use_cache" in known:
            batch["use_cache"] = False
    if "labels" in known and "labels" not in batch and name.endswith("Classification") and "Token" not in name:
        batch["labels"] = torch.randint(0, model.config.num_labels, (rows,), generator=generator)
    if not batch or model.main_input_name not in batch:
        raise _unknown(model)
    return batch


def _unknown(model: nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f"No batch is known for {type(model).__module__}.{type(model).__qualname__}.",
        why="Batches are made for UNets, autoencoders and transformers of diffusers, and for text and image models of transformers.",
        hint="write a function that returns the model and a batch, and give module:function",
        code="batch-unknown",
    )
