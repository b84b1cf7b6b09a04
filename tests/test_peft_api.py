"""PEFT's API over onegraph, beside PEFT: the same calls on the same weights give the same outputs, names and files."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import onegraph
from onegraph import peft as ours
from onegraph.errors import CheckpointError, ConfigurationError, OnegraphError
from onegraph.peft.target_tables import FEEDFORWARD, TARGETS
from onegraph.peft.tuner import BaseTuner

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("peft")

# torchao, bitsandbytes and PEFT warn of what they lack on this machine.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=2, max_position_embeddings=32, **_SIZES)
    return _seeded(lambda: transformers.LlamaForCausalLM(config))


def shallow() -> nn.Module:
    """One block: what compiles is the same, in half the time."""
    config = transformers.LlamaConfig(
        vocab_size=40, num_key_value_heads=2, max_position_embeddings=32, **{**_SIZES, "num_hidden_layers": 1}
    )
    return _seeded(lambda: transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    return _seeded(lambda: transformers.GPT2LMHeadModel(config))


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=32, **_SIZES)
    return _seeded(lambda: transformers.BertForSequenceClassification(config))


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(vocab_size=40, max_position_embeddings=34, **_SIZES)
    return _seeded(lambda: transformers.RobertaForSequenceClassification(config))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return _seeded(lambda: transformers.T5ForConditionalGeneration(config))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, 40, (3, 7), generator=torch.Generator().manual_seed(1))


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PEFT's own calls, whose warnings are not the subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


def their_model(make: Callable[[], nn.Module], name: str, **fields: Any) -> Any:
    return quietly(theirs.get_peft_model, make(), getattr(theirs, name)(**fields)).eval()


def our_model(make: Callable[[], nn.Module], name: str, **fields: Any) -> ours.PeftModel:
    return ours.get_peft_model(make(), getattr(ours, name)(**fields)).eval()


def trained(model: ours.PeftModel, adapter: str = "default", seed: int = 0) -> ours.PeftModel:
    """Another value for every tensor of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    state = ours.get_peft_model_state_dict(model, adapter_name=adapter)
    changed = {
        key: value if "base_layer" in key else value + 0.2 * torch.randn(value.shape, generator=generator) for key, value in state.items()
    }
    ours.set_peft_model_state_dict(model, changed, adapter_name=adapter)
    return model


def two_adapters(make: Callable[[], nn.Module] = llama, **fields: Any) -> ours.PeftModel:
    model = our_model(make, "LoraConfig", task_type="CAUSAL_LM", r=4, **fields)
    model.add_adapter("other", ours.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=3))
    return trained(trained(model, seed=1), "other", seed=2)


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **kwargs).logits
    return found


CASES = {
    "lora": (llama, "LoraConfig", {"task_type": "CAUSAL_LM"}),
    "lora-without-task": (llama, "LoraConfig", {}),
    "lora-patterns": (
        llama,
        "LoraConfig",
        {"r": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
    ),
    "lora-regex": (llama, "LoraConfig", {"target_modules": r".*layers\.1\..*(q|up)_proj"}),
    "lora-layers": (llama, "LoraConfig", {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["v_proj"]}),
    "lora-head": (llama, "LoraConfig", {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens", "q_proj"]}),
    "lora-bias": (bert, "LoraConfig", {"task_type": "SEQ_CLS", "lora_bias": True}),
    "dora-all-linear": (llama, "LoraConfig", {"target_modules": "all-linear", "use_dora": True}),
    "lora-gpt2": (gpt2, "LoraConfig", {"task_type": "CAUSAL_LM", "fan_in_fan_out": True}),
    "lora-bert": (bert, "LoraConfig", {"task_type": "SEQ_CLS", "target_modules": "all-linear"}),
    "lora-roberta": (roberta, "LoraConfig", {"task_type": "SEQ_CLS"}),
    "lora-t5": (t5, "LoraConfig", {"task_type": "SEQ_2_SEQ_LM"}),
    "adalora": (llama, "AdaLoraConfig", {"total_step": 10}),
    "ia3": (llama, "IA3Config", {}),
    "ia3-bert": (bert, "IA3Config", {"task_type": "SEQ_CLS"}),
    "ln-tuning": (llama, "LNTuningConfig", {}),
    "loha": (llama, "LoHaConfig", {"rank_pattern": {"v_proj": 2}}),
    "lokr": (llama, "LoKrConfig", {}),
    "vera": (llama, "VeraConfig", {"r": 8}),
    "vblora": (llama, "VBLoRAConfig", {"num_vectors": 8, "vector_length": 8}),
    "oft": (llama, "OFTConfig", {"oft_block_size": 4}),
    "oft-that-does-not-divide": (llama, "OFTConfig", {}),
    "boft": (llama, "BOFTConfig", {}),
    "hra": (llama, "HRAConfig", {}),
    "miss": (llama, "MissConfig", {"r": 8}),
    "miss-bat": (llama, "MissConfig", {"r": 8, "init_weights": "bat"}),
}
# Where a Parameter of ours has another shape than PEFT's, or stands elsewhere: docs/peft.md says so.
_OTHER_SHAPES = ("ia3_l", "lora_E", "boft_s", "vector_bank")
_ONLY_THEIRS = ("ranknum", "vera_A", "vera_B", "vblora_vector_bank")


def _inputs(make: Callable[[], nn.Module], ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :3]} if make is t5 else {})}


