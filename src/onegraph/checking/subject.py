"""What is checked: a model, the batch it is called with, and the loss; run as it is, or in a higher precision."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy
import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from onegraph.adapters import Adapters, adapters_of
from onegraph.checking.comparison import TOLERANCES, in_double
from onegraph.checking.precision import raised
from onegraph.checking.random_state import same_random_state
from onegraph.checking.step import gradients_kept, without_dropout
from onegraph.compiling import device_of, eager
from onegraph.errors import ConfigurationError, NumericsError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positions and keywords."""

# The weights once more in the reference's precision, and about as much again for what a backward pass keeps.
_COPIES = 2
_OF_FREE_MEMORY = 0.8
# Sums in another order, as on a GPU, stay far below it; a counter or a clock doesn't.
_REPEATED = 1e-2


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with a batch and a loss.

    Args:
        model: The module.
        batch: What it is called with.
        loss: From its output to a scalar.
        precision: The dtype it computes in.
        reference: The dtype of the eager reference.
        path: Its path in the model that is checked; "" for the model itself.
        adapters: The adapters of the model that is checked.
        draws: Whether it draws random numbers of its own, besides dropouts: only the same generator then gives the same result.
        writes: Whether it writes into what it is called with; then each call gets copies.
    """

    model: nn.Module
    batch: Arguments
    loss: Callable[[Any], Tensor]
    precision: torch.dtype
    reference: torch.dtype
    path: str = ""
    adapters: Adapters | None = None
    draws: bool = False
    writes: bool = False

    def call(self, batch: Arguments, dtype: torch.dtype | None = None) -> Any:
        """The output; with a dtype everything floating in the batch has it, and autocast is off."""
        if self.writes:
            batch = copied(batch)
        # inside autocast torch keeps the cast weights: those of a call without gradients have none, and those of other weights are stale
        torch.clear_autocast_cache()
        if dtype is None:
            return self.model(*batch[0], **batch[1])
        args, kwargs = in_dtype(batch, dtype)
        with torch.autocast(device_of(self.model).type, enabled=False):
            return self.model(*args, **kwargs)

    def trained(self) -> dict[str, nn.Parameter]:
        """Name -> parameter that requires a gradient."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}


def subject_of(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    reference: torch.dtype | None = None,
) -> Subject:
    """The model and batch as they will be checked; the reference is float64 where memory and the model allow it.

    Args:
        batch: A mapping (passed as keywords), a tuple or list (passed as positions) or one tensor.
        loss: By default the output's own ``loss``, else a fixed random projection of its floating-point tensors.
        reference: The dtype of the reference, if it is to be another one.

    Raises:
        ConfigurationError: ``reference-coarse``: a reference that is less precise than the model.
        NumericsError: ``not-repeatable``: eager gives different outputs for the same batch and random numbers.
    """
    arguments = arguments_of(batch)
    precision = precision_of(model, arguments)
    if reference is not None and torch.finfo(reference).eps > torch.finfo(precision).eps:
        raise ConfigurationError(
            f"The reference {_short(reference)} is coarser than the model, which computes in {_short(precision)}.",
            why="What is measured against must be at least as exact as what is measured.",
            hint=f"the reference {_short(precision)} or float64",
            code="reference-coarse",
        )
    subject = Subject(
        model=model,
        batch=arguments,
        loss=loss if loss is not None else projection,
        precision=precision,
        reference=reference or precision,
        adapters=adapters_of(model),
    )
    adapters = [] if subject.adapters is None else [subject.adapters]
    with without_model_dropout(model), without_dropout(adapters), buffers_kept(model), gradients_kept(dict(model.named_parameters())):
        draws, writes = draws_random_numbers(subject)
        subject = replace(subject, draws=draws, writes=writes)
        if draws:  # another precision would draw others
            return replace(subject, reference=precision)
        return subject if reference is not None else replace(subject, reference=_best_reference(subject))


