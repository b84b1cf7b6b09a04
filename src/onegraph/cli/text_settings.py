"""The settings of ``onegraph train text``: a TOML file, flags for the common ones, ``--set`` for any. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from onegraph.errors import ConfigurationError, OnegraphError, nearest
from onegraph.training.settings import field_of, range_text, read_settings
from onegraph.training.text.configuration import MethodSettings, TextConfiguration

FLAGS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "chat-template": "model.chat_template",
    "data": "data.train",
    "validation": "data.validation",
    "validation-share": "data.validation_share",
    "train-on": "data.train_on",
    "max-length": "data.max_length",
    "batch-size": "data.batch_size",
    "packing": "data.packing",
    "method": "method.name",
    "method-arguments": "method.arguments",
    "targets": "method.targets",
    "optimizer": "optimizer.name",
    "learning-rate": "optimizer.learning_rate",
    "schedule": "schedule.name",
    "warmup": "schedule.warmup",
    "steps": "run.max_train_steps",
    "epochs": "run.max_train_epochs",
    "accumulation": "run.gradient_accumulation_steps",
    "gradient-checkpointing": "run.gradient_checkpointing",
    "seed": "run.seed",
    "resume": "run.resume",
    "precision": "precision.mixed_precision",
    "evaluate-every": "evaluation.every_n_steps",
    "patience": "evaluation.patience",
    "output-dir": "saving.output_dir",
    "output-name": "saving.output_name",
    "save-every": "saving.save_every_n_steps",
    "save-state": "saving.save_state",
    "backend": "compile.backend",
    "check": "compile.check",
    "logging-dir": "logging.logging_dir",
    "quiet": "logging.quiet",
}
"""Flag -> the setting that it sets; it wins over the file."""

ALIASES: Mapping[str, str] = {
    "dynamo-backend": "compile.backend",
    "dynamo-mode": "compile.mode",
    "dynamo-use-dynamic": "compile.dynamic",
    "dynamo-use-fullgraph": "compile.fullgraph",
    "compile-regions": "compile.regions",
    "compile-check": "compile.check",
    "mixed-precision": "precision.mixed_precision",
    "gradient-accumulation-steps": "run.gradient_accumulation_steps",
    "max-train-steps": "run.max_train_steps",
    "max-train-epochs": "run.max_train_epochs",
    "max-grad-norm": "run.max_grad_norm",
}
"""What accelerate and ``onegraph train diffusion`` call some of them, each with a value: hints that name those are right here too."""

_TRUTHS = {"yes": "true", "no": "false"}
# What people give as flags, of what methods have.
FIELDS_OF_METHODS = {"rank", "alpha", "dropout", "input_dropout", "rslora", "block_size"}
_NAMES = {path: flag for flag, path in FLAGS.items()}
_METHOD_FIELDS = {entry.name for entry in dataclasses.fields(MethodSettings)}


def label(path: str) -> str:
    """How a setting is called in messages: "run.seed (--seed)"."""
    return f"{path} (--{_NAMES[path]})" if path in _NAMES else path


class _Parser(argparse.ArgumentParser):
    """Raises our error where argparse would print its own."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message, hint="onegraph train text --help says what there is", code="bad-value")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = _Parser(
        prog="onegraph train text",
        description="Trains an adapter of a language model. Every setting can stand in the file; a flag wins over it.",
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="a TOML file with the settings, in tables: [model] path = ...")
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="any other setting: --set data.long=drop")
    for flag, path in FLAGS.items():
        entry = field_of(TextConfiguration, path)
        limits = range_text(entry).replace("%", "%%")
        meaning = str(entry.metadata["meaning"]).replace("%", "%%") + (f" ({limits})" if limits else "")
        kind = _kind(path)
        options: dict[str, Any] = {"dest": path, "default": None, "help": meaning}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "metavar": path.rpartition(".")[2].upper()} | ({"nargs": "+"} if _is_many(path) else {})
        made.add_argument(f"--{flag}", **options)
    return made


def read_configuration(arguments: Sequence[str]) -> TextConfiguration:
    """The settings of a command line and the file it names.

    Raises:
        ConfigurationError: ``unknown-flag``, ``bad-value``, ``config-file``, ``settings-file``; several at once where there are several.
    """
    given, rest = parser().parse_known_args(list(_spelled(arguments)))
    problems: list[OnegraphError] = [_unknown(word) for word in rest if word.startswith("--")]
    problems += [
        ConfigurationError(f"{word!r} belongs to no flag", hint="write --flag VALUE", code="stray-value")
        for word in rest[:1]
        if not word.startswith("--")
    ]
    tree: dict[str, Any] = {}
    if given.config is not None:
        tree = _read_file(Path(given.config), problems)
    for path, value in vars(given).items():
        if "." in path and value is not None:
            _put(tree, path, value)
    for item in given.set:
        _set(tree, item, problems)
    branches: dict[str, Any] = {}
    hints = typing.get_type_hints(TextConfiguration)
    for name, branch in tree.items():
        where = f"[{name}] in {given.config}" if given.config else name
        try:
            branches[name] = read_settings(hints[name], branch, where)
        except OnegraphError as error:
            problems.append(error)
    if problems:
        raise ConfigurationError.collected(problems)
    return TextConfiguration(**branches)


