"""Inductor's cache folder: shown, packed, unpacked elsewhere and found there; what is broken or from another machine is refused."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.cache import MachineKind, clear, contents, differences, machine_kind, pack, prune, unpack
from onegraph.cache.entries import belongs, entries, travels
from onegraph.cli.main import main
from onegraph.compiling.last_run import FILE as LAST_RUN
from onegraph.errors import CompileError, OutputError
from onegraph.machine.compiler import find_compiler
from onegraph.machine.target import native_target, target_of
from onegraph.machine.torch_version import torch_version

KEY = "c" + "ab" + "2" * 49
GRAPH = f"fxgraph/ab/f{'a' * 51}/{'b' * 52}"
VERSION = torch.__version__


def library(size: int = 256, *, cut: int = 0) -> bytes:
    """An ELF head whose table of sections ends where the file should."""
    head = bytearray(size)
    head[:6] = b"\x7fELF\x02\x01"
    head[40:48] = (size - 64).to_bytes(8, "little")
    head[58:60], head[60:62] = (64).to_bytes(2, "little"), (1).to_bytes(2, "little")
    return bytes(head[: size - cut])


def fill(folder: Path, **more: bytes) -> Path:
    files = {
        GRAPH: f"# torch version: {VERSION}\n.".encode(),
        f"aotautograd/a{'c' * 51}/{'d' * 52}": b"whole.",
        f"ab/{KEY}.main.cpp": b"int f();",
        f"ab/{KEY}.main.so": library(),
        f"locks/{KEY}.lock": b"",
        "notes.txt": b"mine",
        **{name.replace("__", "/"): content for name, content in more.items()},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def here() -> MachineKind:
    return machine_kind()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = fill(tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(found))
    return found


@pytest.fixture(autouse=True)
def known_kind(here: MachineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once for all tests: the compiler is run for it."""
    monkeypatch.setattr("onegraph.cache.packing.machine_kind", lambda: here)
    monkeypatch.setattr("onegraph.cache.unpacking.machine_kind", lambda: here)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rewritten(archive: Path, change: Callable[[dict[str, bytes]], None], *, manifest: bool = False) -> Path:
    """The archive with other members; the manifest's numbers are made to fit unless ``manifest``."""
    with zipfile.ZipFile(archive) as read:
        members = {name: read.read(name) for name in read.namelist()}
    change(members)
    if not manifest:
        record = json.loads(members["onegraph-cache.json"])
        files = {name: content for name, content in members.items() if name != "onegraph-cache.json"}
        record.update(files=len(files), bytes=sum(map(len, files.values())))
        members["onegraph-cache.json"] = json.dumps(record).encode()
    with zipfile.ZipFile(archive, "w") as written:
        for name, content in members.items():
            written.writestr(name, content)
    return archive


def test_what_is_inductors_is_told_by_its_name() -> None:
    assert all(map(belongs, [GRAPH, f"ab/{KEY}.main.so", f"locks/{KEY}.lock", "triton/0/x/y.cubin", LAST_RUN]))
    odd = [
        "notes.txt",
        "/etc/passwd",
        "../x",
        "fxgraph/../../x",
        "fxgraph//x",
        f"xy/{KEY}.so",
        "ab/readme.txt",
        "fxgraph\\..\\x",
        "",
        "fxgraph",
    ]
    assert not any(map(belongs, odd))


def test_packed_and_unpacked_it_is_the_same(folder: Path, tmp_path: Path) -> None:
    packed = pack(tmp_path / "cache.zip")
    assert (packed.files, packed.graphs, packed.kernels) == (4, 2, 1)
    other = tmp_path / "another" / "place"
    unpacked = unpack(tmp_path / "cache.zip", folder=other)
    assert (unpacked.files, unpacked.kept, unpacked.differences) == (4, 0, ())
    expected = {name: content for name, content in tree(folder).items() if name != "notes.txt" and not name.startswith("locks")}
    assert tree(other) == expected
    assert [path.name for path in other.iterdir() if path.name.startswith("onegraph-unpack")] == []


