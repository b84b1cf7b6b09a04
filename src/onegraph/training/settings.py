"""Documented settings: dataclass fields with a meaning and a range, checked together and read from JSON. Imports no torch."""

from __future__ import annotations

import ast
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields
from typing import Any, TypeVar, cast

from onegraph.errors import ConfigurationError, OnegraphError, nearest

T = TypeVar("T")


def setting(
    default: T,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[object] | None = None,
) -> T:
    """A dataclass field with its meaning and its range, which ``range_problems`` checks and ``--help`` prints.

    Args:
        default: The value when nothing is said; None where "not said" differs from every value.
        meaning: What it is, with the unit.
        low: Smallest value allowed.
        high: Largest value allowed.
        above: The value must be larger than this.
        below: The value must be smaller than this.
        choices: The only values allowed.
    """
    metadata = {"meaning": meaning, "low": low, "high": high, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata=metadata)


def branches(settings: object) -> Iterator[tuple[str, object]]:
    """Path and value of each leaf of a tree of dataclasses: "run.seed", 42."""
    for leaf in fields(cast(Any, settings)):
        value = getattr(settings, leaf.name)
        if dataclasses.is_dataclass(value):
            for path, inner in branches(value):
                yield f"{leaf.name}.{path}", inner
        else:
            yield leaf.name, value


def field_of(settings: type | object, path: str) -> dataclasses.Field[Any]:
    """The field at a path such as "run.seed" in a tree of dataclasses, or in its type."""
    *parents, name = path.split(".")
    owner = settings if isinstance(settings, type) else type(settings)
    for parent in parents:
        owner = typing.get_type_hints(owner)[parent]
    return next(entry for entry in fields(owner) if entry.name == name)


def range_text(entry: dataclasses.Field[Any]) -> str:
    """The range of a setting in words: "1 to 12", "above 0"; empty when there is none."""
    limits = entry.metadata
    if limits.get("choices"):
        choices = [str(choice) for choice in limits["choices"]]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    if low is not None and high is not None:
        return f"{low:g} to {high:.10g}"
    if low is not None and below is not None:
        return f"{low:g} to less than {below:g}"
    if above is not None and high is not None:
        return f"above {above:g}, at most {high:g}"
    if low is not None:
        return f"{low:g} or more"
    if above is not None:
        return f"above {above:g}"
    return f"at most {high:g}" if high is not None else ""


def range_problems(settings: object, label: Callable[[str], str] = str) -> list[OnegraphError]:
    """Every setting that is outside its range or none of its choices.

    Args:
        settings: A tree of dataclasses whose fields were made by ``setting``.
        label: How a setting is called in the messages: "run.seed" -> "--seed".
    """
    found: list[OnegraphError] = []
    for path, value in branches(settings):
        entry = field_of(settings, path)
        for item in value if isinstance(value, tuple) else (value,):
            if item is None or _allowed(item, entry):
                continue
            hint = f"it must be {range_text(entry) or 'text without a null character'}"
            choices = [str(choice) for choice in entry.metadata.get("choices") or ()]
            near = nearest(str(item), choices)
            found.append(
                ConfigurationError(
                    f"{label(path)} is {item!r}",
                    why=f"This setting is: {entry.metadata.get('meaning', path)}.",
                    hint=f"{hint}; did you mean {near[0]}?" if near else hint,
                    code="bad-value",
                )
            )
            break
    return found


def _allowed(value: object, entry: dataclasses.Field[Any]) -> bool:
    """Whether one value is within the range and choices of its field."""
    limits = entry.metadata
    if limits.get("choices") and value not in limits["choices"]:
        return False
    if isinstance(value, str) and "\0" in value:
        return False  # ends a path half-way for the operating system
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if not math.isfinite(value):
        return False
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    return not (
        (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    )


def read_settings(kind: type[T], tree: object, path: str = "settings") -> T:
    """A tree of dataclasses from what JSON gave; fields that are not there keep their defaults.

    Raises:
        ConfigurationError: ``settings-file``: an unknown field, or a value of another type.
    """
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} is {type(tree).__name__}, not a table of settings", code="settings-file")
    hints = typing.get_type_hints(kind)
    values: dict[str, object] = {}
    for name, value in tree.items():
        if name not in hints:
            near = nearest(str(name), hints)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(hints)}; a file may be of another version of onegraph"
            raise ConfigurationError(f"{path} has an unknown field {name!r}", hint=hint, code="settings-file")
        hint_type = hints[name]
        if dataclasses.is_dataclass(hint_type):
            values[name] = read_settings(cast(type, hint_type), value, f"{path}.{name}")
            continue
        value = tuple(value) if isinstance(value, list) else value
        if not _fits(value, hint_type):
            raise ConfigurationError(f"{name} in {path} is {value!r}, which is not {_type_text(hint_type)}", code="settings-file")
        values[name] = value
    return kind(**values)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type (unions, tuples and plain types)."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is tuple:
        inner = typing.get_args(hint)
        if not isinstance(value, tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(_fits(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(_fits(item, kind) for item, kind in zip(value, inner, strict=True))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_text(hint: Any) -> str:
    """An annotated type as people write it."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return plain.get(hint) or (hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint))


def parse_arguments(arguments: Sequence[str], label: str) -> dict[str, object]:
    """``name=value`` items as a dict; each value is a Python literal, and a bare word counts as text.

    Args:
        arguments: The items: "weight_decay=0.01", "betas=0.9,0.99".
        label: How the setting is called in the messages: "--optimizer_args".

    Raises:
        ConfigurationError: ``bad-argument``: an item without ``=``, a name given twice, or a value that is neither.

    Example:
        >>> parse_arguments(["betas=0.9,0.99", "decouple=True", "how=rms"], "--optimizer_args")
        {'betas': (0.9, 0.99), 'decouple': True, 'how': 'rms'}
    """
    parsed: dict[str, object] = {}
    problems: list[OnegraphError] = []
    for item in arguments:
        name, separator, text = (part.strip() for part in item.partition("="))
        if not separator or not name.isidentifier():
            hint = f'write {label} "name=value" "other=value"'
            problems.append(ConfigurationError(f"{label}: {item!r} is not name=value", hint=hint, code="bad-argument"))
            continue
        if name in parsed:
            problems.append(ConfigurationError(f"{label}: {name} is given twice", hint="keep one of them", code="bad-argument"))
        try:
            parsed[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            if text.replace(".", "_").replace("-", "_").isidentifier():
                parsed[name] = text
                continue
            why = "It is neither a Python literal (a number, True, None, a tuple, a quoted text) nor a bare word."
            hint = f'for example {label} "weight_decay=0.01" "betas=0.9,0.99"'
            problems.append(ConfigurationError(f"{label}: the value of {name} is {text!r}", why=why, hint=hint, code="bad-argument"))
    if problems:
        raise ConfigurationError.collected(problems)
    return parsed
