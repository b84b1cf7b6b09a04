"""Which layer of a model each tensor of a file belongs to. Everything is checked here, before a model is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from onegraph.adapters import Adapted, adapters_of
from onegraph.adapters.walk import places, plain_class, unwrapped
from onegraph.checkpoint.base_weights import tuned_layers
from onegraph.checkpoint.detection import family_of_model, likely_family
from onegraph.checkpoint.dialects import kohya
from onegraph.checkpoint.file import SHARED, AdapterFile, Weights, tensors_of
from onegraph.checkpoint.keys import first_ten, match_paths
from onegraph.checkpoint.language_models import described, made_for, nested
from onegraph.errors import CheckpointError
from onegraph.layers import Layer, describe_any
from onegraph.methods import Method

_TEXT_LEVEL = "text_model."


@dataclass(frozen=True)
class Placement:
    """An adapter fitted to a model: nothing is left to find out.

    Args:
        methods: Module path -> the method with this layer's rank and alpha.
        tensors: Module path -> parameter -> tensor in the shape the layer needs.
    """

    methods: dict[str, Method]
    tensors: dict[str, dict[str, torch.Tensor]]


def fit(file: AdapterFile, model: nn.Module, *, part: str | None = None) -> Placement:
    """Find the layer of each tensor and check its shape.

    Args:
        file: What was read.
        model: The model, adapted already or not, compiled or wrapped or not.
        part: The part of the file that belongs to this model; the one that fits best when omitted.

    Raises:
        CheckpointError: ``adapter-part``, ``adapter-architecture`` with the first ten modules the model doesn't have, ``adapter-shape``,
            ``weights-not-float``, or ``adapter-base-weights`` where the file changes weights of the base model in a way that no adapter
            can.
    """
    layers, canonical = _layers(model)
    if part is not None and part not in file.parts:
        there = ", ".join(map(repr, file.parts))
        raise CheckpointError(f"{file.path} has no part {part!r}.", hint=f"It has: {there}.", code="adapter-part")
    candidates = [part] if part is not None else list(file.parts)
    located = {candidate: _located(file, candidate, layers) for candidate in candidates}
    best = max(candidates, key=lambda candidate: _num_fitting(file, candidate, located[candidate], layers))
    found = located[best]
    keys = _layers_in(file, best)
    if len(found) < len(keys):
        raise _other_architecture(file, model, keys.keys(), found.keys(), layers.keys())
    methods: dict[str, Method] = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    rewritten: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    problems = []
    for key, weights in keys.items():
        path = canonical[found[key]]
        method = file.methods[best][key]
        if path in methods:
            problems.append(f"{key}: a second adapter for the layer {path}")
        refusal = method.check(layers[path])
        if refusal is not None and key in file.rewrites:
            rewritten[path] = file.rewrites[key]
            continue
        if refusal is not None:
            problems.append(f"{path}: {refusal}")
            continue
        methods[path] = method
        tensors[path], wrong = _shaped(path, _completed(weights, file, method, layers[path]), method, layers[path])
        problems += wrong
    _check_numbers(file, tensors)
    if problems:
        raise _other_shapes(file, model, problems, len(keys))
    adapters = adapters_of(model)
    if adapters is not None and adapters.merged and (file.base_weights or rewritten):
        raise CheckpointError(
            f"{file.path} holds weights of the base model, and {', '.join(map(repr, adapters.merged))} is merged into this one.",
            why="They can only be compared with the base model's own.",
            hint="adapters.unmerge() first.",
            code="adapter-merged",
        )
    tuned = tuned_layers(file, model, methods, rewritten)
    methods |= tuned.methods
    for path, differences in tuned.tensors.items():
        tensors[path] = {**tensors.get(path, {}), **differences}
    methods = _settled(methods, layers)
    shared = _shared(file, methods, tensors_of(file.parts[best].get(SHARED, {})))
    return Placement(methods, {**tensors, **({SHARED: shared} if shared else {})})


def _check_numbers(file: AdapterFile, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise CheckpointError ``weights-not-float`` for whole numbers, truth values and complex numbers."""
    odd = [
        f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}"
        for path, own in tensors.items()
        for name, tensor in own.items()
        if not tensor.is_floating_point()
    ]
    if odd:
        raise CheckpointError(
            f"{len(odd)} tensors in {file.path} hold no floating-point numbers.",
            why=f"Copied as they are they would be other weights than were trained. They are:\n{first_ten(odd)}",
            hint="Something quantised or converted the file; use the one that was saved after training.",
            code="weights-not-float",
        )


def _layers(model: nn.Module) -> tuple[dict[str, Layer], dict[str, str]]:
    """Every path that can carry an adapter -> its layer, and -> the first path of the same module (it may be used twice)."""
    found: dict[str, Layer] = {}
    canonical: dict[str, str] = {}
    for place in places(model):
        module = place.module
        layer = module.layer if isinstance(module, Adapted) else describe_any(module)
        if layer is not None:
            found |= dict.fromkeys(place.paths, layer)
            canonical |= dict.fromkeys(place.paths, place.path)
    return found, canonical


def _layers_in(file: AdapterFile, part: str) -> dict[str, Weights]:
    """A part without the tensors that belong to no layer."""
    return {key: weights for key, weights in file.parts[part].items() if key != SHARED}


def _settled(methods: Mapping[str, Method], layers: Mapping[str, Layer]) -> dict[str, Method]:
    """The methods as they are once attached: with the fields filled in that their layers decide together."""
    together: dict[Method, list[Layer]] = {}
    for path, method in methods.items():
        together.setdefault(method.structure(), []).append(layers[path])
    return {path: method.settled(layers[path], together[method.structure()]) for path, method in methods.items()}


