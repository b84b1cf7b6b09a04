"""Errors of this package: ours, and of the classes that programs written for PEFT catch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onegraph.errors import AdapterError, OnegraphError, TargetError

_KINDS: dict[str, type[OnegraphError]] = {}
_UNMATCHED = frozenset({"no-target-matched", "target-without-match"})


class PeftError(OnegraphError):
    """Base of the errors that PEFT has classes for."""

    code = "peft"


class NoMatchingPeftModuleError(PeftError, TargetError, ValueError):
    """The targets match no module of the model."""

    code = "no-target-matched"


class PeftWarning(UserWarning):
    """Base of the warnings that PEFT has classes for."""


class UsageError(AdapterError, ValueError):
    """A call that can't be honoured: what PEFT raises a ValueError for."""

    code = "peft-usage"


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """Inside, an error of ours is a ValueError too: what PEFT's own calls raise."""
    try:
        yield
    except OnegraphError as error:
        if isinstance(error, ValueError):
            raise
        if error.code in _UNMATCHED:
            raise NoMatchingPeftModuleError(error.what, why=error.why, hint=error.hint, code=error.code) from error
        raise _with_value_error(type(error))(error.what, why=error.why, hint=error.hint, code=error.code) from error


def _with_value_error(kind: type[OnegraphError]) -> type[OnegraphError]:
    if kind.__name__ not in _KINDS:
        _KINDS[kind.__name__] = type(kind.__name__, (kind, ValueError), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return _KINDS[kind.__name__]
