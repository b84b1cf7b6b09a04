"""A packed folder, put into the cache folder of this machine: all of it checked first, then each file in one move."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onegraph.cache.entries import STAGING, belongs
from onegraph.cache.kind import Difference, MachineKind, differences, machine_kind
from onegraph.cache.packing import FILES, FORMAT, MANIFEST
from onegraph.checkpoint.atomic import make_folder
from onegraph.doctor.cache_folder import location
from onegraph.errors import CompileError, OutputError

_LARGEST_MANIFEST = 2**20
# Found first, used last: a graph must not be there before its kernels are.
_LAST = ("fxgraph", "aotautograd")


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What ``unpack`` did.

    Args:
        path: The packed file.
        folder: The cache folder.
        files: Files put there.
        kept: Files that were there already, and stayed.
        bytes: Size of what was put there.
        differences: What this machine and the packing one don't have in common; only with ``force``.
    """

    path: str
    folder: str
    files: int
    kept: int
    bytes: int
    differences: tuple[Difference, ...] = ()


def unpack(path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None, force: bool = False) -> Unpacked:
    """Puts a packed cache folder's files into this machine's folder; files that are there already stay.

    Graphs and kernels are code: unpack what you would run. An unpacking that is broken off leaves a folder that works, with some of the
    entries or none, each whole.

    Args:
        path: A file that ``pack`` wrote.
        folder: The cache folder; the one inductor would use when None. It is made when it isn't there.
        force: Unpack in spite of differences between the machines.

    Raises:
        CompileError: ``cache-archive``: not such a file, or a broken one. ``cache-other-machine``: made on a machine of another kind.
        OutputError: The folder can't be written to, or the disk is too full.
    """
    path = Path(path)
    cache = Path(folder) if folder is not None else location()[0]
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _manifest(path, archive)
            files = _files(path, archive, manifest)
            found = differences(MachineKind.of_record(manifest["machine"]), machine_kind())
            if found and not force:
                raise _other_machine(path, found)
            make_folder(cache)
            _check_space(cache, manifest["bytes"])
            try:
                with tempfile.TemporaryDirectory(prefix=STAGING, dir=cache) as staging:
                    for name, info in files.items():
                        target = Path(staging) / name
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with archive.open(info) as source, target.open("wb") as out:
                            shutil.copyfileobj(source, out, 2**20)
                    moved = _merge(Path(staging), cache, list(files))
            except OSError as error:
                raise OutputError(
                    f"Can't write into inductor's cache folder {cache}: {error.strerror or error}.",
                    why="What is there already is whole.",
                    hint="Free some space, or name another folder: export TORCHINDUCTOR_CACHE_DIR=FOLDER",
                    code="disk-full" if error.errno == 28 else "not-writable",
                ) from error
    except FileNotFoundError as error:
        raise _not_ours(path, "There is no such file.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise _not_ours(path, f"It can't be read as one: {error}.") from error
    return Unpacked(
        path=str(path),
        folder=str(cache),
        files=len(moved),
        kept=len(files) - len(moved),
        bytes=sum(files[name].file_size for name in moved),
        differences=tuple(found),
    )


def _manifest(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        info = archive.getinfo(MANIFEST)
        if info.file_size > _LARGEST_MANIFEST:
            raise ValueError("too large")
        manifest = json.loads(archive.read(info))
        if not isinstance(manifest, dict) or not isinstance(manifest["format"], int):
            raise ValueError("not a manifest")
        if manifest["format"] == FORMAT:
            MachineKind.of_record(manifest["machine"])
            if not isinstance(manifest["files"], int) or not isinstance(manifest["bytes"], int):
                raise ValueError("not a manifest")
    except (KeyError, ValueError) as error:
        raise _not_ours(path, f"It holds no readable {MANIFEST}.") from error
    if manifest["format"] != FORMAT:
        raise _not_ours(path, f"It has format {manifest['format']}; this onegraph reads format {FORMAT}.")
    return manifest


def _files(path: Path, archive: zipfile.ZipFile, manifest: dict[str, Any]) -> dict[str, zipfile.ZipInfo]:
    """Name in the folder -> place in the archive. A name that inductor wouldn't give, a link or a number that is off: all is refused."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename == MANIFEST:
            continue
        name = info.filename.removeprefix(FILES)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if not info.filename.startswith(FILES) or not belongs(name) or kind not in (0, stat.S_IFREG) or name in found:
            raise _not_ours(path, f"It holds {info.filename!r}, which is no file of inductor's cache.")
        found[name] = info
    if len(found) != manifest["files"] or sum(info.file_size for info in found.values()) != manifest["bytes"]:
        raise _not_ours(path, "What it holds isn't what its manifest says.")
    return found


def _check_space(cache: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(cache).free
    if num_bytes > free:
        raise OutputError(
            f"The disk is full: inductor's cache folder {cache} needs {num_bytes:,} bytes, {free:,} are free.",
            why="Nothing was written.",
            hint="Free some space, or name another folder: export TORCHINDUCTOR_CACHE_DIR=FOLDER",
            code="disk-full",
        )


def _merge(staging: Path, cache: Path, names: list[str]) -> list[str]:
    """Moves what isn't there yet; an empty file counts as not there."""
    moved = []
    for name in sorted(names, key=lambda name: (_order(name), name)):
        target = cache / name
        if target.is_file() and target.stat().st_size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(target)
        moved.append(name)
    return moved


def _order(name: str) -> int:
    top = name.partition("/")[0]
    return _LAST.index(top) + 1 if top in _LAST else 0


def _not_ours(path: Path, why: str) -> CompileError:
    return CompileError(
        f"{path} is not a packed cache folder, or a broken one.",
        why=f"{why} Nothing was written.",
        hint="onegraph cache pack FILE, on the machine that has the cache; then copy the file whole and compare its size",
        code="cache-archive",
    )


def _other_machine(path: Path, found: list[Difference]) -> CompileError:
    lines = "\n".join(f"  {difference}" for difference in found)
    return CompileError(
        f"{path} was packed on a machine of another kind:\n{lines}",
        why="Entries are found by a hash of all this, and their code was built for it. Nothing was written.",
        hint="compile once here, or onegraph cache unpack --force FILE to put them there nonetheless",
        code="cache-other-machine",
    )
