"""How a command that trains talks to people: lines, errors with their exit status, warnings in one line each."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from onegraph.cli.explain import offer
from onegraph.errors import MismatchError, NumericsError, OnegraphError

if TYPE_CHECKING:
    import torch

    from onegraph.training.launch import Launch
    from onegraph.training.loop import AnyOutcome, AnyTraining
    from onegraph.training.warm_up import WarmUp

BAD_INPUT = 2
STOPPED = 1
INTERRUPTED = 130


def quiet_libraries() -> None:
    """Keeps libraries from asking, at each import, for kernels that nothing here needs: 4-bit ones of bitsandbytes, torchao's for GPUs."""
    for name in ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def say(text: str) -> None:
    """A line or a block on standard output."""
    print(text, flush=True)


def failed(error: OnegraphError, status: int) -> int:
    """An error on standard error, with what explains it; returns the exit status. Of several processes, the first one tells it whole."""
    if (rank := os.environ.get("RANK", "0")) != "0":
        print(f"process {rank}: error: {error.what} [{error.code}]", file=sys.stderr, flush=True)
        return status
    print(f"error: {error}\n{offer(error)}", file=sys.stderr, flush=True)
    return status


@dataclass
class Stage:
    """How far a command has come.

    Args:
        training: Whether its first step may have been taken.
    """

    training: bool = False


def status_of(work: Callable[[Stage], int]) -> int:
    """Runs a command that trains; returns its exit status. What goes wrong is told on standard error."""
    stage = Stage()
    try:
        return work(stage)
    except OnegraphError as error:
        stopped = stage.training or isinstance(error, MismatchError | NumericsError)
        return failed(error, STOPPED if stopped else BAD_INPUT)
    except KeyboardInterrupt:
        print("stopped before the first step: nothing was written", file=sys.stderr)
        return INTERRUPTED


def plan_text(training: AnyTraining[Any], launch: Launch[Any]) -> str:
    """What is about to be trained, in a few lines."""
    accumulation = f", {training.accumulation} batches a step" if training.accumulation > 1 else ""
    epochs = f"{training.num_epochs} epoch{'' if training.num_epochs == 1 else 's'}"
    lines = [
        "training",
        f"  steps       {training.num_steps} ({epochs} of {len(training.batches)} batches of {training.batches.size_text}{accumulation})",
        f"  precision   {launch.mixed_precision}, on {launch.device}",
        f"  seed        {training.seed}",
    ]
    if training.position.step:
        lines.append(f"  resumed     after step {training.position.step}, epoch {training.position.epoch + 1}")
    return "\n".join(lines)


def cost_lines(training: AnyTraining[Any], outcome: AnyOutcome, warm_up: WarmUp, device: torch.device) -> list[str]:
    """What a run took, and what was compiled, for the block at its end."""
    from onegraph.training.metrics import duration, peak_memory_bytes, size

    timings = training.timings
    rate = timings.mean_seconds_per_step
    lines = [
        f"  time        {duration(timings.training_seconds)} training"
        + (f" ({rate:.3g} s/it)" if rate is not None else "")
        + f", {timings.compile_seconds:.1f} s compiling; peak memory {size(peak_memory_bytes(device))}"
    ]
    if warm_up.settings.active:
        lines.append(f"  compiled    {training.watch.graphs} graphs, {len(outcome.recompiles)} recompiles during training")
    if outcome.num_skipped:
        lines.append(f"  skipped     {outcome.num_skipped} optimizer steps whose fp16 gradients overflowed")
    return lines


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Our own warnings as one line each; those of libraries as they are."""
    before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        if category.__module__.startswith("onegraph."):
            print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
