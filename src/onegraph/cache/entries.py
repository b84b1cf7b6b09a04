"""Which files in the folder are inductor's, told by their names, and which of them are whole."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onegraph.compiling.last_run import FILE as LAST_RUN
from onegraph.errors import CompileError

# A kernel or a wrapper: a hash, in a folder named by two of its letters.
_HASHED = re.compile(r"[a-z2-7]([a-z2-7]{2})[a-z2-7]{40,60}(\.[\w.-]+)?")
_GRAPHS = ("fxgraph", "aotautograd")
_OTHERS = ("triton", "cache", "onegraph-ahead")
# Of use to one process, or to one machine, only.
_PASSING = ("locks",)
# How the folder begins in which an unpacking puts its files first.
STAGING = "onegraph-unpack-"
LIBRARIES = (".so", ".dylib", ".pyd")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of the folder.

    Args:
        name: Its path in the folder, with forward slashes.
        path: Where it is.
        bytes: Its size.
        written: When it was written, in seconds since 1970.
    """

    name: str
    path: Path
    bytes: int
    written: float

    @property
    def is_graph(self) -> bool:
        """True for a graph of inductor or of AOTAutograd."""
        return self.name.partition("/")[0] in _GRAPHS

    @property
    def is_library(self) -> bool:
        """True for a C++ kernel, built."""
        return self.name.endswith(LIBRARIES)

    @property
    def whole(self) -> bool:
        """False for what was cut off: a graph that doesn't end as a pickle does, a library without its last part."""
        try:
            with self.path.open("rb") as file:
                if self.is_graph:
                    file.seek(-1, os.SEEK_END)
                    return file.read(1) == b"."
                if self.is_library:
                    return _whole_library(file.read(64), self.bytes)
        except OSError:  # empty; gone meanwhile
            return False
        return True


def _whole_library(head: bytes, num_bytes: int) -> bool:
    """An ELF file ends with its table of sections, which the linker writes last; of other kinds only emptiness is told."""
    if head[:4] != b"\x7fELF" or len(head) < 64 or head[4] != 2:
        return num_bytes > 0
    order = "<" if head[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}Q", head, 40)
    size, number = struct.unpack_from(f"{order}HH", head, 58)
    return bool(start) and start + size * number <= num_bytes


def belongs(name: str) -> bool:
    """Whether inductor, or onegraph, names a file in the folder like this."""
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or any(part in {"..", ".", "/"} or "\\" in part or "\0" in part for part in parts):
        return False
    if name == LAST_RUN:
        return True
    if len(parts) < 2:
        return False
    if len(parts) == 2 and (found := _HASHED.fullmatch(parts[1])) is not None and found.group(1) == parts[0]:
        return True
    return parts[0] in {*_GRAPHS, *_OTHERS, *_PASSING}


def entries(folder: Path, *, strict: bool = False) -> Iterator[Entry]:
    """Inductor's files in a folder, by name; links and what else is there are left out.

    Args:
        folder: The cache folder.
        strict: Refuse a folder that can't be read, instead of leaving it out.

    Raises:
        CompileError: ``cache-folder``, if strict.
    """
    for place, folders, files in os.walk(folder, onerror=_unreadable if strict else None):
        folders[:] = sorted(name for name in folders if not (Path(place) / name).is_symlink())
        for file in sorted(files):
            path = Path(place) / file
            name = path.relative_to(folder).as_posix()
            if not belongs(name) or path.is_symlink():
                continue
            try:
                status = path.stat()
            except OSError:
                continue  # gone meanwhile: another process is at work
            yield Entry(name=name, path=path, bytes=status.st_size, written=status.st_mtime)


def _unreadable(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return  # gone meanwhile
    raise CompileError(
        f"{error.filename} in inductor's cache folder can't be read: {error.strerror or error}.",
        why="What is in it can't be told. Nothing was changed.",
        hint="as the user who compiled into it, or name another folder: export TORCHINDUCTOR_CACHE_DIR=FOLDER",
        code="cache-folder",
    ) from error


def require_readable(entry: Entry) -> None:
    """Another user's file isn't taken for one that was cut off.

    Raises:
        CompileError: ``cache-folder``.
    """
    try:
        with entry.path.open("rb"):
            pass
    except PermissionError as error:
        _unreadable(error)
    except OSError:
        return  # gone meanwhile


def travels(entry: Entry) -> bool:
    """Whether an entry is of use on another machine: whole, no lock, no record of what happened here."""
    return entry.name.partition("/")[0] not in _PASSING and entry.name != LAST_RUN and entry.whole
