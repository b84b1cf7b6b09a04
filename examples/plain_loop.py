"""A loop in plain PyTorch: a LoRA adapter on a language model, compiled by its blocks.

python examples/plain_loop.py                              # a small new model, on the text of this file
python examples/plain_loop.py --model SmolLM2-135M --text book.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import onegraph as og

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
)


def main(command_line: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; a small new one otherwise")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what it learns")
    parser.add_argument("--output", type=Path, default=Path("out/plain-loop"), help="folder for the adapter, in PEFT's format")
    parser.add_argument("--backend", default="inductor", help="torch.compile backend; no: eager")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    options = parser.parse_args(command_line)

    torch.manual_seed(0)
    text = options.text.read_text(encoding="utf-8")
    if options.model is None:
        model, ids = LlamaForCausalLM(SMALL), torch.tensor(list(text.encode()))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        ids = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    batches = DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)  # one size, one graph

    adapters = og.attach(model, og.LoRA(rank=8, alpha=16), targets="all-linear")
    og.compile(model, backend=options.backend)  # in place; before or after attaching
    optimizer = torch.optim.AdamW(adapters.parameters().values(), lr=5e-3)

    model.train()
    losses: list[float] = []
    while len(losses) < options.steps:
        for batch in batches:
            # Without the cache of keys and values: nothing is generated here.
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(adapters.parameters().values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == options.steps:
                break
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    adapters.save(options.output, format="peft")
    return losses


if __name__ == "__main__":
    main()
