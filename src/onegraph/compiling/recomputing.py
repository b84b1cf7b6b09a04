"""Blocks that are computed again in the backward pass, and note something on an object while they run.

bitsandbytes' product in 8 bits keeps what it quantised on an object of the layer. Under a checkpoint dynamo refuses that, as eager would do
it a second time; here the second time would note the same, and is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo.config
from torch import nn

_SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"
_NOTES = ("Linear8bitLt",)


def noting_once(call: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A compiled call whose notes are taken in the forward pass alone, where a layer of the module takes some."""
    if not hasattr(torch._dynamo.config, _SETTING) or not any(type(layer).__name__ in _NOTES for layer in module.modules()):
        return call

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(_SETTING, True):
            return call(*args, **kwargs)

    return run
