"""Errors of ours that a compiled region fails with, raised as what they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from onegraph.adapters.row_errors import error_in


def with_own_errors(call: Callable[..., Any]) -> Callable[..., Any]:
    """A region's call whose wrong rows are our error, as in eager, instead of one of torch's with its text inside.

    Args:
        call: The region's compiled call.
    """
    return functools.partial(_call, call)


def _call(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # a part of somebody else's graph, whose caller gets the text
        return call(*args, **kwargs)
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        ours = error_in(str(error))
        if ours is None:
            raise
        raise ours from error
