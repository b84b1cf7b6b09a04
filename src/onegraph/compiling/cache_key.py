"""What inductor's keys depend on besides the graph: of entries written under other values none is ever found again."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch


def cache_key() -> dict[str, str]:
    """Name -> value, each as inductor's own functions give it.

    - ``torch``, ``torch sources``: the version and a hash of all of torch's Python sources, both in the key of each graph;
    - ``python``: the version that the C++ kernels are extension modules of;
    - ``vector instructions``: what torch's own kernels use here (``ATEN_CPU_CAPABILITY`` may say less), from which inductor chooses;
    - ``torch folder``, ``python headers``: they stand in the command that builds a kernel, and a kernel's name is a hash of it;
    - ``gpu``: its name and the versions of CUDA or ROCm and of triton.
    """
    from torch._inductor.codecache import CacheBase, torch_key

    system = dict(CacheBase.get_system())
    system.pop("hash", None)
    return {
        "torch": torch.__version__,
        "torch sources": torch_key().hex()[:16],
        "python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "torch folder": str(Path(torch.__file__).parent),
        "python headers": sysconfig.get_path("include"),
        "gpu": str(system) if system else "none",
    }
