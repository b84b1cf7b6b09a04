"""What is said where a model can't be taken over as it is."""

from __future__ import annotations

from onegraph.errors import AdapterError

_UNCHANGED = "Nothing has changed."


class AdoptedError(AdapterError, AttributeError):
    """The wrapper of a model whose adapters were taken over is used. An AttributeError too, so that ``hasattr`` says no."""

    code = "adopted"


def unsupported(what: str, *, why: str = "", hint: str = "") -> AdapterError:
    """The error for something that PEFT holds and that is nothing here."""
    return AdapterError(f"it can't be adopted: {what}", why=f"{why} {_UNCHANGED}".strip(), hint=hint, code="adopt-unsupported")


def undecided(what: str, *, why: str = "", hint: str = "") -> AdapterError:
    """The error for a state of PEFT's layers that no state here is equal to."""
    return AdapterError(f"it can't be adopted: {what}", why=f"{why} {_UNCHANGED}".strip(), hint=hint, code="adopt-state")


def few(names: list[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
