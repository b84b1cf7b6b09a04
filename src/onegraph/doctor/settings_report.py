"""What `accelerate config` and the environment would really do here: each setting, where it comes from, and what it overrules."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from onegraph.doctor.finding import BREAKS, NOTE, WARNING, Finding, listed, pip_install

FIELDS = ("backend", "mode", "dynamic", "fullgraph", "regions")
# Field -> the end of accelerate's name for it, and our flag.
_NAMES = {
    "backend": ("backend", "dynamo_backend"),
    "mode": ("mode", "dynamo_mode"),
    "dynamic": ("use_dynamic", "dynamo_use_dynamic"),
    "fullgraph": ("use_fullgraph", "dynamo_use_fullgraph"),
    "regions": ("use_regional_compilation", "compile_regions"),
}
_PREFIX = "ACCELERATE_DYNAMO_"
# Variables that accelerate's launcher reads.
_LAUNCHERS = ("ACCELERATE_", "OMP_", "MASTER_", "CUDA_", "KMP_", "FSDP_", "MIXED_", "USE_", "XPU_", "MPS_")
# What the launcher makes of the other fields reaches onegraph.train_network by the environment, or decides what is started.
_READ = {
    "compute_environment": "decides how the run is started",
    "debug": "accelerate's own checks",
    "distributed_type": "decides how the run is started",
    "enable_cpu_affinity": "binds processes to cores (NVIDIA GPUs)",
    "gpu_ids": "becomes CUDA_VISIBLE_DEVICES",
    "mixed_precision": "what is computed in; the flag --mixed_precision wins over it",
    "num_machines": "has to be 1",
    "num_processes": "has to be 1",
    "use_cpu": "no GPU is used",
}


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The file of ``accelerate config``.

    Args:
        path: Which one is read.
        origin: Where that comes from.
        exists: Whether it is there.
        parsed: Whether it is YAML or JSON with fields in it.
        problem: Why not.
        fields: Name -> {"value", "effect"}: "" as effect is none.
    """

    path: str
    origin: str
    exists: bool = False
    parsed: bool = False
    problem: str = ""
    fields: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a run gets that is started in one way.

    Args:
        command: How it is started.
        settings: Field -> {"value", "origin", "overrules": [{"value", "origin", "why"}]}.
        notes: What ``onegraph.train_network`` would print about them.
        problem: Why it can't start; "" when it can.
        code: The name of the problem.
        hint: What the error itself advises.
    """

    command: str
    settings: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: str = ""
    hint: str = ""


def file_location(given: str | None) -> tuple[Path, str]:
    """The file that accelerate launch reads, and where its place comes from."""
    if given is not None:
        return Path(given), "flag --config_file"
    home, origin = os.environ.get("HF_HOME"), "environment HF_HOME"
    if not home:
        base, origin = os.environ.get("XDG_CACHE_HOME"), "environment XDG_CACHE_HOME"
        if not base:
            base, origin = "~/.cache", "default"
        home = f"{base}/huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml", origin


def read_file(given: str | None) -> tuple[ConfigFile, dict[str, Any]]:
    """The report on the file, without effects yet, and its fields."""
    path, origin = file_location(given)
    if not path.exists():
        return ConfigFile(path=str(path), origin=origin, problem="there is no such file" if given is not None else ""), {}
    try:
        document = _parsed(path)
    except ImportError:
        return ConfigFile(path=str(path), origin=origin, exists=True, problem="PyYAML isn't installed, so it can't be read"), {}
    except Exception as error:  # a YAML or JSON error is told by its text, with the line
        text = " ".join(str(error).split())
        return ConfigFile(path=str(path), origin=origin, exists=True, problem=f"{type(error).__name__}: {text}"), {}
    if not isinstance(document, dict):
        return ConfigFile(path=str(path), origin=origin, exists=True, problem=f"it holds {_kind(document)} and no fields"), {}
    return ConfigFile(path=str(path), origin=origin, exists=True, parsed=True), {str(name): value for name, value in document.items()}


def _parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    import yaml

    return yaml.safe_load(text)


def _kind(document: Any) -> str:
    return "nothing" if document is None else f"a {type(document).__name__}"


def dynamo_section(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``dynamo_config`` with names as ``_NAMES`` has them; the 2023 form has ``dynamo_backend`` beside the other fields."""
    section = fields.get("dynamo_config")
    found = {str(name).removeprefix("dynamo_"): value for name, value in section.items()} if isinstance(section, dict) else {}
    if "dynamo_backend" in fields:
        found.setdefault("backend", fields["dynamo_backend"])
    return found


