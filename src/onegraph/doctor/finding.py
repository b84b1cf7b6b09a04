"""What is wrong, how bad it is, and the command that mends it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BREAKS = "breaks"
WARNING = "warning"
NOTE = "note"
SEVERITIES = (BREAKS, WARNING, NOTE)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know or to do.

    Args:
        code: Its name; the name or a code of a catalogue entry where there is one.
        severity: "breaks": a run ends with an error or a wrong result. "warning": slow, or it breaks as soon as something is asked for
            that isn't asked for now. "note": good to know.
        what: What was found, with the value and the place.
        do: Commands, each one complete; the first is the one to try first.
    """

    code: str
    severity: str
    what: str
    do: tuple[str, ...] = ()


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Most important first; those of one severity in the order in which a run meets them; nothing twice."""
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda finding: SEVERITIES.index(finding.severity))


_INSTALL = {
    # command -> what it calls a C++ compiler with OpenMP, and the headers of Python
    "apt-get": ("apt-get install -y g++", "apt-get install -y python{version}-dev"),
    "dnf": ("dnf install -y gcc-c++", "dnf install -y python{version}-devel"),
    "yum": ("yum install -y gcc-c++", "yum install -y python{version}-devel"),
    "zypper": ("zypper install -y gcc-c++", "zypper install -y python{nodot}-devel"),
    "pacman": ("pacman -S --noconfirm gcc", "pacman -S --noconfirm python"),
    "apk": ("apk add g++ libgomp", "apk add python3-dev"),
    "brew": ("xcode-select --install && brew install libomp", "brew install python@{version}"),
    "conda": ("conda install -y -c conda-forge cxx-compiler", "conda install -y -c conda-forge python={version}"),
}
# Where these programs are, whatever PATH says: a PATH without a compiler may be one without them too.
_PLACES = os.pathsep.join(("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin"))


def elsewhere(*programs: str) -> tuple[str, str] | None:
    """One of these programs in a usual place that ``PATH`` leaves out: its name and folder."""
    for name in programs:
        if shutil.which(name) is None and (found := shutil.which(name, path=_PLACES)) is not None:
            return name, str(Path(found).parent)
    return None


def install_compiler() -> str:
    """The command that installs a C++ compiler here."""
    return _installing(0)


def install_headers() -> str:
    """The command that installs ``Python.h`` of this Python here."""
    return _installing(1)


def _installing(which: int) -> str:
    manager = next((name for name in _INSTALL if shutil.which(name) or shutil.which(name, path=_PLACES)), "conda")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = _INSTALL[manager][which].format(version=version, nodot=version.replace(".", ""))
    as_root = manager not in {"brew", "conda"} and getattr(os, "geteuid", lambda: 0)() != 0
    return f"sudo {command}" if as_root else command


def pip_install(*requirements: str) -> str:
    """The pip command of this Python."""
    return " ".join((sys.executable or "python", "-m pip install", *(_quoted(requirement) for requirement in requirements)))


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if set(requirement) & set("<>=! [];") else requirement


def listed(words: Sequence[str]) -> str:
    """Words as one says them: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
