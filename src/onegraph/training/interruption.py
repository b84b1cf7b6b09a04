"""Ctrl-C, SIGTERM and a closed terminal: finish the step, save, exit; a second signal exits at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

# A closed terminal sends SIGHUP, which Windows doesn't have.
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Interruption:
    """Inside the ``with`` block the first signal only sets ``signal_number``; the second one ends the process at once.

    Outside the main thread Python can't set handlers: there nothing is caught and ``signal_number`` stays None.

    Args:
        announce: Called with the text for the user when the first signal arrives.

    Example:
        >>> with Interruption() as interruption:
        ...     bool(interruption)
        False
    """

    def __init__(self, announce: Callable[[str], None] | None = None) -> None:
        self.signal_number: int | None = None
        self._announce = announce if announce is not None else _write_to_standard_error
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_status(self) -> int:
        """128 + the signal's number (130 for Ctrl-C, 143 for SIGTERM); 0 when nothing arrived."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    @property
    def name(self) -> str:
        """``SIGINT``, ``SIGTERM``, ``SIGHUP``, or an empty text."""
        return "" if self.signal_number is None else signal.Signals(self.signal_number).name

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays ignored: nohup does that for SIGHUP.
            caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in caught}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            # not sys.exit: that would unwind through whatever is being computed or written
            os._exit(128 + number)
        self.signal_number = number
        self._announce(f"{signal.Signals(number).name}: finishing the current step, then saving. Once more to exit at once.")


def _write_to_standard_error(text: str) -> None:
    """Past Python's buffers: a handler may run while one of them is being written."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
