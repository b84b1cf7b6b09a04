"""Tries backends: two lines are compiled with each name, run forward and backward, and compared with eager.

``python -m onegraph.compiling.attempt DEVICE NAME...`` prints one JSON object a name, as soon as it is known. It runs in a process of its
own, because a backend may hang or crash.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.exc import InvalidBackend
from torch._dynamo.utils import counters

from onegraph.compiling.backends import BACKENDS, Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """What happened when two lines were compiled.

    Args:
        name: The backend's name as tried first.
        runs_as: The name that was tried last; another than ``name`` where that one is unknown to torch.
        outcome: "works"; "unknown": no such backend; "import": a package isn't there; "no effect": nothing was compiled;
            "skipped": CUDA graphs were left out without an error; "wrong": another result than eager; "failed".
        said: What torch or the backend said.
        seconds: How long it took.
    """

    name: str
    runs_as: str
    outcome: str
    said: str = ""
    seconds: float = 0.0


def attempt(name: str, device: str = "cpu") -> Attempt:
    """Compiles two lines with a backend; where torch doesn't know the name, with the name that it has today."""
    began = time.perf_counter()
    backend = BACKENDS.get(name, Backend(runs_as=name))
    tried = name
    outcome, said = _tried(name, backend, device)
    if outcome == "unknown" and backend.runs_as not in (None, name):
        tried = str(backend.runs_as)
        outcome, said = _tried(tried, backend, device)
    return Attempt(name=name, runs_as=tried, outcome=outcome, said=said, seconds=round(time.perf_counter() - began, 2))


def _two_lines(x: Tensor, weight: Tensor) -> Tensor:
    hidden = torch.sin(x) * weight
    return torch.relu(hidden + x).sum()


def _tried(name: str, backend: Backend, device: str) -> tuple[str, str]:
    torch._dynamo.reset()
    counters.clear()
    try:
        # a package registers its backend when it is imported
        if backend.needs_module and importlib.util.find_spec(backend.needs_module) is not None:
            importlib.import_module(backend.needs_module)
        compiled: Callable[..., Any] = _two_lines
        if name != "no":
            compiled = torch.compile(_two_lines, backend=name, fullgraph=True, options=dict(backend.options) or None)
        right = all(
            torch.allclose(one, other, atol=1e-5) for one, other in zip(_ran(compiled, device), _ran(_two_lines, device), strict=True)
        )
    except InvalidBackend as error:
        return "unknown", _first_line(error)
    except Exception as error:
        cause = next((cause for cause in _causes(error) if isinstance(cause, ImportError)), None)
        return ("failed", _first_line(list(_causes(error))[-1])) if cause is None else ("import", _first_line(cause))
    if not right:
        return "wrong", "the result or a gradient differs from eager"
    if name != "no" and counters["stats"]["unique_graphs"] == 0:
        return "no effect", "nothing was compiled"
    if skips := counters["inductor"]["cudagraph_skips"]:
        return "skipped", f"CUDA graphs were left out {skips} times"
    return "works", ""


def _ran(function: Callable[..., Any], device: str) -> Iterator[Tensor]:
    """The result and both gradients."""
    inputs = [torch.linspace(low, 1.0, 64, device=device).requires_grad_() for low in (-1.0, 0.5)]
    result = function(*inputs)
    result.backward()
    yield result.detach()
    for tensor in inputs:
        yield tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, the innermost last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


def backend_table() -> dict[str, Mapping[str, Any]]:
    """What is written about each name, in plain values."""
    return {name: {**dataclasses.asdict(backend), "options": dict(backend.options)} for name, backend in BACKENDS.items()}


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        print(json.dumps(dataclasses.asdict(attempt(_name, sys.argv[1]))), flush=True)
