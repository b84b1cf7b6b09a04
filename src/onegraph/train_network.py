"""Trains adapters of a Stable Diffusion model: ``accelerate launch -m onegraph.train_network``, with the flags of sd-scripts.

Exit status: 0 when the run is complete, 2 for a mistake that is found before training (settings, files, compiler), 1 for a run that was
stopped (compiled and eager differ, NaN, a file that can't be written), 130 and 143 for Ctrl-C and SIGTERM after saving.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onegraph.cli.running import Stage, cost_lines, plain_warnings, plan_text, quiet_libraries, say, status_of
from onegraph.cli.sd_flags import flag_label, parse
from onegraph.training.output import lasting_output

if TYPE_CHECKING:
    from onegraph.training.diffusion.loop import Outcome
    from onegraph.training.diffusion.preparation import Prepared


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status.

    Args:
        arguments: What follows the command's name; ``sys.argv`` when None.
    """
    with lasting_output():
        return status_of(lambda stage: _train(arguments, stage))


def _train(arguments: Sequence[str] | None, stage: Stage) -> int:
    configuration = parse(arguments)
    quiet_libraries()
    # the flags are read without torch: a mistake in them is reported at once
    from onegraph.compiling.failures import explained
    from onegraph.training.diffusion.groundwork import lay_groundwork
    from onegraph.training.diffusion.loop import Loop
    from onegraph.training.diffusion.preparation import prepare
    from onegraph.training.diffusion.saving import NETWORK_ENDING
    from onegraph.training.launch import launched
    from onegraph.training.places import sole_writer

    with plain_warnings(), launched(configuration, label=flag_label) as launch:
        tell = launch.ranks.say(say)
        ground = lay_groundwork(launch, tell)
        folder = Path(configuration.saving.output_dir)
        with launch.ranks.first_holds(lambda: sole_writer(folder, configuration.saving.name, ending=NETWORK_ENDING)):
            prepared = prepare(ground, tell)
            tell(str(prepared.warm_up))
            tell(plan_text(prepared.training, launch))
            stage.training = True
            with explained(launch.compile_settings.backend):
                outcome = Loop(prepared.training).run()
            tell(_end_text(prepared, outcome))
        return outcome.exit_status


def _end_text(prepared: Prepared, outcome: Outcome) -> str:
    """Where everything is, and what it took."""
    from onegraph.training.metrics import size

    training = prepared.training
    head = f"stopped by {outcome.interrupted}" if outcome.interrupted else "finished"
    lines = [f"{head} after {outcome.position.step} of {training.num_steps} steps, average loss {outcome.loss:.4g}"]
    if outcome.network is not None and outcome.network.exists():
        lines.append(f"  network     {outcome.network} ({size(outcome.network.stat().st_size)})")
    if outcome.state is not None:
        lines.append(f"  state       {outcome.state}")
    if outcome.samples:
        lines.append(f"  samples     {outcome.samples[-1].parent} ({len(outcome.samples)} images)")
    if training.board is not None:
        lines.append(f"  logs        {training.board.folder}")
    lines += cost_lines(training, outcome, prepared.warm_up, training.recipe.device)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
