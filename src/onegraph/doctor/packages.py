"""Which packages are here, read from their metadata and not by importing them, and which of them don't go together."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onegraph.doctor.finding import BREAKS, NOTE, WARNING, Finding, pip_install

NAMES = ("torch", "accelerate", "transformers", "diffusers", "peft", "bitsandbytes", "triton")
# Without these `onegraph.train_network` doesn't start; ranges come from onegraph's own metadata, where it is installed.
_NEEDED = ("torch", "accelerate", "transformers", "diffusers")
# Other names of the same package, and packages that only a version pair is about.
_DISTRIBUTIONS = {"triton": ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm")}
_PAIRED = ("intel_extension_for_pytorch", "torch_xla")

Release = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package: its version, None when it isn't installed, and the range that onegraph asks for."""

    name: str
    version: str | None
    wanted: str = ""


@dataclass(frozen=True, kw_only=True)
class KnownPair:
    """Versions that don't go together, or one that has a known fault.

    Args:
        name: The name of the catalogue entry where there is one.
        versions: Package -> (from, below): releases the fault is in; None: no bound.
        severity: See ``Finding``.
        says: What goes wrong.
        source: Where the fact comes from.
        seen: The day on which it was last looked at.
        do: What mends it; nothing where onegraph works around it.
        same: Fault present unless these two packages have the same first numbers.
    """

    name: str
    versions: Mapping[str, tuple[Release | None, Release | None]]
    severity: str
    says: str
    source: str
    seen: str
    do: tuple[str, ...] = ()
    same: tuple[str, str, int] | None = None

    def holds(self, installed: Mapping[str, str]) -> bool:
        """Whether the installed versions are these."""
        if not all(name in installed for name in self.versions):
            return False
        if self.same is not None:
            one, other, numbers = self.same
            return release(installed[one])[:numbers] != release(installed[other])[:numbers]
        return all(
            (lowest is None or release(installed[name]) >= lowest) and (below is None or release(installed[name]) < below)
            for name, (lowest, below) in self.versions.items()
        )


_ANY: tuple[Release | None, Release | None] = (None, None)

PAIRS = (
    KnownPair(
        name="scatter-order-zero-gradients",
        versions={"torch": (None, (2, 14))},
        severity=NOTE,
        says="inductor before torch 2.14 may read a scattered buffer before the scatter (CPU): right loss, gradients of exactly zero. "
        "onegraph switches that off in its own graphs; a torch.compile call of yours needs options={'reorder_for_peak_memory': False}",
        source="pytorch #185509",
        seen="2026-11-30",
    ),
    KnownPair(
        name="outer-loop-one-row-buffer",
        versions={"torch": _ANY},
        severity=NOTE,
        says="inductor's CPU code may use a buffer of one row for 16 rows behind an input that is read transposed: wrong outputs or "
        "gradients. onegraph works around it in its own graphs; compare a torch.compile call of yours with eager",
        source="pytorch #185702",
        seen="2026-11-30",
    ),
    KnownPair(
        name="transformers-wants-newer-peft",
        versions={"transformers": ((5, 24), None), "peft": (None, (0, 22))},
        severity=WARNING,
        says="transformers 5.24 asks for peft 0.22 when it loads an adapter, and there was no peft 0.22 on the day of this line",
        do=(pip_install("transformers<5.24"),),
        source="transformers' table of dependencies",
        seen="2026-11-30",
    ),
    KnownPair(
        name="bnb-params4bit-breaks",
        versions={"bitsandbytes": (None, (0, 46))},
        severity=WARNING,
        says="4-bit and 8-bit layers of bitsandbytes before 0.46 break the graph",
        do=(pip_install("bitsandbytes>=0.46"),),
        source="bitsandbytes #1184, #1578, #1581, #1616",
        seen="2026-11-30",
    ),
    KnownPair(
        name="python-too-new",
        versions={"python": ((3, 15), None), "torch": (None, (2, 14))},
        severity=BREAKS,
        says="torch.compile of torch 2.13 and before refuses Python 3.15",
        do=("uv venv --python 3.13",),
        source="torch 2.13.0, torch/_dynamo/eval_frame.py",
        seen="2026-11-30",
    ),
    KnownPair(
        name="ipex-pairs-with-its-torch",
        versions={"intel_extension_for_pytorch": _ANY, "torch": _ANY},
        severity=WARNING,
        says="intel_extension_for_pytorch only works with the torch of the same major.minor number, so the backend ipex can't run",
        do=("onegraph.train_network --dynamo_backend=inductor", "pip uninstall -y intel_extension_for_pytorch"),
        source="onegraph/compiling/backends.py",
        seen="2026-11-30",
        same=("intel_extension_for_pytorch", "torch", 2),
    ),
    KnownPair(
        name="xla-pairs-with-its-torch",
        versions={"torch_xla": _ANY, "torch": _ANY},
        severity=WARNING,
        says="torch_xla only works with the torch of the same number, so the backend openxla can't run",
        do=("onegraph.train_network --dynamo_backend=inductor",),
        source="onegraph/compiling/backends.py",
        seen="2026-11-30",
        same=("torch_xla", "torch", 2),
    ),
)


