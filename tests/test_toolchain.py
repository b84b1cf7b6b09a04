"""Without a compiler or Python.h inductor can't run: said before anything is loaded."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onegraph.compiling import CompileSettings, check_toolchain
from onegraph.errors import CompileError
from onegraph.machine.compiler import find_compiler, refused_flags

INDUCTOR = CompileSettings(backend="inductor")


def test_this_machine_passes() -> None:
    check_toolchain(INDUCTOR)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "compiler-missing"
    assert "apt-get install g++" in caught.value.hint


def test_compiler_named_by_cxx_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        check_toolchain(INDUCTOR)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="inductor takes flags since 2.14")
def test_cxx_with_flags_is_a_compiler_that_inductor_cannot_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -O2")
    assert find_compiler().command == ["g++", "-O2"]
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "compiler-with-flags"
    assert "export CXX=g++" in caught.value.hint
    # inductor itself, asked for the same, finds no compiler
    from torch._inductor.cpp_builder import cpp_compiler_search
    from torch._inductor.exc import InvalidCxxCompiler

    with pytest.raises(InvalidCxxCompiler):
        cpp_compiler_search(("g++ -O2",))
    assert cpp_compiler_search(("g++",)) == "g++"


def test_the_script_of_the_hint_makes_one_program_of_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++ -O2")
    script = refused_flags(find_compiler()).hint.partition("one program: ")[2].partition("; export")[0]
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True)
    monkeypatch.setenv("CXX", str(tmp_path / "g++-wrapped"))
    check_toolchain(INDUCTOR)


def test_flags_that_break_the_compiler_are_used_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -no-such-flag")
    with pytest.raises(CompileError, match="no-such-flag") as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "compiler-broken"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_compiler_of_c_is_told_from_one_of_cxx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "gcc")
    with pytest.raises(CompileError, match="leaves out the C\\+\\+ library") as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "compiler-for-c"
    assert "unset CXX" in caught.value.hint


@pytest.mark.parametrize("named", ["", "  ", "no-such-compiler -O2", "'g++"])
def test_cxx_without_a_compiler_in_it(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "compiler-missing"
    assert "unset CXX" in caught.value.hint


@pytest.mark.skipif(sys.platform == "darwin", reason="clang++ is the name that inductor looks for there")
def test_another_compiler_on_the_path_is_not_one_that_inductor_looks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "clang++"
    other.symlink_to(shutil.which("g++") or "g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "compiler-missing"
    assert "export CXX=clang++" in caught.value.hint


def test_no_python_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "python-headers-missing"
    assert "Python.h" in caught.value.what


def test_compiler_that_fails_shows_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "openmp-missing"
    assert "omp.h" in str(caught.value)


def test_cache_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(blocked))
    with pytest.raises(CompileError) as caught:
        check_toolchain(INDUCTOR)
    assert caught.value.code == "cache-folder"


@pytest.mark.parametrize("backend", ["no", "eager", "aot_eager"])
def test_other_backends_need_no_compiler(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_toolchain(CompileSettings(backend=backend))
