"""The exception tree: every error has a code, what happened, why, and a hint.

An error prints as::

    what happened, with the value and the path
    why

    hint: the exact command, or the nearest valid names
    [code]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class OnegraphError(Exception):
    """Base of every error that onegraph raises.

    Args:
        what: What happened, with the offending value and where it was found.
        why: The reason, one or two sentences.
        hint: What to do: an exact command or the nearest valid names.
        code: Kebab-case name of the failure, stable between releases; the class default when omitted.
    """

    code = "onegraph-error"

    def __init__(self, what: str, *, why: str = "", hint: str = "", code: str | None = None) -> None:
        self.what = what
        self.why = why
        self.hint = hint
        if code is not None:
            self.code = code
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what if not self.why else f"{self.what}\n{self.why}"
        if self.hint:
            text += f"\n\nhint: {self.hint}"
        return f"{text}\n[{self.code}]"


class ConfigurationError(OnegraphError):
    """Settings that can't be honoured. ``problems`` lists all of them when there are several."""

    code = "configuration"

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        hint: str = "",
        code: str | None = None,
        problems: Sequence[OnegraphError] = (),
    ) -> None:
        super().__init__(what, why=why, hint=hint, code=code)
        self.problems = tuple(problems)

    @classmethod
    def collected(cls, problems: Sequence[OnegraphError]) -> OnegraphError:
        """The one problem itself, or one error that lists them all."""
        if len(problems) == 1:
            return problems[0]
        body = "\n\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
        return cls(f"{len(problems)} problems with the settings:\n\n{body}", code="configuration", problems=problems)


class TargetError(OnegraphError):
    """Targets that match nothing, or a layer that a method can't adapt."""

    code = "targets"


class AdapterError(OnegraphError):
    """An adapter that doesn't exist, exists already, or doesn't fit the structure it is put in."""

    code = "adapter"


class CheckpointError(OnegraphError):
    """An adapter file that can't be read, written or matched with the model."""

    code = "checkpoint"


class ModelFileError(OnegraphError):
    """A base model that can't be read: not a model, another family, or a file that would run code."""

    code = "model-file"


class DataError(OnegraphError):
    """A training folder, image or caption that can't be used."""

    code = "data"


class CompileError(OnegraphError):
    """A backend that isn't there, a missing compiler, or a compilation that failed."""

    code = "compile"


class MismatchError(OnegraphError):
    """The compiled model's loss or gradients differ from eager's."""

    code = "compiled-differs-from-eager"


class NumericsError(OnegraphError):
    """NaN or infinity in latents, loss, gradients or weights."""

    code = "not-finite"


class OutputError(OnegraphError):
    """A file or folder that can't be written. The old file is still there."""

    code = "output"


def nearest(name: str, valid: Iterable[str], *, limit: int = 3) -> list[str]:
    """The ``limit`` names of ``valid`` that look most like ``name``, best first; empty when none comes near."""
    return difflib.get_close_matches(name, list(valid), n=limit, cutoff=0.6)
