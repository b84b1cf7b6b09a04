"""A run outlives whoever reads its messages, and prints names that the terminal can't show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from onegraph.training.output import lasting_output
with lasting_output() if {lasting} else open("/dev/null"):
    from rich.console import Console
    console = Console(file=sys.stderr)
    for number in range(20):
        print("line", number, "\\u65e5\\udcff", flush=True)
        console.print("progress", number)
        time.sleep(0.02)
open({done!r}, "w").write("done")
"""


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "control"])
@pytest.mark.parametrize("how", ["closed", "ascii"])
def test_a_run_outlives_its_reader(tmp_path: Path, how: str, lasting: bool) -> None:
    done = tmp_path / "done"
    source = Path(__file__).parents[1] / "src"
    encoding = "ascii" if how == "ascii" else "utf-8:surrogatepass"
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", PROGRAM.format(done=str(done), lasting=lasting)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        if how == "closed":
            process.stdout.readline()
            process.stdout.close()
            status = process.wait()
        else:
            said, _ = process.communicate()
            status = process.returncode
            assert (b"\\u65e5\\udcff" in said) == lasting
    assert done.exists() == lasting
    assert (status == 0) == lasting
