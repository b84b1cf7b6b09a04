"""An adapter for every row of a batch: each row is what its adapter gives alone, with gradients, on one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from onegraph.adapters import Adapters, attach, row_errors
from onegraph.compiling import compile
from onegraph.errors import AdapterError, OnegraphError
from onegraph.methods import LoRA, Method

IDS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 1], [2, 2, 9]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.place = nn.Embedding(4, 8)
        self.query = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device)[None])
        x = x + torch.tanh(self.query(x))
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


METHODS: dict[str, tuple[Method, list[str]]] = {
    "wide": (LoRA(rank=4, alpha=3), ["embed", "place", "query", "conv", "head"]),
    "small": (LoRA(rank=2), ["query", "head"]),
    "biased": (LoRA(rank=3, bias=True), ["query", "conv"]),
}


@pytest.fixture
def adapters() -> Adapters:
    torch.manual_seed(0)
    model = Model()
    found: Adapters | None = None
    for name, (method, targets) in METHODS.items():
        if found is None:
            found = attach(model, method, targets=targets, name=name)
        else:
            found.add(name, method, targets=targets)
        randomise(found, name)
    assert found is not None
    return found


def randomise(adapters: Adapters, name: str) -> None:
    values = {path: {k: torch.randn(t.shape) * 0.4 for k, t in layer.items()} for path, layer in adapters.tensors(name).items()}
    adapters.load_tensors(name, values)


def alone(adapters: Adapters, name: str | None, ids: Tensor) -> Tensor:
    before = adapters.active
    adapters.use(name)
    output: Tensor = adapters.model(ids)
    adapters.use(before)
    return output


ASSIGNMENTS: list[list[str | None]] = [
    ["wide", "small", None, "biased"],
    [None, None, None, None],
    ["biased", "biased", "wide", "wide"],
    ["small", None, "small", "wide"],
]


@pytest.mark.parametrize("names", ASSIGNMENTS, ids=str)
def test_each_row_is_what_its_adapter_gives_alone(adapters: Adapters, names: list[str | None]) -> None:
    with adapters.rows(names):
        found = adapters.model(IDS)
    expected = torch.cat([alone(adapters, name, IDS[row : row + 1]) for row, name in enumerate(names)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(adapters.model(IDS), alone(adapters, "wide", IDS))  # and outside, the active one again
    assert len({tuple(row.flatten().tolist()) for row in expected}) == 4


def test_gradients_reach_every_adapter_in_the_batch(adapters: Adapters) -> None:
    names = ["wide", "small", None, "wide"]
    with adapters.rows(names):
        adapters.model(IDS).square().sum().backward()
    found = {name: {key: p.grad for key, p in adapters.parameters(name).items()} for name in adapters.names}
    assert all(gradient is None for gradient in found["biased"].values())
    for name in ("wide", "small"):
        for parameter in adapters.parameters(name).values():
            parameter.grad = None
        adapters.use(name)
        rows = [row for row, other in enumerate(names) if other == name]
        adapters.model(IDS[rows]).square().sum().backward()
        for key, parameter in adapters.parameters(name).items():
            assert parameter.grad is not None
            gradient = found[name][key]
            assert gradient is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5, msg=key)


def test_gradients_accumulate_over_batches(adapters: Adapters) -> None:
    for names in (["wide", None], ["small", "wide"]):
        with adapters.rows(names):
            adapters.model(IDS[:2]).sum().backward()
    twice = {key: p.grad.clone() for key, p in adapters.parameters("wide").items() if p.grad is not None}
    for parameter in adapters.parameters("wide").values():
        parameter.grad = None
    adapters.use("wide")
    adapters.model(IDS[:2]).sum().backward()
    for key, parameter in adapters.parameters("wide").items():
        assert parameter.grad is not None
        torch.testing.assert_close(twice[key], parameter.grad, rtol=1e-4, atol=1e-5, msg=key)


def test_rows_without_a_backward_pass_leave_no_gradient_to_later_ones(adapters: Adapters) -> None:
    with adapters.rows(["wide", "biased"]), torch.no_grad():
        adapters.model(IDS[:2])
    with adapters.rows(["small", None]):
        adapters.model(IDS[:2]).sum().backward()
    assert all(parameter.grad is None for name in ("wide", "biased") for parameter in adapters.parameters(name).values())
    assert all(parameter.grad is not None for parameter in adapters.parameters("small").values())


def test_gradients_go_to_the_rows_of_their_own_batch(adapters: Adapters) -> None:
    """Two batches before the first backward pass, and an adapter that is deleted meanwhile."""
    with adapters.rows(["wide", "biased"]):
        first = adapters.model(IDS[:2]).sum()
    with adapters.rows(["small", None]):
        second = adapters.model(IDS[:2]).sum()
    adapters.delete("biased")
    adapters.add("new", METHODS["biased"][0], targets=METHODS["biased"][1])
    first.backward()
    assert all(parameter.grad is None for name in ("small", "new") for parameter in adapters.parameters(name).values())
    assert all(parameter.grad is not None for parameter in adapters.parameters("wide").values())
    second.backward()
    assert all(parameter.grad is not None for parameter in adapters.parameters("small").values())


def test_an_optimizer_trains_what_rows_read(adapters: Adapters) -> None:
    optimizer = torch.optim.SGD([*adapters.parameters("small").values(), *adapters.parameters("wide").values()], lr=0.05)
    losses = []
    for _ in range(30):
        with adapters.rows(["wide", "small"]):
            loss = (adapters.model(IDS[:2]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    with adapters.rows(["wide", "small"]):
        both = adapters.model(IDS[:2])
    torch.testing.assert_close(both[1:], alone(adapters, "small", IDS[1:2]), rtol=1e-5, atol=1e-6)


@pytest.fixture
def graphs(adapters: Adapters) -> Iterator[Callable[[], int]]:
    count = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal count
        count += 1
        return aot_eager(module, inputs)

    adapters.model.compile(backend=backend, fullgraph=True)
    yield lambda: count
    torch._dynamo.reset()


def test_one_graph_as_the_assignment_changes(adapters: Adapters, graphs: Callable[[], int]) -> None:
    base = copy.deepcopy(adapters)
    with adapters.rows(ASSIGNMENTS[0]):
        adapters.model(IDS).sum().backward()
    assert graphs() == 1
    for name in adapters.names:
        for parameter in adapters.parameters(name).values():
            parameter.grad = None
    with torch.compiler.set_stance("fail_on_recompile"):
        for names in ASSIGNMENTS:
            with adapters.rows(names):
                found = adapters.model(IDS)
                found.square().sum().backward()
            with base.rows(names):
                expected = base.model(IDS)
                expected.square().sum().backward()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            adapters.scale("wide", 0.5)
            base.scale("wide", 0.5)
        for name in adapters.names:
            for key, parameter in adapters.parameters(name).items():
                torch.testing.assert_close(parameter.grad, base.parameters(name)[key].grad, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
    assert graphs() == 1
    adapters.model(IDS).sum().backward()  # outside rows: the other graph
    assert graphs() == 2


def test_adding_an_adapter_keeps_the_graph_when_there_is_room(adapters: Adapters, graphs: Callable[[], int]) -> None:
    adapters.reserve(num_adapters=6)
    with adapters.rows(["wide", "small", None, None]):
        adapters.model(IDS).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(3):
            name = f"more {number}"
            adapters.add(name, LoRA(rank=3), targets=["query", "head"])
            randomise(adapters, name)
            with adapters.rows([name, "wide", None, "biased"]):
                found = adapters.model(IDS)
                found.sum().backward()
            adapters.delete("small") if number == 1 else None
    assert graphs() == 1


def test_a_python_assignment_recompiles(adapters: Adapters) -> None:
    """The control: the same harness on an assignment that is Python."""
    del adapters
    model = nn.Linear(4, 4)
    names = ["a"]

    def forward(x: Tensor) -> Tensor:
        return model(x) * (2 if names[0] == "a" else 3)

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    compiled(torch.randn(2, 4))
    names[0] = "b"
    with pytest.raises(RuntimeError, match="recompile"), torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("names", "code"),
    [(["wide", "smal", None, None], "unknown-adapter"), ([], "rows"), ("wide", "rows"), (["wide", "small"], "row-count")],
    ids=str,
)
def test_wrong_rows(adapters: Adapters, names: list[str | None], code: str) -> None:
    before = alone(adapters, "wide", IDS)
    with pytest.raises(OnegraphError) as raised, adapters.rows(names):
        adapters.model(IDS)
    assert raised.value.code == code
    assert torch.equal(adapters.model(IDS), before)


def test_numbers_of_one_axis_for_an_embedding() -> None:
    """Positions of all rows; with as many as there are rows they could be a class for each, which is another output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4))
    adapters = attach(model, LoRA(rank=2), targets=["0"])
    for parameter in adapters.parameters().values():
        nn.init.normal_(parameter)
    ids = torch.tensor([0, 3, 5])
    alone = model(ids)
    with adapters.rows(["default", None]):
        torch.testing.assert_close(model(ids)[0], alone)
        torch.testing.assert_close(model(ids[None, None]), model(ids).unsqueeze(1))  # (1, 1, T), the same for every row
        for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
            with pytest.raises(Exception, match="rows-ambiguous"):
                run(ids[:2])
        torch.testing.assert_close(model(ids[:2, None])[0, 0], alone[0])
    with adapters.rows(["default"]):
        torch.testing.assert_close(model(ids[:1])[0], alone[:1])


