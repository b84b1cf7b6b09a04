"""Walking a model's modules, under the paths they had before anything was wrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from onegraph.adapters.adapted import BASE, Adapted
from onegraph.errors import ConfigurationError

_COMPILED = "_orig_mod"
_PARAMETRIZATIONS = "parametrizations"
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass
class Place:
    """A module and everywhere it hangs: one used twice has one place with two paths."""

    module: nn.Module
    paths: list[str] = field(default_factory=list)
    parents: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The first path."""
        return self.paths[0]


def check_model(model: object) -> None:
    """It is a module.

    Raises:
        ConfigurationError: ``not-a-model``.
    """
    if not isinstance(model, nn.Module):
        inside = getattr(model, "model", None)
        hint = "its .model is one" if isinstance(inside, nn.Module) else "a torch.nn.Module, such as pipeline.unet"
        raise ConfigurationError(f"{model!r} is not a model", hint=hint, code="not-a-model")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of a compiled or a parallel wrapper.

    Raises:
        ConfigurationError: ``not-a-model``.
    """
    check_model(model)
    while True:
        if _COMPILED in model._modules:
            inner = model._modules[_COMPILED]
        elif isinstance(model, _PARALLEL):
            inner = model.module
        else:
            return model
        assert inner is not None
        model = inner


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards this module by itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """A module's class as it was written: FSDP2 puts one of its own in front of it, with another name."""
    return type(module).__mro__[2] if is_sharded(module) else type(module)


def places(model: nn.Module) -> list[Place]:
    """Every module below the model in order of first appearance; of an adapted layer only what is inside its base layer."""
    found: dict[int, Place] = {}
    for path, parent, name, module in _walk(unwrapped(model), ""):
        place = found.setdefault(id(module), Place(module))
        if path not in place.paths:
            place.paths.append(path)
        if not any(owner is parent and key == name for owner, key in place.parents):
            place.parents.append((parent, name))
    return list(found.values())


def plain_name(name: str) -> str:
    """A parameter's name in the model before attaching: without the levels that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in (_COMPILED, BASE))


def _walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    if isinstance(module, Adapted):
        module = module.base_layer
    for name, child in module._modules.items():
        if child is None or (name == _PARAMETRIZATIONS and is_parametrized(module)):
            continue  # what computes a layer's weight is no layer
        # A wrapper runs what it was made from, whatever hangs in it later: the adapted layer has to hang in its place.
        while _COMPILED in child._modules:
            inner = child._modules[_COMPILED]
            assert inner is not None
            child = inner
        child_path = f"{path}.{name}" if path else name
        yield child_path, module, name, child
        yield from _walk(child, child_path)
