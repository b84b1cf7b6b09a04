"""One known failure: what its TOML file may hold, reading it, and the record that ``explain --json`` gives.

A file is ``catalogue/<domain>/<name>.toml``. People write its upper part; everything below the line ``OBSERVED`` is written by
``scripts/verify_failures`` and by nothing else. Nothing in a file is believed because it is written: `Entry.verified` is true only while
the programs that were run are the programs that stand in the file.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from onegraph.errors import ConfigurationError

OWN = "onegraph"  # the domain of the errors that onegraph itself raises
OBSERVED = "# Written by scripts/verify_failures, by running the programs above. Don't edit below this line.\n"
CATEGORIES = (
    "compile_error",
    "silent_failure",
    "saving",
    "precision",
    "speed",
    "quantisation",
    "distributed",
    "hot_swap",
    "environment",
    "own_error",
)
CAUSE_TYPES = ("library_bug", "library_design", "usage", "version", "environment", "unknown")
OUTCOMES = ("raises", "shows", "gone")
STATUSES = ("active", "fixed", "unknown")
RESOLVABLE = ("yes", "partial", "no")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadEnd:
    """What people try, and why it doesn't help."""

    action: str
    action_zh: str
    why_fails: str
    why_fails_zh: str
    condition: str = ""
    sources: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workaround:
    """What helps: the action, and how, as a command or a line of Python."""

    action: str
    action_zh: str
    how: str
    condition: str = ""
    sources: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions of a package, and whether the failure is there."""

    version: str
    status: str
    introduced: str | None = None
    deprecated: str | None = None
    removed: str | None = None
    behavior_change: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edges:
    """Ids of other entries: what comes before and after this one, and what it is taken for."""

    leads_to: tuple[str, ...] = ()
    preceded_by: tuple[str, ...] = ()
    frequently_confused_with: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Python source that runs alone.

    ``outcome`` of a reproduction: "raises" (it ends in the error, and that error is matched with this entry), "shows" (it asserts a
    failure that raises nothing) or "gone" (the failure isn't there any more: a regression test). A fix always runs clean.
    """

    code: str
    outcome: str = "clean"
    timeout_seconds: int = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What was seen when the programs ran."""

    date: datetime.date
    python: str
    versions: tuple[str, ...]
    programs: str
    reproduction: str = ""
    fix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One failure of the catalogue, in English and Chinese."""

    id: str
    title: str
    title_zh: str
    signature: str
    signature_zh: str
    category: str
    root_cause: str
    root_cause_zh: str
    written: datetime.date
    regex: str = ""
    regex_also: tuple[str, ...] = ()
    regex_not: tuple[str, ...] = ()
    regex_zh: str = ""
    exception_type: tuple[str, ...] = ()
    graph_break_id: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    common_words: bool = False  # other failures have the same words: never more than likely
    silent: bool = False
    subcategory: str | None = None
    root_cause_type: str = "unknown"
    resolvable: str = "yes"
    versions: tuple[Versions, ...] = ()
    os_specific: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dead_ends: tuple[DeadEnd, ...] = ()
    workarounds: tuple[Workaround, ...] = ()
    transition_graph: Edges = dataclasses.field(default_factory=Edges)
    official_doc_url: str | None = None
    official_doc_section: str | None = None
    first_seen: str | None = None
    sources: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    sample: str = ""
    not_verified: str = ""
    reproduction: Program | None = None
    fix: Program | None = None
    observed: Observed | None = None

    @property
    def domain(self) -> str:
        """The library that the failure belongs to."""
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        """The id without its domain."""
        return self.id.partition("/")[2]

    @property
    def error_code(self) -> str | None:
        """The code of an error of ours."""
        return self.name if self.domain == OWN else None

    @property
    def programs(self) -> str:
        """A digest of the two programs: says whether what was observed belongs to them."""
        sources = [program.code if program else "" for program in (self.reproduction, self.fix)]
        return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]

    @property
    def verified(self) -> bool:
        """Whether its programs have been run as they stand here."""
        return self.observed is not None and self.observed.programs == self.programs

    @property
    def samples(self) -> tuple[str, ...]:
        """Texts that this entry must be found by."""
        seen = self.observed.reproduction if self.observed and self.reproduction and self.reproduction.outcome == "raises" else ""
        return tuple(text for text in (self.sample, seen) if text)

    def standing(self) -> str:
        """Whether it was verified, with what and when, or why not."""
        if self.domain == OWN:
            return "an error of onegraph's own"
        if self.verified and self.observed is not None:
            gone = ", where it doesn't happen any more" if self.reproduction and self.reproduction.outcome == "gone" else ""
            return f"verified with {', '.join(self.observed.versions)} on {self.observed.date}{gone}"
        return f"not verified: {self.not_verified or 'its programs have not been run since they changed'}"

    def record(self) -> dict[str, Any]:
        """The entry as plain data. Rates and confidences are None: none of them was measured."""
        entry = dataclasses.asdict(self)
        seen = self.observed if self.verified else None
        tier = "ran" if seen else "own_code" if self.domain == OWN else "not_run"
        return {
            **{name: entry[name] for name in ("id", "title", "title_zh", "signature", "signature_zh", "regex", "regex_zh")},
            "domain": self.domain,
            **{name: entry[name] for name in ("category", "subcategory", "root_cause", "root_cause_type", "root_cause_zh")},
            "versions": list(entry["versions"]),
            "os_specific": dict(self.os_specific),
            "dead_ends": [{**item, "fail_rate": None} for item in entry["dead_ends"]],
            "workarounds": [{**item, "success_rate": None} for item in entry["workarounds"]],
            "workarounds_zh": [item.action_zh for item in self.workarounds],
            **{name: entry[name] for name in ("transition_graph", "official_doc_url", "official_doc_section")},
            "error_code": self.error_code,
            "verification_tier": tier,
            "confidence": None,
            "fix_success_rate": None,
            **{name: entry[name] for name in ("resolvable", "first_seen")},
            "last_confirmed": str(seen.date) if seen else None,
            "last_updated": str(max(self.written, seen.date) if seen else self.written),
            "evidence_count": len(self.sources),
            **{name: entry[name] for name in ("sources", "tags", "aliases")},
            "locale": "en",
            **{name: entry[name] for name in ("exception_type", "graph_break_id", "modules", "silent", "reproduction", "fix")},
            "observed": {**dataclasses.asdict(seen), "date": str(seen.date)} if seen else None,
            "verified": self.standing() if seen else None,
            "not_verified": None if seen else self.standing().removeprefix("not verified: "),
        }


