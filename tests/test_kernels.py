"""The kernels of a graph are compiled as one file, and are the same kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.async_compile
import torch._inductor.utils
from torch import Tensor, nn
from torch._inductor.cpp_builder import CppBuilder

import onegraph as og
from onegraph.compiling import kernels
from onegraph.compiling.tuning import tuned_options

pytestmark = pytest.mark.inductor


class Block(nn.Module):
    """A few fused loops, forward and backward, that products keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.sigmoid(self.first(self.norm(x)) * 2))
        return y.softmax(-1)


class Files:
    """The shared objects of a cache folder, and how often the C++ compiler was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*.main.so")}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """An empty cache folder, with one thread to compile."""
    with (
        torch._inductor.utils.fresh_cache(dir=str(tmp_path)),
        torch._inductor.config.patch(compile_threads=1),
    ):
        found = Files(tmp_path)
        build = CppBuilder.build

        def counted(self: CppBuilder) -> None:
            found.started += 1
            build(self)

        monkeypatch.setattr(CppBuilder, "build", counted)
        torch._dynamo.reset()
        yield found
    torch._dynamo.reset()


def step(model: nn.Module, *, backward: bool) -> list[Tensor]:
    x = torch.linspace(-2, 2, 8 * 16).reshape(8, 16).requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])] if backward else [y]


def check(model: nn.Module, *, backward: bool = True) -> None:
    """Compiled and eager agree."""
    compiled = step(model, backward=backward)
    with og.compiling.eager():
        for one, other in zip(compiled, step(model, backward=backward), strict=True):
            torch.testing.assert_close(one, other)


def test_a_graph_is_one_file(files: Files) -> None:
    model = Block()
    og.compile(model, backend="inductor", regions="whole")
    check(model)
    assert len(files.names) == 2, "forward and backward"


def test_without_it_every_kernel_is_a_file(files: Files) -> None:
    model = Block()
    og.compile(model, backend="inductor", regions="whole", protect=False)
    check(model, backward=False)
    assert len(files.names) > 1


def test_other_graphs_are_left_alone(files: Files) -> None:
    og.compile(Block(), backend="inductor", regions="whole")
    check(torch.compile(Block(), backend="inductor"), backward=False)
    assert len(files.names) > 1


def test_a_large_graph_is_several_files(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_TOGETHER", 2)
    model = Block()
    og.compile(model, backend="inductor", regions="whole")
    check(model)
    assert 2 < len(files.names) <= 5


def test_what_does_not_compile_together_compiles_alone(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_file_of", lambda *_: "this is no C++")
    model = Block()
    og.compile(model, backend="inductor", regions="whole")
    check(model, backward=False)
    assert len(files.names) > 1


def test_the_files_are_found_again(files: Files) -> None:
    model = Block()
    og.compile(model, backend="inductor", regions="whole")
    check(model)
    started, names = files.started, files.names
    torch._dynamo.reset()
    kernels._Libraries.cache_clear()
    og.compile(model, backend="inductor", regions="whole")
    check(model)
    assert files.started == started > 0
    torch._dynamo.reset()
    kernels._Libraries.cache_clear()
    with torch._inductor.config.patch(compile_threads=2, fx_graph_cache=False):  # with more threads they are the same files
        og.compile(model, backend="inductor", regions="whole")
        check(model)
    assert files.names == names


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ('\n#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C"  void  kernel(float* out)\n{\n}\n', True),
        ('\n#include <torch/csrc/inductor/cpp_prefix.h>\n#include <map>\nextern "C"  void  kernel(float* out)\n{\n}\n', False),
        ('#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* out)\n{\n}\nvoid f() { kernel(0); }', False),
    ],
)
def test_only_a_function_by_itself_is_joined(source: str, plain: bool) -> None:
    assert kernels._is_plain(source) == plain


def test_a_torch_with_other_names_compiles_as_it_does(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the joining needs of inductor's insides isn't there: it is left out, and the rest of what inductor is told stays."""
    monkeypatch.delitem(sys.modules, "onegraph.compiling.kernels")
    monkeypatch.delattr(torch._inductor.async_compile, "get_compile_threads")
    with pytest.raises(ImportError):
        importlib.import_module("onegraph.compiling.kernels")
    options = tuned_options("inductor", nn.Linear(2, 2))
    assert options["layout_optimization"] is False
    assert "custom_partitioner_fn" in options
