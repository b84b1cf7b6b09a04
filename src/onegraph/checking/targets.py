"""What to check, by name: a folder of diffusers or transformers, or a function that builds a model and a batch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
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
        module = _module(name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        missing = getattr(error, "name", None)
        if missing and not f"{name}.".startswith(f"{missing}."):
            raise ConfigurationError(
                f"{name} can't be imported: it imports {missing}, and there is no such module.",
                hint=f"install it, or run onegraph where {missing} is",
                code="target-not-found",
            ) from error
        raise _not_found(spec, str(error)) from error
    build = getattr(module, function, None)
    if build is None:
        near = nearest(function, [known for known, value in vars(module).items() if callable(value)])
        raise _not_found(spec, f"{name} has no {function}" + (f"; it has {', '.join(near)}" if near else ""))
    if not callable(build):
        raise _not_found(spec, f"{function} is {type(build).__name__}, no function")
    _require_no_arguments(spec, build)
    return _of(spec, build())


def _not_found(spec: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{spec} can't be found: {why}",
        why="It is read as the function of that name in that module, looked for in this folder first.",
        hint="my_package.my_module:build, or path/to/file.py:build",
        code="target-not-found",
    )


def _require_no_arguments(spec: str, build: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a builtin: calling it will tell
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [known.name for known in parameters if known.default is inspect.Parameter.empty and known.kind not in optional]
    if needed:
        raise ConfigurationError(
            f"{spec} needs arguments: {', '.join(needed)}.",
            why="It is called without any.",
            hint=f"def build(): return {spec.rpartition(':')[2]}(...)   and give the name of that function",
            code="target-function",
        )


def _of(spec: str, made: Any) -> Target:
    parts: Sequence[Any] = ()
    if isinstance(made, Mapping):
        parts = [made[key] for key in ("model", "batch", "loss") if key in made] if {"model", "batch"} <= made.keys() else ()
    elif isinstance(made, tuple | list):
        parts = made
    problem = ""
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        problem = f"{_words(made)}, not a model and a batch"
    elif len(parts) == 3 and parts[2] is not None and not callable(parts[2]):
        problem = f"{_words(parts[2])} as the loss, not a function from the model's output to a scalar"
    if problem:
        raise ConfigurationError(
            f"{spec} gave {problem}.", hint="return model, batch   or   return model, batch, loss", code="target-function"
        )
    return Target(name=spec, model=parts[0], batch=parts[1], loss=parts[2] if len(parts) == 3 else None)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing in it'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return type(value).__name__


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
        adapter = (folder / "adapter_config.json").is_file()
        raise ModelFileError(
            f"{folder} is {'an adapter, and ' if adapter else ''}no model: it has neither config.json nor model_index.json",
            hint=f"the model it was made for, and --adapter {folder}"
            if adapter
            else "a folder that save_pretrained of diffusers or transformers wrote, a single file, or module:function",
            code="not-a-model",
        )
    config = _config(path)
    weighted = any(any(where.glob(pattern)) for pattern in _WEIGHTS)
    model = _diffusers(where, config, dtype, weighted) if "_class_name" in config else _transformers(where, config, dtype, weighted)
    batch = batch_for(model, rows=rows, length=length, size=size)
    note = "" if weighted else f"{where} has no weights: the model has random ones"
    return Target(name=str(where), model=model, batch=batch, note=note)


def _config(path: Path) -> dict[str, Any]:
    """A configuration file's fields.

    Raises:
        ModelFileError: ``model-config``.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} can't be read: {error}", hint="save the model again, or copy the file again", code="model-config"
        ) from error
    if not isinstance(config, dict):
        raise ModelFileError(
            f"{path} holds a {type(config).__name__} where a model's fields should be.",
            hint="a folder that save_pretrained of diffusers or transformers wrote",
            code="model-config",
        )
    return config


def _class(library: Any, name: Any, folder: Path) -> Any:
    """The library's model class of that name."""
    kind = getattr(library, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise _unsupported(folder, library.__name__, str(name))
    return kind


def _diffusers(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, weighted: bool) -> nn.Module:
    import diffusers

    kind = _class(diffusers, config["_class_name"], folder)
    if not weighted:
        made: nn.Module = kind.from_config(dict(config))
        return made if dtype is None else made.to(dtype)
    read: nn.Module = kind.from_pretrained(folder, local_files_only=True, torch_dtype=dtype, variant=_variant(folder))
    return read


def _variant(folder: Path) -> str | None:
    """The variant of the weights when there are no others: diffusion_pytorch_model.fp16.safetensors is fp16."""
    stems = [path.name.partition(".")[2].rpartition(".")[0] for pattern in _WEIGHTS for path in folder.glob(pattern)]
    named = {stem.partition("-")[0] for stem in stems}
    return next(iter(named)) if len(named) == 1 and "" not in named else None


def _transformers(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, weighted: bool) -> nn.Module:
    import transformers

    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else f"of model_type {config.get('model_type')}, which names no architectures"
    kind = _class(transformers, first, folder)
    if not weighted:
        made: nn.Module = kind(transformers.AutoConfig.from_pretrained(folder, local_files_only=True))
        return made if dtype is None else made.to(dtype)
    read: nn.Module = kind.from_pretrained(folder, local_files_only=True, dtype=dtype, variant=_variant(folder))
    return read


def _unsupported(folder: Path, library: str, name: str) -> ModelFileError:
    return ModelFileError(
        f"{folder}: this {library} has no model class {name}",
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
