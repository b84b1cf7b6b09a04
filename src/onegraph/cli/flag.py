"""One command-line flag: its name, its kind of value, and what it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onegraph.errors import ConfigurationError

NO_VALUE = object()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of the command, which is also a key of its configuration file.

    Exactly one of ``target``, ``note`` and ``refusal`` says what it does; a flag with none of them is read by the parser itself.

    Args:
        name: Without the dashes.
        group: Heading in the help.
        kind: Name of a kind in ``KINDS``; "switch" takes no value.
        target: The setting it sets: "run.seed".
        value: What a switch sets the target to.
        zero_is_off: 0 means "not said", as in the field's configuration files.
        note: It is accepted and means something else here: the line that is shown once.
        refusal: It is known and not supported: why.
        instead: What to do instead of a refused flag.
        inert: Values with which a refused flag or a note asks for nothing.
        meaning: For the help; the setting's own meaning when empty.
        example: How the value is called in the help.
    """

    name: str
    group: str
    kind: str = "text"
    target: str = ""
    value: object = True
    zero_is_off: bool = False
    note: str = ""
    refusal: str = ""
    instead: str = ""
    inert: tuple[str, ...] = ()
    meaning: str = ""
    example: str = ""

    @property
    def takes_many(self) -> bool:
        """Whether several values may follow it."""
        return self.kind in MANY


def _whole(text: str) -> int:
    number = float(text)
    if not math.isfinite(number) or number != int(number):
        raise ValueError
    return int(text) if text.strip().lstrip("+-").isdigit() else int(number)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _steps_or_share(text: str) -> float:
    number = _number(text)
    if number >= 1 and number != int(number):
        raise ValueError
    return number


def _size(text: str) -> tuple[int, int]:
    parts = [_whole(part) for part in text.lower().replace("x", ",").split(",")]
    if len(parts) not in (1, 2):
        raise ValueError
    return parts[0], parts[-1]


def _alpha(text: str) -> float:
    return 0.0 if text.strip().lower() == "none" else _number(text)


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in _WORDS:
        raise ValueError
    return _WORDS[word]


_WORDS: Mapping[str, bool] = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}

KINDS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "text": (str, "a text"),
    "int": (_whole, "a whole number"),
    "float": (_number, "a number"),
    "steps": (_steps_or_share, "a whole number of steps, or a share of the run below 1"),
    "size": (_size, "one number or width,height in pixels"),
    "alpha": (_alpha, "a number, or none"),
    "switch": (_truth, "true or false"),
    "truth": (_truth, "true or false"),
    "texts": (str, "texts"),
    "floats": (_number, "numbers"),
    "assignments": (str, "name=value"),
}
"""Kind of value -> how its text is read, and what it is called in errors."""

MANY = ("texts", "floats", "assignments")


def convert(flag: Flag, text: str, label: str) -> object:
    """The value of a text.

    Raises:
        ConfigurationError: ``bad-value``: not of the flag's kind.
    """
    read, expected = KINDS[flag.kind]
    try:
        return read(text)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{label} is {text!r}, which is not {expected}", hint=f"give {expected}", code="bad-value") from None
