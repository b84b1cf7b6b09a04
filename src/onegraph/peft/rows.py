"""``adapter_names=``: an adapter for every row of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from onegraph.adapters import Adapters
from onegraph.compiling.outside import outside_graphs
from onegraph.peft.mistakes import UsageError, as_value_errors

BASE_MODEL = "__base__"
_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "inputs")


def row_names(adapter_names: Sequence[str]) -> list[str | None]:
    """The names that ``Adapters.rows`` takes: None for the base model.

    Raises:
        UsageError: ``peft-adapter-names`` for anything but a list of names.
    """
    if not isinstance(adapter_names, list | tuple) or not all(isinstance(name, str) for name in adapter_names):
        raise UsageError(
            f"adapter_names={adapter_names!r} is no list of names",
            why="It has the adapter of every row of the batch, in order.",
            hint=f'["default", "other", "{BASE_MODEL}"] for a batch of three',
            code="peft-adapter-names",
        )
    return [None if name == BASE_MODEL else name for name in adapter_names]


def refuse_base_name(name: str) -> None:
    """Raise for an adapter with the name that means the base model: its rows would silently run without it.

    Raises:
        UsageError: ``adapter-name``.
    """
    if name == BASE_MODEL:
        raise UsageError(
            f"{name!r} is not a name for an adapter", why="In adapter_names= it stands for rows without one.", code="adapter-name"
        )


class RowsOf:
    """Inside, every row has its own adapter; entering and leaving is no part of any graph.

    Args:
        adapters: The adapters of a model.
        names: As ``Adapters.rows`` takes them.
    """

    def __init__(self, adapters: Adapters, names: Sequence[str | None]) -> None:
        self._rows = adapters.rows(names)

    @outside_graphs
    def __enter__(self) -> None:
        with as_value_errors():
            self._rows.__enter__()

    @outside_graphs
    def __exit__(self, *error: Any) -> None:
        # Whatever happened inside goes on as it is: the rows are only put back.
        self._rows.__exit__(None, None, None)


@outside_graphs
def check_batch(adapter_names: Sequence[str | None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compare the number of names with the batch, before anything runs.

    Raises:
        UsageError: ``row-count``.
    """
    given = [kwargs.get(name) for name in _INPUTS] + list(args[:1])
    batch = next((value.shape[0] for value in given if isinstance(value, Tensor) and value.dim()), None)
    if batch is not None and batch != len(adapter_names):
        raise UsageError(
            f"adapter_names has {len(adapter_names)} names, the batch {batch} rows",
            why="Every row of the batch needs an adapter.",
            hint=f'"{BASE_MODEL}" for rows without one',
            code="row-count",
        )
