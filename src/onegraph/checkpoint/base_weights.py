"""Weights of the base model that a file holds whole: in files their values, here differences from the model's own.

PEFT's ``modules_to_save``, its trained biases and its norms are such weights, and so is what can't be anything else here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapted, Adapters
from onegraph.adapters.walk import places
from onegraph.checkpoint.contents import Contents
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.keys import file_paths, first_ten, match_paths
from onegraph.errors import CheckpointError
from onegraph.layers import Layer, describe_any
from onegraph.methods import BitFit, Dense, Method, NormTuning, WithBias

_BIAS, _BIAS_CHANGE, _SCALE = "bias", "bias_change", "scale"


# From a file


@dataclass(frozen=True)
class Tuned:
    """Layers whose own weights the file changes.

    Args:
        methods: Module path -> method.
        tensors: Module path -> parameter -> tensor; of a layer that is adapted too, only what comes on top.
    """

    methods: dict[str, Method]
    tensors: dict[str, dict[str, Tensor]]


def tuned_layers(
    file: AdapterFile, model: nn.Module, adapted: Mapping[str, Method], rewritten: Mapping[str, Callable[[Tensor], Tensor]]
) -> Tuned:
    """Turn whole weights into differences from the model's own. Those that are the model's own, and not trained, are left out.

    Args:
        file: What was read.
        model: The model that it is fitted to.
        adapted: The layers that the file's own method is on, by the model's paths.
        rewritten: The layers that can't take it, and what makes their new weight.

    Raises:
        CheckpointError: ``adapter-base-weights`` for weights that the model doesn't have, or has in another shape, and for other
            weights of layers that are adapted too.
    """
    modules = {path: (place.path, _plain(place.module)) for place in places(model) for path in place.paths}
    names = {name: name.rpartition(".")[0] for name in file.base_weights}
    paths = match_paths(set(names.values()), modules.keys())
    changed: dict[str, dict[str, Tensor]] = {}
    trained: set[str] = set()
    problems: list[str] = []
    for name, tensor in file.base_weights.items():
        path, module = modules.get(paths.get(names[name], ""), ("", None))
        leaf = name.rpartition(".")[2]
        own = None if module is None else {**module._parameters, **module._buffers}.get(leaf)
        if module is None or own is None or own.shape != tensor.shape:
            problems.append(name)
        elif name in file.trained and leaf in module._parameters:
            trained.add(path)
            changed.setdefault(path, {})[leaf] = tensor
        elif not _equal(own.detach().cpu(), tensor):
            if leaf in module._parameters and (path not in adapted or _names(module).get(leaf) == _BIAS):
                changed.setdefault(path, {})[leaf] = tensor
            else:
                problems.append(name)
    found = Tuned({}, {})
    by_path = dict(modules.values())
    for path, tensors in changed.items():
        layer, names = describe_any(by_path[path]), _names(by_path[path])
        fits = layer is not None and tensors.keys() <= names.keys()
        method = _method_for(layer, map(names.__getitem__, tensors), path in trained, adapted.get(path)) if layer and fits else None
        if layer is None or method is None:
            problems += [f"{path}.{leaf}" for leaf in tensors]
            continue
        found.methods[path] = method
        found.tensors[path] = _differences(layer, by_path[path], tensors, method)
    for path, rewrite in rewritten.items():
        layer = describe_any(by_path[path])
        assert layer is not None  # a method was checked on it
        weight = rewrite(layer.base_tensors(by_path[path])["weight"].detach().float())
        found.methods[path] = Dense()
        found.tensors[path] = _differences(layer, by_path[path], {layer.attribute("weight"): layer.stored(weight)}, Dense())
    if problems:
        raise CheckpointError(
            f"{file.path} changes {len(problems)} weights of the base model that can't be changed by an adapter here.",
            why=f"The model doesn't have them, or in another shape, or their layers are adapted as well:\n{first_ten(problems)}",
            hint="Where they come from a resized vocabulary, resize the model first: model.resize_token_embeddings(size).",
            code="adapter-base-weights",
        )
    return found


def _plain(module: nn.Module) -> nn.Module:
    return module.base_layer if isinstance(module, Adapted) else module


def _names(module: nn.Module) -> dict[str, str]:
    """What a module calls a tensor -> what its description does: ``in_proj_weight`` of an attention is its ``weight``."""
    layer = describe_any(module)
    return {} if layer is None else {layer.attribute(name): name for name in layer.tensor_shapes()}


def _equal(own: Tensor, saved: Tensor) -> bool:
    return torch.equal(own.to(saved.dtype), saved) or torch.equal(own, saved.to(own.dtype))


def _method_for(layer: Layer, tensors: Iterable[str], trained: bool, inner: Method | None) -> Method | None:
    """A bias alone, beside another method or not, a norm, or anything else; None where there is no such method for the layer."""
    only_bias = set(tensors) == {_BIAS} and not trained
    if inner is not None:
        return WithBias(inner=inner) if only_bias and inner.settings(layer)[_SCALE] else None
    method: Method = BitFit() if only_bias else NormTuning() if layer.kind == "norm" else Dense()
    return method if method.check(layer) is None else None


def _differences(layer: Layer, module: nn.Module, tensors: Mapping[str, Tensor], method: Method) -> dict[str, Tensor]:
    """Theirs minus the module's own, canonical; float64 in between, so that the sum is theirs again to one rounding."""
    own = layer.base_tensors(module)
    changed = copy.copy(module)
    changed.__dict__["_parameters"] = {**module._parameters, **tensors}
    theirs = layer.base_tensors(changed)
    differences = {f"{name}_difference": theirs[name].detach().cpu().double() - own[name].detach().cpu().double() for name in own}
    if isinstance(method, WithBias):
        return {_BIAS_CHANGE: (differences["bias_difference"] / method.settings(layer)[_SCALE]).float()}
    return {name: differences[name].float() for name in method.parameters(layer)}


