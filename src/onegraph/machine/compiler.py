"""The C++ compiler that inductor calls, and whether it builds what inductor needs: found by building three lines."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from onegraph.errors import CompileError

# A stream needs the C++ library: a C compiler (CXX=gcc) builds this and doesn't link it.
_PROBE = """#include <Python.h>
#include <omp.h>
#include <sstream>
extern "C" int onegraph_probe() { std::ostringstream text; text << omp_get_max_threads(); return std::stoi(text.str()); }
"""
_NO_COMPILATION = "or train without compilation: --dynamo_backend=no"
_SECONDS = 120
# On Linux and macOS inductor tries $CXX, else this one name, and nothing after it.
_DEFAULT = "clang++" if sys.platform == "darwin" else "g++"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A compiler as it is called.

    Args:
        program: Its name or path.
        flags: What stands behind the name in ``CXX``, as in ``CXX="g++ -O2"``.
        named_by_cxx: True when ``CXX`` names it.
    """

    program: str
    flags: tuple[str, ...] = ()
    named_by_cxx: bool = False

    @property
    def command(self) -> list[str]:
        """The program and its flags."""
        return [self.program, *self.flags]

    def version(self) -> str:
        """The first line that ``--version`` prints; "" when it prints none."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([*self.command, "--version"], capture_output=True, text=True, errors="replace", timeout=20, check=False)
            return next(iter(done.stdout.splitlines()), "").strip()
        return ""


def find_compiler() -> Compiler:
    """The compiler that inductor calls: what ``CXX`` says, else g++ (macOS: clang++). ``CXX`` may be a command with flags.

    Raises:
        CompileError: ``compiler-missing``.
    """
    named = os.environ.get("CXX")
    if named is None:
        if shutil.which(_DEFAULT):
            return Compiler(program=_DEFAULT)
        raise _missing(f"{_DEFAULT} is not on the PATH.")
    words = _words(named)
    if not words:
        raise _missing(f"CXX is set to {named!r}, and inductor takes it at its word.", unset=True)
    if not shutil.which(words[0]):
        raise _missing(f"{named!r}, named by CXX, isn't there.", unset=True)
    return Compiler(program=words[0], flags=tuple(words[1:]), named_by_cxx=True)


def _words(named: str) -> list[str]:
    """The command that ``CXX`` holds: one program when the whole text is one, spaces or not."""
    if named.strip() and shutil.which(named):
        return [named]
    try:
        return shlex.split(named)
    except ValueError:  # a quote without its other half
        return [named]


def _missing(what: str, *, unset: bool = False) -> CompileError:
    others = [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
    if others:
        hint = ("unset CXX, or " if unset and _DEFAULT in others else "") + f"export CXX={others[0]}"
    else:
        hint = (
            f"{'unset CXX, and ' if unset else ''}install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), "
            "xcode-select --install (macOS), conda install -c conda-forge cxx-compiler"
        )
    return CompileError(
        f"No C++ compiler: {what}",
        why=f"The backend inductor ({_torch()}) writes C++ and builds it before the first step.",
        hint=f"{hint}, {_NO_COMPILATION}",
        code="compiler-missing",
    )


def refused_flags(compiler: Compiler) -> CompileError:
    """The error for a ``CXX`` with flags: inductor runs all of it as the name of one program."""
    named = shlex.join(compiler.command)
    return CompileError(
        f"CXX holds a command with flags: the compiler {compiler.program}, and {shlex.join(compiler.flags)}.",
        why=f"The compiler is there, but the backend inductor ({_torch()}) takes the whole text as one program's name and finds none.",
        hint=f"export CXX={shlex.quote(compiler.program)} (inductor sets -O and -march itself), or a script that is run as one program: "
        f"""printf '#!/bin/sh\\nexec {named} "$@"\\n' > g++-wrapped; chmod +x g++-wrapped; export CXX=$PWD/g++-wrapped""",
        code="compiler-with-flags",
    )


def python_header() -> Path | None:
    """Where ``Python.h`` of this Python is, or None."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header if header.is_file() else None


def build(compiler: Compiler, folder: Path) -> int:
    """Builds and loads a library with Python.h and OpenMP the way inductor would; returns OpenMP's number of threads.

    Args:
        compiler: From ``find_compiler``.
        folder: Where it is built and loaded: code from inductor's cache folder must be loadable there.

    Raises:
        CompileError: ``python-headers-missing``, ``openmp-missing``, ``compiler-broken``, ``compiler-for-c``.
        OSError: The folder can't be written to, or code in it can't be loaded.
    """
    include = sysconfig.get_path("include")
    if python_header() is None:
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
    openmp = ["-Xclang", "-fopenmp", "-lomp"] if sys.platform == "darwin" else ["-fopenmp"]
    command = [*compiler.command, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library), *openmp]
    said = _said(command)
    if said is not None:
        missing_openmp = "omp.h" in said or "fopenmp" in said or "lomp" in said
        raise CompileError(
            f"The C++ compiler {shlex.join(compiler.command)} can't build what inductor needs:\n{said[-1500:]}",
            why="OpenMP isn't there." if missing_openmp else "A three-line program with Python.h and OpenMP failed.",
            hint=f"apt-get install g++ libgomp1 (Debian, Ubuntu), brew install libomp (macOS), {_NO_COMPILATION}"
            if missing_openmp
            else f"try the command by hand: {shlex.join(command)}, {_NO_COMPILATION}",
            code="openmp-missing" if missing_openmp else "compiler-broken",
        )
    try:
        threads = int(ctypes.CDLL(str(library)).onegraph_probe())
    except OSError as error:
        if "undefined symbol" in str(error) or "symbol not found" in str(error):
            raise _for_c(compiler, str(error)) from error
        raise
    if threads < 1:
        raise CompileError("A freshly built library gave a wrong answer.", hint=_NO_COMPILATION, code="compiler-broken")
    return threads


def _for_c(compiler: Compiler, said: str) -> CompileError:
    named = shlex.join(compiler.command)
    return CompileError(
        f"{named} builds C++ but leaves out the C++ library: {said.rpartition(': ')[2].strip()} is undefined.",
        why=f"{named} links programs as C. PEFT's BOFT leaves CXX=gcc behind on machines where its CUDA extension can't be built."
        if compiler.named_by_cxx
        else f"{named} links programs as C.",
        hint=f"""{"unset CXX (in Python: os.environ.pop('CXX', None)), or " if compiler.named_by_cxx else ""}export CXX={_DEFAULT}, """
        f"{_NO_COMPILATION}",
        code="compiler-for-c",
    )


def _said(command: list[str]) -> str | None:
    """None when the command succeeds, else why not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it ran for over {_SECONDS} seconds"
    except OSError as error:
        return f"it can't be started: {error}"
    return None if done.returncode == 0 else done.stderr.strip() or f"it ended with status {done.returncode}"


def _torch() -> str:
    try:
        return f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return "torch"
