"""The names that parameters have for PEFT's users: ``model.layers.0.q_proj.lora_A.default.weight``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapted, Adapters
from onegraph.adapters.freezing import registered
from onegraph.adapters.values import SHARED
from onegraph.checkpoint.base_weights import without_bias
from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.checkpoint.dialects.peft_methods.form import Layered, PeftForm
from onegraph.checkpoint.keys import plain_path
from onegraph.layers import Layer
from onegraph.methods import Dense, Method
from onegraph.peft.configs import PeftConfig
from onegraph.peft.targets import is_saved

MODEL = "model."
_DIFFERENCE = "_difference"
# In a module PEFT keeps the magnitude one level further down than in a file.
_IN_MODULES = {"lora_magnitude_vector": "lora_magnitude_vector.weight"}


@dataclass(frozen=True)
class Entry:
    """A Parameter of an adapter.

    Args:
        name: What PEFT's users call it, from the tuner on.
        path: The layer; "" where all layers have it in common.
        key: What it is called here.
        parameter: It.
    """

    name: str
    path: str
    key: str
    parameter: nn.Parameter


def form_for(method: Method) -> PeftForm | None:
    """The table that a method is written by; None for what PEFT keeps in the model itself: biases and modules trained whole."""
    return _form_of(type(without_bias(method)))


@functools.cache
def _form_of(kind: type[Method]) -> PeftForm | None:
    return next((form for form in FORMS.values() if issubclass(kind, form.methods)), None)


def entries(adapters: Adapters, adapter: str, config: PeftConfig) -> list[Entry]:
    """All Parameters of an adapter, in the order of its layers."""
    found: list[Entry] = []
    methods = adapters.methods(adapter)
    for path, parameters in registered(adapters, adapter).items():
        for key, parameter in parameters.items():
            if path == SHARED:
                form = config.form
                theirs = next(iter(form.write_shared({key: parameter}, form.defaults)))
                name = f"{theirs}.{adapter}"
            else:
                name = MODEL + _name(methods[path], adapters.layers[path].layer, path, key, adapter, config)
            found.append(Entry(name, path, key, parameter))
    return found


def _name(method: Method, layer: Layer, path: str, key: str, adapter: str, config: PeftConfig) -> str:
    form = form_for(method)
    if form is None and isinstance(method, Dense):
        outer, rest = _split(path, config)
        return ".".join(part for part in (outer, "modules_to_save", adapter, rest, key.removesuffix(_DIFFERENCE)) if part)
    ending = _endings(form.peft_type, without_bias(method), layer).get(key) if form is not None else None
    if ending is None:
        return f"{path}.{key}.{adapter}"
    head, dot, leaf = _IN_MODULES.get(ending, ending).partition(".")
    return f"{path}.{head}.{adapter}{dot}{leaf}"


def _split(path: str, config: PeftConfig) -> tuple[str, str]:
    """The module that ``modules_to_save`` names, and the way from there."""
    parts = path.split(".")
    for number in range(1, len(parts) + 1):
        if is_saved(config, ".".join(parts[:number])):
            return ".".join(parts[:number]), ".".join(parts[number:])
    return path, ""


@functools.lru_cache(maxsize=4096)
def _endings(peft_type: str, method: Method, layer: Layer) -> dict[str, str]:
    """Our name -> the ending of the key in a file: found by writing numbers that tell which tensor they are in."""
    form = FORMS[peft_type]
    if form.whole:
        return {f"{own}{_DIFFERENCE}": ending for ending, own in form.whole.items()}
    names = list(method.parameters(layer))
    marked = {name: torch.tensor(float(number)).expand(method.parameters(layer)[name].shape) for number, name in enumerate(names)}
    written = form.write(Layered(method, marked, layer, form.defaults))
    return {names[int(tensor.flatten()[0])]: ending for ending, tensor in written.items()}


def ending_of(method: Method, layer: Layer, key: str) -> str | None:
    """The ending of the key that one of our tensors has in a file of PEFT; None for those that have another place there."""
    form = form_for(method)
    return None if form is None else _endings(form.peft_type, without_bias(method), layer).get(key)


def paths_in(keys: Iterable[str], config: PeftConfig) -> set[str]:
    """The layers that the keys of a state are about."""
    heads = {ending.partition(".")[0] for ending in config.form.endings}
    found = (re.match(rf"(?:.*base_model\.model\.)?(?P<path>.+?)\.(?:{'|'.join(map(re.escape, heads))})(?:\.|$)", key) for key in keys)
    return {plain_path(match["path"]) for match in found if match}


class Names:
    """What everything in a model is called, for PEFT's users.

    Args:
        adapters: The adapters of the model.
        configs: Adapter -> its configuration.
    """

    def __init__(self, adapters: Adapters, configs: Mapping[str, PeftConfig]) -> None:
        self.configs = {name: config for name, config in configs.items() if name in adapters.names}
        self.paths = {id(layer): path for path, layer in adapters.layers.items()}
        self.entries = {name: entries(adapters, name, config) for name, config in self.configs.items()}
        self._by_path: dict[str, list[Entry]] = {}
        for own in self.entries.values():
            for entry in own:
                self._by_path.setdefault(entry.path, []).append(entry)
        self._kinds = {path: self._kind(adapters, path) for path in adapters.layers}

    def walk(self, module: nn.Module, real: str = MODEL, shown: str = MODEL) -> Iterator[tuple[str, str, Tensor | None]]:
        """(name in the module tree, name for PEFT's users, tensor) of everything; the Parameters of adapters have no first name.

        Buffers come without their tensor, as they are only renamed.
        """
        if isinstance(module, Adapted):
            path = self.paths.get(id(module))
            yield from self.walk(module.base_layer, f"{real}base_layer.", self._base(path, shown))
            for entry in self._by_path.get(path, []) if path is not None else ():
                yield "", entry.name, entry.parameter
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{real}{name}", f"{shown}{name}", parameter
        for name in module._buffers:
            yield f"{real}{name}", f"{shown}{name}", None
        for name, child in module._modules.items():
            if child is not None:
                yield from self.walk(child, f"{real}{name}.", f"{shown}{name}.")

    def shared(self) -> list[Entry]:
        """Those that all layers of an adapter have in common."""
        return self._by_path.get(SHARED, [])

    def _kind(self, adapters: Adapters, path: str) -> tuple[str, int]:
        """What PEFT has in the place of a layer, and how many levels above it that stands."""
        whole: PeftConfig | None = None
        for name, config in self.configs.items():
            method = adapters.methods(name).get(path)
            if method is not None and form_for(method) is not None:
                return "base_layer", 0
            if isinstance(method, Dense):
                whole = config
        if whole is None:
            return "", 0
        rest = _split(path, whole)[1]
        return "original_module", len(rest.split(".")) if rest else 0

    def _base(self, path: str | None, shown: str) -> str:
        level, depth = self._kinds.get(path or "", ("base_layer", 0))
        if not level:
            return shown
        parts = shown.split(".")[:-1]
        place = len(parts) - depth
        return ".".join([*parts[:place], level, *parts[place:], ""])
