"""Kinds of layers: how each is described and run. Nothing here knows a method."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from onegraph.layers.attention import AttentionLayer, ReadLinearLayer, describe_attention, refusal_of_attention
from onegraph.layers.base import Layer, ProductLayer
from onegraph.layers.conv import ConvLayer, describe_conv
from onegraph.layers.embedding import EmbeddingLayer, describe_embedding
from onegraph.layers.linear import LinearLayer, describe_linear
from onegraph.layers.module import ModuleLayer, describe_module
from onegraph.layers.norm import NormLayer, describe_norm
from onegraph.layers.quantized import QuantizedLinear, describe_quantized, refusal_of_quantized

__all__ = [
    "KINDS",
    "AttentionLayer",
    "ConvLayer",
    "EmbeddingLayer",
    "Layer",
    "LinearLayer",
    "ModuleLayer",
    "NormLayer",
    "ProductLayer",
    "QuantizedLinear",
    "ReadLinearLayer",
    "describe",
    "describe_any",
    "refusal",
]

_DESCRIBERS: tuple[Callable[[nn.Module], Layer | None], ...] = (
    describe_attention,
    describe_quantized,
    describe_linear,
    describe_conv,
    describe_embedding,
    describe_norm,
)

KINDS = "Linear, Conv1d, Conv2d, Conv3d, Embedding, MultiheadAttention, Conv1D of transformers, norms"
"""The modules that can be adapted, as messages name them."""


def describe(module: nn.Module) -> Layer | None:
    """Read what a module is; None where it is none of the kinds that can be adapted."""
    return next((layer for read in _DESCRIBERS if (layer := read(module)) is not None), None)


def describe_any(module: nn.Module) -> Layer | None:
    """Read what a module is, any module with parameters of its own and nothing inside included: for methods of the kind "module"."""
    return describe(module) or describe_module(module)


def refusal(module: nn.Module) -> str | None:
    """Why a module of a kind that can be adapted can't be, being what it is; None where nothing special is known."""
    return refusal_of_attention(module) or refusal_of_quantized(module)
