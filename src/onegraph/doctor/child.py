"""Processes of this Python that find onegraph, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onegraph


def child_environment(**variables: str) -> dict[str, str]:
    """This environment, with onegraph to be found behind what ``PYTHONPATH`` names already."""
    home = str(Path(onegraph.__file__).resolve().parent.parent)
    paths = [path for path in (os.environ.get("PYTHONPATH"), home) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def ask(question: dict[str, Any], *, seconds: float) -> dict[str, Any]:
    """What ``onegraph.doctor.asked`` answers; a process that dies or hangs answers with why, as torch's error.

    It gets a cache folder of its own: dynamo makes the folder when it is imported, and the user's may be one that can't be made.
    """
    with tempfile.TemporaryDirectory(prefix="onegraph-doctor-") as folder:
        path = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "onegraph.doctor.asked", str(path)],
                input=json.dumps(question),
                env=child_environment(TORCHINDUCTOR_CACHE_DIR=folder),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"torch": {"error": f"importing torch and accelerate took over {seconds:.0f} seconds", "code": "torch-hangs"}}
        if done.returncode == 0 and path.is_file():
            answer = json.loads(path.read_text(encoding="utf-8"))
            return answer if isinstance(answer, dict) else {}
    said = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    return {"torch": {"error": f"a process that imports torch ended with status {done.returncode}: {said}", "code": "torch-crashes"}}
