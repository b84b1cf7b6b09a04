"""The doctor finds what is broken, says what to do first, and never breaks down itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import onegraph
from onegraph.cli import main as command
from onegraph.compiling import BACKENDS, PROTECTIONS
from onegraph.compiling.attempt import attempt, backend_table
from onegraph.doctor import asked, backends_tried, cache_folder, examine, finding, machine, packages, settings_report, show, switches
from onegraph.doctor.child import ask
from onegraph.doctor.finding import BREAKS, SEVERITIES, Finding, ordered

SOURCE = str(Path(onegraph.__file__).parent.parent)
KEYS = [
    "python",
    "packages",
    "torch",
    "compiler",
    "processor",
    "gpu",
    "cache",
    "config_file",
    "ways",
    "switches",
    "backends",
    "pairs",
    "findings",
    "breaks",
]


def doctor(*arguments: str, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a changed environment."""
    path = os.pathsep.join(filter(None, (environment.pop("PYTHONPATH", ""), SOURCE)))
    words = [sys.executable, *python, "-m", "onegraph.cli.main", "doctor", *arguments]
    return subprocess.run(
        words, env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=250, check=False
    )


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def codes(findings: Any) -> list[str]:
    return [finding.code for finding in findings]


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch and accelerate are asked in this process, which has them already."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def answer(question: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        try:
            return json.loads(json.dumps(asked.answer(question)))
        finally:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache

    monkeypatch.setattr("onegraph.doctor.report.ask", answer)