def _read_file(path: Path, problems: list[OnegraphError]) -> dict[str, Any]:
    """The tables of a file, with the method's own fields among its arguments."""
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        why = str(error.strerror or error)
        problems.append(ConfigurationError(f"--config {path} can't be read", why=why, hint="the path of a TOML file", code="config-file"))
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = 'texts need quotes: path = "model"; switches: packing = true'
        problems.append(ConfigurationError(f"--config {path} is not TOML", why=str(error), hint=hint, code="config-file"))
        return {}
    known = [entry.name for entry in dataclasses.fields(TextConfiguration)]
    if isinstance(tree.get("method"), str):
        tree["method"] = {"name": tree["method"]}
    for name in list(tree):
        if name not in known or not isinstance(tree[name], dict):
            problems.append(_misplaced(path, name, known, table=isinstance(tree[name], dict)))
            del tree[name]
    if "method" in tree:
        tree["method"] = _with_arguments(tree["method"])
    for branch in tree.values():
        for name, value in branch.items():
            if name in ("train", "validation", "targets", "exclude") and isinstance(value, str):
                branch[name] = [value]
    return tree


def _with_arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    """[method] with rank = 16 as the argument "rank=16"."""
    own = {name: value for name, value in table.items() if name in _METHOD_FIELDS}
    further = [f"{name}={tuple(value) if isinstance(value, list) else value!r}" for name, value in table.items() if name not in own]
    return {**own, "arguments": [*own.get("arguments", ()), *further]} if further else own


def _misplaced(path: Path, name: str, known: list[str], *, table: bool) -> OnegraphError:
    if not table:
        homes = [branch for branch in known if name in typing.get_type_hints(typing.get_type_hints(TextConfiguration)[branch])]
        if name in known:
            return ConfigurationError(f"{path}: {name} is a table, [{name}]", hint=f"[{name}]", code="config-file")
        hint = f"it belongs under [{homes[0]}]" if homes else f"the tables are {', '.join(f'[{branch}]' for branch in known)}"
        return ConfigurationError(f"{path}: {name} stands in no table", hint=hint, code="config-file")
    near = nearest(name, known)
    hint = f"did you mean [{near[0]}]?" if near else f"the tables are {', '.join(f'[{branch}]' for branch in known)}"
    return ConfigurationError(f"{path}: there is no table [{name}]", hint=hint, code="config-file")


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    branch, _, name = path.partition(".")
    table = tree.setdefault(branch, {})
    if path == "method.name" and table.get("name") not in (None, value):
        table.pop("arguments", None)  # the fields of the file's own method
    if path == "method.arguments":
        given = typing.cast(list[str], value)
        again = {item.partition("=")[0] for item in given}
        value = [*(item for item in table.get(name, ()) if item.partition("=")[0] not in again), *given]
    table[name] = value


def _set(tree: dict[str, Any], item: str, problems: list[OnegraphError]) -> None:
    """One ``branch.name=value``; the value is TOML, or a text."""
    path, separator, text = item.partition("=")
    paths = _all_paths()
    path = path.strip()
    branch, _, name = path.partition(".")
    if separator and branch == "method" and name.isidentifier() and path not in paths:  # a field of the method, as in the file
        _put(tree, "method.arguments", [f"{name}={text.strip()}"])
        return
    if not separator or path not in paths:
        near = nearest(path, paths)
        what = f"--set {item}: {'there is no setting ' + path if separator else 'it is not NAME=VALUE'}"
        problems.append(ConfigurationError(what, hint=f"did you mean {near[0]}?" if near else "--set data.long=drop", code="unknown-flag"))
        return
    try:
        value = tomllib.loads(f"value = {_TRUTHS.get(text, text) if _kind(path) is bool else text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    _put(tree, path, [value] if _is_many(path) and not isinstance(value, list) else value)


def _names(branch: str) -> list[str]:
    return [entry.name for entry in dataclasses.fields(typing.get_type_hints(TextConfiguration)[branch])]


def _hint(path: str) -> Any:
    branch, _, name = path.partition(".")
    return typing.get_type_hints(typing.get_type_hints(TextConfiguration)[branch])[name]


def _is_many(path: str) -> bool:
    return typing.get_origin(_hint(path)) is tuple


def _kind(path: str) -> type:
    """What a flag's text is read as."""
    hint = _hint(path)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    return str if typing.get_origin(hint) is tuple else typing.cast(type, hint)


def _spelled(arguments: Sequence[str]) -> Iterator[str]:
    """--batch_size=8 as --batch-size=8, and an alias as ``--set``."""
    words = iter(arguments)
    for word in words:
        name, separator, value = word.partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--"):
            yield word
        elif (path := ALIASES.get(name[2:])) is not None:
            yield from ("--set", f"{path}={value if separator else next(words, '')}")
        else:
            yield name + separator + value


def _unknown(word: str) -> OnegraphError:
    name = word[2:].partition("=")[0]
    near = nearest(name, [*FLAGS, "config", "set"])
    settings = [path for path in _all_paths() if path.endswith("." + name.replace("-", "_"))]
    hint = f"did you mean --{near[0]}?" if near else f"--set {settings[0]}=..." if settings else "onegraph train text --help"
    if name.removeprefix("lora_").replace("-", "_") in FIELDS_OF_METHODS:
        hint = f"it is a field of the method: --method-arguments {name.removeprefix('lora_').replace('-', '_')}=..."
    return ConfigurationError(f"unknown flag --{name}", hint=hint, code="unknown-flag")


def _all_paths() -> list[str]:
    return [f"{branch.name}.{name}" for branch in dataclasses.fields(TextConfiguration) for name in _names(branch.name)]
