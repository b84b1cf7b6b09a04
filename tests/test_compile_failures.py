"""What torch raises while it compiles, told in one error that keeps torch's own as its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

from onegraph.compiling.failures import explained
from onegraph.errors import CompileError


def _breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


def _branches(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x


def _ill(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise ValueError("first line\nprobe.cpp:3:1: error: expected expression\nlast line")


@pytest.mark.parametrize("function", [_breaks, _branches])
def test_a_graph_break_names_the_place_and_the_way_out(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CompileError) as caught, explained("eager"):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(3))
    assert caught.value.code == "graph-break"
    assert function.__name__ in caught.value.why
    assert __file__ in caught.value.why
    assert "--dynamo_use_fullgraph=no" in caught.value.hint
    assert isinstance(caught.value.__cause__, Unsupported)


def test_a_failing_backend_is_told_by_its_compilers_first_error() -> None:
    with pytest.raises(CompileError) as caught, explained("inductor"):
        torch.compile(lambda x: x + 1, backend=_ill)(torch.ones(3))
    assert caught.value.code == "backend-failed"
    assert caught.value.what == "The backend inductor failed: ValueError: probe.cpp:3:1: error: expected expression"
    assert "aot_eager" in caught.value.hint
    assert isinstance(caught.value.__cause__, BackendCompilerFailed)


def test_too_many_compilations_are_told() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(2))
        with pytest.raises(CompileError) as caught, explained("eager"):
            compiled(torch.ones(3))
    assert caught.value.code == "recompile-limit"


@pytest.mark.filterwarnings("ignore")
def test_shapes_that_do_not_fit_are_not_called_a_fault_of_the_backend() -> None:
    with pytest.raises(CompileError) as caught, explained("eager"):
        torch.compile(lambda x: x @ torch.ones(5, 5), backend="eager", fullgraph=True)(torch.ones(3))
    assert caught.value.code == "not-compiled"
    assert "same reduction dim" in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), explained("eager"):
        1 / 0  # noqa: B018