def config(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


# The whole of it


@pytest.mark.slow
def test_this_machine_is_fine_and_the_command_says_so(tmp_path: Path) -> None:
    path = config(tmp_path, "distributed_type: 'NO'\nuse_cpu: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n")
    done = doctor("--quick", "--json", "--config_file", path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]
    assert list(report) == KEYS
    assert report["breaks"] is False
    assert report["torch"]["version"] == torch.__version__
    assert report["compiler"]["builds"]
    assert [way["settings"]["backend"]["origin"] for way in report["ways"]] == [f"file {path}", "default"]
    assert {backend["name"] for backend in report["backends"]} == set(BACKENDS)


def test_without_any_package(tmp_path: Path) -> None:
    """A Python without site-packages: no torch, no accelerate, no YAML."""
    path = config(tmp_path, "dynamo_config: {dynamo_backend: INDUCTOR}\n")
    done = doctor("--json", "--config_file", path, python=("-S",))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert list(report) == KEYS
    assert [finding["code"] for finding in report["findings"]][:2] == ["torch-missing", "accelerate-missing"]
    assert report["findings"][0]["do"] == [f"{sys.executable} -m pip install torch"]
    assert "PyYAML" in report["config_file"]["problem"]
    assert report["compiler"]["builds"]
    assert "Traceback" not in done.stderr


def test_text_without_any_package_ends_with_what_to_do() -> None:
    done = doctor(python=("-S",))
    assert done.returncode == 1
    assert re.search(r"What to do\n  1\. breaks: torch isn't installed in .*\n +\$ .* -m pip install torch\n", done.stdout)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "torch-cannot-be-imported", "libcudart.so.12"),
        ("import os; os.abort()", "torch-crashes", "status -6"),
        ("x = ", "torch-cannot-be-imported", "SyntaxError"),
    ],
)
def test_a_torch_that_cannot_be_imported(tmp_path: Path, source: str, code: str, said: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    done = doctor("--json", PYTHONPATH=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["findings"][0]["code"] == code
    assert said in report["findings"][0]["what"]
    assert report["backends"] == []
    assert "Traceback" not in done.stderr


def test_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = ask({"config_file": None, "flags": {}, "asker": os.getpid()}, seconds=2)
    assert answer["torch"]["code"] == "torch-hangs"


@pytest.mark.slow
def test_without_accelerate_python_still_starts(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'accelerate'\")")
    done = doctor("--json", "--quick", PYTHONPATH=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    launch, python = report["ways"]
    assert "accelerate" in launch["problem"]
    assert python["problem"] == ""
    assert python["settings"]["backend"]["value"] == "no"
    assert report["findings"][0]["code"] == "accelerate-cannot-be-imported"
    assert report["findings"][0]["do"][0].endswith("-m pip install --force-reinstall accelerate")


def test_a_mistake_in_the_command_is_neither_fine_nor_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["doctor", "--dynamo_use_dynamic=perhaps"])
    assert caught.value.code == 2
    assert "neither yes nor no" in capsys.readouterr().err


def test_most_important_first_and_nothing_twice() -> None:
    findings = [Finding(code=severity, severity=severity, what="") for severity in reversed(SEVERITIES)]
    assert codes(ordered([*findings, *findings])) == list(SEVERITIES)


# Settings


@pytest.mark.usefixtures("asked_here")
def test_which_setting_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(
        tmp_path,
        "distributed_type: 'NO'\nuse_cpu: true\ndowncast_bf16: 'no'\ndynamo_config:\n  dynamo_backend: EAGER\n  dynamo_mode: default\n"
        "  dynamo_use_dynamic: false\n  dynamo_use_fullgraph: true\n  dynamo_use_fulgraph: true\n",
    )
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    report = examine(quick=True, config_file=path)
    launch, python = report.ways
    assert (launch.settings["backend"]["value"], launch.settings["backend"]["origin"]) == ("eager", f"file {path}")
    assert [beaten["origin"] for beaten in launch.settings["backend"]["overrules"]] == ["environment ACCELERATE_DYNAMO_BACKEND"]
    assert launch.settings["dynamic"]["value"] == "automatic"
    assert "unasked" in launch.settings["dynamic"]["overrules"][0]["why"]
    assert launch.settings["fullgraph"]["origin"] == f"file {path}"
    assert (python.settings["backend"]["value"], python.settings["backend"]["origin"]) == (
        "aot_eager",
        "environment ACCELERATE_DYNAMO_BACKEND",
    )
    effects = {name: told["effect"] for name, told in (report.config_file.fields or {}).items()}
    assert effects["dynamo_config.dynamo_backend"] == "backend: eager"
    assert effects["dynamo_config.dynamo_use_fullgraph"] == "fullgraph: yes"
    assert [name for name, effect in effects.items() if not effect] == [
        "downcast_bf16",
        "dynamo_config.dynamo_mode",
        "dynamo_config.dynamo_use_dynamic",
        "dynamo_config.dynamo_use_fulgraph",
    ]
    assert {"config-field-unknown", "environment-overwritten"} <= set(codes(report.findings))
    assert not report.breaks

    flagged = examine(quick=True, config_file=path, flags={"backend": "inductor", "dynamic": False})
    row = flagged.ways[0].settings["backend"]
    assert (row["value"], row["origin"]) == ("inductor", "flag --dynamo_backend")
    assert [beaten["value"] for beaten in row["overrules"]] == ["EAGER", "AOT_EAGER"]
    assert flagged.ways[0].settings["dynamic"]["value"] == "no"
    assert "not EAGER (file): the flag --dynamo_backend wins" in " ".join(show.text(flagged).split())


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("backend", "code", "says"),
    [
        ("OFI", "backend-gone", "inference"),
        ("NVFUSER", "accelerate-launch-stops", "Unknown dynamo backend"),
        ("TENSORRT", "backend-needs-package", "torch_tensorrt"),
        ("NO", "yaml-no-is-false", "boolean"),
    ],
)
def test_a_file_with_a_backend_that_cannot_run(tmp_path: Path, backend: str, code: str, says: str) -> None:
    path = config(tmp_path, f"distributed_type: 'NO'\nuse_cpu: true\ndynamo_config:\n  dynamo_backend: {backend}\n")
    report = examine(quick=True, config_file=path)
    assert report.breaks
    first = report.findings[0]
    assert first.code == code
    assert says in first.what
    # what it says to do mends it
    subprocess.run(["sh", "-c", first.do[0]], check=True)
    assert not examine(quick=True, config_file=path).breaks


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("content", ["dynamo_config: [1, 2", "", "- one\n- two\n", "\x00", "key: value: again"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    path = config(tmp_path, content)
    report = examine(quick=True, config_file=path)
    assert report.breaks
    assert codes(report.findings).count("accelerate-config-unreadable") == 1
    assert "accelerate-launch-stops" not in codes(report.findings), "one cause, one thing to do"
    assert report.config_file.problem
    assert "Traceback" not in show.text(report)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file, _ = settings_report.read_file(str(tmp_path / "none.yaml"))
    assert not file.exists
    assert codes(settings_report.settings_findings(file, {}, [], True)) == ["accelerate-config-unreadable"]


def test_the_default_file_is_the_one_that_accelerate_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("accelerate.commands.config.config_args")
    assert spec is not None
    assert spec.loader is not None
    for variable, value in (("HF_HOME", str(tmp_path)), ("XDG_CACHE_HOME", str(tmp_path)), ("HOME", str(tmp_path))):
        for name in ("HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, value)
        again = importlib.util.module_from_spec(spec)  # a second copy: the place is settled at import
        spec.loader.exec_module(again)
        path, origin = settings_report.file_location(None)
        assert str(path) == again.default_config_file
        assert origin == ("default" if variable == "HOME" else f"environment {variable}")


@pytest.mark.usefixtures("asked_here")
def test_several_processes_and_an_unknown_field(tmp_path: Path) -> None:
    path = config(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    assert "several-processes" not in codes(examine(quick=True, config_file=path).findings)
    path = config(tmp_path, "distributed_type: FSDP\nnum_processes: 2\n")
    assert "several-processes" in codes(examine(quick=True, config_file=path).findings)
    path = config(tmp_path, "distributed_type: 'NO'\nno_such_field: 3\n")
    report = examine(quick=True, config_file=path)
    assert report.findings[0].code == "accelerate-launch-stops"
    assert "no_such_field" in report.findings[0].what


def test_variables_that_switch_compiling_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS"):
        monkeypatch.delenv(name, raising=False)
    assert list(switches.switch_findings()) == []
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    assert list(switches.switch_findings()) == []
    monkeypatch.setenv("TORCHDYNAMO_SUPPRESS_ERRORS", "0")  # torch takes it as yes
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert codes(switches.switch_findings()) == ["compile-switched-off", "suppress-errors-eager"]


@pytest.mark.usefixtures("asked_here")
def test_one_cause_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [backends_tried.BackendReport(name="eager", standing="failed", runs_as="eager", said="no effect: nothing was compiled")]
    monkeypatch.setattr(backends_tried, "tried", lambda *_, **__: failed)
    assert "backend-failed" in codes(examine(flags={"backend": "eager"}).findings)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    found = codes(examine(flags={"backend": "eager"}).findings)
    assert found[0] == "compile-switched-off"
    assert "backend-failed" not in found


@pytest.mark.usefixtures("asked_here")
def test_the_variable_that_stops_the_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "banana")
    found = next(finding for finding in examine(quick=True).findings if finding.code == "accelerate-launch-stops")
    assert found.do == ("unset OMP_NUM_THREADS",)


def test_a_folder_given_as_the_file_is_not_to_be_removed(tmp_path: Path) -> None:
    file, fields = settings_report.read_file(str(tmp_path))
    (found,) = settings_report.settings_findings(file, fields, [], torch_here=True)
    assert found.do == ("accelerate config --config_file FILE.yaml",)


def test_an_interruption_ends_the_trials_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Interrupted(ThreadPoolExecutor):
        def map(self, function: Any, *lots: Any, **_: Any) -> Any:
            for lot in zip(*lots, strict=True):
                self.submit(function, *lot)
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                time.sleep(0.02)
            raise KeyboardInterrupt

    monkeypatch.setattr(backends_tried, "ThreadPoolExecutor", Interrupted)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        backends_tried.tried({"eager": {}, "aot_eager": {}}, module="sleeper")
    assert time.monotonic() - begun < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_a_time_limit_is_a_time(seconds: str) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["doctor", "--timeout_seconds", seconds])
    assert caught.value.code == 2


# Compiler


@pytest.mark.usefixtures("asked_here")
def test_no_compiler_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(finding, "_PLACES", str(tmp_path))
    report = examine(quick=True)
    assert report.breaks
    found = next(finding for finding in report.findings if finding.code == "compiler-missing")
    assert re.search(r"install", found.do[0])
    assert report.compiler.program == ""
    # it is there, and PATH leaves it out
    program(tmp_path / "usual", "g++", "exit 0")
    monkeypatch.setattr(finding, "_PLACES", str(tmp_path / "usual"))
    (hidden,) = machine.compiler_findings(report.compiler, flags_refused=False, needed=True)
    assert hidden.do[0] == f'export PATH="$PATH:{tmp_path / "usual"}"'


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="inductor takes flags since 2.14")
@pytest.mark.usefixtures("asked_here")
def test_cxx_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -O2")
    report = examine(quick=True)
    assert (report.compiler.program, report.compiler.flags, report.compiler.builds) == ("g++", ("-O2",), True)
    found = next(finding for finding in report.findings if finding.code == "compiler-with-flags")
    assert (found.severity, found.do[0]) == (BREAKS, "export CXX=g++")
    monkeypatch.setenv("CXX", "g++")
    assert "compiler-with-flags" not in codes(examine(quick=True).findings)


@pytest.mark.parametrize(
    ("named", "code"), [("no-such-compiler", "compiler-missing"), ("", "compiler-missing"), ("g++ -no-such-flag", "compiler-broken")]
)
def test_a_wrong_cxx(monkeypatch: pytest.MonkeyPatch, named: str, code: str) -> None:
    monkeypatch.setenv("CXX", named)
    (found,) = machine.compiler_findings(machine.compiler_report(), flags_refused=True, needed=True)
    assert found.code == code
    assert "unset CXX" in found.do
    monkeypatch.delenv("CXX")
    assert list(machine.compiler_findings(machine.compiler_report(), flags_refused=True, needed=True)) == []


def test_a_compiler_without_openmp_or_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "compiler", "echo 'fatal error: omp.h: No such file' >&2; exit 1")))
    assert codes(machine.compiler_findings(machine.compiler_report(), flags_refused=True, needed=False)) == ["openmp-missing"]
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (found,) = machine.compiler_findings(machine.compiler_report(), flags_refused=True, needed=True)
    assert found.code == "python-headers-missing"


