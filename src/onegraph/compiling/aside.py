"""Putting a compilation aside for a moment: the model is eager, can be compiled in another way, and gets back exactly what it had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from onegraph.compiling.compile import _ATTRIBUTE


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Inside it nothing of ``model`` is compiled; afterwards all of it is as before, with every graph that it had."""
    calls = [(module, module._compiled_call_impl) for module in model.modules()]
    records = [(module, module.__dict__.pop(_ATTRIBUTE, None)) for module in model.modules()]
    for module, _ in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, record in records:
            module.__dict__.pop(_ATTRIBUTE, None)
            if record is not None:
                module.__dict__[_ATTRIBUTE] = record
        for module, call in calls:
            module._compiled_call_impl = call
