"""Without a compiler or Python.h inductor can't run: said before anything is loaded."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from onegraph.compiling import CompileSettings, check_toolchain
from onegraph.errors import CompileError

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
