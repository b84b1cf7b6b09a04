"""Files that are no adapters, or damaged ones: each is refused with its own code, and the model stays as it was."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from onegraph import LoRA, adapters_of, attach
from onegraph.checkpoint import file_hash, legacy_file_hash, load, read
from onegraph.checkpoint.container import cast, read_container, serialise
from onegraph.errors import CheckpointError, NumericsError

KOHYA = {
    "lora_unet_block_proj.lora_down.weight": torch.ones(2, 4),
    "lora_unet_block_proj.lora_up.weight": torch.ones(4, 2),
    "lora_unet_block_proj.alpha": torch.tensor(2.0),
}


def model() -> nn.Module:
    return nn.ModuleDict({"block": nn.ModuleDict({"proj": nn.Linear(4, 4)})})


def whole(path: Path) -> None:
    save_file(KOHYA, path)


def truncated_weights(path: Path) -> None:
    path.write_bytes(save(KOHYA)[:-5])


def truncated_header(path: Path) -> None:
    path.write_bytes(save(KOHYA)[:60])


def torch_pickle(path: Path) -> None:
    torch.save(KOHYA, path)


def plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))


def not_finite(path: Path) -> None:
    save_file({**KOHYA, "lora_unet_block_proj.lora_up.weight": torch.full((4, 2), float("nan"))}, path)


def infinite_alpha(path: Path) -> None:
    save_file({**KOHYA, "lora_unet_block_proj.alpha": torch.tensor(float("inf"))}, path)


def overlapping(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def base_model(path: Path) -> None:
    save_file({"model.diffusion_model.out.2.weight": torch.ones(2)}, path)


DAMAGED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "empty": ("file-empty", lambda path: path.write_bytes(b"")),
    "web page": ("file-is-html", lambda path: path.write_text("\n<!DOCTYPE html><html><title>Log in</title></html>")),
    "pickle of torch.save": ("file-is-pickle", torch_pickle),
    "plain pickle": ("file-is-pickle", plain_pickle),
    "git lfs pointer": (
        "file-is-pointer",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\nsize 9"),
    ),
    "picture": ("file-not-safetensors", lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))),
    "few bytes": ("file-not-safetensors", lambda path: path.write_bytes(b"abc")),
    "truncated weights": ("file-truncated", truncated_weights),
    "truncated header": ("file-truncated", truncated_header),
    "header that lies": ("file-not-safetensors", overlapping),
    "NaN weights": ("weights-not-finite", not_finite),
    "infinite alpha": ("weights-not-finite", infinite_alpha),
    "base model": ("file-is-base-model", base_model),
    "other tensors": ("adapter-format", lambda path: save_file({"weight": torch.ones(2)}, path)),
    "no tensors": ("adapter-format", lambda path: save_file({}, path)),
    "folder without adapter": ("file-missing", lambda path: path.mkdir()),
    "nothing there": ("file-missing", lambda path: None),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_no_adapter_is_refused_by_its_kind(tmp_path: Path, kind: str) -> None:
    code, write = DAMAGED[kind]
    path = tmp_path / "adapter.safetensors"
    write(path)
    fresh = model()
    with pytest.raises(CheckpointError) as raised:
        load(fresh, path)
    assert raised.value.code == code, str(raised.value)
    assert str(path) in str(raised.value)
    assert raised.value.hint
    assert adapters_of(fresh) is None
    assert type(fresh["block"]["proj"]) is nn.Linear  # type: ignore[index]


def test_the_undamaged_file_loads(tmp_path: Path) -> None:
    """The other side of the test above: it is the damage that is refused."""
    whole(tmp_path / "adapter.safetensors")
    adapters = load(model(), tmp_path / "adapter.safetensors")
    assert list(adapters.layers) == ["block.proj"]


def test_a_refused_file_leaves_other_adapters_alone(tmp_path: Path) -> None:
    fresh = model()
    adapters = attach(fresh, LoRA(rank=2), targets=["proj"], name="first")
    before = {key: value.clone() for key, value in adapters.parameters().items()}
    not_finite(tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError):
        adapters.load(tmp_path / "adapter.safetensors", name="second")
    assert adapters.names == ["first"]
    assert adapters.active == "first"
    assert all(torch.equal(before[key], value) for key, value in adapters.parameters().items())


@pytest.mark.parametrize("length", [0x3C, 0x0280, 0x0480])
def test_a_header_length_that_looks_like_another_kind_of_file_is_read(tmp_path: Path, length: int) -> None:
    """0x3c is "<", 0x80 0x02 begins a pickle: it is the eighth byte that tells."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(length)
    assert len(header) == length or length == 0x3C
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert torch.equal(read_container(path).tensors["a"], torch.zeros(1))


def test_the_same_contents_give_the_same_bytes_in_any_order() -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
    metadata = {f"key {number}": "ü" * number for number in range(20)}
    data = serialise(tensors, metadata)
    backwards = serialise(dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert data == backwards
    assert (8 + int.from_bytes(data[:8], "little")) % 8 == 0


def test_serialised_tensors_are_read_back(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3).t(), "a": torch.ones(2, dtype=torch.bfloat16)}
    (tmp_path / "file.safetensors").write_bytes(serialise(tensors, {"ü": "'\"\n"}))
    container = read_container(tmp_path / "file.safetensors")
    assert container.metadata == {"ü": "'\"\n"}
    assert all(torch.equal(container.tensors[name], tensor) for name, tensor in tensors.items())


def test_tied_and_overlapping_tensors_are_written_each(tmp_path: Path) -> None:
    memory = torch.arange(6.0)
    tensors = {"a": memory[:4], "b": memory[2:], "c": memory[:4]}
    (tmp_path / "file.safetensors").write_bytes(serialise(tensors, {}))
    container = read_container(tmp_path / "file.safetensors")
    assert all(torch.equal(container.tensors[name], tensor) for name, tensor in tensors.items())


def test_hashes_of_a_base_model_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "model.safetensors").write_bytes(data)
    assert file_hash(tmp_path / "model.safetensors") == hashlib.sha256(data).hexdigest()
    assert legacy_file_hash(tmp_path / "model.safetensors") == hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8]


def test_nan_weights_are_not_written() -> None:
    with pytest.raises(NumericsError) as raised:
        cast({"good": torch.ones(1), "bad": torch.tensor([float("nan")])}, None, "adapter")
    assert raised.value.code == "not-finite"
    assert "bad" in str(raised.value)


def test_weights_beyond_half_precision_are_not_written_as_infinity() -> None:
    tensors = {"large": torch.tensor([1e6])}
    with pytest.raises(NumericsError) as raised:
        cast(tensors, torch.float16, "adapter")
    assert raised.value.code == "overflow"
    assert torch.isfinite(cast(tensors, torch.bfloat16, "adapter")["large"]).all()


def test_an_unknown_format_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, format="koyha")
    assert raised.value.code == "adapter-format"
    assert "'kohya'" in str(raised.value)


def test_a_format_that_is_not_the_files_own_is_refused(tmp_path: Path) -> None:
    whole(tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match="'kohya', not 'native'"):
        read(tmp_path / "adapter.safetensors", format="native")
