"""A short training run, compiled against eager: does the loss fall in the same way, and do the weights end in the same place?"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onegraph.checking.comparison import TOLERANCES, Tolerance, in_double
from onegraph.checking.precision import raised
from onegraph.checking.random_state import same_random_state
from onegraph.checking.step import dense, probe_values, without_dropout
from onegraph.checking.subject import Subject, without_model_dropout
from onegraph.compiling import device_of, eager
from onegraph.compiling.outside import outside_graphs

# Of the norm of all weights that are trained: large enough that the loss moves in 20 steps, small enough for most landscapes.
_FIRST_STEP = 0.02
_HALVINGS = 12


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Args:
        losses: Before each step.
        seconds: Of each step.
        kept_bytes: What the forward pass of a step keeps for its backward pass, besides the weights.
        peak_bytes: The most memory in use at once; None where it can't be measured (a CPU).
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    kept_bytes: int
    peak_bytes: int | None = None

    @property
    def step_seconds(self) -> float:
        """Median, without the first step."""
        return statistics.median(self.seconds[1:] or self.seconds)


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """Runs from the same weights with the same batch, step size and random numbers.

    Args:
        learning_rate: Of plain gradient descent: an optimizer that normalises would turn a gradient that is round-off into a step.
        reference: Eager, in the reference's precision.
        eager: Eager, as trained.
        compiled: Compiled.
        moved: Norm of the change of all weights, in the reference.
        error: Norm of the difference between the compiled run's weights and the reference's, at the end.
        eager_error: The same for eager.
        tolerance: What was allowed.
    """

    learning_rate: float
    reference: Run
    eager: Run
    compiled: Run
    moved: float
    error: float
    eager_error: float
    tolerance: Tolerance

    @property
    def wrong_step(self) -> int | None:
        """The first step whose loss is too far from the reference's, counted from 0."""
        drift = 0.0
        scale = max((abs(loss) for loss in self.reference.losses), default=0.0)
        for number, (expected, found, own) in enumerate(zip(self.reference.losses, self.compiled.losses, self.eager.losses, strict=True)):
            drift = max(drift, abs(own - expected))
            # what a step gets wrong adds up over the steps
            allowed = self.tolerance.eager_factor * drift + (1 + number) * self.tolerance.loss * scale
            if not abs(found - expected) <= allowed:
                return number
        return None

    @property
    def weights_wrong(self) -> bool:
        """Whether the weights moved somewhere else."""
        return not self.error <= self.tolerance.eager_factor * self.eager_error + self.tolerance.total * self.moved

    @property
    def right(self) -> bool:
        """True when losses and weights agree."""
        return self.wrong_step is None and not self.weights_wrong

    @property
    def speed(self) -> float:
        """How many times as fast as eager a compiled step is."""
        return self.eager.step_seconds / self.compiled.step_seconds if self.compiled.step_seconds else math.nan

    def __str__(self) -> str:
        losses = self.compiled.losses
        verdict = "agrees" if self.right else "DIFFERS"
        off = f", off from step {self.wrong_step + 1}" if self.wrong_step is not None else ""
        error = self.error / self.moved if self.moved else self.error
        eager_error = self.eager_error / self.moved if self.moved else self.eager_error
        return (
            f"{len(losses)} steps {verdict}{off}: loss {losses[0]:.6g} to {losses[-1]:.6g}, eager {self.eager.losses[-1]:.6g}; "
            f"the weights' way differs by {error:.1e}, eager's by {eager_error:.1e}"
        )


Once = Callable[[torch.dtype | None, float, int], tuple[Run, list[Tensor]]]


def train(subject: Subject, *, steps: int) -> TrainRun | None:
    """Trains eager in the reference's precision, eager, and compiled, and puts the weights back; None when nothing is trained.

    Args:
        steps: How many, at least 2.
    """
    parameters = subject.trained()
    if not parameters:
        return None
    adapters = [] if subject.adapters is None else [subject.adapters]
    was_training = subject.model.training
    subject.model.train()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_model_dropout(subject.model))
            stack.enter_context(without_dropout(adapters))
            stack.enter_context(probe_values(parameters))
            rewind = stack.enter_context(same_random_state())
            restore = stack.enter_context(_rewound(parameters))

            def once(dtype: torch.dtype | None, rate: float, number: int) -> tuple[Run, list[Tensor]]:
                restore()
                rewind()
                return _descend(subject, parameters, dtype, rate, number)

            with eager():
                rate = _rate(once, subject, parameters, steps)
                in_precision, eager_end = once(None, rate, steps)
                if subject.reference == subject.precision:
                    reference, end = in_precision, eager_end
                else:
                    restore()
                    with raised([subject.model], subject.reference), _rewound(parameters):
                        rewind()
                        reference, end = _descend(subject, parameters, subject.reference, rate, steps)
            compiled, compiled_end = once(None, rate, steps)
            restore()
            start = [in_double(parameter.detach().cpu()).clone() for parameter in parameters.values()]
    finally:
        subject.model.train(was_training)
    return TrainRun(
        learning_rate=rate,
        reference=reference,
        eager=in_precision,
        compiled=compiled,
        moved=_distance(end, start),
        error=_distance(compiled_end, end),
        eager_error=_distance(eager_end, end),
        tolerance=TOLERANCES[subject.precision],
    )


@contextlib.contextmanager
def _rewound(parameters: Mapping[str, nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Yields a function that puts the weights back in place; at the end they are back, and so are the gradients."""
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters.values()]

    def restore() -> None:
        with torch.no_grad():
            for parameter, values, _ in before:
                parameter.copy_(values)
                parameter.grad = None

    try:
        yield restore
    finally:
        restore()
        for parameter, _, gradient in before:
            parameter.grad = gradient


def _descend(
    subject: Subject, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None, rate: float, steps: int
) -> tuple[Run, list[Tensor]]:
    losses: list[float] = []
    seconds: list[float] = []
    kept = 0
    device = device_of(subject.model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(steps):
        began = time.perf_counter()
        with _counted(subject.model) if number == 0 else contextlib.nullcontext([0]) as count:
            loss = subject.loss(subject.call(subject.batch, dtype))
        kept = kept or count[0]
        torch.autograd.backward(loss, inputs=list(parameters.values()))
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=rate)
                    parameter.grad = None
        losses.append(float(loss.detach()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    end = [in_double(parameter.detach().cpu()).clone() for parameter in parameters.values()]
    return Run(losses=tuple(losses), seconds=tuple(seconds), kept_bytes=kept, peak_bytes=peak), end


@contextlib.contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Counts the bytes of what autograd keeps, each storage once, without the model's own."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    count = [0]

    # where the model runs eager inside what was to be compiled, dynamo would trace this, and count it as a break of the model's
    @outside_graphs
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            count[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count


def _rate(once: Once, subject: Subject, parameters: Mapping[str, nn.Parameter], steps: int) -> float:
    """A step size at which eager's loss falls from the start."""
    norm = _norm([parameter.detach() for parameter in parameters.values()])
    torch.autograd.backward(subject.loss(subject.call(subject.batch)), inputs=list(parameters.values()))
    gradient = _norm([dense(parameter.grad) for parameter in parameters.values() if parameter.grad is not None])
    rate = _FIRST_STEP * norm / gradient if gradient else 0.0
    for _ in range(_HALVINGS):
        losses = once(None, rate, min(3, steps))[0].losses
        if all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]:
            break
        rate /= 2
    return rate


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(in_double(tensor))) for tensor in tensors))


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return _norm([one - other.to(one) for one, other in zip(left, right, strict=True)])
