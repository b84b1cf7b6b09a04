"""What was given, before it means anything: texts from the command line and from a configuration file, with where each came from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onegraph.cli.flag import Flag, convert
from onegraph.cli.sd_table import FLAGS
from onegraph.errors import ConfigurationError, OnegraphError, nearest


@dataclass(frozen=True, kw_only=True)
class Given:
    """One flag or key that was given.

    Args:
        flag: Its entry in the table.
        texts: Its values as texts; none for a bare switch.
        label: How errors call it: "--seed", or "seed in run.toml".
    """

    flag: Flag
    texts: tuple[str, ...]
    label: str

    @property
    def is_on(self) -> bool:
        """Whether a switch is on: it is unless it says false."""
        return not self.texts or bool(convert(self.flag, self.texts[0], self.label))


def read_command_line(arguments: Sequence[str]) -> tuple[dict[str, Given], list[OnegraphError]]:
    """Flags of a command line, ``--flag=value`` or ``--flag value``; the last of a repeated flag wins."""
    given: dict[str, Given] = {}
    problems: list[OnegraphError] = []
    index = 0
    while index < len(arguments):
        word, index = arguments[index], index + 1
        if word == "-h":
            word = "--help"
        if not word.startswith("--") or word == "--":
            what = f"{word!r} belongs to no flag"
            why = "Every value follows a flag; a value with spaces needs quotes."
            problems.append(ConfigurationError(what, why=why, hint="write --flag=value", code="stray-value"))
            continue
        name, separator, text = word[2:].partition("=")
        values = [text] if separator else []
        first = index
        while not separator and index < len(arguments) and not _is_flag(arguments[index]):
            if (flag := FLAGS.get(name)) is not None and (flag.kind == "switch" or (index > first and not flag.takes_many)):
                break
            values.append(arguments[index])
            index += 1
        if name not in FLAGS:
            problems.append(_unknown(f"unknown flag --{name}", name, "--"))
            continue
        if not values and FLAGS[name].kind not in ("switch", "truth", "texts", "floats", "assignments"):
            problems.append(ConfigurationError(f"--{name} needs a value", hint=f"write --{name}=value", code="bad-value"))
            continue
        given[name] = Given(flag=FLAGS[name], texts=tuple(values), label=f"--{name}")
    return given, problems


def _is_flag(word: str) -> bool:
    """Whether a word starts a flag; negative numbers don't."""
    return word.startswith("--") or word == "-h"


def read_file(path_text: str) -> tuple[dict[str, Given], list[OnegraphError]]:
    """Keys of a TOML file; tables are only headings, as in sd-scripts."""
    path = Path(path_text)
    if not path.is_file() and path.suffix != ".toml":
        path = path.with_name(path.name + ".toml")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        what, why = f"--config_file {path_text} can't be read", str(error.strerror or error)
        return {}, [ConfigurationError(what, why=why, hint="give the path of a TOML file", code="config-file")]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what, hint = f"--config_file {path} is not TOML", 'texts need quotes: output_dir = "out"; switches: cache_latents = true'
        return {}, [ConfigurationError(what, why=str(error), hint=hint, code="config-file")]
    given: dict[str, Given] = {}
    problems: list[OnegraphError] = []
    _flatten(tree, path, given, problems)
    return given, problems


def _flatten(tree: Mapping[str, object], path: Path, given: dict[str, Given], problems: list[OnegraphError]) -> None:
    """Read one table and the tables in it."""
    for name, value in tree.items():
        flag = FLAGS.get(name)
        label = f"{name} in {path}"
        if isinstance(value, dict) and (flag is None or flag.kind != "assignments"):
            _flatten(value, path, given, problems)
        elif flag is None or name in ("help", "config_file"):
            problems.append(_unknown(f"{path}: unknown key {name!r}", name, ""))
        elif name in given:
            problems.append(ConfigurationError(f"{label} is given twice, in two tables", hint="keep one of them", code="config-file"))
        elif (texts := _texts(flag, value)) is None:
            problems.append(ConfigurationError(f"{label} is {value!r}", hint=f"give {_expected(flag)}", code="bad-value"))
        else:
            given[name] = Given(flag=flag, texts=texts, label=label)


def _expected(flag: Flag) -> str:
    return "a list of texts" if flag.takes_many else "one value"


def _texts(flag: Flag, value: object) -> tuple[str, ...] | None:
    """A TOML value as the texts that a command line would have; None where it can't be."""
    if isinstance(value, dict):
        return tuple(f"{name}={item!r}" for name, item in value.items())
    if isinstance(value, list):
        if flag.kind == "size":
            return (",".join(map(str, value)),)
        if not flag.takes_many or any(isinstance(item, list | dict | bool) for item in value):
            return None
        return tuple(map(str, value))
    if isinstance(value, bool):
        return ("true" if value else "false",) if flag.kind in ("switch", "truth") else None
    return (str(value),) if isinstance(value, str | int | float) else None


def _unknown(what: str, name: str, dashes: str) -> OnegraphError:
    """The error for a name that is not in the table: the flag it abbreviates, else the nearest names."""
    spelled = name.replace("-", "_").lower()
    usable = [known for known, flag in FLAGS.items() if not flag.refusal]
    longer = [known for known in usable if spelled and known.startswith(spelled)]
    near = [spelled] if spelled in FLAGS else longer if len(longer) == 1 else nearest(spelled, usable) or nearest(spelled, FLAGS)
    names = " or ".join(f"{dashes}{match}" for match in near[:3])
    hint = f"did you mean {names}?" if near else "see --help for all flags"
    return ConfigurationError(what, hint=hint, code="unknown-flag")
