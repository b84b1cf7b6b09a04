"""Which parameter learns at which rate: parts of the model, blocks of the UNet, LoRA+."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from onegraph.training.diffusion.configuration import OptimizerSettings

if TYPE_CHECKING:
    from torch import nn


def parameter_groups(
    parameters: Mapping[str, Mapping[str, nn.Parameter]],
    settings: OptimizerSettings,
    *,
    block_of: Callable[[str], int | None],
) -> list[dict[str, Any]]:
    """The parameters of each part with its learning rate, split for LoRA+ and for block learning rates.

    Args:
        parameters: part ("unet", "text_encoder") -> "path.parameter" -> Parameter.
        settings: Learning rates, LoRA+ ratios, block factors.
        block_of: UNet module path -> number of its block, 0 to 24, or None.

    Returns:
        Groups with ``params``, ``lr`` and a ``name`` for the logs, in an order that depends on nothing but the parameters' order.

    Source: LoRA+ (Hayou et al. 2024, arXiv 2402.12354): the up matrices learn faster than the down matrices.
    """
    ratios = {
        "unet": settings.loraplus_unet_lr_ratio or settings.loraplus_lr_ratio,
        "text_encoder": settings.loraplus_text_encoder_lr_ratio or settings.loraplus_lr_ratio,
    }
    rates = {"unet": settings.unet_rate, "text_encoder": settings.text_encoder_rate}
    weights = settings.block_lr_weights
    groups: dict[str, dict[str, Any]] = {}
    for part, named in parameters.items():
        for path, parameter in named.items():
            name, rate = part, rates[part]
            block = block_of(path.rpartition(".")[0]) if part == "unet" and weights is not None else None
            if block is not None and weights is not None:
                name, rate = f"{name} block {block:02d}", rate * weights[block]
            if ratios[part] is not None and path.endswith(".up"):
                name, rate = f"{name} up", rate * cast(float, ratios[part])
            groups.setdefault(name, {"params": [], "lr": rate, "name": name})["params"].append(parameter)
    return list(groups.values())
