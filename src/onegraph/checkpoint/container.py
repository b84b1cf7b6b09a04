"""The safetensors container: checked before it is read, written in one fixed order."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from onegraph.adapters.checks import is_finite
from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError, NumericsError, nearest

# The format's own limit; anything larger is no header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Container:
    """The contents of one safetensors file."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


def serialise(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file; the same contents give the same bytes (the library's own order of metadata is random)."""
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        # Tied weights are written once each: the format has no place for sharing.
        plain[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(value.untyped_storage().data_ptr())
    data = safetensors.torch.save(plain, metadata=dict(metadata) or None)
    header_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_length])
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **{key: value for key, value in header.items() if key != "__metadata__"}}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + header_length :]


def write_bytes(data: bytes, path: Path) -> None:
    """Write ``data`` to ``path``; a full disk raises OSError here, not an exception of another library."""
    with path.open("wb") as file:
        file.write(data)


def cast(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, where: str) -> dict[str, torch.Tensor]:
    """The tensors in ``dtype`` (whole numbers stay as they are), checked to be finite before and after.

    Raises:
        NumericsError: ``not-finite`` for NaN or infinity in the weights, ``overflow`` where only the cast makes them infinite.
    """
    before = sorted(name for name, tensor in tensors.items() if not is_finite(tensor))
    if before:
        raise NumericsError(
            f"{len(before)} of {len(tensors)} tensors of {where} hold NaN or infinity; nothing was written.",
            why=f"They are:\n{first_ten(before)}",
            hint="Training diverged: lower the learning rate, or go back to the last good file.",
        )
    if dtype is None:
        return dict(tensors)
    after = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    overflown = sorted(name for name, tensor in after.items() if not is_finite(tensor))
    if overflown:
        raise NumericsError(
            f"{len(overflown)} of {len(tensors)} tensors of {where} don't fit into {dtype}; nothing was written.",
            why=f"Their largest value is beyond {torch.finfo(dtype).max:g}:\n{first_ten(overflown)}",
            hint="Save in bf16 or fp32.",
            code="overflow",
        )
    return after


def read_container(path: Path) -> Container:
    """Read a safetensors file after checking that it is one, that it is whole, and that its weights are finite.

    Raises:
        CheckpointError: ``file-missing``, ``file-unreadable``, ``file-empty``, ``file-is-html``, ``file-is-pickle``, ``file-is-pointer``,
            ``file-not-safetensors``, ``file-truncated`` or ``weights-not-finite``.
    """
    metadata = read_metadata(path)
    try:
        tensors = safetensors.torch.load_file(path, device="cpu")
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} can't be read: {error}.",
            why="Its header looks like safetensors, but the contents don't fit it.",
            hint="Download or copy the file again.",
            code="file-not-safetensors",
        ) from error
    check_finite(tensors, path)
    return Container(tensors, metadata)


