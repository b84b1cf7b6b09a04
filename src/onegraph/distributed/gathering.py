"""Adapters whose Parameters somebody sharded together with the model: put together to be read or written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from onegraph.adapters import Adapted, adapters_of


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, adapters that were sharded with their model (by ``fully_shard`` or accelerate) are whole: save them, or load into them.

    Every process enters and leaves it; what is done inside may be done by the first one alone: the values that it leaves there are the ones
    that count. The model can't run inside. For a model that ``shard`` has sharded, whose adapters are whole anyway, nothing happens.

    Args:
        model: As ``accelerator.prepare`` returned it, or the model inside.
    """
    adapters = adapters_of(model)
    cut: list[tuple[Adapted, str, nn.Parameter, nn.Parameter]] = []
    if adapters is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for layer in adapters.layers.values():
            cut += [(layer, name, mine, layer._parameters[name]) for name, mine in layer.replaced_parameters().items()]  # type: ignore[misc]
    with torch.no_grad():
        for _, _, mine, theirs in cut:
            mine.copy_(_full(theirs))
    for layer, name, mine, _ in cut:
        layer._parameters[name] = mine
    try:
        yield model
    finally:
        with torch.no_grad():
            for layer, name, mine, theirs in cut:
                _write(theirs, mine)
                layer._parameters[name] = theirs


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _write(parameter: Tensor, value: Tensor) -> None:
    """Put this process's part of a value back, in place: the optimizer keeps the same Parameter."""
    if isinstance(parameter, DTensor):
        parameter.copy_(distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(value)