# Threads and GPU


@pytest.mark.parametrize(
    ("said", "launch", "code"),
    [
        ("8", 8, ["more-threads-than-cores"]),
        ("four", None, ["omp-num-threads"]),
        ("0", None, ["omp-num-threads"]),
        ("4", 4, []),
        ("", 4, ["more-threads-than-cores"]),
        ("", 1, ["more-threads-than-cores", "launch-takes-one-thread"]),
    ],
)
def test_threads(said: str, launch: int | None, code: list[str]) -> None:
    here = machine.Processor(cores=8, usable_cores=6, quota_cores=4.0, omp_num_threads=said, launch_threads=launch)
    found = list(machine.thread_findings(here, on_cpu=True))
    assert codes(found) == code
    assert all(finding.do[0] == "export OMP_NUM_THREADS=4" for finding in found)


def test_a_gpu_that_torch_is_not_built_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo '570.1, NVIDIA H200, 9.0, 143771, 143000'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    here = machine.gpu({"version": "2.13.0+cpu", "cuda": "", "hip": "", "devices": []})
    assert (here.driver, here.devices[0]["capability"], here.devices[0]["memory_bytes"]) == ("570.1", "9.0", 143771 * 2**20)
    assert codes(machine.gpu_findings(here, {}, on_cpu=True)) == ["torch-without-cuda"]
    blind = machine.gpu({"version": "2.13.0", "cuda": "12.8", "hip": "", "devices": []})
    assert codes(machine.gpu_findings(blind, {}, on_cpu=True)) == ["torch-sees-no-gpu"]