def release(version: str) -> Release:
    """The numbers that a version starts with: "2.13.0+cpu" -> (2, 13, 0)."""
    found = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def packages() -> list[Package]:
    """Onegraph itself and ``NAMES``, installed or not."""
    wanted = _wanted()
    import onegraph

    own = Package(name="onegraph", version=onegraph.__version__)
    return [own, *(Package(name=name, version=_version(name), wanted=wanted.get(name, "")) for name in NAMES)]


def versions() -> dict[str, str]:
    """What is installed of ``NAMES`` and of the packages that pairs are about, and Python."""
    found = {name: _version(name) for name in (*NAMES, *_PAIRED)}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version is not None}}


def _version(name: str) -> str | None:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        # half an installation has a folder of metadata without the file
        return version if isinstance(version, str) else "unknown"
    return None


def _wanted() -> dict[str, str]:
    """The ranges of onegraph's own metadata: name -> ">=2.11"."""
    try:
        lines = importlib.metadata.requires("onegraph") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    split = (re.match(r"([A-Za-z0-9_.-]+)\s*([^;]*)(;.*)?", line) for line in lines)
    return {found[1].lower(): found[2].strip() for found in split if found and (not found[3] or "extra" not in found[3] or found[2])}


def package_findings(here: list[Package]) -> Iterator[Finding]:
    """What is missing, and what is older than onegraph needs."""
    for package in here:
        if package.version is None and package.name in _NEEDED:
            yield Finding(
                code=f"{package.name}-missing",
                severity=BREAKS,
                what=f"{package.name} isn't installed in {platform.python_implementation()} {platform.python_version()}",
                do=(pip_install(f"{package.name}{package.wanted}"),),
            )
        elif package.version is not None and _older(package.version, package.wanted):
            yield Finding(
                code="version-too-old",
                severity=BREAKS if package.name in _NEEDED else WARNING,
                what=f"{package.name} {package.version} is older than onegraph needs: {package.wanted}",
                do=(pip_install(f"{package.name}{package.wanted}"),),
            )


def _older(version: str, wanted: str) -> bool:
    lowest = re.search(r">=\s*([\d.]+)", wanted)
    return lowest is not None and release(version) < release(lowest[1])


def pair_findings(installed: Mapping[str, str]) -> Iterator[Finding]:
    """The known pairs that are installed here, and those that the packages themselves don't allow."""
    for pair in PAIRS:
        if pair.holds(installed):
            names = [f"{name} {installed[name]}" for name in pair.versions]
            yield Finding(
                code=pair.name, severity=pair.severity, what=f"{' with '.join(names)}: {pair.says} ({pair.source}; {pair.seen})", do=pair.do
            )
    yield from _declared(installed)
    yield from _lowest_peft(installed)


def _declared(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Requirements that these packages declare on one another and that aren't met."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return
    for name in installed.keys() - {"python"}:
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in lines:
            try:
                wanted = Requirement(line)
            except InvalidRequirement:
                continue
            version = installed.get(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if version is None or not applies or wanted.specifier.contains(version, prereleases=True):
                continue
            yield Finding(
                code="requirement-not-met",
                severity=WARNING,
                what=f"{name} {installed[name]} asks for {wanted.name}{wanted.specifier}, and {wanted.name} {version} is installed",
                do=(pip_install(f"{wanted.name}{wanted.specifier}"),),
            )


_PEFT_BOUNDS = {"transformers": "transformers/integrations/peft.py", "diffusers": "diffusers/utils/constants.py"}


def _lowest_peft(installed: Mapping[str, str]) -> Iterator[Finding]:
    """The oldest peft that transformers and diffusers accept stands in their source."""
    for name, path in _PEFT_BOUNDS.items():
        if name not in installed or "peft" not in installed:
            continue
        try:
            text = str(importlib.metadata.distribution(name).read_text(f"../{path}"))
        except (OSError, UnicodeDecodeError, importlib.metadata.PackageNotFoundError):
            continue
        bound = re.search(r'^MIN_PEFT_VERSION = "([\d.]+)"', text, re.MULTILINE)
        if bound is not None and release(installed["peft"]) < release(bound[1]):
            yield Finding(
                code="peft-too-old",
                severity=WARNING,
                what=f"{name} {installed[name]} refuses peft {installed['peft']} when it loads an adapter: it wants {bound[1]} or later",
                do=(pip_install(f"peft>={bound[1]}"),),
            )
