"""Batches of many sizes on two graphs: one for the first size, which it knows, and one for every other size.

Left to itself, dynamo takes one dimension after the other for a varying one as it meets them changed: a new length is a graph, and then the
last, smaller batch of an epoch is a third one. The first block, whose input needs no gradient, has a graph of its own for each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onegraph.compiling.aside import set_aside
from onegraph.compiling.compile import Compiled, compile, compiled_of
from onegraph.compiling.regions import dynamic_shapes

_Sizes = tuple[tuple[str, tuple[int, ...]], ...]
_HIDDEN = "hidden_states"


class Masks(Protocol):
    """What decides whether blocks get a mask: with one they are another graph than without."""

    def padded(self, kwargs: dict[str, Any]) -> bool:
        """Whether a batch needs a mask."""
        ...

    def choose(self, always: bool) -> None:
        """From now on blocks get a mask always, or only where a batch needs one."""
        ...


class TwoSizes:
    """A hook in front of a model's forward: the blocks run on the graph for the size at hand. Training and inference have their own.

    Args:
        compiled: What was compiled, by blocks.
        masks: What gives the blocks of this model their masks; None where there is no choice.
    """

    def __init__(self, compiled: Compiled, masks: Masks | None) -> None:
        self._compiled = compiled
        self._masks = masks
        self._first: dict[bool, tuple[_Sizes, bool]] = {}
        self._one = _calls(compiled)
        self._any: dict[nn.Module, Any] = {}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward: choose."""
        if compiled_of(model) is not self._compiled:  # restored, or compiled anew
            if self._masks is not None:
                self._masks.choose(False)
            return
        sizes, padded = _sizes(args, kwargs), self._masks is not None and self._masks.padded(kwargs)
        first, masked = self._first.setdefault(torch.is_grad_enabled(), (sizes, padded))
        every = first != sizes or (padded and not masked)
        if every and not self._any:
            with set_aside(model):
                self._any = _calls(
                    compile(
                        model,
                        replace(self._compiled.settings, dynamic=True),
                        gradient_checkpointing=self._compiled.gradient_checkpointing,
                        protect=bool(self._compiled.protections),
                    )
                )
        for module, call in (self._any if every else self._one).items():
            module._compiled_call_impl = call
        if self._masks is not None:
            self._masks.choose(every or masked)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """A copied or unpickled model is not compiled, and there is nothing to choose."""
        return (_no_choice, ())


def compile_for_two_sizes(model: nn.Module, masks: Masks | None = None) -> bool:
    """Keep batches of many sizes on two graphs, for a model that ``compile`` has compiled by blocks without saying anything of sizes.

    Args:
        model: The model.
        masks: What gives its blocks their masks.

    Returns:
        Whether it could be done: not for a model compiled whole, nor where sizes were settled.
    """
    compiled = compiled_of(model)
    if compiled is None or not compiled.settings.active or compiled.settings.dynamic is not None:
        return False
    if any(region.module is model or dynamic_shapes(region, None) is not None for region in compiled.regions):
        return False
    present = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, TwoSizes)]
    if not any(hook._compiled is compiled for hook in present):
        model.register_forward_pre_hook(TwoSizes(compiled, masks), with_kwargs=True)
    return True


def _calls(compiled: Compiled) -> dict[nn.Module, Any]:
    return {region.module: functools.partial(_alike, region.module._compiled_call_impl) for region in compiled.regions}


def _alike(call: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a block with an input that requires a gradient in training and none in inference, whichever block it is."""
    if args:
        return call(_settled(args[0]), *args[1:], **kwargs)
    if _HIDDEN in kwargs:
        kwargs[_HIDDEN] = _settled(kwargs[_HIDDEN])
    return call(**kwargs)


def _settled(hidden: Any) -> Any:
    wanted = torch.is_grad_enabled()
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.requires_grad == wanted:
        return hidden
    return hidden.detach().requires_grad_(wanted)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Sizes:
    named = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    return tuple((name, tuple(value.shape)) for name, value in named.items() if isinstance(value, Tensor))


def _no_choice() -> Callable[..., None]:
    return _ignore


def _ignore(*args: Any) -> None:
    """No choice."""
