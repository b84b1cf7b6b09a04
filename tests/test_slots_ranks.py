"""Adapters of any rank up to the capacity share a graph, also where the rank decides more than a shape; without room, nothing is paid."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onegraph
from onegraph.adapters import Adapters, attach
from onegraph.checkpoint import read
from onegraph.compiling import Watch
from onegraph.errors import CheckpointError
from onegraph.methods import IA3, LoKr, LoRA, Method, MiSS, VBLoRA, WithBias

METHODS: dict[str, Callable[[int], Method]] = {
    "vblora": lambda rank: VBLoRA(rank=rank, num_vectors=6, vector_length=4),
    "miss": lambda rank: MiSS(rank=rank),
    "miss-mini": lambda rank: MiSS(rank=rank, form="mini", out_rank=4),
    "lokr": lambda rank: LoKr(rank=rank, decompose_both=True),
    "with-bias": lambda rank: WithBias(inner=MiSS(rank=rank)),
}
RANKS, CAPACITY = (1, 3, 9), 9  # both matrices of LoKr are full from 3 on on these layers
TARGETS = ["0", "2"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 36), nn.Tanh(), nn.Linear(36, 16)).double()


X = torch.randn(3, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def randomise(adapters: Adapters, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {
        path: {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in own.items()}
        for path, own in adapters.tensors(name).items()
    }
    adapters.load_tensors(name, values)


def alone(method: Method, seed: int) -> Adapters:
    adapters = attach(model(), method, targets=TARGETS, name="alone", dtype=None)
    randomise(adapters, "alone", seed)
    return adapters


def step(adapters: Adapters) -> Tensor:
    for parameter in adapters.model.parameters():
        parameter.grad = None
    output: Tensor = adapters.model(X)
    output.square().sum().backward()
    return output.detach()


def same_gradients(adapters: Adapters, name: str, other: Adapters) -> None:
    """Those of the true rank are equal, and the padding, or a form that isn't used, has none."""
    found, expected = adapters.parameters(name), other.parameters("alone")
    assert found.keys() == expected.keys()
    for key, parameter in adapters.held(name).items():
        if key not in expected:
            assert parameter.grad is None or not parameter.grad.any(), key
            continue
        gradient, wanted = parameter.grad, expected[key].grad
        assert gradient is not None
        assert wanted is not None
        assert wanted.any(), key
        own = gradient[tuple(slice(size) for size in wanted.shape)]
        torch.testing.assert_close(own, wanted, rtol=1e-8, atol=1e-9)
        assert torch.count_nonzero(own) == torch.count_nonzero(gradient), key


