"""README.md of a saved adapter: what the Hub reads, and which versions made it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from onegraph import __version__
from onegraph.adapters.walk import plain_class
from onegraph.checkpoint.atomic import atomic_write
from onegraph.checkpoint.container import write_bytes
from onegraph.peft.configs import PeftConfig
from onegraph.peft.kinds import TaskType

NAME = "README.md"
_HEADING = "### Framework versions"
_FENCE = "---\n"


def write_card(model: nn.Module, config: PeftConfig | None, folder: Path) -> None:
    """Write the card, or complete the one that is there: what people wrote stays.

    Args:
        model: The base model.
        config: Of the active adapter.
        folder: Where the adapter is.

    Raises:
        OutputError: It can't be written.
    """
    path = folder / NAME
    fields, text = _parsed(path.read_text(encoding="utf-8")) if path.is_file() else ({}, _text(model, config))
    base = None if config is None else config.base_model_name_or_path
    fields["library_name"] = "peft"
    if base:
        fields.setdefault("base_model", base)
    tags = {*fields.get("tags", []), *(getattr(model, "model_tags", None) or [])}
    if type(model).__module__.startswith("transformers."):
        tags.add("transformers")
    if config is not None and config.form.peft_type == "LORA":
        tags.add("lora")
    if base:
        tags.add(f"base_model:adapter:{base}")
    if tags:
        fields["tags"] = sorted(tags)
    if config is not None and config.task_type == TaskType.CAUSAL_LM:
        fields.setdefault("pipeline_tag", "text-generation")
    if _HEADING not in text:
        text = f"{text.rstrip()}\n\n{_HEADING}\n"
    for line in (f"- onegraph {__version__}", f"- torch {torch.__version__}"):
        if line not in text.splitlines():
            text = f"{text.rstrip()}\n{line}\n"
    data = f"{_FENCE}{yaml.safe_dump(fields, sort_keys=True)}{_FENCE}\n{text.lstrip()}".encode()
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, partial(write_bytes, data), num_bytes=len(data))


def _parsed(text: str) -> tuple[dict[str, Any], str]:
    """Fields and body of a card; a head that is no YAML is part of the body."""
    if text.startswith(_FENCE) and f"\n{_FENCE}" in text[len(_FENCE) - 1 :]:
        head, _, body = text[len(_FENCE) :].partition(f"\n{_FENCE}")
        try:
            fields = yaml.safe_load(head) or {}
        except yaml.YAMLError:
            return {}, text
        if isinstance(fields, dict):
            return fields, body
    return {}, text


def _text(model: nn.Module, config: PeftConfig | None) -> str:
    if config is None:
        return "# Adapter\n"
    base = config.base_model_name_or_path or plain_class(model).__name__
    return (
        f"# {config.form.peft_type} adapter for {base}\n\n"
        "It changes what the base model computes, and holds only its own weights.\n\n"
        '```python\nfrom onegraph.peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, "path/to/this/folder")\n```\n'
    )