def arguments_of(batch: Any) -> Arguments:
    """A batch as positions and keywords."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def precision_of(model: nn.Module, batch: Arguments) -> torch.dtype:
    """The coarsest floating-point dtype that takes part: a bf16 model with fp32 adapters computes in bf16."""
    device = device_of(model).type
    dtypes = {tensor.dtype for tensor in [*model.parameters(), *tensors_of(batch)] if tensor.is_floating_point()}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    dtypes |= {tensor.dtype.to_real() for tensor in [*model.parameters(), *tensors_of(batch)] if tensor.is_complex()}
    known = [dtype if dtype in TOLERANCES else torch.bfloat16 for dtype in dtypes]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists, mappings and dataclasses."""
    leaves, _ = tree_flatten(tree)
    found: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, part.name, None) for part in fields(leaf)])
        elif isinstance(leaf, Mapping):  # one that torch doesn't know
            found += tensors_of(list(leaf.values()))
    return found


def _counts(tensor: Tensor) -> bool:
    """Whether it is compared: whole numbers, such as the place of the largest, jump where round-off tips the scales."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """The same nest with every floating-point tensor in ``dtype``, and complex ones of such parts."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, tree)


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The floating-point and complex tensors of an output, by field where it has fields, by place where not."""
    if isinstance(output, Tensor):
        return {"output": output} if _counts(output) else {}
    if isinstance(output, Mapping):
        parts = {str(name): value for name, value in output.items()}
    elif is_dataclass(output) and not isinstance(output, type):
        parts = {part.name: getattr(output, part.name, None) for part in fields(output)}
    elif isinstance(output, tuple | list):
        parts = {f"output {number}": value for number, value in enumerate(output)}
    else:
        parts = {"output": output}
    found: dict[str, Tensor] = {}
    for name, value in parts.items():
        tensors = [tensor for tensor in tensors_of(value) if _counts(tensor)]
        found |= {name if len(tensors) == 1 else f"{name} {number}": tensor for number, tensor in enumerate(tensors)}
    return found


def projection(output: Any) -> Tensor:
    """The output's own loss, or the mean square of its tensors against fixed random targets: every element gets a gradient of its own."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    generator = torch.Generator().manual_seed(1)
    total: Tensor | None = None
    for found in named_outputs(output).values():
        tensor = torch.view_as_real(found) if found.is_complex() else found
        target = torch.randn(tensor.shape, generator=generator).to(tensor)
        term = (tensor - target).float().square().mean() if tensor.dtype != torch.float64 else (tensor - target).square().mean()
        total = term if total is None else total + term
    if total is None:
        raise ConfigurationError(
            f"The model's output, {type(output).__name__}, holds no floating-point tensor, so there is no loss to check.",
            hint="give a loss, a function from the output to a scalar: loss= in Python, or behind the batch: return model, batch, loss",
            code="no-loss",
        )
    return total


@contextlib.contextmanager
def without_model_dropout(model: nn.Module) -> Iterator[bool]:
    """Inside it the model's own dropouts (not those of adapters) drop nothing; yields whether it has any.

    A dropout is a number among a module's attributes with "drop" in its name; models keep it as ``p`` of a Dropout, or as a plain float
    that they hand to ``torch.nn.functional``.
    """
    kept: list[tuple[dict[str, Any], str, float]] = []
    for module in model.modules():
        is_dropout = "Dropout" in type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and ("drop" in name.lower() or (is_dropout and name == "p")):
                kept.append((vars(module), name, value))
    try:
        for attributes, name, _ in kept:
            attributes[name] = 0.0
        yield bool(kept)
    finally:
        for attributes, name, value in kept:
            attributes[name] = value


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Afterwards, and when the function that it yields is called, buffers such as a batch norm's running means hold what they held."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def put_back() -> None:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)

    try:
        yield put_back
    finally:
        put_back()


