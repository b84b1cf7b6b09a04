"""What to write instead of code that breaks a graph."""

from __future__ import annotations

import re

from onegraph.compiling import BreakPoint
from onegraph.explain import Strength, explain

# Looked up in the line itself, then in what dynamo says of it; the first match wins.
_INSTEAD: tuple[tuple[str, str], ...] = (
    (r"\bopen\(|\btime\.\w+\(|(?<!torch\.)\brandom\.\w+\(", "do it outside of the model and pass the result in"),
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
    (r"register_hook|\.backward\(\)|autograd\.grad", "do it outside of what is compiled"),
    (r"custom|extension|pybind|C\+\+|\.so\b", "register it with @torch.library.custom_op and give it a register_fake"),
)


def instead(point: BreakPoint) -> str:
    """What to write instead: the line's own case first, then the catalogue of failures, then dynamo's own hint."""
    first, _, explanation = point.reason.partition(". ")
    # a library's explanation names other cases as examples: it is read last
    for text in (point.source, first, explanation):
        for pattern, advice in _INSTEAD:
            if re.search(pattern, text, re.MULTILINE):
                return advice
    # the number alone stands for many causes; an entry has to know the words, or the file
    for candidate in explain(f'  File "{point.file}", line {point.line}\n{point}'):
        if candidate.strength > Strength.POSSIBLE:
            for workaround in candidate.entry.workarounds:
                return f"{workaround.action} ({candidate.entry.id})"
    useful = [hint for hint in point.hints if "report an issue" not in hint]
    return useful[0] if useful else "move the line outside of the compiled module, or compile by smaller regions"
