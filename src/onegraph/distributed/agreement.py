"""What has to be the same in every process before the first step, found out there and not in a message that never comes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from onegraph.adapters import Adapters
from onegraph.errors import AdapterError, ConfigurationError


def require_processes(call: str) -> None:
    """Processes have been started and know of each other.

    Raises:
        ConfigurationError: ``no-process-group``.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            f"{call} needs processes that know of each other, and there is no process group",
            why="Each process finds the others through torch.distributed.init_process_group, which accelerate's Accelerator() calls too.",
            hint="start the program with accelerate launch or torchrun, and call torch.distributed.init_process_group() first",
            code="no-process-group",
        )


def require_same_adapters(adapters: Adapters, group: dist.ProcessGroup | None) -> None:
    """All processes have adapters of the same names, methods, layers and shapes, in the same order.

    Raises:
        AdapterError: ``processes-differ``, in every process.
    """
    lines = [
        f"{name} {adapters.active == name} {path} {method!r} {[(key, tuple(value.shape)) for key, value in tensors.get(path, {}).items()]}"
        for name in adapters.names
        for tensors in (adapters.tensors(name),)
        for path, method in adapters.methods(name).items()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    all_processes: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    described = ", ".join(f"{name!r} on {len(adapters.methods(name))} layers" for name in adapters.names)
    dist.all_gather_object(all_processes, (digest, described), group=group)
    if len({digest for digest, _ in all_processes}) > 1:
        listed = "; ".join(f"process {rank}: {described}" for rank, (_, described) in enumerate(all_processes))
        raise AdapterError(
            f"the processes have different adapters ({listed})",
            why="Their gradients are averaged one by one: names, methods, layers and shapes have to be the same everywhere.",
            hint="make the same calls with the same settings in every process; only the data differ",
            code="processes-differ",
        )


@torch.no_grad()
def require_same_values(adapters: Adapters, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Adapters that were added to running processes hold the same numbers in all of them.

    Raises:
        AdapterError: ``processes-differ``, in every process.
    """
    found = {}
    for name in names:
        digest = hashlib.sha256()
        for key, value in sorted(adapters.parameters(name).items()):
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found[name] = digest.hexdigest()
    all_processes: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(all_processes, found, group=group)
    first = all_processes[0]
    differing = sorted({name for process in all_processes for name in {*process, *found} if process.get(name) != first.get(name)})
    if differing:
        raise AdapterError(
            f"the processes have other values in {', '.join(map(repr, differing))}, added since their gradients are averaged",
            why="Each process drew its own, so the same step would leave another adapter in each.",
            hint="the same seed everywhere before adding (torch.manual_seed, or generator=), or add before replicate or shard",
            code="processes-differ",
        )


@torch.no_grad()
def send_from_first(adapters: Adapters, group: dist.ProcessGroup | None) -> None:
    """Every process gets the tensors and the settings of the first one's adapters, in place."""
    values = [
        memory
        for slots in adapters.storages()
        for memories in (slots.block.memory, slots.block.settings_memory)
        for memory in memories.values()
    ]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    for value in values:
        dist.broadcast(value, src=first, group=group)
