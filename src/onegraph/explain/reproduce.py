"""Runs an entry's programs, each alone in a process of its own, and says what was seen."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path

from onegraph.explain.entry import Entry, Program
from onegraph.explain.match import Strength, candidates

_PROGRAM = "program.py"
_LIBRARIES = ("torch", "accelerate", "bitsandbytes", "diffusers", "peft", "torchao", "transformers")
# What a developer's shell may have set, and a program must not depend on.
_FOREIGN = re.compile(r"^(?:TORCH|TORCHDYNAMO|TORCHINDUCTOR|ACCELERATE|PYTORCH|DYNAMO|NCCL|CUDA)_")
_LONGEST = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of a program. ``status`` is None when the time limit ended it."""

    status: int | None
    output: str
    errors: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether a run showed what its entry says, the text that shows it, and what is wrong otherwise."""

    right: bool
    seen: str
    problem: str = ""


def run(program: Program, *, warm: bool = False) -> Ran:
    """Runs a program in a process and a folder of its own, without a network, and ends all that it started.

    Args:
        program: What to run.
        warm: Fork this process, which has imported the libraries, instead of starting a new one: seconds instead of half a minute.
            This process must not have compiled or computed anything yet.
    """
    environment = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    with tempfile.TemporaryDirectory(prefix="onegraph-explain-") as folder:
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
            "PYTHONWARNINGS": "default",
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        }
        Path(folder, _PROGRAM).write_text(program.code, encoding="utf-8")
        begun = time.monotonic()
        if warm:
            return _forked(program, folder, environment, begun)
        process = subprocess.Popen(
            [sys.executable, _PROGRAM],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=program.timeout_seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            status = None
        except BaseException:  # Ctrl-C doesn't reach a session of its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return Ran(status=status, output=_portable(output, folder), errors=_portable(errors, folder), seconds=time.monotonic() - begun)


def _forked(program: Program, folder: str, environment: dict[str, str], begun: float) -> Ran:
    """The program in a fork of this process."""
    output, errors = Path(folder, "output"), Path(folder, "errors")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            for number, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            os.environ.clear()
            os.environ.update(environment)
            status = _executed(program)
        finally:
            os._exit(status)
    deadline = begun + program.timeout_seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended == (0, 0):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Ran(
        status=None if ended == (0, 0) else os.waitstatus_to_exitcode(ended[1]),
        output=_portable(output.read_text(encoding="utf-8", errors="replace"), folder) if output.exists() else "",
        errors=_portable(errors.read_text(encoding="utf-8", errors="replace"), folder) if errors.exists() else "",
        seconds=time.monotonic() - begun,
    )


def _executed(program: Program) -> int:
    """Runs the program as the main module of this process; returns what its exit status would be."""
    warnings.simplefilter("default")
    main = types.ModuleType("__main__")
    main.__file__ = _PROGRAM
    sys.modules["__main__"], sys.argv = main, [_PROGRAM]
    status = 0
    try:
        exec(compile(program.code, _PROGRAM, "exec"), main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this function
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def judge(entry: Entry, program: Program, ran: Ran, entries: dict[str, Entry]) -> Judgement:
    """Whether a run showed what the entry says of it.

    Args:
        entry: Whose program it is.
        program: Its reproduction or its fix.
        ran: What happened.
        entries: The catalogue: an error that a reproduction raises must be matched with its own entry before all others.
    """
    if ran.status is None:
        return Judgement(right=False, seen="", problem=f"it ran into its limit of {program.timeout_seconds} s")
    if program.outcome != "raises":
        seen = _last(ran.output)
        if ran.status:
            return Judgement(right=False, seen=seen, problem=f"it ended with status {ran.status}:\n{_last(ran.errors)}")
        return Judgement(right=True, seen=seen)
    seen = essential(ran.errors, entry.modules)
    if not ran.status:
        return Judgement(right=False, seen=seen, problem="it raised nothing")
    least = Strength.LIKELY if entry.common_words else Strength.MATCH
    for text in (ran.errors, seen):
        found = candidates(text, entries.values())
        if not found or found[0].entry.id != entry.id or found[0].strength < least:
            names = ", ".join(f"{item.entry.id} ({item.strength.name.lower()})" for item in found) or "nothing"
            return Judgement(right=False, seen=seen, problem=f"what it raised is matched with {names}:\n{_last(ran.errors)}")
    return Judgement(right=True, seen=seen)


def versions(entry: Entry) -> tuple[str, ...]:
    """The installed versions of torch and of the libraries that the entry's programs import."""
    imported = {"torch"}
    for program in (entry.reproduction, entry.fix):
        for node in ast.walk(ast.parse(program.code if program else "")):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    return tuple(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in _LIBRARIES if name in imported)


def essential(errors: str, modules: tuple[str, ...] = ()) -> str:
    """The last traceback without source lines: its outer and inner frames, those in ``modules``, and the message."""
    start = errors.rfind("Traceback (most recent call last):")
    lines = errors[start:].splitlines() if start >= 0 else errors.splitlines()
    # the message begins at the first line that isn't indented; it may list frames of its own
    after = next((number for number, line in enumerate(lines) if number and line[:1].strip()), len(lines)) if start >= 0 else 0
    frames = [number for number, line in enumerate(lines[:after]) if line.startswith("  File ")]
    keep = {*frames[:2], *frames[-4:], *(number for number in frames if any(module in lines[number] for module in modules))}
    told: list[str] = []
    for place, number in enumerate(frames):
        if number in keep:
            told.append(lines[number])
        elif frames[place - 1] in keep:
            told.append("  ...")
    message = "\n".join(lines[after:]).strip()
    message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
    return "\n".join([*(["Traceback (most recent call last):"] if frames else []), *told, message])


def _portable(text: str, folder: str) -> str:
    """Without what differs between two machines or two runs: folders, addresses."""
    text = text.replace(f"{os.path.realpath(folder)}/", "").replace(f"{folder}/", "")
    text = re.sub(r"[^\s\"']*/site-packages/", "", text)
    text = re.sub(r"[^\s\"']*/src/onegraph/", "onegraph/", text)
    text = re.sub(r"[^\s\"']*/lib/python3\.\d+/", "python3/", text)
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", text)


def _last(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"... {text[-_LONGEST:]}"
