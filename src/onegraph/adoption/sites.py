"""Where PEFT's layers are in a model, under the paths that the model has without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from onegraph.adoption.recognition import is_peft, is_tuner_layer, is_wrapper
from onegraph.adoption.refusals import few, unsupported
from onegraph.errors import AdapterError

_BASE, _ORIGINAL, _COMPILED = "base_layer", "original_module", "_orig_mod"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Site:
    """A module of the model and what PEFT hung in its place.

    Args:
        path: Its path in the model without PEFT.
        base: The module.
        layers: PEFT's layers around it, the outermost first: adapters of two methods may be on one module.
        wrapper: What holds copies of it that are trained whole, where it has no such layers.
        parents: Where the outermost of them hangs.
        target: The path of the attention whose output projection it is.
    """

    path: str
    base: nn.Module
    layers: tuple[nn.Module, ...]
    wrapper: nn.Module | None
    target: str | None
    parents: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def theirs(self) -> tuple[nn.Module, ...]:
        """Everything of PEFT's around the module."""
        return self.layers if self.wrapper is None else (self.wrapper,)


def sites_of(model: nn.Module) -> list[Site]:
    """Every module that PEFT adapted or copied.

    Raises:
        AdapterError: ``adopt-unsupported`` for what is not one of these two, for modules that are used elsewhere without PEFT's layer,
            and for layers with hooks.
    """
    list(model.modules())  # PEFT's attention makes its weights Parameters again where it is walked over
    found: dict[int, Site] = {}
    plain: dict[int, str] = {}
    for parent, name, path, target, module in _walk(model, "", None):
        if not (is_tuner_layer(module) or is_wrapper(module)):
            plain.setdefault(id(module), path)
            continue
        site = found.get(id(module)) or found.setdefault(id(module), _site(path, target, module))
        if not any(owner is parent and key == name for owner, key in site.parents):
            site.parents.append((parent, name))
    owners: dict[int, str] = {}
    for site in found.values():
        other = plain.get(id(site.base)) or owners.get(id(site.base))
        if other is not None:
            raise unsupported(
                f"{site.path} and {other} are the same module, and PEFT adapted only the first",
                why="Here a module that is used twice is adapted in both places.",
                hint="keep it in PEFT, or merge: peft_model.merge_and_unload()",
            )
        owners[id(site.base)] = site.path
    _check_hooks(list(found.values()))
    return list(found.values())


def _walk(module: nn.Module, path: str, target: str | None) -> Iterator[tuple[nn.Module, str, str, str | None, nn.Module]]:
    """Parent, name, path without PEFT, and the path of the adapted module that it is inside of."""
    for name, child in module._modules.items():
        if child is None:
            continue
        present: nn.Module = child  # a wrapper of torch.compile runs what is in it
        while isinstance(inner := present._modules.get(_COMPILED), nn.Module):
            present = inner
        child_path = f"{path}.{name}" if path else name
        yield module, name, child_path, target, present
        if is_tuner_layer(present):
            yield from _walk(_stack(present)[-1], child_path, child_path)
        elif not is_wrapper(present):
            yield from _walk(present, child_path, target)


def _stack(layer: nn.Module) -> list[nn.Module]:
    """PEFT's layers around a module, and the module."""
    found = [layer]
    while is_tuner_layer(found[-1]):
        base = found[-1]._modules.get(_BASE)
        if base is None:
            raise unsupported(f"a {type(found[-1]).__name__} of PEFT's has no base_layer", hint="keep it in PEFT")
        found.append(base)
    return found


def _site(path: str, target: str | None, module: nn.Module) -> Site:
    if not is_wrapper(module):
        *layers, base = _stack(module)
        if is_wrapper(base):
            raise _both(path)
        return Site(path, base, tuple(layers), None, target)
    if not is_peft(module, "ModulesToSaveWrapper"):
        raise unsupported(
            f"{path} is in a {type(module).__name__} of PEFT's",
            why="It trains single rows of a table (trainable_token_indices).",
            hint="merge it first: peft_model.merge_and_unload()",
        )
    if any(is_tuner_layer(inner) or (is_wrapper(inner) and inner is not module) for inner in module.modules()):
        raise _both(path)
    original = module._modules[_ORIGINAL]
    assert original is not None  # PEFT wraps a module
    return Site(path, original, (), module, target)


def _both(path: str) -> AdapterError:
    return unsupported(
        f"{path} is trained whole by one adapter (modules_to_save), and has layers of another adapter inside or around it",
        hint="delete one of the two: peft_model.delete_adapter(name)",
    )


def _check_hooks(sites: list[Site]) -> None:
    hooked = [site.path for site in sites if any(vars(layer).get(hooks) for layer in site.theirs for hooks in _HOOKS)]
    if hooked:
        raise unsupported(
            f"PEFT's layers at {few(hooked)} have hooks",
            why="The layers go away, and the hooks would go with them.",
            hint="remove them (handle.remove()), adopt, and register them on adapters.layers[path]",
        )
