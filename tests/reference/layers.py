"""What the layers compute, point by point."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float64]

_PADDING = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = np.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def embedding(ids: NDArray[np.int64], table: Array) -> Array:
    one_hot = (ids[..., None] == np.arange(table.shape[0])).astype(np.float64)
    return one_hot @ table


def convolution(x: Array, weight: Array, bias: Array | None, module: nn.Module, groups: int) -> Array:
    """X (B, I, *space) with the stride, padding, dilation and padding mode of ``module``."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    kernel = weight.shape[2:]
    if module.padding == "same":
        spans = [d * (k - 1) for d, k in zip(module.dilation, kernel)]
        edges = [(span // 2, span - span // 2) for span in spans]
    elif module.padding == "valid":
        edges = [(0, 0) for _ in kernel]
    else:
        edges = [(p, p) for p in module.padding]
    x = np.pad(x, [(0, 0), (0, 0), *edges], mode=_PADDING[module.padding_mode])
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(x.shape[2:], kernel, module.dilation, module.stride)]
    y = np.zeros((x.shape[0], weight.shape[0], *sizes))
    ins, outs = x.shape[1] // groups, weight.shape[0] // groups
    for out in range(weight.shape[0]):
        group = out // outs
        for where in itertools.product(*(range(size) for size in sizes)):
            for point in itertools.product(*(range(k) for k in kernel)):
                at = tuple(w * s + p * d for w, s, p, d in zip(where, module.stride, point, module.dilation))
                for channel in range(ins):
                    y[(slice(None), out, *where)] += x[(slice(None), group * ins + channel, *at)] * weight[(out, channel, *point)]
    if bias is not None:
        y += bias.reshape(1, -1, *(1 for _ in kernel))
    return y


def normed(x: Array, weight: Array, bias: Array | None, module: nn.Module) -> Array:
    """(x - mean) / sqrt(mean square + eps) times the weight plus the bias; RMS norms have no mean, some scale by 1 + w."""
    if isinstance(module, nn.GroupNorm):
        grouped = x.reshape(x.shape[0], module.num_groups, -1)
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        found = _standardised(grouped, (2,), module.eps, centred=True).reshape(x.shape) * weight.reshape(shape)
        return found if bias is None else found + bias.reshape(shape)
    shape = tuple(module.weight.shape)
    axes = tuple(range(-len(shape), 0))
    eps = getattr(module, "eps", 1e-6)
    gain = weight if isinstance(module, nn.LayerNorm | nn.RMSNorm) else 1.0 + weight
    found = _standardised(x, axes, eps, centred=isinstance(module, nn.LayerNorm)) * gain.reshape(shape)
    return found if bias is None else found + bias.reshape(shape)


def _standardised(x: Array, axes: tuple[int, ...], eps: float, *, centred: bool) -> Array:
    if centred:
        x = x - x.mean(axis=axes, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + eps)


WeightReference = Callable[[Array, "Array | None", Mapping[str, Array], nn.Module], "tuple[Array, Array | None]"]
"""From a weight (O, I / groups, *kernel) and a bias, the adapter's tensors and the module, to the adapted weight and bias."""


def own_tensors(module: nn.Module) -> tuple[Array, Array | None]:
    """Weight, output features first, and bias."""
    weight = np.asarray(module.weight.detach().double())
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":
        weight = weight.T
    if "Norm" in type(module).__name__:
        weight = weight.reshape(-1)
        bias = None if bias is None else bias.reshape(-1)
    return weight, None if bias is None else np.asarray(bias.detach().double())


def plain(module: nn.Module, x: Array, weight: Array, bias: Array | None) -> Array:
    """The plain layer with another weight (output features first) and bias."""
    if isinstance(module, nn.Embedding):
        y = embedding(x.astype(np.int64), weight.T)
        return y if bias is None else y + bias
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return convolution(x, weight, bias, module, module.groups)
    if "Norm" in type(module).__name__:
        return normed(x, weight, bias, module)
    return linear(x, weight, bias)


def by_weight(function: WeightReference) -> Callable[[nn.Module, Array, Mapping[str, Array]], Array]:
    """A reference written as a new weight, as one that computes the output."""

    def output(module: nn.Module, x: Array, p: Mapping[str, Array]) -> Array:
        weight, bias = own_tensors(module)
        return plain(module, x, *function(weight, bias, p, module))

    return output