@pytest.mark.parametrize("case", CASES)
def test_every_method_is_peft_on_the_same_weights(case: str, ids: Tensor) -> None:
    make, name, fields = CASES[case]
    other, own = their_model(make, name, **fields), our_model(make, name, **fields)
    state = quietly(theirs.get_peft_model_state_dict, other)
    fixed = ("vera_A", "vera_B", "base_layer")
    changed = {key: value if any(part in key for part in fixed) else value + 0.1 * torch.randn_like(value) for key, value in state.items()}
    quietly(theirs.set_peft_model_state_dict, other, changed)

    before = own(**_inputs(make, ids)).logits
    assert ours.set_peft_model_state_dict(own, changed) == ([], [])

    given = {key: (tuple(value.shape), value.requires_grad) for key, value in other.named_parameters() if "ranknum" not in key}
    found = {key: (tuple(value.shape), value.requires_grad) for key, value in own.named_parameters()}
    assert {key for key in given if "vector_bank" not in key} == {key for key in found if "vector_bank" not in key}
    assert all(found[key] == given[key] for key in found if not any(part in key for part in _OTHER_SHAPES))
    states = [{key for key in model.state_dict() if not any(part in key for part in _ONLY_THEIRS)} for model in (other, own)]
    assert states[0] == states[1]

    exported = ours.get_peft_model_state_dict(own)
    after = quietly(theirs.get_peft_model_state_dict, other)
    assert exported.keys() == after.keys()
    for key, value in exported.items():
        torch.testing.assert_close(value, after[key], atol=1e-6, rtol=1e-5)
    outputs = own(**_inputs(make, ids)).logits
    torch.testing.assert_close(outputs, other(**_inputs(make, ids)).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(outputs, before, atol=1e-4)  # the weights did something


@pytest.mark.parametrize("case", ["lora", "dora-all-linear", "lora-bert", "lora-head", "ia3", "vera", "hra", "oft", "lokr", "ln-tuning"])
def test_numbers_that_train(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, name, fields = CASES[case]
    other, own = their_model(make, name, **fields), our_model(make, name, **fields)
    assert own.get_nb_trainable_parameters() == other.get_nb_trainable_parameters()
    own.print_trainable_parameters()
    other.print_trainable_parameters()
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


@pytest.mark.parametrize("case", CASES)
def test_files_in_both_directions(case: str, ids: Tensor, tmp_path: Path) -> None:
    make, name, fields = CASES[case]
    own = trained(our_model(make, name, **fields))
    own.save_pretrained(tmp_path / "ours")
    other = quietly(theirs.PeftModel.from_pretrained, make(), tmp_path / "ours").eval()
    expected = own(**_inputs(make, ids)).logits
    torch.testing.assert_close(other(**_inputs(make, ids)).logits, expected, atol=1e-5, rtol=1e-5)

    quietly(other.save_pretrained, tmp_path / "theirs")
    again = ours.PeftModel.from_pretrained(make(), tmp_path / "theirs")
    torch.testing.assert_close(again(**_inputs(make, ids)).logits, expected, atol=1e-5, rtol=1e-5)
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())

    written, read = (json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("ours", "theirs"))
    read.pop("runtime_config", None)
    if read["modules_to_save"]:  # PEFT adds the heads once more when it loads
        read["modules_to_save"] = list(dict.fromkeys(read["modules_to_save"]))
    same = written.keys() & read.keys() - {"target_modules", "feedforward_modules", "exclude_modules"}
    assert {key: written[key] for key in same} == {key: read[key] for key in same}
    assert written.keys() == read.keys()
    assert type(own).__name__ == type(other).__name__ == type(again).__name__


def test_configurations_have_pefts_fields_and_defaults() -> None:
    for kind, own in ours.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        needed = {"total_step": 10} if kind == "ADALORA" else {}
        mine, other = own(**needed).to_dict(), quietly(getattr(theirs, own.__name__), **needed).to_dict()
        other.pop("runtime_config", None)
        assert mine == other, kind
        assert repr(own(**needed)).startswith(f"{own.__name__}(task_type=None, peft_type=<PeftType.{kind}: '{kind}'>")


def test_customary_targets_are_pefts() -> None:
    from peft.utils import constants

    tables = {"LN_TUNING": "LNTUNING"}
    for kind, own in TARGETS.items():
        other = getattr(constants, f"TRANSFORMERS_MODELS_TO_{tables.get(kind, kind)}_TARGET_MODULES_MAPPING")
        for model, names in other.items():
            assert set(own[model]) == set(names), (kind, model)
    for model, names in constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.items():
        assert FEEDFORWARD[model] == names


def test_config_files(tmp_path: Path) -> None:
    ours.LoraConfig(r=3, target_modules=["a", "b"], task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    other = theirs.PeftConfig.from_pretrained(tmp_path)
    assert (other.r, other.target_modules, other.task_type) == (3, {"a", "b"}, "CAUSAL_LM")
    values = json.loads((tmp_path / "adapter_config.json").read_text()) | {"a_field_of_tomorrow": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="a_field_of_tomorrow"):
        own = ours.PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(own, ours.LoraConfig)
    assert own.target_modules == {"a", "b"}
    own.save_pretrained(str(tmp_path / "again"))
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["a_field_of_tomorrow"] == 1
    assert ours.get_peft_config({"peft_type": "IA3"}).peft_type is ours.PeftType.IA3


def test_switching_disabling_deleting(ids: Tensor) -> None:
    base, model = logits(llama(), ids), two_adapters()
    first = logits(model, ids)
    assert (model.active_adapter, model.active_adapters, list(model.peft_config)) == ("default", ["default"], ["default", "other"])
    assert isinstance(model, ours.PeftModelForCausalLM)
    assert isinstance(model.base_model, ours.LoraModel)
    assert model.get_base_model() is model.base_model.model
    model.set_adapter("other")
    second = logits(model, ids)
    assert not torch.allclose(first, second, atol=1e-3)
    frozen = {name: parameter.requires_grad for name, parameter in model.named_parameters() if "lora_A" in name}
    assert all(trains == (".other." in name) for name, trains in frozen.items())
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), base)
        model.set_adapter("default")
        assert torch.equal(logits(model, ids), base)
    assert torch.equal(logits(model, ids), first)
    model.set_adapter("other", inference_mode=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.warns(UserWarning, match="other was active"):
        model.delete_adapter("other")
    assert model.active_adapter == "default"
    assert torch.equal(logits(model, ids), first)
    model.delete_adapter("default")
    assert model.active_adapters == []
    assert torch.equal(logits(model, ids), base)


def test_merging(ids: Tensor) -> None:
    base, model = logits(llama(), ids), two_adapters()
    adapted = logits(model, ids)
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model, ids), adapted, atol=1e-5, rtol=1e-5)
    model.merge_adapter(["other"])  # on top of the first, as in PEFT
    both = logits(model, ids)
    assert not torch.allclose(both, adapted, atol=1e-3)
    with pytest.warns(UserWarning, match="Already merged"):
        model.merge_adapter(["other"])
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), base)
    assert torch.equal(logits(model, ids), adapted)
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()
    plain = copy.deepcopy(model).merge_and_unload(adapter_names=["default", "other"])
    assert type(plain) is type(llama())
    assert plain.state_dict().keys() == llama().state_dict().keys()
    torch.testing.assert_close(logits(plain, ids), both, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(model.unload(), ids), base)


