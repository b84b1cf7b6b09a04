"""Trains an adapter.

  onegraph train text --config run.toml          of a language model, on rows of text or conversations
  onegraph train diffusion --train_data_dir=...  of Stable Diffusion, with the flags of sd-scripts

Each has its own flags: onegraph train text --help. Behind accelerate's configuration: accelerate launch -m onegraph train text ...

Exit status: 0 when the run is complete, 2 for a mistake that is found before training, 1 for a run that was stopped (compiled and eager
differ, NaN, a folder that can't be written), 130 and 143 for Ctrl-C and SIGTERM after saving.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onegraph.cli.running import Stage, cost_lines, plain_warnings, plan_text, quiet_libraries, say, status_of
from onegraph.cli.text_settings import label, read_configuration
from onegraph.errors import ConfigurationError
from onegraph.training.output import lasting_output

if TYPE_CHECKING:
    from onegraph.compiling import CompileSettings
    from onegraph.training.text.loop import Outcome
    from onegraph.training.text.preparation import Prepared

WHAT = ("text", "diffusion")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("what", choices=WHAT, help="what is trained")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="onegraph train WHAT --help lists them")


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit status."""
    if arguments.what == "diffusion":
        from onegraph.train_network import main

        return main(arguments.flags)
    with lasting_output():
        return train_text(arguments.flags)


def train_text(flags: Sequence[str]) -> int:
    """Trains an adapter of a language model; returns the exit status.

    Args:
        flags: What follows ``onegraph train text``.
    """
    return status_of(lambda stage: _train(flags, stage))


def _train(flags: Sequence[str], stage: Stage) -> int:
    configuration = read_configuration(flags)
    if problems := configuration.problems(label=label):
        raise ConfigurationError.collected(problems)
    quiet_libraries()
    # the settings are read without torch: a mistake in them is reported at once
    from onegraph.compiling.failures import explained
    from onegraph.training.launch import launched
    from onegraph.training.places import sole_writer
    from onegraph.training.text.groundwork import lay_groundwork
    from onegraph.training.text.loop import Loop
    from onegraph.training.text.preparation import prepare

    _quiet_transformers()
    with plain_warnings(), launched(configuration, label=label, program="-m onegraph train text", backend="inductor") as started:
        launch = replace(started, compile_settings=_own_names(started.compile_settings))
        tell, folder = launch.ranks.say(say), Path(configuration.saving.output_dir)
        ground = lay_groundwork(launch, tell)
        with launch.ranks.first_holds(lambda: sole_writer(folder, configuration.saving.output_name)):
            prepared = prepare(ground, tell)
            tell(str(prepared.warm_up))
            tell(plan_text(prepared.training, launch))
            stage.training = True
            with explained(launch.compile_settings.backend):
                outcome = Loop(prepared.training).run()
            tell(_end_text(prepared, outcome))
        return outcome.exit_status


def _quiet_transformers() -> None:
    """No bars for loading weights: seconds, between the lines of the run."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _own_names(settings: CompileSettings) -> CompileSettings:
    """Where the values came from, by the names of this command."""
    sources = {name: label(f"compile.{name}") if origin.startswith("flag --") else origin for name, origin in settings.sources.items()}
    return replace(settings, sources=sources)


def _end_text(prepared: Prepared, outcome: Outcome) -> str:
    """Where everything is, and what it took."""
    training, found = prepared.training, outcome.evaluations.found
    head = f"stopped by {outcome.interrupted}" if outcome.interrupted else "finished"
    early = ": the held-out loss no longer falls" if outcome.early else ""
    lines = [f"{head} after {outcome.position.step} of {training.num_steps} steps{early}, average loss {outcome.loss:.4g}"]
    if found:
        step, lowest = min(found, key=lambda pair: pair[1])
        lines.append(f"  held out    loss {found[0][1]:.4f} after step {found[0][0]}, {found[-1][1]:.4f} at the end")
        lines[-1] += f"; lowest {lowest:.4f} after step {step}"
    if outcome.adapter is not None:
        lines.append(f"  adapter     {outcome.adapter}")
    if outcome.best is not None:
        lines.append(f"  best        {outcome.best}")
    if outcome.state is not None:
        lines.append(f"  state       {outcome.state}")
    if training.board is not None:
        lines.append(f"  logs        {training.board.folder}")
    seconds = training.timings.training_seconds
    if outcome.num_tokens and seconds > 0:
        lines.append(f"  tokens      {outcome.num_tokens:,} with a loss, {outcome.num_tokens / seconds:,.0f} a second")
    return "\n".join([*lines, *cost_lines(training, outcome, prepared.warm_up, training.recipe.device)])
