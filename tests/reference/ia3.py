"""y = g (W x + b), or y = W (g x) + b."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from reference.layers import Array


def on_output(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """Every output feature times its gain, its bias too."""
    gain = 1 + p["scale"] * (p["gain"] - 1)
    new = weight.copy()
    for out in range(len(weight)):
        new[out] *= gain[out]
    return new, None if bias is None else gain * bias


def on_input(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """Every input feature times its gain."""
    gain = 1 + p["scale"] * (p["gain"] - 1)
    groups = getattr(module, "groups", 1)
    new = weight.copy()
    for out in range(weight.shape[0]):
        group = out // (weight.shape[0] // groups)
        for channel in range(weight.shape[1]):
            new[out, channel] *= gain[group * weight.shape[1] + channel]
    return new, bias


def on_output_alone(weight: Array, bias: Array | None, p: Mapping[str, Array], module: nn.Module) -> tuple[Array, Array | None]:
    """Every output feature times its gain, but for the bias."""
    return on_output(weight, None, p, module)[0], bias