@pytest.mark.parametrize("how", "cat svd linear ties ties_svd dare_linear dare_ties_svd magnitude_prune magnitude_prune_svd".split())
def test_weighted_adapters(how: str, ids: Tensor, tmp_path: Path) -> None:
    base, model = logits(llama(), ids), two_adapters()
    model.add_weighted_adapter(["default", "other"], [0.5, 0.7], "mix", how, density=0.5)
    assert model.active_adapter == "default"
    model.set_adapter("mix")
    mixed = logits(model, ids)
    assert not torch.allclose(mixed, base, atol=1e-3)
    model.save_pretrained(tmp_path, selected_adapters=["mix"])
    other = quietly(theirs.PeftModel.from_pretrained, llama(), tmp_path / "mix")
    torch.testing.assert_close(logits(other, ids), mixed, atol=1e-5, rtol=1e-5)
    assert model.peft_config["mix"].r == (8 if how in ("cat", "linear") else 4)
    if how in ("cat", "svd", "ties_svd", "magnitude_prune_svd"):  # where both define the same, of the same rank
        own = their_model(llama, "LoraConfig", task_type="CAUSAL_LM", r=4)
        own.add_adapter("other", theirs.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=3))
        for name in ("default", "other"):
            quietly(theirs.set_peft_model_state_dict, own, ours.get_peft_model_state_dict(model, adapter_name=name), name)
        own.add_weighted_adapter(["default", "other"], [0.5, 0.7], "mix", how, density=0.5)
        own.set_adapter("mix")
        if how != "ties_svd":  # theirs adds where the paper, and ours, takes the mean
            torch.testing.assert_close(logits(own, ids), mixed, atol=1e-3, rtol=1e-3)


def test_rows_are_what_their_adapters_give_alone(ids: Tensor) -> None:
    model = two_adapters()
    alone = {"__base__": logits(llama(), ids)}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = logits(model, ids)
    for names in (["other", "__base__", "default"], ["default", "default", "other"]):
        rows = logits(model, ids, adapter_names=names)
        for row, name in enumerate(names):
            torch.testing.assert_close(rows[row], alone[name][row], atol=1e-6, rtol=1e-5)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids, adapter_names=["other"] * 3), alone["__base__"])
    with pytest.raises(ValueError, match="2 names, the batch 3 rows"):
        logits(model, ids, adapter_names=["other", "other"])
    with pytest.raises(ValueError, match="no adapter 'othr'"):
        logits(model, ids, adapter_names=["othr", "other", "other"])
    assert torch.equal(logits(model, ids), alone["other"])  # nothing was left behind


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_generate(beams: int, ids: Tensor) -> None:
    model = two_adapters()
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    names = ["other", "__base__", "default"]
    rows = model.generate(input_ids=ids, adapter_names=names, **options)
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter():
                alone = model.generate(input_ids=ids[row : row + 1], **options)
        else:
            model.set_adapter(name)
            alone = model.generate(input_ids=ids[row : row + 1], **options)
        assert torch.equal(rows[row, : alone.shape[1]], alone[0])


