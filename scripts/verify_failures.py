"""Runs the programs of the catalogue's entries and writes what was seen, with versions and date, below the line OBSERVED of their files.

bash scripts/verify_failures
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
from pathlib import Path

from onegraph.explain import reproduce
from onegraph.explain.entry import OBSERVED, Entry, catalogue

FOLDER = Path(__file__).resolve().parent.parent / "src" / "onegraph" / "explain" / "catalogue"

LIBRARIES = (
    *("torch", "torch._dynamo", "torch._functorch.aot_autograd"),
    *("peft", "accelerate", "transformers.models.llama", "transformers.trainer", "diffusers.models"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="entries to run, by name or part of the id")
    parser.add_argument("--all", action="store_true", help="also those whose programs were run as they are")
    parser.add_argument("--cold", action="store_true", help="start each program from nothing, where a fork of this process is usual")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    entries = catalogue()
    wanted = arguments.names or [""]
    chosen = [entry for entry in entries.values() if entry.reproduction and any(name in entry.id for name in wanted)]
    if not arguments.all and not arguments.names:
        chosen = [entry for entry in chosen if not entry.verified]
    warm = hasattr(os, "fork") and not arguments.cold
    if warm and chosen:
        import_libraries()
    wrong = []
    for entry in chosen:
        seen: dict[str, str] = {}
        problems = []
        for label, program in (("reproduction", entry.reproduction), ("fix", entry.fix)):
            if program is None:
                continue
            ran = reproduce.run(program, warm=warm)
            judged = reproduce.judge(entry, program, ran, entries)
            seen[label] = judged.seen
            print(f"{'ok   ' if judged.right else 'WRONG'} {entry.id} {label} ({program.outcome}, {ran.seconds:.1f} s)", flush=True)
            if not judged.right:
                problems.append(judged.problem)
                print("      " + judged.problem.replace("\n", "\n      "), flush=True)
        if problems:
            wrong.append(entry.id)
        elif not arguments.dry_run:
            write(entry, seen)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} entries did what they say" + (f"; not: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def import_libraries() -> None:
    """What the programs import, once: each of them is then a fork of this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)


def write(entry: Entry, seen: dict[str, str]) -> None:
    """Replaces the part of the entry's file below the line OBSERVED."""
    path = FOLDER / f"{entry.id}.toml"
    own = path.read_text(encoding="utf-8").partition(OBSERVED)[0].rstrip("\n")
    lines = [
        "[observed]",
        f"date = {datetime.datetime.now(tz=datetime.UTC).date()}",
        f"python = {quoted(platform.python_version())}",
        f"versions = [{', '.join(map(quoted, reproduce.versions(entry)))}]",
        f"programs = {quoted(entry.programs)}",
        *(f"{label} = {block(text)}" for label, text in seen.items() if text),
    ]
    path.write_text(f"{own}\n\n{OBSERVED}" + "\n".join(lines) + "\n", encoding="utf-8")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def block(text: str) -> str:
    """A text as TOML writes it over several lines, word for word where it can."""
    if "'''" in text or text.endswith("'") or any(ord(character) < 32 and character not in "\n\t" for character in text):
        return quoted(text)
    return f"'''\n{text}'''"


if __name__ == "__main__":
    sys.exit(main())
