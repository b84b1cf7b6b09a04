"""Pickled checkpoints: weights come out, framework objects are skipped, everything else is refused by name, nothing ever runs."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onegraph.errors import ModelFileError
from onegraph.training.diffusion.pickles import read_pickled_weights

WEIGHTS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.randn(3, 2, dtype=torch.float16),
    "c.weight": torch.randn(4, dtype=torch.bfloat16),
    "d.count": torch.tensor(7),
    "e.empty": torch.empty(0, 3),
}


class Runs:
    """Pickles as a call of ``called`` with ``arguments``: what a hostile file does."""

    def __init__(self, called: Any, *arguments: Any) -> None:
        self.called, self.arguments = called, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.called, self.arguments


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def lightning() -> Iterator[Any]:
    """A class that says it is pytorch_lightning's, there while pickling only; setting its state would leave a trace."""
    name = "pytorch_lightning.callbacks.model_checkpoint"
    modules = ["pytorch_lightning", "pytorch_lightning.callbacks", name]
    for module in modules:
        sys.modules[module] = types.ModuleType(module)

    class ModelCheckpoint:
        ran: list[str] = []  # noqa: RUF012 - shared on purpose: it is the canary

        def __init__(self) -> None:
            self.monitor = "val/loss"

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.ran.append("setstate")

    ModelCheckpoint.__module__, ModelCheckpoint.__qualname__ = name, "ModelCheckpoint"
    sys.modules[name].ModelCheckpoint = ModelCheckpoint  # type: ignore[attr-defined]
    yield ModelCheckpoint
    for module in modules:
        sys.modules.pop(module, None)


def write(path: Path, content: Any, *, legacy: bool = False, protocol: int = 2) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    return path


def assert_weights(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] = WEIGHTS) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("nesting", ["flat", "state_dict", "model", "state_dict of OrderedDict"])
def test_weights_come_out(tmp_path: Path, nesting: str, legacy: bool, protocol: int) -> None:
    contents: dict[str, Any] = {
        "flat": WEIGHTS,
        "state_dict": {"state_dict": WEIGHTS, "epoch": 3},
        "model": {"model": WEIGHTS, "optimizer": {"state": {0: {"exp_avg": torch.zeros(9)}}}},
        "state_dict of OrderedDict": {"state_dict": OrderedDict(WEIGHTS)},
    }
    assert_weights(read_pickled_weights(write(tmp_path / "m.ckpt", contents[nesting], legacy=legacy, protocol=protocol)).tensors)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_views_parameters_and_shared_storage(tmp_path: Path, legacy: bool) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    content = {"whole": whole, "turned": whole.t(), "row": whole[1], "parameter": torch.nn.Parameter(torch.ones(2))}
    tensors = read_pickled_weights(write(tmp_path / "m.ckpt", content, legacy=legacy)).tensors
    assert_weights(tensors, {**content, "parameter": torch.ones(2)})
    assert tensors["whole"].untyped_storage().data_ptr() == tensors["turned"].untyped_storage().data_ptr()


def test_what_frameworks_leave_beside_the_weights_is_skipped(tmp_path: Path, lightning: Any) -> None:
    content = {
        "state_dict": WEIGHTS,
        "callbacks": {lightning: {"best": torch.tensor(1.0), "object": lightning()}},
        "hyper_parameters": {"lr": np.float64(1e-4), "path": Path("x"), "when": OrderedDict(a=1), "flags": {1, 2}},
        "array": np.arange(4),
        "optimizer_states": [{"param_groups": [{"lr": 0.1}]}],
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "raw": b"bytes",
    }
    path = write(tmp_path / "m.ckpt", content)
    for module in [name for name in sys.modules if name.startswith("pytorch_lightning")]:
        del sys.modules[module]
    weights = read_pickled_weights(path)
    assert_weights(weights.tensors)
    assert "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint" in weights.skipped
    assert lightning.ran == []
    assert not any(name.startswith("pytorch_lightning") for name in sys.modules)


