"""What to compile and how: read from accelerate's environment and our flags, with the origin of every value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onegraph.compiling.backends import resolve_backend
from onegraph.errors import ConfigurationError, nearest

Regions = Literal["blocks", "whole"]

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_PREFIX = "ACCELERATE_DYNAMO_"


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """How models are compiled, and where each value came from.

    Args:
        backend: A torch backend name, or "no" for no compilation.
        mode: One of ``MODES`` (inductor only).
        dynamic: None lets the caller's shapes decide, True traces symbolic sizes, False one graph a shape.
        fullgraph: True makes a graph break an error.
        regions: "blocks" compiles the repeated blocks, one compilation a shape; "whole" the whole model.
        options: Backend options besides those of the mode.
        sources: Field name -> "flag --x", "file PATH", "environment NAME" or "default".
        notes: Lines to print once: names that were mapped, settings that were read as unsaid.
    """

    backend: str = "inductor"
    mode: str = "default"
    dynamic: bool | None = None
    fullgraph: bool = True
    regions: Regions = "blocks"
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        """True when anything is compiled at all."""
        return self.backend != "no"

    def describe(self) -> list[tuple[str, str, str]]:
        """(name, value, origin) rows for the block that is printed before training."""
        dynamic = {None: "automatic", True: "yes", False: "no"}[self.dynamic]
        rows = [("backend", self.backend), ("mode", self.mode), ("dynamic", dynamic), ("fullgraph", "yes" if self.fullgraph else "no")]
        rows.append(("regions", self.regions))
        return [(name, value, self.sources.get(name, "default")) for name, value in rows]


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """What is known of the `accelerate launch` that started this process: its own flags and its configuration file."""

    flags: frozenset[str] = frozenset()
    config_file: Path | None = None
    dynamo_config: Mapping[str, Any] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        """Where accelerate took ``dynamo_<key>`` from."""
        if f"dynamo_{key}" in self.flags:
            return f"flag of accelerate launch --dynamo_{key}"
        if key in self.dynamo_config:
            return f"file {self.config_file}"
        return f"environment {_PREFIX}{key.upper()}"


def read_launch(command_line: Sequence[str] | None = None) -> LaunchRecord:
    """Reads the parent process's command line and the configuration file it names; empty when there was no launch."""
    arguments = list(command_line) if command_line is not None else _parent_command_line()
    if not any(Path(argument).name in {"accelerate", "accelerate-launch", "launch.py"} for argument in arguments[:4]) and not any(
        "accelerate" in argument for argument in arguments[:4]
    ):
        return LaunchRecord()
    config_file: Path | None = None
    flags: set[str] = set()
    for position, argument in enumerate(arguments):
        if argument in {"-m", "--module"} and not any(name.startswith("accelerate.") for name in arguments[position + 1 : position + 2]):
            break  # what follows is for the program, which has a --config_file of its own
        name, _, value = argument.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not argument.startswith("--"):
            continue
        if name == "config_file":
            config_file = Path(value or (arguments[position + 1] if position + 1 < len(arguments) else ""))
        elif name.startswith("dynamo_"):
            flags.add(name)
    if config_file is None:
        from accelerate.commands.config.config_args import default_config_file

        config_file = Path(default_config_file)
    return LaunchRecord(flags=frozenset(flags), config_file=config_file, dynamo_config=_dynamo_section(config_file))


def _parent_command_line() -> list[str]:
    import psutil

    try:
        parent = psutil.Process().parent()
        return list(parent.cmdline()) if parent is not None else []
    except psutil.Error:
        return []


def _dynamo_section(config_file: Path) -> dict[str, Any]:
    """The ``dynamo_config`` mapping of a YAML or JSON file, keys without their ``dynamo_``; empty when unreadable."""
    import yaml

    try:
        document = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    section = document.get("dynamo_config") if isinstance(document, dict) else None
    return {str(key).removeprefix("dynamo_"): value for key, value in section.items()} if isinstance(section, dict) else {}


