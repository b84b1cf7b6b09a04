"""Inductor's cache folder: which one, what is in it, what of it is of no use any more, and whether it can be written to."""

from __future__ import annotations

import getpass
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from onegraph.doctor.finding import BREAKS, NOTE, WARNING, Finding

_FULL = 100 * 2**20  # a UNet's graphs take about 30 MB
_TIGHT = 2**30
# Inductor writes the torch that it ran with into every graph that it keeps.
_WRITTEN_BY = re.compile(rb"# torch version: ([\w.+]{1,40})")
_MOST_READ = 2000


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """Inductor's cache folder.

    Args:
        path: Where inductor looks.
        origin: Where that comes from.
        exists: False before the first compilation.
        writable: Whether a file could be made in it, or in the nearest folder above that exists.
        problem: Why it can't be written to or read; "".
        bytes: Size of all files.
        files: Number of files.
        entries: Graphs kept: of inductor and of AOTAutograd.
        libraries: Compiled C++ and GPU kernels.
        oldest_seconds: Age of the oldest entry; None without entries.
        newest_seconds: Age of the newest.
        written_by: Version of torch -> graphs of inductor written with it, of those that were read.
        stale: Graphs written with another torch than the installed one: never used again.
        unreadable: Entries that are empty, cut off or not ours to read.
        free_bytes: Space on the disk.
        temporary: True when it is in the temporary folder.
    """

    path: str
    origin: str
    exists: bool = False
    writable: bool = False
    problem: str = ""
    bytes: int = 0
    files: int = 0
    entries: int = 0
    libraries: int = 0
    oldest_seconds: int | None = None
    newest_seconds: int | None = None
    written_by: dict[str, int] = field(default_factory=dict)
    stale: int = 0
    unreadable: int = 0
    free_bytes: int | None = None
    temporary: bool = False


def location() -> tuple[Path, str]:
    """The folder inductor would use, and where that comes from. Nothing is made."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is not None:
        return Path(os.path.abspath(named)), "environment TORCHINDUCTOR_CACHE_DIR"  # noqa: PTH100 - as torch does it
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    folder = re.sub(r'[\\/:*?"<>|]', "_", user)
    origin = next((f"environment {name}" for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    return Path(tempfile.gettempdir()) / f"torchinductor_{folder}", f"default, in the temporary folder{origin and f' of {origin}'}"


def cache_folder(torch_version: str | None) -> CacheFolder:
    """Looks at the folder.

    Args:
        torch_version: The installed torch as it names itself; None when there is none, and then nothing counts as stale.
    """
    path, origin = location()
    problem = _why_not_writable(path)
    found = _Count()
    if path.is_dir():
        found.count(path)
        problem = problem or found.problem
    now = time.time()
    stale = sum(number for version, number in found.written_by.items() if torch_version not in (None, version))
    temporary = any(str(path).startswith(f"{folder}{os.sep}") for folder in {tempfile.gettempdir(), "/tmp", "/dev/shm", "/run"})
    return CacheFolder(
        path=str(path),
        origin=origin,
        exists=path.exists(),
        writable=not problem,
        problem=problem,
        bytes=found.bytes,
        files=found.files,
        entries=found.entries,
        libraries=found.libraries,
        oldest_seconds=int(now - min(found.times)) if found.times else None,
        newest_seconds=int(now - max(found.times)) if found.times else None,
        written_by=dict(sorted(found.written_by.items())),
        stale=stale,
        unreadable=found.unreadable,
        free_bytes=_free(path),
        temporary=temporary,
    )


class _Count:
    def __init__(self) -> None:
        self.bytes = self.files = self.entries = self.libraries = self.unreadable = 0
        self.written_by: dict[str, int] = {}
        self.times: list[float] = []
        self.problem = ""

    def count(self, folder: Path) -> None:
        def note(error: OSError) -> None:
            self.problem = self.problem or str(error)
            self.unreadable += 1

        graphs: list[tuple[float, Path]] = []
        for place, _, names in os.walk(folder, onerror=note):
            kind = Path(place).relative_to(folder).parts[:1]
            for name in names:
                path = Path(place) / name
                try:
                    status = path.stat()
                except OSError:
                    continue  # gone meanwhile: another process is compiling
                self.files += 1
                self.bytes += status.st_size
                if kind in (("fxgraph",), ("aotautograd",)):
                    self.entries += 1
                    self.times.append(status.st_mtime)
                    graphs.append((status.st_mtime, path))
                elif path.suffix in {".so", ".cubin", ".hsaco", ".pyd"}:
                    self.libraries += 1
                    self.unreadable += status.st_size == 0 or not os.access(path, os.R_OK)
        for _, path in sorted(graphs, reverse=True)[:_MOST_READ]:
            self._read(path)

    def _read(self, path: Path) -> None:
        """One pickled graph: which torch wrote it, and whether it is whole."""
        version, whole = _pickled(path)
        self.unreadable += not whole
        if version:
            self.written_by[version] = self.written_by.get(version, 0) + 1


def written_by(path: Path) -> str:
    """The torch that wrote a graph; "" when it doesn't say so."""
    return _pickled(path)[0]


