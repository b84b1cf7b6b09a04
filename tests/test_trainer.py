"""transformers' Trainer, unchanged, with models that have adapters: folders, resuming, compiling, precision, other families, TRL."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import onegraph as og
from onegraph import peft as ours
from onegraph.compiling import Watch
from onegraph.errors import CheckpointError, CompileError, ConfigurationError
from onegraph.hf import trainer as room
from onegraph.hf.registration import after_import

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    # Loading an optimizer's state: torch's own rebuilding of a typed storage.
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
]

_SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
Rows = list[dict[str, Tensor]]


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**_SIZES, **options}, num_key_value_heads=2, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


def attached(base: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    og.attach(base, og.LoRA(rank=4, **options), targets=["q_proj", "v_proj"])
    return base


def through_peft(base: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    settings = {"lora_dropout": options["dropout"]} if options else {}
    return ours.get_peft_model(base, ours.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings))


KINDS = pytest.mark.parametrize("adapted", [attached, through_peft])
Adapt = Callable[..., Any]


def rows(number: int, lengths: Callable[[int], int] = lambda row: 9, seed: int = 3) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, 40, (lengths(row),), generator=generator)} for row in range(number)]


def padded(batch: Rows) -> dict[str, Tensor]:
    """Right padding, as DataCollatorWithPadding does it, and labels."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["input_ids"]) for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder: Path, **options: Any) -> Any:
    chosen = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 0.05,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    return TrainingArguments(str(folder), **chosen)


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    kept = {name: options.pop(name) for name in ("train_dataset", "eval_dataset", "data_collator") if name in options}
    data = {"train_dataset": rows(8), "eval_dataset": rows(4, seed=5), "data_collator": padded, **kept}
    return Trainer(model, arguments(folder, **options), **data)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: Any) -> dict[str, Tensor]:
    adapters = og.adapters_of(model)
    assert adapters is not None
    return {f"{path}.{name}": value.clone() for path, own in adapters.tensors(adapters.names[0]).items() for name, value in own.items()}


# Folders


