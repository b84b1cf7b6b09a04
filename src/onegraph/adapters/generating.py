"""``rows`` around ``generate`` of transformers: beams and further sequences repeat every row of the input, and its adapter with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from onegraph.errors import AdapterError

if TYPE_CHECKING:
    from onegraph.adapters.collection import Adapters

_GENERATE, _EXPAND = "generate", "_expand_inputs_for_generation"


@contextlib.contextmanager
def repeated_by_generate(adapters: Adapters) -> Iterator[None]:
    """Inside, ``generate`` of the model gives the rows that it makes out of one the adapter of that row; without effect on other models.

    An encoder sees every row once and the decoder as often as there are beams: the adapters are repeated where the inputs are.
    """
    model = adapters.model
    installed = [name for name in (_GENERATE, _EXPAND) if callable(getattr(type(model), name, None)) and name not in vars(model)]
    if len(installed) < 2:  # no model of transformers, or one that is inside rows already
        yield
        return
    vars(model)[_GENERATE] = functools.partial(_generate, model, adapters)
    vars(model)[_EXPAND] = functools.partial(_expand, model, adapters)
    try:
        yield
    finally:
        for name in installed:
            vars(model).pop(name, None)


def _generate(model: Any, adapters: Adapters, *args: Any, **kwargs: Any) -> Any:
    before = adapters._rows
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        if adapters._rows is not before:
            _assign(adapters, before)


def _expand(model: Any, adapters: Adapters, *args: Any, **kwargs: Any) -> Any:
    found = type(model)._expand_inputs_for_generation(model, *args, **kwargs)
    rows, ids = adapters._rows, found[0]
    if rows is not None and isinstance(ids, Tensor):
        times = max(1, int(kwargs.get("expand_size", 1)))
        if ids.shape[0] == len(rows) * times:
            _assign(adapters, tuple(name for name in rows for _ in range(times)))
        elif ids.shape[0] != len(rows):
            raise AdapterError(
                f"{len(rows)} rows were named, but generate() got {ids.shape[0] // times}",
                why="rows() names the adapter of every row of the batch; each is repeated for its beams and further sequences.",
                hint="name as many rows as the batch has; None: the base model",
                code="row-count",
            )
    return found


def _assign(adapters: Adapters, rows: tuple[str | None, ...] | None) -> None:
    adapters._rows = rows
    adapters._assign_rows()