def test_a_gpu_that_inductor_cannot_compile_for() -> None:
    device = {"name": "old", "capability": "6.1", "memory_bytes": 1}
    here = machine.Gpu(torch_build="cuda 12.8", torch_devices=(device,))
    assert codes(machine.gpu_findings(here, {}, on_cpu=False)) == ["triton-missing", "gpu-too-old"]
    assert list(machine.gpu_findings(here, {}, on_cpu=True)) == []


def test_a_driver_that_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", 'echo "couldn\'t communicate with the NVIDIA driver"; exit 9')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    here = machine.gpu({})
    assert "communicate" in here.problem
    assert codes(machine.gpu_findings(here, {}, on_cpu=True)) == ["gpu-driver"]


# Cache folder


def graph(folder: Path, kind: str, content: bytes) -> Path:
    path = folder / kind / "ab" / f"f{len(list(folder.rglob('*')))}" / "key"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_stale_and_unreadable_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    graph(folder, "fxgraph", b"\x80\x04 # torch version: 2.13.0+cpu\n.")
    graph(folder, "fxgraph", b"\x80\x04 # torch version: 2.12.1\n.")
    graph(folder, "fxgraph", b"\x80\x04 # torch version: 2.13.0+cpu\n cut off")
    graph(folder, "fxgraph", b"")
    graph(folder, "aotautograd", b"\x80\x04 anything.")
    (folder / "ab.so").write_bytes(b"\x7fELF")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    found = cache_folder.cache_folder("2.13.0+cpu")
    assert (found.entries, found.libraries, found.files) == (5, 1, 6)
    assert found.written_by == {"2.12.1": 1, "2.13.0+cpu": 2}
    assert (found.stale, found.unreadable) == (1, 2)
    assert {"cache-stale", "cache-unreadable"} <= set(codes(cache_folder.cache_findings(found)))
    assert cache_folder.cache_folder(None).stale == 0


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="it doesn't since 2.14")
def test_a_graph_of_inductor_names_its_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "import torch; torch.compile(lambda x: x.sin() * 2)(torch.ones(4))"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = cache_folder.cache_folder(torch.__version__)
    assert found.written_by == {torch.__version__: 1}
    assert (found.stale, found.unreadable) == (0, 0)
    assert found.libraries >= 1
    assert cache_folder.cache_folder("2.14.0").stale == 1