def test_rows_of_an_encoder_with_beams(ids: Tensor) -> None:
    model = our_model(t5, "LoraConfig", task_type="SEQ_2_SEQ_LM", r=4, init_lora_weights=False)
    model.add_adapter("other", ours.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, init_lora_weights=False))
    options = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}
    names = ["other", "default", "other"]
    rows = model.generate(input_ids=ids, adapter_names=names, **options)
    for row, name in enumerate(names):
        model.set_adapter(name)
        alone = model.generate(input_ids=ids[row : row + 1], **options)[0]
        width = min(rows.shape[1], len(alone))
        assert torch.equal(rows[row, :width], alone[:width])


def _compiled(model: ours.PeftModel, how: str) -> Any:
    if how == "blocks":
        onegraph.compile(model, backend="aot_eager")
    elif how == "whole":
        onegraph.compile(model, backend="aot_eager", regions="whole")
    elif how == "module":
        model.compile(backend="aot_eager", fullgraph=True)
    elif how == "inside":
        model.base_model.model = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize("how", ["before", "blocks", "whole", "module", "inside"])
def test_nothing_recompiles(how: str, ids: Tensor) -> None:
    torch._dynamo.reset()
    base = shallow()
    if how == "before":
        onegraph.compile(base, backend="aot_eager")
    model = ours.get_peft_model(base, ours.LoraConfig(task_type="CAUSAL_LM", r=4)).eval()
    model.add_adapter("other", ours.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=3))
    trained(trained(model, seed=1), "other", seed=2)
    run = _compiled(model, how)
    logits(run, ids)
    logits(run, ids, adapter_names=["other"] * 3)
    with torch.compiler.set_stance("fail_on_recompile"):
        first = logits(run, ids)
        model.set_adapter("other")
        second = logits(run, ids)
        with model.disable_adapter():
            plain = logits(run, ids)
        rows = logits(run, ids, adapter_names=["other", "__base__", "default"])
        again = logits(run, ids, adapter_names=["__base__", "default", "other"])
        model.set_adapter("default")
        assert torch.equal(logits(run, ids), first)
    torch.testing.assert_close(plain, logits(shallow(), ids))
    torch.testing.assert_close(rows, torch.stack([second[0], plain[1], first[2]]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again, torch.stack([plain[0], first[1], second[2]]), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first, second, atol=1e-3)


def test_torch_compile_around_it(ids: Tensor) -> None:
    """A graph for one adapter, and another for rows: whatever is switched."""
    torch._dynamo.reset()
    model, counter = two_adapters(shallow), CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter)
    first = logits(run, ids)
    model.set_adapter("other")
    second = logits(run, ids)
    assert counter.frame_count == 1
    for names in (["other", "default", "default"], ["default", "__base__", "other"]):
        rows = logits(run, ids, adapter_names=names)
    assert counter.frame_count == 2
    torch.testing.assert_close(rows[[0, 2]], torch.stack([first[0], second[2]]), atol=1e-6, rtol=1e-5)
    assert ours.get_peft_model_state_dict(run).keys() == ours.get_peft_model_state_dict(model).keys()


def test_a_frozen_adapter_trains_after_one_graph_more(ids: Tensor, tmp_path: Path) -> None:
    """Negative control too: a switch that changes what requires a gradient is noticed."""
    torch._dynamo.reset()
    two_adapters(shallow).save_pretrained(tmp_path)
    model = ours.PeftModel.from_pretrained(shallow(), tmp_path)
    model.load_adapter(tmp_path / "other", "other")
    onegraph.compile(model, backend="aot_eager")
    logits(model, ids)
    with torch.compiler.set_stance("fail_on_recompile"):
        model.set_adapter("other", inference_mode=True)
        logits(model, ids)
        with model.disable_adapter():
            logits(model, ids)
        model.set_adapter("default")  # PEFT lets it train
        with pytest.raises(RuntimeError, match="recompile"):
            logits(model, ids)


def test_training_step_by_step(ids: Tensor) -> None:
    """The same losses as PEFT's, and the base stays as it was."""
    other, own = (make(llama, "LoraConfig", task_type="CAUSAL_LM", r=4).train() for make in (their_model, our_model))
    quietly(theirs.set_peft_model_state_dict, other, ours.get_peft_model_state_dict(own))
    losses: list[list[float]] = []
    for model in (other, own):
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
        losses.append([])
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][-1] < losses[1][0]
    assert torch.equal(logits(own.unload(), ids), logits(llama(), ids))