def catalogue() -> dict[str, Entry]:
    """All entries by id, in the order of their ids.

    Raises:
        ConfigurationError: ``catalogue-entry``: a file that isn't one, with its name and what is wrong.
    """
    entries: dict[str, Entry] = {}
    folder = resources.files("onegraph.explain") / "catalogue"
    for domain in sorted(folder.iterdir(), key=_name):
        if not domain.is_dir():
            continue
        for file in sorted(domain.iterdir(), key=_name):
            if file.name.endswith(".toml"):
                identity = f"{domain.name}/{file.name.removesuffix('.toml')}"
                entries[identity] = read(file.read_text(encoding="utf-8"), identity)
    return entries


def _name(place: Traversable) -> str:
    return place.name


def read(text: str, identity: str) -> Entry:
    """The entry in a file's text.

    Args:
        text: TOML.
        identity: What ``id`` must be: the file's folder and name.

    Raises:
        ConfigurationError: ``catalogue-entry``.
    """
    try:
        entry = _build(Entry, tomllib.loads(text), identity)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(identity, str(error)) from error
    assert isinstance(entry, Entry)
    for problem in _problems(entry, identity):
        raise _wrong(identity, problem)
    return entry


_PARTS: dict[str, type] = {
    "versions": Versions,
    "dead_ends": DeadEnd,
    "workarounds": Workaround,
    "transition_graph": Edges,
    "reproduction": Program,
    "fix": Program,
    "observed": Observed,
}
_PLAIN: dict[str, tuple[type, str]] = {
    "str": (str, "text"),
    "str | None": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "datetime.date": (datetime.date, "a date"),
}


