"""One training step, three times: eager in high precision, eager as trained, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from onegraph.adapters import Adapters
from onegraph.checking.comparison import Comparison, Tolerance, compare
from onegraph.checking.precision import raised
from onegraph.checking.random_state import same_random_state
from onegraph.compiling import eager
from onegraph.errors import ConfigurationError, NumericsError

# Large enough that every gradient is well above round-off, small enough that no activation overflows in half precision.
_PROBE_STANDARD_DEVIATION = 0.02


def compare_step(
    step: Callable[[torch.dtype | None], torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    *,
    models: Sequence[nn.Module],
    adapters: Sequence[Adapters] = (),
    precision: torch.dtype = torch.float32,
    reference: torch.dtype | None = None,
    tolerance: Tolerance | None = None,
    everywhere: bool = False,
) -> Comparison:
    """Compares loss and every gradient of a compiled step with eager.

    A new adapter is the identity, and half of its gradients are zero whatever the compiler does. So for the comparison the tensors that
    are all zero get small random values, and every dropout probability is set to 0; both are put back, bit for bit, and so are the
    gradients and the random state.

    Args:
        step: Computes the loss from the same batch and the same noise at each call; its argument is None for "as in training", or a dtype
            to compute everything in, without autocast.
        parameters: Name -> trained parameter, or another leaf that gets a gradient.
        models: The modules that take part; their weights are raised to ``reference`` for the reference run.
        adapters: The adapters whose dropouts are switched off meanwhile.
        precision: The dtype the step computes in when trained.
        reference: The dtype of the reference; fp32 by default. When it equals ``precision`` eager itself is the reference.
        tolerance: Defaults to the one of ``precision``.
        everywhere: Let the backward pass reach every leaf, not ``parameters`` alone: ``adapters.rows`` hands gradients on from leaves of
            its own.

    Raises:
        ConfigurationError: ``no-loss``: the step's loss isn't a number, or nothing trained is in it.
        NumericsError: ``not-finite``: eager itself gives NaN or infinity.
    """
    reference = reference or torch.float32
    with same_random_state() as rewind, without_dropout(adapters), probe_values(parameters):

        def run(dtype: torch.dtype | None) -> tuple[float, dict[str, torch.Tensor | None]]:
            rewind()
            _forget(parameters)
            loss = step(dtype)
            _require_scalar(loss)
            wanted = [parameter for parameter in parameters.values() if parameter.requires_grad]
            torch.autograd.backward(loss, inputs=None if everywhere else wanted)
            found = {name: None if parameter.grad is None else dense(parameter.grad) for name, parameter in parameters.items()}
            return float(loss.detach()), found

        with gradients_kept(parameters):
            with eager():
                eager_loss, eager_gradients = run(None)
                if reference == precision:
                    expected_loss, expected = eager_loss, eager_gradients
                else:
                    with raised(models, reference):
                        expected_loss, expected = run(reference)
            _require_finite(expected_loss, expected)
            compiled_loss, compiled = run(None)
    return compare(
        precision=precision,
        reference=reference,
        losses=(expected_loss, compiled_loss, eager_loss),
        gradients={name: (expected[name], compiled[name], eager_gradients[name]) for name in parameters},
        tolerance=tolerance,
    )


def _forget(parameters: Mapping[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A copy; an embedding with ``sparse=True`` has a sparse gradient."""
    gradient = gradient.detach()
    return gradient.clone() if gradient.layout == torch.strided else gradient.to_dense()


def _require_scalar(loss: object) -> None:
    """A loss that nothing can be differentiated from is a mistake, not a fault of the compiler."""
    hint = "a loss that is one number and made of the model's output by torch's functions, such as output.square().mean()"
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigurationError(f"The loss is {found}, not a tensor with one number.", hint=hint, code="no-loss")
    if not loss.requires_grad:
        raise ConfigurationError(
            "The loss doesn't depend on anything that is trained.",
            why="The model runs under torch.no_grad, detaches its output, or doesn't use the parameters that require a gradient.",
            hint=hint,
            code="no-loss",
        )


def _require_finite(loss: float, gradients: Mapping[str, torch.Tensor | None]) -> None:
    broken = [name for name, gradient in gradients.items() if gradient is not None and not torch.isfinite(gradient).all()]
    if torch.isfinite(torch.tensor(loss)) and not broken:
        return
    raise NumericsError(
        f"The eager step itself isn't finite: loss {loss}" + (f", and {len(broken)} gradients, first {broken[0]}" if broken else "") + ".",
        why="There is nothing right to compare the compiled step with.",
        hint="look for NaN in what goes in and in the model's weights, or a loss that is too large; try fp32",
    )


@contextlib.contextmanager
def without_dropout(adapters: Sequence[Adapters]) -> Iterator[None]:
    """Dropout probabilities are tensors that the graph reads, so setting them to 0 compiles nothing."""
    with contextlib.ExitStack() as stack:
        for group in adapters:
            stack.enter_context(group.without_randomness())
        yield


@contextlib.contextmanager
def probe_values(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, tensors that are all zero hold small random values, so that no gradient is zero for their sake."""
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for parameter in parameters.values():
                if not bool(parameter.any()):
                    kept.append((parameter, parameter.detach().clone()))
                    values = torch.randn(parameter.shape, generator=generator) * _PROBE_STANDARD_DEVIATION
                    parameter.copy_(values)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)


@contextlib.contextmanager
def gradients_kept(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, gradients come and go; afterwards each parameter has the one it had."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    _forget(parameters)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
