"""Which torch is installed, as it names itself, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

_VERSION = re.compile(r"""^__version__\s*=\s*['"]([^'"]+)['"]""", re.MULTILINE)


def torch_version() -> str | None:
    """``torch.__version__``, such as "2.13.0+cu130": what inductor writes into its graphs; None without torch.

    The package's metadata may say less: a wheel from PyPI is "2.13.0" there.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            found = _VERSION.search((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
            if found is not None:
                return found.group(1)
    except (OSError, ValueError, ImportError):  # half an installation
        pass
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
