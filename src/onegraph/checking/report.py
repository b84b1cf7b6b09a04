"""What a check found: as text, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onegraph.checking.bisect import Culprit
from onegraph.checking.breaks import instead
from onegraph.checking.comparison import Comparison, GradientRow
from onegraph.checking.situations import Variation
from onegraph.checking.train_run import Run, TrainRun
from onegraph.compiling import BreakPoint, Recompile
from onegraph.errors import MismatchError

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``check`` found; ``print(report)`` shows it, ``report.right`` says it in one word.

    Args:
        comparison: Loss and gradients.
        output_error: Largest norm of a difference between a compiled output and the reference, as a share of that output's norm.
        output_allowed: What of it passes, besides a multiple of eager's own.
        outputs: One row an output.
        graphs: Graphs that were captured in all.
        breaks: Reason and place of each graph break -> how often it was met.
        break_points: File, line, reason of each place that broke.
        recompiles: Compilations where nothing new was met.
        compile_seconds: Seconds spent compiling.
        phases: The same by phase.
        compiled: What was compiled, in words.
        name: What was checked: the adapter, or the method.
        variations: Other situations.
        training: The short training run.
        culprit: Where the fault is, when one was found and looked for.
        notes: Sentences on what the figures mean here.
        compiled_nothing: Whether not one graph came of it, so that eager was compared with eager.
    """

    comparison: Comparison
    output_error: float
    output_allowed: float
    graphs: int
    outputs: tuple[GradientRow, ...] = ()
    breaks: Mapping[str, int] = field(default_factory=dict)
    break_points: tuple[BreakPoint, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    compile_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    compiled: str = ""
    name: str = ""
    variations: tuple[Variation, ...] = ()
    training: TrainRun | None = None
    culprit: Culprit | None = None
    notes: tuple[str, ...] = ()
    compiled_nothing: bool = False

    @property
    def agrees(self) -> bool:
        """True when all numbers agree, whatever broke or recompiled."""
        return (
            self.comparison.right
            and not any(row.wrong for row in self.outputs)
            and all(variation.outcome != "wrong" for variation in self.variations)
            and (self.training is None or self.training.right)
        )

    @property
    def right(self) -> bool:
        """True when numbers agree, something was compiled, and nothing broke or recompiled."""
        return self.agrees and not self.compiled_nothing and not self.breaks and not self.break_points and not self.all_recompiles

    @property
    def verdict(self) -> str:
        """In a few words."""
        if not self.agrees:
            return "WRONG"
        if self.compiled_nothing:
            return "NOTHING was compiled: dynamo left all of it eager, and eager agrees with itself"
        return "right" if self.right else "the numbers are right, but not one graph"

    @property
    def all_recompiles(self) -> tuple[Recompile, ...]:
        """Compilations where nothing new was met, and where a situation should have done without."""
        return (*self.recompiles, *(recompile for variation in self.variations for recompile in variation.recompiles))

    def __str__(self) -> str:
        lines = [f"{self.name or 'model'}: {self.verdict}", self.compiled]
        lines.append(f"outputs     error {self.output_error:.1e} of their norm (allowed {self.output_allowed:.0e} beside eager's own)")
        lines += [f"  wrong     {row}" for row in self.outputs if row.wrong]
        lines.append(f"training    {self.comparison}")
        lines += _some([f"  wrong     {row}" for row in self.comparison.faults])
        for variation in self.variations:
            lines.append(f"situation   {variation}")
            lines += _some([f"  wrong     {row}" for row in variation.faults], 5)
        if self.training is not None:
            lines.append(f"run         {self.training}")
            lines.append(f"cost        {_cost(self.training)}")
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        lines.append(
            f"graphs      {self.graphs} in {self.compile_seconds:.1f} s{f' ({phases})' if phases else ''}, "
            f"breaks {len(self.break_points) or len(self.breaks)}, recompiles {len(self.all_recompiles)}"
        )
        for point in self.break_points:
            lines += [f"  break     {point}", f"            {point.source}", f"            write instead: {instead(point)}"]
        if not self.break_points:
            lines += [f"  break     {reason}" for reason in self.breaks]
        lines += [f"  recompile {recompile}" for recompile in self.all_recompiles]
        if self.culprit is not None:
            lines.append(str(self.culprit))
        lines += [f"note        {note}" for note in self.notes]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Everything that was found, as plain values."""
        comparison = self.comparison
        return {
            "name": self.name,
            "right": self.right,
            "agrees": self.agrees,
            "compiled": self.compiled,
            "compiled_nothing": self.compiled_nothing,
            "precision": str(comparison.precision).removeprefix("torch."),
            "reference": str(comparison.reference).removeprefix("torch."),
            "output_error": self.output_error,
            "outputs": [_row(row) for row in self.outputs],
            "loss": comparison.loss,
            "compiled_loss": comparison.compiled_loss,
            "eager_loss": comparison.eager_loss,
            "loss_error": comparison.loss_error,
            "gradient_error": comparison.total_error,
            "eager_gradient_error": comparison.eager_total_error,
            "gradients": len(comparison.rows),
            "gradient_rows": [_row(row) for row in comparison.rows],
            "faults": [_row(row) for row in comparison.faults],
            "situations": [_variation(variation) for variation in self.variations],
            "training": None if self.training is None else _training(self.training),
            "graphs": self.graphs,
            "breaks": dict(self.breaks),
            "break_points": [{**vars(point), "instead": instead(point)} for point in self.break_points],
            "recompiles": [str(recompile) for recompile in self.all_recompiles],
            "compile_seconds": self.compile_seconds,
            "phases": dict(self.phases),
            "culprit": None if self.culprit is None else _culprit(self.culprit),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The figures as JSON; what is no finite number is a string there."""
        return json.dumps(plain(self.record()), indent=2)

    def raise_if_wrong(self) -> None:
        """Raises when anything is wrong.

        Raises:
            MismatchError: The report as its text.
        """
        if not self.right:
            raise MismatchError(str(self), why="The compiled model isn't the eager model, or doesn't stay one graph.")


def plain(value: Any) -> Any:
    """A nest that JSON can hold: NaN and infinity as strings, since JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def size(num_bytes: int) -> str:
    """Bytes in the unit that fits."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def _some(lines: list[str], limit: int = _SHOWN) -> list[str]:
    return lines if len(lines) <= limit else [*lines[:limit], f"            and {len(lines) - limit} more"]


def _cost(training: TrainRun) -> str:
    eager, compiled = training.eager, training.compiled
    peak = ""
    if eager.peak_bytes is not None and compiled.peak_bytes is not None:
        peak = f", peak {size(compiled.peak_bytes)} against {size(eager.peak_bytes)}"
    return (
        f"a step {compiled.step_seconds * 1e3:.1f} ms against {eager.step_seconds * 1e3:.1f} ms eager ({training.speed:.2f} x), "
        f"kept for backward {size(compiled.kept_bytes)} against {size(eager.kept_bytes)}{peak}"
    )


def _row(row: GradientRow) -> dict[str, Any]:
    return {**vars(row), "wrong": row.wrong}


def _variation(variation: Variation) -> dict[str, Any]:
    comparison = variation.comparison
    return {
        "name": variation.name,
        "outcome": variation.outcome,
        "skipped": variation.skipped,
        "failed": variation.failed,
        "output_error": variation.output_error,
        "outputs": [_row(row) for row in variation.outputs],
        "gradient_error": None if comparison is None else comparison.total_error,
        "eager_gradient_error": None if comparison is None else comparison.eager_total_error,
        "gradient_rows": [] if comparison is None else [_row(row) for row in comparison.rows],
        "faults": [_row(row) for row in variation.faults],
        "compilations": [str(found) for found in variation.compilations],
        "recompiles": [str(found) for found in variation.recompiles],
    }


def _run(run: Run) -> dict[str, Any]:
    return {**vars(run), "step_seconds": run.step_seconds}


def _training(training: TrainRun) -> dict[str, Any]:
    return {
        "right": training.right,
        "wrong_step": training.wrong_step,
        "learning_rate": training.learning_rate,
        "moved": training.moved,
        "error": training.error,
        "eager_error": training.eager_error,
        "speed": training.speed,
        "reference": _run(training.reference),
        "eager": _run(training.eager),
        "compiled": _run(training.compiled),
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    return {
        **vars(culprit),
        "backends": dict(culprit.backends),
        "faults": [_row(row) for row in culprit.faults],
        "script": None if culprit.script is None else str(culprit.script),
    }
