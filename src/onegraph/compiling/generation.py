"""Generation with a cache of keys and values: one graph for all blocks, one for prompts of every length.

A block of transformers gets the cache of the whole model and takes its own layer out of it by an int that it keeps: a graph for every
block. Here a compiled block is handed its own layer of the cache alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

_INDEX = "layer_idx"


def with_caches(module: nn.Module, call: Callable[..., Any], *, dynamic: bool | None) -> Callable[..., Any]:
    """A region's compiled call, made ready for a cache of keys and values among its arguments.

    Args:
        module: The region.
        call: Its compiled call.
        dynamic: As ``torch.compile`` takes it; None lets prompts of every length share a graph.

    Returns:
        ``call`` itself for a region that has no attention with a place in a cache.
    """
    indices = set(_indices(module))
    if not indices:
        return call
    return functools.partial(_call, call, indices.pop() if len(indices) == 1 else None, dynamic is None)


def already_compiled(model: nn.Module) -> bool:
    """Keep transformers from compiling a model a second time when it generates; False where it has nothing of the kind."""
    found = [part for part in model.modules() if all(callable(getattr(type(part), name, None)) for name in (_COMPILES, "generate"))]
    for part in found:
        part.__dict__[_COMPILES] = functools.partial(_compiled_call, part)
    return bool(found)


def compiled_by_transformers(model: nn.Module) -> None:
    """Undo ``already_compiled``."""
    for part in model.modules():
        part.__dict__.pop(_COMPILES, None)


_COMPILES = "get_compiled_call"


def _compiled_call(model: Any, settings: Any) -> Callable[..., Any]:
    """In place of ``PreTrainedModel.get_compiled_call``; a copy of the model, in which nothing is compiled, has that back."""
    compiled = any(part._compiled_call_impl is not None for part in model.modules())
    found: Callable[..., Any] = model.__call__ if compiled else type(model).get_compiled_call(model, settings)
    return found


def _indices(module: nn.Module) -> Iterator[int | None]:
    """Which layers of a cache a region reads; None among them for one that reads another block's."""
    for part in module.modules():
        for name, value in vars(part).items():
            if ("layer_idx" in name or "layer_index" in name) and isinstance(value, int) and not isinstance(value, bool):
                yield value if name == _INDEX else None


def _call(call: Callable[..., Any], index: int | None, any_length: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call a region: with its own layer of the cache, and with prompts whose length is no part of the graph."""
    place, cache = _cache_among(args, kwargs)
    if cache is None:
        return call(*args, **kwargs)
    if any_length and not torch.is_grad_enabled():  # in training batches of one size are the rule
        _any_length((*args, *kwargs.values()))
    if index is None:
        return call(*args, **kwargs)
    from onegraph.compiling.layer_cache import layer_of  # stands on transformers, which is here where there is a cache

    own, afterwards = layer_of(cache, index)
    with _number_unread(own):
        if isinstance(place, int):
            output = call(*args[:place], own, *args[place + 1 :], **kwargs)
        else:
            output = call(*args, **{**kwargs, place: own})
    afterwards()
    # Some blocks hand the cache on among what they return.
    return tuple(cache if item is own else item for item in output) if type(output) is tuple else output


def _number_unread(own: Any) -> AbstractContextManager[Any]:
    """Inside, a block that takes the encoder's keys and values out of its layer by number doesn't put the number into its graph.

    dynamo reads an int that is a key to find out whether it shall be a symbol; where ints never are, it leaves it unread.
    """
    taken = isinstance(own, sys.modules["transformers.cache_utils"].EncoderDecoderCache) and own.is_updated.get(0) is True
    return torch._dynamo.config.patch(specialize_int=True) if taken else contextlib.nullcontext()


def _cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where the cache is, and the cache; None for none. Without transformers there is none, and it isn't imported for that."""
    module = sys.modules.get("transformers.cache_utils")
    if module is not None:
        for values in (enumerate(args), kwargs.items()):
            for place, value in values:
                if isinstance(value, module.Cache):
                    return place, value
    return 0, None


def _any_length(values: Iterable[Any]) -> None:
    """Tell dynamo that the number of positions differs between prompts, before it finds out by compiling a second time."""
    tensors = list(_tensors(values))
    positions = next((tensor.shape[1] for tensor in tensors if tensor.dim() == (3 if tensor.is_floating_point() else 2)), 1)
    if positions == 1:  # one a step: that is a graph of its own, and has no such size
        return
    for tensor in tensors:
        _mark(tensor, positions, _LENGTH_AXES.get(tensor.dim(), ()))
        if tensor._base is not None:  # dynamo looks at what a view shows a part of, too: a mask may be one
            _mark(tensor._base, positions, range(tensor._base.dim()))


def _mark(tensor: Tensor, size: int, axes: Iterable[int]) -> None:
    for axis in axes:
        if tensor.shape[axis] == size:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)


_LENGTH_AXES = {2: (1,), 3: (1,), 4: (2, 3)}  # ids; hidden states; masks, where a window has as many columns as there are rows


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
