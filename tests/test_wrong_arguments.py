"""What the public functions say when they are given another kind of thing than they take; nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onegraph as og
from onegraph import peft
from onegraph.errors import OnegraphError


@pytest.fixture
def model() -> nn.Module:
    found = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    og.attach(found, og.LoRA(rank=2), targets="all-linear")
    return found


def said(code: str, call: Callable[[], Any]) -> str:
    with pytest.raises(OnegraphError) as raised:
        call()
    assert raised.value.code == code
    return str(raised.value)


def test_what_is_no_model(model: nn.Module, tmp_path: Path) -> None:
    adapters = og.adapters_of(model)
    assert adapters is not None
    file = tmp_path / "adapter.safetensors"
    og.save(adapters, file)
    calls: list[Callable[[Any], Any]] = [
        og.compile,
        og.adapters_of,
        lambda given: og.load(given, file),
        lambda given: og.attach(given, og.LoRA(), targets="all-linear"),
    ]
    for call in calls:
        assert "its .model is one" in said("not-a-model", lambda call=call: call(adapters))
        for wrong in (None, "model", file):
            said("not-a-model", lambda call=call, wrong=wrong: call(wrong))
    said("not-a-model", lambda: og.load(file, model))  # swapped
    said("not-a-model", lambda: og.save(None, file))


def test_saving_takes_the_model_too(model: nn.Module, tmp_path: Path) -> None:
    og.save(og.adapters_of(model), tmp_path / "one.safetensors")
    og.save(model, tmp_path / "other.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    around = nn.ModuleDict({"inner": model})
    assert "its part 'inner'" in said("no-adapter", lambda: og.save(around, tmp_path / "none.safetensors"))
    assert "attach" in said("no-adapter", lambda: og.save(nn.Linear(2, 2), tmp_path / "none.safetensors"))
    assert not (tmp_path / "none.safetensors").exists()


def test_what_is_no_method(model: nn.Module) -> None:
    adapters = og.adapters_of(model)
    plain = nn.Sequential(nn.Linear(8, 8))
    for wrong in (og.LoRA, "lora"):
        for call in (
            lambda wrong=wrong: og.attach(plain, wrong, targets="all-linear"),
            lambda wrong=wrong: adapters.add("b", wrong),
            lambda wrong=wrong: adapters.reserve(method=wrong),
            lambda wrong=wrong: adapters.add("b", og.LoRA(), overrides={"0": wrong}),
            lambda wrong=wrong: adapters.add("b", og.LoRA(), also={"0": wrong}),
        ):
            assert "LoRA() is one" in said("not-a-method", call)
    assert "a Sequential is not" in said("not-a-method", lambda: og.attach(og.LoRA(), plain, targets="all-linear"))
    assert list(adapters.names) == ["default"]
    assert og.adapters_of(plain) is None


def test_what_is_no_name(model: nn.Module) -> None:
    adapters = og.adapters_of(model)

    def in_rows(names: Any) -> None:
        with adapters.rows(names):
            pass

    for wrong in (3, ["default"], {"default"}, og.LoRA()):
        said("unknown-adapter", lambda wrong=wrong: adapters.use(wrong))
        said("unknown-adapter", lambda wrong=wrong: adapters.delete(wrong))
        said("unknown-adapter", lambda wrong=wrong: in_rows([wrong]))
    said("unknown-adapter", lambda: adapters.merge(3))
    said("unknown-adapter", lambda: adapters.merge([["default"]]))
    for wrong in (3, "default", {"default"}, iter(["default"])):
        said("rows", lambda wrong=wrong: in_rows(wrong))
    assert adapters.active == "default"
    assert not adapters.merged


def test_what_are_no_tensors_of_an_adapter(model: nn.Module) -> None:
    adapters = og.adapters_of(model)
    before = {path: {name: value.clone() for name, value in own.items()} for path, own in adapters.tensors("default").items()}
    for wrong in (3, {"0": 3}, {"0": {"up": 3}}, [torch.ones(8, 2)]):
        said("tensor-unknown", lambda wrong=wrong: adapters.load_tensors("default", wrong, partial=True))
    for number in (float("nan"), float("inf")):
        broken = {"0": {"up": torch.ones(8, 2)}, "1": {"up": torch.full((8, 2), number)}}
        assert "1.up" in said("not-finite", lambda broken=broken: adapters.load_tensors("default", broken, partial=True))
    for path, own in adapters.tensors("default").items():
        assert all(torch.equal(value, before[path][name]) for name, value in own.items())
    for nothing in (model, adapters, {}, {"0": {}}):
        said("allocator-tensors", lambda nothing=nothing: og.orthogonality(nothing))


def test_what_the_calls_of_peft_do_not_take(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(8, 8))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(r=2, target_modules=["0"]))
    model.save_pretrained(tmp_path)
    calls: dict[Callable[[], Any], str] = {
        lambda: peft.get_peft_model(None, config): "not-a-model",
        lambda: peft.inject_adapter_in_model(config, None): "not-a-model",
        lambda: peft.PeftModel.from_pretrained(None, tmp_path): "not-a-model",
        lambda: peft.prepare_model_for_kbit_training(None): "not-a-model",
        lambda: peft.get_peft_model(plain, "lora"): "peft-config",
        lambda: peft.get_peft_model(plain, peft.LoraConfig): "peft-config",
        lambda: peft.inject_adapter_in_model(plain, config): "peft-config",
        lambda: model.add_adapter(config, "b"): "peft-config",
        lambda: peft.PeftModel.from_pretrained(plain, None): "peft-repository",
        lambda: model.load_adapter(3, "b"): "peft-repository",
        lambda: peft.PeftConfig.from_pretrained(plain): "peft-repository",
        lambda: peft.set_peft_model_state_dict(model, 3): "peft-usage",
        lambda: peft.cast_mixed_precision_params(model, "half"): "dtype",
        lambda: model.add_weighted_adapter("default", 1.0, "c"): "peft-combination",
    }
    for call, code in calls.items():
        said(code, call)
    assert og.adapters_of(plain) is None
    assert list(model.peft_config) == ["default"]
    model.merge_adapter("default")  # a name alone: not seven names of a letter
    assert og.adapters_of(model.get_base_model()).merged == ["default"]
