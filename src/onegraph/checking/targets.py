"""What to check, by name: a folder of diffusers or transformers, or a function that builds a model and a batch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onegraph.checking.batches import batch_for
from onegraph.errors import ConfigurationError, ModelFileError, nearest

PARTS = ("unet", "transformer", "text_encoder", "vae")
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and what to call it with.

    Args:
        name: As it was given.
        model: The module.
        batch: A mapping, a tuple or a tensor.
        loss: From its output to a scalar; None: see ``check``.
        note: What else is to be said about it.
    """

    name: str
    model: nn.Module
    batch: Any
    loss: Callable[[Any], torch.Tensor] | None = None
    note: str = ""


def is_function(spec: str) -> bool:
    """Whether it is written module:function or file.py:function."""
    module, colon, function = spec.rpartition(":")
    return bool(colon) and function.isidentifier() and not Path(spec).exists() and bool(module)


def from_function(spec: str) -> Target:
    """Calls a function for (model, batch), (model, batch, loss), or a mapping of these names.

    Raises:
        ConfigurationError: ``target-not-found``, ``target-function``.
    """
    name, _, function = spec.rpartition(":")
    try:
        build = getattr(_module(name), function)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ConfigurationError(
            f"{spec} can't be found: {error}",
            why="It is read as the function of that name in that module, looked for in this folder first.",
            hint="my_package.my_module:build, or path/to/file.py:build",
            code="target-not-found",
        ) from error
    made = build()
    if isinstance(made, Mapping):
        made = tuple(made[key] for key in ("model", "batch", "loss") if key in made)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigurationError(
            f"{spec} gave {type(made).__name__}, not a model and a batch.",
            hint="return model, batch   or   return model, batch, loss",
            code="target-function",
        )
    return Target(name=spec, model=made[0], batch=made[1], loss=made[2] if len(made) == 3 else None)


def from_folder(folder: Path, *, part: str | None, dtype: torch.dtype | None, rows: int, length: int, size: int) -> Target:
    """A model out of a folder of transformers or diffusers, or out of a pipeline's folder, with a batch made for it.

    Args:
        folder: With a ``config.json`` or a ``model_index.json``. Without weights in it the model gets random ones.
        part: Which model of a pipeline: ``unet``, ``transformer``, ``text_encoder``, ``vae``; by default the first of them that is there.
        dtype: Of the weights; None: as in the files.
        rows: See ``batch_for``, as ``length`` and ``size``.

    Raises:
        ModelFileError: ``not-a-model``, ``not-supported``.
        ConfigurationError: ``part-unknown``, ``batch-unknown``.
    """
    where = folder
    if (folder / "model_index.json").is_file():
        there = [name for name in PARTS if (folder / name / "config.json").is_file()]
        chosen = part or next(iter(there), None)
        if chosen is None or not (folder / chosen / "config.json").is_file():
            raise ConfigurationError(
                f"{folder} has no part {chosen or '/'.join(PARTS)}.",
                hint=f"--part {' or '.join(nearest(chosen or '', there) or there) or 'none'}",
                code="part-unknown",
            )
        where = folder / chosen
    path = where / "config.json"
    if not path.is_file():
        raise ModelFileError(
            f"{folder} is no model: it has neither config.json nor model_index.json",
            hint="a folder that save_pretrained of diffusers or transformers wrote, a single file, or module:function",
            code="not-a-model",
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    weighted = any(any(where.glob(pattern)) for pattern in _WEIGHTS)
    model = _diffusers(where, config, dtype, weighted) if "_class_name" in config else _transformers(where, config, dtype, weighted)
    batch = batch_for(model, rows=rows, length=length, size=size)
    note = "" if weighted else f"{where} has no weights: the model has random ones"
    return Target(name=str(where), model=model, batch=batch, note=note)


def _diffusers(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, weighted: bool) -> nn.Module:
    import diffusers

    kind = getattr(diffusers, config["_class_name"], None)
    if kind is None:
        raise _unsupported(folder, "diffusers", config["_class_name"])
    if not weighted:
        made: nn.Module = kind.from_config(dict(config))
        return made if dtype is None else made.to(dtype)
    read: nn.Module = kind.from_pretrained(folder, local_files_only=True, torch_dtype=dtype)
    return read


def _transformers(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, weighted: bool) -> nn.Module:
    import transformers

    names = config.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise _unsupported(folder, "transformers", names[0] if names else f"model_type {config.get('model_type')} without architectures")
    if not weighted:
        made: nn.Module = kind(transformers.AutoConfig.from_pretrained(folder, local_files_only=True))
        return made if dtype is None else made.to(dtype)
    read: nn.Module = kind.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return read


def _unsupported(folder: Path, library: str, name: str) -> ModelFileError:
    return ModelFileError(
        f"{folder}: this {library} has no class {name}",
        hint=f"pip install --upgrade {library}, or module:function for a model of your own",
        code="not-supported",
    )


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"there is no file {name}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)