def test_the_skipped_object_would_have_run_in_pythons_unpickler(lightning: Any) -> None:
    pickle.loads(pickle.dumps(lightning()))
    assert lightning.ran == ["setstate"]


HOSTILE = {
    "os.system": (os.system, "posix.system"),
    "eval": (eval, "builtins.eval"),
    "exec": (exec, "builtins.exec"),
    "getattr": (getattr, "builtins.getattr"),
    "open": (open, "io.open"),
    "__import__": (__import__, "builtins.__import__"),
    "importlib": (importlib.import_module, "importlib.import_module"),
    "subprocess": (subprocess.check_call, "subprocess.check_call"),
    "another pickle": (pickle.loads, "pickle.loads"),
    "torch.load": (torch.load, "torch.serialization.load"),
    "storage from bytes": (torch.storage._load_from_bytes, "torch.storage._load_from_bytes"),
    "numpy loader": (np.load, "numpy.load"),
    "the trainer's own class": (Runs, "test_pickles.Runs"),
}


@pytest.mark.parametrize("place", ["beside", "among the weights", "as a key", "at the top", "after the weights, file cut"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_would_run_something_is_refused_by_name(tmp_path: Path, canary: Path, name: str, place: str) -> None:
    called, full_name = HOSTILE[name]
    hostile = Runs(called, f"touch {canary}")
    content: dict[str, Any] = {
        "beside": {"state_dict": WEIGHTS, "callbacks": [hostile]},
        "among the weights": {"state_dict": {**WEIGHTS, "z": hostile}},
        "as a key": {"state_dict": WEIGHTS, hostile: 1},
        "at the top": hostile,
        "after the weights, file cut": {"state_dict": WEIGHTS, "z": hostile},
    }
    path = write(tmp_path / "m.ckpt", content[place], legacy=place.endswith("cut"))
    if place.endswith("cut"):
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ModelFileError) as caught:
        read_pickled_weights(path)
    assert caught.value.code == "pickle-runs-code"
    assert full_name in caught.value.what
    assert not canary.exists()


def test_the_hostile_file_does_run_in_pythons_unpickler(canary: Path) -> None:
    pickle.loads(pickle.dumps(Runs(os.system, f"touch {canary}")))
    assert canary.exists()


RAW = {
    "GLOBAL and REDUCE": b"cposix\nsystem\n(S'touch CANARY'\ntR.",
    "INST": b"(S'touch CANARY'\niposix\nsystem\n.",
    "OBJ": b"(cposix\nsystem\nS'touch CANARY'\no.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch CANARY\x85R.",
    "NEWOBJ": b"\x80\x02cposix\nsystem\nX\x0c\x00\x00\x00touch CANARY\x85\x81.",
    "python 2 name": b"c__builtin__\neval\n(S'1'\ntR.",
    "only named": b"\x80\x02cposix\nsystem\n.",
    "through a framework": b"cpytorch_lightning.utilities\nos.system\n(S'touch CANARY'\ntR.",
    "module of a framework": b"cpytorch_lightning.os\nsystem\n(S'touch CANARY'\ntR.",
    "extension registry": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("container", ["bare", "zip"])
def test_every_way_to_name_a_function_is_refused(tmp_path: Path, canary: Path, name: str, container: str) -> None:
    program = RAW[name].replace(b"CANARY", b"CANARY"[:6])
    path = tmp_path / "m.ckpt"
    if container == "bare":
        path.write_bytes(program)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", program)
    with pytest.raises(ModelFileError) as caught:
        read_pickled_weights(path)
    assert caught.value.code == "pickle-runs-code"
    assert ("eval" if "python 2" in name else "extension" if "extension" in name else "system") in str(caught.value)
    assert not (Path.cwd() / "CANARY").exists()


def _doubled(times: int) -> bytes:
    """A tuple that holds the one before twice, so many times over: endless to whoever hashes or prints it."""
    return b")" + b"".join(b"q" + bytes([place]) + b"h" + bytes([place]) + b"\x86" for place in range(times))


ENDLESS = {
    "a key": (b"\x80\x02}" + _doubled(60) + b"K\x01s.", "no-weights"),
    "a name": (b"\x80\x04" + _doubled(60) + b"\x8c\x01a\x93.", "model-file-damaged"),
    "a text": (b"\x80\x02c_codecs\nencode\n" + _doubled(60) + b"\x85R.", "no-weights"),
    "a storage's type": (b"\x80\x02(X\x07\x00\x00\x00storage" + _doubled(60) + b"K\x01K\x01K\x01tQ.", "model-file-damaged"),
    "a storage's name": (
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + _doubled(60) + b"K\x01K\x01tQ.",
        "model-file-damaged",
    ),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_that_grows_without_end_is_not_followed(tmp_path: Path, name: str) -> None:
    program, code = ENDLESS[name]
    path = tmp_path / "m.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    with pytest.raises(ModelFileError) as caught:
        read_pickled_weights(path)
    assert caught.value.code == code


@pytest.mark.timeout(10)
def test_a_dict_that_holds_itself_under_the_name_of_a_state_dict_is_read_once(tmp_path: Path) -> None:
    content: dict[str, Any] = {"w": torch.ones(2)}
    content["model"] = content
    assert list(read_pickled_weights(write(tmp_path / "m.ckpt", content)).tensors) == ["w"]


def test_a_member_unpacks_to_no_more_than_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.ckpt", {"w": torch.ones(2)})
    source = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for info in archive.infolist():
            content = archive.read(info)
            packed.writestr(info.filename, content + bytes(1_000_000) if "data/" in info.filename else content)
    tensor = read_pickled_weights(path).tensors["w"]
    assert torch.equal(tensor, torch.ones(2))
    assert tensor.untyped_storage().nbytes() == 8


def test_all_refused_names_are_listed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "m.ckpt", {"a": Runs(eval, "1"), "b": Runs(os.system, "true")})
    with pytest.raises(ModelFileError, match=r"builtins\.eval, posix\.system"):
        read_pickled_weights(path)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.95, 0.999])
