"""Learning-rate schedules: the curve of each, in optimizer steps, what is refused, and resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.diffusion.configuration import OptimizerSettings, ScheduleSettings
from onegraph.training.optimizers import make_optimizer
from onegraph.training.schedules import SCHEDULES, make_schedule, schedule_problems, steps_of

STEPS = 20
RATE = 0.5


def curve(settings: ScheduleSettings, *, optimizer: OptimizerSettings | None = None, steps: int = STEPS) -> list[float]:
    """The rate of each optimizer step."""
    optimizer = optimizer or OptimizerSettings(learning_rate=RATE)
    made = make_optimizer(optimizer, [{"params": [nn.Parameter(torch.zeros(2))], "lr": optimizer.rate}])
    schedule = make_schedule(settings, made, steps, optimizer_settings=optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(schedule.get_last_lr()[0]))
        made.step()
        schedule.step()
    return rates


def after_warmup(step: int, warmup: int) -> float:
    """How far the part behind the warm-up is, 0 to 1."""
    return (step - warmup) / (STEPS - warmup)


def warmed(after: Callable[[float], float], warmup: int) -> Callable[[int], float]:
    """A linear warm-up, then a curve of the progress."""
    return lambda step: step / warmup if step < warmup else after(after_warmup(step, warmup))


CURVES = [
    pytest.param({"name": "constant"}, lambda step: 1.0, id="constant"),
    pytest.param({"name": "constant_with_warmup", "warmup": 4}, warmed(lambda progress: 1.0, 4), id="constant-with-warm-up"),
    pytest.param({"name": "linear", "warmup": 0.25}, warmed(lambda progress: 1 - progress, 5), id="linear-with-a-share"),
    pytest.param({"name": "cosine", "warmup": 4}, warmed(lambda progress: (1 + math.cos(math.pi * progress)) / 2, 4), id="cosine"),
    pytest.param(
        {"name": "cosine_with_restarts", "num_cycles": 3, "warmup": 2},
        warmed(lambda progress: (1 + math.cos(math.pi * (3 * progress % 1))) / 2, 2),
        id="restarts",
    ),
    pytest.param(
        {"name": "polynomial", "power": 2.0},
        lambda step: (RATE - 1e-7) * (1 - step / STEPS) ** 2 / RATE + 1e-7 / RATE,
        id="polynomial",
    ),
    pytest.param(
        {"name": "inverse_sqrt", "warmup": 4, "timescale": 9},
        lambda step: step / 4 if step < 4 else 1 / math.sqrt((step + 5) / 9),
        id="inverse-sqrt",
    ),
    pytest.param(
        {"name": "cosine_with_min_lr", "min_lr_ratio": 0.2},
        lambda step: 0.2 + 0.8 * (1 + math.cos(math.pi * step / STEPS)) / 2,
        id="cosine-with-a-floor",
    ),
    pytest.param(
        {"name": "warmup_stable_decay", "warmup": 4, "decay": 0.5, "min_lr_ratio": 0.1},
        lambda step: 0.1 + 0.9 * step / 4 if step < 4 else 1.0 if step < 10 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 10)) / 2,
        id="warm-up-stable-decay",
    ),
    pytest.param(
        {"name": "piecewise_constant", "arguments": ("step_rules='1:5,0.1:12,0.01'",)},
        lambda step: 1.0 if step < 5 else 0.1 if step < 12 else 0.01,
        id="pieces",
    ),
    pytest.param(
        {"name": "constant", "type": "StepLR", "arguments": ("step_size=5", "gamma=0.5")}, lambda step: 0.5 ** (step // 5), id="class"
    ),
    pytest.param(
        {"type": "torch.optim.lr_scheduler.ExponentialLR", "arguments": ("gamma=0.9",)}, lambda step: 0.9**step, id="dotted-class"
    ),
]


@pytest.mark.parametrize(("settings", "expected"), CURVES)
def test_curves_from_their_formulas(settings: dict[str, Any], expected: Callable[[int], float]) -> None:
    rates = curve(ScheduleSettings(**settings))
    assert rates == pytest.approx([RATE * expected(step) for step in range(STEPS)], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "adafactor"])
def test_every_schedule_resumes_where_it_was(name: str) -> None:
    given: dict[str, Any] = {"name": name}
    given |= {"warmup": 3} if "warmup" in SCHEDULES[name].takes else {}
    given |= {need: {"min_lr_ratio": 0.1, "decay": 8}[need] for need in SCHEDULES[name].needs}
    given |= {"arguments": ("step_rules='1:5,0.1'",)} if name == "piecewise_constant" else {}
    settings = ScheduleSettings(**given)
    whole = curve(settings)

    def start() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = OptimizerSettings(learning_rate=RATE)
        made = make_optimizer(optimizer, [{"params": [nn.Parameter(torch.zeros(2))], "lr": RATE}])
        return made, make_schedule(settings, made, STEPS, optimizer_settings=optimizer)

    optimizer, schedule = start()
    for _ in range(7):
        optimizer.step()
        schedule.step()
    saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = start()
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    rest = []
    for _ in range(7, STEPS):
        rest.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rest == whole[7:]


@pytest.mark.parametrize(("count", "steps"), [(0, 0), (1, 1), (30, 30), (0.1, 10), (0.001, 1), (0.999, 99)])
def test_counts_and_shares(count: float, steps: int) -> None:
    assert steps_of(count, 100) == steps


def problems(optimizer: OptimizerSettings | None = None, **settings: Any) -> list[OnegraphError]:
    return list(schedule_problems(ScheduleSettings(**settings), optimizer or OptimizerSettings(), str))


ADAFACTOR = OptimizerSettings(name="Adafactor")
WITH_A_RATE = OptimizerSettings(name="Adafactor", arguments=("relative_step=False",))
REFUSED = [
    pytest.param(None, {"name": "cosin"}, "unknown-schedule", "cosine", id="misspelt"),
    pytest.param(None, {"name": "reduce_lr_on_plateau"}, "unsupported-schedule", "cosine", id="needs-a-metric"),
    pytest.param(None, {"name": "constant", "warmup": 5}, "schedule-setting", "constant_with_warmup", id="no-warm-up"),
    pytest.param(None, {"name": "cosine", "num_cycles": 3}, "schedule-setting", "cosine_with_restarts", id="no-cycles"),
    pytest.param(None, {"name": "cosine", "power": 2.0}, "schedule-setting", "polynomial", id="no-power"),
    pytest.param(None, {"name": "warmup_stable_decay"}, "schedule-setting", "schedule.decay", id="needs-decay"),
    pytest.param(None, {"name": "cosine_with_min_lr"}, "schedule-setting", "min_lr_ratio", id="needs-a-floor"),
    pytest.param(None, {"name": "piecewise_constant"}, "schedule-setting", "step_rules", id="needs-rules"),
    pytest.param(None, {"name": "cosine", "arguments": ("num_cycle=1",)}, "bad-argument", "num_cycle", id="argument"),
    pytest.param(None, {"type": "StepLRR"}, "unknown-class", "StepLR", id="class"),
    pytest.param(ADAFACTOR, {"name": "cosine"}, "schedule-pairing", "relative_step=False", id="adafactor-cosine"),
    pytest.param(WITH_A_RATE, {"name": "adafactor"}, "schedule-pairing", "constant_with_warmup", id="adafactor-schedule-alone"),
    pytest.param(None, {"name": "adafactor"}, "schedule-pairing", "constant_with_warmup", id="adafactor-schedule-elsewhere"),
    pytest.param(OptimizerSettings(name="AdamWScheduleFree"), {"name": "cosine"}, "schedule-pairing", "warmup_steps", id="schedule-free"),
]


@pytest.mark.parametrize(("optimizer", "settings", "code", "hint"), REFUSED)
def test_what_is_refused(optimizer: OptimizerSettings | None, settings: dict[str, Any], code: str, hint: str) -> None:
    found = problems(optimizer, **settings)
    assert {problem.code for problem in found} == {code}
    assert hint in str(found[0])


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(ADAFACTOR, "adafactor"), (ADAFACTOR, "constant"), (WITH_A_RATE, "cosine"), (OptimizerSettings(name="Prodigy"), "cosine")],
)
def test_what_is_allowed(optimizer: OptimizerSettings, name: str) -> None:
    assert problems(optimizer, name=name) == []


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        curve(ScheduleSettings(name="cosine", warmup=21))
    assert raised.value.code == "schedule-steps"


def test_adafactor_shows_the_rate_it_computes() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = make_optimizer(ADAFACTOR, [{"params": [weight], "lr": ADAFACTOR.rate}])
    schedule = make_schedule(ScheduleSettings(), optimizer, STEPS, optimizer_settings=ADAFACTOR)
    assert schedule.get_last_lr() == [1e-4], "before the first step: the learning rate given"
    shown = []
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
        schedule.step()
        shown.append(float(schedule.get_last_lr()[0]))
    scale = float(weight.detach().norm()) / 4
    assert shown[-1] == pytest.approx(1e-2 * scale, rel=0.1)
