"""From targets to a plan: which layers get an adapter, and with which rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.checks import check_method, unhonoured_dropout
from onegraph.adapters.plan import Plan, PlanEntry
from onegraph.adapters.walk import Place, places, unwrapped
from onegraph.errors import AdapterError, ConfigurationError, OnegraphError, TargetError, nearest
from onegraph.layers import KINDS, Layer, describe, describe_any, refusal
from onegraph.methods import Method

Targets = str | Sequence[str] | Callable[[str, nn.Module], bool]
ALL_LINEAR = "all-linear"


def select(
    model: nn.Module,
    method: Method,
    targets: Targets,
    *,
    exclude: Targets = (),
    overrides: Mapping[str, Method] | None = None,
    also: Mapping[str, Method] | None = None,
) -> tuple[Plan, dict[str, Place]]:
    """The plan, and for each of its paths where the module hangs. The model isn't touched.

    Args:
        targets: Paths or their endings (an entry matches a path that equals it or ends with "." + entry); a regular expression that
            matches the whole path; "all-linear", every Linear but the output head; or a function of path and module.
        exclude: Taken out again, written the same way.
        overrides: Another method for some layers; a key matches a path or its ending after a dot, the first match wins.
        also: Further modules, by path or ending, with their methods; they are never targets. A module that has modules inside
            stands for all of them that have parameters.

    Raises:
        TargetError: ``no-target-matched``, ``target-without-match``, ``unsupported-layer``, ``override-without-match``.
        ConfigurationError: ``target-pattern``, ``not-a-method``.
    """
    check_method(method)
    for option, given in {"overrides": overrides, "also": also}.items():
        for pattern, other in (given or {}).items():
            check_method(other, f"{option}[{pattern!r}]")
    targets, exclude = _checked(targets, "targets"), _checked(exclude, "exclude")
    everywhere = places(model)
    further = _further(model, everywhere, also or {})
    chosen = _matched(model, everywhere, targets, "targets")
    dropped = {id(place) for place in _matched(model, everywhere, exclude, "exclude")} if not _is_empty(exclude) else set()
    kept = [place for place in chosen if id(place) not in dropped and id(place) not in further]
    if not kept and not (further and (chosen or _is_empty(targets))):
        raise _nothing_matched(everywhere, targets, excluded=bool(chosen))
    problems: list[OnegraphError] = []
    refused: dict[tuple[str, str], list[Place]] = {}
    entries: list[PlanEntry] = []
    patterns = {key: _pattern(rf"(.*\.)?({key})$", f"overrides[{key!r}]") for key in overrides or {}}
    used: set[str] = set()
    targeted = {id(place) for place in kept}
    for place in everywhere:
        if id(place) in further:
            own = further[id(place)]
        elif id(place) in targeted:
            key = next((key for key, pattern in patterns.items() if any(pattern.match(path) for path in place.paths)), None)
            own = method if key is None else (overrides or {})[key]
            if key is not None:
                used.add(key)
        else:
            continue
        layer = _described(place.module, own)
        reason = f"only layers of these kinds can be adapted, where they run their own forward: {KINDS}"
        known = refusal(_plain(place.module)) if layer is None else own.check(layer) or unhonoured_dropout(own, layer)
        if layer is not None and known is None:
            entries.append(PlanEntry(place.path, layer, own))
        else:
            refused.setdefault((own.name, known or reason), []).append(place)
    problems += [_unsupported(name, reason, places) for (name, reason), places in refused.items()]
    if not problems:
        paths = [entry.path for entry in entries]
        problems = [
            TargetError(f"the override {key!r} matches no adapted layer", hint=near_misses(key, paths), code="override-without-match")
            for key in patterns
            if key not in used and not any(patterns[key].match(path) for path in paths)  # a key may stand behind another that won
        ]
    if problems:
        raise ConfigurationError.collected(problems)
    by_path = {place.path: place for place in everywhere}
    return Plan(_settled(entries)), {entry.path: by_path[entry.path] for entry in entries}


def _settled(entries: list[PlanEntry]) -> tuple[PlanEntry, ...]:
    """With the fields filled in that the layers of each method decide together."""
    layers: dict[Method, list[Layer]] = {}
    for entry in entries:
        layers.setdefault(entry.method.structure(), []).append(entry.layer)
    return tuple(replace(entry, method=entry.method.settled(entry.layer, layers[entry.method.structure()])) for entry in entries)


def _further(model: nn.Module, everywhere: list[Place], also: Mapping[str, Method]) -> dict[int, Method]:
    """Place -> method, for the modules named in ``also`` and those inside them."""
    found: dict[int, Method] = {}
    for entry, method in also.items():
        for outer in _matched(model, everywhere, [entry], "also"):
            inside = {id(module) for module in _plain(outer.module).modules()}
            for place in everywhere:
                plain = _plain(place.module)
                if place is outer or id(plain) in inside:
                    leaf = next(iter(plain.children()), None) is None
                    if (place is outer and leaf) or next(plain.parameters(recurse=False), None) is not None:
                        found[id(place)] = method
    return found


def _described(module: nn.Module, method: Method | None = None) -> Layer | None:
    if isinstance(module, Adapted):
        return module.layer
    return describe_any(module) if method is not None and "module" in method.kinds else describe(module)


def _plain(module: nn.Module) -> nn.Module:
    return module.base_layer if isinstance(module, Adapted) else module


def _is_empty(targets: Targets) -> bool:
    return not callable(targets) and len(targets) == 0


def _checked(targets: Targets, option: str) -> Targets:
    """Paths as a list; what is none of the kinds of targets is refused."""
    if isinstance(targets, str) or callable(targets):
        return targets
    try:
        entries: list[object] = list(targets)
    except TypeError:
        entries = [targets]
    wrong = [entry for entry in entries if not isinstance(entry, str)]
    if wrong:
        raise ConfigurationError(
            f"{option}: {wrong[0]!r} is no text",
            why='Layers are named by paths or their endings, a regular expression, "all-linear" or a function of path and module.',
            hint='write [str(number), ...] for the children of a Sequential: ["0", "2"]' if isinstance(wrong[0], int) else "",
            code="target-pattern",
        )
    return [str(entry) for entry in entries]


def _matched(model: nn.Module, everywhere: list[Place], targets: Targets, option: str) -> list[Place]:
    if callable(targets):
        return [place for place in everywhere if any(targets(path, _plain(place.module)) for path in place.paths)]
    if targets == ALL_LINEAR:
        head = _output_head(model)
        return [place for place in everywhere if _plain(place.module) is not head and _is_linear(_plain(place.module))]
    if isinstance(targets, str):
        pattern = _pattern(targets, option)
        return [place for place in everywhere if any(pattern.fullmatch(path) for path in place.paths)]
    found: list[Place] = []
    missing: list[str] = []
    for entry in dict.fromkeys(targets):
        hits = [place for place in everywhere if any(path == entry or path.endswith(f".{entry}") for path in place.paths)]
        if not hits:
            missing.append(entry)
        found += hits
    if missing and (found or option in ("exclude", "also")):
        paths = [path for place in everywhere if _described(place.module) for path in place.paths]
        raise ConfigurationError.collected(
            [
                TargetError(
                    f"{option}: {entry!r} matches no module",
                    why="An entry matches a path that equals it or ends with it after a dot.",
                    hint=near_misses(entry, paths),
                    code="target-without-match",
                )
                for entry in missing
            ]
        )
    hit = {id(place) for place in found}
    return [place for place in everywhere if id(place) in hit]


def _is_linear(module: nn.Module) -> bool:
    layer = describe(module)
    return isinstance(module, nn.Linear) or (layer is not None and layer.kind == "linear" and not list(module.children()))


def _pattern(text: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigurationError(
            f"{option}={text!r} is not a regular expression: {error}",
            why="A string is matched against whole paths as a regular expression.",
            hint=f'give a list to match endings, e.g. [{text!r}], or "{ALL_LINEAR}"',
            code="target-pattern",
        ) from None


def _output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(unwrapped(model), "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return _plain(head) if isinstance(head, nn.Module) else None


def near_misses(entry: str, paths: Iterable[str], *, pattern: bool = False) -> str:
    """A hint: endings of adaptable paths that look like the entry, or all that there are; a list, for a pattern that is an ending."""
    depth = entry.count(".") + 1
    endings = list(dict.fromkeys(".".join(path.split(".")[-depth:]) for path in paths))
    if pattern and entry in endings:
        return f"a list, which matches endings: [{entry!r}]"
    close = nearest(entry, endings)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    names = sorted({ending.rsplit(".", 1)[-1] for ending in endings if not ending.rsplit(".", 1)[-1].isdigit()})
    return f"the layers that can be adapted end in {', '.join(names[:12])}" if names else f"the model has no layer of these kinds: {KINDS}"


def _nothing_matched(everywhere: list[Place], targets: Targets, *, excluded: bool) -> OnegraphError:
    paths = [path for place in everywhere if _described(place.module) for path in place.paths]
    shown = "the function" if callable(targets) else f"targets={list(targets) if not isinstance(targets, str) else targets!r}"
    if excluded:
        return TargetError(f"{shown}: everything that matched was excluded", hint="loosen exclude=", code="no-target-matched")
    first = targets if isinstance(targets, str) else "" if callable(targets) or not targets else targets[0]
    return TargetError(
        f"{shown} matches none of the model's {len(everywhere)} modules",
        why="A list entry matches a path that equals it or ends with it after a dot; a string is a regular expression for the whole path.",
        hint=near_misses(first, paths, pattern=isinstance(targets, str)),
        code="no-target-matched",
    )


def _unsupported(method: str, reason: str, refused: list[Place]) -> OnegraphError:
    first = _plain(refused[0].module)
    kinds = [type(_plain(place.module)) for place in refused[:3]]
    named = [f"{place.path} is a {kind.__module__}.{kind.__qualname__}" for place, kind in zip(refused, kinds)]
    more = f" (and {len(refused) - 3} more)" if len(refused) > 3 else ""
    below = sorted({name for name, child in first.named_children() if describe(child)})
    return TargetError(
        f"{method} can't adapt: {', '.join(named)}{more}",
        why=reason,
        hint=f"target what is inside it: {', '.join(below)}" if below else "take it out with exclude=, or target other layers",
        code="unsupported-layer",
    )


def already_adapted_elsewhere(path: str) -> OnegraphError:
    """The error for a layer that another attach, on a smaller or larger part of the model, has adapted."""
    return AdapterError(
        f"{path} is adapted already, by an attach to another part of this model",
        why="A layer belongs to one set of adapters.",
        hint="use that set's add(), or detach() it first",
        code="adapted-elsewhere",
    )
