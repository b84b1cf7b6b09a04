"""Convolutions over one, two or three axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from onegraph.errors import TargetError
from onegraph.layers.base import ProductLayer

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_MODULES: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class ConvLayer(ProductLayer):
    """A convolution. Shapes: x (B, I, *space), W (O, I / groups, *kernel), y (B, O, *space').

    Args:
        stride: Step an axis.
        padding: Zeros an axis on both sides, or "same" or "valid".
        dilation: Distance of kernel points an axis.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        edges: Padding of both sides, last axis first, as ``pad`` takes it; used by the modes other than "zeros".
    """

    kind: ClassVar[str] = "conv"

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    padding_mode: str = "zeros"
    edges: tuple[int, ...] = ()

    @property
    def channel_axis(self) -> int:
        """Channels stand before the axes of space; counted from the end, so that it holds without a batch axis too."""
        return -1 - len(self.kernel_size)

    def down_shape(self, rank: int) -> tuple[int, ...]:
        """(R, I, *kernel). It is not grouped: every rank channel sees every input channel."""
        return (rank, self.in_features, *self.kernel_size)

    def up_shape(self, rank: int) -> tuple[int, ...]:
        """(O, R / groups, 1...)."""
        return (self.out_features, rank // self.groups, *(1 for _ in self.kernel_size))

    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """From x (B, I, *space), down (R, I, *kernel) -> (B, R, *space')."""
        convolution = _CONVOLUTIONS[len(self.kernel_size)]
        if self.padding_mode == "zeros":
            return convolution(x, down.to(x.dtype), None, self.stride, self.padding, self.dilation)
        return convolution(functional.pad(x, self.edges, mode=self.padding_mode), down.to(x.dtype), None, self.stride, 0, self.dilation)

    def expand(self, h: Tensor, up: Tensor) -> Tensor:
        """From h (B, R, *space'), up (O, R / groups, 1...) -> (B, O, *space')."""
        return _CONVOLUTIONS[len(self.kernel_size)](h, up.to(h.dtype), groups=self.groups)

    def per_channel(self, vector: Tensor) -> Tensor:
        """(O,) -> (O, 1...)."""
        return vector.reshape(-1, *(1 for _ in self.kernel_size))

    def compose(self, down: Tensor, up: Tensor) -> Tensor:
        """From down (R, I, *kernel), up (O, R, 1...) -> (O, I, *kernel)."""
        if self.groups > 1:
            raise TargetError(
                f"this adapter can't be written as a new weight: the convolution has {self.groups} groups",
                why="Its first factor reads all input channels, a grouped weight only those of its own group.",
                hint="run the adapter beside the layer, or leave grouped convolutions out with exclude=",
                code="grouped-weight",
            )
        return (up.flatten(1) @ down.flatten(1)).reshape(self.out_features, *down.shape[1:])


def describe_conv(module: nn.Module) -> ConvLayer | None:
    """The description of an ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` that runs as one; None for anything else."""
    kind = next((kind for kind in _MODULES if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward:
        return None
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return ConvLayer(
        in_features=module.in_channels,
        out_features=module.out_channels,
        weight_shape=(module.out_channels, module.in_channels // module.groups, *module.kernel_size),
        kernel_size=tuple(module.kernel_size),
        groups=module.groups,
        has_bias=module.bias is not None,
        stride=tuple(module.stride),
        padding=module.padding if isinstance(module.padding, str) else tuple(module.padding),
        dilation=tuple(module.dilation),
        padding_mode=module.padding_mode,
        edges=tuple(module._reversed_padding_repeated_twice),
    )
