"""Temporary files: what they are called, and which of them a save that was killed has left behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_NAME = re.compile(r"\..+\.(?P<process>\d+)-(?P<place>[0-9a-f]{8})?[0-9a-f]{8}\.tmp")
_OTHERS_SECONDS = 24 * 3600.0
"""Whether a process runs can't be asked of another machine: what it hasn't written to for so long is taken for left behind."""
_PAUSE_SECONDS = 60.0
"""A folder is looked through at most so often: thousands of files may be written into one."""

_running: set[Path] = set()
_looked: dict[Path, float] = {}


def temporary_name(path: Path) -> Path:
    """A new name beside ``path``, which says who writes there: the process, and where its number means something."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_place()}{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def being_written(temporaries: list[Path]) -> Iterator[None]:
    """Inside, these are not left behind; afterwards they are gone."""
    _running.update(temporaries)
    try:
        yield
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink()
        _running.difference_update(temporaries)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of saves that were killed, of nothing else; what can't be read or removed stays."""
    now = time.monotonic()
    if now - _looked.get(folder, -_PAUSE_SECONDS) < _PAUSE_SECONDS:
        return
    _looked[folder] = now
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None:
                continue
            with contextlib.suppress(OSError):
                path = Path(entry.path)
                if entry.is_file(follow_symlinks=False) and _is_left_behind(path, named):
                    path.unlink()


def _is_left_behind(path: Path, named: re.Match[str]) -> bool:
    if named["place"] != _place():
        return time.time() - path.stat().st_mtime > _OTHERS_SECONDS
    process = int(named["process"])
    return path not in _running if process == os.getpid() else not _runs(process)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@cache
def _place() -> str:
    """Where the number of a process means something: this machine since it was started, and in a container that one."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
