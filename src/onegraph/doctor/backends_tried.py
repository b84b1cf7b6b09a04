"""Every backend name, tried: two lines compiled in a process of its own with a time limit, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from onegraph.doctor.child import child_environment
from onegraph.doctor.finding import BREAKS, WARNING, Finding

WORKS = "works"
RENAMED = "renamed"
GONE = "gone"
NEEDS = "needs"
FAILED = "failed"
NOT_TRIED = "not tried"

_AT_ONCE = 2
STARTING_SECONDS = 120.0  # importing torch on a busy machine
SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """One backend name.

    Args:
        name: As a configuration may have it, in small letters.
        standing: "works", "renamed", "gone", "needs", "failed", "not tried".
        runs_as: The name that torch has for it today; "" when it has none.
        needs: What it needs and isn't here: a package, a CUDA device.
        said: What torch, the backend or onegraph's own table says.
        seconds: How long the trial took; None without one.
    """

    name: str
    standing: str
    runs_as: str = ""
    needs: str = ""
    said: str = ""
    seconds: float | None = None


def tried(
    table: Mapping[str, Mapping[str, Any]],
    *,
    device: str = "cpu",
    seconds: float = SECONDS,
    starting_seconds: float = STARTING_SECONDS,
    folder: Path | None = None,
    module: str = "onegraph.compiling.attempt",
    say: Callable[[str], None] = lambda _: None,
) -> list[BackendReport]:
    """Tries every name of the table, two at a time.

    Args:
        table: onegraph's own table: what it says is told beside what was found.
        device: "cpu" or "cuda".
        seconds: The longest that one name may take.
        starting_seconds: How much longer the first may take.
        folder: Where the code is built and loaded, and removed; the temporary folder when None.
        module: What is run with the device and the names, and prints one JSON object a name.
        say: Gets each name when it is known.
    """
    # inductor takes as long as the rest together
    slow = [name for name in ("inductor",) if name in table]
    lots = [slow, [name for name in table if name not in slow]]
    answers: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="onegraph-doctor-", dir=folder, ignore_cleanup_errors=True) as cache,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        # a folder of its own: nothing is found in it, so the compiler is really used
        environment = child_environment(TORCHINDUCTOR_CACHE_DIR=cache)

        trials = _Trials()

        def work(names: list[str]) -> None:
            for answer in _answers([sys.executable, "-m", module, device], names, environment, seconds, starting_seconds, trials):
                answers[str(answer["name"])] = answer
                say(str(answer["name"]))

        try:
            list(pool.map(work, filter(None, lots)))
        except BaseException:  # Ctrl-C reaches this process alone: the pool would wait for the others
            trials.end()
            raise
    return [_judged(name, table[name], answers[name]) for name in table]


def not_tried(table: Mapping[str, Mapping[str, Any]], why: str) -> list[BackendReport]:
    """The table's names without a trial."""
    return [BackendReport(name=name, standing=NOT_TRIED, said=why) for name in table]


class _Trials:
    """The processes that are running, so that another thread can end them all."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()
        self.over = False
        self._lock = threading.Lock()

    def start(self, command: list[str], environment: dict[str, str], errors: IO[str]) -> subprocess.Popen[str] | None:
        """A process of a session of its own; None when all is over."""
        with self._lock:
            if self.over:
                return None
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
            self.running.add(process)
            return process

    def end(self) -> None:
        """Ends them, and lets none start."""
        with self._lock:
            self.over = True
            for process in self.running:
                _end(process)


def _answers(
    command: list[str],
    names: Iterable[str],
    environment: dict[str, str],
    seconds: float,
    starting_seconds: float,
    trials: _Trials,
) -> Iterator[dict[str, Any]]:
    """One answer a name, as they come. A process that dies or hangs at a name is ended, and a new one goes on behind it."""
    left = list(names)
    while left:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = trials.start([*command, *left], environment, errors)
            if process is None:
                return
            lines: queue.Queue[str | None] = queue.Queue()
            reader = threading.Thread(target=_pump, args=(process, lines), daemon=True)
            reader.start()
            limit = seconds + starting_seconds
            try:
                while left:
                    try:
                        line = lines.get(timeout=limit)
                    except queue.Empty:
                        yield {"name": left.pop(0), "outcome": "timed out", "said": f"no answer within {limit:.0f} seconds"}
                        break
                    if line is None:
                        status = process.wait()
                        yield {"name": left.pop(0), "outcome": "crashed", "said": f"status {status}: {_last_line(errors)}"[:300]}
                        break
                    answer = _read(line)
                    if answer is not None and answer.get("name") == left[0]:
                        left.pop(0)
                        yield answer
                        limit = seconds
            finally:
                _end(process)
                trials.running.discard(process)
                reader.join(timeout=5)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and what it started: compilers, inductor's own workers."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")


def _read(line: str) -> dict[str, Any] | None:
    """An answer; None for what libraries print."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _judged(name: str, known: Mapping[str, Any], answer: Mapping[str, Any]) -> BackendReport:
    """What was found decides; the table only adds why, and what to install."""
    outcome, runs_as = answer["outcome"], str(answer.get("runs_as", name))
    renamed = runs_as != name
    needs = ""
    said = str(answer.get("said", ""))
    if outcome == "works":
        standing = RENAMED if renamed else WORKS
        said = str(known.get("says", ""))
    elif outcome == "skipped" and known.get("needs_cuda"):
        standing, needs, said = NEEDS, "a CUDA device", "on a CPU it runs and leaves the CUDA graphs out"
    elif outcome == "import" or (outcome == "unknown" and known.get("needs_module")):
        standing, needs = NEEDS, str(known.get("needs_module") or "a package")
        said = "torch doesn't know the name" if outcome == "unknown" else said
    elif outcome == "unknown":
        standing, runs_as = GONE, ""
        said = str(known.get("gone") or said)
    else:
        standing = FAILED
        said = f"{outcome}: {said}" if outcome != "failed" else said
    return BackendReport(
        name=name,
        standing=standing,
        runs_as=runs_as if standing != GONE else "",
        needs=needs,
        said=said,
        seconds=answer.get("seconds"),
    )


def backend_findings(backends: Iterable[BackendReport], effective: Iterable[str], *, explained: bool) -> Iterator[Finding]:
    """A backend that torch itself brings and that doesn't work here.

    Args:
        backends: What was tried.
        effective: Names that a run here would use: their failure is the worst.
        explained: True when the compiler is known to be broken: then inductor's failure is no news.
    """
    used = set(effective)
    for backend in backends:
        if backend.standing == FAILED and not (explained and backend.runs_as in {"inductor", "cudagraphs"}):
            yield Finding(
                code="backend-failed",
                severity=BREAKS if backend.name in {*used, "inductor"} else WARNING,
                what=f"the backend {backend.name} can't compile two lines here: {backend.said}",
                do=(f"{sys.executable} -m onegraph.compiling.attempt cpu {backend.name}",),
            )
