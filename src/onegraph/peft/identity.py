"""Being taken for PEFT's: programs and libraries ask ``isinstance(model, peft.PeftModel)`` before they save or load an adapter."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn


@functools.cache
def _both(kind: Any, theirs: Any) -> type:
    """A class that is ours first and PEFT's too; no object is made of it."""
    return type(kind.__name__, (kind, theirs), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _theirs(kind: type) -> type | None:
    """PEFT's class of this name, or the nearest there is; None where nobody has imported PEFT."""
    library = sys.modules.get("peft")
    names = [parent.__name__ for parent in kind.__mro__ if parent is not nn.Module]
    return next((found for name in names if isinstance(found := getattr(library, name, None), type)), None)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


class TakenForTheirs(nn.Module):
    """``isinstance(model, peft.PeftModel)`` holds for an object of such a class where PEFT is imported; ``type(model)`` stays ours.

    This is what Python has ``__class__`` for beside the type. Nothing of PEFT's runs: methods are looked up on the type.
    """

    @property
    def __class__(self) -> type:
        """Ours, and PEFT's too."""
        kind: Any = type(self)
        theirs = _theirs(kind)
        return kind if theirs is None else _both(kind, theirs)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Libraries that shard or parametrise give a module another class, made from the one that it shows."""
        own: Any = type(self)
        bases = tuple(own if _is_both(base, own) else base for base in kind.__bases__)
        real = own if _is_both(kind, own) else type(kind.__name__, bases, dict(vars(kind))) if bases != kind.__bases__ else kind
        object.__dict__["__class__"].__set__(self, real)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As for any module, but for what is made: an object of the type."""
        return (_bare, (type(self),), dict(vars(self)))


def _is_both(kind: type, own: Any) -> bool:
    theirs = _theirs(own)
    return theirs is not None and kind is _both(own, theirs)
