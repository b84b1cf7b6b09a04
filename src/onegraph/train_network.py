"""Trains adapters of a Stable Diffusion model: ``accelerate launch -m onegraph.train_network``, with the flags of sd-scripts.

Exit status: 0 when the run is complete, 2 for a mistake that is found before training (settings, files, compiler), 1 for a run that was
stopped (compiled and eager differ, NaN, a file that can't be written), 130 and 143 for Ctrl-C and SIGTERM after saving.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from onegraph.cli.explain import offer
from onegraph.cli.sd_flags import flag_label, parse
from onegraph.errors import MismatchError, NumericsError, OnegraphError
from onegraph.training.output import lasting_output

if TYPE_CHECKING:
    from onegraph.training.diffusion.loop import Outcome
    from onegraph.training.diffusion.preparation import Prepared

BAD_INPUT = 2
STOPPED = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status.

    Args:
        arguments: What follows the command's name; ``sys.argv`` when None.
    """
    with lasting_output():
        return _train(arguments)


def _train(arguments: Sequence[str] | None) -> int:
    try:
        configuration = parse(arguments)
    except OnegraphError as error:
        return _failed(error, BAD_INPUT)
    _quiet_libraries()
    training = False
    try:
        # the flags are read without torch: a mistake in them is reported at once
        from onegraph.compiling.failures import explained
        from onegraph.training.diffusion.groundwork import lay_groundwork
        from onegraph.training.diffusion.loop import Loop
        from onegraph.training.diffusion.preparation import prepare
        from onegraph.training.diffusion.saving import NETWORK_ENDING
        from onegraph.training.launch import launched
        from onegraph.training.places import sole_writer

        with _plain_warnings(), launched(configuration, label=flag_label) as launch:
            ground = lay_groundwork(launch, _say)
            with sole_writer(Path(configuration.saving.output_dir), configuration.saving.name, ending=NETWORK_ENDING):
                prepared = prepare(ground, _say)
                _say(str(prepared.warm_up))
                _say(_plan_text(prepared))
                training = True
                with explained(launch.compile_settings.backend):
                    outcome = Loop(prepared.training).run()
                _say(_end_text(prepared, outcome))
            return outcome.exit_status
    except OnegraphError as error:
        stopped = training or isinstance(error, MismatchError | NumericsError)
        return _failed(error, STOPPED if stopped else BAD_INPUT)
    except KeyboardInterrupt:
        print("stopped before the first step: nothing was written", file=sys.stderr)
        return INTERRUPTED


def _quiet_libraries() -> None:
    """Keeps bitsandbytes from asking, at each import, for a package of 4-bit kernels that nothing here needs."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _say(text: str) -> None:
    print(text, flush=True)


def _failed(error: OnegraphError, status: int) -> int:
    print(f"error: {error}\n{offer(error)}", file=sys.stderr, flush=True)
    return status


def _plan_text(prepared: Prepared) -> str:
    """What is about to be trained, in a few lines."""
    training = prepared.training
    run = training.configuration.run
    accumulation = f", {run.gradient_accumulation_steps} batches a step" if run.gradient_accumulation_steps > 1 else ""
    epochs = f"{training.num_epochs} epoch{'' if training.num_epochs == 1 else 's'}"
    batches = f"{epochs} of {len(training.batches)} batches of {training.batches.batch_size}{accumulation}"
    lines = [
        "training",
        f"  steps       {training.num_steps} ({batches})",
        f"  precision   {training.configuration.precision.mixed_precision}, on {training.recipe.device}",
        f"  seed        {training.seed}",
    ]
    if training.position.step:
        lines.append(f"  resumed     after step {training.position.step}, epoch {training.position.epoch + 1}")
    return "\n".join(lines)


def _end_text(prepared: Prepared, outcome: Outcome) -> str:
    """Where everything is, and what it took."""
    from onegraph.training.metrics import duration, peak_memory_bytes, size

    training, timings = prepared.training, prepared.training.timings
    head = f"stopped by {outcome.interrupted}" if outcome.interrupted else "finished"
    rate = timings.mean_seconds_per_step
    lines = [f"{head} after {outcome.position.step} of {training.num_steps} steps, average loss {outcome.loss:.4g}"]
    if outcome.network is not None and outcome.network.exists():
        lines.append(f"  network     {outcome.network} ({size(outcome.network.stat().st_size)})")
    if outcome.state is not None:
        lines.append(f"  state       {outcome.state}")
    if outcome.samples:
        lines.append(f"  samples     {outcome.samples[-1].parent} ({len(outcome.samples)} images)")
    if training.board is not None:
        lines.append(f"  logs        {training.board.folder}")
    lines.append(
        f"  time        {duration(timings.training_seconds)} training"
        + (f" ({rate:.3g} s/it)" if rate is not None else "")
        + f", {timings.compile_seconds:.1f} s compiling; peak memory {size(peak_memory_bytes(training.recipe.device))}"
    )
    if prepared.warm_up.settings.active:
        lines.append(f"  compiled    {training.watch.graphs} graphs, {len(outcome.recompiles)} recompiles during training")
    if outcome.num_skipped:
        lines.append(f"  skipped     {outcome.num_skipped} optimizer steps whose fp16 gradients overflowed")
    return "\n".join(lines)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
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


if __name__ == "__main__":
    sys.exit(main())
