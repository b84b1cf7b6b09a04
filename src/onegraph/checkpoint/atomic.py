"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from onegraph.checkpoint.leftovers import being_written, remove_leftovers, temporary_name
from onegraph.errors import OutputError

Write = Callable[[Path], object]

# How torch.save reports that it couldn't write: by RuntimeErrors without a number.
_TORCH_WRITER_MARKS = ("PytorchStreamWriter failed", "inline_container", "iostream error")


def atomic_write(path: str | os.PathLike[str], write: Write, *, num_bytes: int | None = None) -> None:
    """Write ``path`` through a temporary file in the same folder: readers see the old file or the new one, never half of one.

    Args:
        path: The file to write. Its folder must exist.
        write: Called once with the temporary path; writes the whole file there.
        num_bytes: Size of the new file in bytes where it is known; too little free space is then found before writing.

    Raises:
        OutputError: ``disk-full``, ``not-writable``, ``folder-missing``, ``is-a-folder``, ``name-too-long`` or ``output``. The old file
            is still there.
    """
    atomic_write_all({Path(path): write}, num_bytes=num_bytes)


def atomic_write_all(files: Mapping[Path, Write], *, num_bytes: int | None = None) -> None:
    """Write several files: all temporary files first, then all of them take their places, so a failure leaves every old file.

    Temporary files that a killed process has left in the folders are removed first.

    Args:
        files: Path -> the function that writes it, as in :func:`atomic_write`.
        num_bytes: Size of all new files together, in bytes.

    Raises:
        OutputError: As :func:`atomic_write`.
    """
    # A link keeps pointing where it points: the file behind it is replaced.
    targets = {Path(os.path.realpath(path)): write for path, write in files.items()}
    for path in targets:
        check_writable(path)
    for folder in {path.parent for path in targets}:
        remove_leftovers(folder)
    _check_free_space(targets, num_bytes)
    for path in targets:
        check_name(path)
    temporaries = {path: temporary_name(path) for path in targets}
    with being_written(list(temporaries.values())):
        for path, write in targets.items():
            with _explained(path, temporaries[path], num_bytes):
                write(temporaries[path])
                _flush_to_disk(temporaries[path])
        for path, temporary in temporaries.items():
            with _explained(path, temporary, num_bytes):
                temporary.replace(path)
    for folder in {path.parent for path in targets}:
        _flush_folder(folder)


def check_name(path: Path) -> None:
    """Raise OutputError now where the name is too long for its disk, the ending of the temporary file counted."""
    try:
        longest = os.pathconf(path.parent, "PC_NAME_MAX")
    except (OSError, ValueError, AttributeError):
        return
    num_bytes = len(os.fsencode(temporary_name(path).name))
    if num_bytes > longest:
        raise OutputError(
            f"The name {path.name} is too long: a file there may have {longest} bytes, and while it is written it has {num_bytes}.",
            hint=f"a name that is shorter by {num_bytes - longest} letters or more",
            code="name-too-long",
        )


def check_writable(path: Path) -> None:
    """Raise OutputError now where writing ``path`` is bound to fail: a missing or read-only folder, or a folder in its place."""
    try:
        taken = path.is_dir()
    except OSError as error:  # a folder above it can't be looked into
        raise _not_writable(path) from error
    if taken:
        raise OutputError(
            f"{path} is a folder, a file was to be written there.",
            hint=f"Name a file inside it, for example {path / 'adapter.safetensors'}.",
            code="is-a-folder",
        )
    folder = path.parent
    if not folder.exists():
        raise OutputError(
            f"Can't write {path}: the folder {folder} does not exist.",
            hint=f"Create it first: mkdir -p {folder}",
            code="folder-missing",
        )
    if not folder.is_dir():
        raise OutputError(
            f"Can't write {path}: {folder} is a file, not a folder.",
            hint="Choose a path inside a folder.",
            code="folder-missing",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(path)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and what lies above it.

    Raises:
        OutputError: ``is-a-file`` or ``not-writable``.
    """
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise OutputError(
                    f"Can't write into the folder {folder}: {place} is a file.",
                    hint="Choose another folder, or move that file away.",
                    code="is-a-file",
                )
            break
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _output_error(folder, error, None, None) from error


@contextlib.contextmanager
def _explained(path: Path, temporary: Path, num_bytes: int | None) -> Iterator[None]:
    """Turn failures of the disk into OutputError, whichever library reports them."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise _output_error(path, error, temporary, num_bytes) from error
    except Exception as error:
        # safetensors and torch.save report a full disk with exceptions of their own.
        if type(error).__name__ == "SafetensorError" and "os error" in str(error).lower():
            number = errno.ENOSPC if "os error 28" in str(error).lower() else errno.EIO
            raise _output_error(path, OSError(number, str(error)), temporary, num_bytes) from error
        if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _TORCH_WRITER_MARKS):
            raise _output_error(path, OSError(errno.ENOSPC, str(error)), temporary, num_bytes) from error
        raise


def _output_error(path: Path, error: OSError, temporary: Path | None, num_bytes: int | None) -> OutputError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _not_writable(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        written = temporary.stat().st_size if temporary is not None and temporary.exists() else 0
        return _disk_full(path, num_bytes, written)
    return OutputError(
        f"Can't write {path}: {error.strerror or error}.",
        why=_old_file(path),
        hint="Choose another place to write to.",
    )


def _check_free_space(targets: Mapping[Path, Write], num_bytes: int | None) -> None:
    if num_bytes is None:
        return
    path = next(iter(targets))
    if num_bytes > shutil.disk_usage(path.parent).free:
        raise _disk_full(path, num_bytes, 0)


def _disk_full(path: Path, num_bytes: int | None, written: int) -> OutputError:
    needed = f"{num_bytes:,} bytes" if num_bytes is not None else f"more than the {written:,} bytes that were written"
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "the free space there can't be read"
    return OutputError(
        f"The disk is full: can't write {path}.",
        why=f"The file needs {needed}; {free}. {_old_file(path)}",
        hint=f"Free some space under {path.parent}, or write to another disk.",
        code="disk-full",
    )


def _not_writable(path: Path) -> OutputError:
    return OutputError(
        f"Can't write {path}: permission denied.",
        why=f"The folder {path.parent} can't be written by this user, or its disk is read-only. {_old_file(path)}",
        hint="Choose another folder, or change its permissions.",
        code="not-writable",
    )


def _old_file(path: Path) -> str:
    try:
        there = path.is_file()
    except OSError:
        there = False
    return "The old file is still there, unchanged." if there else "There was no file of that name before, and none was left."


def _flush_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the new name last through a power cut; some file systems can't, and the file itself is whole either way."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
