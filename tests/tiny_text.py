"""A language model of a few thousand weights with a tokenizer of bytes, rows to learn, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from onegraph.cli.train import train_text

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer_of_bytes(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers, 16 wide."""
    sizes: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def write_model(folder: Path, *, template: str | None = CHATML, model: PreTrainedModel | None = None) -> Path:
    """A folder of transformers."""
    (tiny_llama() if model is None else model).save_pretrained(folder)
    tokenizer_of_bytes(template).save_pretrained(folder)
    return folder


def chat(*turns: str) -> dict[str, Any]:
    """A row of user and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]}


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """A file of JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int) -> list[dict[str, Any]]:
    """Short questions and answers of several lengths."""
    return [chat(f"say {number}", "ab" * (1 + number % 5)) for number in range(count)]


def flags(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    """A short run, not compiled."""
    base = ["--model", str(model), "--data", str(data), "--output-dir", str(output), "--backend", "no", "--seed", "3", "--quiet"]
    return [*base, "--batch-size", "2", "--steps", "4", "--learning-rate", "1e-2", "--max-length", "64", *more]


def train(arguments: Sequence[str]) -> int:
    """The command, in this process."""
    return train_text(list(arguments))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter in PEFT's format."""
    return load_file(folder / "adapter_model.safetensors")
