"""Which layers a configuration is about, and the method on each: PEFT's rules for names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from onegraph.adapters import Adapted
from onegraph.adapters.select import ALL_LINEAR, near_misses
from onegraph.adapters.walk import Place, check_model, places, unwrapped
from onegraph.checkpoint.dialects.peft_methods.fields import Config
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm
from onegraph.errors import ConfigurationError
from onegraph.layers import AttentionLayer, Layer, LinearLayer, describe
from onegraph.methods import BitFit, Dense, Method, WithBias
from onegraph.peft.configs import PeftConfig, require_config
from onegraph.peft.kinds import TaskType
from onegraph.peft.mistakes import NoMatchingPeftModuleError, UsageError
from onegraph.peft.target_tables import FEEDFORWARD, TARGETS

CLASSIFIERS = ("classifier", "score")


@dataclass(frozen=True)
class Chosen:
    """What a configuration means on a model.

    Args:
        methods: Module path -> method.
        adapted: The paths that its own method is on; the others are trained whole or have a trained bias.
    """

    methods: dict[str, Method]
    adapted: tuple[str, ...]


def choose(config: PeftConfig, model: nn.Module, *, only: Collection[str] | None = None) -> Chosen:
    """The method of every layer. The configuration gets what it left open: targets, and the orientation of their weights.

    Args:
        config: Any of this package.
        model: What is going to be adapted, or is.
        only: These paths instead of those that ``target_modules`` names.

    Raises:
        ConfigurationError: A field is wrong or can't be honoured.
        UsageError: ``peft-targets`` where no targets are known; NoMatchingPeftModuleError where they match nothing.
    """
    require_config(config)
    check_model(model)
    fill_in(config, model)
    checked, form = config.checked(), config.form
    if refused := list(form.refuse_new(checked)):
        raise ConfigurationError(
            f"{type(config).__name__} asks for what can't be honoured: {', '.join(refused)}",
            why="Going on without it would start from something else.",
            hint="leave it out",
            code="adapter-unsupported",
        )
    everywhere = places(model)
    saved = _saved(config, everywhere)
    targeted = _targeted(config, model, everywhere, only)
    found = {place.path: place for place in targeted}
    for place in targeted:
        if isinstance(_layer(place), AttentionLayer):  # PEFT adapts both of its products
            found |= {other.path: other for other in everywhere if other.path == f"{place.path}.out_proj"}
    methods = {path: _method(form, checked, place) for path, place in found.items()}
    _orient(config, found)
    _warn_of_patterns(config, methods)
    bias = str(checked.values.get("bias", "none"))
    if bias != "none":
        methods = {path: WithBias(inner=method) if _has_bias(found[path]) else method for path, method in methods.items()}
    if bias == "all":
        methods |= {place.path: BitFit() for place in everywhere if place.path not in {*methods, *saved} and _has_bias(place)}
    methods |= dict.fromkeys(saved, Dense())
    return Chosen(methods, tuple(found))


def fill_in(config: PeftConfig, model: nn.Module) -> None:
    """Give a configuration the customary targets of the model's architecture, where it names none.

    Raises:
        UsageError: ``peft-targets``.
    """
    kind = config.form.peft_type
    model_type = model_type_of(model)
    if config.target_modules is None:
        known = TARGETS[kind].get(model_type)
        if known is None:
            raise UsageError(
                f"{type(config).__name__} has no target_modules, and none are known for model_type {model_type!r}",
                why="Only for common architectures it is settled which layers are adapted.",
                hint='target_modules="all-linear", or a list of names such as ["q_proj", "v_proj"]',
                code="peft-targets",
            )
        config.target_modules = known if isinstance(known, str) else set(known)
    if kind == "IA3" and config.feedforward_modules is None:
        if model_type not in FEEDFORWARD:
            raise UsageError(
                f"IA3Config has no feedforward_modules, and none are known for model_type {model_type!r}",
                hint="name those of target_modules whose input is scaled; [] for none",
                code="peft-targets",
            )
        config.feedforward_modules = set(FEEDFORWARD[model_type])


def model_type_of(model: nn.Module) -> str:
    """``model_type`` of a transformers configuration; "custom" for other models."""
    config: Any = getattr(unwrapped(model), "config", None)
    found = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return str(found or "custom")


def _targeted(config: PeftConfig, model: nn.Module, everywhere: list[Place], only: Collection[str] | None) -> list[Place]:
    if only is not None:
        chosen = [place for place in everywhere if any(path in only for path in place.paths)]
        return chosen or _nothing(config, everywhere, excluded=False)
    all_linear = isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR
    if all_linear:
        heads = _heads(config, model)
        matching = [place for place in everywhere if _is_linear(place) and id(_plain(place)) not in heads]
    else:
        matching = [place for place in everywhere if any(matches(config, path) for path in place.paths)]
    excluded = [place for place in everywhere if any(_is_excluded(config, path) for path in place.paths)]
    left = {id(place) for place in excluded}
    chosen = [place for place in matching if id(place) not in left]
    if not chosen:
        return _nothing(config, everywhere, excluded=bool(matching))
    if all_linear:
        config.target_modules = {place.path for place in chosen}
    if getattr(config, "exclude_modules", None) and not excluded:
        warnings.warn(f"exclude_modules={config.exclude_modules} excluded nothing: no module has such a name.", stacklevel=2)
    if not all_linear and not isinstance(config.target_modules, str):
        paths = [path for place in everywhere for path in place.paths]
        if unmatched := sorted(entry for entry in config.target_modules or () if not any(_is_named([entry], path) for path in paths)):
            warnings.warn(f"These entries of target_modules match no module: {unmatched}.", RuntimeWarning, stacklevel=2)
    return chosen


def _nothing(config: PeftConfig, everywhere: list[Place], *, excluded: bool) -> list[Place]:
    targets = config.target_modules
    shown = targets if isinstance(targets, str) else sorted(targets or ())
    if excluded:
        raise NoMatchingPeftModuleError(
            f"target_modules={shown}: everything that matched was excluded", hint="see exclude_modules and modules_to_save"
        )
    wanted = getattr(config, "layers_to_transform", None)
    pattern = getattr(config, "layers_pattern", None)
    named = [path for place in everywhere for path in place.paths if _is_named(targets or (), path)]
    if wanted not in (None, []) and named:
        numbers = sorted({number for path in named if (number := _layer_number(path, pattern)) is not None})
        raise NoMatchingPeftModuleError(
            f"layers_to_transform={wanted}: target_modules={shown} match in no layer of that number",
            why=f"They match in layers {', '.join(map(str, numbers))}."
            if numbers
            else f"No layer has a number after {pattern or 'a name'!r}.",
            hint="numbers begin at 0; layers_pattern is the name in front of the number, such as 'layers' or 'h'",
        )
    first = targets if isinstance(targets, str) else next(iter(shown), "")
    paths = [path for place in everywhere if describe(_plain(place)) is not None for path in place.paths]
    raise NoMatchingPeftModuleError(
        f"target_modules={shown} matches no module of the model",
        why="An entry matches a path that equals it or ends with it after a dot; a string is a regular expression for the whole path.",
        hint=near_misses(first, paths, pattern=isinstance(targets, str)),
    )


def matches(config: PeftConfig, path: str) -> bool:
    """Whether ``target_modules``, narrowed down by ``layers_to_transform``, names a path."""
    targets = config.target_modules
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    if path in targets:
        return True
    if not _is_named(targets, path):
        return False
    wanted = getattr(config, "layers_to_transform", None)
    if wanted is None or wanted == []:
        return True
    number = _layer_number(path, getattr(config, "layers_pattern", None))
    return number is not None and number in ([wanted] if isinstance(wanted, int) else wanted)


def _is_named(targets: Iterable[str], path: str) -> bool:
    return any(path == entry or path.endswith(f".{entry}") for entry in targets)


def _layer_number(path: str, pattern: str | list[str] | None) -> int | None:
    """The number of the layer that a path is in: the first one after a name, or after one of those given."""
    names = [pattern] if isinstance(pattern, str) and pattern else list(pattern or ())
    expressions = [rf"(?:^|.*?\.){name}\.(?P<number>\d+)\." for name in names] or [r".*?\.[^.]*\.(?P<number>\d+)\."]
    found = next((match for expression in expressions if (match := re.match(expression, path))), None)
    return int(found["number"]) if found else None


def _is_excluded(config: PeftConfig, path: str) -> bool:
    excluded = getattr(config, "exclude_modules", None) or ()
    if isinstance(excluded, str):
        if re.fullmatch(excluded, path):
            return True
    elif any(path == entry or path.endswith(f".{entry}") for entry in excluded):
        return True
    return any(re.match(rf"(^|.*\.){entry}($|\..*)", path) for entry in config.modules_to_save or ())


def _saved(config: PeftConfig, everywhere: list[Place]) -> list[str]:
    """The modules with tensors in all that ``modules_to_save`` names."""
    entries = list(config.modules_to_save or ())
    outer = {place.path for place in everywhere if is_saved(config, place.path)}
    if entries and not outer:
        raise UsageError(
            f"modules_to_save={entries} names no module of the model",
            why="An entry names the modules whose path ends with it.",
            hint="print the model and name one of its modules",
            code="peft-modules-to-save",
        )
    inside = (place for place in everywhere if any(place.path == path or place.path.startswith(f"{path}.") for path in outer))
    return [place.path for place in inside if next(_plain(place).parameters(recurse=False), None) is not None]


def is_saved(config: PeftConfig, path: str) -> bool:
    """Whether ``modules_to_save`` names the module at a path."""
    return any(path.endswith(entry) for entry in config.modules_to_save or ())


def _method(form: PeftForm, config: Config, place: Place) -> Method:
    layer = _layer(place)
    # A module that is no layer is refused where the adapter is added, with all others of its kind.
    return form.methods[0]() if layer is None else form.create(config, place.path, layer)


def _layer(place: Place) -> Layer | None:
    return place.module.layer if isinstance(place.module, Adapted) else describe(place.module)


def _plain(place: Place) -> nn.Module:
    return place.module.base_layer if isinstance(place.module, Adapted) else place.module


def _has_bias(place: Place) -> bool:
    layer = _layer(place)
    return layer is not None and layer.has_bias and isinstance(_plain(place)._parameters.get("bias"), nn.Parameter)


def _is_linear(place: Place) -> bool:
    layer = _layer(place)
    return isinstance(layer, LinearLayer) and not list(_plain(place).children())


def _heads(config: PeftConfig, model: nn.Module) -> set[int]:
    """The output head, or the classifier where there is no output head: "all-linear" leaves it out."""
    base: Any = unwrapped(model)
    getter = getattr(base, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None and config.task_type == TaskType.SEQ_CLS:
        head = next((found for name in CLASSIFIERS if (found := getattr(base, name, None)) is not None), None)
    return set() if head is None else {id(head.base_layer if isinstance(head, Adapted) else head)}


def _orient(config: PeftConfig, found: Mapping[str, Place]) -> None:
    """Correct ``fan_in_fan_out``: a layer knows by itself whether its weight is stored transposed."""
    if not hasattr(config, "fan_in_fan_out"):
        return
    linear = [layer for place in found.values() if isinstance(layer := _layer(place), LinearLayer)]
    transposed = any(layer.transposed for layer in linear)
    if linear and transposed != config.fan_in_fan_out:
        warnings.warn(
            f"fan_in_fan_out is set to {config.fan_in_fan_out} but the targets are {'Conv1D' if transposed else 'Linear'}: it is"
            f" {transposed}.",
            stacklevel=2,
        )
        config.fan_in_fan_out = transposed


def _warn_of_patterns(config: PeftConfig, methods: Iterable[str]) -> None:
    for name, unmatched in _unmatched(config, list(methods)):
        warnings.warn(f"These keys of {name} match no adapted layer: {unmatched}.", RuntimeWarning, stacklevel=2)


def _unmatched(config: PeftConfig, paths: list[str]) -> Iterator[tuple[str, list[str]]]:
    if config.form.peft_type == "ADALORA":
        return
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, name, None) or {}
        left = sorted(key for key in patterns if not any(re.match(rf"(.*\.)?({key})$", path) for path in paths))
        if left:
            yield name, left
