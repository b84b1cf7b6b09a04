"""TRL's SFTTrainer, with a configuration of onegraph.peft in the place of PEFT's.

python examples/sft.py                                     # a small new model
python examples/sft.py --model SmolLM2-135M-Instruct       # a folder, or a name on the Hub
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from onegraph.peft import LoraConfig

QUESTIONS = [
    ("What is a graph?", "Nodes and edges."),
    ("What is an adapter?", "Data that a graph reads."),
    ("Who are you?", "A small model."),
]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def small() -> tuple[Any, Any]:
    """A new model that reads bytes, and its tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reader = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **tokens)), tokenizer


def main(command_line: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model; a small new one otherwise")
    parser.add_argument("--output", type=Path, default=Path("out/sft"))
    parser.add_argument("--backend", default="inductor", help="torch.compile backend; no: eager")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(command_line)

    torch.manual_seed(0)
    model, tokenizer = small() if options.model is None else (options.model, None)
    messages = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in QUESTIONS * 8]
    compiled = {} if options.backend == "no" else {"torch_compile": True, "torch_compile_backend": options.backend}
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"messages": conversation} for conversation in messages]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=SFTConfig(
            str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            logging_steps=max(1, options.steps // 3),
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),  # TRL trains in bfloat16, which it takes for a GPU's otherwise
            **compiled,
        ),
    )
    trainer.train()
    trainer.save_model()  # the adapter, in PEFT's format
    return trainer


if __name__ == "__main__":
    main()
