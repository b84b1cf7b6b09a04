"""Which entries a text is about: exception type, graph-break number and module first, then its words.

An entry is a candidate when its words are found and nothing contradicts it. A known number of a graph break with other words is only a
possibility, and is called one. What isn't found stays unfound: a wrong answer that sounds sure costs more than none.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Sequence

from onegraph.explain.entry import OWN, Entry


class Strength(enum.IntEnum):
    """How much speaks for a candidate."""

    POSSIBLE = 1  # the same number of a graph break, other words
    LIKELY = 2  # the words, and nothing else in the text that could agree, or words that other failures have too
    MATCH = 3  # the words, and a type, number, module or code that agrees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clues:
    """What a text says, read before its words are compared."""

    text: str
    exception_types: tuple[str, ...]
    graph_breaks: tuple[str, ...]
    files: tuple[str, ...]
    codes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """An entry that may explain the text, and why."""

    entry: Entry
    strength: Strength
    reasons: tuple[str, ...]
    rank: tuple[int, ...]


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?|E {3}|\| ?|> )", re.MULTILINE)
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_RAISED = re.compile(rf"^(?:\S+:\d+: )?((?:{_NAME}: )*{_NAME})(?::|$)", re.MULTILINE)
_SUFFIXES = (
    *("Error", "Exception", "Warning", "Interrupt", "Exit", "Iteration"),
    *("Unsupported", "Failed", "Hit", "Missing", "Compiler", "Failure"),
)
_FILE = re.compile(r'^\s*File "([^"]+)", line \d+', re.MULTILINE)
_BREAK = re.compile(r"gb/gb(\d{4})\.html|\bGB(\d{4})\b")
_CODE = re.compile(r"^\[([a-z][a-z0-9_-]+)\]\s*$", re.MULTILINE)
_OWN_TEXT = re.compile(r"^(?:error: |hint: )|\bonegraph\b", re.MULTILINE)


def clues(text: str) -> Clues:
    """The exception types, graph breaks, files and codes that a text names.

    Args:
        text: A traceback, a log, or a part of one; colours and the prefixes of pytest and torchrun are taken off.
    """
    text = _PREFIX.sub("", _COLOUR.sub("", text.replace("\r\n", "\n")))
    types: dict[str, None] = {}
    for found in _RAISED.finditer(text):
        for name in found[1].split(": "):
            last = name.rpartition(".")[2]
            if not last[:1].isupper() or ("." not in name and not last.endswith(_SUFFIXES)):
                break
            types[name] = None
    return Clues(
        text=text,
        exception_types=tuple(types),
        graph_breaks=tuple(dict.fromkeys(f"GB{link or bare}" for link, bare in _BREAK.findall(text))),
        files=tuple(dict.fromkeys(file.replace("\\", "/") for file in _FILE.findall(text))),
        codes=tuple(dict.fromkeys(_CODE.findall(text))) if _OWN_TEXT.search(text) else (),
    )


def candidates(text: str, entries: Iterable[Entry]) -> list[Candidate]:
    """What may explain a text, best first; empty when nothing in the catalogue does.

    Args:
        text: A traceback, a log, or a part of one.
        entries: The catalogue.
    """
    seen = clues(text)
    found = [candidate for entry in entries if (candidate := _own(entry, seen) if entry.domain == OWN else _foreign(entry, seen))]
    return sorted(found, key=lambda candidate: candidate.rank, reverse=True)


def _own(entry: Entry, seen: Clues) -> Candidate | None:
    """An error of ours says its code."""
    if entry.name not in seen.codes:
        return None
    # below what torch or another library said in the same traceback: that is the cause
    return Candidate(entry=entry, strength=Strength.MATCH, reasons=(f"onegraph's code [{entry.name}]",), rank=(Strength.MATCH, 0, 0, 0, 0))


def _foreign(entry: Entry, seen: Clues) -> Candidate | None:
    number = _shared(entry.graph_break_id, seen.graph_breaks)
    kind = next((there for known in entry.exception_type for there in seen.exception_types if _same_type(known, there)), None)
    module = next((known for known in entry.modules for file in seen.files if _in_module(file, known)), None)
    if entry.graph_break_id and seen.graph_breaks and number is None:
        return None
    if entry.exception_type and seen.exception_types and kind is None:
        return None
    evidence = {"graph_break_id": number, "exception_type": kind, "module": module}
    if any(evidence[needed] is None for needed in entry.requires):
        return None
    if any(re.search(pattern, seen.text, re.MULTILINE) for pattern in entry.regex_not):
        return None
    reasons = [f"graph break {number}"] if number else []
    reasons += [f"exception {kind}"] if kind else []
    reasons += [f"a frame in {module}"] if module else []
    words = _words(entry, seen.text)
    if words is None:
        if number is None:
            return None
        return Candidate(
            entry=entry,
            strength=Strength.POSSIBLE,
            reasons=(*reasons, "but the words are not the known ones"),
            rank=(Strength.POSSIBLE, 1, bool(kind), bool(module), 0),
        )
    strength = Strength.MATCH if reasons and not entry.common_words else Strength.LIKELY
    return Candidate(
        entry=entry,
        strength=strength,
        reasons=(*reasons, f"the words “{_short(words)}”"),
        rank=(strength, bool(number), bool(kind), bool(module), len(words)),
    )


def _words(entry: Entry, text: str) -> str | None:
    """The part of the text that the entry is known by, or None."""
    if entry.signature_zh in text:
        return entry.signature_zh
    found = re.search(entry.regex, text, re.MULTILINE) if entry.regex else None
    if found and all(re.search(pattern, text, re.MULTILINE) for pattern in entry.regex_also):
        return found[0]
    chinese = re.search(entry.regex_zh, text, re.MULTILINE) if entry.regex_zh else None
    return chinese[0] if chinese else None


def _shared(known: Sequence[str], there: Sequence[str]) -> str | None:
    return next((name for name in known if name in there), None)


def _same_type(known: str, there: str) -> bool:
    """Tracebacks qualify the names of all types but the built-in ones; people often paste the bare name."""
    known = known.removeprefix("builtins.")
    return there == known or ("." not in there and known.rpartition(".")[2] == there)


def _in_module(file: str, module: str) -> bool:
    return file == module or file.endswith(f"/{module}")


def _short(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= 90 else f"{line[:87]}..."
