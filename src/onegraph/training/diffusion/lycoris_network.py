"""Which modules get an adapter with ``--network_module=lycoris.kohya``, and which: LyCORIS' names, defaults and presets."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from onegraph.errors import ConfigurationError
from onegraph.layers import Layer, describe
from onegraph.methods import BOFT, IA3, OFT, Dense, DoRA, LoHa, LoKr, LoRA, Method, NormTuning
from onegraph.methods.factorise import factor_pair
from onegraph.methods.lokr import FACTORISED, FULL
from onegraph.training.diffusion.configuration import NetworkSettings

logger = logging.getLogger(__name__)

_TRANSFORMERS = ("Transformer2DModel",)
_RESNETS = ("ResnetBlock2D",)
_SAMPLERS = ("Downsample2D", "Upsample2D")
_ENDS = ("conv_in", "conv_out")
_TIMES = ("time_embedding.linear_1", "time_embedding.linear_2")
_TEXT_ATTENTION = ("CLIPAttention", "CLIPSdpaAttention", "CLIPFlashAttention2")
_TEXT = (*_TEXT_ATTENTION, "CLIPMLP")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Which modules are adapted.

    Args:
        unet: Classes of the UNet whose layers are.
        names: Layers of the UNet by the end of their path.
        text: Classes of the text encoder whose layers are.
        text_names: Layers of the text encoder by the end of their path.
        wide: Whether convolutions of more than one kernel point are.
        on_input: The ends of paths whose IA3 scales the input.
    """

    unet: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    text_names: tuple[str, ...] = ()
    wide: bool = True
    on_input: tuple[str, ...] = ()


PRESETS: Mapping[str, Preset] = {
    "full": Preset(unet=(*_TRANSFORMERS, *_RESNETS, *_SAMPLERS), names=(*_ENDS, *_TIMES), text=_TEXT),
    "full-lin": Preset(unet=(*_TRANSFORMERS, *_RESNETS), names=_TIMES, text=_TEXT, wide=False),
    "attn-mlp": Preset(unet=_TRANSFORMERS, text=_TEXT, wide=False),
    "attn-only": Preset(unet=("Attention",), text=_TEXT_ATTENTION, wide=False),
    "unet-only": Preset(unet=(*_TRANSFORMERS, *_RESNETS, *_SAMPLERS), names=(*_ENDS, *_TIMES)),
    "unet-transformer-only": Preset(unet=_TRANSFORMERS, wide=False),
    "unet-convblock-only": Preset(unet=(*_RESNETS, *_SAMPLERS), names=_ENDS),
    "ia3": Preset(
        names=("to_k", "to_v", "ff.net.2"), text_names=("k_proj", "v_proj", "mlp.fc2"), wide=False, on_input=("ff.net.2", "mlp.fc2")
    ),
}
"""By LyCORIS' names. In diffusers the attention of the UNet is called Attention."""


def unet_plan(unet: nn.Module, settings: NetworkSettings) -> dict[str, Method]:
    """The adapter of each UNet module.

    Args:
        unet: A UNet with diffusers' module classes.
        settings: Algorithm, preset, ranks, alphas.

    Returns:
        Module path -> method, in the model's order.

    Raises:
        ConfigurationError: ``block-size``: features that the algorithm can't split with this rank.
    """
    preset = PRESETS[settings.preset]
    return _plan(unet, preset.unet, preset.names, preset, settings)


def text_encoder_plan(text_encoder: nn.Module, settings: NetworkSettings) -> dict[str, Method]:
    """The adapter of each text encoder module; as ``unet_plan``."""
    preset = PRESETS[settings.preset]
    return _plan(text_encoder, preset.text, preset.text_names, preset, settings)


def _plan(
    model: nn.Module, owners: tuple[str, ...], names: tuple[str, ...], preset: Preset, settings: NetworkSettings
) -> dict[str, Method]:
    plan: dict[str, Method] = {}
    trivial = 0
    impossible: list[str] = []
    for path, module in _modules(model, owners, names):
        layer = describe(module)
        if layer is None:
            continue
        if layer.kind == "norm":
            if settings.train_norm and isinstance(module, nn.LayerNorm | nn.GroupNorm):
                plan[path] = NormTuning()
            continue
        wide = bool(layer.kernel_size) and layer.kernel_size[0] != 1
        if layer.kind not in ("linear", "conv") or (wide and not preset.wide):
            continue
        rank, alpha = settings.rank, settings.alpha
        if wide:
            rank, alpha = settings.conv_dim or rank, settings.conv_alpha or alpha
        asked = _Asked(rank=rank, alpha=float(alpha or rank), wide=wide, on_input=_ends(path, preset.on_input), settings=settings)
        try:
            method = ALGORITHMS[settings.algo](layer, asked)
        except _ImpossibleError as error:
            impossible.append(f"{path}: {error}")
            continue
        if method is None:
            trivial += 1
        else:
            plan[path] = method
    if impossible:
        shown = "\n  ".join(impossible[:5]) + (f"\n  and {len(impossible) - 5} more" if len(impossible) > 5 else "")
        raise ConfigurationError(
            f"algo={settings.algo} can't split {len(impossible)} modules:\n  {shown}",
            why="BOFT needs an even block size, at most the rank, that divides the output features into a power of two of blocks.",
            hint="give --network_dim and conv_dim as large as the numbers above, or train other modules with another preset",
            code="block-size",
        )
    if trivial:
        logger.info("%d modules are left out: their output features can only be split into blocks of one, which can't turn", trivial)
    return plan


