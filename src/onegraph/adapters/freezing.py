"""Which adapters train: the Parameters of one by their role, and whether they require a gradient."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from onegraph.adapters.values import SHARED

if TYPE_CHECKING:
    from onegraph.adapters.collection import Adapters
    from onegraph.adapters.slots import Slots
    from onegraph.methods import Method


def registered(adapters: Adapters, name: str) -> dict[str, dict[str, nn.Parameter]]:
    """Path -> name -> Parameter, of everything that an adapter could train, frozen now or not; shared ones under the path "".

    Raises:
        AdapterError: ``unknown-adapter``.
    """
    record = adapters._record(name)
    found = {path: _trained(adapters._slots(path, record), adapters._slot(path, record), method) for path, method in record.methods.items()}
    for structure in record.shared():
        found.setdefault(SHARED, {}).update(_trained(adapters._shared(structure), record.slots[structure]))
    return {path: parameters for path, parameters in found.items() if parameters}


def train_only(adapters: Adapters, names: Collection[str]) -> None:
    """Let these adapters train and freeze all others.

    What runs in place of a missing adapter requires a gradient where the active one does: a compiled graph notices the difference, so
    that switching off costs no graph.
    """
    for name in adapters.names:
        record = adapters._record(name)
        parts = [_trained(adapters._slots(path, record), adapters._slot(path, record)) for path in record.methods]
        parts += [_trained(adapters._shared(structure), record.slots[structure]) for structure in record.shared()]
        for parameters in parts:  # those that the adapter doesn't use as well: a graph asks the same of all
            for parameter in parameters.values():
                parameter.requires_grad_(name in names)
    active = adapters.active is None or adapters.active in names
    for layer in adapters.layers.values():
        for slots in (*layer.structures.values(), *layer.shared.values()):
            for parameter in _trained(slots, 0).values():
                parameter.requires_grad_(active)


def _trained(slots: Slots, slot: int, method: Method | None = None) -> dict[str, nn.Parameter]:
    specs = slots.specs(None)  # what is trained doesn't depend on the rank
    return {name: parameter for name, parameter in slots.parameters(slot, method).items() if specs[name].trained}
