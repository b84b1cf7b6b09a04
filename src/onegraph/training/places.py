"""Where a run writes: alone under its name, with the weights to keep, and what goes when it is old."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from onegraph.errors import OutputError
from onegraph.training.optimizers import before_saving, before_training


def remove(paths: Iterable[Path]) -> None:
    """Removes files and state folders; one that is gone already is fine."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def sole_writer(folder: Path, name: str, *, ending: str = "") -> Iterator[None]:
    """Inside it no other process can train under the same name in the same folder; the lock goes with the process, however it ends.

    Args:
        folder: Where the run writes.
        name: What it writes there is called.
        ending: What the message adds to the name.

    Raises:
        OutputError: ``in-use``: another process does; ``not-writable``, ``disk-full``: the folder.
    """
    path = folder / f".{name}.lock"
    descriptor = _locked(path, f"{name}{ending}")
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _locked(path: Path, name: str) -> int | None:
    """The open file behind a lock; None where the disk knows no locks."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            raise OutputError(
                f"Can't write into the folder {path.parent}: {error.strerror or error}.",
                why="A run marks there that it writes under its name, before anything else.",
                hint="free some space, or choose another folder" if full else "choose another folder, or change its permissions",
                code="disk-full" if full else "not-writable",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            process = os.read(descriptor, 20).decode() or "unknown"
            os.close(descriptor)
            raise OutputError(
                f"Another run writes {name} into {path.parent}: process {process}.",
                why="The two would replace each other's files and states.",
                hint=f"another output name or folder, or end that run first: kill {process}",
                code="in-use",
            ) from error
        except OSError:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink:
            with contextlib.suppress(OSError):  # a full disk keeps the lock all the same
                os.truncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)  # its owner removed it between the two calls


@contextlib.contextmanager
def evaluation_weights(optimizer: object, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside it the parameters are those to save and to sample with; afterwards they are bit for bit what they were.

    Only schedule-free optimizers, which have ``eval()`` and ``train()``, train at other points than they recommend to use.
    """
    before = {name: value.detach().clone() for name, value in parameters.items()} if hasattr(optimizer, "eval") else {}
    before_saving(optimizer)
    try:
        yield
    finally:
        before_training(optimizer)
        # going there and back again rounds: put the exact values back
        with torch.no_grad():
            for name, value in before.items():
                parameters[name].copy_(value)
