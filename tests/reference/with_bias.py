"""What another method computes, plus s c on every output feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from reference.layers import Array

Reference = Callable[[nn.Module, Array, Mapping[str, Array]], Array]


def with_bias(inner: Reference) -> Reference:
    """The reference of ``inner`` with a trained bias; ``p`` holds ``bias_change`` and ``scale`` besides."""

    def reference(module: nn.Module, x: Array, p: Mapping[str, Array]) -> Array:
        y = inner(module, x, p)
        change = p["bias_change"] * p["scale"]
        num_axes = len(getattr(module, "kernel_size", ()))
        return y + change.reshape(-1, *(1 for _ in range(num_axes)))

    return reference
