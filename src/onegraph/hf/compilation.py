"""What Trainer would have compiled by accelerate, as one whole, is compiled here: in place, by blocks, with protections."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from onegraph.compiling import CompileSettings, check_toolchain, compile, compiled_of, resolve_settings
from onegraph.compiling.sizes import compile_for_two_sizes
from onegraph.hf.masks import masks_of

logger = logging.getLogger(__name__)


def compile_as_asked(model: nn.Module, given: nn.Module, plugin: Any) -> None:
    """Compile a model as Trainer's accelerator was told to, once; or make what was compiled by hand ready for Trainer.

    Args:
        model: The model that the adapters are on, in place.
        given: What Trainer was given: the same, or what holds it.
        plugin: accelerate's ``TorchDynamoPlugin``: TrainingArguments, else ``accelerate config`` and its environment.

    Raises:
        CompileError: A backend that can't run, a compiler that isn't there.
    """
    asked = str(plugin.backend.value).lower() != "no"
    if asked and any(module._compiled_call_impl is not None for module in model.modules()):
        logger.warning("the model is compiled already, with its own settings: torch_compile isn't applied a second time")
    elif asked:
        settings = settings_of(plugin)
        check_toolchain(settings)
        logger.info("%s", compile(model, settings))
    compiled = given if compiled_of(given) is not None else model
    compile_for_two_sizes(compiled, masks_of(model))


def settings_of(plugin: Any) -> CompileSettings:
    """Our settings for accelerate's. ``dynamic=False`` is what ``accelerate launch`` writes unasked, so it is read as unsaid.

    A graph break is no error unless fullgraph was asked for: Trainer's users gave no promise that their model has none.
    """
    flags = {
        "backend": str(plugin.backend.value).lower(),
        "mode": str(plugin.mode or "default"),
        "fullgraph": bool(plugin.fullgraph),
        "dynamic": True if plugin.dynamic else None,
    }
    settings = resolve_settings({}, flags=flags)
    return replace(settings, options={**settings.options, **(plugin.options or {})})


@contextlib.contextmanager
def compiled_only_once(plugin: Any) -> Iterator[None]:
    """Inside, accelerate doesn't put a compiled wrapper around a model: its blocks are compiled."""
    from accelerate.utils import DynamoBackend

    before, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = before