def read_only_places(tmp_path: Path) -> list[str]:
    blocked = tmp_path / "file"
    blocked.write_text("")
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    places = [str(blocked), str(blocked / "below")]
    if os.geteuid() != 0:  # root writes anywhere
        places.append(str(locked))
    if Path("/proc/self").exists():
        places.append("/proc/no-such-folder")
    return places


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in read_only_places(tmp_path):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", place)
        found = cache_folder.cache_folder("2.13.0")
        assert not found.writable, place
        first = next(iter(cache_folder.cache_findings(found)))
        assert (first.code, first.severity) == ("cache-folder", BREAKS)


@pytest.mark.slow
def test_settings_are_found_where_torch_cannot_make_its_folder(tmp_path: Path) -> None:
    done = doctor("--quick", "--json", "--dynamo_backend=eager", TORCHINDUCTOR_CACHE_DIR=read_only_places(tmp_path)[-1])
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert [finding["code"] for finding in report["findings"] if finding["severity"] == "breaks"] == ["cache-folder"]
    assert report["ways"][0]["settings"]["backend"]["value"] == "eager"


@pytest.mark.usefixtures("asked_here")
def test_a_read_only_folder_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", read_only_places(tmp_path)[-1])
    assert command.main(["doctor", "--quick"]) == 1


def test_the_default_folder_is_the_one_that_inductor_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    path, origin = cache_folder.location()
    assert str(path) == default_cache_dir()
    assert origin.startswith("default")
    assert "cache-lost-at-reboot" in codes(
        cache_folder.cache_findings(cache_folder.CacheFolder(path=str(path), origin="", writable=True, temporary=True))
    )


def test_nothing_is_left_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert cache_folder.cache_folder("2.13.0").writable
    assert list(tmp_path.iterdir()) == []


# Backends


@pytest.mark.parametrize(
    ("name", "runs_as", "outcome"),
    [
        ("no", "no", "works"),
        ("eager", "eager", "works"),
        ("aot_eager", "aot_eager", "works"),
        ("ofi", "ofi", "unknown"),
        ("tvm", "tvm", "import"),
        ("torchxla_trace_once", "openxla", "import"),
    ],
)
def test_a_backend_is_tried(name: str, runs_as: str, outcome: str) -> None:
    found = attempt(name)
    assert (found.runs_as, found.outcome) == (runs_as, outcome), found.said


@pytest.mark.parametrize(
    ("backend", "outcome"),
    [
        (lambda graph, inputs: lambda *values: [2 * value for value in graph(*values)], "wrong"),
        (lambda graph, inputs: 1 / 0, "failed"),
        (lambda graph, inputs: graph, "works"),
    ],
    ids=["wrong", "failed", "works"],
)
def test_a_backend_of_ones_own(monkeypatch: pytest.MonkeyPatch, backend: Any, outcome: str) -> None:
    from torch._dynamo.backends import registry

    monkeypatch.setitem(registry._COMPILER_FNS, "tried_here", backend)
    monkeypatch.setitem(registry._BACKENDS, "tried_here", None)
    assert attempt("tried_here").outcome == outcome


