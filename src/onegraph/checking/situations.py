"""One situation that a compiled model must get right: loss, gradients and outputs in it, compiled against eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onegraph.adapters import Adapted
from onegraph.checking.comparison import TOLERANCES, Comparison, GradientRow, Tolerance, compare
from onegraph.checking.precision import raised
from onegraph.checking.random_state import same_random_state
from onegraph.checking.step import compare_step
from onegraph.checking.subject import Arguments, Subject, named_outputs, tensors_of, without_model_dropout
from onegraph.compiling import Recompile, Watch, eager
from onegraph.errors import NumericsError

Outcome = Literal["right", "wrong", "skipped"]
_GAINS = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
Parameters = Callable[[Subject], Mapping[str, Tensor]]


def _nothing(subject: Subject) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Situation:
    """How a model is called.

    Args:
        name: Two or three words.
        batch: What it is called with; None: the subject's own batch.
        enter: A context around everything, given the subject: another adapter active, weights changed.
        parameters: What gets a gradient, asked for inside ``enter``.
        gradients: Whether there is anything to train in it; if not, outputs alone are compared.
        may_compile: Whether it needs graphs that the model didn't have before it.
        inputs: Whether the floating-point inputs get gradients too.
        everywhere: Whether the backward pass must reach every leaf (``adapters.rows``).
        random: Whether random numbers are drawn: then eager in the same precision is the reference, with the same numbers.
    """

    name: str
    batch: Arguments | None = None
    enter: Callable[[Subject], AbstractContextManager[None]] = _nothing
    parameters: Parameters = Subject.trained
    gradients: bool = True
    may_compile: bool = True
    inputs: bool = False
    everywhere: bool = False
    random: bool = False


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What was found in one situation.

    Args:
        name: The situation.
        comparison: Loss and gradients, None where only outputs were compared.
        outputs: One row an output: in training where there are gradients, and in evaluation.
        compilations: What was compiled for it.
        unexpected: Compilations that it should have done without.
        skipped: Why it wasn't run.
        failed: What went wrong when it was run compiled, where eager runs.
    """

    name: str
    comparison: Comparison | None = None
    outputs: tuple[GradientRow, ...] = ()
    compilations: tuple[Recompile, ...] = ()
    unexpected: bool = False
    skipped: str = ""
    failed: str = ""

    @property
    def outcome(self) -> Outcome:
        """Of the numbers alone."""
        if self.skipped:
            return "skipped"
        if self.failed:
            return "wrong"
        return "right" if not self.faults and (self.comparison is None or self.comparison.right) else "wrong"

    @property
    def faults(self) -> list[GradientRow]:
        """Outputs and gradients that are wrong."""
        return [row for row in self.outputs if row.wrong] + ([] if self.comparison is None else self.comparison.faults)

    @property
    def recompiles(self) -> tuple[Recompile, ...]:
        """Compilations that should not have been."""
        return self.compilations if self.unexpected else ()

    @property
    def output_error(self) -> float:
        """The largest error of an output, as a share of its norm."""
        return max((share(row.error, row.norm) for row in self.outputs), default=0.0)

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name}: not run: {self.skipped}"
        if self.failed:
            return f"{self.name}: wrong: eager runs, compiled fails: {self.failed}"
        gradients = "" if self.comparison is None else f", gradients {self.comparison.total_error:.1e}"
        compiled = f", {len(self.compilations)} compilations" if self.compilations else ""
        return f"{self.name}: {self.outcome}, outputs {self.output_error:.1e}{gradients}{compiled}"


def share(part: float, whole: float) -> float:
    """A part of a norm; the part itself where the norm is 0."""
    return part / whole if whole else part


def run(subject: Subject, situation: Situation) -> Variation:
    """Trains one step and evaluates once in a situation, compiled and eager, and compares.

    Raises:
        NumericsError: Eager itself gives NaN or infinity.
        CompileError: See ``onegraph.compiling.failures.explained``, which the caller has around it.
    """
    comparison: Comparison | None = None
    outputs: list[GradientRow] = []
    was_training = subject.model.training
    watch = Watch().start()
    try:
        with _dropouts(subject, situation), situation.enter(subject):
            if situation.gradients:
                subject.model.train()
                comparison, outputs = _trained(subject, situation)
            if not situation.random:
                subject.model.eval()
                outputs += evaluated(subject, situation.batch or subject.batch)
    finally:
        watch.stop()
        subject.model.train(was_training)
    return Variation(
        name=situation.name,
        comparison=comparison,
        outputs=tuple(outputs),
        compilations=tuple(watch.compilations),
        unexpected=bool(watch.compilations) and not situation.may_compile,
    )


def _dropouts(subject: Subject, situation: Situation) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if situation.random else without_model_dropout(subject.model)


def tolerance_of(precision: torch.dtype) -> Tolerance:
    """The one of the start of training, and a look at common factors where noise is large enough to hide them."""
    return replace(TOLERANCES[precision], gain=_GAINS.get(precision))


def skipped_in_eager(subject: Subject, situation: Situation) -> str:
    """Why eager itself can't be called like this, or nothing: then there is nothing to compare."""
    was_training = subject.model.training
    try:
        with torch.no_grad(), same_random_state(), eager(), situation.enter(subject):
            subject.model.train()
            loss = float(subject.loss(subject.call(situation.batch or subject.batch)))
            subject.model.eval()
            subject.call(situation.batch or subject.batch)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError) as error:
        return f"eager can't do it: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    finally:
        subject.model.train(was_training)
    return "" if loss == loss else "eager gives NaN"


