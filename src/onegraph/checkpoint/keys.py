"""Module paths as files know them: without the segments that compilers and wrappers put in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from onegraph.adapters.walk import places, unwrapped

# torch.compile, DistributedDataParallel and DataParallel, FSDP, activation checkpointing.
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# A model may call one of its own modules "module"; it is a wrapper's only below one of these.
_MODULE_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "AveragedModel"})


def plain_path(path: str) -> str:
    """``path`` without wrapper segments, wherever they stand.

    Example:
        >>> plain_path("_orig_mod.blocks.0._orig_mod.attention.module.query")
        'blocks.0.attention.query'
    """
    return ".".join(segment for segment in path.split(".") if segment not in WRAPPER_SEGMENTS)


def file_paths(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Module path -> the path that a file holds: without the wrappers that are there, keeping modules the model itself calls ``module``."""
    modules = {path: place.module for place in places(model) for path in place.paths}
    modules[""] = unwrapped(model)
    return {path: ".".join(_without_wrappers(path.split("."), modules)) for path in paths}


def _without_wrappers(segments: list[str], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    for position, segment in enumerate(segments):
        parent = modules.get(".".join(segments[:position]))
        if segment not in WRAPPER_SEGMENTS or (segment == "module" and type(parent).__name__ not in _MODULE_WRAPPERS):
            yield segment


def match_paths(wanted: Iterable[str], paths: Collection[str]) -> dict[str, str]:
    """Each wanted path -> the path of the model it means: the same, else the only one that is the same without wrapper segments.

    Wanted paths that match nothing are left out. A model that really calls a module ``module`` matches exactly first.
    """
    plain: dict[str, list[str]] = {}
    for path in paths:
        plain.setdefault(plain_path(path), []).append(path)
    exact = set(paths)
    matched = {}
    for name in wanted:
        if name in exact:
            matched[name] = name
            continue
        candidates = plain.get(plain_path(name), [])
        if len(candidates) == 1:
            matched[name] = candidates[0]
    return matched


@dataclass(frozen=True)
class Patterns:
    """One value for most layers and a table of exceptions, as PEFT's ``r`` and ``rank_pattern`` hold them."""

    default: float
    exceptions: dict[str, float]


def pattern_value(patterns: Mapping[str, float], path: str, default: float) -> float:
    """The value of the first pattern that matches the end of the module path as PEFT matches it, else the default.

    Raises:
        re.error: A pattern that is no regular expression.
    """
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def patterns_of(values: Mapping[str, float]) -> Patterns:
    """The shortest plain table that gives every path its value: the commonest value, and the paths that differ."""
    counts: dict[float, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    default = max(counts, key=lambda value: counts[value])
    exceptions = {path: value for path, value in values.items() if value != default}
    if any(pattern_value(exceptions, path, default) != value for path, value in values.items()):
        # A path that ends like another one, or a dot that stands for any character: pin the patterns down.
        exceptions = {f"^{re.escape(path)}": value for path, value in exceptions.items()}
    return Patterns(default, exceptions)


def targets_of(chosen: Collection[str], all_paths: Iterable[str]) -> list[str] | str:
    """Target modules for a PEFT configuration that mean exactly ``chosen`` among ``all_paths``.

    The last names where they suffice, the whole paths where those suffice, else one regular expression.
    """
    chosen_set, everything = set(chosen), list(all_paths)
    for entries in ({path.rpartition(".")[2] for path in chosen_set}, chosen_set):
        matched = {path for path in everything if path in entries or any(path.endswith(f".{entry}") for entry in entries)}
        if matched == chosen_set:
            return sorted(entries)
    return "|".join(re.escape(path) for path in sorted(chosen_set))


def first_ten(names: Iterable[str]) -> str:
    """The first ten names, sorted, one a line, and how many more there are."""
    ordered = sorted(names)
    lines = [f"  {name}" for name in ordered[:10]]
    if len(ordered) > 10:
        lines.append(f"  ... and {len(ordered) - 10} more")
    return "\n".join(lines)
