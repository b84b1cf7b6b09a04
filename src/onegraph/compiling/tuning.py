"""What inductor is told unless the user says otherwise: what makes a training step smaller or faster, measured."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from onegraph.compiling.partition import OPTION, LeanPartitioner


def tuned_options(backend: str, module: nn.Module) -> Mapping[str, Any]:
    """The options for a region; none for backends other than inductor, and none that this torch doesn't have.

    - Less is kept for backward: see ``partition.py``.
    - On a CPU convolutions keep their layout. Inductor turns them to channels-last, frozen weights included, in every step: a residual
      block of Stable Diffusion at 1280 channels then takes 1.4 times as long as eager in fp32, against 1.0, and 2.9 times in bf16, against
      2.0 in the same noisy run (``docs/results/layout.md``).
    - On a CPU the kernels of a graph are compiled as one C++ file: see ``kernels.py``.
    """
    if backend != "inductor":
        return {}
    wanted: dict[str, Any] = {OPTION: LeanPartitioner()}
    if device_of(module).type == "cpu":
        wanted["layout_optimization"] = False
        with contextlib.suppress(ImportError, AttributeError):  # a torch that does it in another way compiles as it does
            from onegraph.compiling.kernels import join_kernels  # inductor's code cache takes long to import

            join_kernels()
    return {name: value for name, value in wanted.items() if hasattr(torch._inductor.config, name)}


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first tensor is; the CPU for one without any."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