def test_wrong_number_of_rows_when_compiled(adapters: Adapters, graphs: Callable[[], int]) -> None:
    with adapters.rows(["wide", "small", None, None]):
        adapters.model(IDS)
    with pytest.raises(Exception, match="rows were named"), adapters.rows(["wide", "small"]):
        adapters.model(IDS)


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_wrong_rows_of_a_compiled_region_are_our_error(adapters: Adapters, regions: str) -> None:
    compile(adapters.model, backend="eager", regions=regions)
    with adapters.rows(["wide", "small", None, None]):
        right = adapters.model(IDS)
    with pytest.raises(AdapterError) as raised, adapters.rows(["wide", "small"]):
        adapters.model(IDS)
    assert raised.value.code == "row-count"
    assert "hint:" in str(raised.value)
    with adapters.rows(["wide", "small", None, None]):
        torch.testing.assert_close(adapters.model(IDS), right)


def test_the_texts_that_a_graph_fails_with_are_from_no_variable_around_them() -> None:
    inside = [code for code in row_errors._require.__code__.co_consts if isinstance(code, CodeType)]
    assert len(inside) == 2  # torch before 2.12 can't trace another one
    assert not any(code.co_freevars for code in inside)


def test_moving_inside_rows(adapters: Adapters) -> None:
    with adapters.rows(["wide", "small"]):
        expected = adapters.model(IDS[:2])
        adapters.model.double()
        adapters.load_tensors("small", {path: {k: t * 2 for k, t in v.items()} for path, v in adapters.tensors("small").items()})
        found = adapters.model(IDS[:2])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[:1].float(), expected[:1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[1:].float(), expected[1:], rtol=1e-2, atol=1e-2)  # it reads the moved memory, which has changed


