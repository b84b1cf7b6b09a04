"""``adapter_config.json`` of PEFT 0.21.2: read, checked against the table of its method, and written."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.checkpoint.dialects.peft_methods.fields import Config
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm
from onegraph.checkpoint.dialects.peft_methods.lora import STARTS, changed_base
from onegraph.errors import CheckpointError, nearest

logger = logging.getLogger(__name__)

# Written by PEFT beside the fields of the configuration; says nothing about the adapter.
RUNTIME = "runtime_config"
# Methods of PEFT that are no weights of layers, or aren't here.
_ELSEWHERE = frozenset(
    "ADAMSS ADAPTION_PROMPT BEFT C3A CARTRIDGE CPT DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA LILY MULTITASK_PROMPT_TUNING OSF PEANUT"
    " POLY PREFIX_TUNING PROMPT_TUNING PSOFT PVERA P_TUNING RANDLORA ROAD SHADOW SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA"
    " WAVEFT XLORA".split()
)


def read_config(path: Path) -> dict[str, object]:
    """Read ``adapter_config.json``.

    Raises:
        CheckpointError: ``adapter-config`` for a file that is missing, no JSON, or no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist.",
            why="PEFT weights mean nothing without it: alpha is in the configuration only.",
            hint="Name the folder that holds adapter_config.json and adapter_model.safetensors.",
            code="adapter-config",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}.", hint="Download or copy the file again.", code="adapter-config") from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, a JSON object was expected.",
            hint="Download or copy the file again.",
            code="adapter-config",
        )
    return values


def form_of(values: Mapping[str, object], path: Path) -> PeftForm:
    """How the method of a configuration is written.

    Raises:
        CheckpointError: ``adapter-config`` for a file that names no method, ``adapter-unsupported`` for one that isn't read.
    """
    peft_type = values.get("peft_type")
    if isinstance(peft_type, str) and peft_type in FORMS:
        return FORMS[peft_type]
    known = isinstance(peft_type, str) and peft_type.upper() in _ELSEWHERE
    close = nearest(peft_type.upper(), FORMS) if isinstance(peft_type, str) and not known else []
    raise CheckpointError(
        f"{path} is of peft_type {peft_type!r}, {'a method of PEFT that is not here' if known else 'which is no method'}.",
        hint=f"Did you mean {close[0]!r}? Read are: {', '.join(sorted(FORMS))}." if close else f"Read are: {', '.join(sorted(FORMS))}.",
        code="adapter-unsupported" if isinstance(peft_type, str) else "adapter-config",
    )


def checked(values: Mapping[str, object], form: PeftForm, path: Path) -> Config:
    """Check a configuration whole and fill in its defaults; unknown fields are named in one warning.

    Raises:
        CheckpointError: ``adapter-config`` with every wrong field, ``adapter-unsupported`` with every option that can't be honoured.
    """
    settled = form.settle(values)
    problems = [problem for name, own in form.fields.items() if name in settled for problem in own.accepts(name, settled[name])]
    if problems:
        raise CheckpointError(
            f"{len(problems)} fields of {path} are wrong." if len(problems) > 1 else f"A field of {path} is wrong.",
            why="\n".join(f"  {problem}" for problem in problems),
            hint="Use the adapter_config.json that was saved with these weights.",
            code="adapter-config",
        )
    config = Config({**form.defaults, **{name: value for name, value in settled.items() if value is not None}}, path, frozenset(values))
    asked = [f"{name} ({own.refused})" for name, own in form.fields.items() if own.refused and settled.get(name) not in (None, False)]
    asked += form.refuse(config)
    if asked:
        raise CheckpointError(
            f"{path} asks for what can't be honoured: {', '.join(asked)}.",
            why="Going on without it would compute something else.",
            hint="For pissa, olora, corda and lora_ga save with PEFT's path_initial_model_for_weight_conversion first."
            if "init_lora_weights" in asked[0]
            else f"{form.peft_type} without it is read.",
            code="adapter-unsupported",
        )
    refuse_misspelt(values, form, path)
    unknown = sorted(settled.keys() - form.fields.keys() - {RUNTIME})
    if unknown:
        logger.warning("%s: unknown fields, kept but not used: %s", path, ", ".join(unknown))
    return config


def refuse_misspelt(values: Mapping[str, object], form: PeftForm, path: Path) -> None:
    """Check the names of a configuration's fields. PEFT writes every field that it knows: one that is missing may stand there misspelt.

    Raises:
        CheckpointError: ``adapter-config`` for an unknown field that looks like one that is missing.
    """
    absent = form.fields.keys() - values.keys()
    unknown = sorted(values.keys() - form.fields.keys() - {RUNTIME})
    meant = [(name, close[0]) for name in unknown if (close := difflib.get_close_matches(name, absent, n=1, cutoff=0.85))]
    if meant:
        raise CheckpointError(
            f"{path} has unknown fields: {', '.join(name for name, _ in meant)}.",
            why="\n".join(f"  {name} looks like {field}, which is missing and would be {form.defaults[field]!r}" for name, field in meant),
            hint=f"Did you mean {meant[0][1]!r}?",
            code="adapter-config",
        )


def kept_fields(values: Mapping[str, object]) -> dict[str, object]:
    """The fields of a configuration that don't follow from the adapter: what it was made for and how, and those that nobody here knows."""
    form = FORMS.get(str(values.get("peft_type")))
    known = form.fields if form is not None else {}
    # A start that changed the base weights is done again by PEFT where the file is loaded: without it the file would mean something else.
    started = {"init_lora_weights", *STARTS} if changed_base(values) is not None else set[str]()
    return {name: value for name, value in values.items() if name != RUNTIME and (name not in known or known[name].kept or name in started)}


def dump_config(config: Mapping[str, object]) -> bytes:
    """The text of the file: two spaces, sorted keys.

    Raises:
        CheckpointError: ``adapter-config`` for a value that JSON has no form for.
    """
    try:
        return json.dumps(config, indent=2, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"A field of adapter_config.json can't be written: {error}.",
            hint="Pass strings, numbers, lists and dictionaries as metadata.",
            code="adapter-config",
        ) from error
