"""Adapter files in and out: our own format, and those of PEFT, sd-scripts (kohya), LyCORIS and diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from onegraph.adapters import Adapters, register_file_functions
from onegraph.checkpoint.atomic import atomic_write, atomic_write_all
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.hashes import file_hash, legacy_file_hash, network_hashes
from onegraph.checkpoint.load import load, load_parts
from onegraph.checkpoint.reading import read
from onegraph.checkpoint.save import save, save_kohya

__all__ = [
    "AdapterFile",
    "atomic_write",
    "atomic_write_all",
    "file_hash",
    "legacy_file_hash",
    "load",
    "load_parts",
    "network_hashes",
    "read",
    "save",
    "save_kohya",
]


def _save(adapters: Adapters, path: str | Path, **options: Any) -> None:
    save(adapters, path, **options)


def _load(model: nn.Module, path: str | Path, **options: Any) -> Adapters:
    return load(model, path, **options)


register_file_functions(save=_save, load=_load)
