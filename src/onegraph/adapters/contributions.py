"""What each of several adapters makes of a layer's own tensors: what merging and combining are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onegraph.adapters.values import SHARED
from onegraph.errors import AdapterError, OnegraphError
from onegraph.layers import Layer
from onegraph.methods import Method
from onegraph.methods.precision import full_precision

if TYPE_CHECKING:
    from onegraph.adapters.adapted import Adapted
    from onegraph.adapters.collection import Adapters

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What a weight can be that is computed with, and written."""


@dataclass(frozen=True)
class Contribution:
    """One adapter on one layer: its method, its tensors and settings, and how much of it is wanted."""

    name: str
    method: Method
    tensors: dict[str, Tensor]
    weight: float


def contributions(
    adapters: Adapters, chosen: Mapping[str, float], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, list[Contribution]]]:
    """Each layer that one of the adapters is on, and what they contribute there, in the order of ``chosen``.

    A layer at a time: casting the tensors of all of them would copy adapters as large as the model.

    Args:
        chosen: Name -> weight.
        dtype: Of the tensors; None: float32, or float64 where the base is.
    """
    methods = {name: adapters.methods(name) for name in chosen}
    tensors = {name: adapters.tensors(name) for name in chosen}
    settings = {name: {key: adapters.settings_of(name, key) for key in adapters.setting_names(name)} for name in chosen}
    for path, adapted in adapters.layers.items():
        base = adapted.layer.base_tensors(adapted.base_layer)
        precision = precision_of(base) if dtype is None else dtype
        found: list[Contribution] = []
        for name, weight in chosen.items():
            if path not in methods[name]:
                continue
            method = methods[name][path]
            p = {key: value.detach().to(precision) for key, value in tensors[name][path].items()}
            for key, spec in method.shared_parameters().items():
                value = tensors[name][SHARED][key].detach().to(precision)
                for axis in spec.rank_axes:  # they have the largest rank of all layers
                    value = value.narrow(axis, 0, spec.shape[axis])
                p[key] = value
            for setting, values in settings[name].items():
                if path in values and setting not in method.random_settings:
                    p[setting] = torch.tensor(values[path], dtype=precision, device=next(iter(base.values())).device)
            found.append(Contribution(name, method, p, weight))
        if found:
            yield path, found


def adapted_base(adapted: Adapted, contribution: Contribution, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer with one adapter, canonical, computed in the precision of ``base``: only those that it changes.

    Raises:
        TargetError: Where the method can't be written as new weights.
    """
    # Under autocast the small products would be rounded to half precision.
    with full_precision(next(iter(base.values()))):
        tensors = contribution.method.adapt_tensors(base, contribution.tensors, adapted.layer)
    return {name: value for name, value in tensors.items() if value is not base.get(name)}


def precision_of(base: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that new weights are computed in."""
    return torch.float64 if any(value.dtype == torch.float64 for value in base.values()) else torch.float32


def unwritable(layers: Mapping[str, str], what: str, hint: str, code: str) -> OnegraphError:
    """The error that names layers, each with a reason."""
    lines = [f"- {path}: {reason}" for path, reason in list(layers.items())[:10]]
    more = [f"- and {len(layers) - 10} more"] if len(layers) > 10 else []
    return AdapterError(
        f"{len(layers)} {'layer' if len(layers) == 1 else 'layers'} {what}:\n" + "\n".join(lines + more),
        why="Nothing has changed.",
        hint=hint,
        code=code,
    )


def unreadable(own: Mapping[str, Tensor], layer: Layer) -> str | None:
    """Why a layer's tensors, as ``base_tensors`` gives them, can't be computed with; None when they can."""
    for name, shape in layer.tensor_shapes().items():
        value = own[name]
        if hasattr(value, "full_tensor"):
            return f"its {name} is cut in pieces over several processes"
        if value.is_meta:
            return f"its {name} is on the meta device and has no values"
        if value.dtype not in DTYPES or tuple(value.shape) != shape:
            return f"its {name} is quantised: {tuple(value.shape)} numbers of {value.dtype}"
    return None
