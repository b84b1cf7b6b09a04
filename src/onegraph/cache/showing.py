"""What is in the folder: how much, how old, made by what, and whether the last run found what it needed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onegraph.cache.entries import Entry, entries
from onegraph.compiling.last_run import FILE as LAST_RUN
from onegraph.doctor.cache_folder import CacheFolder, cache_folder
from onegraph.machine.target import target_of
from onegraph.machine.torch_version import torch_version

# Reading one takes a millisecond; all of a folder were mostly built by one compiler.
_LIBRARIES_READ = 200


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """What the last process that compiled by ``onegraph.compile`` found.

    Args:
        ended_seconds_ago: When it ended.
        hits: Graphs found.
        misses: Graphs compiled.
        torch: Its torch.
    """

    ended_seconds_ago: float
    hits: int
    misses: int
    torch: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The folder.

    Args:
        folder: Place, size, age, disk: as the doctor sees it.
        made_for: Compiler and processor -> C++ kernels built by and for them, of those that were read.
        last_run: Hits and misses of the last run; None when none left a record.
        traced: How many of its graphs AOTAutograd keeps, which spare tracing and differentiating; the others are inductor's.
    """

    folder: CacheFolder
    traced: int = 0
    made_for: dict[str, int] = field(default_factory=dict)
    last_run: LastRun | None = None

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        folder = self.folder
        lines = [f"folder    {folder.path}", f"          {folder.origin}" + ("; lost at reboot" if folder.temporary else "")]
        if not folder.exists:
            return "\n".join([*lines, "          not there yet: the first compilation makes it"])
        if folder.problem:
            lines.append(f"          {folder.problem}")
        lines.append(f"size      {in_bytes(folder.bytes)} in {folder.files} files")
        kinds = f"{self.traced} traced, {folder.entries - self.traced} compiled"
        lines.append(f"holds     {folder.entries} graphs ({kinds}), {folder.libraries} built kernels")
        if folder.oldest_seconds is not None and folder.newest_seconds is not None:
            lines.append(f"age       {in_words(folder.newest_seconds)} to {in_words(folder.oldest_seconds)}")
        made = [f"torch {version}: {number} compiled graphs" for version, number in folder.written_by.items()]
        made += [f"{kind}: {number} kernels" for kind, number in self.made_for.items()]
        lines += [f"{'made by' if number == 0 else '':<10}{line}" for number, line in enumerate(made)]
        if self.last_run is not None:
            run = self.last_run
            lines.append(
                f"last run  {run.hits} of {run.hits + run.misses} graphs found here, "
                f"{in_words(run.ended_seconds_ago)} ago, torch {run.torch}"
            )
        for number, text in ((folder.stale, "written by another torch, never used again"), (folder.unreadable, "cut off or not readable")):
            if number:
                lines.append(f"of no use {number} {text}: onegraph cache prune")
        return "\n".join(lines)


def contents() -> Contents:
    """Looks at the folder that inductor would use now; nothing is made."""
    folder = cache_folder(torch_version())
    found = list(entries(Path(folder.path)))
    traced = sum(entry.is_graph and entry.name.startswith("aotautograd/") for entry in found)
    return Contents(folder=folder, traced=traced, made_for=_made_for(found), last_run=_last_run(Path(folder.path)))


def _made_for(found: list[Entry]) -> dict[str, int]:
    libraries = sorted((entry for entry in found if entry.is_library), key=lambda entry: -entry.written)[:_LIBRARIES_READ]
    kinds: Counter[str] = Counter()
    for entry in libraries:
        target = target_of(entry.path)
        if target is not None:
            kinds[f"{target.compiler}, {target.architecture or 'any processor'}"] += 1
    return dict(kinds.most_common())


def _last_run(folder: Path) -> LastRun | None:
    try:
        record = json.loads((folder / LAST_RUN).read_text(encoding="utf-8"))
        return LastRun(
            ended_seconds_ago=max(0.0, time.time() - float(record["ended"])),
            hits=int(record["hits"]),
            misses=int(record["misses"]),
            torch=str(record["torch"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def in_bytes(number: int) -> str:
    """A size as people say it."""
    size = float(number)
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def in_words(seconds: float) -> str:
    """A time as people say it."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