def _modules(model: nn.Module, owners: tuple[str, ...], names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Modules below one of the owners, and those that are named."""
    below = {path for path, module in model.named_modules() if type(module).__name__ in owners}
    for path, module in model.named_modules():
        parts = path.split(".")
        if any(".".join(parts[:end]) in below for end in range(1, len(parts))) or _ends(path, names):
            yield path, module


def _ends(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


# From one layer to its method


class _ImpossibleError(Exception):
    """A layer that an algorithm can't split; the text says what is needed."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is asked for on one layer."""

    rank: int
    alpha: float
    wide: bool
    on_input: bool
    settings: NetworkSettings

    @property
    def plain_alpha(self) -> float:
        """The alpha of a method that divides it by the rank, with ``rs_lora`` too."""
        return self.alpha * math.sqrt(self.rank) if self.settings.rs_lora else self.alpha

    def dropouts(self, *names: str) -> dict[str, Any]:
        """Those that the method has."""
        return {name: getattr(self.settings, name) or 0.0 for name in names}


def split(features: int, limit: int) -> tuple[int, int]:
    """A number of features as a product, the smaller one first and at most ``limit`` where it divides; -1: near the square root.

    Example:
        >>> split(320, 4), split(8, 4), split(768, -1)
        ((4, 80), (2, 4), (24, 32))
    """
    first, second = sorted(factor_pair(features, limit))
    return first, second


def butterfly_split(features: int, limit: int) -> tuple[int, int] | None:
    """(block size, number of blocks) for BOFT: the largest even size up to ``limit`` with a power of two of blocks; None: there is none.

    Example:
        >>> butterfly_split(320, 10), butterfly_split(320, 8)
        ((10, 32), None)
    """
    sizes = [size for size in range(2, min(features, limit) + 1, 2) if features % size == 0 and (features // size).bit_count() == 1]
    return (sizes[-1], features // sizes[-1]) if sizes else None


def _lora(layer: Layer, asked: _Asked) -> Method:
    kind = DoRA if asked.settings.dora_wd or asked.settings.algo == "dora" else LoRA
    dropouts = asked.dropouts("dropout", "rank_dropout", "module_dropout")
    return kind(rank=asked.rank, alpha=asked.alpha, rslora=asked.settings.rs_lora, **dropouts)


def _loha(layer: Layer, asked: _Asked) -> Method:
    return LoHa(
        rank=asked.rank,
        alpha=asked.plain_alpha,
        effective_conv=asked.settings.use_tucker and asked.wide,
        init="lycoris",
        **asked.dropouts("rank_dropout", "module_dropout"),
    )


def _lokr(layer: Layer, asked: _Asked) -> Method:
    """Two whole matrices have the strength 1, as LyCORIS has it."""
    settings, rank = asked.settings, asked.rank
    outer_out, inner_out = split(layer.out_features, settings.factor)
    outer_in, inner_in = split(layer.in_features // layer.groups, settings.factor)
    if settings.unbalanced_factorization:
        outer_out, inner_out = inner_out, outer_out
    first_factorised = settings.decompose_both and rank < max(outer_out, outer_in) / 2 and not settings.full_matrix
    second_factorised = rank < max(inner_out, inner_in) / 2 and not settings.full_matrix
    return LoKr(
        rank=rank,
        alpha=asked.plain_alpha if first_factorised or second_factorised else float(rank),
        outer=(outer_out, outer_in),
        effective_conv=settings.use_tucker and asked.wide and second_factorised,
        init="lycoris",
        first_form=FACTORISED if first_factorised else FULL,
        second_form=FACTORISED if second_factorised else FULL,
        **asked.dropouts("rank_dropout", "module_dropout"),
    )


def _oft(layer: Layer, asked: _Asked) -> Method | None:
    """With a gain it is a BOFT of one stage."""
    size, _ = split(layer.out_features, asked.rank)
    if size == 1:
        return None
    if asked.settings.rescaled:
        return BOFT(block_size=size, on_output=True)
    return OFT(block_size=size, exact=True, on_output=True)


def _boft(layer: Layer, asked: _Asked) -> Method:
    found = butterfly_split(layer.out_features, asked.rank)
    if found is None:
        least = butterfly_split(layer.out_features, layer.out_features)
        odd = layer.out_features
        while odd % 2 == 0:
            odd //= 2
        needed = "no rank can" if least is None else f"the rank must be {max(2, 2 * odd)} or more, not {asked.rank}"
        raise _ImpossibleError(f"{layer.out_features} output features: {needed}")
    size, num_blocks = found
    num_factors = num_blocks.bit_length()  # log2 + 1: the last stage reaches across all blocks
    return BOFT(block_size=size, num_factors=num_factors, on_output=True, with_gain=asked.settings.rescaled)


ALGORITHMS: Mapping[str, Callable[[Layer, _Asked], Method | None]] = {
    "lora": _lora,
    "locon": _lora,
    "dora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "full": lambda layer, asked: Dense(),
    "ia3": lambda layer, asked: IA3(on_input=asked.on_input, scales_bias=False),
    "diag-oft": _oft,
    "boft": _boft,
}
"""By LyCORIS' names, and "dora", which is "lora" with dora_wd=True."""