def _shared(file: AdapterFile, methods: Mapping[str, Method], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that all layers have in common; those that are never trained can be drawn again where the file has none.

    Raises:
        CheckpointError: ``adapter-incomplete``, ``adapter-shape``.
    """
    wanted = {name: (method, spec) for method in methods.values() for name, spec in method.shared_parameters().items()}
    drawn = {name: method.initial_shared(None)[name] for name, (method, spec) in wanted.items() if name not in given and not spec.trained}
    found = {**given, **drawn}
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(
            f"{file.path} has no {', '.join(missing)}, which all its layers need.",
            hint="The file is damaged; download it or train it again.",
            code="adapter-incomplete",
        )
    if wrong := [name for name, (_, spec) in wanted.items() if tuple(found[name].shape) != tuple(spec.shape)]:
        raise CheckpointError(
            f"{wrong[0]} in {file.path} is {tuple(found[wrong[0]].shape)}, its layers need {tuple(wanted[wrong[0]][1].shape)}.",
            hint="Use the configuration that was saved with these weights.",
            code="adapter-shape",
        )
    return {name: found[name] for name in wanted}


def _located(file: AdapterFile, part: str, layers: Mapping[str, Layer]) -> dict[str, str]:
    """Key of the file -> path of the model, for the keys that name a layer."""
    keys = _layers_in(file, part)
    if file.format in ("kohya", "lycoris"):
        table = kohya.paths_by_key(part, layers)
        return {key: table[key] for key in keys if key in table}
    matched = match_paths(keys, layers.keys())
    # transformers 5 dropped a level from CLIPTextModel; files from before have it, and so have files for other readers.
    other_level = {
        (key.removeprefix(_TEXT_LEVEL) if key.startswith(_TEXT_LEVEL) else f"{_TEXT_LEVEL}{key}"): key for key in keys if key not in matched
    }
    return matched | {other_level[name]: path for name, path in match_paths(other_level, layers.keys()).items()}


def _num_fitting(file: AdapterFile, part: str, located: Mapping[str, str], layers: Mapping[str, Layer]) -> int:
    """How many layers of a part are in the model with the right shapes: two text encoders have the same names."""
    methods, keys = file.methods[part], _layers_in(file, part)
    given = {key: _completed(keys[key], file, methods[key], layers[path]) for key, path in located.items()}
    return sum(not _shaped(path, given[key], methods[key], layers[path])[1] for key, path in located.items())


def _completed(weights: Weights, file: AdapterFile, method: Method, layer: Layer) -> dict[str, torch.Tensor]:
    """The tensors of a layer, and those without effect that its file left out."""
    tensors = tensors_of(weights)
    if not file.optional - tensors.keys():
        return tensors
    return {**{name: value for name, value in method.identity(layer).items() if name in file.optional}, **tensors}


def _shaped(path: str, tensors: Mapping[str, torch.Tensor], method: Method, layer: Layer) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors in the shapes that the layer needs, and what doesn't fit.

    A 1x1 convolution and a Linear may stand for each other, and a kernel may be one axis together with the channels.
    """
    specs = method.parameters(layer)
    problems = [f"{path}: no {name}" for name in specs.keys() - tensors.keys()]
    problems += [f"{path}: {name} has no place in {method.name}" for name in tensors.keys() - specs.keys()]
    fitted = {}
    for name in specs.keys() & tensors.keys():
        wanted, tensor = tuple(specs[name].shape), tensors[name]
        flat = (wanted[0], math.prod(wanted[1:])) if len(wanted) > 2 else wanted
        if tuple(tensor.shape) != flat and _without_trailing_ones(tensor.shape) != _without_trailing_ones(wanted):
            problems.append(f"{path}: {name} is {tuple(tensor.shape)} in the file, the layer needs {wanted}")
        else:
            fitted[name] = tensor.reshape(wanted)
    return fitted, problems


def _without_trailing_ones(shape: Iterable[int]) -> tuple[int, ...]:
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return tuple(sizes)


def _other_architecture(
    file: AdapterFile, model: nn.Module, wanted: Collection[str], found: Collection[str], paths: Collection[str]
) -> CheckpointError:
    missing = [name for name in wanted if name not in found]
    return CheckpointError(
        f"{len(missing)} of the {len(wanted)} layers in {file.path} are not in this {_name(model)}.",
        why=f"The model has no layer that can be adapted of these names:\n{first_ten(missing)}\n{_families(file, model)}",
        hint=nested(wanted, paths) or "Load it onto the model it was made for.",
        code="adapter-architecture",
    )


def _other_shapes(file: AdapterFile, model: nn.Module, problems: list[str], num_layers: int) -> CheckpointError:
    return CheckpointError(
        f"{file.path} doesn't fit this {_name(model)}: {len(problems)} problems in {num_layers} layers.",
        why=f"{first_ten(problems)}\n{_families(file, model)}",
        hint="Load it onto the model it was made for.",
        code="adapter-shape",
    )


def _families(file: AdapterFile, model: nn.Module) -> str:
    family, own = likely_family(file), family_of_model(unwrapped(model))
    parts = ", ".join(part for part in file.parts if part)
    origin = (
        f"The file was probably made for {family}." if family else made_for(file) or "The file doesn't say which model it was made for."
    )
    own = f" This model looks like {own}." if own else f" This model is {name}." if (name := described(model)) else ""
    return f"{origin}{own}" + (f" Its parts: {parts}." if parts else "")


def _name(model: nn.Module) -> str:
    return plain_class(unwrapped(model)).__name__