def test_what_is_there_already_stays(folder: Path, tmp_path: Path) -> None:
    pack(tmp_path / "cache.zip")
    other = tmp_path / "other"
    mine = other / "ab" / f"{KEY}.main.so"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"built here")
    (other / "ab" / f"{KEY}.main.cpp").touch()  # empty: broken off, so not there
    unpacked = unpack(tmp_path / "cache.zip", folder=other)
    assert (unpacked.files, unpacked.kept) == (3, 1)
    assert mine.read_bytes() == b"built here"
    assert (other / "ab" / f"{KEY}.main.cpp").read_bytes() == b"int f();"


def test_what_was_cut_off_is_not_packed(folder: Path, tmp_path: Path) -> None:
    fill(folder, **{f"ab__{'d' + KEY[1:]}.main.so": library(cut=8), f"fxgraph__ab__{'g' * 52}__{'h' * 52}": b"cut of"})
    assert pack(tmp_path / "cache.zip").files == 4
    left_out = [entry.name for entry in entries(folder) if not travels(entry)]
    assert len(left_out) == 3  # both, and the lock


@pytest.mark.parametrize(
    "problem", ["truncated", "flipped", "text", "empty", "missing", "no manifest", "other format", "numbers", "not a machine"]
)
def test_a_broken_file_is_refused_and_nothing_is_written(folder: Path, tmp_path: Path, problem: str) -> None:
    archive = tmp_path / "cache.zip"
    pack(archive)
    content = archive.read_bytes()

    def manifest(**fields: object) -> Callable[[dict[str, bytes]], None]:
        def change(members: dict[str, bytes]) -> None:
            members["onegraph-cache.json"] = json.dumps({**json.loads(members["onegraph-cache.json"]), **fields}).encode()

        return change

    if problem == "truncated":
        archive.write_bytes(content[: len(content) // 2])
    elif problem == "flipped":
        place = content.index(b"files/ab/") + len("files/ab/") + len(KEY) + 12
        archive.write_bytes(content[:place] + bytes(255 - byte for byte in content[place : place + 4]) + content[place + 4 :])
    elif problem == "text":
        archive.write_text("<!DOCTYPE html>")
    elif problem == "empty":
        archive.write_bytes(b"")
    elif problem == "missing":
        archive.unlink()
    elif problem == "no manifest":
        with zipfile.ZipFile(archive, "w") as other:
            other.writestr("readme.txt", "hello")
    else:
        fields = {"other format": {"format": 2}, "numbers": {"files": 3}, "not a machine": {"machine": {"torch": 1}}}[problem]
        rewritten(archive, manifest(**fields), manifest=True)
    other_folder = tmp_path / "other"
    with pytest.raises(CompileError) as caught:
        unpack(archive, folder=other_folder)
    assert caught.value.code == "cache-archive"
    assert not other_folder.exists() or tree(other_folder) == {}


@pytest.mark.parametrize(
    "name", ["files/../../escape", "files//etc/x", "escape", "files/fxgraph/../../../escape", "files/notes.txt", "files/ab\\..\\x"]
)
def test_names_that_lead_elsewhere_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    archive = tmp_path / "cache.zip"
    pack(archive)
    rewritten(archive, lambda members: members.update({name: b"x"}))
    other = tmp_path / "deep" / "er" / "other"
    with pytest.raises(CompileError, match="no file of inductor's cache"):
        unpack(archive, folder=other)
    assert not (tmp_path / "deep").exists()
    assert not (tmp_path / "escape").exists()


def test_links_are_neither_packed_nor_unpacked(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / "ab" / f"{'e' + KEY[1:]}.so").symlink_to(secret)
    (folder / "fxgraph" / "linked").symlink_to(tmp_path, target_is_directory=True)
    archive = tmp_path / "cache.zip"
    assert pack(archive).files == 4
    with zipfile.ZipFile(archive, "a") as added:
        link = zipfile.ZipInfo(f"files/ab/{'e' + KEY[1:]}.so")
        link.external_attr = 0o120777 << 16
        added.writestr(link, "/etc/passwd")
    with pytest.raises(CompileError, match="no file of inductor's cache"):
        unpack(archive, folder=tmp_path / "other")


def test_a_full_disk_is_found_before_anything_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path / "cache.zip")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("onegraph.cache.unpacking.shutil.disk_usage", lambda _: usage._replace(free=10))
        with pytest.raises(OutputError) as caught:
            unpack(tmp_path / "cache.zip", folder=tmp_path / "other")
    assert caught.value.code == "disk-full"
    assert tree(tmp_path / "other") == {}


def test_a_disk_that_fills_up_leaves_no_half_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path / "cache.zip")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onegraph.cache.unpacking.shutil.copyfileobj", fails)
    with pytest.raises(OutputError) as caught:
        unpack(tmp_path / "cache.zip", folder=tmp_path / "other")
    assert caught.value.code == "disk-full"
    assert tree(tmp_path / "other") == {}


