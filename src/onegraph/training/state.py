"""Save everything a run is made of, and go on from it as if it had never stopped.

A state is a folder: ``state.json`` (position, settings, fingerprints), ``adapters.safetensors`` (full precision), ``optimizer.pt``
(optimizer, schedule, gradient scaler) and ``random.pt`` (every random generator). It is written under another name and renamed when whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onegraph.errors import CheckpointError, ConfigurationError, OutputError
from onegraph.training.randomness import random_states, restore_random_states
from onegraph.training.schedules import SCHEDULES, ScheduleSettings
from onegraph.training.settings import branches, read_settings

FORMAT_VERSION = 1
RECORD = "state.json"


class Begun(Protocol):
    """The part of a configuration that says where a run begins."""

    @property
    def seed(self) -> int | None:
        """As given."""

    @property
    def resume(self) -> str | None:
        """The state folder to go on from."""


class Resumable(Protocol):
    """A configuration whose run can be resumed: a tree of dataclasses with these two branches."""

    @property
    def schedule(self) -> ScheduleSettings:
        """How the learning rate moves."""

    @property
    def run(self) -> Begun:
        """How long, and from which seed."""


C = TypeVar("C", bound=Resumable)


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """Which settings may differ between a state and the run that goes on from it.

    Args:
        branches: Branches that change no weight (compiling: only their rounding).
        settings: Settings that say where things are and how they are read; fingerprints say whether they are still the same.
        length: Settings of the run's length; free with a schedule that doesn't depend on it.
        start_over: What to do instead, for a hint.
    """

    branches: frozenset[str]
    settings: frozenset[str]
    length: frozenset[str]
    start_over: str = "start a new run"


class Stateful(Protocol):
    """What a state keeps beside the adapters: optimizer, schedule, gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Takes what ``state_dict`` gave."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands, between two optimiser steps.

    Args:
        step: Optimiser steps done.
        epoch: Epoch of the next batch, from 0.
        batch: The next batch in that epoch, from 0.
        micro_step: Batches done in all.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    micro_step: int = 0


@dataclass(frozen=True, kw_only=True)
class SavedState(Generic[C]):
    """What ``state.json`` holds, read and checked."""

    folder: Path
    position: Position
    configuration: C
    seed: int
    fingerprints: Mapping[str, str]
    losses: Sequence[float]
    notes: Mapping[str, Any] = field(default_factory=dict)


def save_state(
    folder: Path,
    *,
    position: Position,
    configuration: Resumable,
    seed: int,
    fingerprints: Mapping[str, str],
    parameters: Mapping[str, Tensor],
    training: Mapping[str, Stateful],
    losses: Sequence[float] = (),
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a state; a process killed on the way leaves an older state of that name whole.

    Args:
        folder: Its final place.
        fingerprints: What is (name) -> which one (digest): base model, data set. Compared on resume.
        parameters: Adapter parameters by name, saved in their own precision.
        training: Optimizer, schedule and scaler by name.
        losses: The recent losses, so that the shown average goes on.
        notes: What else the loop goes on from; plain JSON.

    Raises:
        OutputError: ``state-not-written``; nothing is left under the final name but what was there before.
    """
    record = {
        "format": FORMAT_VERSION,
        "position": dataclasses.asdict(position),
        "configuration": dataclasses.asdict(configuration),  # type: ignore[call-overload]
        "seed": seed,
        "fingerprints": dict(fingerprints),
        "parameters": list(parameters),
        "losses": list(losses),
        "notes": dict(notes or {}),
        "torch": torch.__version__,
    }

    def write(place: Path) -> None:
        save_file({name: value.detach().cpu().contiguous() for name, value in parameters.items()}, place / "adapters.safetensors")
        torch.save({name: part.state_dict() for name, part in training.items()}, place / "optimizer.pt")
        torch.save(random_states(), place / "random.pt")
        (place / "state.json").write_text(json.dumps(record, indent=2), encoding="utf-8")

    return write_folder(folder, write)


def read_state(folder: Path, kind: type[C]) -> SavedState[C]:
    """Reads ``state.json`` of a state folder; the tensors are read by ``restore``.

    Args:
        folder: What ``save_state`` wrote.
        kind: The dataclass of its configuration.

    Raises:
        CheckpointError: ``state-not-found``, ``state-incomplete``, ``state-format``.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no state folder {folder}.", hint=_states_beside(folder), code="state-not-found")
    missing = [name for name in ("state.json", "adapters.safetensors", "optimizer.pt", "random.pt") if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is not a whole state: {', '.join(missing)} missing.",
            why="States of other programs can't be resumed here: they hold optimizers and positions in another form.",
            hint=_states_beside(folder),
            code="state-incomplete",
        )
    try:
        record = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if record["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format {record['format']}; this version reads format {FORMAT_VERSION}.",
                hint="resume with the version that wrote it",
                code="state-format",
            )
        return SavedState(
            folder=folder,
            position=Position(**{name: _count(value) for name, value in record["position"].items()}),
            configuration=read_settings(kind, record["configuration"]),
            seed=int(record["seed"]),
            fingerprints=dict(record["fingerprints"]),
            losses=[float(loss) for loss in record["losses"]],
            notes=dict(record.get("notes", {})),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'state.json'} can't be read: {error!r}.", hint=_states_beside(folder), code="state-format"
        ) from error


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no position")
    return value


