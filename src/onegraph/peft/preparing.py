"""Preparing a model for training: what quantised and half-precision bases need."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onegraph.adapters import adapters_of
from onegraph.adapters.walk import check_model, unwrapped
from onegraph.peft.exchange import tuner_of
from onegraph.peft.mistakes import UsageError, as_value_errors

_HALF = (torch.float16, torch.bfloat16)
# Methods of quantisation whose unquantised weights stay as they are.
_AS_THEY_ARE = ("gptq", "aqlm", "eetq", "hqq", "torchao")


def prepare_model_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    auto_clear_cache: bool = True,
) -> nn.Module:
    """Freeze a quantised model, put what isn't quantised (norms, heads) into float32 and switch gradient checkpointing on; in place.

    Args:
        model: A model of transformers.
        use_gradient_checkpointing: Whether activations are computed again in the backward pass. For a compiled model use
            ``onegraph.compile(model, gradient_checkpointing=True)`` instead.
        gradient_checkpointing_kwargs: For ``gradient_checkpointing_enable``.
        auto_clear_cache: Whether memory that became free is handed back to the device.
    """
    with as_value_errors():
        check_model(model)
    options = dict(gradient_checkpointing_kwargs or {})
    by_bits = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    method = getattr(getattr(model, "quantization_method", None), "value", getattr(model, "quantization_method", None))
    model.requires_grad_(False)
    if method not in _AS_THEY_ARE:
        for parameter in model.parameters():
            if parameter.dtype in _HALF and type(parameter).__name__ != "Params4bit":
                parameter.data = parameter.data.to(torch.float32)
        if auto_clear_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if (by_bits or method in _AS_THEY_ARE) and use_gradient_checkpointing and callable(enable):
        inputs = getattr(model, "enable_input_require_grads", None)
        if options.get("use_reentrant", True) and callable(inputs):
            inputs()
        enable(gradient_checkpointing_kwargs=options) if options else enable()
    return model


def cast_mixed_precision_params(model: nn.Module, dtype: torch.dtype) -> None:
    """Put what doesn't train into ``dtype``, and adapters into float32.

    All adapters, the frozen ones too: those of one structure lie in one block of memory.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype={dtype!r} is none that weights can have", hint="torch.float16 or torch.bfloat16", code="dtype")
    tuner = tuner_of(model)
    adapters = adapters_of(unwrapped(model) if tuner is None else tuner.model)
    layers = [] if adapters is None else list(adapters.layers.values())
    own = {id(parameter) for layer in layers for parameter in layer._parameters.values()}
    for layer in layers:
        layer._apply(lambda tensor: tensor.to(torch.float32) if tensor.is_floating_point() else tensor, recurse=False)
    base = unwrapped(model) if tuner is None else tuner.model
    for parameter in nn.Module.parameters(base):
        if id(parameter) not in own and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)
