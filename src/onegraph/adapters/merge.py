"""Merging: adapters written into the weights of the base layers, and taken out again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onegraph.adapters.checks import check_finite, merged_error, unknown_adapter
from onegraph.adapters.contributions import DTYPES, Contribution, adapted_base, contributions, precision_of, unreadable, unwritable
from onegraph.errors import AdapterError, NumericsError, TargetError
from onegraph.layers import EmbeddingLayer

if TYPE_CHECKING:
    from onegraph.adapters.adapted import Adapted
    from onegraph.adapters.collection import Adapters

logger = logging.getLogger("onegraph")


@dataclass
class Replaced:
    """What merging put aside: path -> name -> the Parameter that was there, and the adapter that was active."""

    active: str | None
    parameters: dict[str, dict[str, nn.Parameter | None]] = field(default_factory=dict)


def merged(adapters: Adapters) -> list[str]:
    """The adapters that are merged into the weights now."""
    return list(adapters._merged)


def merge(
    adapters: Adapters,
    names: str | Sequence[str] | None = None,
    *,
    weights: Sequence[float] | Mapping[str, float] | None = None,
    safe: bool = True,
) -> None:
    """Write adapters into the weights: W' = W + sum_i w_i (adapt_i(W) - W), and the bias likewise. The identity runs from then on.

    Each layer gets new Parameters of the old shape, dtype and layout, and the old ones are put aside: ``unmerge`` hangs the very
    same back, and a weight that other layers share (an output head tied to its embedding) is left to them as it was. A compiled
    model runs on. It compiles once for the merged state only where layers shared a weight, or a layer gets a bias that had none.

    The sum is computed in float32 (float64 where the base is) and rounded once. Settings count as they are now; nothing is
    dropped. On an error nothing has changed.

    Args:
        names: Which adapters; None: the active one.
        weights: How much of each, in their order or by name; 1 when omitted. Negative ones take away.
        safe: Whether NaN or infinity in a new weight is an error.

    Raises:
        AdapterError: ``merged``, ``rows-active``, ``unknown-adapter``, ``no-active-adapter``, ``merge-names``, ``merge-weights``,
            ``not-finite-value``; ``unmergeable`` with the layers whose weight can't be written.
        NumericsError: ``not-finite`` with the layers.
    """
    if adapters._merged:
        raise merged_error("adapters can't be merged", adapters._merged)
    if adapters._rows is not None:
        raise AdapterError(
            "adapters can't be merged inside rows()",
            why="There every row of the batch has an adapter of its own, and the weights are one for all of them.",
            hint="merge() before or after it",
            code="rows-active",
        )
    chosen = _chosen(adapters, names, weights)
    new = _new_parameters(adapters, chosen, safe=safe)
    replaced = Replaced(adapters.active)
    shared = _shared_elsewhere(adapters, new)
    adapters.use(None)
    for path, parameters in new.items():
        module = adapters.layers[path].base_layer
        replaced.parameters[path] = {name: _hang(module, name, parameter) for name, parameter in parameters.items()}
        _describe_bias(adapters.layers[path], replaced.parameters[path], has_bias=True)
    adapters._merged = chosen
    vars(adapters)["_replaced"] = replaced
    biased = [path for path, before in replaced.parameters.items() if None in before.values()]
    for paths, what in ((shared, "weights that other layers share, and keep"), (biased, "a bias where there was none")):
        if paths:
            logger.info("merged: new values for %s: %s. A compiled model compiles once for the merged state.", what, ", ".join(paths))


def unmerge(adapters: Adapters) -> None:
    """Hang the Parameters back that ``merge`` put aside, the same objects bit for bit, and use the adapter that was active.

    Where the model was moved or cast meanwhile, they follow.

    Raises:
        AdapterError: ``not-merged``.
    """
    replaced = _replaced(adapters)
    for path, parameters in replaced.parameters.items():
        module = adapters.layers[path].base_layer
        for name, parameter in parameters.items():
            present = _hang(module, name, parameter)
            if parameter is not None and present is not None and (parameter.device, parameter.dtype) != (present.device, present.dtype):
                parameter.data = parameter.data.to(present.device, present.dtype)
        _describe_bias(adapters.layers[path], parameters, has_bias=False)
    _forget(adapters)
    adapters.use(replaced.active if replaced.active in adapters.names else None)


def merge_and_unload(
    adapters: Adapters,
    names: str | Sequence[str] | None = None,
    *,
    weights: Sequence[float] | Mapping[str, float] | None = None,
    safe: bool = True,
) -> nn.Module:
    """Merge, unless that is done, and return the plain model with the new weights; these adapters are gone.

    The model is as it was before attaching: its own classes, keys and trainable parameters. The one new key is the bias of a layer that
    had none and whose adapter brought one. Layers that shared a weight don't share it any longer.

    Raises:
        AdapterError: As ``merge``; ``merged`` when adapters are merged already and others are named.
    """
    if not merged(adapters):
        merge(adapters, names, weights=weights, safe=safe)
    elif names is not None or weights is not None:
        raise merged_error("others can't be merged", adapters._merged)
    pairs = [
        (before, adapters.layers[path].base_layer, name)
        for path, parameters in _replaced(adapters).parameters.items()
        for name, before in parameters.items()
    ]
    _forget(adapters)
    model = adapters.detach()
    _let_train(pairs)
    return model


def _let_train(pairs: Sequence[tuple[nn.Parameter | None, nn.Module, str]]) -> None:
    """Let all train that came from one Parameter where one of them does: detaching thaws by name, and a tied weight has two.

    A bias that had no Parameter before trains as its layer's weight does.
    """
    families: dict[int, list[Tensor]] = {}
    for before, module, name in pairs:
        if before is not None:
            families.setdefault(id(before), [before]).append(module.get_parameter(name))
    for family in families.values():
        trained = any(parameter.requires_grad for parameter in family)
        for parameter in family:
            parameter.requires_grad_(trained)
    for before, module, name in pairs:
        if before is None:
            module.get_parameter(name).requires_grad_(module.get_parameter("weight").requires_grad)


def _chosen(
    adapters: Adapters, names: str | Sequence[str] | None, weights: Sequence[float] | Mapping[str, float] | None
) -> dict[str, float]:
    """Name -> weight, checked."""
    if names is None:
        if adapters.active is None:
            raise AdapterError("no adapter is active", hint="name those to merge", code="no-active-adapter")
        names = [adapters.active]
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name not in adapters.names:
            raise unknown_adapter(name, adapters.names)
    if not listed or len(set(listed)) < len(listed):
        raise AdapterError(
            f"names={listed} can't be merged",
            why="It takes at least one adapter, and each once.",
            hint="an adapter that should count twice has the weight 2",
            code="merge-names",
        )
    if weights is None:
        return dict.fromkeys(listed, 1.0)
    known = set(weights) == set(listed) if isinstance(weights, Mapping) else len(weights) == len(listed)
    if not known:
        raise AdapterError(
            f"weights={weights!r} don't go with names={listed}",
            why="Every adapter needs a weight.",
            hint=f"weights={[1.0] * len(listed)} is what is used without",
            code="merge-weights",
        )
    chosen = {name: float(weights[name]) for name in listed} if isinstance(weights, Mapping) else dict(zip(listed, map(float, weights)))
    for name, weight in chosen.items():
        check_finite(weight, f"the weight of {name!r}")
    return chosen


def _new_parameters(adapters: Adapters, chosen: Mapping[str, float], *, safe: bool) -> dict[str, dict[str, nn.Parameter]]:
    """Path -> name -> the Parameter to hang in. Nothing is changed."""
    refused: dict[str, str] = {}
    not_finite: list[str] = []
    new: dict[str, dict[str, nn.Parameter]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for path, present in contributions(adapters, chosen):
            adapted = adapters.layers[path]
            try:
                tensors = _weighted(adapted, present)
            except TargetError as error:
                refused[path] = error.what
                continue
            reasons = [reason for name in tensors if (reason := _refusal(adapted.base_layer, name)) is not None]
            if reasons:
                refused[path] = ", ".join(reasons)
                continue
            new[path] = {name: _parameter(adapted, name, value) for name, value in tensors.items()}
            if safe and not all(bool(parameter.isfinite().all()) for parameter in new[path].values()):
                not_finite.append(path)
    if refused:
        hint = "run the adapter beside these layers, without merging, or adapt other layers with exclude="
        raise unwritable(refused, "can't be merged", hint, "unmergeable")
    if not_finite:
        shown = ", ".join(not_finite[:10]) + (f" and {len(not_finite) - 10} more" if len(not_finite) > 10 else "")
        raise NumericsError(
            f"merging {', '.join(map(repr, chosen))} gives NaN or infinity in {shown}",
            why="Either the adapter or the weight isn't finite, or the sum is too large for the weight's dtype. Nothing has changed.",
            hint="look at the adapter's tensors and weights; safe=False merges all the same",
            code="not-finite",
        )
    return new


def _weighted(adapted: Adapted, present: Sequence[Contribution]) -> dict[str, Tensor]:
    """The changed tensors of a layer, canonical, in the precision they are computed in."""
    layer, module = adapted.layer, adapted.base_layer
    own = layer.base_tensors(module)
    if (reason := unreadable(own, layer)) is not None:
        raise TargetError(reason, code="unmergeable")
    base = {name: value.detach().to(precision_of(own)) for name, value in own.items()}
    if len(present) == 1 and present[0].weight == 1.0:
        total = adapted_base(adapted, present[0], base)
    else:
        total = {}
        for contribution in present:
            for name, value in adapted_base(adapted, contribution, base).items():
                start = base[name] if name in base else torch.zeros_like(value)
                total[name] = total.get(name, start) + contribution.weight * (value - start)
    if isinstance(layer, EmbeddingLayer) and "bias" in total:
        # A table has no bias, but the same vector on all its rows is one.
        bias = total.pop("bias").unsqueeze(1) / layer.output_scale
        total["weight"] = total.get("weight", base["weight"]) + bias
    return total


def _refusal(module: nn.Module, name: str) -> str | None:
    """Why a tensor of a module can't be replaced."""
    owner, attribute = _owner(module, name)
    if attribute not in owner._parameters:
        return f"its {name} is computed from other parameters or isn't there"
    present = owner._parameters[attribute]
    if present is not None and (type(present) is not nn.Parameter or present.dtype not in DTYPES):
        return f"its {name} is a {type(present).__name__} of {present.dtype}, which can't hold the sum"
    return None


