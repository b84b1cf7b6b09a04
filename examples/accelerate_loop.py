"""A loop with accelerate: device, precision, processes and compiling as ``accelerate config`` says.

accelerate launch examples/accelerate_loop.py
accelerate launch --dynamo_backend inductor --mixed_precision bf16 examples/accelerate_loop.py --model SmolLM2-135M --text book.txt
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py             # also on a machine without a GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import onegraph as og
from onegraph.compiling import resolve_settings

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
)


def main(command_line: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; a small new one otherwise")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what it learns")
    parser.add_argument("--output", type=Path, default=Path("out/accelerate-loop"), help="folder for the adapter, in PEFT's format")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    options = parser.parse_args(command_line)

    # What accelerate would compile whole is compiled by blocks, with the backend that it was told; so it is told to compile nothing itself.
    settings = resolve_settings()
    # Several processes on a CPU find each other only where accelerate is told that it is one.
    accelerator = Accelerator(dynamo_backend="no", gradient_accumulation_steps=2, cpu=not torch.accelerator.is_available())

    torch.manual_seed(0)
    text = options.text.read_text(encoding="utf-8")
    if options.model is None:
        model, ids = LlamaForCausalLM(SMALL), torch.tensor(list(text.encode()))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        ids = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    batches = DataLoader(rows, batch_size=4, shuffle=True, drop_last=True)  # one size, one graph

    adapters = og.attach(model, og.LoRA(rank=8, alpha=16), targets="all-linear")
    accelerator.print(og.compile(model, settings))
    optimizer = torch.optim.AdamW(adapters.parameters().values(), lr=5e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    model.train()
    losses: list[float] = []
    while len(losses) < options.steps:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(adapters.parameters().values(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if len(losses) == options.steps:
                break
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if accelerator.is_main_process:
        adapters.save(options.output, format="peft")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
