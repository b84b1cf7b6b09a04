"""Reading files of weights, safetensors or torch, and saying what a file is when it isn't one."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onegraph.errors import ModelFileError
from onegraph.training.diffusion.families import WANTED
from onegraph.training.diffusion.pickles import read_pickled_weights, refuse_code

# How files that people pass by mistake begin.
SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"GGUF", "a GGUF model of llama.cpp"),
    (b"%PDF", "a PDF document"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a Windows program"),
)
TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
# The longest header that safetensors itself accepts.
LONGEST_HEADER = 100_000_000


class Weights(Mapping[str, Tensor]):
    """The tensors of one file, read when asked for. ``metadata`` are a safetensors file's strings, ``skipped`` a pickle's stand-ins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.skipped: tuple[str, ...] = ()
        self._tensors: dict[str, Tensor] | None = None
        self._file: Any = None
        self.shapes: dict[str, tuple[int, ...]]
        if _is_safetensors(path):
            self._file = safe_open(str(path), framework="pt")
            self.metadata = dict(self._file.metadata() or {})
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118 - no mapping
        else:
            weights = read_pickled_weights(path)
            self._tensors, self.skipped = weights.tensors, weights.skipped
            self.shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is not None:
            return self._tensors[name]
        if name not in self.shapes:
            raise KeyError(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise ModelFileError(f"{self.path}: {name} can't be read: {error}", code="model-file-damaged", hint=AGAIN) from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


AGAIN = "Download or copy it again and compare its size with the source."


def open_weights(path: Path) -> Weights:
    """The tensors of a ``.safetensors`` or torch file; the contents decide, not the name.

    Args:
        path: The file.

    Raises:
        ModelFileError: ``not-found``, ``not-a-model`` with what the file is, ``model-file-truncated``, ``model-file-damaged``,
            ``pickle-runs-code``, ``no-weights``, or ``not-readable``.
    """
    check_is_weights(path)
    try:
        weights = Weights(path)
    except SafetensorError as error:
        raise ModelFileError(f"{path} is a damaged safetensors file: {error}", hint=AGAIN, code="model-file-damaged") from error
    except OSError as error:
        raise ModelFileError(
            f"{path} can't be read: {error}", hint="Check the file's permissions and disk.", code="not-readable"
        ) from error
    if not len(weights):
        raise ModelFileError(f"{path} holds no tensors", why="The safetensors header is empty.", hint=WANTED, code="no-weights")
    return weights


def check_is_weights(path: Path) -> None:
    """Raise with what the file is when it is no file of weights; reads a few bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(1024)
    except OSError as error:
        code = "not-found" if isinstance(error, FileNotFoundError) else "not-readable"
        raise ModelFileError(f"{path} can't be opened: {error.strerror}", hint="Check the path and its permissions.", code=code) from error
    what = _what_is(head)
    if what is not None:
        if path.suffix in TORCH_SUFFIXES:
            refuse_code(path)
        raise ModelFileError(f"{path} is {what[0]}, not a model", why=what[1], hint=what[2], code="not-a-model")
    if _is_safetensors(path):
        _check_length(path, size)
    elif path.suffix == ".safetensors" and not _looks_like_torch(head):
        raise ModelFileError(
            f"{path} is named .safetensors, but its contents are something else",
            why=f"It is {size} bytes long and has no safetensors header; it is cut short or of another kind.",
            hint=AGAIN,
            code="model-file-truncated" if size < 1024 else "not-a-model",
        )


def _what_is(head: bytes) -> tuple[str, str, str] | None:
    """Noun phrase, reason and hint for the kinds of files that are passed by mistake."""
    text = head.lstrip()[:200].lower()
    if not head:
        return "empty", "It has no bytes: a download that never began, or a full disk.", AGAIN
    if head.startswith(b"version https://git-lfs"):
        return (
            "a git-lfs pointer",
            "It names the real file, which git hasn't fetched.",
            "Run `git lfs pull` in its repository, or download it.",
        )
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return (
            "a web page",
            "The download link led to a page (a login, a licence, an error) and that was saved.",
            "Open it to see, and download again.",
        )
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP image", "", WANTED
    for signature, what in SIGNATURES:
        if head.startswith(signature):
            return what, "", WANTED
    if text.startswith((b"{", b"[")) and b"\x00" not in head:
        return "a JSON file", "", WANTED
    if all(byte >= 32 or byte in (9, 10, 13) for byte in head):
        return "a text file", f"It begins with {head[:40].decode('utf-8', 'replace')!r}.", WANTED
    return None


def _looks_like_torch(head: bytes) -> bool:
    """A zip archive, or a pickle of protocol 2 or later."""
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))


def _is_safetensors(path: Path) -> bool:
    """Whether the file begins with a length and that much JSON, or the beginning of it."""
    with path.open("rb") as stream:
        head = stream.read(9)
    return len(head) == 9 and head[8:9] == b"{" and 2 <= struct.unpack("<Q", head[:8])[0] <= LONGEST_HEADER


def _check_length(path: Path, size: int) -> None:
    """Compare the file's size with the end of its last tensor."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        raw = stream.read(length)
    if len(raw) < length:
        raise _truncated(path, size, 8 + length)
    try:
        header = json.loads(raw)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path} has a damaged safetensors header: {error}", hint=AGAIN, code="model-file-damaged") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise _truncated(path, size, expected)


def _truncated(path: Path, size: int, expected: int) -> ModelFileError:
    return ModelFileError(
        f"{path} is cut short: {size:,} bytes of {expected:,}",
        why="Its header describes tensors past the end of the file; a download or a copy broke off.",
        hint=AGAIN,
        code="model-file-truncated",
    )


def legacy_hash(path: Path) -> str:
    """The short hash of old programs: first 8 hex digits of sha256 over bytes [0x100000, +0x10000)."""
    with path.open("rb") as stream:
        stream.seek(0x100000)
        return hashlib.sha256(stream.read(0x10000)).hexdigest()[:8]


def file_sha256(path: Path) -> str:
    """sha256 of the whole file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def component_weights(folder: Path, stem: str) -> Iterator[Path]:
    """The weight files of one model in a diffusers folder: one, or the shards its index lists.

    Args:
        folder: E.g. ``model/unet``.
        stem: ``diffusion_pytorch_model``, or ``model`` for transformers.
    """
    torch_stem = "pytorch_model" if stem == "model" else stem
    for name in (f"{stem}.safetensors", f"{stem}.fp16.safetensors", f"{torch_stem}.bin", f"{torch_stem}.fp16.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            yield folder / name
            return
        if index.is_file():
            shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
            # A shard's name must stay inside the folder.
            yield from (folder / os.path.basename(shard) for shard in sorted(set(shards)))  # noqa: PTH119
            return


def as_parameter(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a mapped tensor in ``dtype``, contiguous: training must not write into the file, nor lose it when the file goes."""
    return tensor.to(dtype=dtype, copy=True).contiguous()
