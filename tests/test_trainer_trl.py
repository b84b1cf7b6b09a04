"""TRL's SFTTrainer, and quantised models under both trainers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onegraph as og
from onegraph import peft as ours
from onegraph.adapters import Adapted
from onegraph.compiling import Watch
from onegraph.errors import ConfigurationError

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

_WORDS = ["<pad>", "<end>", "one", "graph", "for", "every", "adapter", "is", "data", "that", "a", "reads"]
_SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The folder of a small model with its tokenizer."""
    reader = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<pad>"))
    reader.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = str(tmp_path / "base")
    transformers.PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(_WORDS), **_SIZES, **tokens)).save_pretrained(folder)
    return folder


def texts() -> Any:
    return datasets.Dataset.from_list(
        [{"text": text} for text in ("every adapter is data", "data that a graph reads", "one graph for every adapter", "a graph") * 2]
    )


def settings(folder: Path, **options: Any) -> Any:
    chosen = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **options,
    }
    return SFTConfig(str(folder), **chosen)


def config(**options: Any) -> Any:
    return ours.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})


def values(model: Any) -> dict[str, Tensor]:
    adapters = og.adapters_of(model)
    assert adapters is not None
    return {f"{path}.{name}": tensor.clone() for path, own in adapters.tensors("default").items() for name, tensor in own.items()}


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


def test_sft_with_a_configuration_of_ours(base: str, tmp_path: Path) -> None:
    """The model by its name, as most programs have it; gradient checkpointing and the loss by chunks are TRL's defaults."""
    found = []
    for options in ({}, COMPILED):
        torch.manual_seed(1)
        trainer = SFTTrainer(base, args=settings(tmp_path / "out", **options), train_dataset=texts(), peft_config=config())
        assert type(trainer.model) is ours.PeftModelForCausalLM
        with Watch() as watch:
            trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert 0 < watch.graphs <= 2, watch.compilations
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), atol=1e-5, rtol=1e-5)
    assert found[0][-1] < found[0][0]
    trainer.save_model()
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("adapter")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not list((tmp_path / "out").glob("model*.safetensors"))


def test_sft_with_a_model_of_ours_resumes_exactly(base: str, tmp_path: Path) -> None:
    def trainer() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        torch.manual_seed(1)
        og.attach(model, og.LoRA(rank=4, dropout=0.1), targets=["q_proj", "v_proj"])
        return SFTTrainer(model, args=settings(tmp_path / "out", save_strategy="steps", save_steps=2), train_dataset=texts())

    whole = trainer()
    whole.train()
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert all(torch.equal(values(again.model)[name], value) for name, value in values(whole.model).items())


def test_sft_refuses_what_would_train_nothing(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SFTTrainer(base, args=settings(tmp_path), train_dataset=texts(), peft_config=config(target_modules=["q_proj", "lm_head"]))
    assert caught.value.code == "trainer-chunked-head"
    SFTTrainer(base, args=settings(tmp_path, loss_type="nll"), train_dataset=texts(), peft_config=config(target_modules=["lm_head"]))
    with pytest.raises(ConfigurationError) as caught:
        SFTTrainer(base, args=settings(tmp_path, chat_template_path=base), train_dataset=texts(), peft_config=config())
    assert caught.value.code == "sft-new-tokens"


def in_4_bits(base: str) -> Any:
    pytest.importorskip("bitsandbytes")
    quantised = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=quantised)


@pytest.mark.parametrize("way", ["attached", "peft", "sft"])
def test_a_quantised_model_trains_and_what_is_saved_is_what_was_trained(way: str, base: str, tmp_path: Path) -> None:
    """TRL gives trained Parameters of a quantised model other memory, in bfloat16: they must stay those that are saved."""
    model = in_4_bits(base)
    torch.manual_seed(1)
    model = ours.get_peft_model(model, config()) if way == "peft" else og.attach(model, og.LoRA(rank=4), targets=["q_proj", "v_proj"]).model
    before = values(model)
    if way == "sft":
        trainer = SFTTrainer(model, args=settings(tmp_path / "out"), train_dataset=texts())
    else:
        ids = [{"input_ids": torch.arange(2, 9), "labels": torch.arange(2, 9)}] * 6
        arguments = {**settings(tmp_path / "out").to_dict()}
        own = {name: arguments[name] for name in ("max_steps", "learning_rate", "use_cpu", "report_to", "disable_tqdm", "save_strategy")}
        trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path / "out"), **own), train_dataset=ids)
    trainer.train()
    after = values(trainer.model)
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    layer = next(module for module in trainer.model.modules() if isinstance(module, Adapted))
    path = next(path for path, own in og.adapters_of(trainer.model).layers.items() if own is layer)
    assert torch.equal(after[f"{path}.up"], layer._parameters["up"].detach())
    assert after[f"{path}.up"].dtype == torch.float32


# Trainers that compare with a reference, or that learn rewards