def test_rows_end_where_they_began(adapters: Adapters) -> None:
    with adapters.rows(["wide", "small"]):
        outer = adapters.model(IDS[:2])
        with adapters.rows([None]):
            torch.testing.assert_close(adapters.model(IDS[:1]), alone_base(adapters, IDS[:1]))
        torch.testing.assert_close(adapters.model(IDS[:2]), outer)
        with pytest.raises(ZeroDivisionError), adapters.rows([None, None]):
            raise ZeroDivisionError
        torch.testing.assert_close(adapters.model(IDS[:2]), outer)
    copy.deepcopy(adapters.model)(IDS)  # a copy runs without rows


def test_who_listens_hears_of_rows(adapters: Adapters) -> None:
    alone_now = [id(leaf) for leaf in adapters.running_leaves()]
    heard: list[list[int]] = []
    adapters.listeners.append(lambda: heard.append([id(leaf) for leaf in adapters.running_leaves()]))
    with adapters.rows(["wide", "small"]):
        assert len(heard) == 1
        assert set(heard[0]) > set(alone_now)  # the memory that the rows read: where averaging over processes hangs itself on


def test_disabled_inside_rows_is_the_base_model(adapters: Adapters) -> None:
    with adapters.rows(["wide", "small"]):
        outer = adapters.model(IDS[:2])
        with adapters.disabled():
            assert torch.equal(adapters.model(IDS[:2]), alone_base(adapters, IDS[:2]))
        assert torch.equal(adapters.model(IDS[:2]), outer)


def test_a_copy_made_inside_rows_is_outside_of_them(adapters: Adapters) -> None:
    with adapters.rows(["small", "small"]):
        other = copy.deepcopy(adapters)
    other.reserve(num_adapters=9)  # hangs in again what runs
    torch.testing.assert_close(other.model(IDS), adapters.model(IDS))


def alone_base(adapters: Adapters, ids: Tensor) -> Tensor:
    model = copy.deepcopy(adapters)
    model.use(None)
    output: Tensor = model.model(ids)
    return output
