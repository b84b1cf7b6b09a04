"""Says what an error means: its cause, what helps, what doesn't, and what was seen when it was run.

  onegraph explain < traceback.txt     the entries that a traceback or log is about, with the reason for each
  onegraph explain CODE ...            entries by name: a code such as compiler-missing, an id, a graph-break number such as GB0170
  onegraph explain log.txt             the same for a file; or a message in quotation marks
  onegraph explain --list              all entries

Exit status: 0 when an entry is found, 1 when none is, 2 for a mistake in the command; with --run 1 when a program didn't do what its
entry says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onegraph import explain
from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.explain import reproduce, show

FOUND = 0
NOT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("code", nargs="*", metavar="CODE", help="what to explain: a name or a file; without it, the text on standard input")
    parser.add_argument("--json", action="store_true", help="a list of records: the entry's fields, and why it was found")
    parser.add_argument("--list", action="store_true", help="all entries, one a line")
    parser.add_argument("--run", action="store_true", help="run the entry's reproduction and fix here, with the versions you have")
    parser.add_argument("--language", choices=show.LANGUAGES, default=_language(), help="en or zh; the default is the terminal's")


def run(arguments: argparse.Namespace) -> int:
    """Explains; returns the exit status."""
    if arguments.list:
        return _list(arguments)
    if arguments.code:
        return _by_name(arguments)
    if arguments.run:
        raise ConfigurationError("--run needs the code of an entry", hint="onegraph explain --list", code="missing-setting")
    return _by_text(arguments)


def offer(error: OnegraphError) -> str:
    """The command that says more about an error of ours; one for all of its problems when there are several."""
    problems = error.problems if isinstance(error, ConfigurationError) and error.problems else (error,)
    return f"more: onegraph explain {' '.join(dict.fromkeys(problem.code for problem in problems))}"


def _language() -> str:
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


def _list(arguments: argparse.Namespace) -> int:
    chosen = list(explain.entries().values())
    print(_json([entry.record() for entry in chosen]) if arguments.json else show.listing(chosen, arguments.language))
    return FOUND


def _by_name(arguments: argparse.Namespace) -> int:
    each = [explain.find(name) for name in arguments.code]
    whole = " ".join(arguments.code)
    found = [entry for entries in each for entry in entries] if all(each) else explain.find(whole)
    if not found and not arguments.run and (text := _text_of(arguments.code)) is not None:
        return _explained(text, arguments)
    if not found:
        if arguments.json:
            print(_json([]))
        else:
            print(show.not_called(whole, explain.similar(whole), explain.mentioning(whole), arguments.language), file=sys.stderr)
        return NOT_FOUND
    if arguments.run:
        return _run(found[0])
    if arguments.json:
        print(_json([entry.record() for entry in found]))
    else:
        print("\n\n".join(show.in_full(entry, arguments.language) for entry in found))
    return FOUND


def _text_of(words: Sequence[str]) -> str | None:
    """What was given instead of a name: the file that it names, or a message in quotation marks that some entry knows."""
    path = Path(words[0]).expanduser()
    with contextlib.suppress(OSError, ValueError):  # a message may be too long for a path
        if len(words) == 1 and path.is_file():
            return path.read_bytes().decode("utf-8", errors="replace")
    whole = " ".join(words)
    return whole if " " in whole.strip() and explain.explain(whole) else None


def _by_text(arguments: argparse.Namespace) -> int:
    if sys.stdin is None:  # closed by whoever started this
        return _explained("", arguments)
    if sys.stdin.isatty():
        print("Paste the traceback, then press Ctrl-D.", file=sys.stderr, flush=True)
    return _explained(sys.stdin.buffer.read().decode("utf-8", errors="replace"), arguments)


def _explained(text: str, arguments: argparse.Namespace) -> int:
    if not text.strip() and not arguments.json:
        print(show.empty(arguments.language))
        return NOT_FOUND
    found = explain.explain(text)
    if arguments.json:
        matched = [{"strength": item.strength.name.lower(), "reasons": list(item.reasons)} for item in found]
        print(_json([{**item.entry.record(), "matched": why} for item, why in zip(found, matched, strict=True)]))
    else:
        print(show.explanation(found, arguments.language))
    return FOUND if found else NOT_FOUND


def _run(entry: explain.Entry) -> int:
    """Runs the programs of an entry and says what was seen."""
    if entry.reproduction is None:
        raise ConfigurationError(
            f"{entry.id} has no program to run", why=entry.standing(), hint=f"onegraph explain {entry.id}", code="missing-setting"
        )
    print(f"{entry.id}, with {', '.join(reproduce.versions(entry))}", flush=True)
    right = True
    for label, program in (("reproduction", entry.reproduction), ("fix", entry.fix)):
        if program is None:
            continue
        ran = reproduce.run(program)
        judged = reproduce.judge(entry, program, ran, explain.entries())
        right = right and judged.right
        print(f"\n{label}: {'as the entry says' if judged.right else 'not as the entry says'} ({program.outcome}, {ran.seconds:.1f} s)")
        print("\n".join(f"  | {line}" for line in (judged.problem or judged.seen).splitlines()), flush=True)
    return FOUND if right else NOT_FOUND


def _json(records: Sequence[dict[str, Any]]) -> str:
    return json.dumps(list(records), indent=2, ensure_ascii=False, default=str)
