"""Headers precompiled only for a kernel that has to be built.

Before inductor looks whether a C++ kernel is in its cache it preprocesses the kernel's header, and precompiles it where the temporary
folder doesn't hold that yet: a warm start runs the C++ compiler for nothing, and for seconds after a restart or on another machine.
"""

from __future__ import annotations

import contextvars
import functools
from pathlib import Path
from typing import Any

_sources: contextvars.ContextVar[str | None] = contextvars.ContextVar("onegraph kernel source", default=None)


@functools.cache
def precompile_when_built() -> None:
    """Sees to that, once for the process. Another torch, which does it in another way, stays as it is."""
    from torch._inductor import codecache

    loader = codecache.CppCodeCache.__dict__.get("load_async")
    plain_header = getattr(codecache, "_precompile_header", None)
    if not isinstance(loader, classmethod) or plain_header is None or not hasattr(codecache, "get_path"):
        return

    def load_async(cls: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
        # with code in two parts, built apart, headers are left to inductor
        token = _sources.set(None if kwargs.get("optimized_code") or len(args) > 3 else main_code)
        try:
            return loader.__func__(cls, main_code, *args, **kwargs)
        finally:
            _sources.reset(token)

    def precompile_header(header: str, hashable_cmd_line: str, **options: Any) -> str:
        source = _sources.get()
        if source is not None:
            # the name that inductor gives the library: of one source, without a second part
            key = codecache.get_hash(source.strip(), f"None {hashable_cmd_line}")
            library = Path(codecache.get_path(key, "main.so")[2])
            if library.is_file() and library.stat().st_size:
                return ""  # no header: nothing will be built
        return str(plain_header(header, hashable_cmd_line, **options))

    vars(codecache)["_precompile_header"] = precompile_header
    codecache.CppCodeCache.load_async = classmethod(load_async)  # type: ignore[method-assign, assignment]
