"""PEFT folders: the same file means the same function on both sides, in outputs and in gradients."""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from onegraph import LoRA, adapters_of, attach, load, save
from onegraph.adapters import Adapters
from onegraph.checkpoint import read
from onegraph.errors import CheckpointError, OutputError

# PEFT says so when it meets a grouped convolution, an embedding, or a config without a base model.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Could not identify embedding layer"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer"),
    # PEFT 0.21 takes the bias of lora_B for a shard of a matrix, and asks transformers by a name that it gave up.
    pytest.mark.filterwarnings("ignore:Adapter 'default'. 3 LoRA tensor"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

NAMES = {"lora_A": "down", "lora_B": "up", "lora_embedding_A": "down", "lora_embedding_B": "up"}


class Net(nn.Module):
    """Every kind of layer, and names that end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(6, 8, 3, padding=1, stride=2)
        self.grouped = nn.Conv2d(8, 8, (1, 3), padding=(0, 1), groups=2)
        self.query = nn.Linear(8, 8, bias=False)
        self.block = nn.ModuleDict({"query": nn.Linear(8, 8), "value": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.grouped(self.conv(self.table(ids).movedim(-1, 1))).movedim(1, -1)
        h = torch.tanh(self.query(h)) + self.block["query"](h)
        return self.head(torch.relu(self.block["value"](h)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def ids() -> torch.Tensor:
    return torch.arange(32).reshape(2, 4, 4) % 11


CASES: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["query", "value"], "r": 4, "lora_alpha": 6},
    "conv": {"target_modules": ["conv", "grouped"], "r": 4, "lora_alpha": 2},
    "embedding": {"target_modules": ["table"], "r": 3, "lora_alpha": 5},
    "rslora": {"target_modules": ["query", "conv"], "r": 4, "lora_alpha": 3, "use_rslora": True},
    "rank_pattern": {
        "target_modules": ["query", "value", "conv"],
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"block.query": 2, "conv": 6},
        "alpha_pattern": {"value": 3},
    },
    "rslora and patterns": {
        "target_modules": ["query", "value"],
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"^query": 2},
        "alpha_pattern": {"block.query": 1},
    },
    "bias": {"target_modules": ["value", "conv", "head"], "r": 4, "lora_bias": True},
    "regular expression": {"target_modules": r"block\.(query|value)", "r": 2},
    "everything": {"target_modules": ["table", "conv", "grouped", "query", "value"], "r": 4, "lora_alpha": 16},
}


def peft_model(case: str) -> peft.PeftModel:
    model = peft.get_peft_model(net(), peft.LoraConfig(**CASES[case]))
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return model.eval()


def our_model(case: str) -> Adapters:
    """The same adapter built here, from our own settings."""
    config = peft.LoraConfig(**CASES[case])
    chosen = {path for path, module in net().named_modules() if peft.tuners.tuners_utils.check_target_module_exists(config, path)}

    def method(path: str) -> LoRA:
        def pick(patterns: dict[str, int], default: int) -> int:
            return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)

        return LoRA(
            rank=pick(config.rank_pattern, config.r),
            alpha=pick(config.alpha_pattern, config.lora_alpha),
            rslora=config.use_rslora,
            bias=config.lora_bias,
        )

    overrides = {f"^{re.escape(path)}": method(path) for path in sorted(chosen)}
    adapters = attach(net(), method("none"), targets=lambda path, module: path in chosen, overrides=overrides)
    generator = torch.Generator().manual_seed(1)
    for value in adapters.parameters().values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    adapters.model.eval()
    return adapters


def gradients_of_peft(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in model.named_parameters():
        match = re.match(r"base_model\.model\.(.+)\.(lora_(?:embedding_)?[AB])\.default(?:\.(weight|bias))?$", name)
        if match and value.grad is not None:
            found[f"{match[1]}.{'up_bias' if match[3] == 'bias' else NAMES[match[2]]}"] = value.grad
    return found


def assert_same_function(theirs: peft.PeftModel, ours: Adapters) -> None:
    """Outputs and gradients to fp32 round-off; and the adapter does something."""
    for model in (theirs, ours.model):
        for parameter in model.parameters():
            parameter.grad = None
    expected, found = theirs(ids()), ours.model(ids())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (expected - net().eval()(ids())).abs().max() > 1e-2
    expected.square().sum().backward()
    found.square().sum().backward()
    wanted = gradients_of_peft(theirs)
    got = {name: value.grad for name, value in ours.parameters().items()}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        size = gradient.abs().max()
        assert size > 0, name
        value = got[name]
        assert value is not None
        assert (value - gradient).abs().max() <= 1e-5 * size, name


def trainable(model: peft.PeftModel) -> peft.PeftModel:
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(True)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_a_folder_written_by_peft_means_the_same_here(tmp_path: Path, case: str) -> None:
    theirs = peft_model(case)
    theirs.save_pretrained(tmp_path)
    ours = load(net().eval(), tmp_path)
    assert_same_function(theirs, ours)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_written_here_means_the_same_to_peft(tmp_path: Path, case: str) -> None:
    ours = our_model(case)
    save(ours, tmp_path / "adapter", format="peft")
    theirs = trainable(peft.PeftModel.from_pretrained(net(), tmp_path / "adapter"))
    assert_same_function(theirs, ours)


@pytest.mark.parametrize("case", CASES)
def test_both_write_the_same_folder(tmp_path: Path, case: str) -> None:
    """Tensors, keys and metadata alike; the configuration too, but for names that mean the same layers."""
    peft_model(case).save_pretrained(tmp_path / "theirs")
    save(load(net(), tmp_path / "theirs"), tmp_path / "ours", format="peft")
    theirs, ours = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    headers = []
    for side in ("theirs", "ours"):
        with safe_open(tmp_path / side / "adapter_model.safetensors", framework="pt") as file:
            headers.append(file.metadata())
    assert headers[0] == headers[1] == {"format": "pt"}
    texts = [(tmp_path / side / "adapter_config.json").read_text() for side in ("theirs", "ours")]
    configs = [json.loads(text) for text in texts]
    assert [text == json.dumps(config, indent=2, sort_keys=True) for text, config in zip(texts, configs)] == [True, True]
    means = ("target_modules", "rank_pattern", "alpha_pattern", "r", "lora_alpha")
    assert {key: value for key, value in configs[0].items() if key not in means} == {
        key: value for key, value in configs[1].items() if key not in means
    }
    assert [[type(config[key]) for key in ("r", "lora_alpha", "rank_pattern")] for config in configs] == [[int, int, dict]] * 2


def test_targets_that_peft_wrote_as_names_stay_those_names(tmp_path: Path) -> None:
    peft_model("linear").save_pretrained(tmp_path / "theirs")
    save(load(net(), tmp_path / "theirs"), tmp_path / "ours", format="peft")
    configs = [json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("theirs", "ours")]
    assert sorted(configs[0]["target_modules"]) == configs[1]["target_modules"] == ["query", "value"]
    assert [config["r"] for config in configs] == [4, 4]


def test_one_of_two_layers_that_end_alike_is_targeted_alone(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=lambda path, module: path == "query")
    save(adapters, tmp_path / "a", format="peft")
    theirs = peft.PeftModel.from_pretrained(net(), tmp_path / "a")
    assert [name for name, module in theirs.named_modules() if isinstance(module, peft.tuners.lora.Linear)] == ["base_model.model.query"]


def test_lora_dropout_and_init_are_kept(tmp_path: Path) -> None:
    save(attach(net(), LoRA(rank=2, input_dropout=0.25, init="gaussian"), targets=["value"]), tmp_path / "a", format="peft")
    config = peft.LoraConfig.from_pretrained(tmp_path / "a")
    assert (config.lora_dropout, config.init_lora_weights) == (0.25, "gaussian")
    method = load(net(), tmp_path / "a").methods("default")["block.value"]
    assert method == LoRA(rank=2, alpha=2.0, input_dropout=0.25, init="gaussian")


def test_only_the_adapter_named_default_lies_at_the_root(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["value"])
    adapters.add("french", LoRA(rank=4))
    save(adapters, tmp_path / "all", format="peft")
    save(adapters, tmp_path / "one", name="french", format="peft")
    theirs = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["value"]))
    theirs.add_adapter("french", peft.LoraConfig(r=4, target_modules=["value"]))
    theirs.save_pretrained(tmp_path / "theirs")

    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".json", ".safetensors")}

    assert files(tmp_path / "all") == files(tmp_path / "theirs")
    assert files(tmp_path / "one") == {"adapter_config.json", "adapter_model.safetensors"}
    assert read(tmp_path / "one").methods[""]["block.value"] == read(tmp_path / "all" / "french").methods[""]["block.value"]


def test_a_folder_with_adapters_below_it_names_them(tmp_path: Path) -> None:
    save(attach(net(), LoRA(rank=2), targets=["value"], name="french"), tmp_path, format="peft")
    with pytest.raises(CheckpointError) as raised:
        load(net(), tmp_path)
    assert str(tmp_path / "french") in raised.value.hint


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    peft_model("rank_pattern").save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_unknown_fields_are_kept_and_named_in_one_warning(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, new_option=[1], another={"a": None}, task_type="CAUSAL_LM", base_model_name_or_path="some/model")
    with caplog.at_level(logging.WARNING):
        adapters = load(net(), folder)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{folder / 'adapter_config.json'}: unknown fields, kept but not used: another, new_option"
    ]
    assert read(folder).config["new_option"] == [1]
    save(adapters, tmp_path / "again", format="peft")
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert (config["new_option"], config["another"], config["task_type"]) == ([1], {"a": None}, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "some/model"


def test_fields_of_a_deleted_adapter_are_forgotten(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, task_type="CAUSAL_LM")
    adapters = load(net(), folder)
    adapters.delete("default")
    adapters.add("default", LoRA(rank=2))
    save(adapters, tmp_path / "again", name="default", format="peft")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["task_type"] is None


def test_a_known_folder_gives_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(net(), folder)
    assert not [record for record in caplog.records if record.name.startswith("onegraph")]


def test_given_fields_are_written(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["value"])
    save(adapters, tmp_path / "a", format="peft", metadata={"task_type": "CAUSAL_LM", "revision": "main"})
    config = peft.LoraConfig.from_pretrained(tmp_path / "a")
    assert (config.task_type, config.revision, config.auto_mapping) == ("CAUSAL_LM", "main", None)


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "r is a string": ({"r": "8"}, "adapter-config", "r = '8'"),
    "r is 0": ({"r": 0}, "adapter-config", "r = 0"),
    "alpha is missing a number": ({"lora_alpha": None}, "adapter-config", "lora_alpha = None"),
    "dropout is 1": ({"lora_dropout": 1.0}, "adapter-config", "lora_dropout = 1.0"),
    "rslora is a word": ({"use_rslora": "yes"}, "adapter-config", "use_rslora = 'yes'"),
    "rank_pattern is a list": ({"rank_pattern": [1]}, "adapter-config", "rank_pattern = [1]"),
    "rank_pattern holds a fraction": ({"rank_pattern": {"conv": 1.5}}, "adapter-config", "rank_pattern['conv'] = 1.5"),
    "rank_pattern is no pattern": ({"rank_pattern": {"(": 2}}, "adapter-config", "no regular expression"),
    "targets are a number": ({"target_modules": 3}, "adapter-config", "target_modules = 3"),
    "bias is unknown": ({"bias": "some"}, "adapter-config", "bias = 'some'"),
    "another rank": ({"r": 5, "rank_pattern": {}}, "adapter-config", "block.value"),
    "another bias": ({"lora_bias": True}, "adapter-config", "lora_bias is true"),
    "no method": ({"peft_type": None}, "adapter-config", "peft_type None"),
    "another method": ({"peft_type": "XLORA"}, "adapter-unsupported", "XLORA"),
    "the tensors of another method": ({"peft_type": "VERA"}, "adapter-keys", "holds LORA tensors"),
    "dora without its magnitude": ({"use_dora": True}, "adapter-incomplete", "block.value has only: down, up"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "adapter-unsupported", "changes the base weights"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "adapter-unsupported", "replicated layers"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_configuration_that_cannot_be_honoured_is_an_error(folder: Path, kind: str) -> None:
    fields, code, what = WRONG[kind]
    rewrite(folder, **fields)
    model = net()
    with pytest.raises(CheckpointError) as raised:
        load(model, folder)
    assert raised.value.code == code, str(raised.value)
    assert what in str(raised.value)
    assert adapters_of(model) is None


def test_all_wrong_fields_are_named_at_once(folder: Path) -> None:
    rewrite(folder, r="8", lora_dropout=2, bias=None)
    with pytest.raises(CheckpointError) as raised:
        load(net(), folder)
    assert str(raised.value).startswith("3 fields of")
    assert all(field in str(raised.value) for field in ("r = '8'", "lora_dropout = 2", "bias = None"))


@pytest.mark.parametrize(("text", "what"), [("{", "can't be read"), ("[]", "holds a list"), (None, "does not exist")])
def test_a_configuration_that_is_none(folder: Path, text: str | None, what: str) -> None:
    path = folder / "adapter_config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match=what) as raised:
        load(net(), folder / "adapter_model.safetensors")
    assert raised.value.code == "adapter-config"


def test_the_weights_file_may_be_named_itself(folder: Path) -> None:
    assert read(folder / "adapter_model.safetensors").methods == read(folder).methods


def test_half_of_a_layer_is_an_error(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors["base_model.model.conv.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="conv has only: down") as raised:
        load(net(), folder)
    assert raised.value.code == "adapter-incomplete"


def test_an_old_pickle_of_tensors_is_read(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    expected = read(folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    found = read(folder)
    assert found.methods == expected.methods
    assert torch.equal(found.parts[""]["conv"]["down"], expected.parts[""]["conv"]["down"])  # type: ignore[arg-type]


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("exploded"),)


def test_an_old_pickle_that_would_run_something_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("exploded").exists(), "the pickle must be dangerous, or refusing it shows nothing"
    Path("exploded").unlink()
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.conv.lora_A.weight": Bomb()}, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError) as raised:
        load(net(), folder)
    assert raised.value.code == "file-is-pickle"
    assert not Path("exploded").exists()


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as raised:
        save(attach(net(), LoRA(rank=2), targets=["value"]), tmp_path / "file", format="peft")
    assert raised.value.code == "is-a-file"


def test_a_bias_on_an_embeddings_adapter_has_no_place_in_peft(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="table") as raised:
        save(attach(net(), LoRA(rank=2, bias=True), targets=["table"]), tmp_path / "a", format="peft")
    assert raised.value.code == "adapter-unsupported"
    assert not (tmp_path / "a").exists()


def test_layers_of_other_strength_kinds_are_written_with_the_same_strength(tmp_path: Path) -> None:
    """Alpha / rank on one layer and alpha / sqrt(rank) on another: PEFT has one flag for all."""
    adapters = attach(net(), LoRA(rank=4, alpha=3), targets=["value", "query"], overrides={"value": LoRA(rank=4, alpha=3, rslora=True)})
    for value in adapters.parameters().values():
        value.data.normal_()
    save(adapters, tmp_path / "a", format="peft")
    assert_same_function(trainable(peft.PeftModel.from_pretrained(net(), tmp_path / "a")), adapters)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    return LlamaForCausalLM(config).eval()


def test_a_language_model_with_a_targeted_embedding(tmp_path: Path) -> None:
    """PEFT saves the base weights of such embeddings too: written as there, read where they are the model's own."""
    theirs = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    for name, value in theirs.named_parameters():
        if ".lora_" in name:
            value.data.normal_(std=0.1)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    ours = load(llama(), tmp_path / "theirs")
    ids = torch.arange(10).reshape(2, 5)
    torch.testing.assert_close(ours.model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-6)
    save(ours, tmp_path / "ours", format="peft")
    first, second = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("theirs", "ours"))
    assert "base_model.model.model.embed_tokens.base_layer.weight" in first
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    configs = [json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("theirs", "ours")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]


def test_base_weights_that_the_model_has_in_another_shape_are_not_lost_silently(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["value"], modules_to_save=["head"]))
    theirs.save_pretrained(tmp_path)
    model = net()
    model.head = nn.Linear(8, 4)
    with pytest.raises(CheckpointError, match=r"head\.weight") as raised:
        load(model, tmp_path)
    assert raised.value.code == "adapter-base-weights"
    assert adapters_of(model) is None