def check_resumable(saved: SavedState[C], configuration: C, freedom: Freedom) -> list[str]:
    """Compares the settings of a state with today's; returns one line for each harmless difference.

    The run's length may change only with a constant schedule: any other one has its shape from the length.

    Raises:
        ConfigurationError: ``resume-differs``, with every setting that would make the rest of the run another run.
    """
    harmless: list[str] = []
    fatal: list[str] = []
    schedule_has_length = _depends_on_length(configuration.schedule)
    before = dict(branches(saved.configuration))
    for path, new in branches(configuration):
        old = before[path]
        if old == new or path in freedom.settings:
            continue
        line = f"{path}: {old!r} in the state, {new!r} now"
        if path in freedom.length and schedule_has_length:
            fatal.append(f"{line} (the {configuration.schedule.name} schedule depends on the length of the run)")
        elif path in freedom.length or path.partition(".")[0] in freedom.branches:
            harmless.append(line)
        else:
            fatal.append(line)
    if configuration.run.seed is not None and configuration.run.seed != saved.seed:
        fatal.append(f"run.seed: {saved.seed} in the state, {configuration.run.seed} now")
    if fatal:
        raise ConfigurationError(
            f"{saved.folder} belongs to a run with other settings:\n  " + "\n  ".join(fatal),
            why="A resumed run must end exactly as the run would have ended that was never stopped.",
            hint=f"give the settings of the state, or {freedom.start_over}",
            code="resume-differs",
        )
    return harmless


def _depends_on_length(settings: ScheduleSettings) -> bool:
    """Whether the schedule of a longer run has another shape: when it is told the length, or has shares of it."""
    entry = None if settings.type else SCHEDULES.get(settings.name)
    return entry is None or entry.total or 0 < settings.warmup < 1 or 0 < settings.decay < 1


def check_fingerprints(saved: SavedState[C], fingerprints: Mapping[str, str], freedom: Freedom) -> None:
    """Raises ConfigurationError (``resume-differs``) when the base model or the data set is another one than the state's."""
    changed = [name for name, value in fingerprints.items() if saved.fingerprints.get(name) != value]
    if changed:
        raise ConfigurationError(
            f"{saved.folder} belongs to a run with another {' and another '.join(changed)}.",
            why="A resumed run must end exactly as the run would have ended that was never stopped.",
            hint=f"put back what was changed, or {freedom.start_over}",
            code="resume-differs",
        )


def restore(saved: SavedState[C], *, parameters: Mapping[str, Tensor], training: Mapping[str, Stateful]) -> None:
    """Puts the adapters, optimizer, schedule, scaler and random generators back, in place.

    Raises:
        CheckpointError: ``state-differs``: other adapters, shapes or parts than the run's; ``state-incomplete``: a file that can't be read.
    """
    try:
        tensors = load_file(saved.folder / "adapters.safetensors")
        states = torch.load(saved.folder / "optimizer.pt", map_location="cpu", weights_only=True)
        generators = torch.load(saved.folder / "random.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"The state {saved.folder} can't be read: {error}", hint=_states_beside(saved.folder), code="state-incomplete"
        ) from error
    wrong = sorted(set(tensors) ^ set(parameters))
    wrong += [name for name in sorted(set(tensors) & set(parameters)) if tensors[name].shape != parameters[name].shape]
    wrong += sorted(set(states) ^ set(training))
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"The state {saved.folder} does not fit this run: {', '.join(wrong[:5])}{more}.",
            why="They are in one of the two only, or have other shapes.",
            hint="give the settings of the adapters of the run that wrote it",
            code="state-differs",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    try:
        for name, part in training.items():
            part.load_state_dict(states[name])
        restore_random_states(generators)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The state {saved.folder} does not fit this run: {error!r}.",
            why="Its optimizer, its schedule or its random generators hold something else than those of this run.",
            hint=_states_beside(saved.folder),
            code="state-differs",
        ) from error


def write_folder(folder: Path, write: Callable[[Path], None], *, what: str = "state", code: str = "state-not-written") -> Path:
    """Lets ``write`` fill a temporary folder beside ``folder``, then renames it into place.

    Raises:
        OutputError: With ``code``, for a full disk or a folder that can't be written.
    """
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        write(partial)
        for file in partial.iterdir():
            _flush_to_disk(file)
        _flush_to_disk(partial)
        if folder.exists():
            # two renames: a kill between them leaves the older state whole, under the name with .old
            old = folder.with_name(f".{folder.name}.old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old, ignore_errors=True)  # the new one is in place: what can't be removed is no failure
        else:
            partial.rename(folder)
        _flush_to_disk(folder.parent)
    except BaseException as error:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or _is_full_disk(error):
            raise OutputError(
                f"The {what} {folder} could not be written: {error}",
                why=f"Nothing was left half-written; if there was an older {what} of that name, it is still there.",
                hint="free space or choose another output folder",
                code=code,
            ) from error
        raise
    return folder


def _is_full_disk(error: BaseException) -> bool:
    """PyTorch and safetensors report a failed write as an error of their own, not as an OSError."""
    message = str(error)
    return not isinstance(error, (KeyboardInterrupt, SystemExit)) and any(
        sign in message
        for sign in ("No space left", "unexpected pos", "PytorchStreamWriter failed", "iostream error", "file write failed", "os error")
    )


def _remove_leftovers(folder: Path) -> None:
    """What killed processes left of this state: halves, and an older one that a newer has replaced."""
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _states_beside(folder: Path) -> str:
    """The state folders that are there instead, for a hint."""
    parent = folder.parent if folder.parent.is_dir() else None
    found = sorted(path for path in parent.glob("*-state") if (path / "state.json").is_file()) if parent is not None else []
    found += [path for path in ([folder.with_name(f".{folder.name}.old")]) if (path / "state.json").is_file()]
    if found:
        return "states there: " + ", ".join(str(path) for path in found[:5])
    return "states are folders whose names end in -state; a run writes them with save_state"
