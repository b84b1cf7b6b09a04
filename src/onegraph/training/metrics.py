"""What people watch while a run trains: loss, rates, seconds a step without compile time, ETA, TensorBoard."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from torch.utils.tensorboard import SummaryWriter

from onegraph.errors import OutputError

WINDOW_STEPS = 50
FIRST_INTERVAL_SECONDS = 10.0


class MovingAverage:
    """The mean of the last ``window`` values."""

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=max(1, window))

    def add(self, value: float) -> float:
        """Takes one value; returns the mean with it."""
        self._values.append(value)
        return self.mean

    @property
    def mean(self) -> float:
        """The mean of the values in the window; 0 while there is none."""
        return sum(self._values) / len(self._values) if self._values else 0.0

    @property
    def values(self) -> list[float]:
        """The values in the window, oldest first."""
        return list(self._values)


class Timings:
    """Where the seconds of a run went: training steps, compiling, everything between the steps.

    The first step of a process, and each step during which something was compiled, count as training time less their compile seconds,
    but not for the seconds a step: they also pay for allocation and tracing.
    """

    def __init__(self) -> None:
        self.training_seconds = 0.0
        self.compile_seconds = 0.0
        self.num_steps = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._clean_seconds = 0.0
        self._clean_steps = 0

    def add_compile(self, seconds: float) -> None:
        """Counts compile seconds spent outside a training step, such as at the start check."""
        self.compile_seconds += seconds

    def add_step(self, seconds: float, compile_seconds: float = 0.0) -> None:
        """Counts one optimiser step of ``seconds``, of which ``compile_seconds`` went into compiling."""
        self.training_seconds += max(0.0, seconds - compile_seconds)
        self.compile_seconds += compile_seconds
        self.num_steps += 1
        if self.num_steps > 1 and compile_seconds == 0.0:
            self._recent.append(seconds)
            self._clean_seconds += seconds
            self._clean_steps += 1

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds an optimiser step over the last steps that compiled nothing; None before there is one."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def mean_seconds_per_step(self) -> float | None:
        """The same over the whole run."""
        return self._clean_seconds / self._clean_steps if self._clean_steps else None

    def remaining_seconds(self, num_steps: int) -> float | None:
        """What ``num_steps`` more steps will take; None before a step was timed."""
        rate = self.seconds_per_step
        return None if rate is None else rate * num_steps


def duration(seconds: float | None) -> str:
    """``1:02:03``, or ``-:--:--`` for None."""
    if seconds is None:
        return "-:--:--"
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def size(num_bytes: int) -> str:
    """``12.3 MB`` (1 MB = 10^6 bytes)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on the GPU, or resident in this process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class ProgressDisplay:
    """A progress bar on a terminal; elsewhere a line now and then, so that a log file stays readable.

    Args:
        total: Optimiser steps of the whole run.
        done: Steps that a resumed run has behind it.
        num_epochs: Shown beside the epoch.
        quiet: No bar and no lines of progress; ``say`` still prints.
        stream: Where to write; standard error when omitted.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        num_epochs: int = 1,
        quiet: bool = False,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.num_epochs = num_epochs
        self.quiet = quiet
        self._clock = clock
        self._started = clock()
        self._last_line: float | None = None
        self._console = Console(file=stream if stream is not None else sys.stderr, highlight=False, markup=False, emoji=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._bar = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._bar.add_task("steps", total=total, completed=done, text="")

    def start(self) -> None:
        """Shows the bar; what is printed before stands above it."""
        if self._bar is not None:
            self._bar.start()

    def update(self, step: int, epoch: int, loss: float, rates: Mapping[str, float], timings: Timings) -> None:
        """Shows the state after optimiser step ``step`` (counted from 1)."""
        if self.quiet:
            return
        rate = timings.seconds_per_step
        parts = [f"epoch {epoch}/{self.num_epochs}", f"loss {loss:.4g}", _rates_text(rates)]
        parts += [f"{rate:.3g} s/it" if rate is not None else "- s/it", f"ETA {duration(timings.remaining_seconds(self.total - step))}"]
        text = "  ".join(part for part in parts if part)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=text, refresh=True)
        elif self._line_is_due(step):
            self._print(f"step {step}/{self.total}  {text}")

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar where there is one."""
        self._print(text)

    def close(self) -> None:
        """Leaves the bar as it is and gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        # soft_wrap: a log line is one line, however wide the terminal is taken to be
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()

    def _line_is_due(self, step: int) -> bool:
        """The first step, the last, and in between an interval that grows with the length of the run."""
        now = self._clock()
        interval = max(FIRST_INTERVAL_SECONDS, (now - self._started) / WINDOW_STEPS)
        if self._last_line is None or step >= self.total or now - self._last_line >= interval:
            self._last_line = now
            return True
        return False


def _rates_text(rates: Mapping[str, float]) -> str:
    """``lr 1e-04``, with one value for each group where they differ."""
    values = list(rates.values())
    if not values:
        return ""
    if len(set(values)) == 1:
        return f"lr {values[0]:.2e}"
    return "lr " + ", ".join(f"{name} {value:.2e}" for name, value in rates.items())


class TensorBoard:
    """Scalars and the configuration of a run, as TensorBoard event files in ``folder``.

    Every method raises OutputError, ``log-not-written``, when the disk is full or gone.

    Args:
        folder: The run's own folder.
        configuration: Shown under HPARAMS; values that are not numbers, booleans or strings are written as text.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, object]) -> None:
        self.folder = folder
        values = {name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in configuration.items()}
        with self._explained():
            self._writer = SummaryWriter(log_dir=str(folder), flush_secs=10)
            self._writer.add_hparams(values, {}, run_name=".")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one point to each named curve."""
        with self._explained():
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        with self._explained():
            self._writer.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A disk that is full, as an error of ours; the writer's thread reports it at the next call."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"The curves in {self.folder} could not be written: {error.strerror or error}.",
                hint="free space there, another --logging_dir, or none",
                code="log-not-written",
            ) from error


def run_folder(logging_folder: Path, prefix: str, started_at: float, name: str = "network_train") -> Path:
    """``LOGS/{prefix}{YYYYmmddHHMMSS}/{name}``, the place where the field's tools look for a run."""
    return logging_folder / (prefix + time.strftime("%Y%m%d%H%M%S", time.localtime(started_at))) / name