def resolve_settings(
    environment: Mapping[str, str] | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    launch: LaunchRecord | None = None,
) -> CompileSettings:
    """Settles every field: our flag wins over accelerate's environment, which wins over the default.

    accelerate's launcher writes ``USE_DYNAMIC=False``, ``USE_FULLGRAPH=False`` and ``USE_REGIONAL_COMPILATION=False`` also when nobody
    was asked, so False there is read as unsaid; the flags say no for certain.

    Args:
        environment: Defaults to ``os.environ``.
        flags: Values of our own flags, None where not given: ``backend``, ``mode``, ``dynamic`` (bool), ``fullgraph`` (bool), ``regions``.
        launch: What started this process; read from the parent process when omitted.

    Raises:
        CompileError: A backend that can't run.
        ConfigurationError: ``compile-mode-unknown``, ``compile-regions-unknown``, or a value that isn't a yes or no.
    """
    environment = os.environ if environment is None else environment
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    launch = launch if launch is not None else (read_launch() if f"{_PREFIX}BACKEND" in environment else LaunchRecord())
    sources = {key: f"flag --{_FLAG_NAMES.get(key, key)}" for key in given}
    notes: list[str] = []

    def said(key: str) -> str | None:
        return environment.get(f"{_PREFIX}{key.upper()}")

    backend_name = str(given.get("backend", said("backend") or "no"))
    if "backend" not in given:
        sources["backend"] = launch.origin("backend") if said("backend") is not None else "default"
    backend, options, line = resolve_backend(backend_name, source=sources["backend"])
    if line:
        notes.append(line)

    mode = str(given.get("mode", said("mode") or "default")).strip().lower()
    if "mode" not in given and mode != "default":
        sources["mode"] = launch.origin("mode")
    if mode not in MODES:
        raise ConfigurationError(
            f"There is no compile mode {mode!r} (from {sources.get('mode', 'default')}).",
            hint=f"the modes are {', '.join(MODES)}" + "".join(f"; did you mean {name}?" for name in nearest(mode, MODES, limit=1)),
            code="compile-mode-unknown",
        )
    if mode != "default" and backend not in {"inductor", "no"}:
        notes.append(f"mode {mode} only changes inductor: backend {backend} has no modes, so it is not used")
        mode = "default"

    values: dict[str, bool | None] = {"dynamic": None, "fullgraph": None, "regional": None}
    for key, variable in (("dynamic", "use_dynamic"), ("fullgraph", "use_fullgraph"), ("regional", "use_regional_compilation")):
        text = said(variable)
        if key in given:
            values[key] = bool(given[key])
        elif text is not None and _is_true(text, variable):
            values[key] = True
            sources["regions" if key == "regional" else key] = launch.origin(variable)
        elif key == "dynamic" and launch.dynamo_config.get(variable) is False and backend != "no":
            notes.append(
                f"dynamo_use_dynamic: false in {launch.config_file} is what accelerate writes unasked, so it is read as automatic; "
                "--dynamo_use_dynamic=no forces one graph a shape"
            )

    regions = str(given.get("regions", "blocks"))
    if regions not in {"blocks", "whole"}:
        raise ConfigurationError(
            f"--compile_regions={regions} isn't one of blocks, whole.", hint="--compile_regions=blocks", code="compile-regions-unknown"
        )
    return CompileSettings(
        backend=backend,
        mode=mode,
        dynamic=values["dynamic"],
        fullgraph=True if values["fullgraph"] is None else values["fullgraph"],
        regions="whole" if regions == "whole" else "blocks",
        options=options,
        sources=sources,
        notes=tuple(notes),
    )


_FLAG_NAMES = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "dynamic": "dynamo_use_dynamic",
    "fullgraph": "dynamo_use_fullgraph",
    "regions": "compile_regions",
}


def _is_true(text: str, variable: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"true", "1", "yes", "y", "on", "t"}:
        return True
    if lowered in {"false", "0", "no", "n", "off", "f", "", "none"}:
        return False
    raise ConfigurationError(
        f"{_PREFIX}{variable.upper()}={text} is neither true nor false.",
        hint=f"unset {_PREFIX}{variable.upper()}",
        code="environment-value",
    )
