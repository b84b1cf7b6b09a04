"""What one adapter holds, under the paths that files have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapters
from onegraph.checkpoint.file import SHARED
from onegraph.checkpoint.keys import file_paths
from onegraph.errors import AdapterError, CheckpointError
from onegraph.layers import Layer
from onegraph.methods import Method


@dataclass(frozen=True)
class Contents:
    """One adapter.

    Args:
        name: Its name.
        tensors: Module path -> parameter -> tensor.
        methods: Module path -> method.
        layers: Module path -> what is adapted.
        modules: Module path -> the base layer.
        shared: The tensors that all layers have in common.
    """

    name: str
    tensors: dict[str, dict[str, Tensor]]
    methods: dict[str, Method]
    layers: dict[str, Layer]
    modules: dict[str, nn.Module]
    shared: dict[str, Tensor]


def chosen_name(adapters: Adapters, name: str | None) -> str:
    """The adapter meant: the named one, else the active one.

    Raises:
        AdapterError: ``no-adapter``, ``unknown-adapter``.
    """
    chosen = adapters.active if name is None else name
    if chosen is None:
        raise AdapterError(
            "No adapter is active, so none can be saved without its name.",
            hint=f"Name one: {', '.join(map(repr, adapters.names))}.",
            code="no-adapter",
        )
    if chosen not in adapters.names:
        raise AdapterError(
            f"There is no adapter {chosen!r}.", hint=f"There are: {', '.join(map(repr, adapters.names))}.", code="unknown-adapter"
        )
    return chosen


def contents(adapters: Adapters, name: str) -> Contents:
    """An adapter under the paths that files hold.

    Raises:
        CheckpointError: ``beyond-rank`` where something stands in the padding.
    """
    tensors, methods = adapters.tensors(name), adapters.methods(name)
    _check_padding(adapters, name, tensors)
    shared = tensors.pop(SHARED, {})
    paths = file_paths(adapters.model, methods)
    return Contents(
        name,
        {paths[layer]: dict(values) for layer, values in tensors.items()},
        {paths[layer]: method for layer, method in methods.items()},
        {paths[layer]: adapters.layers[layer].layer for layer in methods},
        {paths[layer]: adapters.layers[layer].base_layer for layer in methods},
        dict(shared),
    )


def _check_padding(adapters: Adapters, name: str, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Parameters are padded with zeros to the capacity; where something else stands there, the file would be another adapter."""
    wrong = []
    for path, parameter in adapters.held(name).items():
        layer, _, leaf = path.rpartition(".")
        own = tensors[layer].get(leaf, torch.zeros(()))  # of a form that the adapter doesn't use, nothing
        if parameter.shape != own.shape and torch.count_nonzero(parameter) != torch.count_nonzero(own):
            wrong.append(path)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"Adapter {name!r} has numbers beyond its rank, in {', '.join(wrong[:3])}{more}.",
            why="Its parameters are padded with zeros to the capacity. Something wrote there: it acts, and no file holds it.",
            hint="set weights with load_tensors(name, tensors), which takes tensors of the true rank; or add the adapter with that rank",
            code="beyond-rank",
        )
