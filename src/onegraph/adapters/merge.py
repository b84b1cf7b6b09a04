"""Merging: adapters written into the weights of the base layers, and taken out again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onegraph.adapters.checks import check_finite, first_of, is_known, merged_error, unknown_adapter
from onegraph.adapters.contributions import DTYPES, Contribution, adapted_base, contributions, precision_of, unreadable, unwritable
from onegraph.errors import AdapterError, NumericsError, TargetError
from onegraph.layers import EmbeddingLayer, Layer

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
        adapted = adapters.layers[path]
        replaced.parameters[path] = {name: _hang(adapted, name, parameter) for name, parameter in parameters.items()}
        _describe_bias(adapted, replaced.parameters[path], has_bias=True)
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
        adapted = adapters.layers[path]
        for name, parameter in parameters.items():
            present = _hang(adapted, name, parameter)
            if parameter is not None and present is not None and (parameter.device, parameter.dtype) != (present.device, present.dtype):
                parameter.data = parameter.data.to(present.device, present.dtype)
        _describe_bias(adapted, parameters, has_bias=False)
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
    families: dict[int, list[nn.Parameter]] = {}
    gained: list[tuple[nn.Parameter, nn.Parameter]] = []
    for path, parameters in _replaced(adapters).parameters.items():
        present = {name: _hung(adapters.layers[path], name) for name in parameters}
        for name, before in parameters.items():
            now = present[name]
            assert now is not None
            if before is not None:
                families.setdefault(id(before), [before]).append(now)
            else:
                weight = _hung(adapters.layers[path], "weight")
                assert weight is not None
                gained.append((now, weight))
    _forget(adapters)
    model = adapters.detach()
    # Detaching lets parameters train by their names, and a tied weight has two: what came from one trains where one of them does.
    for family in families.values():
        trained = any(parameter.requires_grad for parameter in family)
        for parameter in family:
            parameter.requires_grad_(trained)
    for bias, weight in gained:
        bias.requires_grad_(weight.requires_grad)
    return model


def _chosen(
    adapters: Adapters, names: str | Sequence[str] | None, weights: Sequence[float] | Mapping[str, float] | None
) -> dict[str, float]:
    """Name -> weight, checked."""
    if names is None:
        if adapters.active is None:
            raise AdapterError("no adapter is active", hint="name those to merge", code="no-active-adapter")
        names = [adapters.active]
    listed = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    for name in listed:
        if not is_known(name, adapters.names):
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
                new[path] = {name: _parameter(adapted, name, value) for name, value in tensors.items()}
            except TargetError as error:
                refused[path] = error.what
                continue
            if safe and not all(_is_finite(value, new[path][name]) for name, value in tensors.items()):
                not_finite.append(path)
    if refused:
        hint = "run the adapter beside these layers, without merging, or adapt other layers with exclude="
        raise unwritable(refused, "can't be merged", hint, "unmergeable")
    if not_finite:
        raise NumericsError(
            f"merging {', '.join(map(repr, chosen))} gives NaN or infinity in {first_of(not_finite)}",
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


def _parameter(adapted: Adapted, name: str, value: Tensor) -> nn.Parameter:
    """A Parameter with the value, rounded to the dtype and laid out in memory as the present one is: a graph depends on both.

    Raises:
        TargetError: Where the module can't hold it.
    """
    layer, module = adapted.layer, adapted.base_layer
    if layer.attribute(name) not in module._parameters:
        raise TargetError(f"its {name} is computed from other parameters or isn't there", code="unmergeable")
    present = _hung(adapted, name)
    if present is None:
        dtype = layer.base_tensors(module)["weight"].dtype
        return nn.Parameter(value.to(dtype, copy=True).contiguous(), requires_grad=False)
    knows_how = name == "weight" and type(layer).weight_parameter is not Layer.weight_parameter
    if not knows_how and (type(present) is not nn.Parameter or present.dtype not in DTYPES):
        raise TargetError(f"its {name} is a {type(present).__name__} of {present.dtype}, which can't hold the sum", code="unmergeable")
    if name == "weight":
        return layer.weight_parameter(module, value)
    return nn.Parameter(torch.empty_like(present.detach()).copy_(value.reshape(present.shape)), requires_grad=False)


def _is_finite(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a new value is finite as it is kept; codes of a quantised weight say nothing about it."""
    plain = type(parameter) is nn.Parameter and parameter.is_floating_point()
    return bool((parameter if plain else value).isfinite().all())


def _hung(adapted: Adapted, name: str) -> nn.Parameter | None:
    """The Parameter that is there, by the name that ``base_tensors`` has for it."""
    return adapted.base_layer._parameters[adapted.layer.attribute(name)]


def _hang(adapted: Adapted, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Put a Parameter in the place of another, which is returned."""
    before = _hung(adapted, name)
    adapted.base_layer._parameters[adapted.layer.attribute(name)] = parameter
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
    layers = adapters.layers
    return [path for path, own in new.items() if any(count.get(id(_hung(layers[path], name)), 0) > 1 for name in own)]
