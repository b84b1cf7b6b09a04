"""Reading `.ckpt` files without running anything: torch's zip and legacy formats around a pickle that is interpreted, never executed."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from onegraph.errors import ModelFileError
from onegraph.training.diffusion.pickle_machine import Machine, Storage, TensorRecipe

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# What a cut or altered file makes of the reading.
BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, struct.error, RuntimeError, OSError)
DEEPEST = 8
NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params")


@dataclass(frozen=True)
class PickledWeights:
    """The tensors of a pickled checkpoint and the names of what was skipped.

    ``tensors`` stay memory-mapped where the file allows it: copy before changing them.
    """

    tensors: dict[str, Tensor]
    skipped: tuple[str, ...]


def read_pickled_weights(path: Path) -> PickledWeights:
    """The tensors of a torch checkpoint, zip or legacy format, without running anything in it.

    Args:
        path: A ``.ckpt``, ``.pt``, ``.pth`` or ``.bin`` file.

    Raises:
        ModelFileError: ``pickle-runs-code`` with every name it would have run; ``model-file-truncated`` or
            ``model-file-damaged``; ``no-weights`` when it holds no tensors under names.
    """
    machine = Machine()
    try:
        with path.open("rb") as stream:
            if stream.read(4) == b"PK\x03\x04":
                value, load = _open_zip(path, machine)
            else:
                stream.seek(0)
                value, load = _open_legacy(path, stream, machine)
        _refuse(path, machine)
        named = dict(_named_tensors(value))
        tensors = {name: _tensor(recipe, load) for name, recipe in named.items()}
    except ModelFileError:
        raise
    except BROKEN as error:
        # What the program named before it broke off is worth more than where it broke off.
        _refuse(path, machine)
        raise ModelFileError(
            f"{path} can't be read as a torch checkpoint: {error}",
            why="The file is damaged, cut short, or of another kind.",
            hint="Download or copy it again and compare its size with the source; a .safetensors of the same model is the safer choice.",
            code="model-file-damaged",
        ) from error
    except zipfile.BadZipFile as error:
        raise ModelFileError(
            f"{path} is a damaged zip archive: {error}",
            why="torch writes checkpoints as zip archives, and this one's directory or a member can't be read; it was probably cut short.",
            hint="Download or copy it again and compare its size with the source.",
            code="model-file-truncated",
        ) from error
    if not tensors:
        raise ModelFileError(
            f"{path} holds no weights",
            why="It is a torch file, but no tensors under names were found at its top or under " + ", ".join(NESTED_UNDER) + ".",
            hint="Pass the checkpoint of a model, not an optimizer state or a pickled object.",
            code="no-weights",
        )
    return PickledWeights(tensors, tuple(dict.fromkeys(machine.skipped)))


def refuse_code(path: Path) -> None:
    """Refuse a file of plain text that is a whole pickle program, which protocol 0 allows; other text passes.

    Args:
        path: A file named like a torch checkpoint.

    Raises:
        ModelFileError: ``pickle-runs-code``.
    """
    machine = Machine()
    try:
        with path.open("rb") as stream:
            machine.run(stream)
    except BROKEN:
        return
    _refuse(path, machine)


def _refuse(path: Path, machine: Machine) -> None:
    """Stop at the names that are neither data nor a known framework's."""
    if machine.refused:
        names = list(dict.fromkeys(machine.refused))
        raise ModelFileError(
            f"{path} tries to run code: {', '.join(names)}",
            why="A .ckpt is a pickle, which can call any Python function. These names are neither tensors nor plain data nor objects "
            "of a known training framework, so the file was refused; nothing in it was run.",
            hint="Don't load it with other programs either. Get the model as .safetensors from its author.",
            code="pickle-runs-code",
        )


