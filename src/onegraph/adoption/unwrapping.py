"""Taking PEFT's layers out of a model, with a way back to the very same objects and numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from onegraph.adapters.replacing import Replacement
from onegraph.adoption.refusals import undecided, unsupported
from onegraph.adoption.sites import Site


def unwrap(sites: Sequence[Site], undo: ExitStack) -> None:
    """Hang the modules back that PEFT's layers are around.

    Args:
        sites: Where they are.
        undo: Gets what puts everything back as it was.

    Raises:
        AdapterError: ``adopt-unsupported`` for what stays of PEFT's.
    """
    replacement = Replacement()
    undo.callback(replacement.undo)
    for site in sites:
        for parent, name in site.parents:
            replacement.hang(parent, name, site.base)


def check_plain(model: nn.Module) -> None:
    """Raise for a module of PEFT's that is still there.

    Raises:
        AdapterError: ``adopt-unsupported``.
    """
    for path, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise unsupported(f"{path} is a {type(module).__name__} of PEFT's", hint="keep it in PEFT")


def unmerge(model: nn.Module, sites: Sequence[Site], undo: ExitStack) -> None:
    """Let PEFT take merged adapters out of the weights again.

    Args:
        model: What they are in.
        sites: Where its layers are.
        undo: Gets what merges them again, to the same numbers bit for bit.

    Raises:
        AdapterError: ``adopt-unsupported`` for quantised weights, which can't be taken back exactly; ``adopt-state`` for weights that
            other layers share, which PEFT changes for all of them.
    """
    _check_shared(model, sites)
    for site in sites:
        for layer in site.layers:
            if getattr(layer, "merged_adapters", None) and _is_quantised(site.base):
                raise unsupported(
                    f"an adapter is merged into the quantised weight of {site.path}",
                    why="Rounding to its levels can't be undone.",
                    hint="load the model and the adapter anew, and adopt before merging",
                )
    for site in sites:
        for layer in site.layers:
            if getattr(layer, "merged_adapters", None):
                undo.callback(_again(layer))
                _quietly(layer, "unmerge")


def _check_shared(model: nn.Module, sites: Sequence[Site]) -> None:
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(id(module))
    for site in sites:
        merged = any(getattr(layer, "merged_adapters", None) for layer in site.layers)
        if merged and any(value is not None and len(owners[id(value)]) > 1 for value in site.base._parameters.values()):
            raise undecided(
                f"an adapter is merged into the weight of {site.path}, which another layer shares",
                why="PEFT changed it for both; here a merge leaves the other one as it was.",
                hint="peft_model.unmerge_adapter()",
            )


def _is_quantised(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return any(type(value) is not nn.Parameter or type(value.data) is not torch.Tensor or not value.is_floating_point() for value in own)


def _again(layer: Any) -> Callable[[], None]:
    names, merged = list(layer.merged_adapters), layer.base_layer
    numbers = {name: value.detach().clone() for name, value in merged.named_parameters()}

    def merge() -> None:
        _quietly(layer, "merge", adapter_names=names)
        list(layer.modules())  # PEFT's attention makes its weights Parameters again where it is walked over
        with torch.no_grad():
            for name, value in layer.base_layer.named_parameters():
                if name in numbers and value.stride() == numbers[name].stride():
                    value.data.copy_(numbers[name])
                elif name in numbers:  # in another layout a product is rounded otherwise
                    value.data = numbers[name]

    return merge


def _quietly(layer: Any, call: str, **options: Any) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # IA3's, that dividing isn't exact
        getattr(layer, call)(**options)
