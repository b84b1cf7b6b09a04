"""What people watch: averages, times without compile seconds, progress in a log and on a terminal, TensorBoard, signals."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from onegraph.training.interruption import Interruption
from onegraph.training.metrics import MovingAverage, ProgressDisplay, TensorBoard, Timings, duration, peak_memory_bytes, run_folder, size


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_moving_average_forgets_what_left_the_window() -> None:
    average = MovingAverage(2)
    assert average.add(1.0) == 1.0
    assert average.add(3.0) == 2.0
    assert average.add(5.0) == 4.0
    assert average.values == [3.0, 5.0]


def test_seconds_a_step_leave_out_the_first_step_and_compiling() -> None:
    timings = Timings()
    timings.add_compile(5.0)
    timings.add_step(30.0, compile_seconds=28.0)
    assert timings.seconds_per_step is None
    assert timings.remaining_seconds(10) is None
    timings.add_step(2.0)
    timings.add_step(40.0, compile_seconds=37.0)
    timings.add_step(4.0)
    assert timings.seconds_per_step == 3.0
    assert timings.mean_seconds_per_step == 3.0
    assert timings.remaining_seconds(10) == 30.0
    assert timings.compile_seconds == 70.0
    assert timings.training_seconds == 2.0 + 2.0 + 3.0 + 4.0


def test_first_step_does_not_count_even_without_compiling() -> None:
    timings = Timings()
    timings.add_step(100.0)
    timings.add_step(1.0)
    assert timings.seconds_per_step == 1.0


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--:--"), (0.2, "0:00:00"), (59.6, "0:01:00"), (3723.0, "1:02:03")])
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(12, "12 bytes"), (1500, "1.5 kB"), (12_300_000, "12.3 MB"), (2_000_000_000, "2.0 GB")])
def test_size(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_log_file_gets_a_line_now_and_then() -> None:
    clock, stream, timings = Clock(), io.StringIO(), Timings()
    progress = ProgressDisplay(100, num_epochs=2, stream=stream, clock=clock)
    for step in range(1, 101):
        clock.now += 1.0
        timings.add_step(1.0)
        progress.update(step, epoch=1, loss=0.5, rates={"unet": 1e-4, "textencoder": 1e-4}, timings=timings)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/100  epoch 1/2  loss 0.5  lr 1.00e-04  - s/it  ETA -:--:--"
    assert lines[-1] == "step 100/100  epoch 1/2  loss 0.5  lr 1.00e-04  1 s/it  ETA 0:00:00"
    assert 8 <= len(lines) <= 12


def test_rates_that_differ_are_named() -> None:
    stream = io.StringIO()
    ProgressDisplay(9, stream=stream).update(1, epoch=1, loss=0.25, rates={"unet": 1e-4, "textencoder": 5e-5}, timings=Timings())
    assert "lr unet 1.00e-04, textencoder 5.00e-05" in stream.getvalue()


def test_terminal_gets_a_bar_and_lines_above_it() -> None:
    stream = Terminal()
    progress = ProgressDisplay(4, stream=stream)
    assert not stream.getvalue()
    progress.start()
    progress.update(2, epoch=1, loss=0.125, rates={"unet": 1e-4}, timings=Timings())
    progress.say("saved [somewhere]")
    progress.close()
    assert "2/4" in stream.getvalue()
    assert "loss 0.125" in stream.getvalue()
    assert "saved [somewhere]" in stream.getvalue()


def test_tensorboard_files_hold_curves_and_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "run", {"rank": 4, "name": "x", "sizes": (1, 2), "nothing": None})
    board.write(1, {"loss/current": 0.5, "lr/unet": 1e-4})
    board.write(2, {"loss/current": 0.25, "lr/unet": 1e-4})
    board.close()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss/current", "lr/unet"}
    assert [(event.step, event.value) for event in events.Scalars("loss/current")] == [(1, 0.5), (2, 0.25)]
    assert any("hparams" in name for name in events.PluginTagToContent("hparams"))


def test_run_folder_is_where_tools_look() -> None:
    assert run_folder(Path("logs"), "cat-", 0.0).parts[-1] == "network_train"
    assert run_folder(Path("logs"), "cat-", 0.0).parts[1].startswith("cat-19")


def test_peak_memory_of_the_process_is_counted_in_bytes() -> None:
    assert peak_memory_bytes(torch.device("cpu")) > 50_000_000


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_first_signal_only_asks(number: signal.Signals, status: int) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with Interruption(said.append) as interruption:
        assert not interruption
        assert interruption.exit_status == 0
        os.kill(os.getpid(), number)
        assert interruption
        assert interruption.exit_status == status
    assert signal.getsignal(number) is before
    assert number.name in said[0]


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_signal_exits_at_once() -> None:
    program = """
import os, signal
from onegraph.training.interruption import Interruption
with Interruption():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("too late", flush=True)
"""
    source = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stdout == "still here\n"
    assert "SIGTERM" in done.stderr


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def enter() -> None:
        with Interruption():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]
