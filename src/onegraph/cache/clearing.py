"""Removes what is of no use from the folder, or all of it; never a file that isn't inductor's."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onegraph.cache.entries import STAGING, Entry, entries
from onegraph.doctor.cache_folder import location, written_by
from onegraph.machine.torch_version import torch_version

_DAY = 86400.0
# An unpacking that was killed leaves its folder; one that runs is not that old.
_UNPACKED_WITHIN = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """What was removed, or would be.

    Args:
        folder: The cache folder.
        files: Number of files.
        bytes: Their size.
        failed: Files that couldn't be removed.
        done: False when it was only counted.
    """

    folder: str
    files: int
    bytes: int
    failed: int
    done: bool


def clear(*, folder: str | os.PathLike[str] | None = None, dry_run: bool = False) -> Cleared:
    """Removes all entries. What isn't inductor's stays, whatever folder ``TORCHINDUCTOR_CACHE_DIR`` names."""
    return _remove(folder, lambda entry: True, dry_run)


def prune(*, older_than_days: float | None = None, folder: str | os.PathLike[str] | None = None, dry_run: bool = False) -> Cleared:
    """Removes graphs that another torch wrote and files cut off; with ``older_than_days`` also what was written before that.

    Args:
        older_than_days: Age in days; an entry that is used is not written again, so a folder in daily use may hold old ones.
        folder: The cache folder; the one inductor would use when None.
        dry_run: Only count.
    """
    installed = torch_version()
    before = time.time() - older_than_days * _DAY if older_than_days is not None else None

    def useless(entry: Entry) -> bool:
        if before is not None and entry.written < before:
            return True
        if (entry.is_graph or entry.is_library) and not entry.whole:
            return True
        return entry.is_graph and installed is not None and written_by(entry.path) not in ("", installed)

    return _remove(folder, useless, dry_run)


def _remove(folder: str | os.PathLike[str] | None, wanted: Callable[[Entry], bool], dry_run: bool) -> Cleared:
    cache = Path(folder) if folder is not None else location()[0]
    files = bytes_ = failed = 0
    for entry in [entry for entry in entries(cache, strict=True) if wanted(entry)]:
        try:
            if not dry_run:
                entry.path.unlink(missing_ok=True)
        except OSError:
            failed += 1
            continue
        files += 1
        bytes_ += entry.bytes
        if not dry_run:
            with contextlib.suppress(OSError):  # not empty
                for parent in entry.path.relative_to(cache).parents:
                    if parent != Path():
                        (cache / parent).rmdir()
    for left in _left_behind(cache):
        for path in left.rglob("*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                if path.is_file():
                    bytes_ += path.stat().st_size
                    files += 1
        if not dry_run:
            shutil.rmtree(left, ignore_errors=True)
    return Cleared(folder=str(cache), files=files, bytes=bytes_, failed=failed, done=not dry_run)


def _left_behind(cache: Path) -> list[Path]:
    """Folders of unpackings that were killed."""
    before = time.time() - _UNPACKED_WITHIN
    found = cache.glob(f"{STAGING}*") if cache.is_dir() else ()
    return [path for path in found if path.is_dir() and not path.is_symlink() and _written(path) < before]


def _written(path: Path) -> float:
    """When; an unpacking that has just ended has taken its folder away."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
