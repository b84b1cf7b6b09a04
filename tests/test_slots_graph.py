"""The promise: twelve adapters, switched, disabled, rescaled, trained, on one graph for training and one for inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from onegraph.adapters import Adapters, attach
from onegraph.methods import BOFT, HRA, OFT, DoRA, LoRA, Method, VeRA

RANKS = {f"adapter-{rank}": rank for rank in (4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16)}
TARGETS = ["embed", "query", "up", "conv"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.nn.functional.gelu(self.query(self.norm(x))).to(self.up.weight.dtype))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.conv = nn.Conv1d(8, 4, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.conv(x.transpose(1, 2))


@dataclass
class Graphs:
    """A backend that counts what it is given."""

    inner: Callable[..., Any] = aot_eager
    count: int = 0
    num_nodes: list[int] = field(default_factory=list)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.count += 1
        self.num_nodes.append(len(module.graph.nodes))
        return self.inner(module, inputs)


class Switchable(Protocol):
    """What the harness drives: ours, and as a control one that keeps its state in Python values."""

    model: nn.Module

    def use(self, name: str | None) -> None: ...

    def scale(self, name: str, factor: float) -> None: ...

    def parameters(self, name: str) -> dict[str, nn.Parameter]: ...


def drive(switchable: Switchable, graphs: Graphs, names: list[str], see: Callable[[str | None, Tensor, Tensor, bool], None]) -> None:
    """Warm up, then use, rescale and disable each adapter, in training and in inference, where a recompile is an error."""
    model, ids = switchable.model, torch.randint(0, 16, (2, 6))
    optimizers = {name: torch.optim.AdamW(switchable.parameters(name).values(), lr=0.05, weight_decay=0.1) for name in names}

    def train(name: str | None) -> None:
        model.train()
        output = model(ids)
        output.square().mean().backward()
        see(name, ids, output.detach(), True)
        if name is not None:
            optimizers[name].step()
            optimizers[name].zero_grad()

    def infer(name: str | None) -> None:
        model.eval()
        with torch.no_grad():
            see(name, ids, model(ids), False)

    switchable.use(names[0])
    train(names[0])
    infer(names[0])
    warm = graphs.count
    with torch.compiler.set_stance("fail_on_recompile"):
        for round_ in range(2):
            for name in names:
                switchable.use(name)
                train(name)
                switchable.scale(name, 0.5 + round_)
                train(name)
                infer(name)
                switchable.use(None)
                train(None)
                infer(None)
                switchable.use(name)
                infer(name)
    assert graphs.count == warm == 2


def uncompiled(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """What the tests that only count run."""
    return module


def compiled(model: nn.Module, inner: Callable[..., Any] = uncompiled) -> Graphs:
    graphs = Graphs(inner)
    model.compile(backend=graphs, fullgraph=True)
    return graphs


def close(found: Tensor, expected: Tensor) -> None:
    """Equal to float32 round-off of the largest element; another adapter, scale or slot is off by as much as the values are."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()) + 1e-6)


def twelve(*, dropout: float = 0.0) -> tuple[Adapters, Model]:
    """A model with twelve adapters at random values, and the plain model it was made from."""
    base = Model()
    model = copy.deepcopy(base)
    adapters: Adapters | None = None
    for name, rank in RANKS.items():
        method = LoRA(rank=rank, alpha=2.0 * rank + 1, dropout=dropout)
        if adapters is None:
            adapters = attach(model, method, targets=TARGETS, name=name, capacity=16)
        else:
            adapters.add(name, method)
        random = {
            path: {key: torch.randn(tensor.shape) * 0.3 for key, tensor in tensors.items()}
            for path, tensors in adapters.tensors(name).items()
        }
        adapters.load_tensors(name, random)
    assert adapters is not None
    return adapters, base


