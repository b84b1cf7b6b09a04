"""Which adapter goes where: a method by its name, its fields, and its targets."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from onegraph.adapters import Adapters, attach
from onegraph.errors import ConfigurationError, TargetError
from onegraph.layers import describe
from onegraph.methods import METHODS, Method
from onegraph.training.settings import parse_arguments, read_settings
from onegraph.training.text.configuration import MethodSettings

OFFERED = {name: kind for name, kind in METHODS.items() if name != "with_bias"}
"""Name -> method; what only stands around another method is left out."""


def method_of(settings: MethodSettings, label: Callable[[str], str] = str) -> Method:
    """The method that the settings name, with its fields.

    Raises:
        ConfigurationError: ``method-unknown``; ``settings-file`` for a field that it doesn't have; the method's own codes for a value.
    """
    kind = OFFERED.get(settings.name.lower().replace("-", "_"))
    if kind is None:
        near = difflib.get_close_matches(settings.name.lower(), OFFERED, n=2, cutoff=0.5)
        raise ConfigurationError(
            f"{label('method.name')} is {settings.name!r}, which is no method",
            hint=(f"did you mean {' or '.join(near)}? " if near else "") + f"The methods are {', '.join(OFFERED)}",
            code="method-unknown",
        )
    arguments = parse_arguments(settings.arguments, label("method.arguments"))
    return read_settings(kind, arguments, f"method {kind.name}")


def attach_adapter(
    model: PreTrainedModel, settings: MethodSettings, *, generator: torch.Generator, label: Callable[[str], str]
) -> Adapters:
    """Puts the adapter on the model.

    Raises:
        ConfigurationError: As ``method_of``.
        TargetError: Targets that match nothing, or that the method can't take.
    """
    method = method_of(settings, label)
    if settings.targets == ("all-linear",):
        return attach(model, method, targets="all-linear", exclude=settings.exclude, generator=generator)
    return attach(model, method, targets=settings.targets or _all_of(model, method), exclude=settings.exclude, generator=generator)


def _all_of(model: PreTrainedModel, method: Method) -> Callable[[str, nn.Module], bool]:
    """Every linear layer but the output head, or every norm for a method of norms: those that the method can take."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    kind = "linear" if "linear" in method.kinds else "norm"

    def wanted(_: str, module: nn.Module) -> bool:
        layer = describe(module) if module is not head else None
        return layer is not None and layer.kind == kind and next(module.children(), None) is None and method.check(layer) is None

    if not any(wanted(path, module) for path, module in model.named_modules()):
        found = ((path, layer) for path, module in model.named_modules() if module is not head and (layer := describe(module)) is not None)
        reasons = [f"{path}: {problem}" for path, layer in found if layer.kind == kind and (problem := method.check(layer)) is not None]
        raise TargetError(
            f"{method.name} with these fields can take none of the {kind} layers of this {type(model).__name__}",
            why=reasons[0] if reasons else f"It has no {kind} layer beside its output head.",
            hint="other fields of the method (--method-arguments), or method.targets (--targets)",
            code="no-target-matched",
        )
    return wanted
