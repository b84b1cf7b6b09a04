"""What torch raises when it can't compile, as one clear error: the essential line, the place, and the way out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException, Unsupported

from onegraph.errors import CompileError

_EAGER = "--dynamo_backend=no trains eager"
_LONGEST = 300
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@contextlib.contextmanager
def explained(backend: str) -> Iterator[None]:
    """Inside it, what torch raises while it compiles becomes a CompileError; torch's own error is its ``__cause__``.

    Args:
        backend: What compiles, for the message.

    Raises:
        CompileError: ``graph-break``: code that can't be one graph; ``backend-failed``; ``recompile-limit``; ``not-compiled`` for the rest.
    """
    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        raise _explanation(error, backend) from error


def _explanation(error: Exception, backend: str) -> CompileError:
    place = _place(error)
    if isinstance(error, FailOnRecompileLimitHit):
        return CompileError(
            f"The backend {backend} had to compile the same code too often.",
            why="Something differs between calls that should be the same, and each difference is another graph.",
            hint=f"TORCH_LOGS=recompiles shows what differs; {_EAGER}",
            code="recompile-limit",
        )
    if isinstance(error, BackendCompilerFailed):
        inner = getattr(error, "inner_exception", error)
        other = "--dynamo_backend=aot_eager shows whether inductor is at fault; " if backend == "inductor" else ""
        return CompileError(
            f"The backend {backend} failed: {type(inner).__name__}: {_essential(str(inner))}",
            why=f"It was compiling {place}." if place else "The model is fine so far: only compiling it failed.",
            hint=f"{other}{_EAGER}",
            code="backend-failed",
        )
    if isinstance(error, Unsupported):
        return CompileError(
            f"The model can't be compiled as one graph: {_essential(str(error))}",
            why=" ".join(filter(None, (_after("Explanation:", str(error)), f"It is in {place}." if place else ""))),
            hint=f"--dynamo_use_fullgraph=no, or fullgraph=False in Python, lets the graph break there; {_EAGER}",
            code="graph-break",
        )
    return CompileError(
        f"The model can't be compiled: {type(error).__name__}: {_essential(str(error))}",
        why=" ".join(filter(None, (_after("Explanation:", str(error)), f"It is in {place}." if place else ""))),
        hint=f"{_EAGER}, and shows whether the model itself is at fault",
        code="not-compiled",
    )


def _essential(message: str) -> str:
    """The line that says what is wrong: a compiler's first error, else the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    chosen = next((line for line in lines if re.search(r"\berror: ", line)), lines[0] if lines else "no message")
    return chosen if len(chosen) <= _LONGEST else f"{chosen[:_LONGEST]} ..."


def _after(mark: str, message: str) -> str:
    """The rest of the line behind a mark, or nothing."""
    found = next((line.partition(mark)[2].strip() for line in message.splitlines() if mark in line), "")
    return found if len(found) <= _LONGEST else f"{found[:_LONGEST]} ..."


def _place(error: Exception) -> str:
    """The innermost line of the model's code that dynamo names, or nothing."""
    _, separator, trace = str(error).partition("from user code:")
    found = list(_PLACE.finditer(trace)) if separator else []
    return f"{found[-1]['function']} ({found[-1]['file']}:{found[-1]['line']})" if found else ""
