"""Running a model in a higher precision for a moment, in place, and exactly back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


@contextlib.contextmanager
def raised(models: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Inside it all parameters and buffers of ``models`` have ``dtype`` (complex ones such parts); afterwards their old memory is back.

    The old tensors are kept meanwhile, so this needs one more copy of the weights, in ``dtype``. Settings that adapters keep outside
    parameters and buffers stay as they are: they are 0-d, and 0-d tensors don't decide a result's dtype.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: set[int] = set()
    try:
        for model in models:
            for tensor in [*model.parameters(), *model.buffers()]:
                if id(tensor) in seen or not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                wanted = dtype.to_complex() if tensor.is_complex() else dtype
                if tensor.dtype == wanted:
                    continue
                seen.add(id(tensor))
                kept.append((tensor, tensor.data))
                tensor.grad = None
                tensor.data = tensor.data.to(wanted)
        yield
    finally:
        for tensor, data in kept:
            tensor.grad = None
            tensor.data = data
