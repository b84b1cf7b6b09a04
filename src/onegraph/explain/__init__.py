"""The catalogue of known failures: what an error means, what helps, what doesn't, and what was seen when it was run.

``explain(text)`` finds the entries that a traceback is about; ``find(name)`` the entries of a name, a code or a graph-break number.
Nothing here imports torch: an explanation must not wait for what may be broken.
"""

from __future__ import annotations

import functools

from onegraph.errors import nearest
from onegraph.explain.entry import OWN, Entry, catalogue
from onegraph.explain.match import Candidate, Strength, candidates

__all__ = ["OWN", "Candidate", "Entry", "Strength", "entries", "explain", "find", "mentioning", "similar"]


@functools.cache
def entries() -> dict[str, Entry]:
    """All entries by id."""
    return catalogue()


def explain(text: str | BaseException) -> list[Candidate]:
    """The entries that may explain a failure, best first; empty when the catalogue has none.

    Args:
        text: A traceback or log, whole or in part, or the exception itself.
    """
    if isinstance(text, BaseException):
        import traceback

        text = "".join(traceback.format_exception(text))
    return candidates(text, entries().values())


def find(name: str) -> list[Entry]:
    """The entries of an id, a name without its domain, an alias, a code of ours, or a graph-break number; codes of ours first."""
    if name in entries():
        return [entries()[name]]
    wanted = name.strip("[]").lower()
    found = [entry for entry in entries().values() if wanted in {entry.name, *map(str.lower, (*entry.aliases, *entry.graph_break_id))}]
    return sorted(found, key=lambda entry: entry.domain != OWN)


def similar(name: str) -> list[str]:
    """Names that look like one that isn't there."""
    names = {entry.name: entry.id for entry in entries().values()}
    return [names[near] for near in nearest(name.rpartition("/")[2], names)]


def mentioning(words: str) -> list[Entry]:
    """The entries of other libraries whose title, signature or tags hold every one of the words."""
    wanted = words.lower().replace("-", " ").split()
    if not wanted:
        return []
    return [
        entry
        for entry in entries().values()
        if all(word in " ".join((entry.id, entry.title, entry.title_zh, entry.signature, *entry.tags)).lower() for word in wanted)
    ]
