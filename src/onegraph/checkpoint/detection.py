"""Which format a file has, and which model it was probably made for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from onegraph.checkpoint.dialects import diffusers, kohya, lycoris, native, peft
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError, nearest

FORMATS = ("native", "peft", "kohya", "lycoris", "diffusers")

# Width of the text features that cross-attention reads -> the model family.
_FAMILY_OF_WIDTH = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "Stable Diffusion XL"}
# How ss_base_model_version, or modelspec.architecture, begins -> the model family.
_FAMILY_OF_VERSION = {
    "sd_v1": "Stable Diffusion 1.x",
    "sd_v2": "Stable Diffusion 2.x",
    "sdxl": "Stable Diffusion XL",
    "sd3": "Stable Diffusion 3",
    "flux": "Flux",
    "stable-diffusion-v1": "Stable Diffusion 1.x",
    "stable-diffusion-v2": "Stable Diffusion 2.x",
    "stable-diffusion-xl": "Stable Diffusion XL",
    "stable-diffusion-3": "Stable Diffusion 3",
}
# How the keys of whole models begin.
_BASE_MODEL_STARTS = ("model.diffusion_model.", "cond_stage_model.", "first_stage_model.", "conditioner.embedders.")


def check_format(format: str) -> None:
    """Raise CheckpointError ``adapter-format`` for a name that is no format."""
    if format not in FORMATS:
        close = nearest(format, FORMATS)
        raise CheckpointError(
            f"There is no format {format!r}.",
            hint=f"Did you mean {close[0]!r}?" if close else f"Formats: {', '.join(FORMATS)}.",
            code="adapter-format",
        )


def format_of(keys: Iterable[str], metadata: Mapping[str, str], path: Path) -> str:
    """The format of a safetensors file, from its keys and metadata.

    Raises:
        CheckpointError: ``adapter-format`` with the first ten keys, or ``file-is-base-model``.
    """
    found = list(keys)
    if native.looks_like(metadata):
        return "native"
    if lycoris.looks_like(found):
        return "lycoris"
    if kohya.looks_like(found):
        return "kohya"
    if peft.looks_like(found):
        return "peft"
    if diffusers.looks_like(found):
        return "diffusers"
    if any(key.startswith(_BASE_MODEL_STARTS) for key in found):
        raise CheckpointError(
            f"{path} is a whole base model, not an adapter.",
            why=f"For example it holds {min(found)}.",
            hint="Load it as the model, and name an adapter file here.",
            code="file-is-base-model",
        )
    raise CheckpointError(
        f"{path} has {len(found)} tensors, and their names are of no known adapter format.",
        why=f"They are:\n{first_ten(found)}" if found else "There is no tensor in it.",
        hint=f"Formats: {', '.join(FORMATS)}.",
        code="adapter-format",
    )


def likely_family(file: AdapterFile) -> str | None:
    """The model family that a file was probably made for: by its metadata, then by its keys, then by its shapes."""
    for field in ("ss_base_model_version", "modelspec.architecture"):
        value = file.metadata.get(field, "").lower()
        for start, family in _FAMILY_OF_VERSION.items():
            if value.startswith(start):
                return family
    if any(part in ("lora_te1", "lora_te2", "text_encoder_2") for part in file.parts):
        return _FAMILY_OF_VERSION["sdxl"]
    for layers in file.parts.values():
        for key, weights in layers.items():
            if "input_blocks_" in key or "output_blocks_" in key:
                return _FAMILY_OF_VERSION["sdxl"]
            if "double_blocks" in key or "single_blocks" in key:
                return _FAMILY_OF_VERSION["flux"]
            down = weights.get("down")
            if "attn2" in key and key.endswith(("to_k", "to_v")) and isinstance(down, torch.Tensor):
                return _FAMILY_OF_WIDTH.get(down.shape[1])
    return None


def family_of_model(model: torch.nn.Module) -> str | None:
    """The family of a UNet, by the width of the text features it reads; None for anything else."""
    width = getattr(getattr(model, "config", None), "cross_attention_dim", None)
    return _FAMILY_OF_WIDTH.get(width) if isinstance(width, int) else None