def with_room(how: str, method: Callable[[int], Method]) -> Adapters:
    """A model with an adapter "a" of rank 2 and room up to the capacity."""
    if how == "capacity":
        adapters = attach(model(), method(2), targets=TARGETS, name="a", dtype=None, capacity=CAPACITY)
        adapters.reserve(num_adapters=4)
    elif how == "reserve-method":
        adapters = attach(model(), LoRA(rank=1), targets=TARGETS, name="lora", dtype=None)
        adapters.reserve(num_adapters=4, rank=CAPACITY, method=method(2))
        adapters.add("a", method(2))
        adapters.delete("lora")
    else:  # two adapters are there, each on a graph of its own where the rank decides more than a shape
        adapters = attach(model(), method(2), targets=TARGETS, name="a", dtype=None)
        adapters.add("z", method(4))
        randomise(adapters, "a", 2)
        randomise(adapters, "z", 4)
        adapters.scale("z", 0.5)
        before = {}
        for name in ("z", "a"):
            adapters.use(name)
            before[name] = adapters.model(X).detach(), adapters.parameters()
        adapters.reserve(num_adapters=4, rank=CAPACITY)
        for name, (output, parameters) in before.items():
            adapters.use(name)
            torch.testing.assert_close(adapters.model(X), output, rtol=1e-12, atol=1e-12)
            assert all(parameter is parameters[key] for key, parameter in adapters.parameters().items())  # an optimizer goes on with them
    adapters.use("a")
    randomise(adapters, "a", 2)
    return adapters


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "capacity") for name in METHODS), ("miss", "reserve"), ("lokr", "reserve"), ("lokr", "reserve-method")]
)
def test_every_rank_up_to_the_capacity_is_on_one_graph(name: str, how: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    method = METHODS[name]
    adapters = with_room(how, method)
    onegraph.compile(adapters.model, backend="aot_eager", regions="whole")
    torch.testing.assert_close(step(adapters), step(one := alone(method(2), 2)), rtol=1e-9, atol=1e-9)
    same_gradients(adapters, "a", one)
    with Watch() as watch:
        for rank in RANKS:
            one = alone(method(rank), rank)
            one.save(tmp_path / "one.safetensors")
            adapters.load(tmp_path / "one.safetensors", name="file")
            adapters.use("file")
            torch.testing.assert_close(step(adapters), step(one), rtol=1e-9, atol=1e-9)
            same_gradients(adapters, "file", one)
            adapters.save(tmp_path / "again.safetensors", "file")
            first, again = read(tmp_path / "one.safetensors"), read(tmp_path / "again.safetensors")
            for part, layers in first.parts.items():
                assert {path: list(own) for path, own in again.parts[part].items()} == {path: list(own) for path, own in layers.items()}
                for path, own in layers.items():
                    for key, value in own.items():
                        assert torch.equal(torch.as_tensor(again.parts[part][path][key]), torch.as_tensor(value))
            adapters.merge("file")
            torch.testing.assert_close(adapters.model(X), one.model(X), rtol=1e-9, atol=1e-9)
            adapters.unmerge()
            with adapters.disabled():
                assert torch.equal(adapters.model(X), model()(X))
            adapters.delete("file")
            adapters.use("a")
    assert not watch.compilations
    assert (adapters.graphs.training, adapters.graphs.inference) == (1, 1)


@pytest.mark.parametrize("name", ["miss", "miss-mini", "lokr", "vblora"])
def test_rows_of_different_ranks(name: str) -> None:
    method = METHODS[name]
    adapters = with_room("capacity", method)
    adapters.add("b", method(7))
    randomise(adapters, "b", 7)
    with adapters.rows(["b", None, "a"]):
        output = adapters.model(X)
        output.square().sum().backward()
    expected = {"b": (0, alone(method(7), 7)), "a": (2, alone(method(2), 2))}
    torch.testing.assert_close(output[1:2], model()(X[1:2]), rtol=1e-12, atol=1e-12)
    for key, (row, one) in expected.items():
        own = one.model(X[row : row + 1])
        own.square().sum().backward()
        torch.testing.assert_close(output[row : row + 1], own, rtol=1e-9, atol=1e-9)
        same_gradients(adapters, key, one)


@pytest.mark.parametrize(("name", "graphs"), [("miss", 2), ("lokr", 2), ("vblora", 1)])
def test_without_room_another_rank_is_another_graph_and_is_counted(name: str, graphs: int) -> None:
    """The control: what isn't asked for isn't there, and costs nothing; VB-LoRA pads as LoRA does."""
    torch._dynamo.reset()
    method = METHODS[name]
    adapters = attach(model(), method(5), targets=TARGETS, name="a", dtype=None)
    assert not {"rank", "first_full", "second_full"} & set(adapters.setting_names("a")) - ({"rank"} if name == "vblora" else set())
    assert adapters.held("a").keys() == adapters.parameters("a").keys()
    adapters.add("b", method(1))
    assert (adapters.graphs.training, len(adapters.graphs.assignments)) == (graphs, graphs)
    onegraph.compile(adapters.model, backend="aot_eager", regions="whole")
    with Watch() as watch:
        for used in ("a", "b", "a", "b"):
            adapters.use(used)
            step(adapters)
    assert len(watch.compilations) == graphs


def test_layers_that_come_later_have_the_same_room() -> None:
    adapters = attach(model(), LoKr(rank=2, decompose_both=True), targets=["0"], name="a", dtype=None, capacity=CAPACITY)
    for name, method in {"b": LoKr(rank=9, decompose_both=True), "c": LoKr(rank=1, decompose_both=True), "d": LoKr(rank=3)}.items():
        adapters.add(name, method, targets=TARGETS)
    assert adapters.graphs.training == 1
    assert "first_up" in adapters.layers["2"].slots.block.shapes


def test_a_rank_above_the_capacity_grows_it_once() -> None:
    adapters = with_room("capacity", METHODS["miss"])
    adapters.add("b", MiSS(rank=10))
    randomise(adapters, "b", 10)
    adapters.use("b")
    torch.testing.assert_close(adapters.model(X), alone(MiSS(rank=10), 10).model(X), rtol=1e-9, atol=1e-9)
    assert adapters.graphs.training == 1


def test_copies_and_the_unused_form() -> None:
    adapters = with_room("capacity", METHODS["lokr"])
    adapters.add("full", LoKr(rank=9, decompose_both=True))
    randomise(adapters, "full", 9)
    again = copy.deepcopy(adapters)
    again.use("full")
    torch.testing.assert_close(again.model(X), alone(LoKr(rank=9, decompose_both=True), 9).model(X), rtol=1e-9, atol=1e-9)
    assert adapters.tensors("full")["0"].keys() == {"first", "second"}
    spare = next(key for key in adapters.held("full") if key.endswith("first_up"))
    with torch.no_grad():
        adapters.held("full")[spare].fill_(1.0)
    with pytest.raises(CheckpointError) as raised:
        adapters.save("never-written.safetensors", "full")
    assert raised.value.code == "beyond-rank"
    assert "either" in str(LoKr(first_form="either").check(adapters.layers["0"].layer))


def test_an_adapter_of_fewer_layers_has_the_graph_of_one_on_all_of_them() -> None:
    """Where a layer has room for several structures, the identity that it runs is that of the other adapter."""
    torch._dynamo.reset()
    adapters = attach(model(), IA3(), targets=TARGETS, overrides={"2": IA3(on_input=True)}, name="full", dtype=None)
    adapters.reserve(num_adapters=4)
    for kind in (IA3(), IA3(on_input=True), VBLoRA(rank=1, num_vectors=6, vector_length=4)):
        adapters.reserve(method=kind, targets=TARGETS)
    onegraph.compile(adapters.model, backend="aot_eager", regions="whole")
    adapters.use("full")
    step(adapters)
    with Watch() as watch:
        for name, kind, target in (("first", IA3(), "0"), ("second", IA3(on_input=True), "2")):
            adapters.add(name, kind, targets=[target])
            randomise(adapters, name, 3)
            adapters.use(name)
            one = attach(model(), kind, targets=[target], name="alone", dtype=None)
            randomise(one, "alone", 3)
            torch.testing.assert_close(step(adapters), step(one), rtol=1e-9, atol=1e-9)
            same_gradients(adapters, name, one)
        adapters.delete("full")
        adapters.use("first")
        step(adapters)
    assert not watch.compilations
    assert adapters.graphs.training == 1
    adapters.add("other way round", IA3(on_input=True), targets=["0"])  # on a layer where the others have a gain of the output
    assert adapters.graphs.training == 2
