"""Is everything there that inductor needs to build code? Asked by building a few lines, before any model is loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from onegraph.compiling.settings import CompileSettings
from onegraph.errors import CompileError

_PROBE = """#include <Python.h>
#include <omp.h>
extern "C" int onegraph_probe() { return omp_get_max_threads() > 0 ? 42 : 0; }
"""
_NO_COMPILATION = "or train without compilation: --dynamo_backend=no"


def check_toolchain(settings: CompileSettings, *, device: str = "cpu") -> None:
    """Builds and loads a three-line library the way inductor would.

    Args:
        settings: Only inductor builds code; other backends pass at once.
        device: "cpu" builds C++; "cuda" needs triton as well.

    Raises:
        CompileError: ``compiler-missing``, ``python-headers-missing``, ``openmp-missing``, ``cache-folder``, ``triton-missing``, each with
            the command that mends it.
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
    compiler = _find_compiler()
    cache_folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="onegraph-probe-", dir=cache_folder) as folder:
            _build_and_load(compiler, Path(folder))
    except OSError as error:
        raise CompileError(
            f"Inductor's cache folder {cache_folder} can't be used: {error}.",
            why="Compiled code is written there and loaded from there.",
            hint=f"set TORCHINDUCTOR_CACHE_DIR to a folder you can write to, on a disk mounted without noexec, {_NO_COMPILATION}",
            code="cache-folder",
        ) from error


def _find_compiler() -> str:
    """The compiler inductor would call: $CXX, else the first of its own list that exists."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    for candidate in candidates:
        if shutil.which(candidate):
            return candidate
    raise CompileError(
        f"No C++ compiler: {named!r}, named by CXX, isn't there." if named else "No C++ compiler: neither g++ nor clang++ is on the PATH.",
        why=f"The backend inductor (torch {torch.__version__}) writes C++ and builds it before the first step.",
        hint=f"{'unset CXX, or ' if named else ''}install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), "
        f"xcode-select --install (macOS), conda install -c conda-forge cxx-compiler, {_NO_COMPILATION}",
        code="compiler-missing",
    )


def _build_and_load(compiler: str, folder: Path) -> None:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        raise CompileError(
            f"Python.h isn't there: {include} has no headers of this Python {sysconfig.get_python_version()}.",
            why="The backend inductor builds Python extension modules, which include it.",
            hint=f"apt-get install python{sysconfig.get_python_version()}-dev (Debian, Ubuntu), dnf install python3-devel (Fedora), or a "
            f"Python from conda, pyenv or uv, which bring them, {_NO_COMPILATION}",
            code="python-headers-missing",
        )
    source = folder / "probe.cpp"
    library = folder / "probe.so"
    source.write_text(_PROBE)
    openmp = ["-Xclang", "-fopenmp", "-lomp"] if os.uname().sysname == "Darwin" else ["-fopenmp"]
    command = [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library), *openmp]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode != 0:
        missing_openmp = "omp.h" in result.stderr or "fopenmp" in result.stderr or "lomp" in result.stderr
        raise CompileError(
            f"The C++ compiler {compiler} can't build what inductor needs:\n{result.stderr.strip()[-1500:]}",
            why="OpenMP isn't there." if missing_openmp else "A three-line program with Python.h and OpenMP failed.",
            hint=f"apt-get install g++ libgomp1 (Debian, Ubuntu), brew install libomp (macOS), {_NO_COMPILATION}"
            if missing_openmp
            else f"try the command by hand: {' '.join(command)}, {_NO_COMPILATION}",
            code="openmp-missing" if missing_openmp else "compiler-broken",
        )
    if ctypes.CDLL(str(library)).onegraph_probe() != 42:
        raise CompileError("A freshly built library gave a wrong answer.", hint=_NO_COMPILATION, code="compiler-broken")
