"""Which module is the first whose output is NaN or infinite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def finite(value: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return bool(value.isfinite().all())


@contextlib.contextmanager
def watched(models: Mapping[str, nn.Module], found: list[str]) -> Iterator[None]:
    """Notes every module whose output is not finite, in the order they run: inner modules before the outer ones."""
    with contextlib.ExitStack() as stack:
        for part, model in models.items():
            for name, module in model.named_modules():

                def note(_: nn.Module, __: object, output: object, path: str = f"{name or 'the whole model'} of the {part}") -> None:
                    tensor = output[0] if isinstance(output, tuple | list) and output else output
                    if isinstance(tensor, Tensor) and tensor.is_floating_point() and not finite(tensor):
                        found.append(path)

                stack.callback(module.register_forward_hook(note).remove)
        yield
