"""Reading files of sample prompts: text with `--w --h --d --s --l --n`, JSON, or TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onegraph.errors import ConfigurationError, nearest
from onegraph.training.diffusion.sampling import SamplePrompt

# Letter in a text file: (field, kind).
OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n": ("negative", str),
    "w": ("width", int),
    "h": ("height", int),
    "d": ("seed", int),
    "s": ("steps", int),
    "l": ("guidance", float),
    "ss": ("sampler", str),
}
# Name in JSON and TOML files: (field, kind).
NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "prompt": ("prompt", str),
    "negative_prompt": ("negative", str),
    "width": ("width", int),
    "height": ("height", int),
    "seed": ("seed", int),
    "sample_steps": ("steps", int),
    "scale": ("guidance", float),
    "sample_sampler": ("sampler", str),
}
OPTION = re.compile(r"\s+--(?=[A-Za-z])")


def read_sample_prompts(path: str | Path) -> list[SamplePrompt]:
    """The prompts of a file: one a line with options behind it, or a JSON list, or TOML's ``[prompt]`` with ``[[prompt.subset]]``.

    Args:
        path: ``.txt`` (``#`` begins a comment), ``.json`` or ``.toml``.

    Raises:
        ConfigurationError: ``sample-prompts``: all problems of the file at once, each with its line or number.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}", hint="Save it as UTF-8.", code="sample-prompts") from error
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be read: {error.strerror}", hint="Check --sample_prompts.", code="sample-prompts"
        ) from error
    problems: list[ConfigurationError] = []
    if path.suffix in (".json", ".toml"):
        entries = [(f"prompt {number}", entry) for number, entry in enumerate(_entries(path, text), 1)]
        found = [_from_table(entry, f"{path}, {place}", problems) for place, entry in entries]
    else:
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        kept = [(number, line) for number, line in lines if line and not line.startswith("#")]
        found = [_from_line(line, f"{path}, line {number}", problems) for number, line in kept]
    if problems:
        raise ConfigurationError.collected(problems)
    if not found:
        raise ConfigurationError(f"{path} holds no prompt", hint="Write one prompt a line.", code="sample-prompts")
    return found


def _from_line(line: str, place: str, problems: list[ConfigurationError]) -> SamplePrompt:
    """``a cat --w 512 --d 7`` as a prompt."""
    prompt, *options = OPTION.split(line)
    fields: dict[str, Any] = {}
    for option in options:
        letter, _, value = option.strip().partition(" ")
        if letter not in OPTIONS:
            known = ", ".join(f"--{name}" for name in OPTIONS)
            problems.append(ConfigurationError(f"{place}: unknown option --{letter}", hint=f"Use {known}.", code="sample-prompts"))
            continue
        name, kind = OPTIONS[letter]
        _set(fields, name, kind, value.strip(), f"{place}: --{letter}", problems)
    return SamplePrompt(prompt=prompt.strip(), **fields)


def _entries(path: Path, text: str) -> list[Any]:
    """The tables of a JSON or TOML file; TOML's subsets inherit from the table they are in."""
    try:
        if path.suffix == ".json":
            content = json.loads(text)
            return content if isinstance(content, list) else [content]
        table = tomllib.loads(text).get("prompt", {})
    except ValueError as error:
        raise ConfigurationError(f"{path} can't be parsed: {error}", hint="Correct it there.", code="sample-prompts") from error
    if isinstance(table, list):
        return table
    shared = {name: value for name, value in table.items() if name != "subset"}
    return [{**shared, **subset} for subset in table.get("subset", [{}] if shared else [])]


def _from_table(entry: Any, place: str, problems: list[ConfigurationError]) -> SamplePrompt:
    """One table as a prompt; a bare string is a line of a text file."""
    if isinstance(entry, str):
        return _from_line(entry, place, problems)
    fields: dict[str, Any] = {"prompt": ""}
    if not isinstance(entry, Mapping):
        problems.append(ConfigurationError(f"{place} is a {type(entry).__name__}, not a table", code="sample-prompts"))
        return SamplePrompt(**fields)
    for name, value in entry.items():
        if name not in NAMES:
            near = nearest(name, NAMES) or list(NAMES)
            problems.append(ConfigurationError(f"{place}: unknown key {name}", hint=f"Use {', '.join(near)}.", code="sample-prompts"))
            continue
        field, kind = NAMES[name]
        _set(fields, field, kind, value, f"{place}: {name}", problems)
    return SamplePrompt(**fields)


def _set(fields: dict[str, Any], name: str, kind: Callable[[Any], Any], value: Any, place: str, problems: list[ConfigurationError]) -> None:
    """Put one converted value, or note that it can't be converted."""
    try:
        if value == "" and kind is not str:
            raise ValueError
        fields[name] = kind(value)
    except (ValueError, TypeError):
        wanted = {int: "a whole number", float: "a number"}.get(kind, "text")  # type: ignore[call-overload]
        problems.append(ConfigurationError(f"{place} is {value!r}", hint=f"It takes {wanted}.", code="sample-prompts"))
