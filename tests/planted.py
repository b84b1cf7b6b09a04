"""Small models, and backends with a fault in them: each spoils the graphs that hold one kind of operation, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4


class Halve(nn.Module):
    """The one module with a scale."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.halve = Halve()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.halve(self.linear(self.norm(x)))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = Block()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.block(self.first(x)))
        return result


class TiedWithDropout(nn.Module):
    """A language model in small: tied weights, dropout, a batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.drop = nn.Dropout(0.2)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.attention_dropout = 0.1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids))
        x = F.dropout(self.linear(x), self.attention_dropout, self.training)
        result: Tensor = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return result


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x * x.detach().sum().abs().item()
        if x.sum() > 1e9:
            x = x + 1
        return x


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(ROWS, 6)


def build_breaking() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Breaks(), torch.randn(ROWS, 6)


def build_nothing() -> int:
    return 3


def build_that_fails() -> tuple[nn.Module, Tensor]:
    raise RuntimeError("the planted failure")


Graph = torch.fx.GraphModule
Spoil = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


def planted(where: Callable[[Graph, Sequence[Any]], bool], make: Callable[[], Spoil]) -> Any:
    """A backend that runs the traced graph as it is, but for graphs with a fault planted."""

    def backend(graph: Graph, inputs: list[Any]) -> Callable[..., Any]:
        if not where(graph, inputs):
            return graph.forward
        spoil = make()
        return lambda *arguments: spoil(graph.forward, arguments)

    return backend


def has(name: str) -> Callable[[Graph, Sequence[Any]], bool]:
    return lambda graph, _: any(name in str(node.target) for node in graph.graph.nodes if node.op != "placeholder")


def has_weight(*shape: int) -> Callable[[Graph, Sequence[Any]], bool]:
    return lambda _, inputs: any(isinstance(value, nn.Parameter) and tuple(value.shape) == shape for value in inputs)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(gradient)


def _zero_gradient(shape: tuple[int, ...]) -> Spoil:
    def spoil(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return run(*(_NoGradient.apply(a) if isinstance(a, nn.Parameter) and tuple(a.shape) == shape else a for a in arguments))

    return spoil


def _zero_input_gradient(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    # leaves that are no Parameters: what the check gives a gradient itself
    return run(*(_NoGradient.apply(a) if type(a) is Tensor and a.requires_grad and a.is_leaf else a for a in arguments))


class _LessGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.9


def _small_gradient(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return run(*(_LessGradient.apply(a) if isinstance(a, nn.Parameter) and a.ndim == 2 else a for a in arguments))


def _changed(change: Callable[[Tensor], Tensor], when: Callable[[Tensor], bool] = lambda _: True) -> Spoil:
    def spoil(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return tuple(change(out) if isinstance(out, Tensor) and when(out) else out for out in run(*arguments))

    return spoil


def _swapped(x: Tensor) -> Tensor:
    return torch.cat([x[1:2], x[:1], x[2:]])


def _stale() -> Spoil:
    kept: dict[int, Tensor] = {}

    def spoil(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        fresh = []
        for place, value in enumerate(arguments):
            if isinstance(value, nn.Parameter):
                old = kept.setdefault(place, value.detach().clone())
                value = value + (old - value).detach() if old.shape == value.shape else value
            fresh.append(value)
        return run(*fresh)

    return spoil


healthy = planted(lambda *_: False, lambda: _changed(lambda x: x))
zeroes_one_gradient = planted(has_weight(8, 8), lambda: _zero_gradient((8, 8)))
swaps_two_rows = planted(has("layer_norm"), lambda: _changed(_swapped, lambda x: x.shape[0] > 1))
drops_a_tenth = planted(has("layer_norm"), lambda: _small_gradient)
drops_a_scale = planted(has("mul"), lambda: _changed(lambda x: x * 2))
wrong_at_another_shape = planted(has("tanh"), lambda: _changed(lambda x: x + 0.3, lambda x: x.shape[0] > ROWS))
stale_weights = planted(has_weight(8, 8), _stale)
zeroes_input_gradients = planted(has("tanh"), lambda: _zero_input_gradient)
