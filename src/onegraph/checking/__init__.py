"""Compiled against eager: loss, outputs, gradients, graphs."""

from onegraph.checking.bisect import Culprit
from onegraph.checking.check import check
from onegraph.checking.comparison import TOLERANCES, Comparison, GradientRow, Tolerance, compare
from onegraph.checking.report import Report
from onegraph.checking.situations import Variation
from onegraph.checking.step import compare_step
from onegraph.checking.train_run import TrainRun

__all__ = [
    "TOLERANCES",
    "Comparison",
    "Culprit",
    "GradientRow",
    "Report",
    "Tolerance",
    "TrainRun",
    "Variation",
    "check",
    "compare",
    "compare_step",
]
