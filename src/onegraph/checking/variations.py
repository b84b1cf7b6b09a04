"""The situations that a model is tried in: other batches and lengths, gradients of inputs, changed weights, other adapters, dropouts."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onegraph.adapters import Adapters
from onegraph.checking.situations import Situation, has_floating_inputs
from onegraph.checking.step import probe_values
from onegraph.checking.subject import Arguments, Subject, tensors_of, without_model_dropout
from onegraph.methods import Method

TRAINED_NOISE = 0.5
FROZEN_NOISE = 0.1
DROPOUT = "with dropout"
_SECOND = "onegraph-check-second"


def situations(subject: Subject) -> list[Situation]:
    """All that apply to this model, in the order to run them: what needs no new graph comes last, after all the graphs were made."""
    rows = batch_size(subject.batch)
    found = []
    if rows:
        found.append(Situation(name="one row more", batch=with_rows(subject.batch, rows, rows + 1)))
        if rows > 1:
            found.append(Situation(name="one row", batch=with_rows(subject.batch, rows, 1)))
    found += [Situation(name=name, batch=batch) for name, batch in other_lengths(subject.batch)]
    if has_floating_inputs(subject.batch):
        found.append(Situation(name="gradients of the inputs", inputs=True))
    if subject.adapters is not None and subject.adapters.names:
        found += _of_adapters(subject.adapters, rows)
    found.append(Situation(name="weights changed in place", enter=weights_changed, may_compile=False))
    found.append(Situation(name="the first batch again", may_compile=False))
    if _has_dropout(subject):
        found.append(Situation(name=DROPOUT, random=True))
    return found


def _has_dropout(subject: Subject) -> bool:
    with without_model_dropout(subject.model) as own:
        pass
    adapters = subject.adapters
    if own or adapters is None:
        return own
    layers = adapters.layers
    return any(method.random_settings & set(method.settings(layers[path].layer)) for path, method in _methods(adapters).items())


def batch_size(batch: Arguments) -> int:
    """The number of rows: the commonest first size of the tensors; 0 when there is none."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim > 0)
    return sizes.most_common(1)[0][0] if sizes else 0


def with_rows(batch: Arguments, rows: int, wanted: int) -> Arguments:
    """The same batch with fewer rows, or with its first ones again."""

    def resized(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            return tensor
        repeats = -(-wanted // rows)
        return torch.cat([tensor] * repeats)[:wanted].detach().clone().requires_grad_(tensor.requires_grad)

    args, kwargs = tree_map_only(Tensor, resized, batch)
    return args, kwargs


def other_lengths(batch: Arguments) -> list[tuple[str, Arguments]]:
    """The batch with fewer positions or a narrower image: a candidate, which the model may refuse."""
    rows = batch_size(batch)
    tensors = [tensor for tensor in tensors_of(batch) if tensor.ndim > 1 and tensor.shape[0] == rows]
    widths = [tensor.shape[-1] for tensor in tensors if tensor.ndim == 4 and tensor.is_floating_point()]
    if widths:
        width = widths[0]
        return [("a narrower image", _cut(batch, rows, width, width // 2, images=True))] if width % 2 == 0 else []
    sequences = [tensor.shape[1] for tensor in tensors if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point())]
    length = Counter(sequences).most_common(1)[0][0] if sequences else 0
    return [("a shorter sequence", _cut(batch, rows, length, length - max(1, length // 4), images=False))] if length > 1 else []


def _cut(batch: Arguments, rows: int, size: int, wanted: int, *, images: bool) -> Arguments:
    """Axes of a size cut: the last one of images; else the second, and those of masks from position to position."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[0] != rows or (images and tensor.ndim != 4):
            return tensor
        shorter = tensor
        for axis in [3] if images else [1, 2, 3] if tensor.ndim == 4 else [1]:
            if tensor.shape[axis] == size:
                shorter = shorter.narrow(axis, 0, wanted)
        return shorter.detach().clone().requires_grad_(tensor.requires_grad)

    args, kwargs = tree_map_only(Tensor, cut, batch)
    return args, kwargs


@contextlib.contextmanager
def weights_changed(subject: Subject) -> Iterator[None]:
    """Every weight gets noise in place, as an optimizer step or a loaded file would change it; afterwards it is as before."""
    generator = torch.Generator().manual_seed(2)
    kept = [(parameter, parameter.detach().clone()) for parameter in subject.model.parameters() if parameter.is_floating_point()]
    try:
        with torch.no_grad():
            for parameter, before in kept:
                size = before.float().square().mean().sqrt() * (TRAINED_NOISE if parameter.requires_grad else FROZEN_NOISE)
                noise = torch.randn(before.shape, generator=generator).to(before.device, torch.float32)
                parameter.add_((noise * size).to(parameter.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)


def _of_adapters(adapters: Adapters, rows: int) -> list[Situation]:
    active = adapters.active

    @contextlib.contextmanager
    def second(subject: Subject) -> Iterator[str]:
        """Another adapter of the same structure: one that is there, or one made for the moment."""
        other = next((name for name in adapters.names if name != active and _same_structure(adapters, name)), None)
        if other is not None:
            yield other
            return
        methods = _methods(adapters)
        overrides = {re.escape(path): method for path, method in methods.items()}
        adapters.add(_SECOND, next(iter(methods.values())), targets=list(methods), overrides=overrides)
        try:
            yield _SECOND
        finally:
            adapters.delete(_SECOND)

    @contextlib.contextmanager
    def switched(subject: Subject) -> Iterator[None]:
        with second(subject) as name:
            adapters.use(name)
            try:
                with probe_values(adapters.parameters(name)):
                    yield
            finally:
                adapters.use(active)

    @contextlib.contextmanager
    def in_rows(subject: Subject) -> Iterator[None]:
        with second(subject) as name, probe_values(adapters.parameters(name)):
            names = list(islice(cycle([active, name, None]), rows))
            with adapters.rows(names):
                yield

    def of_all(subject: Subject) -> dict[str, Tensor]:
        prefix = subject.path.replace(".base_layer", "")
        return {
            f"{name}: {path}": parameter
            for name in adapters.names
            for path, parameter in adapters.parameters(name).items()
            if parameter.requires_grad and (not prefix or path.startswith(f"{prefix}."))
        }

    def disabled(subject: Subject) -> AbstractContextManager[None]:
        return adapters.disabled()

    if active is None:
        return []
    found = [Situation(name="a row an adapter", enter=in_rows, parameters=of_all, everywhere=True)] if rows else []
    return [
        *found,
        Situation(name="another adapter", enter=switched, may_compile=False),
        Situation(name="adapters disabled", enter=disabled, gradients=False, may_compile=False),
    ]


def _methods(adapters: Adapters) -> dict[str, Method]:
    """Those of the active adapter."""
    return {} if adapters.active is None else adapters.methods(adapters.active)


def _same_structure(adapters: Adapters, name: str) -> bool:
    ours = {path: method.structure() for path, method in _methods(adapters).items()}
    return {path: method.structure() for path, method in adapters.methods(name).items()} == ours