def test_a_truncated_file_is_an_error_at_every_length(tmp_path: Path, legacy: bool, kept: float) -> None:
    path = write(tmp_path / "m.ckpt", {"state_dict": {f"w{number}": torch.randn(64) for number in range(20)}}, legacy=legacy)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelFileError) as caught:
        read_pickled_weights(path)
    assert caught.value.code in {"model-file-truncated", "model-file-damaged"}


def test_a_tensor_that_reaches_past_its_storage_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.ckpt", {"w": torch.arange(4.0)})
    source = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as altered:
        for info in archive.infolist():
            content = archive.read(info)
            if info.filename.endswith("data.pkl"):
                assert content.count(b"K\x04\x85") == 1
                content = content.replace(b"K\x04\x85", b"K\x7f\x85")
            altered.writestr(info.filename, content)
    with pytest.raises(ModelFileError, match=r"size \(127,\) reaches past its storage of 4 elements"):
        read_pickled_weights(path)


def test_a_recompressed_archive_still_loads(tmp_path: Path) -> None:
    path = write(tmp_path / "m.ckpt", {"state_dict": WEIGHTS})
    source = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for info in archive.infolist():
            packed.writestr(info.filename, archive.read(info))
    assert_weights(read_pickled_weights(path).tensors)


@pytest.mark.parametrize(
    ("content", "code"),
    [({"epoch": 3}, "no-weights"), ({}, "no-weights"), ([torch.ones(2)], "no-weights"), (torch.ones(2), "no-weights")],
    ids=["numbers", "empty dict", "a list", "one tensor"],
)
def test_a_file_without_named_weights_says_so(tmp_path: Path, content: Any, code: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_pickled_weights(write(tmp_path / "m.ckpt", content))
    assert caught.value.code == code


def test_a_zip_of_something_else_and_a_plain_pickle_say_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ModelFileError, match=r"is a zip archive, not a model") as caught:
        read_pickled_weights(path)
    assert "readme.txt" in str(caught.value)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelFileError, match="not one that torch wrote"):
        read_pickled_weights(path)
