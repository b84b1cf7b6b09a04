"""Names -> learning-rate schedules, through transformers, diffusers and torch. Importing this file imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from onegraph.errors import ConfigurationError, OnegraphError, nearest
from onegraph.training.optimizers import OptimizerSettings, check_argument_names, find_optimizer, load_class
from onegraph.training.settings import parse_arguments, setting

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Label = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How the learning rate moves. All counts are optimizer steps."""

    name: str = setting("constant", "schedule, such as constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial")
    type: str | None = setting(None, "dotted path to a torch LRScheduler class; wins over name")
    arguments: tuple[str, ...] = setting((), "name=value, each value a Python literal, for the schedule")
    warmup: float = setting(0, "warm-up: optimizer steps, or a share of the run when below 1", low=0)
    decay: float = setting(0, "decay: optimizer steps, or a share of the run when below 1", low=0)
    num_cycles: int = setting(1, "cycles of cosine_with_restarts", low=1)
    power: float = setting(1.0, "power of polynomial", above=0.0)
    timescale: int | None = setting(None, "timescale of inverse_sqrt in optimizer steps; the warm-up when absent", low=1)
    min_lr_ratio: float | None = setting(None, "lowest learning rate over the highest", low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """The function that makes a schedule, and which settings it takes.

    Args:
        path: Dotted path of the function or class.
        takes: Settings that act: warmup, decay, num_cycles, power, timescale, min_lr_ratio.
        needs: Settings that must be given.
        total: Whether it is told how many steps the run has.
        half_cycles: Whether the library counts a descent from top to bottom as half a cycle.
    """

    path: str
    takes: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    total: bool = False
    half_cycles: bool = False


def _entry(path: str, takes: str = "", needs: str = "", *, total: bool = True, half_cycles: bool = False) -> ScheduleEntry:
    """An entry from space-separated names."""
    return ScheduleEntry(path=path, takes=frozenset(takes.split()), needs=frozenset(needs.split()), total=total, half_cycles=half_cycles)


_HF = "transformers.optimization"
SCHEDULES: Mapping[str, ScheduleEntry] = {
    "constant": _entry(f"{_HF}.get_constant_schedule", total=False),
    "constant_with_warmup": _entry(f"{_HF}.get_constant_schedule_with_warmup", "warmup", total=False),
    "linear": _entry(f"{_HF}.get_linear_schedule_with_warmup", "warmup"),
    "cosine": _entry(f"{_HF}.get_cosine_schedule_with_warmup", "warmup"),
    "cosine_with_restarts": _entry(f"{_HF}.get_cosine_with_hard_restarts_schedule_with_warmup", "warmup num_cycles"),
    "polynomial": _entry(f"{_HF}.get_polynomial_decay_schedule_with_warmup", "warmup power"),
    "inverse_sqrt": _entry(f"{_HF}.get_inverse_sqrt_schedule", "warmup timescale", total=False),
    "cosine_with_min_lr": _entry(
        f"{_HF}.get_cosine_with_min_lr_schedule_with_warmup", "warmup num_cycles min_lr_ratio", "min_lr_ratio", half_cycles=True
    ),
    "cosine_warmup_with_min_lr": _entry(
        f"{_HF}.get_cosine_with_min_lr_schedule_with_warmup_lr_rate", "warmup num_cycles min_lr_ratio", "min_lr_ratio", half_cycles=True
    ),
    "warmup_stable_decay": _entry(f"{_HF}.get_wsd_schedule", "warmup decay num_cycles min_lr_ratio", "decay", half_cycles=True),
    "piecewise_constant": _entry("diffusers.optimization.get_piecewise_constant_schedule", total=False),
    "adafactor": _entry(f"{_HF}.get_adafactor_schedule", total=False),
}
_NEED_A_METRIC = ("reduce_lr_on_plateau", "greedy")
_DEFAULTS: Mapping[str, object] = {"warmup": 0, "decay": 0, "num_cycles": 1, "power": 1.0, "timescale": None, "min_lr_ratio": None}
_RESERVED = (
    "optimizer", "last_epoch", "num_warmup_steps", "num_training_steps", "num_stable_steps", "num_decay_steps", "num_cycles", "power",
    "timescale", "min_lr_rate", "min_lr_ratio", "initial_lr",
)  # fmt: skip


def schedule_problems(settings: ScheduleSettings, optimizer: OptimizerSettings, label: Label) -> Iterator[OnegraphError]:
    """All that is wrong with a schedule's settings and can be known before there is an optimizer.

    Args:
        settings: Name, counts and arguments.
        optimizer: Some optimizers allow only some schedules.
        label: How a setting is called in the messages: "schedule.name" -> "--lr_scheduler".
    """
    name_label = label("schedule.type") if settings.type else label("schedule.name")
    try:
        arguments = parse_arguments(settings.arguments, label("schedule.arguments"))
        entry = _find(settings, name_label)
        if arguments or settings.type:
            _check_arguments(settings, entry, arguments, name_label, label("schedule.arguments"))
    except OnegraphError as error:
        yield from error.problems if isinstance(error, ConfigurationError) and error.problems else (error,)
        return
    shown = settings.type or settings.name
    for name, default in _DEFAULTS.items():
        if getattr(settings, name) != default and name not in entry.takes:
            others = [known for known, other in SCHEDULES.items() if name in other.takes]
            if name == "warmup" and shown == "constant":
                others = ["constant_with_warmup"]
            yield ConfigurationError(
                f"{label('schedule.' + name)} is {getattr(settings, name):g}, with schedule {shown}",
                why="This schedule has no such part: the setting would do nothing.",
                hint=f"leave it out, or use {label('schedule.name')}={' or '.join(others)}",
                code="schedule-setting",
            )
    for name in entry.needs:
        if getattr(settings, name) == _DEFAULTS[name]:
            what = f"schedule {shown} needs {label('schedule.' + name)}"
            yield ConfigurationError(what, hint=f"add {label('schedule.' + name)}=0.1", code="schedule-setting")
    if settings.name == "piecewise_constant" and not settings.type and "step_rules" not in arguments:
        what = "schedule piecewise_constant needs step_rules"
        hint = f"add {label('schedule.arguments')} \"step_rules='1:100,0.1:200,0.01'\" (factor:up to step, ..., last factor)"
        yield ConfigurationError(what, hint=hint, code="schedule-setting")
    yield from _pairing_problems(settings, optimizer, shown, label)


def _find(settings: ScheduleSettings, label: str) -> ScheduleEntry:
    """The entry of a name or of a class."""
    if settings.type:
        path = settings.type if "." in settings.type else f"torch.optim.lr_scheduler.{settings.type}"
        return ScheduleEntry(path=path)
    if settings.name in SCHEDULES:
        return SCHEDULES[settings.name]
    if settings.name in _NEED_A_METRIC:
        what = f"{label} is {settings.name}, which is not supported"
        why = "It follows a validation metric, and this trainer has none."
        raise ConfigurationError(what, why=why, hint="use cosine or warmup_stable_decay", code="unsupported-schedule")
    near = nearest(settings.name, SCHEDULES)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SCHEDULES)}"
    raise ConfigurationError(f"{label} is {settings.name!r}, which is no schedule we know", hint=hint, code="unknown-schedule")


