"""What is looked at before a Trainer begins: that something trains, that there are data, and that a checkpoint it goes on from is whole."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Sized
from pathlib import Path
from typing import Any

from torch import nn

from onegraph.adapters import Adapted, Adapters
from onegraph.errors import CheckpointError, ConfigurationError

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


def require_training(adapters: Adapters, model: nn.Module) -> None:
    """Something of the model changes when it is trained.

    Trainer ends as if it had trained where an adapter is merged or none is active: the Parameters are there, and without effect.

    Args:
        adapters: Those of the model.
        model: The model that Trainer has.

    Raises:
        ConfigurationError: ``trainer-nothing-trains``.
    """
    if any(parameter.requires_grad for module in model.modules() if not isinstance(module, Adapted) for parameter in _own(module)):
        return
    if adapters.merged:
        what, hint = f"{', '.join(map(repr, adapters.merged))} merged into the base", "unmerge before training"
    elif adapters.active is None:
        what, hint = "no adapter active", f"adapters.use(...) one of {', '.join(map(repr, adapters.names))}"
    elif not any(parameter.requires_grad for parameter in adapters.parameters().values()):
        what = f"no Parameter of adapter {adapters.active!r} that trains"
        hint = "requires_grad_(True) on adapters.parameters(), with onegraph.peft set_adapter(name) or is_trainable=True"
    else:
        return
    raise ConfigurationError(
        f"Trainer was to train a model with {what}.",
        why="All else is frozen: the run would end and nothing would have changed.",
        hint=hint,
        code="trainer-nothing-trains",
    )


def require_data(data: object) -> None:
    """There is something to train on: torch would say "num_samples should be a positive integer value, but got num_samples=0".

    Raises:
        ConfigurationError: ``trainer-no-data``.
    """
    if isinstance(data, Sized) and len(data) == 0:
        raise ConfigurationError(
            "Trainer was to train on a data set without a row.",
            why="Nothing was in it, or everything was filtered out.",
            hint="look at len(train_dataset), and at what filters it",
            code="trainer-no-data",
        )


def require_whole(folder: Path, process: int = 0, num_processes: int = 1) -> None:
    """A checkpoint of Trainer can be gone on from, looked at before anything is loaded.

    A checkpoint without optimizer and schedule, as ``save_only_model`` writes them, is whole; going on from it is told in the log.

    Args:
        folder: checkpoint-N.
        process: Which of the processes this one is.
        num_processes: How many go on together; each has random numbers of its own.

    Raises:
        CheckpointError: ``trainer-checkpoint``.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return  # no adapters: that is said where they are read
    problem = _problem(folder)
    if problem is not None:
        others = [path for path in sorted(folder.parent.glob("checkpoint-*"), key=_step) if path != folder and _problem(path) is None]
        raise CheckpointError(
            f"{folder} can't be gone on from: {problem}.",
            why="The run that wrote it was probably stopped while it did.",
            hint=f"the newest whole one beside it is {others[-1]}"
            if others
            else "begin anew, or load the adapters alone: onegraph.load(model, folder)",
            code="trainer-checkpoint",
        )
    missing = [name for name in (_OPTIMIZER, _SCHEDULER) if not (folder / name).is_file()]
    if missing:
        logger.warning(
            "%s has no %s: the optimizer begins anew, and the run is another than the one that was stopped",
            folder,
            " and no ".join(missing),
        )
        return
    random = "rng_state.pth" if num_processes == 1 else f"rng_state_{process}.pth"
    if not (folder / random).is_file():
        logger.warning("%s has no %s: the order of the data and dropouts are others than those of the run that was stopped", folder, random)


def _problem(folder: Path) -> str | None:
    try:
        state: Any = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {_STATE}"
    except (OSError, ValueError) as error:
        return f"its {_STATE} can't be read ({error})"
    if not isinstance(state, dict):
        return f"its {_STATE} is no state of a Trainer"
    files = [folder / name for name in (_OPTIMIZER, _SCHEDULER)] + sorted(folder.glob("rng_state*.pth"))
    for file in files:
        if file.is_file() and not zipfile.is_zipfile(file):
            return f"its {file.name} is cut off or no file of torch"
    there = [file.is_file() for file in files[:2]]
    if any(there) and not all(there):
        return f"it has {files[there.index(True)].name} and no {files[there.index(False)].name}"
    return None


def _step(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]
