"""Where dynamo broke a graph: file, line and reason of each place, for models that may break (``fullgraph=False``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch._dynamo.utils as dynamo_utils

_NUMBER = re.compile(r"gb/gb(\d{4})\.html")
_HINT = re.compile(r"^\s*Hint: (.+)$", re.MULTILINE)
_JUMP = "generic_jump"
# Dynamo keeps no text for a branch on a tensor, only this number of its own list.
_DATA_DEPENDENT_BRANCH = "GB0170"


@dataclass(frozen=True, kw_only=True)
class BreakPoint:
    """One place where a graph ends and another begins.

    Args:
        file: The source file of the user's line.
        line: Its number.
        function: The function that it is in.
        source: The line itself.
        reason: What dynamo couldn't trace, its first line and explanation.
        number: Dynamo's number for this kind of break, ``GB0170``; empty when it gives none.
        hints: Dynamo's own advice.
        count: How often it was met.
    """

    file: str
    line: int
    function: str
    source: str
    reason: str
    number: str = ""
    hints: tuple[str, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        number = f" [{self.number}]" if self.number else ""
        return f"{self.file}:{self.line} in {self.function}: {self.reason}{number}"


def break_mark() -> int:
    """A mark for ``breaks_since``: all breaks so far are before it."""
    return len(dynamo_utils.graph_break_reasons)


def breaks_since(mark: int) -> tuple[BreakPoint, ...]:
    """Each place that broke since the mark, once, in the order it was met."""
    found: dict[tuple[str, int, str], BreakPoint] = {}
    reasons: Sequence[object] = dynamo_utils.graph_break_reasons[mark:]
    for reason in reasons:
        stack = list(getattr(reason, "user_stack", None) or ())
        if not stack:
            continue
        frame = stack[-1]
        text = str(getattr(reason, "reason", ""))
        key = (frame.filename, frame.lineno or 0, text.splitlines()[0] if text else "")
        count = found[key].count + 1 if key in found else 1
        function = frame.name
        resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_\d+", function)
        found[key] = BreakPoint(
            file=frame.filename,
            line=frame.lineno or 0,
            function=resumed[1] if resumed else function,
            source=(frame.line or "").strip(),
            reason=_reason(text),
            number=_number(text),
            hints=tuple(hint.strip() for hint in _HINT.findall(text)),
            count=count,
        )
    return tuple(found.values())


def _reason(text: str) -> str:
    if text.startswith(_JUMP):
        return "a branch or loop whose condition is a tensor's value"
    lines = text.splitlines()
    explanation = next((line.partition("Explanation:")[2].strip() for line in lines if "Explanation:" in line), "")
    first = lines[0].strip() if lines else "no reason given"
    return f"{first}. {explanation}" if explanation else first


def _number(text: str) -> str:
    if text.startswith(_JUMP):
        return _DATA_DEPENDENT_BRANCH
    found = _NUMBER.search(text)
    return f"GB{found[1]}" if found else ""
