"""From a command line with the flags of sd-scripts' ``train_network.py`` to the tree of settings. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from onegraph.cli.flag import convert
from onegraph.cli.flag_help import help_text
from onegraph.cli.given import Given, read_command_line, read_file
from onegraph.cli.network_arguments import read_network_arguments
from onegraph.cli.sd_table import FLAGS, flag_label
from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.diffusion.configuration import NetworkSettings, TrainingConfiguration

__all__ = ["FLAGS", "flag_label", "parse"]


def parse(arguments: Sequence[str] | None = None) -> TrainingConfiguration:
    """The settings of a command line and its ``--config_file``. ``--help`` prints the help and exits.

    Args:
        arguments: What follows the command's name; ``sys.argv`` when None.

    Raises:
        ConfigurationError: every problem at once: ``unknown-flag``, ``unsupported-flag``, ``bad-value``, ``bad-argument``,
            ``config-file``, ``stray-value``, and what ``TrainingConfiguration.problems`` finds.

    Example:
        >>> parse(["--pretrained_model_name_or_path=a.safetensors", "--train_data_dir=b", "--output_dir=c", "--seed", "7"]).run.seed
        7
    """
    given, problems = read_command_line(sys.argv[1:] if arguments is None else list(arguments))
    if "help" in given:
        print(help_text())
        raise SystemExit(0)
    if "config_file" in given:
        from_file, more = read_file(given.pop("config_file").texts[0])
        given, problems = {**from_file, **given}, [*problems, *more]
    reader = _Reader(given, problems)
    reader.read_all()
    configuration = _built(reader.values, tuple(dict.fromkeys(reader.notes)))
    found = [*problems, *reader.readable(configuration.problems(label=reader.label))]
    if found:
        raise ConfigurationError.collected(found)
    return configuration


class _Reader:
    """Turns what was given into settings, notes and problems."""

    def __init__(self, given: dict[str, Given], problems: list[OnegraphError]) -> None:
        self.given = given
        self.problems = problems
        self.values: dict[str, object] = {}
        self.labels: dict[str, str] = {}
        self.notes: list[str] = []
        self.unreadable: list[str] = []

    def label(self, path: str) -> str:
        """How a setting is called: by the flag or the key of the file that set it."""
        return self.labels.get(path) or flag_label(path)

    def readable(self, problems: list[OnegraphError]) -> list[OnegraphError]:
        """Problems of the settings as the user knows them: none that follows from an unreadable value, and hints that name flags."""
        left = [problem for problem in problems if not any(label in problem.what for label in self.unreadable)]
        for problem in left:
            for path, label in self.labels.items():
                problem.hint = problem.hint.replace(label, flag_label(path))
        return left

    def read_all(self) -> None:
        """Read every flag, then those that mean something only together."""
        for item in self.given.values():
            try:
                self._read(item)
            except OnegraphError as error:
                self.problems.append(error)
                self.unreadable.append(item.label)
        for together in (self._network, self._optimizer, self._compile, self._rates, self._files):
            together()

    def _read(self, item: Given) -> None:
        """One flag: refuse it, note it, or set its setting."""
        flag = item.flag
        if flag.refusal:
            if not self._asks_nothing(item):
                what = f"{item.label} is not supported"
                raise ConfigurationError(
                    what, why=f"{flag.refusal[0].upper()}{flag.refusal[1:]}.", hint=flag.instead, code="unsupported-flag"
                )
        elif flag.note:
            if flag.kind != "switch" or item.is_on:
                self.notes.append(f"{item.label}: {flag.note}")
        elif flag.target:
            value = self._value(item)
            if value is not None:
                self.values[flag.target] = value
                self.labels[flag.target] = item.label

    def _asks_nothing(self, item: Given) -> bool:
        """Whether a refused flag has the value with which it does nothing."""
        if item.flag.kind == "switch":
            return not item.is_on
        texts = item.texts or ("",)
        if texts == ("",):
            return True
        return any(texts == (inert,) or _same_number(texts[0], inert) for inert in item.flag.inert)

    def _value(self, item: Given) -> object:
        """The value of a flag; None where it says nothing."""
        flag = item.flag
        if flag.kind == "switch":
            return flag.value if item.is_on else None
        if flag.kind == "truth" and not item.texts:
            return True
        if flag.takes_many:
            return tuple(convert(flag, text, item.label) for text in item.texts if text) or None
        text = item.texts[0]
        if flag.kind == "text" and not text:
            return None
        value = convert(flag, text, item.label)
        return None if flag.zero_is_off and value == 0 else value

    def _network(self) -> None:
        """--network_args: each item to its setting; the items themselves go into the file's metadata."""
        items = self.values.get("network.arguments", ())
        assert isinstance(items, tuple)
        label = self.labels.get("network.arguments", "--network_args")
        module = str(self.values.get("network.module", NetworkSettings().module))
        values, problems = read_network_arguments(items, label, module)
        if taken := values.keys() & self.values.keys():
            what = f"{label} {min(taken).rpartition('.')[2]} and {self.label(min(taken))}"
            problems.append(ConfigurationError(what, why="They are one setting.", hint="keep one of them", code="contradiction"))
        self.values.update(values)
        self.labels.update({path: f"{label} {path.rpartition('.')[2]}" for path in values})
        self.problems.extend(problems)

    def _optimizer(self) -> None:
        """--use_8bit_adam and --use_lion_optimizer are names of optimizers."""
        names = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
        asked = {flag: name for flag, name in names.items() if self._on(flag)}
        explicit = self.values.get("optimizer.name")
        for flag, name in asked.items():
            if explicit is None or str(explicit).lower() == name.lower():
                explicit, self.labels["optimizer.name"] = name, self.given[flag].label
                self.values["optimizer.name"] = name
            else:
                what = f"{self.given[flag].label} and {self.label('optimizer.name')}: two optimizers"
                why = f"The first means {name}, the other {explicit}."
                self.problems.append(ConfigurationError(what, why=why, hint="keep one of them", code="contradiction"))

    def _compile(self) -> None:
        """--torch_compile without a backend means inductor; False without it leaves accelerate's settings alone."""
        if self._on("torch_compile") and "compile.backend" not in self.values:
            self.values["compile.backend"] = "inductor"
            self.labels["compile.backend"] = self.given["torch_compile"].label
        backend = self.values.get("compile.backend")
        if self._on("torch_compile") and str(backend).lower() == "no":
            what = f"{self.given['torch_compile'].label} and {self.label('compile.backend')}=no"
            why = "One says compile, the other says don't."
            self.problems.append(ConfigurationError(what, why=why, hint="keep one of them", code="contradiction"))

    def _rates(self) -> None:
        """One learning rate for the one text encoder; a rate of 0 means that the part is not trained."""
        rates = self.values.get("optimizer.text_encoder_lr")
        if isinstance(rates, tuple):
            self.values["optimizer.text_encoder_lr"] = rates[0]
            if len(rates) > 1:
                what = f"{self.label('optimizer.text_encoder_lr')} has {len(rates)} values"
                why = "Stable Diffusion 1.x and 2.x have one text encoder."
                self.problems.append(ConfigurationError(what, why=why, hint="give one value", code="bad-value"))
        for rate, trains in (("unet_lr", "train_unet"), ("text_encoder_lr", "train_text_encoder")):
            if self.values.get(f"optimizer.{rate}") == 0:
                label = self.label(f"optimizer.{rate}")
                self.labels.setdefault(f"network.{trains}", label)
                self.values[f"network.{trains}"] = False
                part = "UNet" if rate == "unet_lr" else "text encoder"
                self.notes.append(f"{label}=0: the {part} gets no adapter")

    def _files(self) -> None:
        """Formats and trackers of which there is one; caching on disk is caching."""
        only = (("save_model_as", "safetensors", "Pickles (ckpt, pt) can run code when they are read."), ("log_with", "tensorboard", ""))
        for name, one, why in only:
            item = self.given.get(name)
            if item is not None and item.texts and item.texts[0] not in ("", one):
                what = f"{item.label} is {item.texts[0]!r}, which is not supported"
                self.problems.append(ConfigurationError(what, why=why, hint=f"use --{name}={one}", code="unsupported-flag"))
        tracker = self.given.get("log_with")
        if tracker is not None and tracker.texts[:1] == ("tensorboard",) and "logging.logging_dir" not in self.values:
            what = f"{tracker.label} is tensorboard, and there is no {self.label('logging.logging_dir')}"
            self.problems.append(
                ConfigurationError(what, why="The records need a folder.", hint="add --logging_dir=logs", code="missing-setting")
            )
        if self.values.get("data.cache_latents_to_disk"):
            self.values["data.cache_latents"] = True
            self.labels.setdefault("data.cache_latents", self.label("data.cache_latents_to_disk"))

    def _on(self, name: str) -> bool:
        """Whether a switch that the parser reads itself is on."""
        item = self.given.get(name)
        try:
            return item is not None and item.is_on
        except OnegraphError as error:
            if error.what not in {problem.what for problem in self.problems}:
                self.problems.append(error)
            return False


def _same_number(text: str, other: str) -> bool:
    """Whether two texts are the same number."""
    try:
        return float(text) == float(other)
    except ValueError:
        return False


def _built(values: dict[str, object], notes: tuple[str, ...]) -> TrainingConfiguration:
    """The tree of settings from values by their path."""
    configuration = TrainingConfiguration(notes=notes)
    groups: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        branch, _, name = path.partition(".")
        groups.setdefault(branch, {})[name] = value
    changed = {branch: dataclasses.replace(getattr(configuration, branch), **changes) for branch, changes in groups.items()}
    return dataclasses.replace(configuration, **changed)
