"""Which processor a C++ compiler builds for: the instructions that its code may use, for this machine and in a library built elsewhere.

Inductor builds with ``-march=native`` and doesn't write down what that was. GCC does, in the debugging entries of each library.
"""

from __future__ import annotations

import mmap
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from onegraph.machine.compiler import Compiler

_PRODUCER = re.compile(rb"GNU C\+\+\d* (\d[\w.]*) ([^\0]*)")
_NO_INSTRUCTIONS = {"32", "64", "x32"}
_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Target:
    """What code was built for.

    Args:
        compiler: "GNU C++ 12.2.0".
        architecture: As ``-march`` resolved it: "znver3"; "" when none was given.
        instructions: Instruction sets that the code may use, sorted: "avx512bf16", "sse4.2".
    """

    compiler: str
    architecture: str
    instructions: tuple[str, ...]


def native_target(compiler: Compiler) -> Target | None:
    """What ``-march=native`` is here; None when the compiler doesn't say (clang) or can't build."""
    with tempfile.TemporaryDirectory(prefix="onegraph-target-") as folder:
        source, built = Path(folder) / "empty.cpp", Path(folder) / "empty.o"
        source.write_text("int onegraph_empty;\n")
        command = [*compiler.command, "-march=native", "-g1", "-c", str(source), "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return target_of(built) if done.returncode == 0 else None


def target_of(library: Path) -> Target | None:
    """What a built file is for; None when its compiler didn't write that down, or the file can't be read."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _PRODUCER.search(content)
            if found is None:
                return None
            version, options = found.group(1).decode(), found.group(2).decode(errors="replace").split()
    except (OSError, ValueError):  # gone, not ours to read; empty
        return None
    instructions = {
        option.removeprefix("-m")
        for option in options
        if option.startswith("-m") and "=" not in option and not option.startswith("-mno-") and option[2:] not in _NO_INSTRUCTIONS
    }
    architecture = next((option.partition("=")[2] for option in options if option.startswith("-march=")), "")
    return Target(compiler=f"GNU C++ {version}", architecture=architecture, instructions=tuple(sorted(instructions)))
