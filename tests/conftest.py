"""What every test starts from: no network, one thread, one cache folder, a fixed seed, a clean compiler."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Set before torch is imported anywhere: these are read once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor-cache"))
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["HF_HUB_OFFLINE"] = "1"
# A developer's own accelerate settings must not decide what a test compiles.
for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
    del os.environ[name]

import pytest  # noqa: E402 - the environment comes first
import torch  # noqa: E402

# Torch traces its own compiling to this logger, thousands of records a graph, and pytest would keep each of them.
logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(autouse=True)
def clean_start() -> Iterator[None]:
    """The same random numbers for every test, and nothing left of what another test compiled or set (PEFT's BOFT sets CXX to gcc)."""
    torch.manual_seed(0)
    environment = dict(os.environ)
    yield
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if "accelerate.state" in sys.modules:
        # one for a process: the precision that the first trainer asked for would be that of all
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module", autouse=True)
def small_garbage() -> None:
    """What earlier modules left is set aside: else every full collection walks through millions of objects that will stay."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return ROOT
