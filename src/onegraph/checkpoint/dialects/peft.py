"""PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT 0.21.2 writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from onegraph.checkpoint.dialects.peft_config import PeftSettings
from onegraph.checkpoint.file import Weights
from onegraph.checkpoint.keys import first_ten, plain_path
from onegraph.errors import CheckpointError
from onegraph.methods import LoRA, Method

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_WEIGHTS_NAME = "adapter_model.bin"
PREFIX = "base_model.model."

# Kind of layer -> our parameter -> theirs.
PARAMETERS = {
    "linear": {"down": "lora_A.weight", "up": "lora_B.weight", "up_bias": "lora_B.bias"},
    "conv": {"down": "lora_A.weight", "up": "lora_B.weight", "up_bias": "lora_B.bias"},
    "embedding": {"down": "lora_embedding_A", "up": "lora_embedding_B"},
}

# The adapter's name may still stand in the key, where a state dict was saved as it was.
_KEY = re.compile(r"^(?P<path>.+?)\.lora_(?:(?P<factor>[AB])(?:\.[^.]+)?\.(?P<kind>weight|bias)|embedding_(?P<table>[AB])(?:\.[^.]+)?)$")
_OTHER_METHODS = {
    "lora_magnitude_vector": "DoRA",
    "lora_E": "AdaLoRA",
    "ia3_l": "IA3",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "vera_": "VeRA",
    "oft_": "OFT",
    "boft_": "BOFT",
    "hra_u": "HRA",
    "ln_tuning_layers": "LN tuning",
}


@dataclass(frozen=True)
class Parsed:
    """The tensors of a PEFT folder, sorted into adapter and base model."""

    weights: dict[str, Weights]
    methods: dict[str, Method]
    base_weights: dict[str, torch.Tensor]


def key_of(path: str, kind: str, parameter: str) -> str:
    """The key of one tensor.

    Example:
        >>> key_of("layers.0.q_proj", "linear", "down")
        'base_model.model.layers.0.q_proj.lora_A.weight'
    """
    return f"{PREFIX}{path}.{PARAMETERS[kind][parameter]}"


def looks_like(keys: Iterable[str]) -> bool:
    """True where keys begin as in a PEFT file."""
    return any(without_prefix(key) != key for key in keys)


def without_prefix(key: str) -> str:
    """A key without ``base_model.model.``, also where a wrapper stands in front of it."""
    head, found, tail = key.partition(PREFIX)
    return tail if found and not plain_path(head.rstrip(".")) else key


def parse(tensors: Mapping[str, torch.Tensor], settings: PeftSettings, path: Path) -> Parsed:
    """Module path -> down, up, alpha; and the method of each layer by the configuration.

    Raises:
        CheckpointError: ``adapter-unsupported``, ``adapter-incomplete``, ``adapter-shape``, or ``adapter-config`` where the ranks of the
            configuration and of the tensors differ.
    """
    weights: dict[str, Weights] = {}
    base_weights: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name = without_prefix(key)
        match = _KEY.match(name)
        if match is None:
            _refuse_other_methods(key, path)
            base_weights[name.replace(".base_layer.", ".")] = tensor
            continue
        factor = match["factor"] or match["table"]
        parameter = "up_bias" if match["kind"] == "bias" else {"A": "down", "B": "up"}[factor]
        if match["kind"] == "bias" and factor == "A":
            raise CheckpointError(f"{key} in {path}: lora_A has no bias.", code="adapter-keys")
        weights.setdefault(match["path"], {})[parameter] = tensor
    if not weights:
        raise CheckpointError(
            f"{path} holds no LoRA tensors.",
            why=f"Its keys are:\n{first_ten(tensors)}",
            hint="A PEFT LoRA file holds keys that end in lora_A.weight and lora_B.weight.",
            code="adapter-keys",
        )
    return Parsed(weights, methods_of(weights, settings, path), base_weights)


def methods_of(weights: Mapping[str, Weights], settings: PeftSettings, path: Path) -> dict[str, Method]:
    """The method of each layer; fills in ``alpha``.

    Raises:
        CheckpointError: ``adapter-incomplete``, or ``adapter-config`` where configuration and tensors disagree.
    """
    methods: dict[str, Method] = {}
    halves, ranks, biases = [], [], []
    for layer, values in weights.items():
        down, up = values.get("down"), values.get("up")
        if not isinstance(down, torch.Tensor) or not isinstance(up, torch.Tensor):
            halves.append(f"{layer} has only: {', '.join(sorted(values))}")
            continue
        rank, alpha = settings.rank(layer), settings.alpha(layer)
        if down.dim() < 2 or down.shape[0] != rank:
            ranks.append(f"{layer}: r is {rank} in the configuration, lora_A has shape {tuple(down.shape)}")
        if ("up_bias" in values) != settings.lora_bias:
            biases.append(layer)
        values["alpha"] = alpha
        methods[layer] = LoRA(
            rank=rank, alpha=alpha, input_dropout=settings.dropout, rslora=settings.rslora, init=settings.init, bias=settings.lora_bias
        )
    if halves:
        raise CheckpointError(
            f"{len(halves)} layers of {path} are incomplete.",
            why=f"Each needs lora_A and lora_B:\n{first_ten(halves)}",
            hint="The file is damaged; download it or train it again.",
            code="adapter-incomplete",
        )
    if ranks:
        raise CheckpointError(
            f"{len(ranks)} layers of {path} don't have the rank that {CONFIG_NAME} gives them.",
            why=first_ten(ranks),
            hint=f"Use the {CONFIG_NAME} that was saved with these weights (fields r and rank_pattern).",
            code="adapter-config",
        )
    if biases:
        raise CheckpointError(
            f"lora_bias is {str(settings.lora_bias).lower()} in {CONFIG_NAME}, but {len(biases)} layers of {path} say otherwise.",
            why=first_ten(biases),
            hint=f"Use the {CONFIG_NAME} that was saved with these weights.",
            code="adapter-config",
        )
    return methods


def _refuse_other_methods(key: str, path: Path) -> None:
    for mark, method in _OTHER_METHODS.items():
        if f".{mark}" in f".{key}":
            raise CheckpointError(
                f"{path} holds {method} weights, which aren't read yet.",
                why=f"For example {key}.",
                hint="Plain LoRA folders are read.",
                code="adapter-unsupported",
            )
