"""Where the checkpoint room hangs in what ``Adapters.save`` and ``Adapters.load`` do.

Files are a floor above this package, so it never imports them; ``onegraph.checkpoint`` registers its functions when it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from onegraph.errors import AdapterError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from onegraph.adapters.collection import Adapters


class SaveFunction(Protocol):
    """``onegraph.checkpoint.save``."""

    def __call__(self, adapters: Adapters, path: str | Path, **options: Any) -> Any:
        """Write one adapter."""
        ...


class LoadFunction(Protocol):
    """``onegraph.checkpoint.load``."""

    def __call__(self, model: nn.Module, path: str | Path, **options: Any) -> Adapters:
        """Read a file or folder and attach what is in it."""
        ...


@dataclass(frozen=True)
class FileFunctions:
    """What the checkpoint room registers."""

    save: SaveFunction
    load: LoadFunction


_registered: list[FileFunctions] = []


def register_file_functions(*, save: SaveFunction, load: LoadFunction) -> None:
    """Make ``Adapters.save`` and ``Adapters.load`` call these."""
    _registered[:] = [FileFunctions(save, load)]


def file_functions() -> FileFunctions:
    """The registered functions.

    Raises:
        AdapterError: ``no-file-functions``.
    """
    if not _registered:
        raise AdapterError(
            "adapters can't be saved or loaded: onegraph.checkpoint was never imported",
            why="Only onegraph.adapters was.",
            hint="import onegraph.checkpoint",
            code="no-file-functions",
        )
    return _registered[0]
