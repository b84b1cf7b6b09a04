"""Which modules of a Stable Diffusion model get an adapter, with which rank and alpha, and attaching them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from onegraph.adapters import Adapters, attach
from onegraph.checkpoint import read
from onegraph.checkpoint.dialects.kohya import PREFIXES
from onegraph.checkpoint.matching import Placement, fit
from onegraph.errors import CheckpointError, ConfigurationError
from onegraph.layers import Layer, describe
from onegraph.methods import LoRA, Method
from onegraph.methods.low_rank import LowRank
from onegraph.training.diffusion import lycoris_network
from onegraph.training.diffusion.configuration import NetworkSettings, OptimizerSettings

logger = logging.getLogger(__name__)

NUM_BLOCKS = 25
"""Blocks of an SD 1.x or 2.x UNet as block_dims and the block learning rates count them: 12 down, 1 middle, 12 up."""

_TEXT_MODULES = ("CLIPAttention", "CLIPSdpaAttention", "CLIPFlashAttention2", "CLIPMLP")
_BLOCK = re.compile(r"(?:^|\.)(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


class DiffusionModels(Protocol):
    """What adapters are attached to; a ``BaseModel`` is one."""

    @property
    def unet(self) -> nn.Module:
        """The UNet, with diffusers' module classes."""

    @property
    def text_encoder(self) -> nn.Module:
        """The text encoder, with transformers' module classes."""


def block_of(path: str) -> int | None:
    """The number of a UNet module's block, 0 to 24; None outside the blocks.

    Each resolution has three places: its layers are 0 and 1 (0 to 2 on the way up), its sampler is 2. Block 0 is the input
    convolution, 12 the middle, 13 the first on the way up.

    Example:
        >>> block_of("down_blocks.1.attentions.0.proj_in"), block_of("mid_block.attentions.0.proj_in"), block_of("conv_in")
        (4, 12, None)
    """
    if re.search(r"(?:^|\.)mid_block\.", path):
        return 12
    if (found := _BLOCK.search(path)) is None:
        return None
    way, level, kind, index = found[1], int(found[2]), found[3], int(found[4])
    place = 3 * level + (2 if kind.endswith("samplers") else index)
    return place + (1 if way == "down" else 13)


def unet_plan(unet: nn.Module, settings: NetworkSettings, optimizer: OptimizerSettings | None = None) -> dict[str, LoRA]:
    """The adapter of each UNet module: every Linear and Conv2d of the transformers, and with conv_dim those of resnets and samplers.

    3x3 convolutions have the rank conv_dim, all else the network's rank; block_dims and conv_block_dims say it for each block. A rank of
    0, or a block whose learning-rate factor is 0, means no adapter.

    Args:
        unet: A UNet with diffusers' module classes.
        settings: Ranks, alphas, dropouts.
        optimizer: Its block learning-rate factors.

    Returns:
        Module path -> method, in the model's order.
    """
    with_convolutions = settings.conv_dim is not None or settings.conv_block_dims is not None
    owners = (Transformer2DModel, ResnetBlock2D, Downsample2D, Upsample2D) if with_convolutions else (Transformer2DModel,)
    factors = None if optimizer is None else optimizer.block_lr_weights
    plan: dict[str, LoRA] = {}
    for path, module in _layers_inside(unet, owners):
        block = block_of(path)
        if factors is not None and block is not None and factors[block] == 0:
            continue
        method = _method(settings, block, is_wide=isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1))
        if method is not None:
            plan[path] = method
    return plan


def text_encoder_plan(text_encoder: nn.Module, settings: NetworkSettings) -> dict[str, LoRA]:
    """The adapter of each text encoder module: q, k, v and out_proj of the attention, fc1 and fc2 of the MLP.

    Args:
        text_encoder: A CLIP text encoder with transformers' module classes.
        settings: Rank, alpha, dropouts.

    Returns:
        Module path -> method, in the model's order.
    """
    method = LoRA(rank=settings.rank, alpha=settings.effective_alpha, **_dropouts(settings))
    owners = {path for path, module in text_encoder.named_modules() if type(module).__name__ in _TEXT_MODULES}
    return {path: method for path, _ in _layers_below(text_encoder, owners, (nn.Linear,))}


