"""Standard output that a long run outlives: a closed pipe or terminal ends the messages, not the training."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, cast


class LastingStream:
    """A text stream; once it can't be written any more, what comes goes nowhere.

    Args:
        stream: What is written to; everything but writing is its own.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or does nothing when nobody can read it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Hands on what was written."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """Points the file descriptor at nothing, so that Python's own flush at the end finds a place too."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside it standard output and error outlive their readers, and print names in any script, escaped where they can't show it."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(Any, LastingStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
