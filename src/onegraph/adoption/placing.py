"""Adapters that were read, put on the plain model: methods, tensors, strengths, what trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapted, Adapters, adapters_of, attach
from onegraph.adapters.freezing import train_only
from onegraph.adapters.values import SHARED
from onegraph.adapters.walk import places
from onegraph.adoption.reading import Taken
from onegraph.adoption.refusals import unsupported
from onegraph.checkpoint.load import commonest, exact_overrides
from onegraph.checkpoint.matching import Placement, fit
from onegraph.checkpoint.origin import remember
from onegraph.errors import CheckpointError, TargetError
from onegraph.layers import describe
from onegraph.methods import BitFit, Method, MiSS, WithBias

_SCALE, _CHANGE = "scale", {WithBias: "bias_change", BitFit: "bias_difference"}


def placement_of(taken: Taken, model: nn.Module) -> Placement:
    """Methods and tensors for the model's layers, trained biases and dropouts as they are now included.

    Raises:
        AdapterError: ``adopt-unsupported`` for what no layer here can take.
    """
    try:
        found = fit(taken.file, model)
    except CheckpointError as error:
        raise unsupported(error.what, why=error.why, hint="keep it in PEFT, or merge: peft_model.merge_and_unload()") from error
    methods = {path: _with_dropouts(method, taken.dropouts.get(path, {})) for path, method in found.methods.items()}
    biases = _biases(methods, taken, model)
    tensors = {path: {**found.tensors.get(path, {}), **own[1]} for path, own in biases.items()}
    return Placement({**methods, **{path: own[0] for path, own in biases.items()}}, {**found.tensors, **tensors})


def _with_dropouts(method: Method, now: Mapping[str, float]) -> Method:
    """With the probabilities that the layer has, which may have been changed since its configuration was made."""
    if isinstance(method, MiSS) and method.form == "bat":
        return method  # PEFT has the dropout, and doesn't use it
    names = {field.name for field in dataclasses.fields(method)}
    changed = {name: value for name, value in now.items() if name in names and getattr(method, name) != value}
    return dataclasses.replace(method, **changed)


def _biases(methods: Mapping[str, Method], taken: Taken, model: nn.Module) -> dict[str, tuple[Method, dict[str, Tensor]]]:
    """The layers whose bias is trained: PEFT trains the base's own, so it stays what it has become, and the difference starts at 0."""
    if taken.bias == "none":
        return {}
    found: dict[str, tuple[Method, dict[str, Tensor]]] = {}
    for place in places(model):
        module = place.module.base_layer if isinstance(place.module, Adapted) else place.module
        layer = describe(module)
        if layer is None or module._parameters.get("bias") is None:
            continue
        inner = methods.get(place.path)
        if inner is not None and place.path not in taken.layers:
            continue  # trained whole
        if inner is None and taken.bias != "all":
            continue
        method = BitFit() if inner is None else WithBias(inner=inner)
        if method.check(layer) is None:
            found[place.path] = (method, {_CHANGE[type(method)]: torch.zeros(layer.out_features)})
    return found


def dtype_of(taken: Sequence[Taken]) -> torch.dtype:
    """The dtype in which the numbers of every adapter are what they were; differences of whole weights take float32 to be exact."""
    dtype = torch.float32 if any(each.file.base_weights for each in taken) else None
    for each in taken:
        for tensor in each.tensors:
            if tensor.is_floating_point():
                dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype or torch.float32


def put(taken: Taken, placement: Placement, model: nn.Module, dtype: torch.dtype) -> None:
    """Attach an adapter, or add it to those that are there.

    Raises:
        AdapterError: ``adopt-unsupported`` for a layer that can't take it; ``not-finite-value`` for such a strength.
    """
    methods = placement.methods
    common = commonest(methods)
    overrides = exact_overrides(methods, common)

    def chosen(path: str, module: nn.Module) -> bool:
        return path in methods

    # What they start from is overwritten: drawn from a generator of its own, so that nobody else's numbers change.
    generator = torch.Generator()
    adapters = adapters_of(model)
    try:
        if adapters is None:
            adapters = attach(model, common, targets=chosen, overrides=overrides, name=taken.name, dtype=dtype, generator=generator)
        else:
            adapters.add(taken.name, common, targets=chosen, overrides=overrides, generator=generator)
    except TargetError as error:
        raise unsupported(error.what, why=error.why, hint="keep it in PEFT, or merge: peft_model.merge_and_unload()") from error
    adapters.load_tensors(taken.name, placement.tensors)
    strengths = {path: strength for path, strength in taken.strengths.items() if _differs(methods[path], adapters, path, strength)}
    if strengths:
        adapters.set_setting(taken.name, _SCALE, strengths)
    remember(adapters, taken.name, taken.file.config)


def _differs(method: Method, adapters: Adapters, path: str, strength: float) -> bool:
    return not math.isclose(method.settings(adapters.layers[path].layer)[_SCALE], strength, rel_tol=1e-6)


def set_trained(adapters: Adapters, trainable: bool, free: Iterable[nn.Parameter]) -> None:
    """Freeze the adapters unless they train, and let those parameters of the base train that did.

    Args:
        adapters: All that were put there.
        trainable: Whether they train. One graph serves all of them only where they are alike in this.
        free: Parameters of the base that were not frozen.
    """
    if not trainable:
        train_only(adapters, [])
    moved = {
        id(parameter)
        for name in adapters.names
        for path, method in adapters.methods(name).items()
        if path != SHARED and isinstance(method, WithBias | BitFit)
        for parameter in adapters.layers[path].base_layer.parameters(recurse=False)
    }
    for parameter in free:
        if id(parameter) not in moved:
            parameter.requires_grad_(True)