def _build(kind: type, given: dict[str, Any], where: str) -> Any:
    """A dataclass of this file from a table: no unknown name, no missing one, every value of its type."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(given.keys() - fields.keys()):
        raise _wrong(where, f"unknown: {', '.join(unknown)}")
    needed = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and name not in given
    ]
    if needed:
        raise _wrong(where, f"missing: {', '.join(needed)}")
    return kind(**{name: _value(str(fields[name].type), name, value, f"{where}: {name}") for name, value in given.items()})


def _value(annotation: str, name: str, value: Any, where: str) -> Any:
    if annotation in _PLAIN:
        kind, words = _PLAIN[annotation]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _wrong(where, f"{value!r} is not {words}")
        return value.strip("\n") if isinstance(value, str) and name != "code" else value
    if annotation == "tuple[str, ...]":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(where, "not a list of texts")
        return tuple(value)
    if annotation == "Mapping[str, str]":
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise _wrong(where, "not a table of texts")
        return value
    part = _PARTS[name]
    if annotation.startswith("tuple["):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise _wrong(where, "not a list of tables")
        return tuple(_build(part, item, f"{where}[{number}]") for number, item in enumerate(value))
    if not isinstance(value, dict):
        raise _wrong(where, "not a table")
    return _build(part, value, where)


_QUALIFIED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_GRAPH_BREAK = re.compile(r"GB\d{4}")
_EVIDENCE = ("exception_type", "graph_break_id", "module")


def _problems(entry: Entry, identity: str) -> list[str]:
    """What the types don't say."""
    found = [f"id is {entry.id!r}"] if entry.id != identity else []
    for name, value, choices in (
        ("category", entry.category, CATEGORIES),
        ("root_cause_type", entry.root_cause_type, CAUSE_TYPES),
        ("resolvable", entry.resolvable, RESOLVABLE),
        *(("versions.status", versions.status, STATUSES) for versions in entry.versions),
        *(("requires", kind, _EVIDENCE) for kind in entry.requires),
        *([("reproduction.outcome", entry.reproduction.outcome, OUTCOMES)] if entry.reproduction else []),
        *([("fix.outcome", entry.fix.outcome, ("clean",))] if entry.fix else []),
    ):
        if value not in choices:
            found.append(f"{name} is {value!r}, not one of {', '.join(choices)}")
    for name, pattern in (("regex", entry.regex), ("regex_zh", entry.regex_zh), *(("regex_also", item) for item in entry.regex_also)):
        try:
            re.compile(pattern)
        except re.error as error:
            found.append(f"{name}: {error}")
    found += [f"exception_type: {name!r} is not qualified" for name in entry.exception_type if not _QUALIFIED.fullmatch(name)]
    found += [f"graph_break_id: {name!r}" for name in entry.graph_break_id if not _GRAPH_BREAK.fullmatch(name)]
    texts = ("title", "title_zh", "signature", "signature_zh", "root_cause", "root_cause_zh")
    found += [f"{name} is empty" for name in texts if not getattr(entry, name)]
    if not entry.workarounds:
        found.append("no workarounds")
    if entry.domain == OWN:
        return [*found, *(["category isn't own_error"] if entry.category != "own_error" else [])]
    if not entry.dead_ends:
        found.append("no dead_ends")
    if not entry.regex and not entry.silent:
        found.append("neither a regex nor silent")
    if entry.regex and not entry.sample and not (entry.reproduction and entry.reproduction.outcome == "raises"):
        found.append("a regex without a sample, and no reproduction that raises")
    if entry.reproduction is None and not entry.not_verified:
        found.append("neither a reproduction nor not_verified")
    if entry.fix is not None and entry.reproduction is None:
        found.append("a fix without a reproduction")
    return found


def _wrong(where: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the catalogue entry {where}: {what}",
        why="The fields of an entry are those of onegraph.explain.entry.Entry.",
        hint="compare it with the entries beside it",
        code="catalogue-entry",
    )
