"""diffusers' own LoRA files (``pytorch_lora_weights.safetensors``): PEFT's keys behind the name of the part, and two older spellings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from onegraph.checkpoint.dialects import peft_config
from onegraph.checkpoint.dialects.peft_methods import lora
from onegraph.checkpoint.dialects.peft_methods.fields import Config
from onegraph.checkpoint.file import Weights, complete
from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError
from onegraph.methods import LoRA, Method

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"
PARTS = ("unet", "text_encoder", "text_encoder_2", "transformer")
PARAMETERS = {"down": "lora_A.weight", "up": "lora_B.weight", "up_bias": "lora_B.bias"}

_PARAMETER_OF_ENDING = {"A.weight": "down", "B.weight": "up", "B.bias": "up_bias", "down.weight": "down", "up.weight": "up"}
# Written by, newest first: diffusers with PEFT, diffusers before it, and its attention processors of 2023.
_SPELLINGS = (
    re.compile(r"^(?P<path>.+?)\.lora_(?P<factor>[AB])(?:\.(?!weight|bias)[^.]+)?\.(?P<kind>weight|bias)$"),
    re.compile(r"^(?P<path>.+?)\.(?:lora|lora_linear_layer)\.(?P<factor>down|up)\.(?P<kind>weight)$"),
    re.compile(r"^(?P<path>.+?)_lora\.(?P<factor>down|up)\.(?P<kind>weight)$"),
)
_OLD_ATTENTION_NAMES = {"to_out": "to_out.0"}
_OLD_CLIP_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def looks_like(keys: Iterable[str]) -> bool:
    """True where every key is one of a LoRA in one of the three spellings."""
    found = [key for key in keys if not key.endswith(".alpha")]
    return bool(found) and all(any(spelling.match(key) for spelling in _SPELLINGS) for key in found)


def key_of(part: str, path: str, parameter: str) -> str:
    """The key of one tensor; text encoders keep the ``text_model`` level that transformers 5 dropped.

    Example:
        >>> key_of("text_encoder", "encoder.layers.0.mlp.fc1", "up")
        'text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_B.weight'
    """
    if part.startswith("text_encoder") and path.startswith("encoder."):
        path = f"text_model.{path}"
    return f"{part}.{path}.{PARAMETERS[parameter]}"


def parse(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], path: Path
) -> tuple[dict[str, dict[str, Weights]], dict[str, dict[str, Method]]]:
    """Part -> module path -> weights, and the method of each layer. Alpha is in the metadata, in a key of its own, or the rank.

    Raises:
        CheckpointError: ``adapter-keys``, ``adapter-incomplete``, ``adapter-shape``, or ``adapter-config`` for metadata that can't be read.
    """
    parts: dict[str, dict[str, Weights]] = {}
    unknown = []
    for key, tensor in tensors.items():
        part, name = _split_part(key)
        if name.endswith(".alpha") and tensor.numel() == 1:
            parts.setdefault(part, {}).setdefault(name.removesuffix(".alpha"), {})["alpha"] = float(tensor)
            continue
        match = next((found for spelling in _SPELLINGS if (found := spelling.match(name))), None)
        parameter = _PARAMETER_OF_ENDING.get(f"{match['factor']}.{match['kind']}") if match else None
        if match is None or parameter is None:
            unknown.append(key)
            continue
        layer = match["path"] if match.re is not _SPELLINGS[2] else _modern_path(match["path"])
        parts.setdefault(part, {}).setdefault(layer, {})[parameter] = tensor
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} keys of {path} are no LoRA keys.",
            why=f"They are:\n{first_ten(unknown)}",
            hint="A diffusers LoRA file holds keys such as unet.<path>.lora_A.weight.",
            code="adapter-keys",
        )
    settings = {part: _settings(metadata, part, path) for part in parts}
    for part, config in settings.items():
        if config is not None:
            for layer, weights in parts[part].items():
                weights["alpha"] = config.alpha(layer, "lora_alpha")
    complete(parts, path)
    methods: dict[str, dict[str, Method]] = {
        part: {layer: _method(layer, weights, settings[part]) for layer, weights in layers.items()} for part, layers in parts.items()
    }
    return parts, methods


def adapter_metadata(configs: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """The metadata that keeps alpha: part -> the fields of a PEFT configuration, behind the part's name."""
    fields = {f"{part}.{field}": value for part, config in configs.items() for field, value in config.items()}
    return {"format": "pt", METADATA_KEY: json.dumps(fields, indent=2, sort_keys=True)}


def _split_part(key: str) -> tuple[str, str]:
    head, _, tail = key.partition(".")
    return (head, tail) if head in PARTS else ("", key)


def _modern_path(path: str) -> str:
    """``attn1.processor.to_q`` -> ``attn1.to_q``; ``self_attn.to_q`` -> ``self_attn.q_proj``."""
    segments = [segment for segment in path.split(".") if segment != "processor"]
    names = _OLD_CLIP_NAMES if "self_attn" in segments else _OLD_ATTENTION_NAMES
    return ".".join([*segments[:-1], names.get(segments[-1], segments[-1])])


def _settings(metadata: Mapping[str, str], part: str, path: Path) -> Config | None:
    """The PEFT fields of one part; None for a file without them."""
    if METADATA_KEY not in metadata:
        return None
    try:
        fields = json.loads(metadata[METADATA_KEY])
        items = dict(fields).items()
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"The metadata {METADATA_KEY!r} of {path} can't be read: {error}.",
            why="Alpha is in there.",
            hint="Download the file again.",
            code="adapter-config",
        ) from error
    start = f"{part}." if part else ""
    config = {key.removeprefix(start): value for key, value in items if key.startswith(start)}
    if not config:
        return None
    return peft_config.checked({"peft_type": lora.FORM.peft_type, **config}, lora.FORM, path)


def _method(layer: str, weights: Weights, config: Config | None) -> Method:
    down, alpha = weights["down"], weights["alpha"]
    assert isinstance(down, torch.Tensor)  # as complete() leaves them
    assert isinstance(alpha, float)
    bias = "up_bias" in weights
    if config is None:
        return LoRA(rank=down.shape[0], alpha=alpha, bias=bias)
    return lora.method_of(config, layer, rank=down.shape[0], bias=bias)
