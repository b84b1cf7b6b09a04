"""The mean of gradients over all processes, in one message for each dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Give every process the mean of all processes' gradients, grad = sum(grad of each process) / number of processes.

    A gradient that a process doesn't have counts as zero; one that no process has stays None. Doing it twice is the same as once, so
    gradients may be averaged after each of several backward passes. With one process, or none started, nothing happens.

    Args:
        parameters: The same ones, in the same order, in every process.
        group: Of processes; None: all of them.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    chosen = list(parameters)
    if not chosen:
        return
    # First which gradients there are anywhere: a rank whose batch left an adapter out must send zeros in its place.
    there = torch.tensor([parameter.grad is not None for parameter in chosen], dtype=torch.int32, device=chosen[0].device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
    present = [parameter for parameter, anywhere in zip(chosen, there.tolist()) if anywhere]
    for parameters_of_one_kind in _by_kind(present):
        _average(parameters_of_one_kind, group)


def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    message = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(message, group=group)
    message /= dist.get_world_size(group)
    means = torch.split(message, [gradient.numel() for gradient in gradients])
    for parameter, gradient, mean in zip(parameters, gradients, means):
        gradient.copy_(mean.view(gradient.shape))
        parameter.grad = gradient


def _by_kind(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        tensor: Tensor = parameter if parameter.grad is None else parameter.grad
        kinds.setdefault((tensor.device, tensor.dtype), []).append(parameter)
    return kinds.values()
