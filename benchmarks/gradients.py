"""Are compiled gradients right? SD-shaped UNets at several widths and batches, fp32 and bf16, whole and by blocks, protected and not.

    OMP_NUM_THREADS=1 python benchmarks/gradients.py            writes docs/results/gradients.md and gradients.json

Each case is one cold compilation: about half an hour for all of them on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

import onegraph as og
from onegraph.checking import Comparison, compare_step
from onegraph.compiling import Watch

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SHAPES = [((32, 64, 64), 1), ((32, 64, 96), 2), ((64, 96, 96), 4)]
CONTEXT = 32
SIZE = 16


def make_unet(widths: tuple[int, ...]) -> UNet2DConditionModel:
    torch.manual_seed(0)
    inner = len(widths) - 1
    return UNet2DConditionModel(
        sample_size=SIZE,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * inner + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * inner,
        cross_attention_dim=CONTEXT,
        attention_head_dim=4,
        norm_num_groups=8,
    ).train()


def one_case(widths: tuple[int, ...], batch: int, dtype: torch.dtype, regions: str, *, protect: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    unet = make_unet(widths).to(dtype)
    adapters = og.attach(
        unet, og.LoRA(rank=4), targets=lambda path, module: ".attentions." in path and type(module) in (torch.nn.Linear, torch.nn.Conv2d)
    )
    generator = torch.Generator().manual_seed(1)
    latents, target = (torch.randn(batch, 4, SIZE, SIZE, generator=generator) for _ in range(2))
    text = torch.randn(batch, 77, CONTEXT, generator=generator)
    timesteps = torch.randint(0, 1000, (batch,), generator=generator)

    def step(raised: torch.dtype | None) -> Tensor:
        inner = raised or dtype
        with torch.autocast("cpu", dtype, enabled=raised is None and dtype != torch.float32):
            output = unet(latents.to(inner), timesteps, text.to(inner), return_dict=False)[0]
        return (output.to(raised or torch.float32) - target).square().mean()

    og.compile(unet, backend="inductor", regions=regions, protect=protect)
    began = time.perf_counter()
    with Watch() as watch:
        found: Comparison = compare_step(
            step, adapters.parameters(), models=[unet], adapters=[adapters], precision=dtype, reference=torch.float64
        )
    return {
        "widths": widths,
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "regions": regions,
        "protection": protect,
        "right": found.right,
        "gradients": len(found.rows),
        "zero": sum(row.compiled_norm == 0 for row in found.rows),
        "wrong": len(found.faults),
        "gradient_error": found.total_error,
        "eager_gradient_error": found.eager_total_error,
        "loss_error": found.loss_error,
        "graphs": watch.graphs,
        "breaks": len(watch.breaks),
        "seconds": round(time.perf_counter() - began, 1),
    }


def report(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Compiled gradients, compared",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/gradients.py`, torch {torch.__version__}, {platform.machine()} CPU, inductor.",
        "Every adapter gradient of one training step against eager in fp64; a new adapter's zeros get small random values first.",
        "Error: norm of the difference over all gradients, as a share of their norm; beside it the error that eager has in that precision.",
        "",
        "| widths | batch | dtype | regions | protection | verdict | zero gradients | error | eager's error | loss error | graphs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            "-".join(map(str, row["widths"])),
            row["batch"],
            row["dtype"],
            row["regions"],
            "on" if row["protection"] else "off",
            "right" if row["right"] else "**wrong, found**",
            f"{row['zero']} of {row['gradients']}",
            f"{row['gradient_error']:.1e}",
            f"{row['eager_gradient_error']:.1e}",
            f"{row['loss_error']:.1e}",
            row["graphs"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes (default: all)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for widths, batch in SHAPES[: arguments.shapes]:
        for dtype in (torch.bfloat16, torch.float32):
            for regions, protect in (("blocks", True), ("whole", True), ("whole", False)):
                rows.append(one_case(widths, batch, dtype, regions, protect=protect))
                print(rows[-1], flush=True)
                (arguments.output / "gradients.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                (arguments.output / "gradients.md").write_text(report(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
