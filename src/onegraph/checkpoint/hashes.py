"""The hashes that programs for images look adapter and model files up by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from onegraph.checkpoint.container import serialise

# The old hash reads 64 KiB, one MiB into the file; whatever lies there identifies it.
_LEGACY_OFFSET = 0x100000
_LEGACY_LENGTH = 0x10000


def network_hashes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """``sshs_model_hash`` and ``sshs_legacy_hash`` of a network file.

    Both are taken over the file as it would be saved with its ``ss_*`` metadata only, so that they stay the same when a title or a
    comment is edited: sha256 of everything behind the header, and the first 8 hex digits of sha256 over bytes [0x100000, +0x10000).

    Args:
        tensors: The tensors of the file, in the dtype they are saved in.
        metadata: The metadata of the file; entries that don't start with ``ss_`` are left out.
    """
    data = serialise(tensors, {key: value for key, value in metadata.items() if key.startswith("ss_")})
    header_length = int.from_bytes(data[:8], "little")
    legacy = data[_LEGACY_OFFSET : _LEGACY_OFFSET + _LEGACY_LENGTH]
    return {
        "sshs_model_hash": hashlib.sha256(data[8 + header_length :]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(legacy).hexdigest()[:8],
    }


def file_hash(path: Path) -> str:
    """sha256 of a whole file in hex, as ``ss_new_sd_model_hash`` records it for a base model."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def legacy_file_hash(path: Path) -> str:
    """First 8 hex digits of sha256 over bytes [0x100000, +0x10000), as ``ss_sd_model_hash`` records it for a base model."""
    with path.open("rb") as file:
        file.seek(_LEGACY_OFFSET)
        return hashlib.sha256(file.read(_LEGACY_LENGTH)).hexdigest()[:8]
