"""What inductor's change of layout costs convolutions on a CPU: blocks of an SD 1.x UNet, compiled with it, without it, and eager.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/layout.py      writes docs/results/layout.md and layout.json

The three run in turn in one process; what counts is the ratio of the medians to eager.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

import onegraph as og
from onegraph.compiling import eager

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
ROUNDS = 9


class Block(nn.Module):
    """A block with everything but its input given."""

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "residual":
            self.block: Any = ResnetBlock2D(in_channels=channels, out_channels=channels, temb_channels=1280)
            self.register_buffer("other", torch.randn(1, 1280))
        else:
            self.block = Transformer2DModel(8, channels // 8, in_channels=channels, cross_attention_dim=768, norm_num_groups=32)
            self.register_buffer("other", torch.randn(1, 77, 768))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "residual":
            result: Tensor = self.block(x, self.other)
        else:
            result = self.block(x, encoder_hidden_states=self.other, return_dict=False)[0]
        return result


def one_case(kind: str, channels: int, dtype: torch.dtype) -> dict[str, Any]:
    size = 32 * 320 // channels
    x = torch.randn(1, channels, size, size, requires_grad=True)
    steps = {}
    for name, options in (("inductor's layout", {"layout_optimization": True}), ("own layout", {"layout_optimization": False})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Block(kind, channels).requires_grad_(False)
        trained: list[Tensor] = [x]
        if kind == "transformer":
            trained += og.attach(model, og.LoRA(rank=16), targets="all-linear").parameters().values()
        og.compile(model, backend="inductor", regions="whole", options=options)

        def step(model: nn.Module = model, trained: list[Tensor] = trained) -> float:
            began = time.perf_counter()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                y = model(x)
            torch.autograd.grad(y.float().square().mean(), trained)
            return time.perf_counter() - began

        step()
        step()
        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in (*steps, "eager")}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(step())
        with eager():
            times["eager"].append(steps["own layout"]())
    return {"block": kind, "channels": channels, "size": size, "dtype": str(dtype).removeprefix("torch."), "seconds": times}


def report(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Convolutions on a CPU and inductor's layout",
        "",
        f"`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/layout.py`, torch {torch.__version__}, one CPU thread.",
        f"Forward and backward of one block, batch 1; medians of {ROUNDS} steps in turn, over eager's (smallest to largest pair).",
        "onegraph compiles with the block's own layout.",
        "",
        "| block | channels | size | dtype | inductor's layout / eager | own layout / eager | eager |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = row["seconds"]

        def ratio(name: str, times: dict[str, list[float]] = times) -> str:
            pairs = [mine / plain for mine, plain in zip(times[name], times["eager"])]
            return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"

        cells = [row["block"], row["channels"], row["size"], row["dtype"], ratio("inductor's layout"), ratio("own layout")]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {statistics.median(times['eager']) * 1000:.0f} ms |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for kind, channels in (("residual", 320), ("residual", 1280), ("transformer", 320)):
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(one_case(kind, channels, dtype))
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / "layout.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            (RESULTS / "layout.md").write_text(report(rows), encoding="utf-8")
            print(report(rows).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
