"""Which model an adapter was probably made for, and whether that is a part of the model at hand, or one around it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from onegraph.adapters.walk import plain_class, unwrapped
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.keys import plain_path

# What occurs in the module paths of a family, and of no family above it.
_FAMILIES = (
    (r"(^|\.)h\.\d+\.attn\.c_attn$", "GPT-2"),
    (r"(^|\.)h\.\d+\.attn\.[qkv]_proj$", "GPT-J"),
    (r"(^|\.)h\.\d+\.self_attention\.query_key_value$", "BLOOM or Falcon"),
    (r"(^|\.)layers\.\d+\.attention\.query_key_value$", "GPT-NeoX or Pythia"),
    (r"(^|\.)block\.\d+\.layer\.\d+\.(Self|EncDec)Attention\.", "T5"),
    (r"(^|\.)transformer\.layer\.\d+\.attention\.[qkv]_lin$", "DistilBERT"),
    (r"(^|\.)layer\.\d+\.attention\.self\.(query|key|value)$", "BERT or RoBERTa"),
    (r"(^|\.)encoder\.layers\.\d+\.self_attn\.", "BART, Whisper or CLIP"),
    (r"(^|\.)decoder\.layers\.\d+\.self_attn\.", "OPT"),
    (r"(^|\.)layers\.\d+\.self_attn\.qkv_proj$", "Phi-3"),
    (r"(^|\.)layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)$", "Llama, Mistral, Qwen or Gemma"),
)
_NUMBER = re.compile(r"\.(\d+)\.")
# Layers that read what a block reads: their inputs are as wide as the model.
_READS_HIDDEN = re.compile(r"(^|\.)(c_attn|[qk]_proj|query_key_value|qkv_proj|[qk]_lin|query|key|q|k)$")


def made_for(file: AdapterFile) -> str:
    """One sentence about the model that a file was made for: what it says itself, and what its names and shapes say; "" when neither."""
    said = file.config.get("base_model_name_or_path")
    paths = [plain_path(path) for layers in file.parts.values() for path in layers]
    family = next((name for pattern, name in _FAMILIES if any(re.search(pattern, path) for path in paths)), None)
    looks = f"a model like {family}{_size(file, paths)}" if family else ""
    if isinstance(said, str) and said:
        return f"The file was made for {said}" + (f", {looks}." if looks else ".")
    return f"The file was probably made for {looks}." if looks else ""


def described(model: nn.Module) -> str:
    """A language model's name and size, as in "SmolLM2 (30 layers, 576 wide)"; "" for a model without a configuration of that kind."""
    config: Any = getattr(unwrapped(model), "config", None)
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not isinstance(layers, int) or not isinstance(width, int):
        return ""
    return f"{name_of(model) or plain_class(unwrapped(model)).__name__} ({layers} layers, {width} wide)"


def name_of(model: nn.Module) -> str:
    """Where a transformers model was loaded from; "" for one that was made."""
    name = getattr(unwrapped(model), "name_or_path", "")
    return name if isinstance(name, str) else ""


def nested(keys: Iterable[str], paths: Collection[str]) -> str:
    """How all of a file's paths lie in the model after all: a hint that names the module, or "".

    A file made for a model without its head lacks the first name, one made for the model with it has a name too many.
    """
    wanted = [plain_path(key) for key in keys]
    plain = {plain_path(path) for path in paths}
    if not wanted:
        return ""
    fronts = {path.removesuffix(wanted[0]).rstrip(".") for path in plain if path.endswith(f".{wanted[0]}")}
    for front in sorted(fronts):
        if all(f"{front}.{path}" in plain for path in wanted):
            return f"The file was made for the module {front!r} of this model: load it onto model.{front}"
    heads = {path.partition(".")[0] for path in wanted}
    if len(heads) == 1 and all(path.partition(".")[2] in plain for path in wanted):
        return f"The file was made for a model that has this one as its {heads.pop()!r}, such as one with a head: load it onto that"
    return ""


def _size(file: AdapterFile, paths: list[str]) -> str:
    """Number of layers and width, as far as an adapter shows them."""
    numbers = [int(found.group(1)) for path in paths if (found := _NUMBER.search(path))]
    downs = [weights.get("down") for layers in file.parts.values() for path, weights in layers.items() if _READS_HIDDEN.search(path)]
    widths = {down.shape[-1] for down in downs if isinstance(down, torch.Tensor)}
    words = [f"at least {max(numbers) + 1} layers"] if numbers else []
    words += [f"{widths.pop()} wide"] if len(widths) == 1 else []
    return f" ({', '.join(words)})" if words else ""
