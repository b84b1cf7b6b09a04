"""Says what is here, what would be compiled, and what to do about it: packages, compiler, threads, GPU, cache folder, settings, backends.

  onegraph doctor             everything; each backend is tried, which takes about a minute
  onegraph doctor --quick     without that
  onegraph doctor --config_file run.yaml --dynamo_backend=eager
                              what a run with this file and this flag would get

Exit status: 0 fine, 1 something here will break a run, 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

from onegraph.doctor import examine, show

FINE = 0
BROKEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("--json", action="store_true", help="everything that was found, as one JSON object")
    parser.add_argument("--quick", action="store_true", help="don't try the backends")
    parser.add_argument("--timeout_seconds", type=_seconds, default=120.0, metavar="S", help="the longest that one backend may take (120)")
    own = parser.add_argument_group("what a run would be started with")
    own.add_argument("--config_file", metavar="FILE", help="as accelerate launch takes it")
    own.add_argument("--dynamo_backend", metavar="NAME", help="these five as onegraph.train_network takes them")
    own.add_argument("--dynamo_mode", metavar="NAME")
    own.add_argument("--dynamo_use_dynamic", type=_truth, nargs="?", const=True, metavar="BOOL")
    own.add_argument("--dynamo_use_fullgraph", type=_truth, nargs="?", const=True, metavar="BOOL")
    own.add_argument("--compile_regions", choices=("blocks", "whole"))


def run(arguments: argparse.Namespace) -> int:
    """Examines; returns the exit status."""
    flags = {
        "backend": arguments.dynamo_backend,
        "mode": arguments.dynamo_mode,
        "dynamic": arguments.dynamo_use_dynamic,
        "fullgraph": arguments.dynamo_use_fullgraph,
        "regions": arguments.compile_regions,
    }
    report = examine(
        quick=arguments.quick,
        config_file=arguments.config_file,
        flags={name: value for name, value in flags.items() if value is not None},
        seconds=arguments.timeout_seconds,
        say=_progress,
    )
    _progress("")
    print(json.dumps(report.record(), indent=2, ensure_ascii=False, default=str) if arguments.json else show.text(report))
    return BROKEN if report.breaks else FINE


def _progress(line: str) -> None:
    """One line on a terminal that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}\r", end="", file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _truth(text: str) -> bool:
    if text.lower() not in {"yes", "no", "true", "false", "1", "0"}:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text.lower() in {"yes", "true", "1"}
