"""What a user of a language model may give by mistake: a clear error with what to do, and the model bit for bit as it was."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import onegraph as og
from onegraph.errors import OnegraphError
from onegraph.peft import LoraConfig, PeftModel, get_peft_model

IDS = torch.arange(6)[None]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ["q_proj", "v_proj"]
RAN: list[str] = []


class Evil:
    """Unpickled, it would leave a trace."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return RAN.append, ("ran",)


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def saved(model: nn.Module, folder: Path, targets: list[str]) -> Path:
    """A PEFT folder of a LoRA of ours with random weights."""
    adapters = og.attach(model, og.LoRA(rank=4, alpha=8), targets=targets)
    with torch.no_grad():
        for parameter in adapters.parameters().values():
            parameter.normal_()
    adapters.save(folder, format="peft")
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama(), tmp_path_factory.mktemp("good") / "adapter", TARGETS)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "adapter"))


def config(folder: Path, **fields: Any) -> None:
    """Changes fields of the configuration; None takes one away."""
    values = {**json.loads((folder / CONFIG).read_text()), **fields}
    (folder / CONFIG).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def first_with(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(own: dict[str, Tensor]) -> dict[str, Tensor]:
        next(iter(own.values()))[0, 0] = value
        return own

    return change


def rewritten(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def edited(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return edit


def evil(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"weight": Evil()}, folder / "adapter_model.bin")


def of_gpt2(folder: Path) -> None:
    shutil.rmtree(folder)
    saved(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=12, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0)), folder, ["c_attn"])
    config(folder, base_model_name_or_path="openai-community/gpt2")


def of_the_inside(folder: Path) -> None:
    shutil.rmtree(folder)
    saved(llama().model, folder, TARGETS)


def of_a_wider_one(folder: Path) -> None:
    shutil.rmtree(folder)
    saved(llama(hidden_size=32), folder, TARGETS)


# What is wrong -> how to make it, the code, what the message must say.
CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "another architecture": (
        of_gpt2,
        "adapter-architecture",
        r"(?s)transformer\.h\.0\.attn\.c_attn\n.*and 2 more.*openai-community/gpt2.*GPT-2 \(at least 12 layers, 16 wide",
    ),
    "the model without its head": (of_the_inside, "adapter-architecture", r"load it onto model\.model"),
    "another size": (of_a_wider_one, "adapter-shape", r"down is \(4, 32\) in the file, the layer needs \(4, 16\)(?s:.*)2 layers, 16 wide"),
    "truncated": (edited(lambda content: content[:-100]), "file-truncated", "stopped early"),
    "truncated in its header": (edited(lambda content: content[:60]), "file-truncated", "its header alone"),
    "two files in one": (edited(lambda content: content * 2), "file-not-safetensors", "longer than its header says"),
    "empty": (rewritten(WEIGHTS, b""), "file-empty", "0 bytes"),
    "a web page": (rewritten(WEIGHTS, b"<!DOCTYPE html><html>401</html>"), "file-is-html", "web page"),
    "a pointer of Git LFS": (
        rewritten(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "file-is-pointer",
        "git lfs pull",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "file-missing", "does not exist"),
    "a number that is a word": (lambda folder: config(folder, r="sixteen"), "adapter-config", r"r = 'sixteen': a number was expected"),
    "a negative rank": (lambda folder: config(folder, r=-1), "adapter-config", "r = -1"),
    "a misspelt field": (lambda folder: config(folder, lora_alpha=None, lora_alhpa=8), "adapter-config", "Did you mean 'lora_alpha'"),
    "two wrong fields": (
        lambda folder: config(folder, r="x", use_dora="perhaps"),
        "adapter-config",
        r"(?s)2 fields.*r = 'x'.*use_dora = 'perhaps'",
    ),
    "another rank than the weights": (lambda folder: config(folder, r=8), "adapter-config", "r is 8 in the configuration"),
    "a misspelt method": (lambda folder: config(folder, peft_type="LORRA"), "adapter-unsupported", "Did you mean 'LORA'"),
    "a method that isn't here": (
        lambda folder: config(folder, peft_type="PROMPT_TUNING"),
        "adapter-unsupported",
        "a method of PEFT that is not here",
    ),
    "broken JSON": (rewritten(CONFIG, b"{broken"), "adapter-config", "can't be read"),
    "a list for a configuration": (rewritten(CONFIG, b"[]"), "adapter-config", "a JSON object was expected"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "adapter-config", "adapter_config.json does not exist"),
    "NaN": (lambda folder: tensors(folder, first_with(float("nan"))), "weights-not-finite", "1 of 8 tensors"),
    "infinity": (lambda folder: tensors(folder, first_with(float("-inf"))), "weights-not-finite", "1 of 8 tensors"),
    "whole numbers": (
        lambda folder: tensors(folder, lambda own: {key: value.to(torch.int8) for key, value in own.items()}),
        "weights-not-float",
        "is int8",
    ),
    "truth values": (
        lambda folder: tensors(folder, lambda own: {key: value > 0 for key, value in own.items()}),
        "weights-not-float",
        "is bool",
    ),
    "half of a layer": (lambda folder: tensors(folder, lambda own: dict(list(own.items())[1:])), "adapter-incomplete", "lack a tensor"),
    "code in a .bin": (evil, "file-is-pickle", "it names "),
    "an index without its files": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "x")
            and (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
        ),
        "file-shards",
        "b.safetensors, which isn't there",
    ),
    "an index that leads elsewhere": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "x") and (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "../b"}}')
        ),
        "file-shards",
        "no file beside it",
    ),
}


