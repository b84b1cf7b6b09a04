"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onegraph.checkpoint import atomic_write, atomic_write_all, leftovers
from onegraph.checkpoint.atomic import make_folder
from onegraph.errors import OutputError

Usage = namedtuple("Usage", "total used free")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def failing_with(number: int, *, after: bytes = b"half"):
    def write(path: Path) -> None:
        path.write_bytes(after)
        raise OSError(number, os.strerror(number))

    return write


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "adapter.bin"
    path.write_bytes(b"old")
    seen = []

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"new")
        seen.append((temporary.parent, path.read_bytes()))

    atomic_write(path, write)
    assert seen == [(tmp_path, b"old")], "the old file must be whole until the new one is, in the same folder"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["adapter.bin"]


def test_a_link_keeps_pointing_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    atomic_write(tmp_path / "link", lambda path: path.write_bytes(b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk-full", "quota"])
def test_a_full_disk_keeps_the_old_file_and_says_what_is_needed(tmp_path: Path, number: int) -> None:
    path = tmp_path / "adapter.bin"
    path.write_bytes(b"old")
    with pytest.raises(OutputError) as raised:
        atomic_write(path, failing_with(number), num_bytes=1234)
    assert raised.value.code == "disk-full"
    message = str(raised.value)
    assert str(path) in message
    assert "1,234 bytes" in message
    assert "are free there" in message
    assert "The old file is still there" in message
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["adapter.bin"]


def test_too_little_free_space_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 990, 10))
    with pytest.raises(OutputError) as raised:
        atomic_write(tmp_path / "adapter.bin", lambda path: pytest.fail("written"), num_bytes=11)
    assert raised.value.code == "disk-full"
    assert "11 bytes" in str(raised.value)
    assert "10 bytes are free" in str(raised.value)
    assert "There was no file of that name before" in str(raised.value)
    atomic_write(tmp_path / "adapter.bin", lambda path: path.write_bytes(b"0123456789"), num_bytes=10)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a file system of 64 KiB, through safetensors and torch.save, which report it with exceptions of their own."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user can't mount a small file system")
    try:
        path = place / "adapter.safetensors"
        path.write_bytes(b"old")
        large = {"weight": torch.zeros(100_000)}
        for write in (lambda temporary: save_file(large, temporary), lambda temporary: torch.save(large, temporary)):
            with pytest.raises(OutputError) as raised:
                atomic_write(path, write)
            assert raised.value.code == "disk-full", str(raised.value)
            assert path.read_bytes() == b"old"
            assert names(place) == ["adapter.safetensors"]
    finally:
        # Lazily: torch.save leaves its file open when the disk is full.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_an_error_of_the_writer_itself_stays_what_it_is(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("not the disk's fault")

    with pytest.raises(ValueError, match="not the disk's fault"):
        atomic_write(tmp_path / "adapter.bin", write)
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS], ids=["denied", "read-only"])
def test_permission_denied(tmp_path: Path, number: int) -> None:
    with pytest.raises(OutputError) as raised:
        atomic_write(tmp_path / "adapter.bin", failing_with(number))
    assert raised.value.code == "not-writable"
    assert names(tmp_path) == []


def test_a_folder_that_is_not_writable_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(OutputError) as raised:
        atomic_write(tmp_path / "adapter.bin", lambda path: pytest.fail("written"))
    assert raised.value.code == "not-writable"


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", denied)  # root may look everywhere
    with pytest.raises(OutputError) as raised:
        atomic_write(tmp_path / "adapter.bin", lambda path: pytest.fail("written"))
    assert raised.value.code == "not-writable"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as raised:
        atomic_write(tmp_path / "absent" / "adapter.bin", lambda path: pytest.fail("written"))
    assert raised.value.code == "folder-missing"
    assert f"mkdir -p {tmp_path / 'absent'}" in str(raised.value)


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as raised:
        atomic_write(tmp_path, lambda path: pytest.fail("written"))
    assert raised.value.code == "is-a-folder"


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError) as raised:
        make_folder(tmp_path / "file" / "below")
    assert raised.value.code == "is-a-file"


def test_several_files_change_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = tmp_path / "config.json", tmp_path / "weights.bin"
    first.write_bytes(b"old config")
    second.write_bytes(b"old weights")
    with pytest.raises(OutputError):
        atomic_write_all({first: lambda path: path.write_bytes(b"new"), second: failing_with(errno.ENOSPC)})
    assert (first.read_bytes(), second.read_bytes()) == (b"old config", b"old weights")
    assert names(tmp_path) == ["config.json", "weights.bin"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter.bin"
    path.write_bytes(b"old")
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from onegraph.checkpoint.atomic import atomic_write

        def write(path):
            path.write_bytes(b"half of the new")
            os.kill(os.getpid(), signal.SIGKILL)

        atomic_write(Path(sys.argv[1]), write)
        """
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False
    )
    assert finished.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = (tmp_path / name for name in names(tmp_path) if name != path.name)
    assert left.read_bytes() == b"half of the new"
    place = leftovers._place()
    kept = [
        ".adapter.bin.tmp",  # not ours
        ".adapter.bin.12-zz.tmp",
        f".other.bin.{os.getppid()}-{place}00000001.tmp",  # of a process that runs
        f".other.bin.{finished_process()}-0123456789abcdef.tmp",  # of another machine
    ]
    old = [f".other.bin.{finished_process()}-{place}00000002.tmp", f".other.bin.{os.getppid()}-0123456789abcdff.tmp", ".x.7-01234567.tmp"]
    for name in kept + old:
        (tmp_path / name).write_bytes(b"")
    for name in old[1:]:  # of other machines, or of a version that didn't say where, and nobody has written to them since
        os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    (tmp_path / f".folder.{finished_process()}-{place}00000003.tmp").mkdir()
    seen: list[str] = []

    def write(temporary: Path) -> None:
        leftovers._looked.clear()
        atomic_write(tmp_path / "another.bin", lambda inner: inner.write_bytes(b"2"))  # of this process, while the first one is written
        seen.append(temporary.name)
        temporary.write_bytes(b"1")

    atomic_write(path, lambda temporary: (temporary.write_bytes(b""), write(temporary)))
    assert seen
    assert path.read_bytes() == b"1"
    assert sorted(name for name in names(tmp_path) if not name.startswith(".folder")) == sorted([path.name, "another.bin", *kept])
    assert len(names(tmp_path)) == len(kept) + 3


def finished_process() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid
