"""Reports as one HTML page that needs nothing beside it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import resources

import jinja2
import torch

from onegraph.checking import plots
from onegraph.checking.breaks import instead
from onegraph.checking.report import Report, size


def page(
    target: str, reports: Sequence[Report], *, failed: Sequence[tuple[str, str]] = (), skipped: Sequence[tuple[str, str]] = (), verdict: str
) -> str:
    """The page.

    Args:
        target: What was checked.
        reports: One for each adapter or method.
        failed: (name, error) of what could not run.
        skipped: (name, reason) of what doesn't fit the model.
        verdict: In a word or two.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("onegraph.checking").joinpath("page.html.jinja").read_text(encoding="utf-8")
    drawn = [
        (
            report,
            {
                "gradients": plots.gradients(report),
                "losses": plots.losses(report.training) if report.training is not None else "",
                "cost": plots.cost(report) if report.phases else "",
            },
        )
        for report in reports
    ]
    facts = [("torch", torch.__version__), ("Python", platform.python_version()), ("on", f"{platform.system()} {platform.machine()}")]
    return environment.from_string(source).render(
        target=target, reports=drawn, failed=failed, skipped=skipped, verdict=verdict, facts=facts, instead=instead, size=size
    )
