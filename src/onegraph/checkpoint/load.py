"""From a file onto a model."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from onegraph.adapters import Adapters, adapters_of, attach
from onegraph.adapters.walk import check_model
from onegraph.checkpoint.dialects import kohya, native
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.language_models import name_of
from onegraph.checkpoint.matching import Placement, fit
from onegraph.checkpoint.origin import remember
from onegraph.checkpoint.reading import read
from onegraph.errors import AdapterError, CheckpointError
from onegraph.layers import Layer
from onegraph.methods import Method

logger = logging.getLogger(__name__)


def load(
    model: nn.Module, path: str | os.PathLike[str], *, name: str = "default", format: str | None = None, part: str | None = None
) -> Adapters:
    """Load an adapter of any known format onto a model: attaches, or adds to what is attached; the model is as before on every error.

    Args:
        model: The model, in place. It may be compiled or wrapped.
        path: A file or folder, see :func:`onegraph.checkpoint.read`.
        name: The adapter's name from now on. One of the same name and the same layers, ranks and alphas gets the new weights.
        format: ``native``, ``peft``, ``kohya``, ``lycoris`` or ``diffusers``; found out when omitted.
        part: The part of the file that belongs to this model (``lora_unet``, ``lora_te``, ``unet`` ...); the one that fits when omitted.

    Raises:
        CheckpointError: The file can't be read or doesn't fit the model; the code says how.
        AdapterError: ``adapter-exists``: another adapter has this name.
        ConfigurationError: ``not-a-model``.
    """
    check_model(model)
    file = read(path, format=format)
    placement = fit(file, model, part=part)
    said, own = file.config.get("base_model_name_or_path"), name_of(model)
    if isinstance(said, str) and said and own and Path(said).name.lower() != Path(own).name.lower():
        logger.warning("%s was made for %s, this model is %s; its layers fit, its results may not", file.path, said, own)
    if part is None and len(file.parts) > 1:
        logger.info("%s has the parts %s; one of them fits this model", file.path, ", ".join(file.parts))
    return _put(model, placement, name, file)[0]


def load_parts(models: Mapping[str, nn.Module], path: str | os.PathLike[str], *, name: str = "default") -> dict[str, Adapters]:
    """Load one kohya or diffusers file onto several models: onto all of them or onto none.

    Args:
        models: ``unet``, ``text_encoder``, ``text_encoder_2`` -> the model.
        path: The file.
        name: The adapter's name from now on.

    Returns:
        The adapters of each model that the file has a part for.

    Raises:
        CheckpointError: As :func:`load`, or ``adapter-part`` where the file has nothing for any of the models.
        AdapterError: ``adapter-exists``.
    """
    file = read(path)
    wanted = {role: found for role in models if (found := _part_for(role, file)) is not None}
    if not wanted:
        raise CheckpointError(
            f"{file.path} has nothing for {', '.join(models)}.",
            why=f"It is of the format {file.format} with the parts: {', '.join(map(repr, file.parts))}.",
            hint="Load a file of one part with load(model, path).",
            code="adapter-part",
        )
    placements = {role: fit(file, models[role], part=part) for role, part in wanted.items()}
    unused = sorted(file.parts.keys() - set(wanted.values()))
    if unused:
        logger.info("%s also has %s, which no model was given for", file.path, ", ".join(unused))
    done: dict[str, Adapters] = {}
    undo: list[Callable[[], object]] = []
    try:
        for role, placement in placements.items():
            done[role], take_back = _put(models[role], placement, name, file)
            undo.append(take_back)
    except BaseException:
        for take_back in reversed(undo):
            take_back()
        raise
    return done


def _part_for(role: str, file: AdapterFile) -> str | None:
    if role in file.parts:
        return role
    names = (kohya.PREFIXES.get(role), "lora_te1" if role == "text_encoder" else None)
    return next((name for name in names if name in file.parts), None)


def _put(model: nn.Module, placement: Placement, name: str, file: AdapterFile) -> tuple[Adapters, Callable[[], object]]:
    """Attach, add or replace, and copy the tensors in; also returns what takes it back."""
    methods = placement.methods
    common = commonest(methods)
    overrides = exact_overrides(methods, common)

    def chosen(path: str, module: nn.Module) -> bool:
        return path in methods

    adapters = adapters_of(model)
    if adapters is None:
        double = any(tensor.dtype == torch.float64 for layer in placement.tensors.values() for tensor in layer.values())
        dtype = torch.float64 if double else torch.float32
        adapters = attach(model, common, targets=chosen, overrides=overrides, name=name, dtype=dtype)
        take_back: Callable[[], object] = adapters.detach
    elif name in adapters.names:
        if not _same_function(adapters, name, methods):
            raise AdapterError(
                f"There is an adapter {name!r} already, with other layers, ranks or alphas than {file.path}.",
                why="Only the weights of an adapter of the same shape are replaced.",
                hint=f"Load it under another name, or first: adapters.delete({name!r})",
                code="adapter-exists",
            )
        old = {path: {key: value.detach().clone() for key, value in layer.items()} for path, layer in adapters.tensors(name).items()}
        take_back = partial(adapters.load_tensors, name, old)
    else:
        adapters.add(name, common, targets=chosen, overrides=overrides)
        take_back = partial(adapters.delete, name)
    try:
        adapters.load_tensors(name, placement.tensors)
    except BaseException:
        take_back()
        raise
    if file.format == "peft":
        remember(adapters, name, file.config)
    elif (started := file.metadata.get(native.STARTED_KEY)) is not None:
        remember(adapters, name, {"peft_type": "LORA", "init_lora_weights": started})
        logger.warning("%s is for base weights that PEFT's start %s changed: beside others it computes something else", file.path, started)
    return adapters, take_back


def _same_function(adapters: Adapters, name: str, methods: Mapping[str, Method]) -> bool:
    """True where an adapter is on these layers, with these shapes and strengths; dropout may differ, most files don't hold it."""
    own = adapters.methods(name)
    if own.keys() != methods.keys():
        return False
    return all(_function_of(own[path], layer) == _function_of(methods[path], layer) for path, layer in _layers_of(adapters, own).items())


def _layers_of(adapters: Adapters, paths: Iterable[str]) -> dict[str, Layer]:
    return {path: adapters.layers[path].layer for path in paths}


def _function_of(method: Method, layer: Layer) -> tuple[object, ...]:
    settings = {key: value for key, value in method.settings(layer).items() if key not in method.random_settings}
    return method.structure(), method.rank_on(layer), settings


def commonest(methods: Mapping[str, Method]) -> Method:
    """The method that most layers have."""
    counts: dict[Method, int] = {}
    for method in methods.values():
        counts[method] = counts.get(method, 0) + 1
    return max(counts, key=lambda method: counts[method])


def exact_overrides(methods: Mapping[str, Method], common: Method) -> dict[str, Method]:
    """One pattern for each other method, which matches whole paths and nothing else."""
    paths: dict[Method, list[str]] = {}
    for path, method in methods.items():
        if method != common:
            paths.setdefault(method, []).append(re.escape(path))
    return {f"^(?:{'|'.join(found)})": method for method, found in paths.items()}
