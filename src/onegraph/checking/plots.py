"""Plots of a report as SVG text, to stand inside a page."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from onegraph.checking.comparison import GradientRow
from onegraph.checking.report import Report
from onegraph.checking.train_run import TrainRun

_MOST_ROWS = 40
_COMPILED, _EAGER, _ALLOWED, _WRONG = "#1f6feb", "#8c959f", "#57606a", "#cf222e"
# Below it a bar on a logarithmic axis says nothing.
_LEAST = 1e-12


def gradients(report: Report) -> str:
    """Error of each output and gradient, as a share of its norm: compiled, eager, and what is allowed; the worst first."""
    rows = [row for row in [*report.outputs, *report.comparison.rows] if row.norm > 0]
    rows.sort(key=lambda row: -row.error / row.allowed if row.allowed else 0.0)
    rows = rows[:_MOST_ROWS]

    def draw(axes: Axes) -> None:
        places = range(len(rows))
        compiled = [_share(row.error, row) for row in rows]
        axes.barh([place + 0.2 for place in places], compiled, 0.4, color=[_WRONG if row.wrong else _COMPILED for row in rows])
        axes.barh([place - 0.2 for place in places], [_share(row.eager_error, row) for row in rows], 0.4, color=_EAGER)
        marks = axes.plot([_share(row.allowed, row) for row in rows], places, "|", color=_ALLOWED, markersize=9, label="allowed")
        axes.set_yticks(list(places), [_short(row.name) for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("error as a share of the norm")
        named = [Patch(color=_COMPILED, label="compiled"), Patch(color=_WRONG, label="compiled, wrong"), Patch(color=_EAGER, label="eager")]
        axes.legend(handles=[*named, *marks], fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)

    return _svg(draw, height=1.5 + 0.22 * len(rows))


def losses(training: TrainRun) -> str:
    """The loss of each step in the reference, in eager and compiled."""

    def draw(axes: Axes) -> None:
        steps = range(1, len(training.compiled.losses) + 1)
        reference, eager, compiled = training.reference.losses, training.eager.losses, training.compiled.losses
        axes.plot(steps, reference, color=_ALLOWED, linewidth=4, alpha=0.35, label="reference")
        axes.plot(steps, eager, color=_EAGER, linewidth=1.5, label="eager")
        axes.plot(steps, compiled, "--", color=_COMPILED if training.right else _WRONG, linewidth=1.5, label="compiled")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend(fontsize=7, frameon=False)

    return _svg(draw, height=2.6)


def cost(report: Report) -> str:
    """Seconds of compiling by phase."""
    phases = report.phases

    def draw(axes: Axes) -> None:
        axes.barh(list(phases), list(phases.values()), color=_COMPILED)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")

    return _svg(draw, height=0.8 + 0.3 * len(phases))


def _share(part: float, row: GradientRow) -> float:
    return max(_LEAST, part / row.norm)


def _short(name: str) -> str:
    short = name if len(name) <= 60 else f"...{name[-57:]}"
    return short.replace("$", r"\$")  # a name is no formula


def _svg(draw: Callable[[Axes], None], *, height: float) -> str:
    """The same bytes for the same figures: no date, no random ids."""
    figure = Figure(figsize=(7.5, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "onegraph", "svg.fonttype": "none"}), warnings.catch_warnings():
        # the reader's own fonts show what this machine's can't
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]
