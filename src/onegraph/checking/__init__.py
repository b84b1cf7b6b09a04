"""Compiled against eager: loss, outputs, gradients, graphs."""

from onegraph.checking.check import Report, check
from onegraph.checking.comparison import TOLERANCES, Comparison, GradientRow, Tolerance, compare
from onegraph.checking.step import compare_step

__all__ = ["TOLERANCES", "Comparison", "GradientRow", "Report", "Tolerance", "check", "compare", "compare_step"]
