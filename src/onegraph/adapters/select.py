"""From targets to a plan: which layers get an adapter, and with which rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.plan import Plan, PlanEntry
from onegraph.adapters.walk import Place, places, unwrapped
from onegraph.errors import AdapterError, ConfigurationError, OnegraphError, TargetError, nearest
from onegraph.layers import KINDS, Layer, describe
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
) -> tuple[Plan, dict[str, Place]]:
    """The plan, and for each of its paths where the module hangs. The model isn't touched.

    Args:
        targets: Paths or their endings (an entry matches a path that equals it or ends with "." + entry); a regular expression that
            matches the whole path; "all-linear", every Linear but the output head; or a function of path and module.
        exclude: Taken out again, written the same way.
        overrides: Another method of the same class for some layers; a key matches a path or its ending after a dot, the first match wins.

    Raises:
        TargetError: ``no-target-matched``, ``target-without-match``, ``unsupported-layer``, ``override-without-match``.
        ConfigurationError: ``target-pattern``, ``override-method``.
    """
    everywhere = places(model)
    chosen = _matched(model, everywhere, targets, "targets")
    dropped = {id(place) for place in _matched(model, everywhere, exclude, "exclude")} if not _is_empty(exclude) else set()
    kept = [place for place in chosen if id(place) not in dropped]
    if not kept:
        raise _nothing_matched(everywhere, targets, excluded=bool(chosen))
    problems: list[OnegraphError] = []
    unsupported: list[Place] = []
    entries: list[PlanEntry] = []
    patterns = _compiled(overrides or {}, method)
    used: set[str] = set()
    for place in kept:
        layer = _described(place.module)
        if layer is None:
            unsupported.append(place)
            continue
        key = next((key for key, pattern in patterns.items() if any(pattern.match(path) for path in place.paths)), None)
        own = method
        if key is not None:
            used.add(key)
            own = (overrides or {})[key]
        if (reason := own.check(layer)) is not None:
            problems.append(TargetError(f"{own.name} can't adapt {place.path}", why=reason, code="unsupported-layer"))
            continue
        entries.append(PlanEntry(place.path, layer, own))
    if unsupported:
        problems.append(_unsupported(unsupported))
    if not problems:
        paths = [entry.path for entry in entries]
        problems = [
            TargetError(f"the override {key!r} matches no adapted layer", hint=_near(key, paths), code="override-without-match")
            for key in patterns
            if key not in used and not any(patterns[key].match(path) for path in paths)  # a key may stand behind another that won
        ]
    if problems:
        raise ConfigurationError.collected(problems)
    return Plan(tuple(entries)), {place.path: place for place in kept}


def _described(module: nn.Module) -> Layer | None:
    return module.layer if isinstance(module, Adapted) else describe(module)


def _plain(module: nn.Module) -> nn.Module:
    return module.base_layer if isinstance(module, Adapted) else module


def _is_empty(targets: Targets) -> bool:
    return not callable(targets) and len(targets) == 0


def _matched(model: nn.Module, everywhere: list[Place], targets: Targets, option: str) -> list[Place]:
    if callable(targets):
        return [place for place in everywhere if any(targets(path, _plain(place.module)) for path in place.paths)]
    if targets == ALL_LINEAR:
        head = _output_head(model)
        return [place for place in everywhere if _plain(place.module) is not head and isinstance(_plain(place.module), nn.Linear)]
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
    if missing and (found or option == "exclude"):
        paths = [path for place in everywhere if _described(place.module) for path in place.paths]
        raise ConfigurationError.collected(
            [
                TargetError(
                    f"{option}: {entry!r} matches no module",
                    why="An entry matches a path that equals it or ends with it after a dot.",
                    hint=_near(entry, paths),
                    code="target-without-match",
                )
                for entry in missing
            ]
        )
    hit = {id(place) for place in found}
    return [place for place in everywhere if id(place) in hit]


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


def _compiled(overrides: Mapping[str, Method], method: Method) -> dict[str, re.Pattern[str]]:
    for key, own in overrides.items():
        if own.structure() != method.structure():
            raise ConfigurationError(
                f"overrides[{key!r}] is {own}, but the adapter is {method}",
                why="The layers of one adapter run the same graph: an override may change values such as the rank, not the method.",
                code="override-method",
            )
    return {key: _pattern(rf"(.*\.)?({key})$", f"overrides[{key!r}]") for key in overrides}


def _output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(unwrapped(model), "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return _plain(head) if isinstance(head, nn.Module) else None


def _near(entry: str, paths: Iterable[str]) -> str:
    """Endings of adaptable paths that look like the entry."""
    depth = entry.count(".") + 1
    endings = list(dict.fromkeys(".".join(path.split(".")[-depth:]) for path in paths))
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
        hint=_near(first, paths),
        code="no-target-matched",
    )


def _unsupported(chosen: list[Place]) -> OnegraphError:
    first = chosen[0]
    named = [f"{place.path} is a {type(place.module).__module__}.{type(place.module).__qualname__}" for place in chosen[:3]]
    more = f" (and {len(chosen) - 3} more)" if len(chosen) > 3 else ""
    below = sorted({name for name, child in first.module.named_children() if describe(child)})
    return TargetError(
        f"{', '.join(named)}{more}, which can't be adapted",
        why=f"Only layers of these kinds can, where they run their own forward: {KINDS}.",
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