def _pickled(path: Path) -> tuple[str, bool]:
    """The torch that wrote a pickled graph, and whether the graph is whole. It is not unpickled: that would run it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _WRITTEN_BY.search(content)
            return (found.group(1).decode() if found is not None else ""), content[-1:] == b"."  # where every pickle ends
    except (OSError, ValueError):  # not ours to read; empty
        return "", False


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _why_not_writable(path: Path) -> str:
    """A file is made where the folder is, or would be: permissions, read-only disks and full ones answer alike."""
    try:
        with tempfile.TemporaryDirectory(prefix="onegraph-doctor-", dir=_existing(path)) as folder:
            (Path(folder) / "probe").write_bytes(b"x" * 4096)
    except OSError as error:
        return f"{error.strerror or error}: {_existing(path)}"
    return ""


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(path)).free
    except OSError:
        return None


def cache_findings(cache: CacheFolder) -> Iterator[Finding]:
    """What to do about the folder."""
    elsewhere = "export TORCHINDUCTOR_CACHE_DIR=~/.cache/inductor"
    if not cache.writable:
        yield Finding(
            code="cache-folder",
            severity=BREAKS,
            what=f"inductor's cache folder {cache.path} ({cache.origin}) can't be written to: {cache.problem}",
            do=(elsewhere,),
        )
    elif cache.free_bytes is not None and cache.free_bytes < _TIGHT:
        yield Finding(
            code="cache-disk-full",
            severity=BREAKS if cache.free_bytes < _FULL else WARNING,
            what=f"the disk of inductor's cache folder {cache.path} has {cache.free_bytes / 2**20:.0f} MB left",
            do=(elsewhere, f"rm -r {quote(cache.path)}"),
        )
    if cache.unreadable and cache.exists and cache.writable:
        yield Finding(
            code="cache-unreadable",
            severity=WARNING,
            what=f"{cache.unreadable} entries of inductor's cache folder {cache.path} are empty, cut off or not readable",
            do=(f"rm -r {quote(cache.path)}",),
        )
    if cache.stale:
        others = ", ".join(f"{number} by torch {version}" for version, number in cache.written_by.items())
        yield Finding(
            code="cache-stale",
            severity=NOTE,
            what=f"{cache.stale} graphs in inductor's cache folder were written by another torch and are never used again ({others})",
            do=(f"rm -r {quote(cache.path)}",),
        )
    if cache.temporary and cache.writable:
        yield Finding(
            code="cache-lost-at-reboot",
            severity=NOTE,
            what=f"inductor's cache folder {cache.path} is in a temporary folder: the first start after a restart compiles all again",
            do=(elsewhere,),
        )