def ways(answer: Mapping[str, Any], fields: Mapping[str, Any], flags: Mapping[str, Any], config_file: str | None) -> list[Way]:
    """The ways to start a run: by ``accelerate launch``, and by ``python -m`` in this environment.

    Args:
        answer: What ``asked`` answered.
        fields: The fields of the configuration file.
        flags: Our flags as given to the doctor.
        config_file: The file as given.
    """
    launch, python = answer.get("launch", {}), answer.get("python", {})
    given = f" --config_file {config_file}" if config_file else ""
    behind = "".join(f" --{_NAMES[name][1]}={_word(value)}" for name, value in flags.items())
    by_launch = bool(python.get("by_launch"))
    found = []
    if launch and not by_launch:
        command = f"accelerate launch{given} -m onegraph.train_network{behind}"
        found.append(_way(command, launch, dynamo_section(fields), flags, launched=True))
    if python:
        command = f"python -m onegraph.train_network{behind}"
        section = dynamo_section(fields) if by_launch else {}
        found.append(_way("as this command was started, by accelerate launch" if by_launch else command, python, section, flags))
    return found


def _word(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _way(command: str, told: Mapping[str, Any], section: Mapping[str, Any], flags: Mapping[str, Any], *, launched: bool = False) -> Way:
    rows = {name: dict(row) for name, row in told.get("rows", {}).items()}
    for name, row in rows.items():
        if launched and row["origin"].startswith("environment"):
            # the launcher fills in every variable: from the 2023 form of the file, or by itself
            row["origin"] = "file" if _NAMES[name][0] in section else "default of accelerate launch"
    settings = {
        name: {**rows[name], "overrules": list(_overruled(name, rows[name], section, flags, launched=launched))}
        for name in FIELDS
        if name in rows
    }
    return Way(
        command=command,
        settings=settings,
        notes=tuple(told.get("notes", ())),
        problem=" ".join(filter(None, (told.get("error"), told.get("why")))),
        code=str(told.get("code", "")),
        hint=str(told.get("hint", "")),
    )


def _overruled(
    name: str, row: Mapping[str, str], section: Mapping[str, Any], flags: Mapping[str, Any], *, launched: bool
) -> Iterator[dict[str, str]]:
    """The values that were given for a field and don't decide, the nearest first, with the reason."""
    key = _NAMES[name][0]
    variable = f"{_PREFIX}{key.upper()}"
    origin = row["origin"]
    if key in section and not origin.startswith("file"):
        value = section[key]
        if origin.startswith("flag"):
            why = f"the {origin} wins"
        elif value is False and name in {"dynamic", "fullgraph", "regions"}:
            why = "false is what accelerate writes unasked, so it is read as not said"
        elif name == "mode":
            why = "it is the default" if str(value) == "default" else "only inductor has modes"
        else:
            why = "accelerate doesn't hand it on"
        yield {"value": str(value), "origin": "file", "why": why}
    if variable in os.environ:
        if launched:
            yield {"value": os.environ[variable], "origin": f"environment {variable}", "why": "accelerate launch sets the variable anew"}
        elif name in flags:
            yield {"value": os.environ[variable], "origin": f"environment {variable}", "why": f"the {origin} wins"}


def with_effects(file: ConfigFile, fields: Mapping[str, Any], way: Way | None) -> ConfigFile:
    """The report on the file with what each of its fields does here."""
    if not file.parsed:
        return file
    effects: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        if name == "dynamo_config" and isinstance(value, dict):
            for key, inner in value.items():
                effects[f"dynamo_config.{key}"] = {"value": inner, "effect": _dynamo_effect(str(key), way)}
        elif name == "dynamo_backend":
            effects[name] = {"value": value, "effect": _dynamo_effect(name, way)}
        else:
            effects[name] = {"value": value, "effect": _READ.get(name, "")}
    return ConfigFile(path=file.path, origin=file.origin, exists=True, parsed=True, fields=effects)


def _dynamo_effect(key: str, way: Way | None) -> str:
    name = next((name for name, (end, _) in _NAMES.items() if key.removeprefix("dynamo_") == end), None)
    if name is None or way is None:
        return ""
    if way.problem:
        return "stops the run: see below" if name == "backend" else ""
    row = way.settings.get(name, {})
    decides = str(row.get("origin", "")).startswith("file") or (
        key == "dynamo_backend" and str(row.get("origin", "")).startswith("environ")
    )
    active = way.settings["backend"]["value"] != "no" or name == "backend"
    return f"{name}: {row['value']}" if decides and active else ""


def settings_findings(file: ConfigFile, fields: Mapping[str, Any], found: list[Way], torch_here: bool) -> Iterator[Finding]:
    """What would stop a run, and what does nothing."""
    path = quote(file.path)
    section_names = [name.removeprefix("dynamo_config.") for name in file.fields or {}]
    launch_stops = any(way.code == "accelerate-launch-stops" for way in found)
    if file.problem:
        yield Finding(
            code="accelerate-config-unreadable",
            severity=BREAKS,
            what=f"accelerate's configuration file {file.path} ({file.origin}) can't be read: {file.problem}",
            do=_mend(file),
        )
    section = fields.get("dynamo_config")
    if file.parsed and isinstance(section, dict) and section.get("dynamo_backend") is False:
        yield Finding(
            code="yaml-no-is-false",
            severity=BREAKS,
            what=f"{file.path}: an unquoted NO or no is a boolean in YAML, and accelerate wants a name in dynamo_backend",
            do=(f"sed -i \"s/dynamo_backend:.*/dynamo_backend: 'NO'/\" {path}",),
        )
        launch_stops = False
    for way in found:
        if way.problem and not (way.code == "accelerate-launch-stops" and (not launch_stops or file.problem)):
            yield _stops(way, file)
    for name in file.fields or {}:
        inner = name.startswith("dynamo_config.")
        known = [f"dynamo_{end}" for end, _ in _NAMES.values()]
        key = name.removeprefix("dynamo_config.")
        if inner and key not in known and f"dynamo_{key}" not in known:
            near = difflib.get_close_matches(key, known, n=1)
            yield Finding(
                code="config-field-unknown",
                severity=WARNING,
                what=f"{file.path}: dynamo_config has a field {key} that nothing reads" + (f"; did you mean {near[0]}?" if near else ""),
                do=(f"sed -i 's/{key}:/{near[0]}:/' {path}" if near and near[0] not in section_names else f"sed -i '/{key}:/d' {path}",),
            )
    kind = str(fields.get("distributed_type", "NO"))
    if kind in {"FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"}:
        yield Finding(
            code="several-processes",
            severity=BREAKS,
            what=f"{file.path} cuts the model in pieces ({kind}), and the commands that train have the whole of it in every process",
            do=("accelerate launch --multi_gpu -m onegraph.train_network",),
        )
    idle = [name for name, told in (file.fields or {}).items() if not told["effect"] and told["value"] not in (None, False, "", {})]
    idle = [name for name in idle if not name.startswith("dynamo_config.") or torch_here]
    if idle and torch_here:
        yield Finding(code="config-without-effect", severity=NOTE, what=f"{file.path}: nothing here reads {listed(idle)}")
    overwritten = [name for name in os.environ if name.startswith(_PREFIX)]
    if overwritten and any(way.command.startswith("accelerate launch") for way in found):
        yield Finding(
            code="environment-overwritten",
            severity=WARNING,
            what=f"accelerate launch sets {listed(sorted(overwritten))} anew: what the shell says only counts for python -m",
            do=(f"unset {' '.join(sorted(overwritten))}",),
        )


def _mend(file: ConfigFile) -> tuple[str, ...]:
    """Another file in its place; the default one may as well be missing."""
    if "PyYAML" in file.problem:
        return (pip_install("pyyaml"),)
    if file.origin.startswith("flag"):
        given = "FILE.yaml" if Path(file.path).is_dir() else quote(file.path)
        return (f"accelerate config --config_file {given}",)
    return ("accelerate config", f"rm {'-r ' if Path(file.path).is_dir() else ''}{quote(file.path)}")


def _variable_of(problem: str) -> str | None:
    """The variable whose value an error quotes."""
    quoted = set(re.findall(r"'([^']+)'", problem))
    return next((name for name, value in os.environ.items() if value in quoted and name.startswith(_LAUNCHERS)), None)


def _stops(way: Way, file: ConfigFile) -> Finding:
    do: tuple[str, ...] = (f"sed -i 's/dynamo_backend:.*/dynamo_backend: INDUCTOR/' {quote(file.path)}",)
    if way.code == "accelerate-cannot-be-imported":
        do = (pip_install("--force-reinstall", "accelerate"),)
        return Finding(code=way.code, severity=BREAKS, what=f"accelerate can't be imported: {way.problem}", do=do)
    if way.code == "accelerate-launch-stops":
        words = way.problem.lower()
        if (variable := _variable_of(way.problem)) is not None:
            do = (f"unset {variable}",)
        elif "dynamo" not in words and "backend" not in words:
            do = ("accelerate config",)
        return Finding(code=way.code, severity=BREAKS, what=f"{way.command} stops before it starts: {way.problem}", do=do)
    if not way.code:
        do = (f"{sys.executable} -c 'import onegraph.compiling'",)
        return Finding(code="settings", severity=BREAKS, what=f"{way.command}: {way.problem}", do=do)
    variables = [f"{_PREFIX}{end.upper()}" for end, _ in _NAMES.values()]
    named = next((name for name in variables if name in way.problem and name in os.environ), None)
    if named is not None:
        do = (f"unset {named}",)
    elif "flag" in way.problem:
        do = (f"{way.command.partition(' --dynamo')[0]} --dynamo_backend=inductor",)
    elif way.code.startswith("compile-mode"):
        do = (f"sed -i 's/dynamo_mode:.*/dynamo_mode: default/' {quote(file.path)}",) if file.parsed else (f"unset {_PREFIX}MODE",)
    return Finding(code=way.code, severity=BREAKS, what=f"{way.command}: {way.problem}", do=do)
