"""Regions compiled ahead by several processes are found in the cache: nothing is left for the model to compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import Linear

import onegraph as og
from onegraph.compiling import Compiled, Region, compile_ahead, eager
from onegraph.compiling.ahead import Job, TensorShape


class Chain(nn.Module):
    """Blocks of torch's own class, so that a worker process can import it; each has another shape."""

    _repeated_blocks = ("Linear",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Linear(4 + number, 5 + number) for number in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make(num_blocks: int, backend: str) -> tuple[Chain, Compiled]:
    chain = Chain(num_blocks)
    return chain, og.compile(chain, backend=backend, dynamic=False)


@pytest.mark.inductor
def test_the_model_finds_everything_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    chain, compiled = make(8, "inductor")
    x = torch.randn(3, 4)
    said: list[str] = []
    assert compile_ahead([compiled], lambda: chain(x), num_workers=2, say=said.append) == 8
    assert "8 regions ahead in 2 processes" in said[0]
    counters.clear()
    expected = chain(x)
    expected.sum().backward()
    found = counters["inductor"]
    assert found["fxgraph_cache_miss"] == 0
    assert found["fxgraph_cache_hit"] == 16
    with eager():
        torch.testing.assert_close(chain(x), expected)
    assert compile_ahead([compiled], lambda: chain(x), num_workers=2) == 0


@pytest.mark.parametrize(("backend", "num_blocks", "num_workers"), [("aot_eager", 8, 2), ("inductor", 7, 2), ("inductor", 8, 1)])
def test_nothing_is_started_where_it_does_not_pay(
    backend: str, num_blocks: int, num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", lambda *values, **named: pytest.fail("a process was started"))
    chain, compiled = make(num_blocks, backend)
    assert compile_ahead([compiled], lambda: chain(torch.randn(3, 4)), num_workers=num_workers) == 0


def test_a_worker_that_fails_leaves_the_work_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/bin/false")
    chain, compiled = make(8, "inductor")
    assert compile_ahead([compiled], lambda: chain(torch.randn(3, 4)), num_workers=2) == 0
    assert not any((tmp_path / "onegraph-ahead").glob("*"))


@pytest.mark.inductor
def test_the_reason_of_workers_that_fail_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    chain, compiled = make(8, "inductor")
    said: list[str] = []
    assert compile_ahead([compiled], lambda: chain(torch.randn(3, 4)), num_workers=2, say=said.append) == 0
    assert said[1].startswith("8 of them are left to the model: ")
    assert "InvalidCxxCompiler" in said[1]


def test_modules_that_cannot_travel_are_left_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(nn.Linear):
        """Of a class made inside a function: pickle refuses it."""

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", lambda *values, **named: pytest.fail("a process was started for nothing"))
    chain = nn.Sequential(*(Local(4 + number, 5 + number) for number in range(8)))
    compiled = og.compile(chain, backend="inductor", dynamic=False)
    compiled.regions = [Region(path=name, module=module) for name, module in chain.named_children()]
    compiled.restore()
    assert compile_ahead([compiled], lambda: chain(torch.randn(3, 4)), num_workers=2) == 0


def test_equal_regions_are_one_job_and_hooks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def note(lots: list[list[Job]]) -> tuple[list[Job], str]:
        jobs.extend(job for lot in lots for job in lot)
        return [], ""

    monkeypatch.setattr("onegraph.compiling.ahead._work", note)
    monkeypatch.setattr("onegraph.compiling.ahead._JOBS_PER_WORKER", 1)
    chain, compiled = make(4, "inductor")
    chain.blocks.extend(Linear(8, 8) for _ in range(5))
    compiled = og.compile(chain, backend="inductor")
    compile_ahead([compiled], lambda: chain(torch.randn(3, 4)), num_workers=2)
    # four of different shapes and five equal ones, of which only the first one's input has another history but the same shape
    assert len(jobs) == 5
    assert not any(block._forward_pre_hooks for block in chain.blocks)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_made_tensors_have_the_shape_they_stand_for(requires_grad: bool) -> None:
    tensor = torch.randn(2, 3, 4, dtype=torch.bfloat16).transpose(1, 2).requires_grad_(requires_grad)
    shape = TensorShape.of(tensor)
    made = shape.made()
    assert TensorShape.of(made) == shape
    assert not made.any()
