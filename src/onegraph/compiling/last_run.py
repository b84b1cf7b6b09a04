"""What a process found in inductor's cache and what not, left in the cache folder when the process ends, for ``onegraph cache show``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import time
from pathlib import Path

import torch
import torch._dynamo.utils as dynamo_utils

FILE = "onegraph-last-run.json"


@functools.cache
def note_at_exit() -> None:
    """Has this process leave its record; once, however many models it compiles."""
    atexit.register(_write, os.getpid())


def _write(process: int) -> None:
    """Writes the record of a process that compiled something. A folder that can't be written to stays as it is."""
    counts = dynamo_utils.counters["inductor"]
    hits, misses = counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # inductor sets it when it first looks into the folder
    if not folder or not hits + misses or process != os.getpid():
        return
    record = {"ended": time.time(), "hits": hits, "misses": misses, "torch": str(torch.__version__)}
    path = Path(folder) / FILE
    temporary = path.with_name(f".{FILE}.{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        try:
            temporary.write_text(json.dumps(record), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
