"""Reading an adapter file or folder of any known format, without a model."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import torch

from onegraph.checkpoint.container import Container, check_finite, read_container, read_shards
from onegraph.checkpoint.detection import check_format, format_of
from onegraph.checkpoint.dialects import diffusers, kohya, lycoris, native, peft, peft_config
from onegraph.checkpoint.file import AdapterFile
from onegraph.errors import CheckpointError
from onegraph.methods import LoRA, Method


def read(path: str | os.PathLike[str], *, format: str | None = None) -> AdapterFile:
    """Read an adapter of any known format; nothing is run, nothing is downloaded.

    Args:
        path: A .safetensors file, or a folder with ``adapter_config.json`` (PEFT) or ``pytorch_lora_weights.safetensors`` (diffusers).
        format: ``native``, ``peft``, ``kohya``, ``lycoris`` or ``diffusers``; found out from the file when omitted. LyCORIS files of plain
            LoRA are kohya files.

    Raises:
        CheckpointError: The file can't be read, is damaged, holds NaN, or is of no known format; the code says which.
    """
    path = Path(path)
    if format is not None:
        check_format(format)
    if path.is_dir():
        return _read_folder(path, format)
    container = read_container(path)
    found = format_of(container.tensors, container.metadata, path)
    if format == "lycoris" and found == "kohya":
        found = format
    if format is not None and format != found:
        raise CheckpointError(
            f"{path} is of the format {found!r}, not {format!r}.",
            hint=f"Leave format out, or pass format={found!r}.",
            code="adapter-format",
        )
    if found == "peft":
        return _peft(container, path.parent / peft.CONFIG_NAME, path)
    if found == "native":
        weights, methods, record = native.parse(container.tensors, container.metadata, path)
        return AdapterFile(path, found, container.metadata, {"": weights}, {"": methods}, record)
    if found == "lycoris":
        modules = lycoris.parse(container.tensors, path)
        return AdapterFile(path, found, container.metadata, modules.parts, modules.methods, optional=lycoris.OPTIONAL)
    if found == "kohya":
        parts = kohya.parse(container.tensors, path)
        by_part: dict[str, dict[str, Method]] = {}
        for part, layers in parts.items():
            by_part[part] = {}
            for key, values in layers.items():
                down, alpha = values["down"], values[kohya.ALPHA]
                assert isinstance(down, torch.Tensor)  # as parse leaves them
                assert isinstance(alpha, float)
                by_part[part][key] = LoRA(rank=down.shape[0], alpha=alpha)
        return AdapterFile(path, found, container.metadata, parts, by_part)
    layers_by_part, methods_by_part = diffusers.parse(container.tensors, container.metadata, path)
    return AdapterFile(path, found, container.metadata, layers_by_part, methods_by_part)


def _read_folder(folder: Path, format: str | None) -> AdapterFile:
    if (folder / peft.CONFIG_NAME).is_file() and format in (None, "peft"):
        weights = folder / peft.WEIGHTS_NAME
        pickled = folder / peft.PICKLED_WEIGHTS_NAME
        if not weights.exists() and pickled.exists():
            return _peft(Container(_read_pickle(pickled), {}), folder / peft.CONFIG_NAME, folder)
        index = folder / peft.INDEX_NAME
        container = read_shards(index) if not weights.exists() and index.exists() else read_container(weights)
        return _peft(container, folder / peft.CONFIG_NAME, folder)
    if (folder / peft.WEIGHTS_NAME).is_file() and format in (None, "peft"):
        return read(folder / peft.WEIGHTS_NAME, format=format)
    if (folder / diffusers.WEIGHTS_NAME).is_file() and format in (None, "diffusers"):
        return read(folder / diffusers.WEIGHTS_NAME, format=format)
    raise CheckpointError(
        f"The folder {folder} holds no adapter" + (f" in the format {format!r}." if format else "."),
        why=f"Looked for {peft.CONFIG_NAME} with {peft.WEIGHTS_NAME}, and for {diffusers.WEIGHTS_NAME}.",
        hint=_inside(folder),
        code="file-missing",
    )


def _peft(container: Container, config_path: Path, path: Path) -> AdapterFile:
    config = peft_config.read_config(config_path)
    form = peft_config.form_of(config, config_path)
    parsed = peft.parse(container.tensors, form, peft_config.checked(config, form, config_path), path)
    return AdapterFile(
        path,
        "peft",
        container.metadata,
        {"": parsed.weights},
        {"": parsed.methods},
        config,
        parsed.base_weights,
        parsed.trained,
        parsed.rewrites,
    )


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """An old ``adapter_model.bin``: tensors only, nothing in it can run."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError, KeyError) as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {named.group(1)}" if named else next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} can't be read as plain tensors: {reason}.",
            why="Only pickles that hold nothing but tensors are read, because anything else could run code.",
            hint=f"Convert it where you trust it, or download {peft.WEIGHTS_NAME} instead.",
            code="file-is-pickle",
        ) from error
    if not isinstance(values, dict) or not values or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise CheckpointError(f"{path} holds no table of tensors.", hint=f"Download {peft.WEIGHTS_NAME} instead.", code="adapter-keys")
    tensors = {str(key): value for key, value in values.items()}
    check_finite(tensors, path)
    return tensors


def _inside(folder: Path) -> str:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return "Check the permissions of the folder."
    adapters = [entry for entry in entries if entry.suffix == ".safetensors" or (entry / peft.CONFIG_NAME).is_file()]
    if adapters:
        return "Name one of these: " + ", ".join(str(entry) for entry in adapters[:5])
    return "The folder is empty." if not entries else f"It holds: {', '.join(entry.name for entry in entries[:5])}."