def _open_zip(path: Path, machine: Machine) -> tuple[Any, Callable[[Storage], torch.UntypedStorage]]:
    """The value and the storages of torch's zip format."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        main = next((name for name in members if name.endswith("data.pkl") and name.count("/") <= 1), None)
        if main is None:
            raise ModelFileError(
                f"{path} is a zip archive, not a model",
                why=f"A torch checkpoint holds a member data.pkl; this one holds {', '.join(list(members)[:3]) or 'nothing'}.",
                hint="Unpack it and pass the model file inside.",
                code="not-a-model",
            )
        root = main.removesuffix("data.pkl")
        if root + "byteorder" in members and archive.read(root + "byteorder").strip() != b"little":
            raise ValueError("it was written on a big-endian machine")
        with archive.open(main) as stream:
            value = machine.run(cast(BinaryIO, stream))
    mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)

    def load(storage: Storage) -> torch.UntypedStorage:
        info = members.get(f"{root}data/{storage.key}")
        if info is None:
            raise ValueError(f"its storage {storage.key} is missing")
        size = storage.num_elements * storage.dtype.itemsize
        if info.file_size < size:
            raise ValueError(f"storage {storage.key} has {info.file_size} bytes of {size}")
        if info.compress_type != zipfile.ZIP_STORED:
            # No more than is asked for: a few bytes can unpack to gigabytes.
            with zipfile.ZipFile(path) as archive, archive.open(info) as stream:
                return torch.frombuffer(bytearray(stream.read(size)), dtype=torch.uint8).untyped_storage()
        with path.open("rb") as stream:
            stream.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", stream.read(4))
        start = info.header_offset + 30 + name_length + extra_length
        if start + size > len(mapped):
            raise ValueError(f"storage {storage.key} ends past the end of the file")
        return cast(torch.UntypedStorage, mapped[start : start + size])

    return value, _once(load)


def _open_legacy(path: Path, stream: BinaryIO, machine: Machine) -> tuple[Any, Callable[[Storage], torch.UntypedStorage]]:
    """The value and the storages of the format before torch 1.6: five pickles, then the raw storages."""
    if machine.run(stream) != LEGACY_MAGIC:
        _refuse(path, machine)
        raise ValueError("it is a pickle, but not one that torch wrote")
    machine.run(stream)
    machine.run(stream)
    value = machine.run(stream)
    keys = machine.run(stream)
    _refuse(path, machine)
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        (count,) = struct.unpack("<q", stream.read(8))
        if not isinstance(key, str | int) or str(key) not in machine.storages or count < 0:
            raise ValueError(f"a storage of {count} elements that belongs to no tensor")
        size = count * machine.storages[str(key)].itemsize
        places[str(key)] = (stream.tell(), size)
        stream.seek(size, 1)
    mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)

    def load(storage: Storage) -> torch.UntypedStorage:
        start, size = places[storage.key]
        if start + size > len(mapped):
            raise ValueError(f"storage {storage.key} ends past the end of the file")
        # Legacy storages lie at odd offsets; a tensor wants an aligned start.
        piece = torch.empty(0, dtype=torch.uint8).set_(cast(torch.UntypedStorage, mapped), start, (size,), (1,))
        return piece.clone().untyped_storage()

    return value, _once(load)


def _once(load: Callable[[Storage], torch.UntypedStorage]) -> Callable[[Storage], torch.UntypedStorage]:
    """``load``, remembering what it loaded, so that tensors sharing a storage still share it."""
    known: dict[str, torch.UntypedStorage] = {}

    def remembered(storage: Storage) -> torch.UntypedStorage:
        if storage.key not in known:
            known[storage.key] = load(storage)
        return known[storage.key]

    return remembered


def _tensor(recipe: TensorRecipe, load: Callable[[Storage], torch.UntypedStorage]) -> Tensor:
    """The tensor, after checking that it lies inside its storage."""
    last = recipe.offset + sum((size - 1) * stride for size, stride in zip(recipe.size, recipe.stride, strict=True))
    empty = 0 in recipe.size
    if recipe.offset < 0 or min((*recipe.size, *recipe.stride, 0)) < 0 or (not empty and last >= recipe.storage.num_elements):
        raise ValueError(f"a tensor of size {recipe.size} reaches past its storage of {recipe.storage.num_elements} elements")
    dtype = recipe.storage.dtype
    if empty:
        return torch.empty(recipe.size, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(load(recipe.storage), recipe.offset, recipe.size, recipe.stride)


def _named_tensors(value: object) -> Iterator[tuple[str, TensorRecipe]]:
    """The tensors under names: those of ``state_dict`` or the like, else those at the top."""
    found = value
    for _ in range(DEEPEST):  # a dict may hold itself
        if not isinstance(found, dict):
            break
        inner = next((found[name] for name in NESTED_UNDER if isinstance(found.get(name), dict)), None)
        if inner is None or not any(isinstance(item, TensorRecipe) for item in _recipes(inner)):
            break
        found = inner
    if isinstance(found, dict):
        for name, item in found.items():
            if isinstance(name, str) and isinstance(item, TensorRecipe):
                yield name, item


def _recipes(value: object) -> Iterator[TensorRecipe]:
    """All tensors anywhere below ``value``; a container met twice is walked once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, TensorRecipe):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
