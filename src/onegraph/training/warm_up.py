"""Before the first step: every shape of the run is compiled, and the compiled step is compared with eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapters
from onegraph.checking import Comparison, compare_step
from onegraph.compiling import Compiled, CompileSettings, Watch, compile_ahead
from onegraph.compiling.failures import explained
from onegraph.errors import MismatchError
from onegraph.training.randomness import nothing_changed

Loss = Callable[[torch.dtype | None], Tensor]
"""The loss of one batch: as in training for None, else computed in that dtype without autocast."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is compiled and compared.

    Args:
        models: The modules that take part.
        parts: The adapters, whose dropouts are 0 during a comparison.
        parameters: Name -> trained parameter.
        precision: What is computed in when trained.
        hint: What to do when compiled and eager differ.
    """

    models: Mapping[str, nn.Module]
    parts: Mapping[str, Adapters]
    parameters: Mapping[str, nn.Parameter]
    precision: torch.dtype
    hint: str

    def compare(self, loss: Loss) -> Comparison:
        """Compiled against eager on one batch.

        Raises:
            MismatchError: They differ; names the parameters.
            NumericsError: Eager itself gives NaN or infinity.
        """
        comparison = compare_step(
            loss, self.parameters, models=list(self.models.values()), adapters=list(self.parts.values()), precision=self.precision
        )
        comparison.raise_if_wrong(hint=self.hint)
        return comparison


@dataclass(kw_only=True)
class WarmUp:
    """What was compiled and how it compared; ``str()`` of it is the block to print before training.

    Args:
        settings: How it was compiled, with the origin of each value.
        compiled: What was compiled.
        watch: Counts on; its own warm-up has ended.
        comparisons: What was compared, in words -> the result.
        num_shapes: How many shapes the run's batches have.
        shape: What a shape is called: "image size".
        check: ``off``, ``start`` or ``strict``.
        check_hint: How to say that it should be compared.
    """

    settings: CompileSettings
    compiled: Sequence[Compiled]
    watch: Watch
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    num_shapes: int = 1
    shape: str = "shape"
    check: str = "start"
    check_hint: str = "--compile_check=start"

    @property
    def shapes_text(self) -> str:
        """``3 image sizes``."""
        return f"{self.num_shapes} {self.shape}{'' if self.num_shapes == 1 else 's'}"

    def __str__(self) -> str:
        lines = ["compilation"]
        rows = self.settings.describe()
        width = max(len(value) for _, value, _ in rows)
        lines += [f"  {name:<12}{value:<{width}}  ({origin})" for name, value, origin in rows]
        lines += [f"  {'note':<12}{note}" for note in self.settings.notes]
        if not self.settings.active:
            return "\n".join([*lines, "  nothing is compiled: the models run eager"])
        lines += [f"  {'compiled':<12}{compiled}" for compiled in self.compiled]
        protections = sorted({name for compiled in self.compiled for name in compiled.protections})
        if protections:
            lines.append(f"  {'protection':<12}{', '.join(protections)}")
        lines += [f"  {'check':<12}{what}: {comparison}" for what, comparison in self.comparisons.items()]
        if self.check == "off":
            lines.append(f"  {'check':<12}off: nobody compared the compiled step with eager ({self.check_hint} does)")
        breaks = self.watch.breaks
        lines.append(
            f"  {'result':<12}{self.watch.graphs} graphs for {self.shapes_text}, "
            f"{len(breaks)} graph breaks, {len(self.watch.recompiles)} recompiles, {self.watch.compile_seconds:.1f} s compiling"
        )
        return "\n".join([*lines, *(f"  {'break':<12}{reason}" for reason in breaks)])


def warm_up(
    done: WarmUp,
    subject: Subject,
    steps: Callable[[], Iterator[tuple[str, Loss]]],
    *,
    seed: int,
    say: Callable[[str], None],
    also: Callable[[], None] | None = None,
) -> WarmUp:
    """Runs the step once for each shape, so that nothing is left to compile.

    The weights, the gradients and the random generators are afterwards what they were.

    Args:
        done: What was compiled; what is found out is noted there.
        subject: What is compared.
        steps: Name and loss of one batch of each shape, a real batch first.
        seed: For the line that is printed before it gets quiet.
        say: Prints a line for the user.
        also: Runs whatever else the run will call, such as an evaluation.

    Raises:
        MismatchError: Compiled and eager differ.
        CompileError: The backend fails, or the model is not one graph.
    """
    settings = done.settings
    if settings.active:
        origin = settings.sources.get("backend", "default")
        say(
            f"compiling with {settings.backend} ({origin}) for {done.shapes_text}, "
            f"seed {seed}; minutes the first time, seconds when the cache folder has it ..."
        )
        with nothing_changed(subject.parameters.values()), explained(settings.backend):
            _compile_ahead(done, steps, say)
            for number, (name, loss) in enumerate(steps()):
                if done.check == "strict" or (done.check == "start" and number == 0):
                    try:
                        done.comparisons[name] = subject.compare(loss)
                    except MismatchError:
                        say(str(done))  # what was compiled, and how, belongs to the error
                        raise
                else:
                    torch.autograd.backward(loss(None), inputs=list(subject.parameters.values()))
            if also is not None:
                also()
    done.watch.warm()
    return done


def _compile_ahead(done: WarmUp, steps: Callable[[], Iterator[tuple[str, Loss]]], say: Callable[[str], None]) -> None:
    """Several processes compile what the run will call; the time counts as compiling."""

    def every_shape() -> None:
        for _, loss in steps():
            loss(None)

    began = time.perf_counter()
    if compile_ahead(done.compiled, every_shape, say=say):
        done.watch.compile_seconds += time.perf_counter() - began
