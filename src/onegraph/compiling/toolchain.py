"""Is everything there that inductor needs to build code? Asked by building a few lines, before any model is loaded."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from onegraph.compiling.settings import CompileSettings
from onegraph.errors import CompileError
from onegraph.machine.compiler import Compiler, build, find_compiler, refused_flags

_NO_COMPILATION = "or train without compilation: --dynamo_backend=no"


def check_toolchain(settings: CompileSettings, *, device: str = "cpu") -> None:
    """Builds and loads a three-line library the way inductor would.

    Args:
        settings: Only inductor builds code; other backends pass at once.
        device: "cpu" builds C++; "cuda" needs triton as well.

    Raises:
        CompileError: ``compiler-missing``, ``compiler-with-flags``, ``python-headers-missing``, ``openmp-missing``, ``compiler-broken``,
            ``compiler-for-c``, ``cache-folder``, ``triton-missing``, each with the command that mends it.
    """
    if settings.backend != "inductor":
        return
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        raise CompileError(
            f"Inductor can't compile for {device}: the package triton isn't installed.",
            why="Inductor writes its GPU kernels in triton.",
            hint=f"pip install triton (Linux; on Windows: triton-windows), {_NO_COMPILATION}",
            code="triton-missing",
        )
    compiler = find_compiler()
    cache_folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="onegraph-probe-", dir=cache_folder) as folder:
            build(compiler, Path(folder))
    except OSError as error:
        raise CompileError(
            f"Inductor's cache folder {cache_folder} can't be used: {error}.",
            why="Compiled code is written there and loaded from there.",
            hint=f"set TORCHINDUCTOR_CACHE_DIR to a folder you can write to, on a disk mounted without noexec, {_NO_COMPILATION}",
            code="cache-folder",
        ) from error
    if compiler.flags and not _takes(compiler):
        raise refused_flags(compiler)


def _takes(compiler: Compiler) -> bool:
    """Whether this torch's inductor runs a ``CXX`` with flags: its own search is asked."""
    from torch._inductor.cpp_builder import cpp_compiler_search
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_compiler_search((os.environ["CXX"],))
    except InvalidCxxCompiler:
        return False
    return compiler.named_by_cxx