@pytest.mark.parametrize(("adapted", "compiled"), [(attached, True), (through_peft, False)])
def test_a_resumed_run_ends_as_the_one_that_was_not_stopped(adapted: Adapt, compiled: bool, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "torch_compile": compiled, "torch_compile_backend": "eager" if compiled else None}
    whole = trainer_of(adapted(llama(), dropout=0.2), tmp_path, **options)
    whole.train()
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir() if path.name != "README.md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    ]
    again = trainer_of(adapted(llama(), dropout=0.2), tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(whole)  # the first two out of the state
    assert len(set(losses(whole))) == 4
    expected, found = weights(whole.model), weights(again.model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    fresh = weights(adapted(llama(), dropout=0.2))
    assert not any(torch.equal(fresh[name], value) for name, value in expected.items()), "nothing trained: the test shows nothing"


def test_adalora_allocates_in_a_callback_as_with_peft_and_resumes(tmp_path: Path) -> None:
    def trainer(library: Any, folder: Path, **options: Any) -> Any:
        fields = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": 8, "target_modules": ["q_proj", "v_proj"]}
        torch.manual_seed(1)
        model = library.get_peft_model(llama(), library.AdaLoraConfig(**fields, task_type="CAUSAL_LM"))
        library.set_peft_model_state_dict(model, load_file(tmp_path / "start" / "adapter_model.safetensors"))

        class Allocate(transformers.TrainerCallback):
            def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                model.base_model.update_and_allocate(state.global_step + 1)

        made = trainer_of(model, folder, max_steps=8, **options)
        made.add_callback(Allocate())
        return made

    ours.get_peft_model(
        llama(), ours.AdaLoraConfig(init_r=4, total_step=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).save_pretrained(tmp_path / "start")
    expected = trainer(theirs, tmp_path / "theirs")
    expected.train()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "steps", "save_steps": 5}
    whole = trainer(ours, tmp_path / "ours", **compiled)
    with Watch() as watch:
        whole.train()
    assert watch.recompiles == []
    assert losses(whole) == pytest.approx(losses(expected), rel=1e-5)
    counts = [
        {name.removesuffix(".default"): sum(kept) for name, kept in run.model.peft_config["default"].rank_pattern.items()}
        for run in (whole, expected)
    ]
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) == 8
    again = trainer(ours, tmp_path / "ours", **compiled)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-5"))
    assert losses(again) == losses(whole)
    assert all(torch.equal(weights(again.model)[name], value) for name, value in weights(whole.model).items())


def test_an_adapter_beside_weights_that_its_start_changed_resumes_beside_them(tmp_path: Path) -> None:
    def adopted() -> Any:
        return og.adopt(theirs.get_peft_model(llama(), theirs.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora"))).model

    whole = trainer_of(adopted(), tmp_path, save_strategy="steps", save_steps=2)
    whole.train()
    again = trainer_of(adopted(), tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(whole)
    assert all(torch.equal(weights(again.model)[name], value) for name, value in weights(whole.model).items())


@KINDS
def test_a_checkpoint_is_an_adapter_for_peft(adapted: Adapt, tmp_path: Path) -> None:
    trainer = trainer_of(adapted(llama()), tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    ids = rows(1)[0]["input_ids"][None]
    model = trainer.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs.PeftModel.from_pretrained(llama(), str(tmp_path / "checkpoint-4")).eval()
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, llama().eval()(ids).logits, atol=1e-3)
        torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    keys = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    assert all("lora_" in key for key in keys)
    assert sum(value.numel() for value in keys.values()) == 4 * 2 * 2 * (16 + 16)


@KINDS
def test_the_best_model_is_loaded_at_the_end(adapted: Adapt, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    # A rate at which it gets worse.
    trainer = trainer_of(adapted(llama()), tmp_path, **best)
    trainer.train()
    found = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    step = min(found, key=lambda number: found[number])
    assert step < 4, f"the last one was the best, which shows nothing: {found}"
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{step}")
    assert trainer.evaluate()["eval_loss"] == found[step]
    assert any(parameter.requires_grad for parameter in trainer.model.parameters())


def test_modules_trained_whole_resume_exactly_too(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(1)
        config = ours.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], bias="none", task_type="CAUSAL_LM")
        return ours.get_peft_model(llama(), config)

    options = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer_of(model(), tmp_path, **options)
    whole.train()
    again = trainer_of(model(), tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected, found = weights(whole.model), weights(again.model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    exact, rounded = model(), model()
    trainer_of(exact, tmp_path)._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    # Without the exact state the differences from the base come out of sums, rounded.
    (tmp_path / "checkpoint-2" / "adapter_state.safetensors").unlink()
    trainer_of(rounded, tmp_path)._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(weights(rounded), weights(exact), atol=1e-6, rtol=1e-6)
    assert not torch.equal(weights(rounded)["lm_head.weight_difference"], weights(exact)["lm_head.weight_difference"])


def test_several_adapters_are_all_saved_and_found_again(tmp_path: Path) -> None:
    def model() -> Any:
        base = attached(llama())
        adapters = og.adapters_of(base)
        torch.manual_seed(2)
        adapters.add("second", og.LoRA(rank=2))
        adapters.use("second")
        return base

    trainer = trainer_of(model(), tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    assert (tmp_path / "checkpoint-4" / "second" / "adapter_model.safetensors").is_file()
    again = trainer_of(model(), tmp_path)
    again._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    expected, found = og.adapters_of(trainer.model), og.adapters_of(again.model)
    assert found.active == "second"
    for name in ("default", "second"):
        for path, own in expected.tensors(name).items():
            assert all(torch.equal(found.tensors(name)[path][key], value) for key, value in own.items())


def test_save_pretrained_of_an_adapted_model_writes_its_adapters(tmp_path: Path) -> None:
    model = attached(llama())
    model.save_pretrained(tmp_path / "adapters")
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(ConfigurationError) as caught:
        model.save_pretrained(tmp_path, push_to_hub=True)
    assert caught.value.code == "trainer-save"
    og.adapters_of(model).detach()
    model.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").is_file()


def test_weight_decay_reaches_adapters_under_names_of_peft(tmp_path: Path) -> None:
    trainer = trainer_of(through_peft(llama()), tmp_path, weight_decay=0.1)
    trainer.create_optimizer()
    groups = {group["weight_decay"]: len(group["params"]) for group in trainer.optimizer.param_groups}
    assert groups == {0.1: 8, 0.0: 0}


# Compiled

DYNAMO = "ACCELERATE_DYNAMO_"


@pytest.mark.parametrize(
    ("how", "adapted"),
    [("flag", through_peft), ("environment", attached), ("by hand", through_peft), ("by hand and flag", attached)],
)
def test_one_graph_to_train_and_one_to_evaluate(how: str, adapted: Adapt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if "flag" in how else {}
    if how == "environment":  # what "accelerate launch" makes of its file, dynamic shapes included that nobody asked for
        for name, value in {"BACKEND": "AOT_EAGER", "MODE": "default", "USE_FULLGRAPH": "False", "USE_DYNAMIC": "False"}.items():
            monkeypatch.setenv(f"{DYNAMO}{name}", value)
    expected = trainer_of(adapted(llama()), tmp_path, **({"torch_compile_backend": None} if how == "environment" else {}))
    model = adapted(llama())
    if "hand" in how:
        og.compile(model, backend="aot_eager")
    trainer = trainer_of(model, tmp_path, **options)
    with Watch() as training:
        trainer.train()
    with Watch() as evaluation:
        trainer.evaluate()
    assert (training.graphs, evaluation.graphs) == (1, 1), (training.compilations, evaluation.compilations)
    assert training.breaks == {}
    assert trainer.model_wrapped is trainer.model
    assert trainer.accelerator.state.dynamo_plugin.backend.value.lower() == ("no" if how == "by hand" else "aot_eager")
    if how in ("by hand", "flag"):
        monkeypatch.delenv(f"{DYNAMO}BACKEND", raising=False)
        expected.train()
        torch.testing.assert_close(torch.tensor(losses(trainer)), torch.tensor(losses(expected)), atol=1e-5, rtol=1e-5)


def varied(number: int) -> int:
    return 5 + (7 * number) % 13


@pytest.mark.parametrize("grouped", [False, True])
def test_batches_of_many_lengths_cost_two_graphs(grouped: bool, tmp_path: Path) -> None:
    sampling = {"train_sampling_strategy": "group_by_length"} if grouped else {}
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": -1, "num_train_epochs": 2, **sampling}
    # 15 rows: the last batch of an epoch is a smaller one.
    data = {"train_dataset": rows(15, varied), "eval_dataset": rows(7, varied, seed=5)}
    trainer = trainer_of(attached(llama()), tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=4, **data, **options)
    with Watch() as training:
        trainer.train()
    with Watch() as evaluation:
        trainer.evaluate()
        trainer.predict(rows(6, varied, seed=6))
    assert training.graphs == 2, training.compilations
    assert evaluation.graphs <= 2, evaluation.compilations


def test_without_the_two_sizes_there_are_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onegraph.hf.compilation.compile_for_two_sizes", lambda *given: False)
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": -1, "num_train_epochs": 1}
    trainer = trainer_of(attached(llama()), tmp_path, train_dataset=rows(7, varied), **options)
    with Watch() as training:
        trainer.train()
    assert training.graphs > 2


@pytest.mark.parametrize(
    ("options", "adapted"),
    [
        ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, attached),
        ({"label_smoothing_factor": 0.1}, through_peft),
        ({"gradient_checkpointing": True}, attached),
        ({"gradient_checkpointing": True, "bf16": True}, through_peft),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, attached),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else given.__name__,
)
def test_compiled_losses_are_those_of_eager(options: dict[str, Any], adapted: Adapt, tmp_path: Path) -> None:
    both = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        trainer = trainer_of(adapted(llama()), tmp_path, max_steps=3, **options, **compiled)
        with Watch() as watch:
            trainer.train()
            evaluated = trainer.evaluate()["eval_loss"]
        both.append(torch.tensor([*losses(trainer), evaluated]))
        assert watch.graphs == (2 if compiled else 0), watch.compilations
    tolerance = 2e-2 if "bf16" in options else 1e-5
    torch.testing.assert_close(both[1], both[0], atol=tolerance, rtol=tolerance)
    assert both[0][0] != both[0][2]


def test_a_model_made_by_model_init_is_compiled_each_time(tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
    trainer = Trainer(
        model_init=lambda: attached(llama(num_hidden_layers=1)),
        args=arguments(tmp_path, **options),
        train_dataset=rows(4),
        data_collator=padded,
    )
    first = trainer.model
    with Watch() as watch:
        trainer.train()
    assert trainer.model is not first
    assert watch.graphs == 1, watch.compilations


# Other families


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES, max_position_embeddings=32))


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def classified(batch: Rows) -> dict[str, Tensor]:
    found = padded(batch)
    return {**found, "labels": found["input_ids"][:, 0] % 2}


FAMILIES = {
    "gpt2": (gpt2, ours.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"), padded, 2),
    "bert": (bert, ours.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"), classified, 4),
    # Blocks of an encoder and of a decoder, in training and in evaluation.
    "t5": (t5, ours.LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"), padded, 4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_train_evaluate_and_resume(family: str, tmp_path: Path) -> None:
    make, config, collator, most = FAMILIES[family]

    def trainer(compiled: bool) -> Any:
        model = make()
        torch.manual_seed(1)
        options = {
            "torch_compile": compiled,
            "torch_compile_backend": "eager" if compiled else None,
            "save_strategy": "steps",
            "save_steps": 2,
        }
        return trainer_of(ours.get_peft_model(model, config.copy()), tmp_path, max_steps=3, data_collator=collator, **options)

    whole = trainer(compiled=True)
    with Watch() as watch:
        whole.train()
        assert whole.evaluate()["eval_loss"] > 0
    assert 0 < watch.graphs <= most, watch.compilations
    again = trainer(compiled=False)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(whole)


@pytest.mark.parametrize("adapted", [attached, through_peft])
def test_generating_while_it_evaluates(adapted: Adapt, tmp_path: Path) -> None:
    """Seq2SeqTrainer: the same texts and losses as uncompiled; generating adds no graph, whatever the lengths."""

    def put(model: Any) -> Any:
        torch.manual_seed(1)
        if adapted is attached:
            return og.attach(model, og.LoRA(rank=2), targets=["q", "v"]).model
        return ours.get_peft_model(model, ours.LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"))

    found = []
    for compiled in (False, True):
        options = {"torch_compile": compiled, "torch_compile_backend": "eager" if compiled else None}
        settings = {**vars(arguments(tmp_path)), **options}
        chosen = {name: settings[name] for name in ("max_steps", "learning_rate", "report_to", "use_cpu", "disable_tqdm", *options)}
        trainer = transformers.Seq2SeqTrainer(
            put(t5()),
            transformers.Seq2SeqTrainingArguments(
                str(tmp_path), predict_with_generate=True, generation_max_length=12, save_strategy="no", eval_strategy="epoch", **chosen
            ),
            train_dataset=rows(8),
            eval_dataset=rows(8, lambda row: 5 + row, seed=5),
            data_collator=padded,
        )
        with Watch() as watch:
            trainer.train()
        trained = watch.graphs
        with Watch() as watch:
            for length in (6, 9, 12):
                result = trainer.predict(rows(4, lambda row, length=length: length - row % 3, seed=6), max_length=length)
        found.append((losses(trainer), result.predictions.tolist(), result.metrics["test_loss"]))
        assert watch.graphs == 0, watch.compilations
    assert 0 < trained <= 3
    assert found[0][1] == found[1][1]
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][2] == pytest.approx(found[1][2])


def test_a_model_that_is_not_of_transformers_saves_adapters_only(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(9, 3)

        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            logits = self.inner(input_ids.float() / 40)
            return {"loss": logits.square().mean(), "logits": logits}

    def model() -> nn.Module:
        torch.manual_seed(0)
        found = Plain()
        og.attach(found, og.LoRA(rank=2), targets=["inner"])
        return found

    trainer = trainer_of(model(), tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    again = trainer_of(model(), tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(trainer)


# Errors


def refused(code: str, call: Callable[[], Any], kind: type[Exception] = ConfigurationError) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert getattr(caught.value, "code", "") == code


def test_what_would_lose_adapters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    refused("trainer-wrapped", lambda: trainer_of(torch.compile(attached(llama()), backend="eager"), tmp_path), CompileError)
    refused("trainer-adapters-inside", lambda: trainer_of(Around(attached(llama())), tmp_path))
    trainer = trainer_of(attached(llama()), tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    refused("resume-adapter", lambda: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1")), CheckpointError)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    refused("trainer-data-parallel", lambda: trainer_of(attached(llama()), tmp_path))
    monkeypatch.undo()
    sharded = trainer_of(llama(), tmp_path)
    sharded.model, sharded.is_fsdp_enabled = attached(llama()), True
    refused("trainer-sharded", lambda: room.take_over(sharded))


def test_a_run_in_which_nothing_would_train_is_refused(tmp_path: Path) -> None:
    for spoil in (
        lambda own: own.merge(),
        lambda own: own.use(None),
        lambda own: [parameter.requires_grad_(False) for parameter in own.parameters().values()],
    ):
        model = attached(llama())
        spoil(og.adapters_of(model))
        refused("trainer-nothing-trains", trainer_of(model, tmp_path).train)
        model.lm_head.weight.requires_grad_(True)  # now something does
        trainer_of(model, tmp_path, max_steps=1).train()


def test_a_run_without_data_is_refused(tmp_path: Path) -> None:
    refused("trainer-no-data", trainer_of(attached(llama()), tmp_path, train_dataset=[]).train)


def test_a_checkpoint_that_is_not_whole_is_found_before_anything_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(attached(llama()), tmp_path, save_strategy="steps", save_steps=2).train()
    whole, last = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"

    def resumed() -> Any:
        again = trainer_of(attached(llama()), tmp_path, max_steps=5)
        before = weights(again.model)
        with pytest.raises(CheckpointError) as caught:
            again.train(resume_from_checkpoint=str(last))
        assert caught.value.code == "trainer-checkpoint"
        assert str(whole) in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in weights(again.model).items())

    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        kept = (last / name).read_bytes()
        (last / name).write_bytes(kept[: len(kept) // 2])
        resumed()
        if name != "rng_state.pth":
            (last / name).unlink()
            resumed()
        (last / name).write_bytes(kept)
    for name in ("optimizer.pt", "scheduler.pt"):
        (last / name).unlink()
    trainer_of(attached(llama()), tmp_path, max_steps=5).train(resume_from_checkpoint=str(last))
    assert "the optimizer begins anew" in caplog.text


def test_a_trainer_without_adapters_is_left_alone(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), tmp_path)
    assert type(trainer) is Trainer
    subclass = type("Mine", (Trainer,), {})
    mine = subclass(attached(llama()), arguments(tmp_path), data_collator=padded)
    assert isinstance(mine, subclass)
    assert isinstance(mine, room.AdapterTrainer)
    assert type(mine).__name__ == "Mine"


def test_adapters_that_come_after_the_trainer_are_found_before_it_trains(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    options = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(model, tmp_path, max_steps=1, **options)
    attached(model)
    trainer.train()
    assert isinstance(trainer, room.AdapterTrainer)
    assert trainer.model_wrapped is model
    assert not (tmp_path / "checkpoint-1" / "model.safetensors").exists()


def test_without_peft_the_model_inside_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transformers.trainer_utils", "transformers.trainer"):
        monkeypatch.setattr(f"{module}.is_peft_available", lambda: False)
    model = through_peft(llama())
    trainer = trainer_of(model, tmp_path, save_strategy="steps", save_steps=2, label_smoothing_factor=0.1)
    assert trainer.model is model.get_base_model()
    trainer.train()
    config = json.loads((tmp_path / "checkpoint-2" / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM"
    again = trainer_of(through_peft(llama()), tmp_path, label_smoothing_factor=0.1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(trainer)


def test_a_model_is_taken_for_one_of_peft_and_stays_ours() -> None:
    model = through_peft(llama())
    assert isinstance(model, theirs.PeftModelForCausalLM)
    assert isinstance(model, ours.PeftModelForCausalLM)
    assert type(model) is ours.PeftModelForCausalLM
    assert not isinstance(model, theirs.PeftModelForSeq2SeqLM)
    # What a library that shards does.
    shown = model.__class__
    model.__class__ = type("Sharded", (shown,), {"reshard": lambda self: "done"})
    assert type(model).__mro__[1] is ours.PeftModelForCausalLM
    assert model.reshard() == "done"
    assert isinstance(model, theirs.PeftModel)


def test_a_module_is_handed_over_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    after_import("late_module", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module("late_module")
    assert seen == [1]
    after_import("late_module", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    sys.modules.pop("late_module")
