"""What Trainer would have compiled by accelerate, as one whole, is compiled here: in place, by blocks, with protections."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.compiling import CompileSettings, check_toolchain, compile, compiled_of, resolve_settings
from onegraph.compiling.sizes import compile_for_two_sizes

logger = logging.getLogger(__name__)


def compile_as_asked(model: nn.Module, plugin: Any) -> None:
    """Compile a model as Trainer's accelerator was told to, once; or make what was compiled by hand ready for Trainer.

    Args:
        model: The model inside all wrappers, in place.
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
    if compile_for_two_sizes(model):
        _let_inputs_require_gradients(model)


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


def needs_no_input_hook(model: nn.Module) -> bool:
    """Whether blocks are compiled and their first input is seen to by ``_let_inputs_require_gradients``."""
    compiled = compiled_of(model)
    return compiled is not None and compiled.settings.active and hasattr(model, _MARK)


_MARK = "_onegraph_inputs"


def _let_inputs_require_gradients(model: nn.Module) -> None:
    """Let the first block's input require a gradient in training as every other block's does: they then share a graph."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        embeddings = getter() if callable(getter) else None
    except NotImplementedError:
        return
    if isinstance(embeddings, nn.Module) and _MARK not in vars(model):
        vars(model)[_MARK] = embeddings.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor) and torch.is_grad_enabled() and output.is_floating_point() and not output.requires_grad:
        output.requires_grad_()
