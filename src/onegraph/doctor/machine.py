"""The machine: Python, the C++ compiler, OpenMP and its threads, the processor, the GPU."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onegraph.doctor.finding import BREAKS, NOTE, WARNING, Finding, elsewhere, install_compiler, install_headers, pip_install
from onegraph.errors import CompileError
from onegraph.machine.compiler import build, find_compiler, python_header


@dataclass(frozen=True, kw_only=True)
class CompilerReport:
    """The C++ compiler, tried out.

    Args:
        program: As it is called; "" when there is none.
        flags: What stands behind it in ``CXX``.
        origin: "environment CXX" or "PATH".
        path: Where it is.
        version: Its own words.
        builds: Whether a library with Python.h and OpenMP was built and loaded.
        python_header: Where Python.h is; "" when it isn't.
        openmp_threads: What OpenMP says in that library; None when it wasn't built.
        problem: What went wrong, and ``code`` its name.
    """

    program: str = ""
    flags: tuple[str, ...] = ()
    origin: str = ""
    path: str = ""
    version: str = ""
    builds: bool = False
    python_header: str = ""
    openmp_threads: int | None = None
    problem: str = ""
    code: str = ""


def compiler_report(folder: Path | None = None) -> CompilerReport:
    """Finds the compiler and builds with it.

    Args:
        folder: A folder on the disk that inductor loads its code from; the temporary folder when None.
    """
    header = str(python_header() or "")
    try:
        compiler = find_compiler()
    except CompileError as error:
        return CompilerReport(python_header=header, problem=error.what, code=error.code)
    facts: dict[str, Any] = {
        "program": compiler.program,
        "flags": compiler.flags,
        "origin": "environment CXX" if compiler.named_by_cxx else "PATH",
        "path": shutil.which(compiler.program) or "",
        "version": compiler.version(),
        "python_header": header,
    }
    try:
        with tempfile.TemporaryDirectory(prefix="onegraph-doctor-", dir=folder) as built:
            threads = build(compiler, Path(built))
    except CompileError as error:
        return CompilerReport(**facts, problem=error.what, code=error.code)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        return CompilerReport(**facts, problem=f"code can't be built in {where} and loaded from there: {error}", code="cache-folder")
    return CompilerReport(**facts, builds=True, openmp_threads=threads)


def compiler_findings(report: CompilerReport, *, flags_refused: bool, needed: bool) -> Iterator[Finding]:
    """What to do about the compiler.

    Args:
        report: From ``compiler_report``.
        flags_refused: Whether inductor can't call a ``CXX`` with flags.
        needed: Whether something here is compiled with inductor.
    """
    severity = BREAKS if needed else WARNING
    plain = f"export CXX={report.program}"
    if report.code == "compiler-missing":
        others = [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
        do = [f"export CXX={others[0]}"] if others else [install_compiler()]
        if not others and (hidden := elsewhere("g++", "clang++", "c++")) is not None:
            do = [f'export PATH="$PATH:{hidden[1]}"', f"export CXX={hidden[1]}/{hidden[0]}"]
        if "CXX" in os.environ and (others == [] or "g++" in others):
            do.insert(0, "unset CXX")
        yield Finding(code=report.code, severity=severity, what=report.problem, do=tuple(do))
    elif report.code == "python-headers-missing":
        yield Finding(code=report.code, severity=severity, what=report.problem, do=(install_headers(),))
    elif report.code == "openmp-missing":
        yield Finding(code=report.code, severity=severity, what=report.problem, do=(install_compiler(),))
    elif report.code == "cache-folder":
        yield Finding(code=report.code, severity=severity, what=report.problem, do=("export TORCHINDUCTOR_CACHE_DIR=~/.cache/inductor",))
    elif report.code:
        do = ["unset CXX"] if report.origin == "environment CXX" else [install_compiler()]
        yield Finding(code=report.code, severity=severity, what=report.problem, do=(*([plain] if report.flags else []), *do))
    elif report.flags and flags_refused:
        yield Finding(
            code="compiler-with-flags",
            severity=severity,
            what=f"CXX={os.environ.get('CXX')!r} is a command with flags: it builds here, but inductor takes the whole text as one "
            "program's name and finds none",
            do=(plain, "unset CXX"),
        )


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processor and the threads on it.

    Args:
        model: Its name.
        architecture: As Python names it.
        features: Vector instructions: name -> there or not.
        torch_uses: What torch chose of them; "" when torch can't be asked.
        cores: Of the machine.
        usable_cores: Those that this process may run on.
        quota_cores: How many the container may use at once; None without a limit.
        omp_num_threads: The variable; "" when it isn't set.
        launch_threads: OMP_NUM_THREADS that accelerate launch would set; None when it can't be asked.
        memory_bytes: Of the machine.
    """

    model: str = ""
    architecture: str = ""
    features: dict[str, bool] = field(default_factory=dict)
    torch_uses: str = ""
    cores: int = 1
    usable_cores: int = 1
    quota_cores: float | None = None
    omp_num_threads: str = ""
    launch_threads: int | None = None
    memory_bytes: int | None = None