def state(model: nn.Module) -> tuple[dict[str, Tensor], Tensor, list[str], dict[str, bool], list[str]]:
    """All that a failed load could have touched."""
    with torch.no_grad():
        logits = model(IDS).logits
    adapters = og.adapters_of(model if not isinstance(model, PeftModel) else model.get_base_model())
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        logits,
        [f"{name} {type(module).__name__}" for name, module in model.named_modules()],
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        [] if adapters is None else [*adapters.names, str(adapters.active)],
    )


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]


def doors() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[nn.Module, Path], object]]]:
    """The ways in: name, the model, loading."""

    def adapted() -> nn.Module:
        model = llama()
        og.attach(model, og.LoRA(rank=2), targets=["q_proj"], name="first")
        return model

    yield "load", llama, lambda model, path: og.load(model, path)
    yield "load a second", adapted, lambda model, path: og.load(model, path, name="second")
    yield "from_pretrained", llama, lambda model, path: PeftModel.from_pretrained(model, str(path))
    yield "load_adapter", lambda: get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"])), _load_adapter


def _load_adapter(model: nn.Module, path: Path) -> None:
    assert isinstance(model, PeftModel)
    model.load_adapter(str(path), "second")


DOORS = {name: (make, load) for name, make, load in doors()}


@pytest.mark.parametrize("case", CASES)
def test_a_clear_error_and_the_model_as_it_was(folder: Path, case: str) -> None:
    spoil, code, words = CASES[case]
    spoil(folder)
    for make, load in DOORS.values():
        model = make()
        before = state(model)
        with pytest.raises(OnegraphError) as caught:
            load(model, folder)
        assert caught.value.code == code, str(caught.value)
        assert re.search(words, str(caught.value)), str(caught.value)
        assert caught.value.hint
        assert_same(before, state(model))
    assert RAN == []


def test_the_files_are_good_before_they_are_spoilt(folder: Path) -> None:
    """The negative control: every way in takes what was not spoilt, and the outputs change."""
    plain = state(llama())[1]
    for make, load in DOORS.values():
        model = make()
        before = state(model)
        loaded = load(model, folder)
        if isinstance(loaded, PeftModel):
            model = loaded
        elif isinstance(model, PeftModel):
            model.set_adapter("second")
        elif len(before[4]) > 0:
            found = og.adapters_of(model)
            assert found is not None
            found.use("second")
        assert not torch.equal(state(model)[1], plain)


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda own: {prefix + key: value for key, value in own.items()}


