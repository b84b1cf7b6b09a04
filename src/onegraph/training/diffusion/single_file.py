"""Writing a base model as one file with the original key names, and a `.ckpt` around the same tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onegraph.checkpoint.atomic import atomic_write
from onegraph.training.diffusion.base_model import CONFIG_KEY, PARTS, BaseModel
from onegraph.training.diffusion.families import Components
from onegraph.training.diffusion.model_files import open_weights
from onegraph.training.diffusion.original_keys import to_original


def configuration_of(base: BaseModel) -> Components:
    """The four configurations that ``load_base_model`` needs for a file of unusual sizes; private and default entries left out."""
    configuration: Components = {part: _plain(getattr(base, part).config) for part in PARTS}
    configuration["scheduler"] = {name: value for name, value in base.scheduler_config.items() if value is not None}
    return configuration


def save_single_file(
    base: BaseModel, path: str | Path, *, dtype: torch.dtype = torch.float16, metadata: Mapping[str, str] | None = None
) -> None:
    """The whole base model as one ``.safetensors`` with original keys, its configuration in the metadata.

    Args:
        base: The model, without adapters: its state dicts are written as they are.
        path: The file; it appears whole or not at all.
        dtype: Of every tensor in the file.
        metadata: More strings for the header.

    Raises:
        OutputError: When the file can't be written; an older one stays.
    """
    tensors: dict[str, Tensor] = {}
    for part in PARTS:
        module: nn.Module = getattr(base, part)
        named = to_original(part, base.configuration[part], module.state_dict())
        tensors.update({name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in named.items()})
    header = {
        CONFIG_KEY: json.dumps(configuration_of(base), sort_keys=True),
        "modelspec.prediction_type": "v" if base.prediction_type == "v_prediction" else "epsilon",
        **(metadata or {}),
    }
    atomic_write(Path(path), lambda temporary: save_file(tensors, str(temporary), metadata=header))


def save_checkpoint(source: str | Path, path: str | Path, *, beside: Mapping[str, Any] | None = None) -> None:
    """A ``.ckpt`` as trainers of 2022 wrote it, from a ``.safetensors``: ``{"state_dict": ...}`` and whatever lay ``beside`` it.

    The configuration in the source's metadata, which a pickle has no place for, goes into a JSON beside the new file.

    Args:
        source: A single file with original keys.
        path: The ``.ckpt``.
        beside: More entries of the pickled dict, e.g. ``global_step`` or a framework's callbacks.

    Raises:
        ModelFileError: When the source can't be read.
        OutputError: When the file can't be written; an older one stays.
    """
    weights = open_weights(Path(source))
    content = {"state_dict": dict(weights), **(beside or {})}
    atomic_write(Path(path), lambda temporary: torch.save(content, temporary))
    if CONFIG_KEY in weights.metadata:
        text = json.dumps(json.loads(weights.metadata[CONFIG_KEY]), indent=1) + "\n"
        atomic_write(Path(path).with_suffix(".json"), lambda temporary: _write_text(temporary, text))


def _plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON can hold it, without what is None or private to the library's version."""
    entries = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    leave = ("transformers_version", "dtype", "architectures")
    return {name: value for name, value in entries.items() if value is not None and name not in leave and _is_public(name)}


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "_class_name"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
