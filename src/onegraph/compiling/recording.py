"""What transformers records while a model runs: hidden states, attentions, the logits of routers.

It takes them with hooks that stay for good once they were asked for, and that read a variable which dynamo can't read. A block's own hooks
run around its graph; those inside of it do nothing in a graph, and a call for whose results they are needed runs eager. Where a model is
compiled whole, transformers records in the graph, but can't install its hooks there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from onegraph.adapters.walk import plain_class

logger = logging.getLogger(__name__)

_MODULE = "transformers.utils.output_capturing"
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")
Call = Callable[..., Any]


def with_recording(region: nn.Module, call: Call) -> Call:
    """A region's compiled call, right where transformers records what happens in it.

    Args:
        region: The region: a block, or a whole model.
        call: Its compiled call.
    """
    models = [part for part in region.modules() if _records_itself(part)]
    return functools.partial(_call_whole, models, call) if models else functools.partial(_call, _Inside(region), call)


def records(region: nn.Module) -> bool:
    """Whether transformers records what a region itself takes and returns."""
    return any(map(_is_recorder, region._forward_hooks.values()))


def forget_recording(region: nn.Module) -> None:
    """Give a region's hooks back as they were."""
    for hooks, key, hook in _hooks(region):
        if _is_quiet(hook):
            hooks[key] = hook.args[0]


class _Inside:
    """The hooks inside of a region, looked for again when there are new hooks anywhere.

    Args:
        region: The region.
    """

    def __init__(self, region: nn.Module) -> None:
        self.region = region
        self._seen = -1
        self._keys: frozenset[str | None] = frozenset()

    def keys(self) -> frozenset[str | None]:
        """What they record; None for something unknown. From now on they do nothing in a graph."""
        newest = RemovableHandle.next_id
        if newest != self._seen:
            self._seen, found = newest, set()
            for hooks, key, hook in _hooks(self.region):
                if _is_recorder(hook):
                    hooks[key] = functools.partial(_quiet, hook)
                    found.add(_key(hook))
                elif _is_quiet(hook):
                    found.add(_key(hook.args[0]))
            self._keys = frozenset(found)
        return self._keys


def _call(inside: _Inside, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    recording = sys.modules.get(_MODULE)
    if recording is None or torch.compiler.is_compiling():
        return call(*args, **kwargs)
    keys = inside.keys()
    asked = recording._active_collector.get() if keys else None  # by key, what this thread's call of the model records
    if asked and (None in keys or not keys.isdisjoint(asked)):
        _say_once(plain_class(inside.region).__name__, ", ".join(sorted(map(str, keys & set(asked)))))
        with torch.compiler.set_stance("force_eager"):
            return call(*args, **kwargs)
    return call(*args, **kwargs)


@functools.cache
def _say_once(class_name: str, recorded: str) -> None:
    logger.warning("%s runs uncompiled where transformers records what is inside of it (%s)", class_name, recorded or "by an unknown hook")


def _call_whole(models: Sequence[nn.Module], call: Call, /, *args: Any, **kwargs: Any) -> Any:
    recording = sys.modules.get(_MODULE)
    if recording is not None and not torch.compiler.is_compiling():
        settings = [getattr(model, "config", None) for model in models]
        if any(kwargs.get(name) or any(getattr(config, name, None) for config in settings) for name in _ASKED):
            for model in models:  # outermost first: it installs those of the models inside
                recording.maybe_install_capturing_hooks(model)
    return call(*args, **kwargs)


def _records_itself(part: nn.Module) -> bool:
    """Whether the forward of a module is one around which transformers records."""
    function = getattr(type(part), "forward", None)
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__") == _MODULE:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _quiet(hook: Call, module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that does nothing in a graph."""
    return None if torch.compiler.is_compiling() else hook(module, args, output)


def _hooks(region: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Every hook on what is inside of a region, and where it is kept."""
    for part in region.modules():
        if part is not region:
            for key, hook in list(part._forward_hooks.items()):
                yield part._forward_hooks, key, hook


def _is_recorder(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _MODULE


def _is_quiet(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _quiet


def _key(hook: Any) -> str | None:
    """What a hook of transformers records."""
    found = inspect.getclosurevars(hook).nonlocals.get("key")
    return found if isinstance(found, str) else None
