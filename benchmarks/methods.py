"""What a training step with each method costs over the compiled frozen model: time, seconds to the first step, memory kept for backward.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/methods.py                      all; writes docs/results/methods.md and methods.json
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/methods.py --only lora dora     some; the others keep their rows

The floor is the same Llama-shaped model, compiled and frozen, with the same loss and backward to the input embeddings. Floor and method
step in turn in one process, so that a busy machine hits both; what counts is the ratio of the medians. Every method has a process and a
fresh cache folder of its own. ``--peft`` measures PEFT's version of the method in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
HIDDEN, FEED_FORWARD, LAYERS, BATCH, LENGTH, VOCABULARY = 768, 2048, 2, 2, 256, 32_000
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What to reach (over the floor), and what PEFT 0.21.2 had in an earlier measurement.
REACH = {
    "lora": 1.05,
    "adalora": 1.05,
    "ia3": 1.05,
    "norm_tuning": 1.05,
    "vera": 1.05,
    "vera on attention": 1.05,
    "dora": 1.10,
    "oft": 1.15,
    "hra": 1.15,
    "lokr": 1.15,
    "boft": 1.25,
    "loha": 1.7,
}

NOTES = "## What falls short"


def methods() -> dict[str, tuple[Callable[[], Any], list[str]]]:
    """Name -> method, made when it is needed, and targets."""
    import onegraph as og

    return {
        "lora": (lambda: og.LoRA(rank=16), LINEAR),
        "dora": (lambda: og.DoRA(rank=16), LINEAR),
        "adalora": (lambda: og.AdaLoRA(rank=16), LINEAR),
        "ia3": (lambda: og.IA3(), LINEAR),
        "norm_tuning": (lambda: og.NormTuning(), ["input_layernorm", "post_attention_layernorm", "norm"]),
        "loha": (lambda: og.LoHa(rank=16), LINEAR),
        "lokr": (lambda: og.LoKr(rank=16), LINEAR),
        "vera": (lambda: og.VeRA(rank=64), LINEAR),
        "vera on attention": (lambda: og.VeRA(rank=64), LINEAR[:4]),
        "oft": (lambda: og.OFT(block_size=32), LINEAR),
        "boft": (lambda: og.BOFT(block_size=8), LINEAR),
        "hra": (lambda: og.HRA(rank=8), LINEAR),
        "dense": (lambda: og.Dense(), LINEAR),
        "miss": (lambda: og.MiSS(rank=16), LINEAR),
        "vblora": (lambda: og.VBLoRA(rank=4, num_vectors=64, vector_length=256), LINEAR),
    }


def peft_methods() -> dict[str, Any]:
    """Name -> PEFT's configuration of the same."""
    import peft

    return {
        "lora": peft.LoraConfig(r=16, target_modules=LINEAR),
        "dora": peft.LoraConfig(r=16, target_modules=LINEAR, use_dora=True),
        "adalora": peft.AdaLoraConfig(init_r=16, target_r=8, total_step=1000, target_modules=LINEAR),
        "ia3": peft.IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"]),
        "norm_tuning": peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm", "norm"]),
        "loha": peft.LoHaConfig(r=16, target_modules=LINEAR),
        "lokr": peft.LoKrConfig(r=16, target_modules=LINEAR),
        "vera": peft.VeraConfig(r=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        "oft": peft.OFTConfig(oft_block_size=32, target_modules=LINEAR),
        "boft": peft.BOFTConfig(boft_block_size=8, target_modules=LINEAR),
        "hra": peft.HRAConfig(r=8, target_modules=LINEAR),
        "miss": peft.MissConfig(r=16, target_modules=LINEAR),
        "vblora": peft.VBLoRAConfig(r=4, num_vectors=64, vector_length=256, target_modules=LINEAR),
    }


def phases() -> dict[str, float]:
    """Seconds of this process in each phase of compiling so far, by torch's own clocks."""
    from torch._dynamo.utils import compilation_time_metrics

    def total(name: str) -> float:
        return sum(compilation_time_metrics.get(name, []))

    inside = total("compile_fx.<locals>.fw_compiler_base")
    return {
        "dynamo": total("_compile.compile_inner") - total("OutputGraph.call_user_compiler"),
        "AOT": total("create_aot_dispatcher_function") - inside,
        "inductor": inside + total("compile_fx.<locals>.bw_compiler") - total("compile_file"),
        "g++": total("compile_file"),
    }


def first_floors() -> dict[str, float]:
    """Seconds of the frozen model's first step, with the kernels of a graph in one C++ file and with a file for each."""
    import torch

    import onegraph as og

    found = {}
    embeds = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    torch.compile(lambda x: (x.sin() * 2).sum(), backend="inductor")(torch.randn(64, requires_grad=True)).backward()  # the compiler itself
    for name, protect in (("warm-up", True), ("a file each", False), ("one file", True)):
        model = make_model()
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            torch._inductor.utils.clear_caches()
            og.compile(model, backend="inductor", protect=protect)
            began = time.perf_counter()
            torch.autograd.grad(model(inputs_embeds=embeds, labels=labels).loss, [embeds])
            found[name] = time.perf_counter() - began
    return found


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train().requires_grad_(False)


def measure(name: str, rounds: int, *, peft: bool) -> dict[str, Any]:
    import torch
    from torch import Tensor

    import onegraph as og
    from onegraph.compiling import Watch

    embeds = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def step_of(model: Any) -> Callable[[], float]:
        trained = [embeds, *(parameter for parameter in model.parameters() if parameter.requires_grad)]

        def step() -> float:
            began = time.perf_counter()
            torch.autograd.grad(model(inputs_embeds=embeds, labels=labels).loss, trained, allow_unused=True)
            return time.perf_counter() - began

        return step

    def kept(model: Any) -> int:
        """Bytes kept for backward."""
        seen: dict[int, int] = {}
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(inputs_embeds=embeds, labels=labels).loss
        del loss
        return sum(seen.values())

    torch.compile(lambda x: (x.sin() * 2).sum(), backend="inductor")(torch.randn(64, requires_grad=True)).backward()  # the compiler itself
    frozen = make_model()
    og.compile(frozen, backend="inductor")
    floor = step_of(frozen)
    first_floor = floor()
    model = make_model()
    num_parameters = 0
    began = time.perf_counter()
    if peft:
        from peft import get_peft_model

        model = get_peft_model(model, peft_methods()[name])
        torch._dynamo.config.recompile_limit = 64
        model = torch.compile(model, backend="inductor")
    else:
        make_method, targets = methods()[name]
        adapters = og.attach(model, make_method(), targets=targets)
        with torch.no_grad():
            for parameter in adapters.parameters().values():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        og.compile(model, backend="inductor")
    attaching = time.perf_counter() - began
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    step = step_of(model)
    with Watch() as watch:
        before = phases()
        first = step()
        spent = {name: seconds - before[name] for name, seconds in phases().items()}
        graphs, breaks = watch.graphs, len(watch.breaks)
        watch.warm()
        times: dict[str, list[float]] = {"floor": [], "method": []}
        for _ in range(3):
            floor(), step()
        for _ in range(rounds):
            times["floor"].append(floor())
            times["method"].append(step())
        recompiles = len(watch.recompiles)
    return {
        "first_floor_seconds": first_floor,
        "first_seconds": first,
        "phases": spent,
        "attach_seconds": attaching,
        "floor_seconds": times["floor"],
        "method_seconds": times["method"],
        "kept_floor": kept(frozen),
        "kept": kept(model),
        "num_parameters": num_parameters,
        "graphs": graphs,
        "breaks": breaks,
        "recompiles": recompiles,
    }


def in_own_process(name: str, rounds: int, *, peft: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, __file__, "--measure", name, "--rounds", str(rounds)] + (["--peft"] if peft else [])
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def ratios(found: dict[str, Any]) -> list[float]:
    """Method over floor, pair by pair."""
    return [method / floor for method, floor in zip(found["method_seconds"], found["floor_seconds"])]


def pairs_of(results: dict[str, dict[str, Any]]) -> int:
    """The fewest pairs of steps that a row stands on."""
    return min(len(found["method_seconds"]) for both in results.values() for found in both.values() if "method_seconds" in found)


def written_by_hand() -> str:
    """What the page says below the tables."""
    page = RESULTS / "methods.md"
    _, heading, text = page.read_text(encoding="utf-8").partition(NOTES) if page.exists() else ("", "", "")
    return f"\n{heading}{text}" if heading else ""


def report(results: dict[str, dict[str, Any]]) -> str:
    import torch

    lines = [
        "# A training step with each method, over the compiled frozen model",
        "",
        "`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/methods.py` (PEFT: `--peft`),",
        f"torch {torch.__version__}, inductor by blocks, one CPU thread. Llama shape: hidden {HIDDEN}, feed-forward {FEED_FORWARD},",
        f"{LAYERS} layers, vocabulary {VOCABULARY}, batch {BATCH} x {LENGTH}, fp32, all seven linear layers (norm tuning: the norms).",
        "Rank 16; OFT blocks of 32, BOFT of 8, HRA rank 8, VeRA rank 64 (PEFT's on attention only). Loss and head are in the floor.",
        f"Ratio: median over {pairs_of(results)} or more pairs of steps in turn (quartiles).",
        "First step: with compilation, over the frozen model's own.",
        "Kept: bytes saved for backward, over the frozen model's.",
        "",
        "| method | step / floor | reach | first step / floor's | kept / floor's | graphs | breaks | recompiles | PEFT | its first |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        own, other = found.get("onegraph"), found.get("peft")
        if own is None or "error" in own:
            lines.append(f"| {name} | failed: {own and own['error']} |" + " |" * 8)
            continue
        pairs = sorted(ratios(own))
        quartiles = f"{statistics.median(pairs):.3f} ({pairs[len(pairs) // 4]:.3f} to {pairs[3 * len(pairs) // 4]:.3f})"
        cells = [
            name,
            quartiles,
            str(REACH.get(name, "")),
            f"{own['first_seconds'] / own['first_floor_seconds']:.2f}",
            f"{own['kept'] / own['kept_floor']:.3f}",
            own["graphs"],
            own["breaks"],
            own["recompiles"],
        ]
        if other is None:
            cells += ["", ""]
        elif "error" in other:
            cells += [f"fails: {other['error'][:80]}", ""]
        else:
            cells += [f"{statistics.median(ratios(other)):.3f}, {other['breaks']} breaks", f"{other['first_seconds']:.0f} s"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "## What a first step is made of",
        "",
        "Seconds, each method in a process of its own behind the frozen model. Inductor: without the C++ compiler, which is g++.",
        "Rest: the step itself, and what torch does between the phases. PEFT is compiled whole by torch.compile as it comes.",
        "",
        "| method | first step | floor's | dynamo | AOT | inductor | g++ | rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        own = found.get("onegraph", {})
        if "phases" in own:
            spent = [*own["phases"].values(), own["first_seconds"] - sum(own["phases"].values())]
            cells = [name, *(f"{seconds:.1f}" for seconds in (own["first_seconds"], own["first_floor_seconds"], *spent))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + written_by_hand()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of methods")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--peft", action="store_true", help="measure PEFT's versions")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure == "floor":
        print(json.dumps(first_floors()))
        return
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.rounds, peft=arguments.peft)))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "methods.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in arguments.only or (peft_methods() if arguments.peft else methods()):
        results.setdefault(name, {})["peft" if arguments.peft else "onegraph"] = in_own_process(name, arguments.rounds, peft=arguments.peft)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "methods.md").write_text(report(results), encoding="utf-8")
        print(report(results).strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
