"""Seconds to the first training step of a Llama shape: cold and warm, with 4 and with 12 layers.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/start.py               LoRA and DoRA; writes docs/results/start.md and start.json
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/start.py --only lora   one of them; the other keeps its rows

Every start is a process of its own. A cold one has an empty cache folder, a warm one the folder that a cold one left. The kinds of start
take turns; what counts is the median of the ratios within a turn. Seconds are processor seconds of the process and the compilers that it
starts: with one thread that is the time on an idle machine, and a busy one changes it little.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
# One layer of SmolLM2-135M; the vocabulary is smaller, since embedding and head are not compiled.
HIDDEN, FEED_FORWARD, HEADS, KEY_VALUE_HEADS, VOCABULARY, BATCH, LENGTH, RANK = 576, 1536, 9, 3, 8192, 2, 128, 16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FEW, MANY = 4, 12
REACH = {"layers": 1.2, "warm": 0.35}
METHODS = ("lora", "dora")


def spent() -> float:
    """Processor seconds so far, of this process and of its children that ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(name: str, layers: int, began: float) -> dict[str, Any]:
    """One start; ``began`` is when the process was started."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import onegraph as og
    from onegraph.compiling import Watch

    og.attach, og.compile, og.LoRA, og.DoRA  # noqa: B018 - imported at their first use
    imported = spent()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation="sdpa",
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    adapters = og.attach(model, {"lora": og.LoRA, "dora": og.DoRA}[name](rank=RANK), targets=LINEAR)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    made = spent()
    og.compile(model, backend="inductor")

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        for parameter in adapters.parameters().values():
            parameter.grad = None

    with Watch() as watch:
        step()
        first, clock = spent(), time.time()
        watch.warm()
        step()
        ended = spent()
    counters = torch._dynamo.utils.counters["inductor"]
    return {
        "imports": imported,
        "model": made - imported,
        "first_step": first - made,
        "start": first,
        "step": ended - first,
        "clock": clock - began,
        "phases": watch.phases,
        "graphs": watch.graphs,
        "recompiles": len(watch.recompiles),
        "cache_hits": counters["fxgraph_cache_hit"],
        "cache_misses": counters["fxgraph_cache_miss"],
    }


def in_own_process(name: str, layers: int, cache: str) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, __file__, "--measure", name, "--layers", str(layers), "--began", str(time.time())]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def turn(name: str) -> dict[str, dict[str, Any]]:
    """The four kinds of start, each once."""
    found: dict[str, dict[str, Any]] = {}
    for layers in (FEW, MANY):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                found[f"{kind} {layers}"] = in_own_process(name, layers, cache)
    return found


def report(results: dict[str, list[dict[str, dict[str, Any]]]]) -> str:
    versions = f"torch {importlib.metadata.version('torch')}, transformers {importlib.metadata.version('transformers')}"
    lines = [
        "# Seconds to the first training step",
        "",
        f"`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/start.py`, {versions}, inductor by blocks, one CPU thread.",
        f"Llama shape with SmolLM2-135M's layers: hidden {HIDDEN}, feed-forward {FEED_FORWARD}, {HEADS} heads, {KEY_VALUE_HEADS} of them",
        f"with keys and values, batch {BATCH} x {LENGTH}, fp32, rank {RANK} on all seven linear layers; vocabulary {VOCABULARY}.",
        "Each start is a process of its own; cold: an empty cache folder, warm: a second process on that folder. Seconds are processor",
        "seconds, of the process and of the compilers that it starts: the time on an idle machine, since there is one thread.",
        f"Figures are medians of {turns} turns." if (turns := min(map(len, results.values()))) > 1 else "Figures are of one turn.",
        "",
        "- imports: torch, transformers, onegraph; model: made at random, adapters attached",
        "- first step: forward and backward with all compiling; a later step: one without",
        "- dynamo, AOT, inductor, C++: shares of compiling (C++: code written, built and loaded)",
        "- all: from the start of the process to the end of the first step",
        "",
        "| method | start | imports | model | first step | all | a later step | dynamo | AOT | inductor | C++ | graphs | hits, misses |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, turns in results.items():
        for kind in turns[0]:
            found = [each[kind] for each in turns]

            def share(phase: str, found: list[dict[str, Any]] = found) -> str:
                return f"{statistics.median(each['phases'].get(phase, 0.0) / sum(each['phases'].values()) for each in found):.0%}"

            cells = [name, f"{kind} layers"]
            cells += [
                f"{statistics.median(each[key] for each in found):.2f}" for key in ("imports", "model", "first_step", "start", "step")
            ]
            cells += [share(phase) for phase in ("dynamo", "aot_autograd", "inductor", "code generation")]
            cells += [str(found[-1]["graphs"]), f"{found[-1]['cache_hits']}, {found[-1]['cache_misses']}"]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Ratios: median over turns (smallest to largest). *First step* leaves out what every program pays, compiled or not: imports and",
        "the making of the model.",
        "",
        "| method | ratio | reach | first step | whole start |",
        "|---|---|---|---|---|",
    ]
    for name, turns in results.items():
        for title, reach, above, below in (
            (f"cold, {MANY} layers / {FEW}", REACH["layers"], f"cold {MANY}", f"cold {FEW}"),
            (f"warm / cold, {FEW} layers", REACH["warm"], f"warm {FEW}", f"cold {FEW}"),
            (f"warm / cold, {MANY} layers", REACH["warm"], f"warm {MANY}", f"cold {MANY}"),
        ):
            if not all(above in each and below in each for each in turns):
                continue  # a turn that was broken off
            cells = [name, title, str(reach)]
            for key in ("first_step", "start"):
                ratios = [each[above][key] / each[below][key] for each in turns]
                cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.layers, arguments.began)))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "start.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in arguments.only:
        results[name] = []
    for _ in range(arguments.turns):
        for name in arguments.only:
            results[name].append(turn(name))
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (RESULTS / "start.md").write_text(report({name: turns for name, turns in results.items() if turns}), encoding="utf-8")
    print(report(results))


if __name__ == "__main__":
    main()