_FEATURES = {
    "x86_64": {"avx2": "avx2", "avx512": "avx512f", "avx512_bf16": "avx512_bf16", "amx_bf16": "amx_bf16"},
    "aarch64": {"neon": "asimd", "sve": "sve", "bf16": "bf16"},
}


def processor(torch: dict[str, Any], launch: dict[str, Any]) -> Processor:
    """Reads the processor; ``torch`` and ``launch`` are parts of what ``asked`` answered."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    if not text and sys.platform == "darwin":
        text = _output("sysctl", "machdep.cpu").replace("machdep.cpu.brand_string", "model name").lower()
    flags = {
        word for line in re.findall(r"^(?:flags|Features|machdep.cpu.\w*features)\s*: (.*)", text, re.MULTILINE) for word in line.split()
    }
    model = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    machine = platform.machine()
    names = _FEATURES.get({"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine), {})
    memory = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = str(launch.get("threads", ""))
    return Processor(
        model=model[1].strip() if model else platform.processor(),
        architecture=machine,
        features={name: flag in flags for name, flag in names.items()},
        torch_uses=str(torch.get("processor", "")),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota_cores=_quota(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        launch_threads=int(threads) if threads.isdigit() else None,
        memory_bytes=memory,
    )


def _quota() -> float | None:
    """The limit of a container, version 2 or 1 of control groups."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text().strip()
        period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text().strip()
        return None if int(limit) < 0 else int(limit) / int(period)
    return None