def test_a_backend_that_hangs_or_crashes_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tried_out.py").write_text(
        "import json, os, sys, time\n"
        "for name in sys.argv[2:]:\n"
        "    print('a library says hello', flush=True)\n"
        "    if name == 'hangs': time.sleep(60)\n"
        "    if name == 'crashes': os.abort()\n"
        "    outcome = 'skipped' if name == 'cudagraphs' else 'unknown' if name in ('gone', 'packaged') else 'works'\n"
        "    print(json.dumps({'name': name, 'runs_as': 'new' if name == 'old' else name, 'outcome': outcome}), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    table: dict[str, dict[str, Any]] = {name: {} for name in ("one", "hangs", "old", "crashes", "gone", "two")}
    table |= {"packaged": {"needs_module": "package"}, "cudagraphs": {"needs_cuda": True}, "inductor": {}}
    found = {one.name: one for one in backends_tried.tried(table, seconds=3, starting_seconds=3, module="tried_out")}
    assert list(found) == list(table)
    assert {name: one.standing for name, one in found.items()} == {
        "one": "works",
        "hangs": "failed",
        "old": "renamed",
        "crashes": "failed",
        "gone": "gone",
        "two": "works",
        "packaged": "needs",
        "cudagraphs": "needs",
        "inductor": "works",
    }
    assert found["old"].runs_as == "new"
    assert found["packaged"].needs == "package"
    assert "timed out" in found["hangs"].said
    assert "crashed" in found["crashes"].said
    findings = list(backends_tried.backend_findings(found.values(), {"hangs"}, explained=False))
    assert [(finding.code, finding.severity) for finding in findings] == [("backend-failed", "breaks"), ("backend-failed", "warning")]


@pytest.mark.slow
@pytest.mark.inductor
def test_every_backend_is_tried_here() -> None:
    found = {one.name: one for one in backends_tried.tried(backend_table())}
    assert set(found) == set(BACKENDS)
    assert {name for name, one in found.items() if one.standing == "works"} >= {"no", "inductor", "eager", "aot_eager"}
    assert {name for name, one in found.items() if one.standing == "gone"} == {name for name, one in BACKENDS.items() if one.gone}
    assert found["aot_cudagraphs"].runs_as == "cudagraphs"


# Versions


def test_known_pairs() -> None:
    def pairs(**installed: str) -> list[str]:
        return [pair.name for pair in packages.PAIRS if pair.holds({"python": "3.11.7", **installed})]

    assert "scatter-order-zero-gradients" in pairs(torch="2.13.0+cpu")
    assert "scatter-order-zero-gradients" not in pairs(torch="2.14.0")
    assert pairs(transformers="5.24.0", peft="0.21.2") == ["transformers-wants-newer-peft"]
    assert pairs(transformers="5.23.0", peft="0.21.2") == []
    assert pairs(transformers="5.24.0") == []
    assert pairs(bitsandbytes="0.45.5") == ["bnb-params4bit-breaks"]
    assert "ipex-pairs-with-its-torch" in pairs(torch="2.13.0", intel_extension_for_pytorch="2.8.0")
    assert "ipex-pairs-with-its-torch" not in pairs(torch="2.8.1", intel_extension_for_pytorch="2.8.0")
    assert "python-too-new" in pairs(python="3.15.0", torch="2.13.0")


def test_a_fault_that_compiling_protects_from_is_a_known_pair() -> None:
    assert {protection.name for protection in PROTECTIONS} <= {pair.name for pair in packages.PAIRS}
    assert all(pair.source and re.fullmatch(r"\d{4}-\d\d-\d\d", pair.seen) for pair in packages.PAIRS)


def test_what_the_packages_say_of_one_another() -> None:
    installed = packages.versions()
    assert set(codes(packages.pair_findings(installed))) <= {pair.name for pair in packages.PAIRS}
    found = list(packages.pair_findings({**installed, "peft": "0.16.1", "torch": "2.1.0"}))
    assert {"peft-too-old", "requirement-not-met"} <= set(codes(found))
    assert any("transformers" in one.what and "0.20.0" in one.what for one in found if one.code == "peft-too-old")


def test_a_version_that_is_too_old() -> None:
    here = [packages.Package(name="torch", version="2.9.1", wanted=">=2.11"), packages.Package(name="peft", version=None, wanted=">=0.18")]
    (found,) = packages.package_findings(here)
    assert (found.code, found.severity) == ("version-too-old", BREAKS)
    assert found.do[0].endswith("'torch>=2.11'")


def test_keys_are_documented(root: Path) -> None:
    page = (root / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [key for key in KEYS if f"| `{key}` |" not in page] == []