def read_shards(index: Path) -> Container:
    """Read the safetensors files that an index names, as one.

    Raises:
        CheckpointError: ``file-shards`` for an index that is broken or doesn't fit its files; as :func:`read_container`.
    """
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(table.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad_index(index, "It holds no readable weight_map.") from error
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise _bad_index(index, f"It names {name!r}, which is no file beside it.")
        if not (index.parent / name).is_file():
            raise _bad_index(index, f"It names {name}, which isn't there.")
        shard = read_container(index.parent / name)
        tensors |= shard.tensors
        metadata |= shard.metadata
    if missing := sorted(table.keys() - tensors.keys()):
        raise _bad_index(index, f"Its files lack tensors that it names:\n{first_ten(missing)}")
    return Container(tensors, metadata)


def _bad_index(index: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The files of {index} can't be put together.", why=why, hint="Download or copy all of them again.", code="file-shards"
    )


def check_finite(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise CheckpointError ``weights-not-finite`` for NaN or infinity."""
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise CheckpointError(
            f"{len(broken)} of {len(tensors)} tensors in {path} hold NaN or infinity.",
            why=f"They are:\n{first_ten(broken)}",
            hint="The training that wrote this file diverged; use an earlier file of the same run.",
            code="weights-not-finite",
        )


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata strings in a safetensors header, after the same checks as :func:`read_container`, without reading the weights."""
    header = _read_header(path)
    metadata = header.get("__metadata__", {})
    return {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _read_header(path: Path) -> dict[str, object]:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, a file was expected.", hint="Name the .safetensors file in it.", code="file-missing")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(512)
            _check_start(path, start, size)
            length = int.from_bytes(start[:8], "little")
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise _not_safetensors(path, start, size, length)
            file.seek(8)
            text = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist.", hint=_files_nearby(path), code="file-missing") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read: {error.strerror or error}.", hint="Check its permissions.", code="file-unreadable"
        ) from error
    try:
        header = json.loads(text)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _not_safetensors(path, start, size, length) from error
    promised = 8 + length + max(ends, default=0)
    if promised < size:
        raise CheckpointError(
            f"{path} is longer than its header says: it holds {size:,} bytes, the header tells of {promised:,}.",
            why="Something was written behind its end, such as another file; what belongs to it can't be told.",
            hint="Download or copy the file again, each file by itself.",
            code="file-not-safetensors",
        )
    if promised > size:
        raise CheckpointError(
            f"{path} is truncated: it holds {size:,} bytes, its header promises {promised:,}.",
            why="The download, the copy or the program that wrote it stopped early.",
            hint="Download or copy the file again.",
            code="file-truncated",
        )
    return dict(header)


def _check_start(path: Path, start: bytes, size: int) -> None:
    """Name the common kinds of file that are no safetensors file."""
    if size == 0:
        raise CheckpointError(
            f"{path} is empty.", why="It holds 0 bytes.", hint="Download or copy the file again, or use an earlier one.", code="file-empty"
        )
    if start[8:9] == b"{":
        # A safetensors header; its length in front of it may look like any of the marks below.
        return
    if start.lstrip()[:1] == b"<":
        raise CheckpointError(
            f"{path} is a web page, not an adapter.",
            why=f"It begins with {start.lstrip()[:40].decode(errors='replace')!r}: a login or error page was saved in place of the file.",
            hint="Open the download link in a browser, log in, and download the file itself.",
            code="file-is-html",
        )
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself.", hint="Run `git lfs pull` where it was cloned.", code="file-is-pointer"
        )
    # A pickle begins with a protocol mark, torch.save's newer files with a zip signature.
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        raise CheckpointError(
            f"{path} is a pickle (written by torch.save), not a safetensors file.",
            why="Reading a pickle can run code, so adapters are read from safetensors only (adapter_model.bin in a PEFT folder excepted).",
            hint="Convert it where you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), new_path).",
            code="file-is-pickle",
        )


def _not_safetensors(path: Path, start: bytes, size: int, length: int) -> CheckpointError:
    if size >= 9 and start[8:9] == b"{" and 0 < length <= _MAX_HEADER_BYTES and size - 8 < length:
        return CheckpointError(
            f"{path} is truncated: it holds {size:,} bytes, its header alone has {length:,}.",
            why="The download, the copy or the program that wrote it stopped early.",
            hint="Download or copy the file again.",
            code="file-truncated",
        )
    return CheckpointError(
        f"{path} is not a safetensors file.",
        why=f"It holds {size:,} bytes and begins with {start[:16]!r}, which is no safetensors header.",
        hint="Name a .safetensors file, or a folder with adapter_config.json.",
        code="file-not-safetensors",
    )


def _files_nearby(path: Path) -> str:
    try:
        entries = sorted(path.parent.iterdir())
        nearby = [entry.name for entry in entries if entry.suffix == ".safetensors"]
        names = [entry.name for entry in entries if entry.suffix == path.suffix or entry.is_dir()]
    except OSError:
        return f"The folder {path.parent} does not exist either."
    if close := nearest(path.name, names):
        return f"Did you mean {path.parent / close[0]}?"
    return f"In {path.parent} there is: {', '.join(nearby[:5])}." if nearby else f"{path.parent} holds no .safetensors file."