def _trained(subject: Subject, situation: Situation) -> tuple[Comparison, list[GradientRow]]:
    leaves, batch = _leaves(situation.batch or subject.batch, every=situation.inputs)
    parameters = {**situation.parameters(subject), **leaves.named}
    reference = subject.precision if situation.random else subject.reference
    recorded: list[dict[str, Tensor]] = []

    def step(dtype: torch.dtype | None) -> Tensor:
        output = subject.call(batch, dtype)
        recorded.append({name: tensor.detach() for name, tensor in named_outputs(output).items()})
        return subject.loss(output)

    adapters = [] if subject.adapters is None or situation.random else [subject.adapters]
    comparison = compare_step(
        step,
        parameters,
        models=[_base_only(subject.model) if situation.everywhere else subject.model, leaves],
        adapters=adapters,
        precision=subject.precision,
        reference=reference,
        tolerance=tolerance_of(subject.precision),
        everywhere=situation.everywhere,
    )
    in_precision, compiled = recorded[0], recorded[-1]
    expected = recorded[1] if len(recorded) == 3 else in_precision
    return comparison, output_rows(subject.precision, expected, compiled, in_precision, prefix="training: ")


def _base_only(model: nn.Module) -> nn.Module:
    """What the adapters stand on: rows read the memory of all adapters, which isn't in the model, and would not see theirs raised."""
    adapted = {id(parameter) for module in model.modules() if isinstance(module, Adapted) for parameter in module._parameters.values()}
    holder = nn.Module()
    for number, parameter in enumerate(model.parameters()):
        if id(parameter) not in adapted:
            holder.register_parameter(str(number), parameter)
    for number, buffer in enumerate(model.buffers()):
        holder.register_buffer(f"buffer{number}", buffer)
    return holder


def evaluated(subject: Subject, batch: Arguments) -> list[GradientRow]:
    """One row an output, without gradients, in evaluation."""
    with torch.no_grad(), same_random_state() as rewind:

        def once(dtype: torch.dtype | None) -> dict[str, Tensor]:
            rewind()
            return {name: tensor.clone() for name, tensor in named_outputs(subject.call(batch, dtype)).items()}

        with eager():
            in_precision = expected = once(None)
            if subject.reference != subject.precision:
                with raised([subject.model], subject.reference):
                    expected = once(subject.reference)
        _require_finite(in_precision)
        compiled = once(None)
    return output_rows(subject.precision, expected, compiled, in_precision, prefix="evaluation: ")


def output_rows(
    precision: torch.dtype,
    expected: Mapping[str, Tensor],
    compiled: Mapping[str, Tensor],
    in_precision: Mapping[str, Tensor],
    *,
    prefix: str,
) -> list[GradientRow]:
    """Outputs weighed as gradients are, but for a tighter allowance: a share of the output's own norm."""
    tolerance = tolerance_of(precision)
    names = [name for name, tensor in expected.items() if tensor.numel()]
    weighed = compare(
        precision=precision,
        reference=precision,
        losses=(0.0, 0.0, 0.0),
        tolerance=tolerance,
        gradients={
            prefix + name: (
                _finite(expected[name], expected[name]),
                _finite(compiled.get(name), expected[name]),
                _finite(in_precision.get(name), expected[name]),
            )
            for name in names
        },
    )
    return [replace(row, allowed=tolerance.eager_factor * row.eager_error + tolerance.total * row.norm) for row in weighed.rows]


def _finite(found: Tensor | None, expected: Tensor) -> Tensor | None:
    """Without the infinities that are meant to be there, such as those of a mask: they have no distance."""
    if found is None or found.shape != expected.shape:
        return None
    return found.masked_fill(torch.isinf(expected) & (found == expected), 0.0)


class _Leaves(nn.Module):
    """Inputs that get a gradient, where ``raised`` finds them. As buffers: a Parameter would be another type to a compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, Tensor] = {}

    def leaf(self, name: str, tensor: Tensor) -> Tensor:
        """The one of that name. As a buffer it has a number: an input may be called what a module calls something else."""
        if name not in self.named:
            place = f"leaf{len(self.named)}"
            self.register_buffer(place, tensor.detach().clone().requires_grad_())
            self.named[name] = self.get_buffer(place)
        return self.named[name]


def _leaves(batch: Arguments, *, every: bool) -> tuple[_Leaves, Arguments]:
    """The batch with leaves of its own for inputs that require a gradient, or for every floating-point one."""
    holder = _Leaves()
    names = {id(tensor): name for name, tensor in _named(batch)}

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not (every or tensor.requires_grad):
            return tensor
        return holder.leaf(f"input {names[id(tensor)]}", tensor)

    args, kwargs = tree_map_only(Tensor, leaf, batch)
    return holder, (args, kwargs)


def _named(batch: Arguments) -> list[tuple[str, Tensor]]:
    parts: list[tuple[str, Any]] = [(str(number), value) for number, value in enumerate(batch[0])] + list(batch[1].items())
    found = []
    for name, value in parts:
        tensors = tensors_of(value)
        found += [(name if len(tensors) == 1 else f"{name} {number}", tensor) for number, tensor in enumerate(tensors)]
    return found


def has_floating_inputs(batch: Arguments) -> bool:
    """Whether any input could get a gradient."""
    return any(tensor.is_floating_point() for tensor in tensors_of(batch))


def _require_finite(outputs: Mapping[str, Tensor]) -> None:
    """Infinity is a legitimate mask in an output; NaN never is."""
    broken = [name for name, tensor in outputs.items() if bool(torch.isnan(tensor).any())]
    if broken:
        raise NumericsError(
            f"The eager model itself gives NaN: {', '.join(broken)}.",
            why="There is nothing right to compare the compiled model with.",
            hint="look for NaN in the batch and the weights",
        )
