"""Fields of ``adapter_config.json``: what each may hold, its default, and what can't be honoured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onegraph.checkpoint.keys import pattern_value

Check = Callable[[str, object], Iterable[str]]
"""From a field's name and value to what is wrong with it, a sentence each."""


def number(name: str, value: object) -> Iterator[str]:
    """A finite number."""
    if not is_number(value):
        yield f"{name} = {value!r}: a number was expected"


def count(name: str, value: object) -> Iterator[str]:
    """A whole number, 1 or more."""
    if not is_number(value):
        yield f"{name} = {value!r}: a number was expected"
    elif not isinstance(value, int) or value < 1:
        yield f"{name} = {value!r}: a whole number of at least 1 was expected"


def whole_number(name: str, value: object) -> Iterator[str]:
    """A whole number, 0 or more."""
    if not is_number(value) or not isinstance(value, int) or value < 0:
        yield f"{name} = {value!r}: a whole number of at least 0 was expected"


def integer(name: str, value: object) -> Iterator[str]:
    """A whole number of any sign."""
    if not is_number(value) or not isinstance(value, int):
        yield f"{name} = {value!r}: a whole number was expected"


def probability(name: str, value: object) -> Iterator[str]:
    """A number in [0, 1)."""
    if not isinstance(value, int | float) or not is_number(value):
        yield f"{name} = {value!r}: a number was expected"
    elif not 0 <= value < 1:
        yield f"{name} = {value!r}: a number from 0 to below 1 was expected"


def flag(name: str, value: object) -> Iterator[str]:
    """True or false."""
    if not isinstance(value, bool):
        yield f"{name} = {value!r}: true or false was expected"


def names(name: str, value: object) -> Iterator[str]:
    """Nothing, a list of names, or one regular expression."""
    if isinstance(value, str):
        yield from _regular(name, value, value)
    elif value is not None and not is_list_of_strings(value):
        yield f"{name} = {value!r}: a list of names or one regular expression was expected"


def endings(name: str, value: object) -> Iterator[str]:
    """Nothing, or a list of names: a string would be taken letter by letter."""
    if value is not None and not is_list_of_strings(value):
        yield f"{name} = {value!r}: a list of names was expected"


def layer_numbers(name: str, value: object) -> Iterator[str]:
    """Nothing, the number of a layer, or a list of them."""
    if value is not None and any(any(integer(name, own)) for own in (value if isinstance(value, list | tuple | set) else [value])):
        yield f"{name} = {value!r}: a whole number or a list of them was expected"


def layer_names(name: str, value: object) -> Iterator[str]:
    """Nothing, a regular expression for what stands before the number of a layer, or a list of them."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple | set) or not is_list_of_strings(listed):
        if value is not None:
            yield f"{name} = {value!r}: a name or a list of names was expected"
        return
    for own in listed:
        yield from _regular(name, own, f"({own})")


def _regular(name: str, value: str, expression: str) -> Iterator[str]:
    try:
        re.compile(expression)
    except re.error as error:
        yield f"{name} = {value!r}: no regular expression ({error})"


def patterns(accepts: Check) -> Check:
    """A table of regular expressions for module paths, each with a value that ``accepts`` takes; or nothing."""

    def check(name: str, value: object) -> Iterator[str]:
        if value is None or value == []:
            return
        if not isinstance(value, dict):
            yield f"{name} = {value!r}: a table of module paths and numbers was expected"
            return
        for pattern, own in value.items():
            if any(accepts(name, own)):
                yield f"{name}[{pattern!r}] = {own!r}: a number was expected"
            try:
                re.compile(f"({pattern})$")
            except re.error as error:
                yield f"{name}[{pattern!r}]: no regular expression ({error})"

    return check


def one_of(*values: object) -> Check:
    """One of a few values."""

    def check(name: str, value: object) -> Iterator[str]:
        if not any(value == known and type(value) is type(known) for known in values):
            shown = [str(known).lower() if isinstance(known, bool) else str(known) for known in values]
            yield f"{name} = {value!r}: {', '.join(shown[:-1])} or {shown[-1]} was expected"

    return check


def anything(name: str, value: object) -> Iterable[str]:
    """Whatever it holds, it doesn't change what the adapter computes."""
    return ()