def pairs() -> Any:
    rows = [("one graph", "for every adapter", "is data"), ("every adapter", "is data", "that a graph reads")] * 4
    return [{"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"} for prompt, good, bad in rows]


def judged() -> Any:
    return [{"prompt": row["prompt"], "completion": row["chosen"], "label": bool(number % 2)} for number, row in enumerate(pairs())]


def prompts() -> Any:
    return [{"prompt": row["prompt"]} for row in pairs()]


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


_GENERATING = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
TRAINERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "DPO": (pairs, {}, {}),
    "KTO": (judged, {}, {}),
    "GRPO": (prompts, _GENERATING, {"reward_funcs": lengths}),
    "RLOO": (prompts, _GENERATING, {"reward_funcs": lengths}),
    "Reward": (lambda: [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in pairs()], {}, {}),
}


def trainer_of(name: str, model: Any, folder: Path, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    rows, own, given = TRAINERS[name]
    chosen = {**vars(settings(folder))}
    fields = ("max_steps", "per_device_train_batch_size", "logging_steps", "learning_rate", "save_strategy", "report_to", "use_cpu", "bf16")
    arguments = {field: chosen[field] for field in fields} | {"disable_tqdm": True, **own, **(options or {})}
    config = getattr(trl, f"{name}Config")(str(folder), **arguments)
    return getattr(trl, f"{name}Trainer")(model, args=config, train_dataset=datasets.Dataset.from_list(rows()), **given, **more)


def told(trainer: Any) -> list[dict[str, float]]:
    """What every step said, without the times."""
    trainer.train()
    kept = ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "logps/chosen")
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history if "loss" in entry]


def plain(base: str, name: str) -> Any:
    torch.manual_seed(2)
    kind = transformers.AutoModelForSequenceClassification if name == "Reward" else transformers.AutoModelForCausalLM
    return kind.from_pretrained(base, **({"num_labels": 1} if name == "Reward" else {}))


@pytest.mark.parametrize("name", TRAINERS)
def test_every_step_is_that_of_a_model_of_peft(name: str, base: str, tmp_path: Path) -> None:
    """An adapter that was trained before; where there is a reference, it is a copy of that."""
    theirs = pytest.importorskip("peft")
    torch.manual_seed(1)
    task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
    ours.get_peft_model(plain(base, name), config(init_lora_weights=False, task_type=task)).save_pretrained(tmp_path / "adapter")
    expected = told(
        trainer_of(name, theirs.PeftModel.from_pretrained(plain(base, name), tmp_path / "adapter", is_trainable=True), tmp_path)
    )
    assert expected[0]["loss"] != expected[-1]["loss"] or name == "RLOO"
    for options in ({}, COMPILED) if name == "DPO" else (COMPILED,):
        model = ours.PeftModel.from_pretrained(plain(base, name), tmp_path / "adapter", is_trainable=True)
        trainer = trainer_of(name, model, tmp_path, options=options)
        with Watch() as watch:
            found = told(trainer)
        assert [pytest.approx(step, rel=1e-3, abs=1e-5) for step in expected] == found
        assert getattr(trainer, "ref_model", None) is None
        assert model.active_adapter == "default"
        assert (0 < watch.graphs <= 3) == bool(options), watch.compilations


@pytest.mark.parametrize("way", ["configuration", "attached"])
def test_the_reference_of_dpo(way: str, base: str, tmp_path: Path) -> None:
    """Of a new adapter it is the base model, whatever was learnt; of an attached one, what that was before training."""
    plain_trainer = trainer_of("DPO", plain(base, "DPO"), tmp_path)
    batch = next(iter(plain_trainer.get_train_dataloader()))
    expected = plain_trainer.compute_ref_log_probs(plain_trainer.model, batch)
    if way == "configuration":
        trainer = trainer_of("DPO", base, tmp_path, peft_config=config(init_lora_weights=False))
    else:
        model = plain(base, "DPO")
        torch.manual_seed(1)
        og.attach(model, og.LoRA(rank=4), targets=["q_proj", "v_proj"])
        trainer = trainer_of("DPO", model, tmp_path)
        assert trainer.model.get_base_model() is model
        assert trainer.ref_model is None
    trainer.train()
    torch.testing.assert_close(trainer.compute_ref_log_probs(trainer.model, batch), expected)
    with torch.no_grad():
        trained = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        before = plain_trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert not torch.allclose(trained, before, atol=1e-3), "nothing trained: the test shows nothing"


def test_trl_refuses_what_it_would_do_wrong(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(code: str, **more: Any) -> None:
        with pytest.raises(ConfigurationError) as caught:
            trainer_of("DPO", more.pop("model", base), tmp_path, **more)
        assert caught.value.code == code

    model = plain(base, "DPO")
    og.attach(model, og.LoRA(rank=4), targets=["q_proj"], name="mine")
    refused("trl-adapters", model=model)
    monkeypatch.setattr("transformers.utils.import_utils.is_peft_available", lambda: False)
    refused("trl-needs-peft", peft_config=config())
