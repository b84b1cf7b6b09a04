"""What an adapted layer computes: with one adapter for the whole batch, and with one a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import vmap

from onegraph.layers import Layer
from onegraph.methods import Method


def run(
    method: Method, layer: Layer, module: nn.Module, x: Tensor, p: Mapping[str, Tensor], *args: Any, training: bool, **kwargs: Any
) -> Tensor:
    """The output of a layer with one method's tensors: beside the base layer, or by a new weight.

    Args:
        module: The base layer.
        x: Its input; further arguments are handed on.
        p: Parameters, shared parameters and settings.
        training: Whether dropouts draw.
    """
    if layer.by_weight or not method.beside(layer):
        own = layer.base_tensors(module)
        tensors = method.adapt_tensors(own, p, layer, training=training)
        if layer.adds_change:
            y: Tensor = layer.forward(module, x, *args, **kwargs)
            return y + layer.call(module, _changes(tensors, own), x, *args, **kwargs)
        return layer.call(module, tensors, x, *args, **kwargs)
    x = method.before(x, p, layer, training=training)
    y = layer.forward(module, x, *args, **kwargs)
    base = layer.base_tensors(module) if method.reads_base else None
    return method.after(x, y, p, layer, training=training, base=base)


RowMethods = Sequence[tuple[Method, Mapping[str, Tensor]]]
"""Each method with its tensors, a leading row axis on every one."""


@dataclass(frozen=True)
class Inside:
    """A layer inside of another that reads it: how its tensors are called from there, and what each row has on it."""

    prefix: str
    layer: Layer
    module: nn.Module
    methods: RowMethods


def run_rows(
    methods: RowMethods,
    layer: Layer,
    module: nn.Module,
    x: Tensor,
    *args: Any,
    training: bool,
    inside: Sequence[Inside] = (),
    **kwargs: Any,
) -> Tensor:
    """The output of a layer where every row of the batch has tensors of its own, in each of several methods.

    A row is the identity in every method but its own, so the order of the methods is without effect.

    Args:
        methods: Each method with its tensors, a leading row axis on every one.
        module: The base layer.
        x: Its input (B, ...).
        training: Whether dropouts draw.
        inside: What it reads inside of itself; for kinds that are ``by_weight``.
    """
    if layer.by_weight:
        every = [Inside("", layer, module, methods), *inside]

        def all_adapted(*all_p: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = {}
            left = list(all_p)
            for each in every:
                tensors = each.layer.base_tensors(each.module)
                for method, _ in each.methods:
                    tensors = {**tensors, **method.adapt_tensors(tensors, left.pop(0), each.layer, training=training)}
                found |= {f"{each.prefix}{name}": value for name, value in tensors.items()}
            return found

        rows = [p for each in every for _, p in each.methods]
        y: Tensor = layer.call_rows(module, all_adapted, rows, x, *args, **kwargs)
        return y
    by_weight = [(method, p) for method, p in methods if not method.beside(layer)]
    beside = [(method, p) for method, p in methods if method.beside(layer)]
    base = layer.base_tensors(module) if by_weight or any(method.reads_base for method, _ in beside) else None

    # A row keeps a batch axis of size 1: layers and dropouts see what they see when it runs alone.
    x = x.unsqueeze(1)
    for method, p in beside:
        x = _each_row(lambda x, p, method=method: method.before(x, p, layer, training=training), x, p)
    if by_weight:

        def adapted(x: Tensor, *all_p: Mapping[str, Tensor]) -> Tensor:
            tensors = dict(base or {})
            for (method, _), p in zip(by_weight, all_p):
                tensors = method.adapt_tensors(tensors, p, layer, training=training)
            return layer.call(module, _changes(tensors, base or {}) if layer.adds_change else tensors, x, *args, **kwargs)

        y = _each_row(adapted, x, *(p for _, p in by_weight))
        if layer.adds_change:
            y = y + layer.forward(module, x.squeeze(1)).unsqueeze(1)
    else:
        y = layer.forward(module, x.squeeze(1), *args, **kwargs).unsqueeze(1)
    for method, p in beside:
        y = _each_row(lambda x, y, p, method=method: method.after(x, y, p, layer, training=training, base=base), x, y, p)
    return y.squeeze(1)


def _changes(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - own[name] if name in own else value for name, value in tensors.items()}


def _each_row(function: Any, *tensors: Any) -> Tensor:
    found: Tensor = vmap(function, randomness="different")(*tensors)
    return found
