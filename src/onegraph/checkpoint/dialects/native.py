"""Our own format: one safetensors file, and the configuration of every layer in its metadata.

Keys are ``path.parameter``, or ``parameter`` for tensors that all layers share. Nothing here knows a method: a method is its
registered name and its fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onegraph import __version__
from onegraph.checkpoint.file import SHARED, Weights
from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError, ConfigurationError
from onegraph.methods import METHODS, Method

FORMAT_VERSION = "1"
FORMAT_KEY = "onegraph_format"
VERSION_KEY = "onegraph_version"
ADAPTER_KEY = "onegraph_adapter"
STARTED_KEY = "onegraph_base_changed_by"
RESERVED_KEYS = frozenset({FORMAT_KEY, VERSION_KEY, ADAPTER_KEY, STARTED_KEY})


def looks_like(metadata: Mapping[str, str]) -> bool:
    """True for the metadata of a native file."""
    return FORMAT_KEY in metadata


def write(
    name: str,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    methods: Mapping[str, Method],
    shared: Mapping[str, torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of the file of one adapter.

    Args:
        name: The adapter's name, recorded for people.
        tensors: Module path -> parameter -> tensor.
        methods: Module path -> method.
        shared: The tensors that all layers have in common; their keys are their names alone.
    """
    flat = {f"{path}.{parameter}": tensor for path, layer in tensors.items() for parameter, tensor in layer.items()}
    flat |= shared or {}
    records: list[dict[str, object]] = []
    layers = {}
    for path in sorted(methods):
        record = record_of(methods[path])
        if record not in records:
            records.append(record)
        layers[path] = records.index(record)
    adapter = {"name": name, "methods": records, "layers": layers}
    metadata = {FORMAT_KEY: FORMAT_VERSION, VERSION_KEY: __version__, ADAPTER_KEY: json.dumps(adapter, sort_keys=True)}
    return flat, metadata


def parse(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], path: Path
) -> tuple[dict[str, Weights], dict[str, Method], dict[str, object]]:
    """Module path -> weights, module path -> method, and the record itself.

    Raises:
        CheckpointError: ``adapter-newer`` for a file of a later format, ``adapter-config`` for a record that can't be understood,
            ``adapter-keys`` where tensors and record disagree.
    """
    if metadata[FORMAT_KEY] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {metadata[FORMAT_KEY]}, this version reads format {FORMAT_VERSION}.",
            why=f"It was written by onegraph {metadata.get(VERSION_KEY, '(unknown)')}.",
            hint="pip install -U onegraph",
            code="adapter-newer",
        )
    try:
        record = json.loads(metadata[ADAPTER_KEY])
        known = [method_of(entry) for entry in record["methods"]]
        methods = {str(layer): known[index] for layer, index in record["layers"].items()}
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, ConfigurationError) as error:
        raise CheckpointError(
            f"The record of the adapter in {path} can't be read: {error}.",
            why=f"The metadata entry {ADAPTER_KEY!r} was edited, cut off, or written by another version"
            f" ({metadata.get(VERSION_KEY, 'unknown')}).",
            hint="Use the file as it was written, or a newer version: pip install -U onegraph",
            code="adapter-config",
        ) from error
    weights: dict[str, Weights] = {}
    for key, tensor in tensors.items():
        layer, _, parameter = key.rpartition(".")
        weights.setdefault(layer, {})[parameter] = tensor
    differing = (weights.keys() - {SHARED}) ^ methods.keys()
    if differing:
        raise CheckpointError(
            f"{len(differing)} layers of {path} have tensors or a configuration, but not both.",
            why=f"They are:\n{first_ten(differing)}",
            hint="Use the file as it was written.",
            code="adapter-keys",
        )
    for layer, method in methods.items():
        alpha = getattr(method, "alpha", None)
        if isinstance(alpha, int | float):
            weights[layer]["alpha"] = float(alpha)
    return weights, methods, dict(record)


def record_of(method: Method) -> dict[str, object]:
    """A method as JSON-able values: its registered name and its fields, which may be methods too."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.name not in method.room}
    return {"method": method.name, **{name: record_of(value) if isinstance(value, Method) else value for name, value in values.items()}}


def method_of(record: Mapping[str, object]) -> Method:
    """The method that :func:`record_of` described.

    Raises:
        CheckpointError: ``adapter-unsupported`` for a method or field that this version doesn't know.
    """
    values = {key: _value_of(value) for key, value in record.items() if key != "method"}
    method = METHODS.get(str(record.get("method")))
    if method is None:
        raise CheckpointError(
            f"The adapter uses the method {record.get('method')!r}, which this version doesn't know.",
            hint=f"Known: {', '.join(sorted(METHODS))}. A newer version may know it: pip install -U onegraph",
            code="adapter-unsupported",
        )
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(method)})
    if unknown:
        raise CheckpointError(
            f"The method {method.name} has no field {unknown[0]!r} in this version.",
            why="The file was written by a newer version, and leaving the field out would change what the adapter computes.",
            hint="pip install -U onegraph",
            code="adapter-unsupported",
        )
    return method(**values)


def _value_of(value: object) -> Any:
    if isinstance(value, dict) and "method" in value:
        return method_of(value)  # a method of another one
    return tuple(value) if isinstance(value, list) else value