def test_adalora_allocates_as_peft(ids: Tensor, tmp_path: Path) -> None:
    fields = {"total_step": 6, "tinit": 1, "tfinal": 2, "init_r": 6, "target_r": 2, "task_type": "CAUSAL_LM"}
    other, own = (make(llama, "AdaLoraConfig", **fields).train() for make in (their_model, our_model))
    start = {key: value + 0.1 * torch.randn_like(value) for key, value in ours.get_peft_model_state_dict(own).items()}
    quietly(theirs.set_peft_model_state_dict, other, start)
    ours.set_peft_model_state_dict(own, start)
    losses: list[list[float]] = []
    for model in (other, own):
        optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
        losses.append([])
        for step in range(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    mine = own.peft_config["default"].rank_pattern
    assert sum(sum(kept) for kept in mine.values()) == 2 * len(mine)
    pattern = {key.replace(".default", ""): kept for key, kept in other.peft_config["default"].rank_pattern.items()}
    assert pattern == mine
    own.eval().save_pretrained(tmp_path)
    loaded = quietly(theirs.PeftModel.from_pretrained, llama(), tmp_path)
    torch.testing.assert_close(logits(loaded, ids), logits(own, ids), atol=1e-5, rtol=1e-5)


def test_heads_are_trained_whole(ids: Tensor) -> None:
    for kind, make in (("SEQ_CLS", bert), ("SEQ_CLS", roberta)):
        config = ours.LoraConfig(task_type=kind)
        model = ours.get_peft_model(make(), config)
        assert config.modules_to_save == ["classifier", "score"]
        assert model.modules_to_save == {"classifier", "score"}
        model(input_ids=ids, labels=torch.tensor([0, 1, 0])).loss.backward()
        trains = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert any("modules_to_save.default" in name for name in trains)
        assert all(".default" in name for name in trains)


def test_bias_is_trained_beside(ids: Tensor, tmp_path: Path) -> None:
    for bias in ("all", "lora_only"):
        own = our_model(bert, "LoraConfig", task_type="SEQ_CLS", bias=bias)
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                if "bias_" in name:
                    parameter += 0.1
        own.save_pretrained(tmp_path / bias)
        loaded = quietly(theirs.PeftModel.from_pretrained, bert(), tmp_path / bias)
        torch.testing.assert_close(logits(loaded, ids), logits(own, ids), atol=1e-5, rtol=1e-5)
        trained_theirs = their_model(bert, "LoraConfig", task_type="SEQ_CLS", bias=bias).get_nb_trainable_parameters()[0]
        assert own.get_nb_trainable_parameters()[0] == trained_theirs


def test_state_dict_there_and_back(ids: Tensor, tmp_path: Path) -> None:
    model = two_adapters(modules_to_save=["lm_head"])
    state = copy.deepcopy(model.state_dict())
    other = our_model(llama, "LoraConfig", task_type="CAUSAL_LM", r=4, modules_to_save=["lm_head"])
    other.add_adapter("other", ours.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=3))
    assert other.load_state_dict(state) == ([], [])
    for name in ("default", "other"):
        model.set_adapter(name)
        other.set_adapter(name)
        assert torch.equal(logits(model, ids), logits(other, ids))
    lacking = {key: value for key, value in state.items() if "q_proj.lora_A.other" not in key}
    result = other.load_state_dict(lacking, strict=False)
    assert sorted(result.missing_keys) == sorted(state.keys() - lacking.keys())
    with pytest.raises(RuntimeError, match=r"q_proj\.lora_A\.other"):
        other.load_state_dict(lacking)
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # as the Trainer of transformers writes it
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys()
    assert model.state_dict(prefix="a.").keys() == {f"a.{key}" for key in state}


def test_copies(ids: Tensor) -> None:
    model = two_adapters()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, ids), logits(model, ids))
        trains = [[name for name, value in each.named_parameters() if value.requires_grad] for each in (model, other)]
        assert trains[0] == trains[1]
        trained(other, seed=7)
        assert not torch.allclose(logits(other, ids), logits(model, ids), atol=1e-3)


def test_injection(ids: Tensor) -> None:
    model = llama()
    assert ours.inject_adapter_in_model(ours.LoraConfig(target_modules=["q_proj"]), model) is model
    other = quietly(theirs.inject_adapter_in_model, theirs.LoraConfig(target_modules=["q_proj"]), llama())
    keys = quietly(theirs.get_peft_model_state_dict, other)
    assert ours.get_peft_model_state_dict(model).keys() == keys.keys()
    state = {key: torch.randn_like(value) for key, value in keys.items()}
    quietly(theirs.set_peft_model_state_dict, other, state)
    assert ours.set_peft_model_state_dict(model, state) == ([], [])
    torch.testing.assert_close(logits(model, ids), logits(other, ids), atol=1e-5, rtol=1e-5)
    assert ours.get_model_status(model).adapter_model_type == "None"
    only = ours.inject_adapter_in_model(
        ours.LoraConfig(target_modules=["v_proj"]),
        llama(),
        state_dict={"model.layers.1.self_attn.k_proj.lora_A.weight": torch.zeros(8, 16)},
    )
    assert list(onegraph.adapters_of(only).layers) == ["model.layers.1.self_attn.k_proj"]


def test_status_is_pefts() -> None:
    own, other = two_adapters(), their_model(llama, "LoraConfig", task_type="CAUSAL_LM", r=4)
    other.add_adapter("other", theirs.LoraConfig(task_type="CAUSAL_LM", r=4))
    for model, module in ((own, ours), (other, theirs)):
        model.add_adapter("later", module.LoraConfig(r=2, target_modules=["k_proj"]))  # its layers stand between the others
    assert sorted(own.targeted_module_names) == sorted(set(other.targeted_module_names))
    for _ in range(2):
        mine, expected = own.get_layer_status(), other.get_layer_status()
        assert [vars(each) for each in mine] == [vars(each) for each in expected]
        whole, theirs_whole = vars(ours.get_model_status(own)), vars(other.get_model_status())
        assert whole == theirs_whole
        for model in (own, other):
            quietly(model.unmerge_adapter if model.get_model_status().merged_adapters else model.merge_adapter)
    with own.disable_adapter():
        assert not own.get_model_status().enabled