def _layers_inside(model: nn.Module, owners: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    """Linear and Conv2d layers inside modules of some classes."""
    return _layers_below(model, {path for path, module in model.named_modules() if isinstance(module, owners)}, (nn.Linear, nn.Conv2d))


def _layers_below(model: nn.Module, owners: set[str], kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    """Layers of some kinds whose path goes through one of the owners."""
    for path, module in model.named_modules():
        parts = path.split(".")
        if isinstance(module, kinds) and any(".".join(parts[:end]) in owners for end in range(1, len(parts))):
            yield path, module


def _method(settings: NetworkSettings, block: int | None, *, is_wide: bool) -> LoRA | None:
    """The method of one UNet layer; None where its rank is 0."""
    rank: int | None
    alpha: float | None
    if is_wide:
        dims, alphas = settings.conv_block_dims, settings.conv_block_alphas
        rank, alpha = settings.conv_dim, 1.0 if settings.conv_alpha is None else settings.conv_alpha
    else:
        dims, alphas = settings.block_dims, settings.block_alphas
        rank, alpha = settings.rank, settings.alpha
    if block is not None:
        rank = dims[block] if dims is not None else rank
        alpha = alphas[block] if alphas is not None else alpha
    if not rank:
        return None
    return LoRA(rank=rank, alpha=float(alpha) if alpha else float(rank), **_dropouts(settings))


def _dropouts(settings: NetworkSettings) -> dict[str, Any]:
    """The three dropouts as the method calls them."""
    return {name: getattr(settings, name) or 0.0 for name in ("dropout", "rank_dropout", "module_dropout")}


def attach_networks(
    models: DiffusionModels,
    settings: NetworkSettings,
    *,
    optimizer: OptimizerSettings | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Adapters]:
    """Attach the adapters of a run to its UNet and text encoder, and start from a file where one is given.

    Args:
        models: The base model.
        settings: What to adapt, ranks, alphas, dropouts, and the file to start from.
        optimizer: Its block learning-rate factors: blocks with 0 get no adapter.
        generator: Draws the initial tensors, on the CPU; first the UNet's.

    Returns:
        "unet" and "text_encoder" -> adapters, those that are trained.

    Raises:
        ConfigurationError: ``nothing-to-train``: every rank is 0. ``network-weights``: the file has other ranks or alphas, or modules
            that the settings don't adapt.
        CheckpointError: the file can't be read or is for another model.
    """
    plans: dict[str, Mapping[str, Method]] = {}
    if settings.train_unet:
        plans["unet"] = _unet_plan(models.unet, settings, optimizer)
    if settings.train_text_encoder:
        plans["text_encoder"] = _text_encoder_plan(models.text_encoder, settings)
    if settings.module == "lycoris.kohya":  # presets leave parts out
        plans = {part: plan for part, plan in plans.items() if plan} or plans
    starts: dict[str, Placement] = {}
    if settings.weights is not None:
        starts = _starts(settings.weights, {part: getattr(models, part) for part in plans})
        if settings.dim_from_weights:
            plans = {part: _with_dropouts(placement.methods, settings) for part, placement in starts.items()}
        else:
            _refuse_other_shapes(plans, starts, {part: getattr(models, part) for part in starts}, settings.weights)
    for part, plan in plans.items():
        if not plan:
            what = f"no module of the {part.replace('_', ' ')} would get an adapter"
            hint = "give some block a rank and a learning-rate factor above 0"
            raise ConfigurationError(what, why="Its ranks or its learning-rate factors are all 0.", hint=hint, code="nothing-to-train")
    networks = {part: _attach(getattr(models, part), plan, generator) for part, plan in plans.items()}
    for part, placement in starts.items():
        networks[part].load_tensors("default", placement.tensors, partial=True)
        fresh = len(plans[part]) - len(placement.tensors)
        if fresh:
            logger.warning(
                "%s has nothing for %d of the %d modules of the %s: they start anew", settings.weights, fresh, len(plans[part]), part
            )
    return networks


def _unet_plan(unet: nn.Module, settings: NetworkSettings, optimizer: OptimizerSettings | None) -> Mapping[str, Method]:
    if settings.module == "lycoris.kohya":
        return lycoris_network.unet_plan(unet, settings)
    return unet_plan(unet, settings, optimizer)


def _text_encoder_plan(text_encoder: nn.Module, settings: NetworkSettings) -> Mapping[str, Method]:
    if settings.module == "lycoris.kohya":
        return lycoris_network.text_encoder_plan(text_encoder, settings)
    return text_encoder_plan(text_encoder, settings)


def _attach(model: nn.Module, plan: Mapping[str, Method], generator: torch.Generator | None) -> Adapters:
    """Attach a plan: its commonest method, and the others as overrides by whole path."""
    paths: dict[Method, list[str]] = {}
    for path, method in plan.items():
        paths.setdefault(method, []).append(path)
    common = max(paths, key=lambda method: len(paths[method]))
    overrides = {"^(?:" + "|".join(map(re.escape, there)) + ")": method for method, there in paths.items() if method != common}

    def chosen(path: str, module: nn.Module) -> bool:
        return path in plan

    return attach(model, common, targets=chosen, overrides=overrides, generator=generator)


def _starts(path: str, models: Mapping[str, nn.Module]) -> dict[str, Placement]:
    """What a file has for each model."""
    file = read(path)
    starts = {}
    for part, model in models.items():
        names = (part, PREFIXES[part], "lora_te1" if part == "text_encoder" else PREFIXES[part])
        name = next((name for name in names if name in file.parts), None)
        if name is not None:
            starts[part] = fit(file, model, part=name)
    if not starts:
        raise CheckpointError(
            f"--network_weights {path} has nothing for the {' or the '.join(models).replace('_', ' ')}",
            why=f"It has the parts {', '.join(map(repr, file.parts))}.",
            hint="give a file of a Stable Diffusion 1.x or 2.x network, or train the part that it has",
            code="network-weights",
        )
    return starts


def _with_dropouts(methods: Mapping[str, Method], settings: NetworkSettings) -> dict[str, Method]:
    """The file's ranks and alphas with the run's dropouts."""
    dropouts = _dropouts(settings)
    found = {}
    for path, method in methods.items():
        # OFT has a dropout of one of these names for its blocks, and no rank.
        known = {name: value for name, value in dropouts.items() if name in method.random_settings} if _has_ranks(method) else {}
        found[path] = dataclasses.replace(method, **known)
    return found


def _has_ranks(method: Method) -> bool:
    return "rank_dropout" in method.random_settings


def _refuse_other_shapes(
    plans: Mapping[str, Mapping[str, Method]], starts: Mapping[str, Placement], models: Mapping[str, nn.Module], file: str
) -> None:
    """Raise where a file doesn't fit the ranks, alphas and modules of the settings."""
    different: list[str] = []
    for part, placement in starts.items():
        for path, method in placement.methods.items():
            planned = plans[part].get(path)
            if planned is None:
                different.append(f"{path}: not adapted here")
            elif type(method) is not type(planned):
                different.append(f"{path}: {method.name} in the file, {planned.name} here")
            elif isinstance(method, LowRank) and isinstance(planned, LowRank):
                if (method.rank, method.scale) != (planned.rank, planned.scale):
                    different.append(f"{path}: rank {method.rank}, alpha {method.alpha} in the file; {planned.rank}, {planned.alpha} here")
            elif not _same_function(method, planned, models[part].get_submodule(path)):
                different.append(f"{path}: {method} in the file, {planned} here")
    if different:
        shown = "\n  ".join(different[:5])
        more = f"\n  and {len(different) - 5} more" if len(different) > 5 else ""
        raise ConfigurationError(
            f"--network_weights {file} doesn't fit the network's settings:\n  {shown}{more}",
            why="Training would start from another function than the file's.",
            hint="add --dim_from_weights, or give the file's --network_dim and --network_alpha",
            code="network-weights",
        )


def _same_function(method: Method, planned: Method, module: nn.Module) -> bool:
    """Whether both are the same function of the same tensors; dropouts may differ."""
    layer = describe(module)
    assert layer is not None
    one, other = (_function(settled, layer) for settled in (method.settled(layer, [layer]), planned.settled(layer, [layer])))
    return one == other


def _function(method: Method, layer: Layer) -> tuple[object, ...]:
    strengths = {name: value for name, value in method.settings(layer).items() if name not in method.random_settings}
    return method.structure(), method.parameters(layer), strengths


@dataclass(frozen=True, kw_only=True)
class NormReport:
    """What ``limit_norms`` did.

    Args:
        num_scaled: Modules that were scaled down.
        mean: Mean norm of the modules' weight changes afterwards.
        largest: Largest norm afterwards.
    """

    num_scaled: int
    mean: float
    largest: float


@torch.no_grad()
def limit_norms(adapters: Adapters, max_norm: float) -> NormReport:
    """Scale down, in place, each adapter whose weight change s U D has a Frobenius norm above ``max_norm``; both factors by the same root.

    |U D|^2 = sum((U^T U) * (D D^T)), so the product is never made. The tensors stay where they are: a compiled graph is not touched.

    Args:
        adapters: LoRA adapters; the active one is limited.
        max_norm: Largest norm allowed, above 0.

    Source: sd-scripts' ``--scale_weight_norms``; max-norm regularisation, Srivastava et al. 2014 (Dropout), section 5.1.
    """
    name = adapters.active
    if name is None:
        return NormReport(num_scaled=0, mean=0.0, largest=0.0)
    scales = adapters.settings_of(name, "scale")
    parameters = adapters.parameters(name)
    paths = [path for path in scales if f"{path}.down" in parameters]
    norms = torch.stack([_norm(parameters[f"{path}.down"], parameters[f"{path}.up"], scales[path]) for path in paths])
    ratios = (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    for path, root in zip(paths, ratios.sqrt().unbind(), strict=True):
        parameters[f"{path}.down"].mul_(root)
        parameters[f"{path}.up"].mul_(root)
    after = norms * ratios
    return NormReport(num_scaled=int((ratios < 1).sum()), mean=float(after.mean()), largest=float(after.max()))


def _norm(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The Frobenius norm of scale U D; 0-d, fp32."""
    down_RN, up_OR = down.flatten(1).float(), up.flatten(1).float()
    squared = ((up_OR.T @ up_OR) * (down_RN @ down_RN.T)).sum()
    return squared.clamp(min=0).sqrt() * abs(scale)
