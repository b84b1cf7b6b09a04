"""Compiles a model in place, by blocks or whole, and undoes it."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onegraph.adapters.walk import check_model, plain_class
from onegraph.compiling.generation import already_compiled, compiled_by_transformers, with_caches
from onegraph.compiling.headers import precompile_when_built
from onegraph.compiling.hooked import forget_forward, within_hooks
from onegraph.compiling.isolation import isolated
from onegraph.compiling.last_run import note_at_exit
from onegraph.compiling.protections import protections_for
from onegraph.compiling.raising import with_own_errors
from onegraph.compiling.recomputing import noting_once
from onegraph.compiling.recording import forget_recording, with_recording
from onegraph.compiling.regions import Region, dynamic_shapes, regions_of
from onegraph.compiling.settings import CompileSettings
from onegraph.compiling.tuning import tuned_options
from onegraph.errors import CompileError, ConfigurationError

_ATTRIBUTE = "_onegraph_compiled"


@dataclass
class Compiled:
    """What ``compile`` did to a model.

    Args:
        model: The model, compiled in place.
        settings: The settings it was compiled with.
        regions: The modules that are compiled, each by itself.
        protections: Names of the compiler switches that are set, see ``protections.py``.
        gradient_checkpointing: True when each region's backward recomputes its activations, inside the graph.
    """

    model: nn.Module
    settings: CompileSettings
    regions: list[Region]
    protections: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Puts the model back as it was: eager."""
        while self._undo:
            self._undo.pop()()
        self.model.__dict__.pop(_ATTRIBUTE, None)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or unpickled model is not compiled: torch drops the compiled call as well."""
        return (type(None), ())

    def __str__(self) -> str:
        if not self.settings.active:
            return f"{plain_class(self.model).__name__}: not compiled"
        counts = Counter(region.class_name for region in self.regions)
        blocks = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"{plain_class(self.model).__name__}: {blocks} ({self.settings.regions}, backend {self.settings.backend})"


def compile(
    model: nn.Module,
    settings: CompileSettings | None = None,
    *,
    gradient_checkpointing: bool = False,
    protect: bool = True,
    **overrides: Any,
) -> Compiled:
    """Compiles ``model`` in place; parameters, module names and files stay as they are.

    With ``regions="blocks"`` every repeated block is compiled by itself, and blocks of one class and shape share one compilation. With
    ``regions="whole"`` the model is one graph. Compiling happens at the first call.

    Args:
        model: Any module, with or without adapters, in any order of attaching and compiling.
        settings: Defaults to ``CompileSettings()``: inductor, by blocks, fullgraph.
        gradient_checkpointing: Recompute each region in the backward pass, inside the graph. For diffusers and transformers models use this
            instead of the model's own switch.
        protect: Set the switches that keep results right on this torch (``protections.py``); False is torch as it comes, to show that they
            are needed.
        **overrides: Single fields of the settings: ``backend=``, ``regions=``, ``dynamic=``, ``mode=``, ``fullgraph=``, ``options=``.

    Returns:
        What was compiled; its ``restore()`` makes the model eager again. Compiling again replaces the earlier compilation.

    Raises:
        ConfigurationError: ``not-a-model``; ``compile-settings-unknown``: an override that is no field of CompileSettings.
        CompileError: ``already-wrapped``: a ``torch.compile`` wrapper was given instead of the model inside it.

    Source: repeated blocks, https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
    """
    check_model(model)
    settings = _settle(settings, overrides)
    if hasattr(model, "_orig_mod"):
        raise CompileError(
            "This model is a torch.compile wrapper already.",
            why="Compiling a wrapper compiles twice, and its file keys would carry _orig_mod.",
            hint="onegraph.compile(model._orig_mod)",
            code="already-wrapped",
        )
    earlier = compiled_of(model)
    if earlier is not None:
        earlier.restore()
    regions = [Region(path="", module=model)] if settings.regions == "whole" else regions_of(model)
    compiled = Compiled(model=model, settings=settings, regions=regions, gradient_checkpointing=gradient_checkpointing)
    if settings.active:
        if settings.backend == "inductor":
            precompile_when_built()
            note_at_exit()
        compiled.protections = tuple(protection.name for protection in protections_for(settings.backend)) if protect else ()
        whole = settings.regions == "whole"
        if gradient_checkpointing and whole:
            _checkpoint_blocks(model, compiled)
        callers: dict[str, Callable[..., Any]] = {}
        inside: dict[str, Callable[[], Callable[..., Any]]] = {}
        for region in regions:
            if region.class_name not in callers:
                make = functools.partial(
                    caller, region, settings, gradient_checkpointing=gradient_checkpointing and not whole, protect=protect
                )
                callers[region.class_name], inside[region.class_name] = make(), functools.cache(functools.partial(make, hooks=False))
            call = within_hooks(region.module, functools.partial(callers[region.class_name], region.module), inside[region.class_name])
            call = with_caches(region.module, with_recording(region.module, call), dynamic=settings.dynamic)
            _install(region.module, with_own_errors(call), compiled)
        if already_compiled(model):
            compiled._undo.append(functools.partial(compiled_by_transformers, model))
    elif gradient_checkpointing:
        _checkpoint_blocks(model, compiled)
    model.__dict__[_ATTRIBUTE] = compiled
    return compiled


def compiled_of(model: nn.Module) -> Compiled | None:
    """What ``compile`` did to this model, or None."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Compiled) and found.model is model else None


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Inside it everything compiled runs eager; nothing is compiled, and nothing compiled is lost."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _settle(settings: CompileSettings | None, overrides: dict[str, Any]) -> CompileSettings:
    settings = settings if settings is not None else CompileSettings()
    unknown = set(overrides) - set(CompileSettings.__dataclass_fields__)
    if unknown:
        raise ConfigurationError(
            f"onegraph.compile has no setting {', '.join(sorted(unknown))}.",
            hint=f"the settings are {', '.join(CompileSettings.__dataclass_fields__)}",
            code="compile-settings-unknown",
        )
    return replace(settings, **overrides)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _run_checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or not module.training:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    return checkpoint(module._call_impl, *args, use_reentrant=False, **kwargs)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _forward_checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or not module.training:
        return type(module).forward(module, *args, **kwargs)
    return checkpoint(type(module).forward, module, *args, use_reentrant=False, **kwargs)