def copied(batch: Arguments) -> Arguments:
    """Other memory with the same values, and no leaves; one tensor that stands in two places still does."""
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if 0 in tensor.stride() and tensor.numel():  # spread over memory that it shares with itself: torch lets nothing write into it
            return tensor
        return made.setdefault(id(tensor), tensor.clone())

    args, kwargs = tree_map_only(Tensor, copy, batch)
    return args, kwargs


def versions(batch: Any) -> list[int]:
    """How often each of its tensors was written into; the list differs when one was written into since."""
    return [tensor._version for tensor in tensors_of(batch) if not tensor.is_inference()]


def draws_random_numbers(subject: Subject) -> tuple[bool, bool]:
    """Whether the output depends on the random state, with every known dropout off, in training or in evaluation.

    And whether the model writes into its batch; the batch itself is kept from it here.

    Raises:
        NumericsError: ``not-repeatable``.
    """
    was_training = subject.model.training
    modes = [(module, module.training) for module in subject.model.modules()]
    try:
        draws, writes = _draws(subject, training=True)
        if draws:
            return True, writes
        later_draws, later_writes = _draws(subject, training=False)
        return later_draws, writes or later_writes
    finally:
        subject.model.train(was_training)
        for module, mode in modes:
            module.training = mode


def _draws(subject: Subject, *, training: bool) -> tuple[bool, bool]:
    subject.model.train(training)
    writes = False

    def call() -> dict[str, Tensor]:
        nonlocal writes
        batch = copied(subject.batch)
        before = versions(batch)
        found = {name: tensor.clone() for name, tensor in named_outputs(subject.call(batch)).items()}
        writes = writes or versions(batch) != before
        return found

    with torch.no_grad(), eager(), same_random_state() as rewind, buffers_kept(subject.model) as put_back:

        def once() -> dict[str, Tensor]:
            put_back()
            rewind()
            return call()

        first = once()
        if training and (off := max(_differences(first, once()), default=0.0)) > _REPEATED:
            raise NumericsError(
                f"Eager itself gives other outputs when it is called again ({off:.1%} off), with the same batch and random numbers.",
                why="The model keeps something between two calls, or draws numbers that no seed decides, so there is nothing right to "
                "compare the compiled model with.",
                hint="look for counters and caches among the module's attributes, for clocks, and for generators of the model's own",
                code="not-repeatable",
            )
        put_back()
        rewind()
        torch.manual_seed(torch.initial_seed() ^ 1)
        random.seed(1)
        numpy.random.seed(1)
        other = call()
    return any(off > 0 for off in _differences(first, other)), writes


def _differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[float]:
    """How far apart outputs are, as shares of their norms; what isn't finite counts as nothing."""
    for name, tensor in one.items():
        there = other.get(name)
        if there is None or there.shape != tensor.shape:
            yield 1.0
            continue
        expected = in_double(tensor)
        difference = torch.linalg.vector_norm((in_double(there) - expected).nan_to_num(0, 0, 0))
        norm = torch.linalg.vector_norm(expected.nan_to_num(0, 0, 0))
        yield float(difference / norm) if norm else float(difference)


def _best_reference(subject: Subject) -> torch.dtype:
    """float64, else float32, else the model's own precision: the first that fits into memory and that the model can compute in."""
    for dtype in (torch.float64, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(subject.precision).eps:
            continue
        if _fits(subject.model, dtype) and _runs(subject, dtype):
            return dtype
    return subject.precision


def _fits(model: nn.Module, dtype: torch.dtype) -> bool:
    device = device_of(model)
    if device.type == "mps" and dtype == torch.float64:
        return False
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize * _COPIES
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return bool(needed < _OF_FREE_MEMORY * free)


def _runs(subject: Subject, dtype: torch.dtype) -> bool:
    """Quantised layers and kernels for one dtype only can't be raised; whatever they raise, the answer is no."""
    try:
        with torch.no_grad(), eager(), same_random_state(), raised([subject.model], dtype):
            subject.call(subject.batch, dtype)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