def fresh(adapters: Adapters, base: Model, name: str) -> tuple[Adapters, Model]:
    """An eager model with one adapter of the true rank."""
    model = copy.deepcopy(base)
    method = next(iter(adapters.methods(name).values()))
    alone = attach(model, method, targets=TARGETS, name=name)
    alone.load_tensors(name, {path: {key: t.clone() for key, t in tensors.items()} for path, tensors in adapters.tensors(name).items()})
    for setting in adapters.setting_names(name):
        alone.set_setting(name, setting, adapters.settings_of(name, setting))
    return alone, model


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "dropout-set-to-0"])
def test_twelve_adapters_one_graph(dropout: float) -> None:
    adapters, base = twelve(dropout=dropout)
    for name in RANKS:
        if dropout:
            assert list(adapters.settings_of(name, "dropout").values()) == pytest.approx([0.1] * len(adapters.layers))
            adapters.set_setting(name, "dropout", 0.0)
    checked = 0

    def see(name: str | None, ids: Tensor, output: Tensor, training: bool) -> None:
        nonlocal checked
        if name is None:
            close(output, base(ids).detach())
            assert all(parameter.grad is None for parameter in adapters.model.parameters())
        else:
            alone, model = fresh(adapters, base, name)
            model.train(training)
            expected = model(ids)
            close(output, expected.detach())
            if training:
                expected.square().mean().backward()
                own = adapters.parameters(name)
                for key, parameter in alone.parameters(name).items():
                    assert parameter.grad is not None
                    whole = own[key].grad
                    assert whole is not None
                    axis = {"down": 0, "up": 1}[key.rsplit(".", 1)[1]]
                    rank = RANKS[name]
                    close(whole.narrow(axis, 0, rank), parameter.grad)
                    assert not whole.narrow(axis, rank, 16 - rank).any()  # padding gets no gradient
        checked += 1

    graphs = compiled(adapters.model, aot_eager)
    drive(adapters, graphs, list(RANKS), see)
    assert checked == 2 + 2 * 12 * 6
    assert graphs.num_nodes[0] > 20  # the whole model, not a piece of it
    for name, rank in RANKS.items():  # after AdamW with weight decay, padding is still zero
        for path, layer in adapters.layers.items():
            record = adapters.tensors(name)[path]
            assert record["down"].shape[0] == rank
            slot = list(RANKS).index(name) + 1
            assert not layer.slots.parameters(slot)["down"].detach()[rank:].any()
            assert not layer.slots.parameters(slot)["up"].detach()[:, rank:].any()
    # The identity is still one.
    assert all(not value.any() for layer in adapters.layers.values() for value in layer.slots.parameters(0).values())