@dataclass(frozen=True)
class Field:
    """One field of a configuration.

    Args:
        default: What PEFT writes where nothing else was asked for, and what a file without the field means.
        accepts: What is wrong with a value.
        refused: What the field asks for, where anything but null and false can't be honoured; "" where it can.
        kept: Whether it says how the adapter was made or is trained rather than what it is: kept as it was read, written again.
    """

    default: object
    accepts: Check = anything
    refused: str = ""
    kept: bool = False


_COMMON: dict[str, Field] = {
    "auto_mapping": Field(None, kept=True),
    "base_model_name_or_path": Field(None, kept=True),
    "inference_mode": Field(True),
    "peft_type": Field(None),
    "peft_version": Field("0.21.2"),
    "revision": Field(None, kept=True),
    "task_type": Field(None, kept=True),
    "modules_to_save": Field(None, endings, kept=True),
    "target_modules": Field(None, names),
    "exclude_modules": Field(None, names),
}
_LAYERS = {"layers_pattern": Field(None, layer_names), "layers_to_transform": Field(None, layer_numbers)}


def fields(own: Mapping[str, Field], *, layers: bool = True, exclude: bool = True, fan_in: bool = False) -> dict[str, Field]:
    """All fields of a method but ``bias``: its own ones, and those that most methods have.

    Args:
        own: Those of the method.
        layers: Whether it has ``layers_pattern`` and ``layers_to_transform``.
        exclude: Whether it has ``exclude_modules``.
        fan_in: Whether it has ``fan_in_fan_out``.
    """
    found = dict(_COMMON)
    if not exclude:
        del found["exclude_modules"]
    if layers:
        found |= _LAYERS
    if fan_in:
        found["fan_in_fan_out"] = Field(False, flag)
    return {**found, **own}


@dataclass(frozen=True)
class Config:
    """A checked configuration: every field of its method, defaults filled in.

    Args:
        values: Field -> value.
        path: The file it came from.
        given: The fields that the file has.
    """

    values: Mapping[str, object]
    path: Path
    given: frozenset[str]

    def number(self, name: str) -> float:
        """A field that was checked to be a number."""
        value = self.values[name]
        assert isinstance(value, int | float)
        return float(value)

    def count(self, name: str) -> int:
        """A field that was checked to be a whole number."""
        return int(self.number(name))

    def flag(self, name: str) -> bool:
        """True where a field is set."""
        return bool(self.values[name])

    def rank(self, path: str, name: str = "r") -> int:
        """The rank of the layer at ``path``: ``rank_pattern``, else the field ``name``."""
        return int(pattern_value(self._patterns("rank_pattern"), path, self.number(name)))

    def alpha(self, path: str, name: str = "alpha") -> float:
        """The alpha of the layer at ``path``: ``alpha_pattern``, else the field ``name``."""
        return float(pattern_value(self._patterns("alpha_pattern"), path, self.number(name)))

    def matches(self, name: str, path: str) -> bool:
        """Whether a list of endings, or a regular expression, names the module at ``path``, as PEFT matches ``feedforward_modules``."""
        value = self.values[name]
        if isinstance(value, str):
            return re.fullmatch(value, path) is not None
        return isinstance(value, Collection) and any(path.endswith(str(entry)) for entry in value)

    @property
    def version(self) -> tuple[int, ...] | None:
        """The version of PEFT that wrote it, as far as it is numbers; None where the file doesn't say."""
        text = self.values.get("peft_version") if "peft_version" in self.given else None
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text)) if text else None
        return tuple(int(part or 0) for part in found.groups()) if found else None

    def _patterns(self, name: str) -> dict[str, float]:
        value = self.values.get(name) or {}
        assert isinstance(value, dict)
        return {str(pattern): own for pattern, own in value.items()}


def is_number(value: object) -> bool:
    """True for a finite number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_list_of_strings(value: object) -> bool:
    """True for a list, tuple or set of strings."""
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(entry, str) for entry in value)
