"""Regions with hooks that have to run around their graph.

FSDP2 puts the weights of a region together before it runs and takes them apart after it; transformers records hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from onegraph.adapters.walk import is_sharded, plain_class
from onegraph.compiling.recording import records
from onegraph.errors import CompileError

Call = Callable[..., Any]


def within_hooks(module: nn.Module, call: Call, inside: Callable[[], Call]) -> Call:
    """A region's compiled call, made ready to be sharded, or to be given hooks of transformers, at any time.

    Args:
        module: The region.
        call: Its compiled call, hooks and all.
        inside: Gives the compiled call of a forward, without hooks, that takes the module first.
    """
    return functools.partial(_call, module, call, inside)


def forget_forward(module: nn.Module) -> None:
    """Take away the compiled forward that a region with such hooks was given."""
    if isinstance(module.__dict__.get("forward"), _Forward):
        del module.__dict__["forward"]


class _Forward(functools.partial[Any]):
    """A compiled forward in the place of a module's own; a copied or unpickled module is not compiled."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())


def _call(module: nn.Module, call: Call, inside: Callable[[], Call], /, *args: Any, **kwargs: Any) -> Any:
    if not (is_sharded(module) or records(module)):
        return call(*args, **kwargs)
    if "forward" not in module.__dict__:
        _require_whole(module)
        module.__dict__["forward"] = _Forward(inside(), module)
    elif not isinstance(module.__dict__["forward"], _Forward):
        return call(*args, **kwargs)  # somebody else's forward: what they do with it is part of the graph
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _require_whole(region: nn.Module) -> None:
    """Nothing inside a region is sharded by itself: its hooks would be in the middle of a graph."""
    for path, module in region.named_modules():
        if module is not region and is_sharded(module):
            raise CompileError(
                f"{plain_class(region).__name__} is compiled as one graph, and {path} in it is sharded by itself",
                why="FSDP2 puts the weights of a block together just before it runs, which can't be done in the middle of a graph.",
                hint='onegraph.compile(model, regions="blocks"), and shard those blocks: onegraph.shard(model) does',
                code="compiled-whole",
            )
