"""``state_dict`` and ``load_state_dict`` under the names that PEFT's users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapted, Adapters
from onegraph.checkpoint.base_weights import without_bias
from onegraph.checkpoint.dialects.peft_methods.form import Layered
from onegraph.layers import Layer
from onegraph.methods import Method
from onegraph.peft.names import MODEL, Entry, Names, ending_of, form_for


def rename_state(found: dict[str, Any], prefix: str, adapters: Adapters, names: Names, model: nn.Module, *, keep: bool) -> None:
    """Put the state of a model under PEFT's names, in place, with the tensors of all its adapters.

    Args:
        found: What ``nn.Module.state_dict`` collected.
        prefix: Of the tuner.
        adapters: The adapters of the model.
        names: Its names.
        model: It.
        keep: Whether Parameters themselves are wanted.
    """
    before = dict(found)
    for key in before:
        if key.startswith(prefix):
            del found[key]
    tensors = named_tensors(adapters, names, keep=keep)
    own = {f"{prefix}{key}" for key in _registered(model)}
    for real, shown, _ in names.walk(model):
        if not real:
            found[f"{prefix}{shown}"] = tensors[shown]
        elif f"{prefix}{real}" in before:
            found[f"{prefix}{shown}"] = before[f"{prefix}{real}"]
            own.add(f"{prefix}{real}")
    found.update({f"{prefix}{entry.name}": tensors[entry.name] for entry in names.shared()})
    found.update({key: value for key, value in before.items() if key.startswith(prefix) and key not in own})


def named_tensors(adapters: Adapters, names: Names, *, keep: bool = False) -> dict[str, Tensor]:
    """Name -> tensor of every adapter, of the true rank and in PEFT's shape."""
    found: dict[str, Tensor] = {}
    for adapter, own in names.entries.items():
        tensors, methods = adapters.tensors(adapter), adapters.methods(adapter)
        for entry in own:
            value = tensors[entry.path][entry.key].detach()
            if entry.path:
                value = _as_theirs(value, methods[entry.path], adapters.layers[entry.path].layer, entry.key)
            found[entry.name] = entry.parameter if keep else value
    return found


def load_named(state_dict: dict[str, Any], prefix: str, adapters: Adapters, names: Names, model: nn.Module) -> list[str]:
    """Load what a state has of adapters, and rename the rest of it to the names in the module tree, in place.

    Returns:
        The names of adapters' tensors that it lacks.
    """
    missing: list[str] = []
    for adapter, own in names.entries.items():
        methods, given = adapters.methods(adapter), dict[str, dict[str, Tensor]]()
        shapes = adapters.tensors(adapter)
        for entry in own:
            value = state_dict.pop(f"{prefix}{entry.name}", None)
            if value is None:
                missing.append(f"{prefix}{entry.name}")
                continue
            given.setdefault(entry.path, {})[entry.key] = _as_ours(value, entry, shapes, methods, adapters)
        adapters.load_tensors(adapter, given, partial=True)
    for real, shown, _ in names.walk(model):
        if real and real != shown and f"{prefix}{shown}" in state_dict:
            state_dict.setdefault(f"{prefix}{real}", state_dict.pop(f"{prefix}{shown}"))
    # The module tree asks for what is registered; it is loaded already.
    state_dict.update({f"{prefix}{key}": parameter.detach() for key, parameter in _registered(model).items()})
    return missing


def _registered(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name in the module tree -> Parameter, of those that adapted layers have registered."""
    return {
        f"{MODEL}{path}.{key}": parameter
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Adapted)
        for key, parameter in module._parameters.items()
        if parameter is not None
    }


def _as_theirs(value: Tensor, method: Method, layer: Layer, key: str) -> Tensor:
    form, ending = form_for(method), ending_of(method, layer, key)
    if form is None or ending is None or form.whole:
        return value
    inner = without_bias(method)
    others = {name: torch.empty(()).expand(spec.shape) for name, spec in inner.parameters(layer).items()}
    return form.write(Layered(inner, {**others, key: value}, layer, form.defaults))[ending]


def _as_ours(
    value: Tensor, entry: Entry, shapes: Mapping[str, Mapping[str, Tensor]], methods: Mapping[str, Method], adapters: Adapters
) -> Tensor:
    """The inverse, whatever a form does with the order of numbers: places go the same way."""
    present = shapes[entry.path][entry.key]
    if not entry.path or value.numel() != present.numel():
        return value
    places = torch.arange(present.numel()).view(present.shape)
    order = _as_theirs(places, methods[entry.path], adapters.layers[entry.path].layer, entry.key).flatten()
    flat = value.flatten()
    return torch.empty_like(flat).index_copy_(0, order.to(flat.device), flat).view(present.shape)
