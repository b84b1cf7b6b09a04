"""Random actions on many adapters of several methods, on one compiled model: each output that of the adapter alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onegraph.adapters import Adapters, Slots
from onegraph.compiling import Watch
from stress import MismatchError, Stress, gradients

SIX = ["lora", "oft", "vera", "ia3", "loha", "hra"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # fourteen graphs, on a machine that may be busy
def test_32_adapters_of_6_methods_under_random_actions() -> None:
    stress = Stress(seed=1, kinds=SIX, num_adapters=32)
    budget = stress.adapters.graphs
    assert len(stress.held) == 32
    assert {held.kind for held in stress.held.values()} == set(SIX)
    assert budget.training == budget.inference == 6
    assert stress.warm_up() == budget.training + budget.inference + budget.rows  # what print(adapters.graphs) says is so
    with Watch() as watch:
        stress.act(60)
    assert not watch.compilations
    assert sum(stress.done[action] for action in stress.actions) == 60
    assert stress.num_compared > 40


def test_by_blocks() -> None:
    stress = Stress(seed=2, kinds=["lora", "ia3"], num_adapters=9, regions="blocks")
    # The first block's input needs no gradient until the embedding has an adapter: in training a second variant of each graph.
    stress.warm_up()
    stress.warm_up()
    stress.act(25)


# Controls: the same harness on a model where something is wrong. Eager, nothing here is about graphs.


@pytest.fixture
def stress() -> Stress:
    return Stress(seed=3, kinds=["lora", "ia3", "vera"], num_adapters=12, regions=None)


def test_nothing_is_wrong_without_a_fault(stress: Stress) -> None:
    for action in stress.actions.values():
        action()
        stress.check_all()
    stress.check_slots()


def repeat(times: int, function: Callable[[], None]) -> None:
    for _ in range(times):
        function()


def two_slots(stress: Stress) -> tuple[str, str]:
    """Two adapters of one structure on a layer that both are on."""
    records = stress.adapters._records
    for one, first in records.items():
        for two, second in records.items():
            if one != two and first.structures.get("head") == second.structures.get("head") is not None:
                return one, two
    raise AssertionError("no two adapters share a layer")


def test_values_of_two_slots_exchanged(stress: Stress) -> None:
    one, two = two_slots(stress)
    record = stress.adapters._records
    structure = record[one].structures["head"]
    slots = stress.adapters.layers["head"].structures[structure]
    first, second = record[one].slots[structure], record[two].slots[structure]
    name = next(iter(slots.block.memory))
    with torch.no_grad():
        slots.block.memory[name][[first, second]] = slots.block.memory[name][[second, first]].clone()
    with pytest.raises(MismatchError, match="isn't what it was given"):
        stress.check_all()


def test_another_slot_on_one_layer(stress: Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping is right, but the layer that runs has another adapter's tensors."""
    one, two = two_slots(stress)
    records, use = stress.adapters._records, Adapters.use

    def wrong(self: Adapters, name: str | None) -> None:
        use(self, name)
        if name == one and self is stress.adapters:
            structure = records[one].structures["head"]
            self.layers["head"].activate(structure, records[two].slots[structure], records[two].slots[structure])

    monkeypatch.setattr(Adapters, "use", wrong)
    stress.adapters.use(one)
    stress.active = one
    with pytest.raises(MismatchError, match="inference with"):
        stress.infer(one)


def test_rows_in_another_order(stress: Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Callable[..., object] = Adapters.rows
    monkeypatch.setattr(Adapters, "rows", lambda self, names: rows(self, names[::-1]))
    with pytest.raises(MismatchError, match="rows"):
        repeat(10, stress.rows)


def test_a_lost_slot(stress: Stress) -> None:
    next(iter(stress.adapters._structures.values())).free.pop()
    with pytest.raises(MismatchError, match="slots, but"):
        stress.check_slots()


def test_a_slot_that_was_not_cleared(stress: Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "reset", lambda self, slot: None)

    def delete() -> None:
        name = stress.pick()
        stress.adapters.delete(name)
        del stress.held[name]
        stress.check_slots()

    with pytest.raises(MismatchError, match="isn't the identity"):
        repeat(6, delete)


def test_a_gradient_of_the_padding(stress: Stress) -> None:
    name = next(name for name, held in stress.held.items() if held.kind == "lora" and getattr(held.method, "rank", 6) < 6)
    for parameter in stress.adapters.parameters(name).values():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(MismatchError, match="padding"):
        gradients(stress.adapters, name)


def test_a_gradient_of_another_adapter(stress: Stress) -> None:
    _, two = two_slots(stress)
    parameter = next(iter(stress.adapters.parameters(two).values()))
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(MismatchError, match="has a gradient"):
        stress.check_all()


def test_a_setting_that_changed_by_itself(stress: Stress) -> None:
    name = stress.pick()
    stress.adapters.set_setting(name, "scale", {stress.held[name].targets[0]: 9.5})
    with pytest.raises(MismatchError, match="scale is"):
        stress.check_all()
