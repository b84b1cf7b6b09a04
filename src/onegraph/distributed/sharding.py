"""FSDP2 for the frozen weights; adapters stay whole, so that switching, adding, saving and loading them stay what they are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from onegraph.adapters import Adapters
from onegraph.compiling import compiled_of, regions_of
from onegraph.distributed.agreement import require_processes, require_same_adapters, send_from_first
from onegraph.distributed.replicating import Synchroniser, adapters_with
from onegraph.errors import CompileError, ConfigurationError


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard the weights of the base over all processes, block by block, in place; returns the model.

    Each block is put together when it runs and taken apart again. Adapters are small and stay whole in every process; the mean of their
    gradients is there when a backward pass ends, and their values are those of the first process from now on. So every call of
    ``Adapters`` works as before, a file is written by one process alone, and an optimizer made before stays right. Weights that are not
    floating point (4 and 8 bits) stay whole too. Compile by blocks, before or after. With accelerate, prepare the optimizer and the data,
    and leave the model out.

    Args:
        model: With adapters, on its device; the base weights are the same in every process.
        mesh: Of processes, one axis: shards; two: copies of shards. None: all processes.
        options: Of ``torch.distributed.fsdp.fully_shard``: ``reshard_after_forward``, ``mp_policy``, ``offload_policy``.

    Raises:
        ConfigurationError: ``no-process-group``; ``sharded-twice``; ``replicated-twice``.
        AdapterError: ``nothing-adapted``; ``processes-differ``; ``merged``.
        CompileError: ``compiled-whole``.
    """
    require_processes("shard(model)")
    adapters = adapters_with(model, "shard(model)")
    model = adapters.model
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigurationError(
            "shard(model): a part of this model is sharded already",
            why="A weight can be cut in pieces once.",
            hint="call shard(model) in place of fully_shard or accelerate's FSDP",
            code="sharded-twice",
        )
    require_not_merged(adapters)
    compiled = compiled_of(model)
    blocks = [region.module for region in regions_of(model) if region.module is not model]
    if blocks and compiled is not None and compiled.settings.active and any(region.module is model for region in compiled.regions):
        raise CompileError(
            "shard(model): this model is compiled whole",
            why="Its blocks are put together and taken apart between graphs, and there is no between in one graph.",
            hint='onegraph.compile(model, regions="blocks")',
            code="compiled-whole",
        )
    group = _group(mesh)
    require_same_adapters(adapters, group)
    send_from_first(adapters, group)
    whole = _whole(adapters)
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=whole, **options)
    fully_shard(model, mesh=mesh, ignored_params=whole, **options)
    Synchroniser(adapters, group).start()
    return model


def require_not_merged(adapters: Adapters) -> None:
    """No adapter is in the weights: its Parameters would not be in the model."""
    adapters._not_merged("its weights can't be sharded")


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """All processes of a mesh, whose gradients are averaged."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _whole(adapters: Adapters) -> set[nn.Parameter]:
    """What isn't sharded: adapters, and what isn't floating point, which FSDP2 can't cut."""
    own = {parameter for layer in adapters.layers.values() for parameter in layer._parameters.values() if parameter is not None}
    return own | {parameter for parameter in adapters.model.parameters() if not parameter.is_floating_point()}
