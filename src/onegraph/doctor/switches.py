"""Variables that change what torch.compile does, and a run that compiles nothing: what goes wrong without an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from onegraph.doctor.finding import BREAKS, NOTE, WARNING, Finding, listed
from onegraph.doctor.settings_report import Way


@dataclass(frozen=True, kw_only=True)
class _Switch:
    """A variable that changes what torch.compile does without a word."""

    severity: str
    code: str
    says: str
    any_value: bool = False

    def acts(self, value: str) -> bool:
        return bool(value) if self.any_value else value == "1"


_SWITCHES = {
    "TORCHDYNAMO_DISABLE": _Switch(severity=BREAKS, code="compile-switched-off", says="nothing is compiled, without an error"),
    "TORCH_COMPILE_DISABLE": _Switch(
        severity=BREAKS, code="compile-switched-off", says="torch.compile does nothing, or raises where a graph break is an error"
    ),
    "TORCHDYNAMO_SUPPRESS_ERRORS": _Switch(
        severity=WARNING,
        code="suppress-errors-eager",
        says="a compilation that fails runs eager without an error (torch takes any value as yes, 0 too)",
        any_value=True,
    ),
    "TORCHINDUCTOR_FREEZING": _Switch(
        severity=WARNING,
        code="freezing-stale-weights",
        says="without gradients weights become constants: an adapter loaded, switched or merged later changes nothing",
    ),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": _Switch(severity=WARNING, code="caches-switched-off", says="every start compiles all again"),
}


def switches() -> dict[str, dict[str, str]]:
    """The variables that change what torch.compile does, where they are set: name -> value and what it does."""
    return {
        name: {"value": os.environ[name], "effect": switch.says if switch.acts(os.environ[name]) else ""}
        for name, switch in _SWITCHES.items()
        if name in os.environ
    }


def switch_findings() -> Iterator[Finding]:
    """The variables that are on."""
    for name, told in switches().items():
        if told["effect"]:
            switch = _SWITCHES[name]
            yield Finding(code=switch.code, severity=switch.severity, what=f"{name}={told['value']}: {switch.says}", do=(f"unset {name}",))


def nothing_compiled(found: list[Way]) -> Iterator[Finding]:
    """No way to start a run compiles anything."""
    backends = [way.settings["backend"] for way in found if "backend" in way.settings]
    if backends and all(row["value"] == "no" for row in backends):
        origins = sorted({row["origin"] for row in backends if not row["origin"].startswith("default")})
        yield Finding(
            code="nothing-compiled",
            severity=NOTE if origins else WARNING,
            what=f"nothing would be compiled: the backend is no ({listed(origins) or 'nobody names one'})",
            do=("accelerate launch -m onegraph.train_network --dynamo_backend=inductor",),
        )