def _load(entry: ScheduleEntry, label: str) -> Callable[..., Any]:
    """The function or class at an entry's path."""
    module, _, name = entry.path.rpartition(".")
    if name.startswith("get_"):
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    return load_class(entry.path, label)


def _check_arguments(
    settings: ScheduleSettings, entry: ScheduleEntry, arguments: Mapping[str, object], name_label: str, label: str
) -> None:
    """Refuse arguments that the schedule doesn't take."""
    reserved = ("self", "optimizer", "last_epoch") if settings.type else _RESERVED
    check_argument_names(_load(entry, name_label), arguments, reserved, label)


def _pairing_problems(settings: ScheduleSettings, optimizer: OptimizerSettings, shown: str, label: Label) -> Iterator[OnegraphError]:
    """Schedules that an optimizer doesn't allow."""
    try:
        entry = find_optimizer(optimizer.name)
        arguments = parse_arguments(optimizer.arguments, "")
    except OnegraphError:
        return  # said by optimizer_problems
    adafactor = entry.path.endswith(".Adafactor")
    relative = adafactor and bool(arguments.get("relative_step", True) or arguments.get("warmup_init", False))
    if shown == "adafactor" and not relative:
        what = f"{label('schedule.name')} is adafactor, with optimizer {optimizer.name}"
        why = "This schedule only shows the rate that Adafactor computes with relative_step=True."
        yield ConfigurationError(what, why=why, hint=f"use {label('schedule.name')}=constant_with_warmup", code="schedule-pairing")
    if relative and shown not in ("adafactor", "constant"):
        what = f"{label('schedule.name')} is {shown}, with Adafactor and relative_step=True"
        why = "Adafactor computes its own learning rate then, and no schedule can move it."
        hint = f'use {label("schedule.name")}=adafactor, or add {label("optimizer.arguments")} "relative_step=False"'
        yield ConfigurationError(what, why=why, hint=hint, code="schedule-pairing")
    if entry.schedule_free and shown != "constant":
        what = f"{label('schedule.name')} is {shown}, with the schedule-free optimizer {optimizer.name}"
        why = "It averages the weights in place of a schedule."
        hint = f'use {label("schedule.name")}=constant; warm-up: {label("optimizer.arguments")} "warmup_steps=100"'
        yield ConfigurationError(what, why=why, hint=hint, code="schedule-pairing")


