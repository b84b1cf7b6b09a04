"""Inductor's cache folder: what is in it, and how to take it to another machine of the same kind.

  onegraph cache show          place, size, age, what made it, what the last run found
  onegraph cache pack FILE     all of it as one file
  onegraph cache unpack FILE   into this machine's folder, beside what is there; refused when the machines differ
  onegraph cache prune         removes graphs of another torch and files cut off (--yes; without it they are counted)
  onegraph cache clear         removes all entries (--yes)

The folder is TORCHINDUCTOR_CACHE_DIR, else inductor's own in the temporary folder. Graphs and kernels are code: unpack what you would run.
Exit status: 0 done, 2 a mistake in the command, or it can't be done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from onegraph.cache import clear, contents, pack, prune, unpack
from onegraph.cache.clearing import Cleared
from onegraph.cache.showing import in_bytes

JOBS = ("show", "pack", "unpack", "prune", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("job", choices=JOBS, metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("file", nargs="?", metavar="FILE", help="what pack writes and unpack reads")
    parser.add_argument("--json", action="store_true", help="the answer as one JSON object")
    parser.add_argument("--force", action="store_true", help="unpack: in spite of differences between the machines")
    parser.add_argument("--older_than_days", type=_days, metavar="DAYS", help="prune: what was written before that, too")
    parser.add_argument("--yes", action="store_true", help="prune, clear: remove, instead of counting")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Does the job; returns the exit status."""
    job = arguments.job
    if (job in {"pack", "unpack"}) != (arguments.file is not None):
        arguments.parser.error(f"{job} takes {'a FILE' if job in {'pack', 'unpack'} else 'no FILE'}")
    if job == "show":
        found = contents()
        _print(arguments.json, found.record(), str(found))
    elif job == "pack":
        packed = pack(arguments.file)
        text = (
            f"{packed.path}: {packed.graphs} graphs and {packed.kernels} built kernels, {in_bytes(packed.bytes)} packed into "
            f"{in_bytes(packed.packed_bytes)}"
        )
        _print(arguments.json, dataclasses.asdict(packed), text)
    elif job == "unpack":
        unpacked = unpack(arguments.file, force=arguments.force)
        lines = [f"{unpacked.folder}: {unpacked.files} files put there, {in_bytes(unpacked.bytes)}; {unpacked.kept} were there already"]
        lines += [f"different: {difference}" for difference in unpacked.differences]
        _print(arguments.json, dataclasses.asdict(unpacked), "\n".join(lines))
    else:
        counted = not arguments.yes
        cleared = clear(dry_run=counted) if job == "clear" else prune(older_than_days=arguments.older_than_days, dry_run=counted)
        _print(arguments.json, dataclasses.asdict(cleared), _removed(cleared))
        return 2 if cleared.failed else 0
    return 0


def _removed(cleared: Cleared) -> str:
    text = f"{cleared.folder}: {cleared.files} files, {in_bytes(cleared.bytes)}"
    if cleared.failed:
        return f"{text}, removed; {cleared.failed} files couldn't be removed: they, or their folders, are another user's or read-only"
    return f"{text}, removed" if cleared.done else f"{text}, would be removed: say --yes" if cleared.files else f"{text}: nothing to remove"


def _print(as_json: bool, record: dict[str, object], text: str) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False) if as_json else text)


def _days(text: str) -> float:
    days = float(text)
    if not 0 <= days < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of days")
    return days
