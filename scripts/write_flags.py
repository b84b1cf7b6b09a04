"""Writes the list of flags at the end of docs/training-diffusion.md, from the table that the command itself reads.

bash scripts/setup && .venv/bin/python scripts/write_flags.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onegraph.cli.flag_help import help_text
from onegraph.cli.network_arguments import LYCORIS_ARGUMENTS, NETWORK_ARGUMENTS
from onegraph.cli.sd_table import FLAGS
from onegraph.training.diffusion.configuration import TrainingConfiguration
from onegraph.training.settings import field_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training-diffusion.md"
HEADING = "## Flags\n"
INTRODUCTION = """
`--flag=value` and `--flag value` are the same, the last of a repeated flag wins, and `--config_file=run.toml` reads the same names from
a file. This list is written by `scripts/write_flags.py` from the table that the command reads; `python -m onegraph.train_network --help`
prints it.
"""
COLUMN = 40  # where help_text starts the meaning


def flags_section() -> str:
    """Everything from the heading on."""
    lines = [HEADING, *INTRODUCTION.strip().splitlines()]
    pending = ""
    for line in help_text(width=100_000).splitlines():
        if line.startswith("known and not supported"):
            break
        if line.endswith(":") and not line.startswith(" "):
            lines += ["", f"### {line[:-1].capitalize()}", "| flag | meaning |", "|---|---|"]
        elif line.startswith("  --") and len(line) <= COLUMN:
            pending = line.strip()
        elif line.startswith("  --"):
            lines.append(row(line[:COLUMN].strip(), line[COLUMN:]))
        elif pending:
            lines.append(row(pending, line.strip()))
            pending = ""
    lines += ["", "### Arguments of --network_args", '`--network_args "conv_dim=4" "conv_alpha=1"`']
    lines += [*_arguments("networks.lora", NETWORK_ARGUMENTS), *_arguments("lycoris.kohya", LYCORIS_ARGUMENTS)]
    lines += ["", "### Known and not supported", "Each is an error that says so.", "", "| flags | why | what to do |", "|---|---|---|"]
    refused: dict[tuple[str, str], list[str]] = {}
    for flag in FLAGS.values():
        if flag.refusal:
            refused.setdefault((flag.refusal, flag.instead), []).append(f"`--{flag.name}`")
    lines += [f"| {', '.join(names)} | {why} | {instead} |" for (why, instead), names in refused.items()]
    return "\n".join(lines) + "\n"


def _arguments(module: str, table: Mapping[str, tuple[str, str]]) -> list[str]:
    """The arguments of one network module."""
    lines = ["", f"With `--network_module={module}`:", "", "| argument | meaning |", "|---|---|"]
    return [*lines, *(row(name, _meaning(target)) for name, (_, target) in table.items())]


def _meaning(target: str) -> str:
    entry = field_of(TrainingConfiguration, target)
    meaning, choices = str(entry.metadata["meaning"]), entry.metadata["choices"]
    return f"{meaning} ({', '.join(map(str, choices))}; default {entry.default})" if choices else meaning


def row(flag: str, meaning: str) -> str:
    """One line of a table; a bar in the text doesn't end the cell."""
    return f"| `{flag}` | {meaning.replace('|', '&#124;')} |"


def page() -> str:
    """The page with the section up to date."""
    return PAGE.read_text(encoding="utf-8").partition(HEADING)[0] + flags_section()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