class PythonScaled(nn.Module):
    """The usual way: tensors for each adapter, and its scale as a Python float."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.weight = base.weight
        self.down = nn.Parameter(torch.randn(4, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 4))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.down.T) @ self.up.T


class PythonState:
    """Drives such layers; one set of tensors is enough to show it."""

    def __init__(self) -> None:
        self.model = Model().requires_grad_(False)
        self.layers = []
        for block in self.model.blocks:
            block.query = PythonScaled(block.query)
            self.layers.append(block.query)

    def use(self, name: str | None) -> None:
        for layer in self.layers:
            layer.scale = 0.0 if name is None else 1.0

    def scale(self, name: str, factor: float) -> None:
        for layer in self.layers:
            layer.scale = factor

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        return {f"{index}.{key}": value for index, layer in enumerate(self.layers) for key, value in layer.named_parameters(recurse=False)}


def test_the_same_harness_fails_on_python_values() -> None:
    state = PythonState()
    graphs = compiled(state.model, aot_eager)
    with pytest.raises(RuntimeError, match="recompile"):
        drive(state, graphs, ["a", "b"], lambda name, ids, output, training: None)


def test_equal_blocks_share_one_compilation() -> None:
    adapters, _ = twelve()
    graphs = Graphs(uncompiled)
    ids = torch.randint(0, 16, (2, 6))
    for block in adapters.model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    expected = {}
    for name in RANKS:
        adapters.use(name)
        adapters.model(ids).sum().backward()
        expected[name] = graphs.count
    assert set(expected.values()) == {1}
    adapters.set_setting("adapter-4", "scale", {path: float(number) for number, path in enumerate(adapters.layers)})  # differs by layer
    adapters.use("adapter-4")
    adapters.model(ids).sum().backward()
    assert graphs.count == 1


def test_blocks_with_a_python_value_each_do_not_share() -> None:
    state = PythonState()
    graphs = Graphs(uncompiled)
    for number, block in enumerate(state.model.blocks):
        block.query.scale = float(number)
        block.compile(backend=graphs, fullgraph=True)
    state.model(torch.randint(0, 16, (2, 6)))
    assert graphs.count > 1


def test_adding_deleting_and_growing_slots_keeps_the_graph() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=4), targets=TARGETS, name="first")
    ids = torch.randint(0, 16, (2, 6))
    graphs = compiled(model)
    model(ids).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(9):
            adapters.add(f"more-{number}", LoRA(rank=1 + number % 4, alpha=number, init="gaussian"))
            adapters.use(f"more-{number}")
            model(ids).sum().backward()
            if number % 3 == 2:
                adapters.delete(f"more-{number - 1}")
        adapters.use("first")
        model(ids).sum().backward()
    assert graphs.count == 1


def test_a_larger_rank_costs_one_graph_and_reserve_saves_it() -> None:
    ids = torch.randint(0, 16, (2, 6))
    for reserve, expected in ((None, 2), (16, 1)):
        model = Model()
        adapters = attach(model, LoRA(rank=4), targets=TARGETS, name="first")
        if reserve is not None:
            adapters.reserve(num_adapters=4, rank=reserve)
        graphs = compiled(model)
        model(ids).sum().backward()
        for rank in (6, 8, 5):
            adapters.add(f"rank-{rank}", LoRA(rank=rank))
            adapters.use(f"rank-{rank}")
            model(ids).sum().backward()
        adapters.use("first")
        model(ids).sum().backward()
        assert graphs.count == expected


def test_one_dynamic_graph_for_all_batch_sizes() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=4, dropout=0.1, rank_dropout=0.1), targets=TARGETS, name="a")
    adapters.add("b", LoRA(rank=2))
    graphs = Graphs(uncompiled)
    model.compile(backend=graphs, fullgraph=True, dynamic=True)
    for rows, positions in ((2, 6), (5, 7), (3, 9)):
        for name in ("a", "b"):
            adapters.use(name)
            model(torch.randint(0, 16, (rows, positions))).sum().backward()
    assert graphs.count == 1


@pytest.mark.parametrize("reserved", [False, True])
def test_adapters_on_narrower_layers_share_the_graph_of_projections_for_wider_ones(reserved: bool) -> None:
    def plain() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 5))

    x = torch.randn(3, 6)
    model = plain()
    adapters = attach(model, VeRA(rank=8), targets=["0", "2"] if not reserved else ["4"], name="first")
    if reserved:
        adapters.reserve(method=VeRA(rank=8), targets=["0", "2", "4"])
    graphs = compiled(model)
    model(x)
    before = graphs.count
    adapters.add("narrow", VeRA(rank=4), targets=["4"] if reserved else ["2"])
    path = "4" if reserved else "2"
    adapters.use("narrow")
    adapters.parameters()[f"{path}.gain_up"].data.fill_(1.0)
    alone = plain()
    attach(alone, VeRA(rank=4), targets=[path]).parameters()[f"{path}.gain_up"].data.fill_(1.0)
    torch.testing.assert_close(model(x), alone(x))
    assert adapters.tensors("narrow")[""]["projection_down"].shape == (4, 9 if reserved else 20)
    assert graphs.count == before
    # the other way round the shared tensors have to grow, and the first adapter keeps its own
    adapters = attach(alone, VeRA(rank=4), targets=["0", "2", "4"], name="wide")
    adapters.use("default")
    torch.testing.assert_close(alone(x), model(x))


@pytest.mark.parametrize("method", [DoRA(rank=2), OFT(block_size=4), BOFT(block_size=4), HRA(rank=2)], ids=lambda method: method.name)
def test_autocast_is_in_a_graph_only_where_it_is_on(method: Method) -> None:
    """Torch keeps no traced graph with autocast in it: a warm start would trace and differentiate again."""
    seen: list[bool] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.append("_enter_autocast" in graph.code)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 8))
    adapters = attach(model, method, targets=["0"])
    for parameter in adapters.parameters().values():
        nn.init.normal_(parameter)
    run = torch.compile(model, backend=look, fullgraph=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(run(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run(x), model(x))
    assert seen == [False, True]
