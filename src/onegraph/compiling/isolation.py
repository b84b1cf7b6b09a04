"""Each class of blocks has its graphs for itself, and room for all its shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config

# Distinct shapes a block class may have in one model: a Stable Diffusion UNet has about 20, some of them twice (input with and without
# gradient). Past the limit dynamo runs eager, or fails under fullgraph.
_COMPILATIONS_PER_CLASS = 128


def isolated(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What to compile, and with which further arguments of ``torch.compile``, so that its graphs count by themselves.

    torch keeps and counts graphs by the code of the function: this is a copy with a code of its own. The limit is an argument since
    torch 2.13; before, that of the process is raised where it is lower.
    """
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    arguments = {"recompile_limit": _COMPILATIONS_PER_CLASS, "isolate_recompiles": True}
    if arguments.keys() <= inspect.signature(torch.compile).parameters.keys():
        return own, arguments
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _COMPILATIONS_PER_CLASS)
    return own, {}