def thread_findings(here: Processor, *, on_cpu: bool) -> Iterator[Finding]:
    """Too many threads, too few, or a number that isn't one."""
    available = max(1, min(here.usable_cores, int(here.quota_cores or here.usable_cores)))
    said = here.omp_num_threads.strip()
    if said and not all(part.strip().isdigit() and int(part) > 0 for part in said.split(",")):
        yield Finding(
            code="omp-num-threads",
            severity=WARNING,
            what=f"OMP_NUM_THREADS={said!r} is no number of threads: OpenMP leaves it out",
            do=(f"export OMP_NUM_THREADS={available}",),
        )
        return
    threads = int(said.split(",")[0]) if said else here.cores
    if threads > available:
        told = f"OMP_NUM_THREADS={said}" if said else f"OMP_NUM_THREADS isn't set, so OpenMP may take {threads} threads"
        yield Finding(
            code="more-threads-than-cores",
            severity=WARNING if said or available < here.usable_cores else NOTE,
            what=f"{told}, and this process may use {available} of {here.cores} cores: the threads wait for each other",
            do=(f"export OMP_NUM_THREADS={available}",),
        )
    if on_cpu and not said and here.launch_threads is not None and here.launch_threads < available:
        yield Finding(
            code="launch-takes-one-thread",
            severity=WARNING,
            what=f"accelerate launch sets OMP_NUM_THREADS={here.launch_threads} where nobody says otherwise, and {available} cores are "
            "usable",
            do=(
                f"export OMP_NUM_THREADS={available}",
                f"accelerate launch --num_cpu_threads_per_process={available} -m onegraph.train_network",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPUs, as the driver and as torch see them.

    Args:
        driver: Its version; "" without a driver.
        devices: By nvidia-smi: name, capability, memory_bytes, free_bytes.
        problem: Why the driver can't be asked, where there is one.
        torch_build: "cuda 12.8", "rocm 6.4", "cpu", or "" when torch can't be asked.
        torch_devices: As torch sees them.
    """

    driver: str = ""
    devices: tuple[dict[str, Any], ...] = ()
    problem: str = ""
    torch_build: str = ""
    torch_devices: tuple[dict[str, Any], ...] = ()


def gpu(torch: dict[str, Any]) -> Gpu:
    """Asks nvidia-smi, where there is one; ``torch`` is a part of what ``asked`` answered."""
    torch_build = ""
    if "version" in torch:
        torch_build = f"cuda {torch['cuda']}" if torch["cuda"] else f"rocm {torch['hip']}" if torch["hip"] else "cpu"
    seen = tuple(torch.get("devices", ()))
    if shutil.which("nvidia-smi") is None:
        return Gpu(torch_build=torch_build, torch_devices=seen)
    fields = "driver_version,name,compute_cap,memory.total,memory.free"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Gpu(problem=str(error), torch_build=torch_build, torch_devices=seen)
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 5]
    devices = [
        {"name": name, "capability": capability, "memory_bytes": _mebibytes(total), "free_bytes": _mebibytes(free)}
        for _, name, capability, total, free in rows
    ]
    problem = "" if rows else (done.stderr or done.stdout).strip()[:300] or f"nvidia-smi ended with status {done.returncode}"
    return Gpu(driver=rows[0][0] if rows else "", devices=tuple(devices), problem=problem, torch_build=torch_build, torch_devices=seen)


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


# Triton's compiler, and so inductor, starts at Volta.
_LOWEST_CAPABILITY = (7, 0)


def gpu_findings(here: Gpu, installed: dict[str, str], *, on_cpu: bool) -> Iterator[Finding]:
    """A GPU that torch can't use, or that inductor can't compile for."""
    if here.problem:
        yield Finding(
            code="gpu-driver", severity=WARNING, what=f"nvidia-smi can't reach the GPU: {here.problem}", do=("sudo modprobe nvidia",)
        )
    if here.devices and here.torch_build == "cpu":
        yield Finding(
            code="torch-without-cuda",
            severity=WARNING,
            what=f"there is a GPU ({here.devices[0]['name']}), and the installed torch is built for CPUs only: training runs on the CPU",
            do=(pip_install("--force-reinstall", "torch"),),
        )
    elif here.devices and here.torch_build and not here.torch_devices:
        yield Finding(
            code="torch-sees-no-gpu",
            severity=WARNING,
            what=f"nvidia-smi sees {here.devices[0]['name']} with driver {here.driver}, and torch ({here.torch_build}) sees no GPU"
            + (f": CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}" if "CUDA_VISIBLE_DEVICES" in os.environ else ""),
            do=("unset CUDA_VISIBLE_DEVICES",) if "CUDA_VISIBLE_DEVICES" in os.environ else ("nvidia-smi",),
        )
    if here.torch_devices and not on_cpu and here.torch_build.startswith("cuda"):
        if "triton" not in installed:
            yield Finding(
                code="triton-missing",
                severity=BREAKS,
                what="inductor writes GPU kernels in triton, which isn't installed",
                do=(pip_install("triton-windows" if sys.platform == "win32" else "triton"),),
            )
        for device in here.torch_devices:
            if tuple(int(number) for number in str(device["capability"]).split(".")) < _LOWEST_CAPABILITY:
                yield Finding(
                    code="gpu-too-old",
                    severity=BREAKS,
                    what=f"{device['name']} has capability {device['capability']}: triton, and so inductor, needs 7.0",
                    do=("onegraph.train_network --dynamo_backend=no",),
                )


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False).stdout
    return ""
