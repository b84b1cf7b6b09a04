"""``adapter_config.json`` of PEFT 0.21.2 for LoRA: every field, its default, and what a value other than that means for us."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onegraph.checkpoint.keys import pattern_value, patterns_of, targets_of
from onegraph.errors import CheckpointError
from onegraph.methods import METHODS

logger = logging.getLogger(__name__)

PEFT_VERSION = "0.21.2"

# Every field that PEFT writes for LoRA, with its default.
DEFAULTS: dict[str, object] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": PEFT_VERSION,
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": None,
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

# Fields that change what the adapter computes in a way that can't be honoured, and what each of them is.
_UNSUPPORTED = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "ensure_weight_tying": "tied adapters",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron layers",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "adapters on bare parameters",
    "trainable_token_indices": "trainable tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
}

# These change the base model's weights when the adapter is created, so the saved factors mean something only on top of the changed base.
_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class PeftSettings:
    """What an ``adapter_config.json`` says about the function of a LoRA."""

    default_rank: int
    default_alpha: float
    dropout: float
    rslora: bool
    lora_bias: bool
    init: str
    rank_pattern: dict[str, float]
    alpha_pattern: dict[str, float]

    def rank(self, path: str) -> int:
        """The rank of the layer at ``path``."""
        return int(pattern_value(self.rank_pattern, path, self.default_rank))

    def alpha(self, path: str) -> float:
        """The alpha of the layer at ``path``."""
        return float(pattern_value(self.alpha_pattern, path, self.default_alpha))


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


def settings_of(config: Mapping[str, object], path: Path) -> PeftSettings:
    """Check a configuration whole and take out what matters here; unknown fields are named in one warning.

    Raises:
        CheckpointError: ``adapter-config`` with every wrong field, ``adapter-unsupported`` for a method or option that can't be honoured.
    """
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        raise CheckpointError(
            f"{path} is of peft_type {peft_type!r}; LORA is read.",
            hint=f"Methods here: {', '.join(sorted(METHODS))}.",
            code="adapter-config" if not isinstance(peft_type, str) else "adapter-unsupported",
        )
    problems = list(_wrong_fields(config))
    if problems:
        raise CheckpointError(
            f"{len(problems)} fields of {path} are wrong." if len(problems) > 1 else f"A field of {path} is wrong.",
            why="\n".join(f"  {problem}" for problem in problems),
            hint="Use the adapter_config.json that was saved with these weights.",
            code="adapter-config",
        )
    used = [f"{field} ({what})" for field, what in _UNSUPPORTED.items() if config.get(field) not in (None, False)]
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
        used.append(f"init_lora_weights = {init!r} (it changes the base weights, so the adapter alone is not the whole difference)")
    if used:
        raise CheckpointError(
            f"{path} asks for what can't be honoured: {', '.join(used)}.",
            why="Going on without it would compute something else.",
            hint="For pissa, olora, corda and lora_ga save with PEFT's path_initial_model_for_weight_conversion first."
            if not isinstance(init, bool) and len(used) == 1
            else "Plain LoRA is read.",
            code="adapter-unsupported",
        )
    unknown = sorted(config.keys() - DEFAULTS.keys() - {"runtime_config"})
    if unknown:
        logger.warning("%s: unknown fields, kept but not used: %s", path, ", ".join(unknown))
    return PeftSettings(
        default_rank=_integer(config, "r"),
        default_alpha=_number(config, "lora_alpha"),
        dropout=_number(config, "lora_dropout"),
        rslora=bool(config.get("use_rslora", False)),
        lora_bias=bool(config.get("lora_bias", False)),
        init="gaussian" if init == "gaussian" else "kaiming",
        rank_pattern=_pattern(config, "rank_pattern"),
        alpha_pattern=_pattern(config, "alpha_pattern"),
    )


def config_of(
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    all_paths: Iterable[str],
    *,
    dropout: float,
    rslora: bool,
    lora_bias: bool,
    init: str,
    extra: Mapping[str, object],
) -> dict[str, object]:
    """The configuration PEFT would write for these layers.

    Args:
        ranks: Module path -> rank.
        alphas: Module path -> alpha.
        all_paths: Every module path of the model, so that the target modules mean these layers and no others.
        dropout: Dropout in [0, 1).
        rslora: alpha / sqrt(rank) in place of alpha / rank.
        lora_bias: A bias on the up factor.
        init: How down was drawn, "kaiming" or "gaussian".
        extra: Further fields, such as ``task_type``; they win.
    """
    rank, alpha = patterns_of(ranks), patterns_of(alphas)
    return {
        **DEFAULTS,
        "r": int(rank.default),
        "rank_pattern": {path: int(value) for path, value in rank.exceptions.items()},
        "lora_alpha": whole(alpha.default),
        "alpha_pattern": {path: whole(value) for path, value in alpha.exceptions.items()},
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "init_lora_weights": "gaussian" if init == "gaussian" else True,
        "lora_bias": lora_bias,
        "target_modules": targets_of(ranks.keys(), all_paths),
        **extra,
    }


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


def whole(value: float) -> int | float:
    """16 for 16.0: PEFT's alpha is an integer wherever it can be."""
    return int(value) if float(value).is_integer() else value


def _wrong_fields(config: Mapping[str, object]) -> Iterable[str]:
    for field in ("r", "lora_alpha", "lora_dropout"):
        value = config.get(field, DEFAULTS[field])
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield f"{field} = {value!r}: a number was expected"
        elif field == "r" and (not isinstance(value, int) or value < 1):
            yield f"r = {value!r}: a whole number of at least 1 was expected"
        elif field == "lora_dropout" and not 0 <= value < 1:
            yield f"lora_dropout = {value!r}: a number from 0 to below 1 was expected"
    for field in ("use_rslora", "lora_bias", "use_dora", "fan_in_fan_out"):
        value = config.get(field, False)
        if not isinstance(value, bool):
            yield f"{field} = {value!r}: true or false was expected"
    for field in ("rank_pattern", "alpha_pattern"):
        value = config.get(field) or {}
        if not isinstance(value, dict):
            yield f"{field} = {value!r}: a table of module paths and numbers was expected"
            continue
        for pattern, number in value.items():
            positive = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
            if not positive or (field == "rank_pattern" and (not isinstance(number, int) or number < 1)):
                yield f"{field}[{pattern!r}] = {number!r}: a number was expected"
            try:
                re.compile(f"({pattern})$")
            except re.error as error:
                yield f"{field}[{pattern!r}]: no regular expression ({error})"
    bias = config.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        yield f"bias = {bias!r}: none, all or lora_only was expected"
    targets = config.get("target_modules")
    if targets is not None and not isinstance(targets, str) and not _is_list_of_strings(targets):
        yield f"target_modules = {targets!r}: a list of names or one regular expression was expected"


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(entry, str) for entry in value)


def _number(config: Mapping[str, object], field: str) -> float:
    value = config.get(field, DEFAULTS[field])
    assert isinstance(value, int | float)  # checked by _wrong_fields
    return float(value)


def _integer(config: Mapping[str, object], field: str) -> int:
    return int(_number(config, field))


def _pattern(config: Mapping[str, object], field: str) -> dict[str, float]:
    value = config.get(field) or {}
    assert isinstance(value, dict)  # checked by _wrong_fields
    return {str(pattern): number for pattern, number in value.items()}