def test_graphs_are_moved_after_their_kernels(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path / "cache.zip")
    moved: list[str] = []
    plain = Path.replace

    def noted(self: Path, target: Path) -> Path:
        moved.append(Path(target).relative_to(tmp_path / "other").parts[0])
        return plain(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    unpack(tmp_path / "cache.zip", folder=tmp_path / "other")
    assert moved == ["ab", "ab", "fxgraph", "aotautograd"]


def test_another_kind_of_machine_is_told_by_what_differs(here: MachineKind) -> None:
    assert differences(here, here) == []

    def found(**changes: object) -> dict[str, str]:
        return {each.name: each.consequence for each in differences(dataclasses.replace(here, **changes), here)}  # type: ignore[arg-type]

    assert list(found(key={**here.key, "torch": "2.0.0"})) == ["torch"]
    assert "never be found" in found(key={**here.key, "gpu": "H200"})["gpu"]
    assert "built again" in found(key={**here.key, "torch folder": "/elsewhere"})["torch folder"]
    assert "crash" in found(compiler="GNU C++ 99.1.0")["compiler"]
    assert "crash" in found(system="Darwin arm64")["system"]
    if here.instructions:
        assert "crash" in found(instructions=(*here.instructions, "avx9999"))["processor"]
        # a processor that can do more is as good
        assert found(instructions=here.instructions[:-1], architecture="x86-64") == {}


def test_another_machine_is_refused_unless_forced(folder: Path, tmp_path: Path, here: MachineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path / "cache.zip")
    richer = dataclasses.replace(here, key={**here.key, "torch": "3.0.0"})
    monkeypatch.setattr("onegraph.cache.unpacking.machine_kind", lambda: richer)
    with pytest.raises(CompileError, match=f"torch: {here.key['torch'].split('+')[0]}.* there, 3.0.0 here") as caught:
        unpack(tmp_path / "cache.zip", folder=tmp_path / "other")
    assert caught.value.code == "cache-other-machine"
    assert not (tmp_path / "other").exists()
    forced = unpack(tmp_path / "cache.zip", folder=tmp_path / "other", force=True)
    assert forced.files == 4
    assert [each.name for each in forced.differences] == ["torch"]


def test_nothing_to_pack(tmp_path: Path) -> None:
    for place in (tmp_path / "not there", tmp_path):
        with pytest.raises(CompileError) as caught:
            pack(tmp_path / "cache.zip", folder=place)
        assert caught.value.code == "cache-empty"
    assert list(tmp_path.iterdir()) == []


def test_prune_removes_what_is_of_no_use_and_clear_what_is_inductors(folder: Path) -> None:
    fill(
        folder,
        **{f"fxgraph__ab__{'g' * 52}__{'h' * 52}": b"# torch version: 1.0.0\n.", f"ab__{'d' + KEY[1:]}.main.so": library(cut=8)},
    )
    before = tree(folder)
    assert (prune(dry_run=True).files, tree(folder)) == (2, before)
    assert prune().files == 2
    assert set(before) - set(tree(folder)) == {f"fxgraph/ab/{'g' * 52}/{'h' * 52}", f"ab/{'d' + KEY[1:]}.main.so"}
    os.utime(folder / GRAPH, (time.time() - 86400 * 9,) * 2)
    before = tree(folder)
    for flag in ("--older_than_days=8", "--older-than-days=8"):  # both spellings
        assert main(["cache", "prune", flag]) == 0
        assert tree(folder) == before
    assert prune(older_than_days=8).files == 1
    assert clear(dry_run=True).files == 4
    assert clear().files == 4
    assert tree(folder) == {"notes.txt": b"mine"}
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_wheel_whose_metadata_say_less_than_torch_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = importlib.metadata.version

    def version(name: str) -> str:  # a wheel from PyPI: 2.13.0, and torch.__version__ is 2.13.0+cu130
        return said(name).partition("+")[0] if name == "torch" else said(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert torch_version() == torch.__version__
    fill(folder, **{GRAPH.replace("/", "__"): f"# torch version: {torch.__version__}\n.".encode()})
    before = tree(folder)
    assert prune().files == 0
    assert contents().folder.stale == 0
    assert tree(folder) == before
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_version() == torch.__version__.partition("+")[0]


def test_what_a_killed_unpacking_left_is_removed(folder: Path) -> None:
    for name, age in (("onegraph-unpack-old", 7200), ("onegraph-unpack-new", 0)):
        (folder / name / "fxgraph").mkdir(parents=True)
        (folder / name / "fxgraph" / "x").write_bytes(b"1234")
        os.utime(folder / name, (time.time() - age,) * 2)
    assert (prune(dry_run=True).files, prune(dry_run=True).bytes) == (1, 4)
    assert prune().files == 1
    assert sorted(path.name for path in folder.glob("onegraph-unpack-*")) == ["onegraph-unpack-new"]


def test_what_can_not_be_read_or_removed_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    before = tree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        assert main(["cache", "clear", "--yes"]) == 2
    assert "5 files couldn't be removed" in capsys.readouterr().out

    def walk(place: Path, onerror: Callable[[OSError], None] | None) -> list[object]:
        if onerror is not None:
            onerror(PermissionError(13, "Permission denied", str(place)))
        return []

    with monkeypatch.context() as patch:  # as os.walk, where a folder is another user's
        patch.setattr("onegraph.cache.entries.os.walk", walk)
        for call in (clear, prune, lambda: pack(tmp_path / "none.zip")):
            with pytest.raises(CompileError, match="Permission denied") as raised:
                call()
            assert raised.value.code == "cache-folder"
    opened = Path.open

    def locked(path: Path, *args: Any, **named: Any) -> Any:
        if path == folder / GRAPH:
            refused(path)
        return opened(path, *args, **named)

    with monkeypatch.context() as patch:  # one file is another user's: not cut off, and not left out in silence
        patch.setattr(Path, "open", locked)
        with pytest.raises(CompileError, match="Permission denied") as raised:
            pack(tmp_path / "none.zip")
        assert raised.value.code == "cache-folder"
    assert tree(folder) == before
    assert not (tmp_path / "none.zip").exists()


def test_a_folder_that_is_cleared_meanwhile_packs_no_empty_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, stat = Path.read_bytes, Path.stat

    def gone(path: Path) -> bytes:
        if folder in path.parents:
            raise FileNotFoundError(2, "gone", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", gone)
        with pytest.raises(CompileError) as raised:
            pack(tmp_path / "none.zip")
    assert raised.value.code == "cache-empty"
    assert not (tmp_path / "none.zip").exists()

    staging = folder / "onegraph-unpack-done"  # an unpacking that ends while the folder is looked at
    staging.mkdir()
    looked: list[Path] = []

    def ended(path: Path, **named: bool) -> os.stat_result:
        if path == staging:
            looked.append(path)
            if len(looked) > 2:
                raise FileNotFoundError(2, "gone", str(path))
        return stat(path, **named)

    monkeypatch.setattr(Path, "stat", ended)
    assert clear(dry_run=True).files == 5
    assert len(looked) > 2  # it was gone when its age was asked for


def test_show_says_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / LAST_RUN).write_text(json.dumps({"ended": time.time() - 7200, "hits": 3, "misses": 1, "torch": VERSION}))
    assert main(["cache", "show"]) == 0
    text = capsys.readouterr().out
    assert str(folder) in text
    assert "2 graphs (1 traced, 1 compiled), 1 built kernels" in text
    assert f"torch {VERSION}: 1 compiled graphs" in text
    assert "3 of 4 graphs found here, 2 hours ago" in text
    assert main(["cache", "show", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["folder"]["entries"] == 2
    assert record["last_run"]["hits"] == 3
    (folder / LAST_RUN).write_text("broken")
    assert contents().last_run is None


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    archive = str(tmp_path / "cache.zip")
    assert main(["cache", "pack", archive]) == 0
    assert "2 graphs and 1 built kernels" in capsys.readouterr().out
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert main(["cache", "unpack", archive, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 4
    assert main(["cache", "clear"]) == 0
    assert "would be removed: say --yes" in capsys.readouterr().out
    assert main(["cache", "clear", "--yes"]) == 0
    assert tree(tmp_path / "other") == {}
    assert main(["cache", "unpack", str(tmp_path / "none.zip")]) == 2
    assert "[cache-archive]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cache", "pack"])
    assert "pack takes a FILE" in capsys.readouterr().err


def test_what_a_library_was_built_for_is_read_from_it(tmp_path: Path) -> None:
    compiler = find_compiler()
    native = native_target(compiler)
    if native is None:
        pytest.skip("this compiler doesn't write down what it builds for")
    source = tmp_path / "f.cpp"
    source.write_text("int f() { return 1; }")
    built = tmp_path / "f.so"
    subprocess.run([*compiler.command, "-g1", "-mavx2", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    found = target_of(built)
    assert found is not None
    assert found.compiler == native.compiler
    assert "avx2" in found.instructions
    assert set(native.instructions) != set(found.instructions)
    assert target_of(source) is None
    assert target_of(tmp_path / "none") is None


PROGRAM = """
import json
import torch
from torch import nn
import onegraph as og

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

torch.manual_seed(0)
block = Block()
og.attach(block, og.LoRA(rank=2), targets=["up"])
og.compile(block, regions="whole")
loss = block(torch.ones(4, 16)).sum()
loss.backward()
counters = torch._dynamo.utils.counters["inductor"]
print(json.dumps({"hits": counters["fxgraph_cache_hit"], "misses": counters["fxgraph_cache_miss"], "loss": loss.item()}))
"""


@pytest.mark.inductor
@pytest.mark.timeout(900)
def test_another_folder_on_another_path_needs_no_compilation(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the compiler's calls are counted for g++")
    shim = tmp_path / "bin" / "g++"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\necho "$*" >> "$COMPILER_CALLS"\nexec {compiler} "$@"\n')
    shim.chmod(0o755)

    def run(cache: Path, **more: str) -> tuple[dict[str, float], list[str]]:
        calls = tmp_path / f"calls-{cache.name}"
        environment = {
            **{name: value for name, value in os.environ.items() if name != "CXX"},
            "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
            "COMPILER_CALLS": str(calls),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            **more,
        }
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
        built = [line for line in calls.read_text().splitlines() if line not in {"--version", "-v"}]
        return json.loads(done.stdout.splitlines()[-1]), built

    first, built = run(tmp_path / "one")
    assert first["misses"] > 0
    assert first["hits"] == 0
    assert any(".main.cpp" in line for line in built)
    pack(tmp_path / "cache.zip", folder=tmp_path / "one")
    unpack(tmp_path / "cache.zip", folder=tmp_path / "else" / "where")
    # headers precompiled by the first run lie in the temporary folder: another machine doesn't have them
    (tmp_path / "temporary").mkdir()
    second, built = run(tmp_path / "else" / "where", TMPDIR=str(tmp_path / "temporary"))
    assert (second["misses"], second["hits"]) == (0, first["misses"])
    assert built == []
    assert second["loss"] == first["loss"]
    record = json.loads((tmp_path / "else" / "where" / LAST_RUN).read_text())
    assert (record["hits"], record["misses"]) == (second["hits"], 0)
