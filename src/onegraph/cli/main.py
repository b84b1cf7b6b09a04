"""The command ``onegraph``: one verb a job, one file a verb.

A verb's module has ``add_arguments(parser)`` and ``run(arguments) -> int``, the exit status. It is imported when it is asked for, so that a
verb that needs no torch doesn't wait for it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

import onegraph
from onegraph.cli.explain import offer
from onegraph.errors import OnegraphError

VERBS = {
    "cache": "what inductor compiled before: shown, packed for another machine, cleared",
    "check": "a model compiled against eager: is it right?",
    "doctor": "what is here, what would be compiled, and what to do about it",
    "explain": "what an error means, and what to do about it",
    "train": "an adapter of a language model, or of Stable Diffusion",
}
BAD_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns its exit status.

    Args:
        arguments: What follows the command's name; ``sys.argv`` when None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    width = max(map(len, VERBS))
    parser = argparse.ArgumentParser(
        prog="onegraph",
        description="Every adapter, one compiled graph.",
        epilog="verbs:\n" + "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in VERBS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onegraph {onegraph.__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="onegraph VERB --help says more")
    verb = parser.parse_args(given[:1]).verb
    module = importlib.import_module(f"onegraph.cli.{verb}")
    own = argparse.ArgumentParser(prog=f"onegraph {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(own)
    try:
        return int(module.run(own.parse_args(_as_named(own, given[1:]))))
    except OnegraphError as error:
        print(f"error: {error}\n{offer(error)}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except BrokenPipeError:
        # the reader has seen enough: "onegraph explain --list | head"
        sys.stderr.close()
        return 0
    except Exception:
        # a verb's other statuses are verdicts: a fault of ours must not look like one
        traceback.print_exc()
        print("error: a fault of onegraph itself, shown above", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _as_named(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Flags as the parser names them: --batch_size for --batch-size and the other way round, up to a "--"."""
    known = {name.replace("_", "-"): name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    named: list[str] = []
    for place, word in enumerate(arguments):
        if word == "--":
            return [*named, *arguments[place:]]
        flag, equals, value = word.partition("=")
        named.append(f"{known.get(flag.replace('_', '-'), flag)}{equals}{value}" if word.startswith("--") else word)
    return named


if __name__ == "__main__":
    sys.exit(main())
