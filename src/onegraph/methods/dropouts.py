"""Dropouts as masks: their probabilities are settings, 0-d tensors, so that none of them is a branch in a graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.layers.base import Layer

PROBABILITIES = ("dropout", "input_dropout", "rank_dropout", "module_dropout")
"""The four kinds that a low-rank path beside a layer can have."""


def used_probabilities(method: object, layer: Layer, names: tuple[str, ...] = PROBABILITIES) -> dict[str, float]:
    """The settings of a method's dropouts, only those that are used."""
    used: dict[str, float] = {name: getattr(method, name) for name in names if getattr(method, name) > 0}
    if layer.kind == "embedding":
        used.pop("input_dropout", None)  # ids can't be dropped elementwise
    return used


def dropped(values: Tensor, probability: Tensor, shape: torch.Size | list[int]) -> Tensor:
    """``values`` with elements of ``shape`` (broadcast) set to 0 with a probability held in a 0-d tensor, the rest times 1 / (1 - p)."""
    kept = torch.rand(shape, device=values.device) >= probability
    return values * kept * (1 / (1 - probability))


def dropped_input(x: Tensor, p: Mapping[str, Tensor], *, training: bool) -> Tensor:
    """The input of the low-rank path, with ``input_dropout``."""
    if training and "input_dropout" in p and x.is_floating_point():  # ids have no elements to drop
        x = dropped(x, p["input_dropout"], x.shape)
    return x


def dropped_ranks(h: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool) -> Tensor:
    """What is between the two factors, with ``dropout`` (elements) and ``rank_dropout`` (a channel for a whole sample)."""
    if training and "dropout" in p:
        h = dropped(h, p["dropout"], h.shape)
    if training and "rank_dropout" in p:
        axis = layer.channel_axis % h.dim()
        h = dropped(h, p["rank_dropout"], [size if position in (0, axis) else 1 for position, size in enumerate(h.shape)])
    return h


def dropped_scale(p: Mapping[str, Tensor], *, training: bool) -> Tensor:
    """The strength, 0 for the whole batch with the probability ``module_dropout``; the rest isn't rescaled."""
    scale = p["scale"]
    if training and "module_dropout" in p:
        scale = scale * (torch.rand((), device=scale.device) >= p["module_dropout"])
    return scale