def test_hotswap(ids: Tensor, tmp_path: Path) -> None:
    torch._dynamo.reset()
    small = trained(our_model(shallow, "LoraConfig", task_type="CAUSAL_LM", r=2, lora_alpha=5, target_modules=["q_proj"]), seed=4)
    small.save_pretrained(tmp_path)
    large = trained(our_model(shallow, "LoraConfig", task_type="CAUSAL_LM", r=6, lora_alpha=5, target_modules=["q_proj"]), seed=5)
    large.save_pretrained(tmp_path / "large")
    model = two_adapters(shallow)
    ours.prepare_model_for_compiled_hotswap(model, target_rank=6)
    onegraph.compile(model, backend="aot_eager")
    logits(model, ids)
    other = logits(model, ids, adapter_names=["other"] * 3)
    with torch.compiler.set_stance("fail_on_recompile"):
        ours.hotswap_adapter(model, tmp_path / "large", "default")
        torch.testing.assert_close(logits(model, ids), logits(large, ids), atol=1e-6, rtol=1e-5)
        ours.hotswap_adapter(model, tmp_path, "default")
        torch.testing.assert_close(logits(model, ids), logits(small, ids), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(logits(model, ids, adapter_names=["other"] * 3), other)
    assert (model.active_adapter, model.peft_config["default"].r) == ("default", 2)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="can't be read"):
        ours.hotswap_adapter(model, tmp_path, "default")
    torch.testing.assert_close(logits(model, ids), logits(small, ids), atol=1e-6, rtol=1e-5)


def test_auto_classes(ids: Tensor, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = trained(ours.get_peft_model(base, ours.LoraConfig(task_type="CAUSAL_LM")).eval())
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    found = ours.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert torch.equal(logits(found, ids), logits(model, ids))
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"base_model: {tmp_path / 'base'}" in card
    assert "library_name: peft" in card
    assert "pipeline_tag: text-generation" in card
    (tmp_path / "adapter" / "README.md").write_text(card.replace("It changes", "By hand: it changes"))
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "README.md").read_text().count("By hand") == 1
    with pytest.raises(ValueError, match="use AutoPeftModelForCausalLM"):
        ours.AutoPeftModel.from_pretrained(str(tmp_path / "adapter"))
    plain = ours.get_peft_model(llama().model, ours.LoraConfig(target_modules=["q_proj"]))
    plain.peft_config["default"].auto_mapping = {"parent_library": "os.path", "base_model_class": "join"}
    plain.peft_config["default"].base_model_name_or_path = "x"
    plain.save_pretrained(tmp_path / "foreign")
    with pytest.raises(ValueError, match="isn't imported"):
        ours.AutoPeftModel.from_pretrained(str(tmp_path / "foreign"))


def test_save_options(ids: Tensor, tmp_path: Path) -> None:
    model = two_adapters()
    model.save_pretrained(tmp_path / "a", is_main_process=False)
    assert not (tmp_path / "a").exists()
    model.save_pretrained(tmp_path / "b", safe_serialization=False, selected_adapters=["other"])
    assert sorted(path.name for path in (tmp_path / "b" / "other").iterdir()) == ["adapter_config.json", "adapter_model.bin"]
    loaded = ours.PeftModel.from_pretrained(llama(), tmp_path / "b" / "other")
    model.set_adapter("other")
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    changed = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "c", state_dict=changed, save_embedding_layers=True)
    weights = ours.load_peft_weights(tmp_path / "c")
    assert all(bool((value == 0).all()) for key, value in weights.items() if "lora_" in key)
    assert "base_model.model.model.embed_tokens.weight" in weights


def test_preparations() -> None:
    model = llama().to(torch.bfloat16)
    adapted = ours.get_peft_model(model, ours.LoraConfig(modules_to_save=["lm_head"]))
    dtypes = {name: parameter.dtype for name, parameter in adapted.named_parameters()}
    assert all(dtype is (torch.float32 if ".default" in name else torch.bfloat16) for name, dtype in dtypes.items())
    ours.cast_mixed_precision_params(adapted, torch.float16)
    dtypes = {name: parameter.dtype for name, parameter in adapted.named_parameters()}
    assert all(dtype is (torch.float32 if ".default" in name else torch.float16) for name, dtype in dtypes.items())
    prepared = ours.prepare_model_for_kbit_training(llama().to(torch.bfloat16))
    assert all(parameter.dtype is torch.float32 and not parameter.requires_grad for parameter in prepared.parameters())
    own = ours.get_peft_model(llama().to(torch.bfloat16), ours.LoraConfig(), autocast_adapter_dtype=False)
    assert {parameter.dtype for parameter in own.parameters()} == {torch.bfloat16}


