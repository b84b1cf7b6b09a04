"""transformers' Trainer, as it is: evaluation, checkpoints of adapters, resuming, the best model.

python examples/trainer.py                                 # a small new model, on the text of this file
python examples/trainer.py --resume                        # goes on from the last checkpoint
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import onegraph as og

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
)


def main(command_line: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; a small new one otherwise")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what it learns")
    parser.add_argument("--output", type=Path, default=Path("out/trainer"))
    parser.add_argument("--backend", default="inductor", help="torch.compile backend; no: eager")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args(command_line)

    torch.manual_seed(0)
    text = options.text.read_text(encoding="utf-8")
    if options.model is None:
        model, ids = LlamaForCausalLM(SMALL), torch.tensor(list(text.encode()))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        ids = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0]
    rows = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // options.length * options.length].view(-1, options.length)]

    og.attach(model, og.LoRA(rank=8, alpha=16), targets="all-linear")
    compiled = {} if options.backend == "no" else {"torch_compile": True, "torch_compile_backend": options.backend}
    trainer = Trainer(
        model,
        TrainingArguments(
            str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            logging_steps=max(1, options.steps // 4),
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 2),
            save_strategy="steps",
            save_steps=max(1, options.steps // 2),
            load_best_model_at_end=True,
            report_to=[],
            **compiled,
        ),
        train_dataset=rows[:-4],
        eval_dataset=rows[-4:],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()  # the adapter, in PEFT's format
    return trainer


if __name__ == "__main__":
    main()
