"""The kind of a machine: all that decides whether entries of the folder are found, and whether their code runs."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.errors import CompileError
from onegraph.machine.compiler import find_compiler
from onegraph.machine.target import native_target

_NEVER_FOUND = "its graphs would never be found"
_REBUILT = "its C++ kernels would be built again"
_MAY_CRASH = "its C++ kernels may crash"


@dataclass(frozen=True, kw_only=True)
class MachineKind:
    """What entries depend on.

    Args:
        key: What inductor's keys hold: versions of torch and Python, folders, GPU (``onegraph.compiling.cache_key``).
        system: "Linux x86_64".
        compiler: "GNU C++ 12.2.0", or what the compiler says of itself; "" without one.
        architecture: What ``-march=native`` is here: "znver3"; else the processor's name.
        instructions: What code built here may use; empty where the compiler doesn't say.
    """

    key: Mapping[str, str]
    system: str
    compiler: str
    architecture: str
    instructions: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**dataclasses.asdict(self), "key": dict(self.key), "instructions": list(self.instructions)}

    @classmethod
    def of_record(cls, record: Any) -> MachineKind:
        """From a record.

        Raises:
            ValueError: It is none.
        """
        if not isinstance(record, dict) or set(record) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError("not a machine")
        texts = [record["system"], record["compiler"], record["architecture"]]
        if not isinstance(record["key"], dict) or not isinstance(record["instructions"], list):
            raise ValueError("not a machine")
        if not all(isinstance(text, str) for text in [*texts, *record["key"], *record["key"].values(), *record["instructions"]]):
            raise ValueError("not a machine")
        return cls(**{**record, "instructions": tuple(record["instructions"])})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two machines don't have in common.

    Args:
        name: What it is.
        there: Its value where the entries were made.
        here: Its value here.
        consequence: What comes of it.
    """

    name: str
    there: str
    here: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.name}: {self.there or 'none'} there, {self.here or 'none'} here; {self.consequence}"


def machine_kind() -> MachineKind:
    """The machine that this runs on. torch is imported, and the compiler is run once."""
    from onegraph.compiling.cache_key import cache_key

    try:
        compiler = find_compiler()
    except CompileError:
        compiler = None
    target = native_target(compiler) if compiler is not None else None
    if target is not None:
        named, architecture, instructions = target.compiler, target.architecture, target.instructions
    else:
        named, architecture, instructions = compiler.version() if compiler is not None else "", _processor(), ()
    return MachineKind(
        key=cache_key(),
        system=f"{platform.system()} {platform.machine()}",
        compiler=named,
        architecture=architecture,
        instructions=instructions,
    )


def differences(there: MachineKind, here: MachineKind) -> list[Difference]:
    """What keeps entries made there from being of use here; empty for machines of one kind.

    A processor may have more instructions than the one that the code was built for, not fewer. Compilers must be of one version: code
    built by a newer one may want a newer C++ library than the one here.
    """
    found = []

    def compare(name: str, one: str, other: str, consequence: str) -> None:
        if one != other:
            found.append(Difference(name=name, there=one, here=other, consequence=consequence))

    compare("system", there.system, here.system, _MAY_CRASH)
    for name in sorted({*there.key, *here.key}):
        consequence = _REBUILT if name in {"torch folder", "python headers", "python"} else _NEVER_FOUND
        compare(name, there.key.get(name, ""), here.key.get(name, ""), consequence)
    compare("compiler", there.compiler, here.compiler, _MAY_CRASH)
    if there.instructions and here.instructions:
        missing = sorted(set(there.instructions) - set(here.instructions))
        if missing:
            words = f"{there.architecture} with {', '.join(missing)}"
            found.append(Difference(name="processor", there=words, here=f"{here.architecture} without", consequence=_MAY_CRASH))
    else:
        compare("processor", there.architecture, here.architecture, _MAY_CRASH)
    return found


def _processor() -> str:
    """The processor's name, where the compiler doesn't say what it builds for."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - no Path exists where /proc doesn't
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor()
