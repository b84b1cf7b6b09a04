"""Asks torch and accelerate, in a process of its own: ``python -m onegraph.doctor.asked`` reads a JSON question and prints a JSON answer.

Each part is asked by itself. What can't be asked is answered with why.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onegraph.errors import OnegraphError


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to all parts.

    Args:
        question: ``config_file`` (path or None), ``flags`` (of ours), ``asker`` (process id whose parent may be accelerate launch).
    """
    torch_facts = _asked(_torch_facts)
    if "error" not in torch_facts:
        # its compiler is a part of it: a second import after a failed one would fail for another reason
        torch_facts = {**torch_facts, **_asked(_import_compiling)}
    if "error" in torch_facts:
        return {"torch": torch_facts}
    return {
        "torch": torch_facts,
        "backends": _asked(_backends),
        "flags_refused": _asked(_flags_refused),
        "launch": _asked(lambda: _by_launch(question["config_file"], question["flags"])),
        "python": _asked(lambda: _by_python(question["asker"], question["flags"])),
    }


def _asked(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except OnegraphError as error:
        return {"error": error.what, "why": error.why, "hint": error.hint, "code": error.code}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}", "code": ""}


def _torch_facts() -> dict[str, Any]:
    import torch

    available = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())] if available else []
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "cuda_available": available,
        "devices": [
            {"name": device.name, "capability": f"{device.major}.{device.minor}", "memory_bytes": device.total_memory} for device in devices
        ],
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "openmp": bool(getattr(torch._C, "has_openmp", False)),
    }


def _import_compiling() -> dict[str, Any]:
    import onegraph.compiling  # noqa: F401 - that it can be imported is the answer

    return {}


def _backends() -> dict[str, Any]:
    from onegraph.compiling.attempt import backend_table

    return {"table": backend_table()}


def _flags_refused() -> dict[str, Any]:
    """Whether inductor refuses a ``CXX`` with flags; the tool chain's check is the one that training runs."""
    from onegraph.compiling import CompileSettings, check_toolchain

    with tempfile.TemporaryDirectory(prefix="onegraph-doctor-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # this process's own
        try:
            check_toolchain(CompileSettings(backend="inductor"))
        except OnegraphError as error:
            return {"refused": error.code == "compiler-with-flags"}
    return {"refused": False}


def _by_launch(config_file: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What a run gets that ``accelerate launch`` starts: accelerate's own launcher fills in the environment."""
    try:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_simple_launcher_cmd_env
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "code": "accelerate-cannot-be-imported"}
    from onegraph.compiling import read_launch

    given = ["--config_file", config_file] if config_file else []
    words = [*given, "-m", "onegraph.train_network"]
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - argparse writes what is wrong to stderr and exits
    try:
        with said, contextlib.redirect_stderr(said):
            try:
                arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
                _, environment = prepare_simple_launcher_cmd_env(arguments)
            except SystemExit as error:
                said.seek(0)
                raise RuntimeError(said.read().strip().splitlines()[-1]) from error
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "code": "accelerate-launch-stops"}
    settled = _settled(environment, flags, read_launch(["accelerate", "launch", *words]))
    return {
        **settled,
        "multi_gpu": bool(arguments.multi_gpu),
        "num_processes": arguments.num_processes,
        "use_cpu": environment.get("ACCELERATE_USE_CPU", "").lower() == "true",
        "mixed_precision": environment.get("ACCELERATE_MIXED_PRECISION", "no"),
        "threads": environment.get("OMP_NUM_THREADS", ""),
    }


def _by_python(asker: int, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What a run gets in the environment as it is: started with python, or by the launcher that started the asker."""
    from onegraph.compiling import LaunchRecord, read_launch

    command_line: list[str] = []
    with contextlib.suppress(Exception):  # no psutil, or a process that isn't ours to look at
        import psutil

        parent = psutil.Process(asker).parent()
        command_line = list(parent.cmdline()) if parent is not None else []
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ and bool(command_line)
    record = read_launch(command_line) if launched else LaunchRecord()
    return {**_settled(os.environ, flags, record), "by_launch": record != LaunchRecord()}


def _settled(environment: Mapping[str, str], flags: Mapping[str, Any], launch: Any) -> dict[str, Any]:
    from onegraph.compiling import resolve_settings

    variables = {name: value for name, value in environment.items() if name.startswith("ACCELERATE_DYNAMO_")}
    found: dict[str, Any] = {"environment": variables, "config_file": str(launch.config_file) if launch.config_file else None}
    try:
        settings = resolve_settings(environment, flags=flags, launch=launch)
    except OnegraphError as error:
        return {**found, "error": error.what, "why": error.why, "hint": error.hint, "code": error.code}
    rows = {name: {"value": value, "origin": origin} for name, value, origin in settings.describe()}
    return {**found, "rows": rows, "notes": list(settings.notes), "options": {key: str(value) for key, value in settings.options.items()}}


if __name__ == "__main__":
    # libraries print to standard output while they are imported: the answer goes to a file
    Path(sys.argv[1]).write_text(json.dumps(answer(json.load(sys.stdin))), encoding="utf-8")
