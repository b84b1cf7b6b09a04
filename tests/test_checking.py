"""The check finds planted faults, names them, and stays silent on healthy models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import onegraph as og
from onegraph.checking import compare, compare_step
from onegraph.compiling import Watch
from onegraph.errors import CompileError, ConfigurationError, MismatchError, NumericsError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x)) + x
        result: Tensor = self.last(x)
        return result


def faulty(spoil: Callable[[list[Any]], list[Any]], *, backward: bool = True) -> Any:
    """A backend that runs the traced graph and spoils what it returns."""

    def plain(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    def spoilt(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*arguments: Tensor) -> Any:
            return type_kept(graph(*arguments), spoil)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=plain if backward else spoilt, bw_compiler=spoilt if backward else plain)


def type_kept(result: Any, spoil: Callable[[list[Any]], list[Any]]) -> Any:
    return type(result)(spoil(list(result)))


def zero_one(outputs: list[Any]) -> list[Any]:
    for position, output in enumerate(outputs):
        if isinstance(output, Tensor) and output.ndim == 2:
            outputs[position] = torch.zeros_like(output)
            return outputs
    return outputs


def swap_rows(outputs: list[Any]) -> list[Any]:
    outputs[0] = outputs[0].flip(0)
    return outputs


def drop_scale(outputs: list[Any]) -> list[Any]:
    return [output * 0.5 if isinstance(output, Tensor) and output.is_floating_point() else output for output in outputs]


def adapted(**options: Any) -> tuple[Net, og.Adapters]:
    torch.manual_seed(0)
    net = Net()
    return net, og.attach(net, og.LoRA(rank=2, **options), targets=["first", "second", "last"])


FAULTS = {
    "one gradient zero": faulty(zero_one),
    "gradients halved": faulty(drop_scale),
    "rows swapped": faulty(swap_rows, backward=False),
}


@pytest.mark.parametrize("backend", FAULTS.values(), ids=FAULTS)
def test_planted_fault_is_found(backend: Any) -> None:
    net, _ = adapted()
    report = og.check(net, torch.randn(4, 6), backend=backend)
    assert not report.right
    with pytest.raises(MismatchError):
        report.raise_if_wrong()


def test_the_same_backend_without_a_fault_passes() -> None:
    net, _ = adapted()
    assert og.check(net, torch.randn(4, 6), backend=faulty(lambda outputs: outputs)).right


def test_wrong_parameters_are_named_with_sizes() -> None:
    net, _ = adapted()
    report = og.check(net, torch.randn(4, 6), backend=faulty(zero_one))
    fault = report.comparison.faults[0]
    assert fault.name in str(report)
    assert fault.compiled_norm == 0
    assert "exactly zero" in str(fault)
    with pytest.raises(MismatchError) as caught:
        report.comparison.raise_if_wrong()
    assert fault.name in str(caught.value)
    assert f"of {len(report.comparison.rows)} gradients" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"rank_dropout": 0.5, "module_dropout": 0.5}, {"input_dropout": 0.3}])
def test_healthy_model_raises_no_alarm(dtype: torch.dtype, options: dict[str, float]) -> None:
    net, _ = adapted(**options)
    net.to(dtype)
    report = og.check(net, torch.randn(4, 6, dtype=dtype), backend="aot_eager")
    assert report.right, str(report)
    assert report.recompiles == ()


def test_check_leaves_everything_as_it_was() -> None:
    net, adapters = adapted(dropout=0.5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parameters = adapters.parameters()
    parameters["first.up"].grad = torch.ones_like(parameters["first.up"])
    dropout = adapters.settings_of("default", "dropout")
    state = torch.get_rng_state()
    net.eval()
    og.check(net, torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), backend="aot_eager")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert adapters.settings_of("default", "dropout") == dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    assert torch.equal(adapters.parameters()["first.up"].grad, torch.ones_like(parameters["first.up"]))  # type: ignore[arg-type]
    with Watch() as watch:
        net(torch.randn(2, 6))
    assert watch.graphs == 0


def test_check_compiles_nothing_anew_for_training_that_follows() -> None:
    net, _ = adapted(dropout=0.5)
    og.compile(net, backend="aot_eager")
    x = torch.randn(4, 6)
    og.check(net, x)
    net.train()
    with Watch() as watch:
        net(x).sum().backward()
    assert watch.graphs == 0


def test_a_new_adapter_is_checked_in_all_its_gradients() -> None:
    """At the start ``up`` is zero, and so is every gradient of ``down``: a fault there would hide."""
    net, adapters = adapted()
    x = torch.randn(4, 6)
    comparison = compare_step(lambda _: net(x).square().mean(), adapters.parameters(), models=[net], adapters=[adapters])
    assert all(row.norm > 0 for row in comparison.rows)
    assert not adapters.parameters()["first.up"].any()


def test_graph_breaks_are_reported() -> None:
    class Breaking(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x * 2

    torch.manual_seed(0)
    net = Breaking()
    og.attach(net, og.LoRA(rank=2), targets=["first"])
    report = og.check(net, torch.randn(4, 6), backend="eager", fullgraph=False)
    assert len(report.breaks) == 1
    assert not report.right


def test_recompiles_are_reported() -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + 0 * self.calls

    torch.manual_seed(0)
    net = Counting()
    og.attach(net, og.LoRA(rank=2), targets=["first"])
    report = og.check(net, torch.randn(4, 6), backend="eager")
    assert report.agrees
    assert report.recompiles
    assert not report.right


def test_eager_nan_is_said_not_compared() -> None:
    net, _ = adapted()
    with pytest.raises(NumericsError, match="eager step itself"):
        og.check(net, torch.full((4, 6), float("nan")), backend="eager")


def test_nothing_trained_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="requires a gradient"):
        og.check(Net().requires_grad_(False), torch.randn(4, 6), backend="eager")


def gradients_of(*pairs: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    return {f"p{number}": (expected, compiled, expected) for number, (expected, compiled) in enumerate(pairs)}


def test_round_off_where_the_true_gradient_is_nothing_raises_no_alarm() -> None:
    """A bias in front of a normalisation has a true gradient of 0: what is left there is round-off, of any relative size."""
    large = torch.randn(100)
    quiet = compare(
        precision=torch.float32,
        reference=torch.float32,
        losses=(1.0, 1.0, 1.0),
        gradients=gradients_of((large, large), (torch.randn(10) * 1e-7, torch.randn(10) * 1e-7)),
    )
    assert quiet.right
    loud = compare(
        precision=torch.float32,
        reference=torch.float32,
        losses=(1.0, 1.0, 1.0),
        gradients=gradients_of((large, large), (torch.randn(10), torch.zeros(10))),
    )
    assert [row.name for row in loud.faults] == ["p1"]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_compiled_nan_is_a_fault(broken: float) -> None:
    large = torch.randn(10)
    found = compare(
        precision=torch.bfloat16,
        reference=torch.float32,
        losses=(1.0, broken, 1.0),
        gradients=gradients_of((large, torch.full((10,), broken))),
    )
    assert found.loss_wrong
    assert found.faults


def test_many_small_errors_are_found_together() -> None:
    """Each gradient passes alone, all of them lean the same way."""
    reference = [torch.randn(50) for _ in range(20)]
    found = compare(
        precision=torch.float32,
        reference=torch.float32,
        losses=(1.0, 1.0, 1.0),
        gradients=gradients_of(*((gradient, gradient * 1.0015) for gradient in reference)),
    )
    assert not found.faults
    assert found.total_wrong
    assert not found.right


def test_a_model_that_is_not_one_graph_is_told_so() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            output: torch.Tensor = self.query(x)
            return output

    model = Breaks()
    og.attach(model, og.LoRA(rank=2), targets=["query"])
    with pytest.raises(CompileError) as caught:
        og.check(model, torch.randn(2, 8), backend="eager")
    assert caught.value.code == "graph-break"
    assert "fullgraph=False" in caught.value.hint
    assert og.check(model, torch.randn(2, 8), backend="eager", fullgraph=False).breaks
