"""One process of ``compile_ahead``: ``python -m onegraph.compiling.worker LOT`` runs its jobs and prints the number of each one done."""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path

from onegraph.compiling.ahead import Job


def main(file: str) -> int:
    """Runs the jobs that the parent process wrote; one that fails is left to the parent."""
    packed: list[bytes] = pickle.loads(Path(file).read_bytes())
    for number, data in enumerate(packed):
        try:
            job: Job = pickle.loads(data)
            job.run()
        except Exception:
            traceback.print_exc()
        else:
            print(number, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