def test_starts_at_random_where_asked(ids: Tensor) -> None:
    base = logits(llama(), ids)
    for name, fields in (
        ("LoraConfig", {"init_lora_weights": False}),
        ("AdaLoraConfig", {"init_lora_weights": False, "total_step": 9}),
        ("IA3Config", {"init_ia3_weights": False}),
        ("OFTConfig", {"init_weights": False}),
        ("BOFTConfig", {"init_weights": False}),
        ("HRAConfig", {"init_weights": False}),
        ("MissConfig", {"init_weights": False, "r": 8}),
        ("VeraConfig", {"init_weights": False, "r": 4}),
        ("LoHaConfig", {"init_weights": False}),
        ("LoKrConfig", {"init_weights": False}),
    ):
        assert not torch.allclose(logits(our_model(llama, name, **fields), ids), base, atol=1e-5), name
    assert torch.equal(logits(our_model(llama, "LoraConfig"), ids), base)


def test_second_time(ids: Tensor, tmp_path: Path) -> None:
    model = trained(our_model(llama, "LoraConfig"))
    trained(our_model(llama, "LoraConfig"), seed=3).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="adapters already"):
        loaded = ours.PeftModel.from_pretrained(model, tmp_path, "second")
    assert loaded.get_base_model() is model.get_base_model()
    assert list(loaded.peft_config) == ["default", "second"]
    quietly(loaded.delete_adapter, "second")
    with pytest.warns(UserWarning, match="adapters already"):
        again = ours.get_peft_model(model, ours.LoraConfig(r=2))
    assert again.get_base_model() is model.get_base_model()
    assert torch.equal(logits(again, ids), logits(llama(), ids))
    other = ours.get_peft_model(again.unload(), ours.IA3Config())  # no warning any more
    other.add_adapter("lora", ours.LoraConfig())  # another method beside it
    assert other.peft_config["lora"].peft_type == "LORA"
    assert onegraph.adapters_of(other) is other.adapters


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.LoraConfig(task_type="NOTHING"), "task_type='NOTHING' is none of"),
        (lambda: ours.LoraConfig(layers_pattern="h"), "layers_pattern means nothing"),
        (lambda: ours.IA3Config(target_modules=["a"], feedforward_modules=["b"]), "subset"),
        (lambda: ours.OFTConfig(r=2), "exactly one of r and oft_block_size"),
        (lambda: ours.AdaLoraConfig(), "total_step"),
        (lambda: our_model(llama, "LoraConfig", r=0), "r = 0"),
        (lambda: our_model(llama, "LoraConfig", lora_dropout=1.5), "lora_dropout"),
        (lambda: our_model(llama, "LoraConfig", init_lora_weights="pissa"), "init_lora_weights"),
        (lambda: our_model(llama, "LoraConfig", init_lora_weights="eva"), "init_lora_weights"),
        (lambda: our_model(llama, "LoraConfig", use_qalora=True), "QA-LoRA"),
        (lambda: our_model(llama, "LoraConfig", target_modules="q_proj("), "no regular expression"),
        (lambda: our_model(llama, "LoraConfig", exclude_modules="q_proj("), "no regular expression"),
        (lambda: our_model(llama, "LoraConfig", target_modules=["q_proj"], layers_to_transform="0"), "layers_to_transform = '0'"),
        (lambda: our_model(llama, "LoraConfig", target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="("), "layers_pattern"),
        (lambda: our_model(llama, "LoraConfig", modules_to_save="lm_head"), "a list of names was expected"),
        (lambda: our_model(llama, "LoraConfig", task_type="SEQ_CLS", modules_to_save="lm_head"), "a list of names was expected"),
        (lambda: ours.get_peft_model(llama(), {"r": 4}), "a dict was given for a configuration"),
        (lambda: ours.get_peft_model(llama(), ours.LoraConfig(), "n" * 201), "is not a name for an adapter"),
        (lambda: ours.get_peft_model(llama(), ours.LoraConfig(), "__base__"), "stands for rows without one"),
        (lambda: two_adapters().add_weighted_adapter(["default"], [1.0], "__base__"), "stands for rows without one"),
        (lambda: two_adapters()(input_ids=torch.ones(1, 2, dtype=torch.long), adapter_names={"other": 1}), "is no list of names"),
        (lambda: two_adapters().set_adapter(None), "no adapter None"),
        (lambda: two_adapters().save_pretrained("x", selected_adapters=[]), "can't be done"),
        (lambda: our_model(llama, "LoraConfig", target_modules=["nothing"]), "matches no module"),
        (lambda: our_model(llama, "LoraConfig", target_modules="q_proj"), r"a list, which matches endings: \['q_proj'\]"),
        (lambda: our_model(llama, "LoraConfig", target_modules=["q_proj"], layers_to_transform=[7]), "match in layers 0, 1"),
        (lambda: our_model(llama, "LoraConfig", target_modules=["self_attn"]), "can't adapt"),
        (lambda: our_model(llama, "LoraConfig", modules_to_save=["nothing"]), "names no module"),
        (lambda: our_model(lambda: nn.Sequential(nn.Linear(2, 2)), "LoraConfig"), "none are known for model_type 'custom'"),
        (lambda: two_adapters().add_adapter("other", ours.LoraConfig()), "there is an adapter 'other' already"),
        (lambda: two_adapters().set_adapter("othr"), "did you mean 'other'"),
        (lambda: two_adapters().base_model.set_adapter(["default", "other"]), "one adapter is active at a time"),
        (lambda: two_adapters().delete_adapter("nothing"), "no adapter 'nothing'"),
        (lambda: two_adapters().add_weighted_adapter(["default"], [1.0], "m", "mean"), "combination_type is one of"),
        (lambda: two_adapters().add_weighted_adapter(["nothing"], [1.0], "m"), "no adapter 'nothing'"),
        (lambda: two_adapters().save_pretrained("x", selected_adapters=["nothing"]), "can't be done"),
        (lambda: ours.PeftModel.from_pretrained(llama(), "/nowhere/at/all"), "no adapter_config.json at"),
        (lambda: ours.PeftModel(llama(), ours.PeftConfig()), "names no method"),
        (lambda: ours.get_layer_status(llama()), "has no adapters"),
    ],
)
def test_mistakes_are_value_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert isinstance(error.value, OnegraphError)


