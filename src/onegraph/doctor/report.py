"""The examination, in the order in which a run meets things, and the report on it."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onegraph.doctor import backends_tried, cache_folder, machine, packages, settings_report, switches
from onegraph.doctor.child import ask
from onegraph.doctor.finding import BREAKS, NOTE, Finding, ordered, pip_install
from onegraph.machine.torch_version import torch_version

_ASKING_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was found.

    Args:
        python: version, executable, platform, free_threaded.
        packages: onegraph and what it stands on.
        torch: What torch said of itself; {"error": ..} when it can't be imported.
        compiler: The C++ compiler, tried out.
        processor: The processor and its threads.
        gpu: The GPUs.
        cache: Inductor's cache folder.
        config_file: The file of ``accelerate config``.
        ways: What a run gets, for each way to start one.
        switches: Variables that change what torch.compile does.
        backends: Every backend name.
        pairs: Known faults of the versions that are installed.
        findings: Most important first; those with commands are what to do.
    """

    python: dict[str, Any]
    packages: tuple[packages.Package, ...]
    torch: dict[str, Any]
    compiler: machine.CompilerReport
    processor: machine.Processor
    gpu: machine.Gpu
    cache: cache_folder.CacheFolder
    config_file: settings_report.ConfigFile
    ways: tuple[settings_report.Way, ...]
    switches: dict[str, dict[str, str]]
    backends: tuple[backends_tried.BackendReport, ...]
    pairs: tuple[Finding, ...]
    findings: tuple[Finding, ...]

    @property
    def breaks(self) -> bool:
        """True when something here will break a run."""
        return any(finding.severity == BREAKS for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "breaks": self.breaks}


def examine(
    *,
    quick: bool = False,
    config_file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    seconds: float = backends_tried.SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Looks at everything that a compiled run needs. Nothing is changed; what doesn't work is told, never raised.

    Args:
        quick: Leaves out the trial of the backends.
        config_file: The file that ``accelerate launch --config_file`` would get; None: its default.
        flags: Flags of ``onegraph.train_network``: ``backend``, ``mode``, ``dynamic`` (bool), ``fullgraph`` (bool), ``regions``.
        seconds: The longest that one backend may take.
        say: Gets a line when something takes long.
    """
    flags = dict(flags or {})
    here = packages.packages()
    installed = packages.versions()
    cache = cache_folder.cache_folder(torch_version())
    build_folder = Path(cache.path) if cache.exists and cache.writable else None
    say("building a library ...")
    compiler = machine.compiler_report(build_folder)
    say("asking torch and accelerate ...")
    answer = _asked(installed, config_file, flags)
    torch = answer.get("torch", {})
    launch = answer.get("launch", {})
    on_cpu = bool(launch.get("use_cpu")) or not torch.get("cuda_available")
    processor = machine.processor(torch, launch)
    gpu = machine.gpu(torch)
    file, fields = settings_report.read_file(config_file)
    ways = settings_report.ways(answer, fields, flags, config_file)
    file = settings_report.with_effects(file, fields, next((way for way in ways if way.settings or way.problem), None))
    effective = [way.settings["backend"] for way in ways if "backend" in way.settings]
    used = {row["value"] for row in effective}
    chosen = any(not row["origin"].startswith("default") for row in effective)
    needed = "inductor" in used or not chosen
    backends = _backends(answer, torch, quick=quick, device="cpu" if on_cpu else "cuda", seconds=seconds, folder=build_folder, say=say)
    pairs = tuple(packages.pair_findings(installed))
    refused = bool(answer.get("flags_refused", {}).get("refused", True))
    switched = list(switches.switch_findings())
    off = any(one.code == "compile-switched-off" for one in switched)  # then it is no fault of a backend that it compiles nothing
    found = [
        *packages.package_findings(here),
        *_torch_findings(torch, installed),
        *settings_report.settings_findings(file, fields, ways, "error" not in torch),
        *switched,
        *machine.compiler_findings(compiler, flags_refused=refused, needed=needed),
        *cache_folder.cache_findings(cache),
        *machine.gpu_findings(gpu, installed, on_cpu=on_cpu),
        *(pair for pair in pairs if pair.severity != NOTE),
        *([] if off else backends_tried.backend_findings(backends, used, explained=bool(compiler.code))),
        *machine.thread_findings(processor, on_cpu=on_cpu),
        *switches.nothing_compiled(ways),
    ]
    return Report(
        python={
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "free_threaded": sysconfig.get_config_var("Py_GIL_DISABLED") == 1,
        },
        packages=tuple(here),
        torch=torch,
        compiler=compiler,
        processor=processor,
        gpu=gpu,
        cache=cache,
        config_file=file,
        ways=tuple(ways),
        switches=switches.switches(),
        backends=tuple(backends),
        pairs=pairs,
        # what isn't installed can't be imported either: told once
        findings=tuple(ordered(one for one in found if one.code != "accelerate-cannot-be-imported" or "accelerate" in installed)),
    )


def _asked(installed: Mapping[str, str], config_file: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    if "torch" not in installed:
        return {"torch": {"error": "torch isn't installed", "code": "torch-missing"}}
    return ask({"config_file": config_file, "flags": flags, "asker": os.getpid()}, seconds=_ASKING_SECONDS)


def _torch_findings(torch: Mapping[str, Any], installed: Mapping[str, str]) -> list[Finding]:
    """A torch that is installed and can't be imported."""
    if "error" not in torch or "torch" not in installed:
        return []
    return [
        Finding(
            code=str(torch.get("code") or "torch-cannot-be-imported"),
            severity=BREAKS,
            what=f"torch {installed['torch']} is installed, and can't be imported: {torch['error']}",
            do=(f"{sys.executable} -c 'import torch'", pip_install("--force-reinstall", "torch")),
        )
    ]


def _backends(
    answer: Mapping[str, Any],
    torch: Mapping[str, Any],
    *,
    quick: bool,
    device: str,
    seconds: float,
    folder: Path | None,
    say: Callable[[str], None],
) -> list[backends_tried.BackendReport]:
    table = answer.get("backends", {}).get("table", {})
    if "error" in torch or not table:
        return []
    if quick:
        return backends_tried.not_tried(table, "left out by --quick")
    say(f"trying {len(table)} backends ...")
    return backends_tried.tried(table, device=device, seconds=seconds, folder=folder, say=lambda name: say(f"tried {name}"))
