"""What is cut in pieces over processes and has to be whole in a file: adapters sharded with their model, weights that PEFT's files hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from onegraph.adapters import Adapted, Adapters, adapters_of
from onegraph.methods import BitFit, Dense, WithBias


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, adapters that were sharded with their model (by ``fully_shard`` or accelerate) are whole: save them, or load into them.

    Every process enters and leaves it; what is done inside may be done by the first one alone: the values that it leaves there are the ones
    that count. The model can't run inside. For a model that ``shard`` has sharded, whose adapters are whole anyway, it puts those weights
    of the base together that PEFT's files hold beside an adapter: modules that are trained whole, trained biases, adapted embeddings.

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
    pieces = [] if adapters is None else list(_beside_adapters(adapters))
    wholes = [nn.Parameter(_full(piece).detach(), requires_grad=False) for _, _, piece in pieces]
    for (module, name, _), whole in zip(pieces, wholes, strict=True):
        module._parameters[name] = whole
    try:
        yield model
    finally:
        for module, name, piece in pieces:
            module._parameters[name] = piece
        with torch.no_grad():
            for layer, name, mine, theirs in cut:
                _write(theirs, mine)
                layer._parameters[name] = theirs


def _beside_adapters(adapters: Adapters) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The weights of the base that are in pieces, and that a file of PEFT may hold: module, name, Parameter."""
    held: set[nn.Module] = set()
    with_biases = False  # bias="all" is every bias of the model
    for layer in adapters.layers.values():
        if layer.layer.kind == "embedding" or any(isinstance(method, Dense | BitFit | WithBias) for method in layer.structures):
            held.update(layer.base_layer.modules())
        with_biases |= any(isinstance(method, BitFit | WithBias) for method in layer.structures)
    for module in adapters.model.modules():
        if isinstance(module, Adapted):
            continue
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor) and (module in held or (with_biases and name == "bias")):
                yield module, name, parameter  # type: ignore[misc]


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _write(parameter: Tensor, value: Tensor) -> None:
    """Put this process's part of a value back, in place: the optimizer keeps the same Parameter."""
    if isinstance(parameter, DTensor):
        parameter.copy_(distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(value)
