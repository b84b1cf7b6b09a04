"""What a language model answers without an adapter and with it.

    python examples/answers.py MODEL ADAPTER "What is AI?" "Are you sentient?"

MODEL is a folder of transformers, a .gguf file or a name on the Hub; ADAPTER a folder that ``onegraph train text`` wrote. Greedy, so that
two runs say the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import onegraph as og


def main() -> None:
    """Prints both answers to each question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    given = parser.parse_args()
    path = Path(given.model)
    place, where = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (given.model, {})
    tokenizer = AutoTokenizer.from_pretrained(place, **where)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **where).eval()
    adapters = og.load(model, given.adapter, name="tuned")

    def answer(question: str) -> str:
        message = [{"role": "user", "content": question}]
        batch = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ids = model.generate(**batch, do_sample=False, max_new_tokens=given.max_new_tokens, pad_token_id=tokenizer.eos_token_id)
        return " ".join(tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).split())

    for question in given.questions:
        with adapters.disabled():
            before = answer(question)
        print(f"{question}\n  before: {before}\n  after:  {answer(question)}", flush=True)


if __name__ == "__main__":
    main()
