"""Models, batches and functions that a user may hand to the check and nobody thinks of."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Odd(nn.Module):
    """Two layers, and something else."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.then = then
        self.calls = 0

    def forward(self, x: Tensor, **others: Tensor) -> Any:
        return self.then(self, self.layers(x), **others)


@dataclasses.dataclass
class Output:
    logits: Tensor
    count: int = 3
    nothing: None = None


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(ids))
        return result


def leaves(_: Any, y: Tensor) -> Tensor:
    sys.exit(0)


def counted(model: Odd, y: Tensor) -> Tensor:
    model.calls += 1
    return y * model.calls


HEALTHY: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "a dataclass": lambda: (Odd(lambda _, y: Output(y)), X),
    "a dict with None, numbers and ids": lambda: (Odd(lambda _, y: {"y": y, "n": 3, "none": None, "ids": y.argmax(-1)}), X),
    "Python's random numbers": lambda: (Odd(lambda _, y: y * random.random()), X),
    "numpy's random numbers": lambda: (Odd(lambda _, y: y + float(numpy.random.rand())), X),
    "a dropout by hand in a model that is in evaluation": lambda: (Odd(lambda model, y: F.dropout(y, 0.3, model.training)).eval(), X),
    "complex outputs": lambda: (Odd(lambda _, y: torch.fft.rfft(y)), X),
    "complex weights": lambda: (Complex(), X),
    "sparse gradients": lambda: (Sparse(), torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(0))),
    "inputs named as a module's attributes": lambda: (Odd(lambda _, y, training, type: y + training + type), inputs()),
}


def inputs() -> dict[str, Tensor]:
    return {"x": X, "training": X[:, :3], "type": X[:, 3:]}


def build() -> tuple[nn.Module, Tensor]:
    return Odd(lambda _, y: y), X


def build_named() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("层 $x_$<b>", nn.Linear(6, 3))
    return model, X


def build_a_list() -> list[Any]:
    print("built")
    return [*build()]


def build_lstm() -> tuple[nn.Module, Tensor]:
    return nn.LSTM(6, 4, batch_first=True), torch.randn(2, 3, 6)


def build_with_whole_numbers() -> tuple[nn.Module, Tensor]:
    model, x = build()
    model.requires_grad_(False)
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    return model, x


def build_that_exits() -> None:
    sys.exit(0)


def build_that_leaves() -> tuple[nn.Module, Tensor]:
    return Odd(leaves), X


def build_counted() -> tuple[nn.Module, Tensor]:
    return Odd(counted), X


def build_detached() -> tuple[nn.Module, Tensor]:
    return Odd(lambda _, y: y.detach()), X


def build_with_rows_of_losses() -> tuple[nn.Module, Tensor, Any]:
    return *build(), lambda output: output.sum(-1)


def build_with_a_number_as_loss() -> tuple[nn.Module, Tensor, Any]:
    return *build(), 3


def build_of(size: int) -> tuple[nn.Module, Tensor]:
    return nn.Linear(6, size), X