def _parameter(adapted: Adapted, name: str, value: Tensor) -> nn.Parameter:
    """A Parameter with the value, rounded to the dtype and laid out in memory as the present one is: a graph depends on both."""
    layer, module = adapted.layer, adapted.base_layer
    owner, attribute = _owner(module, name)
    present = owner._parameters[attribute]
    if present is None:
        dtype = layer.base_tensors(module)["weight"].dtype
        return nn.Parameter(value.to(dtype, copy=True).contiguous(), requires_grad=False)
    stored = layer.stored(value) if name == "weight" else value.reshape(present.shape)
    return nn.Parameter(torch.empty_like(present.detach()).copy_(stored), requires_grad=False)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and its name there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _hang(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Put a Parameter in the place of another, which is returned."""
    owner, attribute = _owner(module, name)
    before, owner._parameters[attribute] = owner._parameters[attribute], parameter
    return before


def _describe_bias(adapted: Adapted, before: Mapping[str, nn.Parameter | None], *, has_bias: bool) -> None:
    """Keep the description true where a layer gains a bias or loses it again: methods that run by the weight go by it."""
    if "bias" in before and before["bias"] is None:
        adapted._layer = replace(adapted.layer, has_bias=has_bias)


def _forget(adapters: Adapters) -> None:
    adapters._merged = {}
    vars(adapters).pop("_replaced")


def _replaced(adapters: Adapters) -> Replaced:
    found = vars(adapters).get("_replaced")
    if not isinstance(found, Replaced):
        raise AdapterError("no adapter is merged", hint="merge() one first", code="not-merged")
    return found


def _shared_elsewhere(adapters: Adapters, new: Mapping[str, Mapping[str, nn.Parameter]]) -> list[str]:
    """The layers that get a new Parameter in place of one that hangs in several modules."""
    count: dict[int, int] = {}
    for module in adapters.model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                count[id(parameter)] = count.get(id(parameter), 0) + 1
    return [
        path
        for path, parameters in new.items()
        for owner, attribute in (_owner(adapters.layers[path].base_layer, name) for name in parameters)
        if count.get(id(owner._parameters[attribute]), 0) > 1
    ]
