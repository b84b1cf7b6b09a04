"""AdaLoRA's regulariser and allocator: PEFT's at every step, in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

from onegraph.errors import AdapterError, ConfigurationError, OnegraphError
from onegraph.methods import RankAllocator, orthogonality, rank_masks
from onegraph.methods.rank_allocation import BudgetSchedule

LETTERS = {"down": "A", "up": "B", "singular": "E"}


class Small(nn.Module):
    """Two linear layers and a convolution; its loss is found where PEFT looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.conv(h.reshape(-1, 2, 2, 2)))
        return SimpleNamespace(loss=self.second(h.flatten(1)).square().mean())


def peft_model(**settings: Any) -> Any:
    config = peft.AdaLoraConfig(target_modules=["first", "conv", "second"], lora_alpha=8, **settings)
    return peft.get_peft_model(Small().double(), config).base_model


def tensors_of(model: Any) -> dict[str, dict[str, nn.Parameter]]:
    """PEFT's Parameters under our names and shapes, as copies."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for path in ("first", "conv", "second"):
        module = model.model.get_submodule(path)
        own = {name: getattr(module, f"lora_{letter}")["default"].detach().clone() for name, letter in LETTERS.items()}
        if path == "conv":
            own["down"] = own["down"].reshape(-1, 2, 3, 3)
        own["singular"] = own["singular"].flatten()
        found[path] = {name: nn.Parameter(value) for name, value in own.items()}
    return found


def take(model: Any, tensors: dict[str, dict[str, nn.Parameter]], ranks: int) -> None:
    """Copy PEFT's values and gradients, as they are before it allocates."""
    for path, own in tensors.items():
        module = model.model.get_submodule(path)
        for name, letter in LETTERS.items():
            theirs = getattr(module, f"lora_{letter}")["default"]
            gradient = torch.zeros_like(own[name])
            place = (slice(None), slice(ranks)) if name == "up" else slice(ranks)
            gradient[place] = theirs.grad.reshape(gradient[place].shape)
            own[name].grad = gradient
            own[name].data[place] = theirs.detach().reshape(gradient[place].shape)


def their_singular(model: Any) -> dict[str, Tensor]:
    return {path: model.model.get_submodule(path).lora_E["default"].detach().flatten() for path in ("first", "conv", "second")}


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return backend


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("padded", [False, True], ids=["true-rank", "padded"])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_whole_schedule_is_peft_s(interval: int, padded: bool, compiled: bool) -> None:
    model = peft_model(init_r=5, target_r=2, total_step=24, tinit=4, tfinal=6, deltaT=interval)
    tensors = tensors_of(model)
    if padded:
        wide = {
            path: {
                "down": nn.functional.pad(own["down"].data.flatten(1), (0, 0, 0, 3)).reshape(8, *own["down"].shape[1:]),
                "up": nn.functional.pad(own["up"].data, (0, 3)),
                "singular": nn.functional.pad(own["singular"].data, (0, 3)),
            }
            for path, own in tensors.items()
        }
        tensors = {path: {name: nn.Parameter(value) for name, value in own.items()} for path, own in wide.items()}
    allocator = RankAllocator(
        tensors,
        target_rank=2,
        total_steps=24,
        warm_up_steps=4,
        final_steps=6,
        interval=interval,
        ranks=dict.fromkeys(tensors, 5) if padded else None,
    )
    graphs: list[Any] = []
    step = torch.compile(allocator.step, backend=counting(graphs), fullgraph=True) if compiled else allocator.step
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
    left: list[int] = []
    for number in range(1, 25):
        optimizer.zero_grad()
        model(torch.randn(4, 6, dtype=torch.float64)).loss.backward()
        optimizer.step()
        take(model, tensors, 5)
        step()
        model.update_and_allocate(number)
        for path, singular in their_singular(model).items():
            assert torch.equal(tensors[path]["singular"].data[:5], singular), f"step {number}, {path}"
        pattern = model.peft_config["default"].rank_pattern
        if pattern:
            theirs = {name.removeprefix("model.").removesuffix(".lora_E.default"): kept for name, kept in pattern.items()}
            assert allocator.rank_pattern() == theirs
        left.append(sum(sum(kept) for kept in allocator.rank_pattern().values()))
    assert left[:4] == [15] * 4
    assert sorted(set(left), reverse=True) == list(dict.fromkeys(left))  # it only falls
    assert left[17] == left[-1] == 6
    assert len(set(left)) > 3
    assert len(graphs) == (1 if compiled else 0)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_that_asks_the_host_would_be_seen() -> None:
    """The control of the one graph: a threshold taken with ``item`` is no full graph."""

    def step(scores: Tensor, singular: Tensor) -> Tensor:
        threshold = scores.kthvalue(2).values.item()
        return singular.masked_fill(scores <= threshold, 0.0) if threshold > 0 else singular

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(step, backend="eager", fullgraph=True)(torch.rand(5), torch.rand(5))


