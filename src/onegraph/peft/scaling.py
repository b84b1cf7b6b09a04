"""The strength of LoRA, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from onegraph.adapters.collection import SCALE
from onegraph.checkpoint.base_weights import without_bias
from onegraph.peft.exchange import adapters_and_configs
from onegraph.peft.mistakes import UsageError, as_value_errors

_LOW_RANK = ("lora", "dora")


@contextmanager
def rescale_adapter_scale(model: nn.Module, multiplier: float) -> Iterator[None]:
    """Inside, every LoRA and DoRA of a model acts ``multiplier`` times as strongly; no recompile.

    Args:
        model: A model with adapters.
        multiplier: From 0, the base model, to 1 and above.

    Raises:
        TypeError: The multiplier is no number.
        UsageError: ``peft-no-adapters``, also where none of them is a LoRA. AdapterError: ``merged``.
    """
    if not isinstance(multiplier, int | float):
        raise TypeError(f"multiplier is a number, not {type(multiplier).__name__}")
    with as_value_errors():
        adapters, _ = adapters_and_configs(model)
        before: dict[str, dict[str, float]] = {}
        for name in adapters.names:
            methods = adapters.methods(name)
            scales = adapters.settings_of(name, SCALE)
            before[name] = {path: scale for path, scale in scales.items() if without_bias(methods[path]).name in _LOW_RANK}
        if not any(before.values()):
            raise UsageError(
                "no adapter of the model is a LoRA",
                hint="model.adapters.scale(name, factor) sets the strength of any method",
                code="peft-no-adapters",
            )
        for name, scales in before.items():
            adapters.set_setting(name, SCALE, {path: scale * multiplier for path, scale in scales.items()})
    try:
        yield
    finally:
        for name, scales in before.items():
            if name in adapters.names:
                adapters.set_setting(name, SCALE, scales)