def test_a_mistake_leaves_the_model_as_it_was(ids: Tensor, tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ours.NoMatchingPeftModuleError):
        ours.get_peft_model(model, ours.LoraConfig(target_modules=["nothing"]))
    with pytest.raises(ConfigurationError):
        ours.get_peft_model(model, ours.LoraConfig(r=-1))
    trained(our_model(gpt2, "LoraConfig", fan_in_fan_out=True)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="layers in"):
        ours.PeftModel.from_pretrained(model, tmp_path)
    assert onegraph.adapters_of(model) is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    own = two_adapters()
    before = logits(own, ids)
    state = ours.get_peft_model_state_dict(own)
    with pytest.raises(ValueError):
        ours.set_peft_model_state_dict(own, {**state, next(iter(state)): torch.zeros(1, 1)})
    assert torch.equal(logits(own, ids), before)
    assert ours.set_peft_model_state_dict(own, {"nothing": torch.zeros(1)}).unexpected_keys == ["nothing"]


def test_a_head_that_is_named_but_not_in_the_file_is_told(tmp_path: Path) -> None:
    our_model(llama, "LoraConfig", target_modules=["q_proj"]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": ["lm_head"]}))
    with pytest.warns(UserWarning, match="missing adapter keys.*base_model.model.lm_head'"):
        ours.PeftModel.from_pretrained(llama(), tmp_path)
    assert two_adapters().load_adapter(tmp_path, "new").missing_keys == ["base_model.model.lm_head"]


def test_names_that_are_not_here() -> None:
    for name in theirs.__all__:
        if not hasattr(BaseTuner, name) and name not in ours.__all__:
            with pytest.raises(ImportError, match=f"onegraph.peft has no {name}: use "):
                getattr(ours, name)
    with pytest.raises(ImportError):
        exec("from onegraph.peft import LoftQConfig")
    with pytest.raises(ImportError, match=r"use onegraph\.adapters\.Adapted"):
        exec("from onegraph.peft.tuners.lora import LoraLayer")
    with pytest.raises(AttributeError, match="did you mean LoraConfig"):
        _ = ours.LoraConfg  # type: ignore[attr-defined]


def test_names_are_imported_from_where_peft_has_them() -> None:
    for line in (
        "from onegraph.peft.helpers import check_if_peft_model, rescale_adapter_scale",
        "from onegraph.peft.tuners import LoraConfig",
        "from onegraph.peft.tuners.lora import LoraModel",
        "from onegraph.peft.utils import get_peft_model_state_dict",
        "import onegraph.peft.utils.hotswap as found; assert found.hotswap_adapter is onegraph.peft.utils.hotswap.hotswap_adapter",
    ):
        exec(line, {"onegraph": onegraph})
    assert not ours.check_if_peft_model("/nowhere/at/all")


def test_strength_for_a_while(ids: Tensor) -> None:
    own, other = our_model(llama, "LoraConfig", init_lora_weights=False), their_model(llama, "LoraConfig")
    quietly(theirs.set_peft_model_state_dict, other, ours.get_peft_model_state_dict(own))
    before = logits(own, ids)
    with ours.rescale_adapter_scale(own, 0.5), theirs.helpers.rescale_adapter_scale(other, 0.5):
        torch.testing.assert_close(logits(own, ids), logits(other, ids), atol=1e-6, rtol=1e-5)
        assert not torch.allclose(logits(own, ids), before, atol=1e-6)
    assert torch.equal(logits(own, ids), before)
    with pytest.raises(ValueError, match="no adapter of the model is a LoRA"), ours.rescale_adapter_scale(our_model(llama, "IA3Config"), 1):
        pass


def test_warnings() -> None:
    with pytest.warns(UserWarning, match="excluded nothing"):
        our_model(llama, "LoraConfig", exclude_modules=["nothing"])
    with pytest.warns(RuntimeWarning, match="nothing"):
        our_model(llama, "LoraConfig", rank_pattern={"nothing": 3})
    with pytest.warns(RuntimeWarning, match=r"target_modules match no module: \['q_prok'\]"):
        our_model(llama, "LoraConfig", target_modules=["q_prok", "v_proj"])
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        model = our_model(gpt2, "LoraConfig")
    assert model.peft_config["default"].fan_in_fan_out


def test_push(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    found: dict[str, Any] = {}

    class Client:
        def __init__(self, token: str | None) -> None: ...

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, **options: Any) -> None:
            found.update(options, files=sorted(path.name for path in Path(options["folder_path"]).iterdir()))

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    our_model(llama, "LoraConfig").push_to_hub("someone/adapter")
    assert found["files"] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert found["repo_id"] == "someone/adapter"
