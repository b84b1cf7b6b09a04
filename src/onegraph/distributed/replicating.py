"""Adapters that train on every process's own data: the mean of their gradients is there when a backward pass ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from onegraph.adapters import Adapters, adapters_of
from onegraph.distributed.agreement import require_processes, require_same_adapters, require_same_values, send_from_first
from onegraph.distributed.gradients import average_gradients
from onegraph.errors import AdapterError, ConfigurationError


def replicate(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Average the adapters' gradients over all processes whenever a backward pass ends, in place; returns the model.

    What DDP does for a model, for adapters: all of them, the one that is used now and any that is used, added or named for rows of a
    batch later, compiled or not. The adapters' values are those of the first process from now on. Every process makes the same calls: one
    that is added later has to begin with the same values everywhere, and the first backward pass looks (``processes-differ``).

    Args:
        model: With adapters; the whole of it is in every process.
        group: Of processes; None: all of them.

    Raises:
        ConfigurationError: ``no-process-group``; ``replicated-twice``.
        AdapterError: ``nothing-adapted``; ``processes-differ``.
    """
    require_processes("replicate(model)")
    adapters = adapters_with(model, "replicate(model)")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigurationError(
            "replicate(model) was given a DistributedDataParallel, which averages gradients itself",
            why="Both would send the same gradients.",
            hint="one of the two; replicate(model.module) also averages adapters that are used later",
            code="replicated-twice",
        )
    require_same_adapters(adapters, group)
    send_from_first(adapters, group)
    Synchroniser(adapters, group).start()
    return model


def adapters_with(model: nn.Module, call: str) -> Adapters:
    """The adapters of a model that must have some.

    Raises:
        AdapterError: ``nothing-adapted``.
    """
    adapters = adapters_of(model)
    if adapters is None or not adapters.names:
        raise AdapterError(
            f"{call}: this model has no adapters", hint="attach(model, LoRA(rank=16), targets=[...]) first", code="nothing-adapted"
        )
    return adapters


class Synchroniser:
    """Averages the adapters' gradients at the end of every backward pass that reached one of them.

    A process in which no adapter took part sends nothing, and the others would wait for it: as with DDP, every process runs the adapters
    in every pass.

    Args:
        adapters: Of the model.
        group: Of processes; None: all of them.
    """

    def __init__(self, adapters: Adapters, group: dist.ProcessGroup | None) -> None:
        self._adapters = adapters
        self._group = group
        self._hooked: Any = WeakTensorKeyDictionary()
        self._pass: int | None = None
        self._known: set[str] = set()

    def start(self) -> None:
        """From now on, for the Parameters that run now and for those that run later.

        Raises:
            ConfigurationError: ``replicated-twice``.
        """
        if any(isinstance(call, partial) and call.func is Synchroniser._hook for call in self._adapters.listeners):
            raise ConfigurationError(
                "the gradients of these adapters are averaged over the processes already",
                hint="call replicate(model) or shard(model) once",
                code="replicated-twice",
            )
        self._known = set(self._adapters.names)
        self._adapters.listeners.append(partial(Synchroniser._hook, self))
        self._hook()

    def _hook(self) -> None:
        self._known &= set(self._adapters.names)  # one added again under the name is another
        for leaf in self._adapters.running_leaves():
            if leaf not in self._hooked:
                self._hooked[leaf] = leaf.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, _: Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if self._pass != current:  # by its number: a pass that an error ended never ran what was queued
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._pass = None
        adapters = self._adapters
        added = [name for name in adapters.names if name not in self._known]
        if added:
            require_same_values(adapters, added, self._group)
            self._known.update(added)
        average_gradients((value for name in adapters.names for value in adapters.parameters(name).values()), self._group)