@pytest.mark.parametrize(
    "change",
    [
        prefixed("_orig_mod."),
        prefixed("module."),
        prefixed("module._orig_mod."),
        lambda own: {key.replace("base_model.model.", "base_model.model._orig_mod."): value for key, value in own.items()},
        lambda own: {key.replace(".self_attn.", "._orig_mod.self_attn."): value for key, value in own.items()},
        lambda own: {key.removeprefix("base_model.model."): value for key, value in own.items()},
        lambda own: {
            key.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."): value for key, value in own.items()
        },
    ],
    ids=["_orig_mod", "module", "both", "_orig_mod inside", "_orig_mod in a block", "no prefix", "the adapter's name"],
)
def test_keys_with_odd_prefixes_mean_what_they_meant(
    good: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    expected, found = llama(), llama()
    og.load(expected, good)
    tensors(folder, change)
    og.load(found, folder)
    assert torch.equal(state(expected)[1], state(found)[1])
    assert not torch.equal(state(llama())[1], state(found)[1])


def test_shards_are_one_adapter(good: Path, folder: Path) -> None:
    own = list(load_file(folder / WEIGHTS).items())
    (folder / WEIGHTS).unlink()
    names = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"]
    for name, part in zip(names, (own[:3], own[3:]), strict=True):
        save_file(dict(part), folder / name)
    table = {key: names[0 if number < 3 else 1] for number, (key, _) in enumerate(own)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": table}))
    expected, found = llama(), llama()
    og.load(expected, good)
    og.load(found, folder)
    assert torch.equal(state(expected)[1], state(found)[1])


def test_another_base_model_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config(folder, base_model_name_or_path="some/Llama-2-7b")
    model = llama()
    model.name_or_path = "models/SmolLM2-135M"
    with caplog.at_level(logging.WARNING, "onegraph"):
        og.load(model, folder)
    assert "was made for some/Llama-2-7b, this model is models/SmolLM2-135M" in caplog.text
    caplog.clear()
    model = llama()
    model.name_or_path = "/somewhere/else/llama-2-7b"
    with caplog.at_level(logging.WARNING, "onegraph"):
        og.load(model, folder)
    assert caplog.text == ""


def test_a_model_with_a_head_is_named_for_the_model_inside(good: Path) -> None:
    model = llama().model
    with pytest.raises(OnegraphError, match="a model that has this one as its 'model'"):
        og.load(model, good)


@pytest.mark.parametrize("job", ["use", "scale", "delete", "rows", "save", "tensors"])
def test_a_name_that_does_not_exist(job: str, tmp_path: Path) -> None:
    model = llama()
    adapters = og.attach(model, og.LoRA(rank=2), targets=["q_proj"], name="sketch")
    before = state(model)

    def rows() -> None:
        with adapters.rows(["sketh"]):
            model(IDS)

    jobs: dict[str, Callable[[], object]] = {
        "use": lambda: adapters.use("sketh"),
        "scale": lambda: adapters.scale("sketh", 0.5),
        "delete": lambda: adapters.delete("sketh"),
        "rows": rows,
        "save": lambda: adapters.save(tmp_path / "x.safetensors", name="sketh"),
        "tensors": lambda: adapters.tensors("sketh"),
    }
    with pytest.raises(OnegraphError, match="did you mean 'sketch'") as caught:
        jobs[job]()
    assert caught.value.code == "unknown-adapter"
    assert list(tmp_path.iterdir()) == []
    assert_same(before, state(model))


@pytest.mark.parametrize("job", ["set_adapter", "delete_adapter", "adapter_names"])
def test_a_name_that_does_not_exist_in_peft(job: str) -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    before = state(model)
    jobs: dict[str, Callable[[], object]] = {
        "set_adapter": lambda: model.set_adapter("defualt"),
        "delete_adapter": lambda: model.delete_adapter("defualt"),
        "adapter_names": lambda: model(IDS, adapter_names=["defualt"]),
    }
    with pytest.raises((OnegraphError, ValueError), match="did you mean 'default'"):
        jobs[job]()
    assert_same(before, state(model))


def test_a_path_with_a_slip_names_the_nearest(folder: Path) -> None:
    with pytest.raises(OnegraphError, match="Did you mean") as caught:
        og.load(llama(), folder.parent / "adaptr")
    assert str(folder) in caught.value.hint


def test_a_rank_above_the_capacity() -> None:
    model = llama()
    before = state(model)
    with pytest.raises(OnegraphError, match="rank 8 is above the capacity of 4") as caught:
        og.attach(model, og.LoRA(rank=8), targets=["q_proj"], capacity=4)
    assert caught.value.code == "rank-above-capacity"
    assert_same(before, state(model))
    adapters = og.attach(model, og.LoRA(rank=2), targets=["q_proj"])
    before = state(model)
    with pytest.raises(OnegraphError, match="rank 64 is above the capacity of 8"):
        adapters.add("large", og.LoRA(rank=64), capacity=8)
    assert_same(before, state(model))


@pytest.mark.parametrize("targets", [["query_proj"], ["q_prj"], ["layers.0.self_attn.q_prj"], r".*\.atn\.q_proj", []], ids=str)
def test_targets_that_match_nothing(targets: list[str] | str) -> None:
    model = llama()
    before = state(model)
    with pytest.raises(OnegraphError) as caught:
        og.attach(model, og.LoRA(rank=2), targets=targets)
    assert "q_proj" in caught.value.hint, str(caught.value)
    assert_same(before, state(model))
    if not targets:
        return
    with pytest.raises((OnegraphError, ValueError)) as of_peft:
        get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    assert re.search(r"hint: .*q_proj", str(of_peft.value)), str(of_peft.value)
    assert_same(before, state(model))
