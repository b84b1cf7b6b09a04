"""The text of ``--help``, made from the table of flags and the settings' own meanings."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap

from onegraph.cli.flag import Flag
from onegraph.cli.sd_table import FLAGS, GROUPS
from onegraph.training.diffusion.configuration import TrainingConfiguration
from onegraph.training.settings import field_of, range_text

_USAGE = """\
usage: accelerate launch -m onegraph.train_network
         --pretrained_model_name_or_path=MODEL
         --train_data_dir=DATA --output_dir=OUT [--flag=value ...]
"""
_ABOUT = (
    "Train a LoRA for Stable Diffusion. The flags are those of sd-scripts' train_network.py. What accelerate config says is honoured: the"
    " compile backend, its mode, mixed precision. --flag=value and --flag value are the same; the last of a repeated flag wins."
)


def help_text(width: int | None = None) -> str:
    """Every flag under its heading, with its meaning, its range and its default; unsupported ones in a list at the end.

    Args:
        width: Characters in a line; the terminal's when None.
    """
    width = width or max(80, min(140, shutil.get_terminal_size().columns))
    lines = [_USAGE, *textwrap.wrap(_ABOUT, width)]
    for group in GROUPS:
        flags = [flag for flag in FLAGS.values() if flag.group == group and not flag.refusal]
        lines += ["", f"{group}:"]
        for flag in flags:
            lines += _entry(flag, width)
    refused = ", ".join(f"--{flag.name}" for flag in FLAGS.values() if flag.refusal)
    lines += ["", "known and not supported (each is an error that says what to do instead):", *textwrap.wrap(refused, width - 2)]
    return "\n".join(lines)


def _entry(flag: Flag, width: int) -> list[str]:
    """One flag: its name, and its meaning wrapped beside or below it."""
    name = f"  --{flag.name}" + ("" if flag.kind == "switch" else f"={flag.example or 'TEXT'}")
    meaning = textwrap.wrap(_meaning(flag), width - 40)
    if len(name) < 39:
        return [f"{name:<40}{meaning[0]}", *(f"{'':<40}{line}" for line in meaning[1:])]
    return [name, *(f"{'':<40}{line}" for line in meaning)]


def _meaning(flag: Flag) -> str:
    """What a flag does, its range and its default."""
    if flag.note:
        return f"accepted: {flag.note}"
    if flag.meaning or not flag.target:
        return flag.meaning
    entry = field_of(TrainingConfiguration, flag.target)
    text = str(entry.metadata["meaning"])
    if flag.kind == "switch" and flag.value is False:
        return f"train the {'UNet' if flag.target.endswith('text_encoder') else 'text encoder'} only"
    limits = range_text(entry)
    default = entry.default
    if isinstance(default, tuple):
        shown = ",".join(map(str, default))
    elif default is dataclasses.MISSING or default in (None, "", False):
        shown = ""
    else:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    details = "; ".join(part for part in (limits, f"default {shown}" if shown else "") if part)
    return f"{text} ({details})" if details and flag.kind != "switch" else text