# Into a file


@dataclass(frozen=True)
class Whole:
    """An adapter split for a file that holds whole weights.

    Args:
        methods: Module path -> method, for the layers that the file's own method is on; without the bias that may be beside it.
        parameters: Module path -> what that method is written from: its tensors, or the layer's own ones with its differences in them.
        tensors: Name in the model -> the other weights with the adapter's differences in them.
        fields: What the configuration says about them.
    """

    methods: dict[str, Method]
    parameters: dict[str, dict[str, Tensor]]
    tensors: dict[str, Tensor]
    fields: dict[str, object]


def require_whole(weights: Iterable[Tensor], peft_type: object) -> None:
    """Weights of the base that a file holds are here, and not cut in pieces.

    Raises:
        CheckpointError: ``weights-sharded``.
    """
    if any(hasattr(weight, "full_tensor") for weight in weights):
        raise CheckpointError(
            f"A PEFT folder of the type {peft_type} holds weights of the base here, which are cut in pieces over several processes.",
            why="One process that writes has only its part of them.",
            hint="Save it inside onegraph.gathered(model), which every process enters, or with format='native': the adapter alone.",
            code="weights-sharded",
        )


def whole_weights(adapters: Adapters, found: Contents, form: PeftForm, given: Mapping[str, object]) -> Whole:
    """Split an adapter.

    Args:
        adapters: The adapters of the model.
        found: One of them.
        form: How it is going to be written.
        given: Fields of a configuration; ``modules_to_save`` may name modules around those that are trained.

    Raises:
        CheckpointError: ``adapter-unsupported`` for layers with a method that has no place beside the file's own; ``weights-sharded``.
    """
    methods = {path: inner for path, method in found.methods.items() if isinstance(inner := without_bias(method), form.methods)}
    dense = {path for path, method in found.methods.items() if path not in methods and isinstance(method, Dense)}
    biases = {path for path, method in found.methods.items() if isinstance(method, BitFit | WithBias)}
    other = {found.methods[path].name for path in found.methods.keys() - methods.keys() - dense - biases}
    if other or (biases and form.bias is None):
        raise CheckpointError(
            f"A PEFT folder of the type {form.peft_type} has no place for {', '.join(sorted(other or {BitFit.name}))}.",
            why="The layers of this adapter have several methods, and PEFT has one type a folder.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    changed = {*dense, *biases, *(methods if form.whole else ())}
    require_whole((weight for path in changed for weight in found.modules[path].parameters()), form.peft_type)
    state = _State(adapters, {path: _full(found, path) for path in changed})
    tensors: dict[str, Tensor] = {}
    fields: dict[str, object] = {}
    if dense:
        entries = _entries(given.get("modules_to_save"), dense, state, set(methods))
        fields["modules_to_save"] = entries
        tensors |= {name: value for path in state.ending_in(entries) for name, value in state.below(path).items()}
    if biases:
        fields["bias"] = form.bias if biases <= methods.keys() else "all"
        tensors |= state.biases(set(methods), everywhere=not biases <= methods.keys())
    own = state.full if form.whole else found.tensors
    parameters = {path: {name: value for name, value in own[path].items() if name != _BIAS_CHANGE} for path in methods}
    return Whole(methods, parameters, tensors, fields)


def without_bias(method: Method) -> Method:
    """A method without the bias beside it."""
    return method.inner if isinstance(method, WithBias) else method


def _full(found: Contents, path: str) -> dict[str, Tensor]:
    """A layer's own tensors with the adapter's differences in them, as the layer names and stores them."""
    layer, method = found.layers[path], found.methods[path]
    strength = method.settings(layer)[_SCALE]
    p = {**found.tensors[path], _SCALE: torch.tensor(strength, device=next(iter(found.tensors[path].values())).device)}
    if isinstance(method, WithBias):
        bias = layer.base_tensors(found.modules[path])[_BIAS]  # a layer without one takes no such method
        return {layer.attribute(_BIAS): (bias.detach() + p[_BIAS_CHANGE] * p[_SCALE]).to(bias.dtype)}
    base = layer.base_tensors(found.modules[path])
    precise = {name: value.detach().to(torch.promote_types(value.dtype, torch.float32)) for name, value in base.items()}
    adapted = {name: value.to(base[name].dtype) for name, value in method.adapt_tensors(precise, p, layer).items()}
    return {
        layer.attribute(name): layer.stored(value) if name == "weight" or layer.kind == "norm" else value for name, value in adapted.items()
    }


class _State:
    """The model's weights under the paths that files hold, with those of an adapter in place of its own."""

    def __init__(self, adapters: Adapters, full: Mapping[str, Mapping[str, Tensor]]) -> None:
        everywhere = places(adapters.model)
        paths = file_paths(adapters.model, [place.path for place in everywhere])
        self.modules = {paths[place.path]: _plain(place.module) for place in everywhere}
        self.full = {path: dict(tensors) for path, tensors in full.items()}

    def ending_in(self, entries: Iterable[str]) -> list[str]:
        """The modules that PEFT finds for ``modules_to_save``."""
        return [path for path in self.modules if any(path.endswith(entry) for entry in entries)]

    def own(self, path: str) -> dict[str, Tensor]:
        """What a module itself has: parameters and buffers that are saved."""
        module = self.modules[path]
        passing = module._non_persistent_buffers_set
        found = {**module._parameters, **{name: value for name, value in module._buffers.items() if name not in passing}}
        return {**{name: value for name, value in found.items() if value is not None}, **self.full.get(path, {})}

    def below(self, path: str) -> dict[str, Tensor]:
        """What a module and those in it have, by their names in the model."""
        inside = [other for other in self.modules if other == path or other.startswith(f"{path}.")]
        return {f"{other}.{name}": value for other in inside for name, value in self.own(other).items()}

    def biases(self, adapted: set[str], *, everywhere: bool) -> dict[str, Tensor]:
        """Every bias of the model, as ``bias="all"`` saves them, or of the adapted layers; further ones where they are trained."""
        found: dict[str, Tensor] = {}
        for path in self.modules if everywhere else sorted(adapted):
            own, trained = self.own(path), self.full.get(path, {})
            for leaf, name in {_BIAS: _BIAS, **_names(self.modules[path])}.items():
                if name == _BIAS and leaf in own and (leaf == _BIAS or leaf in trained):
                    found[f"{_placed(path, adapted)}.{leaf}"] = own[leaf]
        return found


def _placed(path: str, adapted: set[str]) -> str:
    """Where PEFT hangs a module: below its adapted layer; the output projection of an attention below both."""
    if path not in adapted:
        return path
    outer, _, leaf = path.rpartition(".")
    return f"{outer}.base_layer.{leaf}.base_layer" if outer in adapted else f"{path}.base_layer"


def _entries(given: object, dense: set[str], state: _State, adapted: set[str]) -> list[str]:
    """Names for ``modules_to_save``: those that it had, and the paths of what they don't name.

    Raises:
        CheckpointError: ``adapter-unsupported`` where PEFT would take an adapted layer for one of them.
    """
    entries = [str(entry) for entry in given] if isinstance(given, list) else []
    named = state.ending_in(entries)
    for path in sorted(dense):  # a module before those in it, which PEFT saves with it
        if not any(path == outer or path.startswith(f"{outer}.") for outer in named):
            entries.append(path)
            named.append(path)
    taken = sorted(path for outer in state.ending_in(entries) for path in adapted if path == outer or path.startswith(f"{outer}."))
    if taken:
        raise CheckpointError(
            f"PEFT compares only how paths end: modules_to_save={entries} would also mean {taken[0]}, which is adapted.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    return entries
