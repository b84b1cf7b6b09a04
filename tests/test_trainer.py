"""transformers' Trainer, unchanged, with models that have adapters: folders, resuming, compiling, precision, other families, TRL."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import onegraph as og
from onegraph import peft as ours
from onegraph.adapters import Adapted
from onegraph.compiling import Watch, compiled_of
from onegraph.errors import CheckpointError, CompileError, ConfigurationError
from onegraph.hf import trainer as room
from onegraph.hf.registration import after_import

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
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


@KINDS
@pytest.mark.parametrize("compiled", [False, True])
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
