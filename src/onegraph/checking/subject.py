"""What is checked: a model, the batch it is called with, and the loss; run as it is, or in a higher precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from onegraph.adapters import Adapters, adapters_of
from onegraph.checking.comparison import TOLERANCES
from onegraph.checking.precision import raised
from onegraph.checking.random_state import same_random_state
from onegraph.checking.step import gradients_kept, without_dropout
from onegraph.compiling import device_of, eager
from onegraph.errors import ConfigurationError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positions and keywords."""

# The weights once more in the reference's precision, and about as much again for what a backward pass keeps.
_COPIES = 2
_OF_FREE_MEMORY = 0.8


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
    """

    model: nn.Module
    batch: Arguments
    loss: Callable[[Any], Tensor]
    precision: torch.dtype
    reference: torch.dtype
    path: str = ""
    adapters: Adapters | None = None
    draws: bool = False

    def call(self, batch: Arguments, dtype: torch.dtype | None = None) -> Any:
        """The output; with a dtype everything floating in the batch has it, and autocast is off."""
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
    """
    arguments = arguments_of(batch)
    precision = precision_of(model, arguments)
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
        if draws_random_numbers(subject):  # another precision would draw others
            return replace(subject, draws=True, reference=precision)
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
    known = [dtype if dtype in TOLERANCES else torch.bfloat16 for dtype in dtypes]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists and mappings."""
    leaves, _ = tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """The same nest with every floating-point tensor in ``dtype``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors of an output, by field where it has fields, by place where not."""
    if isinstance(output, Tensor):
        return {"output": output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        parts = {str(name): value for name, value in output.items()}
    elif isinstance(output, tuple | list):
        parts = {f"output {number}": value for number, value in enumerate(output)}
    else:
        parts = {"output": output}
    found: dict[str, Tensor] = {}
    for name, value in parts.items():
        tensors = [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]
        found |= {name if len(tensors) == 1 else f"{name} {number}": tensor for number, tensor in enumerate(tensors)}
    return found


def projection(output: Any) -> Tensor:
    """The output's own loss, or the mean square of its tensors against fixed random targets: every element gets a gradient of its own."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    generator = torch.Generator().manual_seed(1)
    total: Tensor | None = None
    for tensor in named_outputs(output).values():
        target = torch.randn(tensor.shape, generator=generator).to(tensor)
        term = (tensor - target).float().square().mean() if tensor.dtype != torch.float64 else (tensor - target).square().mean()
        total = term if total is None else total + term
    if total is None:
        raise ConfigurationError(
            "The model's output holds no floating-point tensor, so there is no loss to check.",
            hint="pass loss=, a function from the output to a scalar",
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
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers, such as the running means of a batch norm, hold what they held."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


def draws_random_numbers(subject: Subject) -> bool:
    """Whether the output depends on the random state, with every known dropout off."""
    with torch.no_grad(), eager(), same_random_state() as rewind:
        rewind()
        first = named_outputs(subject.call(subject.batch))
        torch.manual_seed(torch.initial_seed() + 1)
        second = named_outputs(subject.call(subject.batch))
    return any(not torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first if name in second)


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