def plain_tensors(rank: int = 4, layers: int = 2) -> dict[str, dict[str, nn.Parameter]]:
    shapes = {"down": (rank, 6), "up": (5, rank), "singular": (rank,)}
    return {
        f"layer{number}": {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
        for number in range(layers)
    }


def with_gradients(tensors: dict[str, dict[str, nn.Parameter]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for own in tensors.values():
        for tensor in own.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def test_importance_is_the_paper_s() -> None:
    """Against the equations, number by number, until the first allocation."""
    tensors = plain_tensors()
    allocator = RankAllocator(tensors, target_rank=1, total_steps=3, beta1=0.7, beta2=0.4)
    mean = {path: {name: np.zeros(value.shape) for name, value in own.items()} for path, own in tensors.items()}
    deviation = {path: {name: np.zeros(value.shape) for name, value in own.items()} for path, own in tensors.items()}
    before = {path: own["singular"].detach().clone() for path, own in tensors.items()}
    with_gradients(tensors, 1)
    allocator.step()
    scores = {}
    for path, own in tensors.items():
        for name, value in own.items():
            held = (before[path] if name == "singular" else value).detach().numpy()
            importance = np.abs(held * value.grad.numpy())
            mean[path][name] = 0.7 * mean[path][name] + 0.3 * importance
            deviation[path][name] = 0.4 * deviation[path][name] + 0.6 * np.abs(importance - mean[path][name])
        element = {name: mean[path][name] * deviation[path][name] for name in own}
        scores[path] = element["singular"] + element["down"].mean(1) + element["up"].mean(0)
    ranking = sorted((score, path, place) for path, values in scores.items() for place, score in enumerate(values))
    budget = int((8 - 2) * (1 - 1 / 3) ** 3 + 2)
    assert 2 < budget < 8
    gone = {(path, place) for _, path, place in ranking[: 8 - budget]}
    for path, own in tensors.items():
        expected = [0.0 if (path, place) in gone else before[path][place].item() for place in range(4)]
        assert own["singular"].tolist() == expected


def test_the_choice_is_held_after_the_last_allocation() -> None:
    tensors = plain_tensors()
    allocator = RankAllocator(tensors, target_rank=1, total_steps=6, final_steps=3)
    patterns: list[dict[str, list[bool]]] = []
    for number in range(1, 7):
        with_gradients(tensors, number)
        for own in tensors.values():
            own["singular"].data.add_(1.0)  # what an optimizer's step does to those that were set to 0
        allocator.step()
        patterns.append(allocator.rank_pattern())
        assert {path: (own["singular"] != 0).tolist() for path, own in tensors.items()} == patterns[-1]
    assert patterns[2] == patterns[3] == patterns[4] == patterns[5]
    assert [sum(sum(kept) for kept in pattern.values()) for pattern in patterns[:3]] == [3, 2, 2]


def test_nothing_is_taken_when_the_target_is_the_start() -> None:
    """PEFT asks for the 0th smallest value here, and stops."""
    tensors = plain_tensors()
    before = {path: own["singular"].detach().clone() for path, own in tensors.items()}
    allocator = RankAllocator(tensors, target_rank=4, total_steps=3)
    for number in range(1, 4):
        with_gradients(tensors, number)
        allocator.step()
    assert all(torch.equal(own["singular"], before[path]) for path, own in tensors.items())


def test_going_on_from_a_state_is_exact() -> None:
    def trained(allocator: RankAllocator, tensors: dict[str, dict[str, nn.Parameter]], numbers: range) -> None:
        for number in numbers:
            with_gradients(tensors, number)
            allocator.step()

    settings = {"target_rank": 1, "total_steps": 12, "final_steps": 3, "interval": 2}
    tensors = plain_tensors()
    copy = {path: {name: nn.Parameter(value.detach().clone()) for name, value in own.items()} for path, own in tensors.items()}
    whole, first = RankAllocator(tensors, **settings), RankAllocator(copy, **settings)
    trained(whole, tensors, range(12))
    trained(first, copy, range(5))
    second = RankAllocator(copy, **settings)
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    trained(second, copy, range(5, 12))
    assert second.rank_pattern() == whole.rank_pattern()
    for path, own in tensors.items():
        assert torch.equal(own["singular"], copy[path]["singular"])
    with pytest.raises(ConfigurationError) as raised:
        RankAllocator(plain_tensors(layers=3), **settings).load_state_dict(first.state_dict())
    assert raised.value.code == "allocator-state"
    assert "layer2" in str(raised.value)


def test_a_step_without_gradients_is_an_error_and_changes_nothing() -> None:
    tensors = plain_tensors()
    allocator = RankAllocator(tensors, target_rank=1, total_steps=4)
    with_gradients(tensors, 1)
    tensors["layer1"]["up"].grad = None
    before = {name: value.clone() for name, value in allocator.state_dict().items()}
    with pytest.raises(AdapterError) as raised:
        allocator.step()
    assert raised.value.code == "no-gradient"
    assert "layer1.up" in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in allocator.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "code", "named"),
    [
        ({"total_steps": 0}, "whole-number", "total_steps=0"),
        ({"total_steps": 10, "interval": 0}, "whole-number", "interval=0"),
        ({"total_steps": 10, "warm_up_steps": 6, "final_steps": 4}, "budget-phases", "warm_up_steps=6"),
        ({"total_steps": 10, "target_rank": 5}, "budget-target", "20"),
        ({"total_steps": 10, "target_rank": -1}, "whole-number", "target_rank=-1"),
        ({"total_steps": 10, "beta1": 1.0}, "smoothing", "beta1=1.0"),
        ({"total_steps": 10, "ranks": {"layer0": 4}}, "allocator-tensors", "layer1"),
        ({"total_steps": 10, "ranks": {"layer0": 4, "layer1": 5}}, "allocator-tensors", "layer1"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any], code: str, named: str) -> None:
    with pytest.raises(OnegraphError) as raised:
        RankAllocator(plain_tensors(layers=2), **{"target_rank": 1, **settings})
    assert raised.value.code == code
    if code != "budget-target":
        assert named in str(raised.value)


@pytest.mark.parametrize("change", ["missing", "shape", "empty"])
def test_bad_tensors(change: str) -> None:
    tensors = plain_tensors()
    if change == "missing":
        del tensors["layer1"]["singular"]
    elif change == "shape":
        tensors["layer1"]["singular"] = nn.Parameter(torch.zeros(3))
    else:
        tensors = {}
    with pytest.raises(ConfigurationError) as raised:
        RankAllocator(tensors, target_rank=1, total_steps=5)
    assert raised.value.code == "allocator-tensors"


@pytest.mark.parametrize(("total", "start", "end", "interval"), [(20, 0, 0, 1), (40, 5, 10, 3), (1000, 100, 200, 10)])
def test_the_budget_is_peft_s(total: int, start: int, end: int, interval: int) -> None:
    model = peft_model(init_r=7, target_r=3, total_step=total, tinit=start, tfinal=end, deltaT=interval)
    schedule = BudgetSchedule(initial=21, target=9, total_steps=total, warm_up_steps=start, final_steps=end, interval=interval)
    for step in range(total + 1):
        budget, allocates = model.rankallocator.budget_schedule(step)
        assert schedule.budget(step) == budget
        if step < total - end:
            assert schedule.allocates(step) == allocates
    assert schedule.allocates(total - end)


# The regulariser


def test_orthogonality_is_what_peft_adds_to_the_loss() -> None:
    model = peft_model(init_r=5, target_r=2, total_step=10, orth_reg_weight=0.5)
    tensors = tensors_of(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    plain = model.model(x).loss
    torch.testing.assert_close(plain + 0.5 * orthogonality(tensors), model(x).loss, rtol=1e-12, atol=1e-12)


def test_orthogonality_is_differentiable_and_0_where_it_holds() -> None:
    tensors = plain_tensors()
    values = [tensor.requires_grad_() for own in tensors.values() for name, tensor in own.items() if name != "singular"]

    def function(*given: Tensor) -> Tensor:
        rest = iter(given)
        return orthogonality({path: {"down": next(rest), "up": next(rest)} for path in tensors})

    assert torch.autograd.gradcheck(function, values, fast_mode=True)
    square = torch.linalg.qr(torch.randn(5, 5)).Q
    assert orthogonality({"layer": {"down": square[:3], "up": square[:, :3]}}).item() < 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
def test_orthogonality_ignores_padding_and_is_one_graph() -> None:
    tensors = plain_tensors(rank=3)
    wide = {
        path: {
            "down": nn.functional.pad(own["down"].data, (0, 0, 0, 4)).requires_grad_(),
            "up": nn.functional.pad(own["up"].data, (0, 4)).requires_grad_(),
            "singular": nn.functional.pad(own["singular"].data, (0, 4)),
        }
        for path, own in tensors.items()
    }
    graphs: list[Any] = []
    compiled = torch.compile(orthogonality, backend=counting(graphs), fullgraph=True)
    masks = rank_masks(wide, dict.fromkeys(wide, 3))
    found = compiled(wide, masks)
    torch.testing.assert_close(found, orthogonality(tensors), rtol=1e-12, atol=1e-12)
    found.backward()
    assert wide["layer0"]["down"].grad[:3].all()
    assert not wide["layer0"]["down"].grad[3:].any()
    assert not wide["layer0"]["up"].grad[:, 3:].any()
    compiled(wide, rank_masks(wide, dict.fromkeys(wide, 2)))  # an adapter of another rank: other masks, the same graph
    assert len(graphs) == 1
    assert orthogonality(wide).item() > found.item()  # without the masks padding counts


def test_orthogonality_keeps_its_precision_under_autocast() -> None:
    tensors = {path: {name: value.float() for name, value in own.items()} for path, own in plain_tensors().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = orthogonality(tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, orthogonality(tensors), rtol=1e-6, atol=0)
