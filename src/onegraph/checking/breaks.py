"""What to write instead of code that breaks a graph."""

from __future__ import annotations

import re

from onegraph.compiling import BreakPoint
from onegraph.explain import find

# Looked up in the line itself and dynamo's reason, the first match wins.
_INSTEAD: tuple[tuple[str, str], ...] = (
    (r"graph_break\(\)", "take torch._dynamo.graph_break() out"),
    (
        r"\.item\(\)|Tensor\.item|\bfloat\(|\bint\(|\bbool\(",
        "keep it a tensor: x * y.sum(), not x * y.sum().item()",
    ),
    (r"\.tolist\(\)|\.numpy\(\)|\.cpu\(\)", "do it outside of the model, or with torch's own functions on the tensor"),
    (r"\bprint\(|builtin `?print|logg(?:er|ing)\.|warnings?\.warn", "take it out, or call it outside of the model, before or after"),
    (
        r"a branch or loop whose condition|^\s*(?:el)?if |^\s*while |\bassert\b",
        "torch.where(condition, a, b), or torch.cond",
    ),
    (
        r"nonzero|masked_select|boolean mask|dynamic shape operator",
        "torch.where(mask, x, 0.0): the same shape for any mask",
    ),
    (r"numpy|\bnp\.", "torch's function of the same name"),
    (r"\bopen\(|time\.|random\.", "do it outside of the model and pass the result in"),
    (r"register_hook|\.backward\(\)|autograd\.grad", "do it outside of what is compiled"),
    (r"custom|extension|pybind|C\+\+|\.so\b", "register it with @torch.library.custom_op and give it a register_fake"),
)


def instead(point: BreakPoint) -> str:
    """What to write instead: the line's own case first, then the catalogue of failures, then dynamo's own hint."""
    text = f"{point.source}\n{point.reason}"
    for pattern, advice in _INSTEAD:
        if re.search(pattern, text, re.MULTILINE):
            return advice
    for entry in find(point.number) if point.number else ():
        for workaround in entry.workarounds:
            return f"{workaround.action} ({entry.id})"
    useful = [hint for hint in point.hints if "report an issue" not in hint]
    return useful[0] if useful else "move the line outside of the compiled module, or compile by smaller regions"