def steps_of(count: float, num_steps: int) -> int:
    """Optimizer steps from a count, or from a share of the run when below 1; a share that isn't 0 is at least one step."""
    if count >= 1 or count == 0:
        return int(count)
    return max(1, int(count * num_steps))


def make_schedule(
    settings: ScheduleSettings, optimizer: Optimizer, num_steps: int, *, optimizer_settings: OptimizerSettings, label: Label = str
) -> LRScheduler:
    """The learning-rate schedule of a name. Call its ``step`` once per optimizer step, in every process; it resumes by ``state_dict``.

    Args:
        settings: Name, counts and arguments.
        optimizer: What ``make_optimizer`` gave.
        num_steps: Optimizer steps of the whole run.
        optimizer_settings: Some optimizers allow only some schedules.
        label: How a setting is called in the messages.

    Raises:
        ConfigurationError: what ``schedule_problems`` finds; ``schedule-steps``: warm-up and decay are longer than the run;
            ``bad-argument``: the library refused a value.
    """
    problems = list(schedule_problems(settings, optimizer_settings, label))
    if problems:
        raise ConfigurationError.collected(problems)
    entry = _find(settings, label("schedule.name"))
    arguments: dict[str, Any] = dict(parse_arguments(settings.arguments, label("schedule.arguments")))
    warmup, decay = steps_of(settings.warmup, num_steps), steps_of(settings.decay, num_steps)
    if warmup + decay > num_steps:
        raise ConfigurationError(
            f"the schedule's warm-up of {warmup} and decay of {decay} steps are longer than the run of {num_steps}",
            why="The learning rate would never get where it should.",
            hint=f"use fewer steps, or a share of the run: {label('schedule.warmup')}=0.05",
            code="schedule-steps",
        )
    relative = optimizer.param_groups[0].get("relative_step", False)
    if relative:
        entry = SCHEDULES["adafactor"]
        arguments["initial_lr"] = optimizer_settings.rate
    if "warmup" in entry.takes:
        arguments["num_warmup_steps"] = warmup
    if "decay" in entry.takes:
        arguments["num_decay_steps"] = decay
    if entry.total:
        arguments["num_training_steps"] = num_steps
    if "num_cycles" in entry.takes:
        arguments["num_cycles"] = settings.num_cycles / 2 if entry.half_cycles else settings.num_cycles
    if "power" in entry.takes:
        arguments["power"] = settings.power
    if "timescale" in entry.takes:
        arguments["timescale"] = settings.timescale
    if "min_lr_ratio" in entry.takes and settings.min_lr_ratio is not None:
        arguments["min_lr_ratio" if entry.path.endswith("get_wsd_schedule") else "min_lr_rate"] = settings.min_lr_ratio
    try:
        return cast("LRScheduler", _load(entry, label("schedule.name"))(optimizer, **arguments))
    except (TypeError, ValueError) as error:
        what = f"schedule {settings.type or settings.name} can't be made"
        raise ConfigurationError(what, why=str(error), hint=f"see {entry.path}", code="bad-argument") from error
