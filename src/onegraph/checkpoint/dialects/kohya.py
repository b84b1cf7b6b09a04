"""sd-scripts network files: ``{prefix}_{path with underscores}.lora_down.weight``, ``.lora_up.weight``, ``.alpha``.

Underscores can't be turned back into dots (``to_q`` holds one of its own), so a key is matched with a module by naming every
module of the model and looking the key up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from onegraph.checkpoint.file import Weights, complete
from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError

# Our parameter -> theirs.
PARAMETERS = {"down": "lora_down.weight", "up": "lora_up.weight"}
ALPHA = "alpha"

# The part of a pipeline -> the prefix it is saved under. With two text encoders the first one is lora_te1.
PREFIXES = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
TEXT_ENCODER_PREFIXES = frozenset({"lora_te", "lora_te1", "lora_te2"})
_PREFIX_OF_KEY = re.compile(r"^(lora_unet|lora_te1|lora_te2|lora_te)_")


def prefixes_for(parts: Iterable[str]) -> dict[str, str]:
    """Part -> prefix for the parts of one file.

    Raises:
        CheckpointError: ``kohya-part`` for a part that such files have no place for.
    """
    names = set(parts)
    unknown = sorted(names - PREFIXES.keys())
    if unknown:
        raise CheckpointError(
            f"A kohya file has no place for the part {unknown[0]!r}.", hint=f"Parts: {', '.join(PREFIXES)}.", code="kohya-part"
        )
    prefixes = {name: PREFIXES[name] for name in PREFIXES if name in names}
    if "text_encoder_2" in names and "text_encoder" in names:
        prefixes["text_encoder"] = "lora_te1"
    return prefixes


def module_key(prefix: str, path: str) -> str:
    """The key of a module, without the parameter.

    transformers 5 dropped the ``text_model`` level from CLIPTextModel; files keep it.

    Example:
        >>> module_key("lora_te", "encoder.layers.0.self_attn.q_proj")
        'lora_te_text_model_encoder_layers_0_self_attn_q_proj'
    """
    if prefix in TEXT_ENCODER_PREFIXES and path.startswith(("encoder.", "embeddings.", "final_layer_norm")):
        path = f"text_model.{path}"
    return f"{prefix}_{path.replace('.', '_')}"


def paths_by_key(prefix: str, paths: Iterable[str]) -> dict[str, str]:
    """Key -> module path for every module of a model, text encoders under both names; keys that two modules share are left out."""
    table: dict[str, str] = {}
    shared = set()
    for path in paths:
        keys = {module_key(prefix, path)}
        if prefix in TEXT_ENCODER_PREFIXES:
            keys |= {key.replace(f"{prefix}_text_model_", f"{prefix}_", 1) for key in keys}
        for key in keys:
            if key in table:
                shared.add(key)
            table[key] = path
    return {key: path for key, path in table.items() if key not in shared}


def prefix_of(key: str) -> str | None:
    """The prefix of a key: ``lora_unet``, ``lora_te`` ...; None for a key of another kind of file."""
    found = _PREFIX_OF_KEY.match(key)
    return None if found is None else found.group(1)


def looks_like(keys: Iterable[str]) -> bool:
    """True where every key begins as in a network file."""
    found = list(keys)
    return bool(found) and all(_PREFIX_OF_KEY.match(key) for key in found)


def parse(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, dict[str, Weights]]:
    """Prefix -> module key -> down, up and alpha (the rank where the file has none).

    Raises:
        CheckpointError: ``adapter-incomplete`` for a module with half of its tensors, ``adapter-shape``, ``adapter-keys`` for keys that
            mean nothing.
    """
    parts: dict[str, dict[str, Weights]] = {}
    ours = {theirs: name for name, theirs in PARAMETERS.items()}
    unknown = []
    for key, tensor in tensors.items():
        module, _, suffix = key.partition(".")
        prefix = prefix_of(module)
        if prefix is None or (suffix not in ours and suffix != ALPHA):
            unknown.append(key)
        elif suffix != ALPHA:
            parts.setdefault(prefix, {}).setdefault(module, {})[ours[suffix]] = tensor
        elif tensor.numel() == 1:
            parts.setdefault(prefix, {}).setdefault(module, {})[ALPHA] = float(tensor)
        else:
            raise CheckpointError(
                f"{key} in {path} has shape {tuple(tensor.shape)}; one number was expected.",
                hint="The file is damaged; download it or train it again.",
                code="adapter-shape",
            )
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} keys of {path} are no LoRA keys.",
            why=f"They are:\n{first_ten(unknown)}",
            hint="A network file holds lora_unet_... and lora_te_... keys with .lora_down.weight, .lora_up.weight and .alpha.",
            code="adapter-keys",
        )
    complete(parts, path)
    return parts
