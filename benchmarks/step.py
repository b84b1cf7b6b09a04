"""Seconds to the first step, cold and warm, and the compiled step against the eager one, on the demo model and on an SD 1.x-sized UNet.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/step.py                 both models; writes docs/results/step.md and step.json
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/step.py --model demo    one of them

Each model is measured in two processes that share a fresh cache folder: the first is cold, the second warm. Compiled and eager steps run
in turn in one process, so a busy machine hits both; what counts is the ratio of the medians.
"""

from __future__ import annotations

import argparse
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
CASES = {
    "demo": {"title": "demo model, 128x128, batch 4, fp32, rank 16", "rounds": 15},
    "sd1": {"title": "SD 1.x UNet (860 M parameters, random), 256x256, batch 1, fp32, rank 16", "rounds": 2},
}


def measure(model: str, rounds: int) -> dict[str, Any]:
    import torch
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from torch import Tensor

    import onegraph as og
    from onegraph.checking import compare_step
    from onegraph.compiling import Watch, eager
    from onegraph.training.diffusion.base_model import load_base_model
    from onegraph.training.diffusion.families import SD_V1

    torch.manual_seed(0)
    if model == "demo":
        unet = load_base_model(str(ROOT / "demo" / "model" / "tiny-sd.safetensors")).unet
        batch, size = 4, 16
    else:
        unet = UNet2DConditionModel.from_config(SD_V1.configuration()["unet"])
        batch, size = 1, 32
    unet.train()
    adapters = og.attach(
        unet, og.LoRA(rank=16), targets=lambda path, module: ".attentions." in path and type(module) in (torch.nn.Linear, torch.nn.Conv2d)
    )
    parameters = list(adapters.parameters().values())
    latents, target = torch.randn(batch, 4, size, size), torch.randn(batch, 4, size, size)
    text = torch.randn(batch, 77, unet.config.cross_attention_dim)
    timesteps = torch.randint(0, 1000, (batch,))

    def loss(_: object = None) -> Tensor:
        output = unet(latents, timesteps, text, return_dict=False)[0]
        return (output - target).square().mean()

    def step() -> float:
        began = time.perf_counter()
        torch.autograd.grad(loss(), parameters)
        return time.perf_counter() - began

    with eager():
        step()
    og.compile(unet, backend="inductor")
    with Watch() as watch:
        first = step()
        graphs, compile_seconds = watch.graphs, watch.compile_seconds
        watch.warm()
        times: dict[str, list[float]] = {"compiled": [], "eager": []}
        step()
        for _ in range(rounds):
            times["compiled"].append(step())
            with eager():
                times["eager"].append(step())
        recompiles, breaks = len(watch.recompiles), len(watch.breaks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    comparison = compare_step(loss, adapters.parameters(), models=[unet], adapters=[adapters])
    return {
        "first_step_seconds": first,
        "compile_seconds": compile_seconds,
        "graphs": graphs,
        "breaks": breaks,
        "recompiles": recompiles,
        "compiled_seconds": times["compiled"],
        "eager_seconds": times["eager"],
        "peak_gib": peak,
        "gradient_error": comparison.total_error,
        "right": comparison.right,
    }


def in_own_process(model: str, cache: str) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, __file__, "--model", model, "--measure"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def report(results: dict[str, dict[str, Any]]) -> str:
    import torch

    lines = [
        "# A training step, compiled and eager",
        "",
        f"`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/step.py`, torch {torch.__version__}, inductor by blocks, one CPU thread.",
        "Forward and backward of the UNet with LoRA on its attention layers; median (smallest to largest) of steps run in turn.",
        "",
        "| | " + " | ".join(CASES[model]["title"] for model in results) + " |",  # type: ignore[misc]
        "|---|" + "---|" * len(results),
    ]

    def row(name: str, cell: Any) -> None:
        lines.append(f"| {name} | " + " | ".join(cell(found) for found in results.values()) + " |")

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3g} s ({min(values):.3g} to {max(values):.3g})"

    row("first step, cold cache", lambda found: f"{found['cold']['first_step_seconds']:.0f} s")
    row("first step, warm cache", lambda found: f"{found['warm']['first_step_seconds']:.0f} s")
    row("eager step", lambda found: spread(found["warm"]["eager_seconds"]))
    row("compiled step", lambda found: spread(found["warm"]["compiled_seconds"]))
    row(
        "compiled / eager",
        lambda found: f"{statistics.median(found['warm']['compiled_seconds']) / statistics.median(found['warm']['eager_seconds']):.2f}",
    )
    row("graphs, breaks, recompiles", lambda found: ", ".join(str(found["warm"][key]) for key in ("graphs", "breaks", "recompiles")))
    row("gradient error against eager", lambda found: f"{found['warm']['gradient_error']:.1e}")
    row("peak memory, whole process", lambda found: f"{found['cold']['peak_gib']:.1f} GiB")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES, action="append")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.model or list(CASES)
    if arguments.measure:
        print(json.dumps(measure(models[0], int(CASES[models[0]]["rounds"]))))  # type: ignore[call-overload]
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "step.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for model in models:
        with tempfile.TemporaryDirectory() as cache:
            results[model] = {"cold": in_own_process(model, cache), "warm": in_own_process(model, cache)}
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "step.md").write_text(report(results), encoding="utf-8")
        print(report(results), flush=True)


if __name__ == "__main__":
    main()