def caller(
    region: Region, settings: CompileSettings, *, gradient_checkpointing: bool, protect: bool, hooks: bool = True
) -> Callable[..., Any]:
    """One torch.compile for all regions of a class, called with the module first; without its hooks where they run around it.

    torch refuses mode and options together, so a mode is spelt out as its options.
    """
    options = {**(tuned_options(settings.backend, region.module) if protect else {}), **settings.options}
    if settings.backend == "inductor" and settings.mode != "default":
        options = {**torch._inductor.list_mode_options(settings.mode), **options}
    for protection in protections_for(settings.backend) if protect else ():
        protection.prepare()
        options.update(protection.options)
    arguments: dict[str, Any] = {
        "backend": settings.backend,
        "dynamic": dynamic_shapes(region, settings.dynamic),
        "fullgraph": settings.fullgraph,
    }
    if options:
        arguments["options"] = options
    called = (_run, _run_checkpointed) if hooks else (_forward, _forward_checkpointed)
    own, further = isolated(called[gradient_checkpointing])
    return noting_once(torch.compile(own, **arguments, **further), region.module)


def _install(module: nn.Module, caller: Callable[..., Any], compiled: Compiled) -> None:
    before = module._compiled_call_impl
    module._compiled_call_impl = caller

    def undo() -> None:
        module._compiled_call_impl = before
        forget_forward(module)
        forget_recording(module)

    compiled._undo.append(undo)


def _checkpoint_blocks(model: nn.Module, compiled: Compiled) -> None:
    """Wraps each repeated block's forward in a checkpoint: traced into a whole graph, or run eager."""
    for region in regions_of(model):
        module = region.module
        plain = module.forward
        module.forward = functools.partial(_checkpointed_forward, module, plain)

        def undo(module: nn.Module = module) -> None:
            module.__dict__.pop("forward", None)

        compiled._undo.append(undo)


def _checkpointed_forward(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or not module.training:
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, **kwargs)
