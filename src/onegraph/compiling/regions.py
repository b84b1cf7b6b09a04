"""Which modules of a model are compiled: the repeated blocks, so that same-shaped blocks share one compilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from onegraph.adapters.walk import plain_class

# Models whose own lists name too few or too many classes: diffusers lists only the transformer block of a UNet as repeated.
_BLOCKS = {
    "UNet2DConditionModel": {"ResnetBlock2D", "BasicTransformerBlock"},
    "CLIPTextModel": {"CLIPEncoderLayer"},
    "CLIPTextModelWithProjection": {"CLIPEncoderLayer"},
}


# Called with several sizes in one forward pass: left to itself, dynamo takes the second size for a varying one, and inductor (torch 2.13)
# can't order the strides of a UNet's views with symbolic sizes (TypeError: cannot determine truth value of Relational).
_SEVERAL_SIZES = {"UNet2DConditionModel", "ResnetBlock2D", "Transformer2DModel", "BasicTransformerBlock", "AutoencoderKL"}


@dataclass(frozen=True, kw_only=True)
class Region:
    """One module that is compiled by itself.

    Args:
        path: The module's path in the model; "" for the model itself.
        module: The module.
    """

    path: str
    module: nn.Module

    @property
    def class_name(self) -> str:
        """The module's class name: regions of one class share their compilations."""
        return plain_class(self.module).__name__


def regions_of(model: nn.Module) -> list[Region]:
    """The repeated blocks of a model, outermost first, none inside another.

    A block class is one that onegraph knows (Stable Diffusion UNets: transformer blocks and resnets; CLIP: encoder layers), else one that
    diffusers lists as repeated or that transformers must not split. A Transformer2DModel with one block is taken whole, with its norm and
    its two 1x1 convolutions. The model itself is the only region when it has none of them.
    """
    names = _block_class_names(model)
    found = list(_outermost(model, names, ""))
    return found or [Region(path="", module=model)]


def dynamic_shapes(region: Region, asked: bool | None) -> bool | None:
    """What torch.compile gets as ``dynamic``: what was asked, else False for blocks of a UNet, else None (dynamo decides)."""
    if asked is None and region.class_name in _SEVERAL_SIZES:
        return False
    return asked


def _block_class_names(model: nn.Module) -> set[str]:
    """The model's own list: ours where we have one, else diffusers' repeated blocks, else what transformers never splits."""
    names: set[str] = set()
    for module in model.modules():
        known = _BLOCKS.get(plain_class(module).__name__)
        if known is None:
            known = getattr(type(module), "_repeated_blocks", None) or getattr(type(module), "_no_split_modules", None)
        if isinstance(known, list | tuple | set):
            names.update(known)
    return names


def _outermost(module: nn.Module, names: set[str], path: str) -> Iterator[Region]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if plain_class(child).__name__ in names or _is_single_block_transformer(child):
            yield Region(path=child_path, module=child)
        else:
            yield from _outermost(child, names, child_path)


def _is_single_block_transformer(module: nn.Module) -> bool:
    """A Transformer2DModel with one block: a region of its own, since its two projections carry adapters too."""
    blocks = getattr(module, "transformer_blocks", None)
    return plain_class(module).__name__ == "Transformer2DModel" and isinstance(blocks, nn.ModuleList) and len(blocks) == 1
