"""Attaching: the way in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from onegraph.adapters.arrival import tell_adapted
from onegraph.adapters.checks import check_method
from onegraph.adapters.collection import Adapters
from onegraph.adapters.select import Targets
from onegraph.adapters.surgery import RECORD
from onegraph.adapters.walk import unwrapped
from onegraph.errors import ConfigurationError
from onegraph.methods import Method


def attach(
    model: nn.Module,
    method: Method,
    *,
    targets: Targets,
    exclude: Targets = (),
    name: str = "default",
    overrides: Mapping[str, Method] | None = None,
    also: Mapping[str, Method] | None = None,
    capacity: int | None = None,
    dtype: torch.dtype | None = torch.float32,
    generator: torch.Generator | None = None,
) -> Adapters:
    """Put an adapter on layers of a model, in place, and use it. The base parameters are frozen. On an error the model is unchanged.

    Args:
        model: Any module; out of a compiled or parallel wrapper, paths are those of the model inside.
        method: What the adapter computes, e.g. ``LoRA(rank=16, alpha=32)``.
        targets: Which layers. A list: paths or their endings (``"q_proj"``, ``"attn1.to_q"``). A string: a regular expression for the whole
            path, or "all-linear" for every Linear but the output head. Or a function of path and module.
        exclude: Taken out again, written the same way.
        name: What the adapter is called.
        overrides: ``{pattern: method}``: another rank, alpha or method for some layers. A pattern matches a path or its ending after a
            dot; the first match wins.
        also: ``{target: method}``: further modules with methods of their own, such as ``{"classifier": Dense()}``.
        capacity: The rank to pad to, so that adapters up to it share one graph; None: the method's own (of MiSS and LoKr, other ranks
            then have other graphs).
        dtype: Of the adapter's parameters, whatever the base has; None: the base layer's.
        generator: Draws the initial tensors, on the CPU.

    Raises:
        TargetError: ``no-target-matched``, ``target-without-match``, ``unsupported-layer``, ``override-without-match``.
        AdapterError: ``adapter-exists``, ``adapter-name``, ``rank-above-capacity``, ``adapted-elsewhere``.
        ConfigurationError: ``not-a-model``, ``not-a-method``, ``target-pattern``, ``capacity``, ``dtype``.
    """
    check_method(method)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype={dtype} can't be trained", hint="torch.float32", code="dtype")
    adapters = adapters_of(model) or Adapters(unwrapped(model), dtype=dtype)
    adapters.add(name, method, targets=targets, exclude=exclude, overrides=overrides, also=also, capacity=capacity, generator=generator)
    first = RECORD not in adapters.model.__dict__
    adapters.model.__dict__[RECORD] = adapters
    adapters.use(name)
    if first:
        tell_adapted(adapters.model)
    return adapters


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters that were attached to this model, or None.

    Raises:
        ConfigurationError: ``not-a-model``.
    """
    found = unwrapped(model).__dict__.get(RECORD)
    return found if isinstance(found, Adapters) else None
