"""The one module of this package: a layer with the active adapter's Parameters beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from onegraph.adapters.run import run
from onegraph.adapters.slots import Slots
from onegraph.layers import Layer
from onegraph.methods import Method

BASE = "base_layer"


class Adapted(nn.Module):
    """y = after(x, base_layer(before(x))) with the active slot's tensors.

    Exactly the active slot's Parameters are registered, under the method's names. Switching registers other ones of the same
    shape. Nothing that ``forward`` reads differs between layers of one shape or between adapters of one structure,
    except tensors: that is what keeps them all on one graph.

    Args:
        base_layer: The layer as it was.
        layer: Its description.
    """

    def __init__(self, base_layer: nn.Module, layer: Layer) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.structures: dict[Method, Slots] = {}
        self.slot = 0
        self._layer = layer
        self._settings: dict[str, Tensor] = {}
        self.training = base_layer.training

    @property
    def layer(self) -> Layer:
        """The description of the base layer."""
        return self._layer

    @property
    def slots(self) -> Slots:
        """The storage of the active structure."""
        return self.structures[self._method]

    def activate(self, structure: Method | None, slot: int) -> None:
        """Register the Parameters of a slot; None keeps the structure that is active."""
        if structure is not None:
            self._method = structure
        slots = self.structures[self._method]
        self.slot = slot
        registered = self.__dict__["_parameters"]
        registered.clear()
        registered.update(slots.parameters(slot))
        self._settings = slots.settings(slot)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The adapted layer's output, in the base layer's dtype."""
        # Read through __dict__ tables: __getattr__ below would be traced for every name.
        parameters: dict[str, Tensor] = self._parameters  # type: ignore[assignment]
        p = {**parameters, **self._settings}
        return run(self._method, self._layer, self._modules[BASE], input, p, *args, training=self.training, **kwargs)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Registered names first, then the base layer's: code that peeks at ``weight`` or ``in_features`` finds them."""
        tables = self.__dict__
        for table in ("_parameters", "_modules", "_buffers"):
            if table in tables and name in tables[table]:
                return tables[table][name]
        if name.startswith("__") or "_modules" not in tables or BASE not in tables["_modules"]:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(tables["_modules"][BASE], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What belongs to the base layer is set there, so that tying weights, for one, works through an adapted layer."""
        base = self.__dict__.get("_modules", {}).get(BASE)
        if base is None or name in self.__dict__ or name in self._parameters or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif name in base._parameters or name in base._buffers or name in base.__dict__:
            setattr(base, name, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the storage of all slots, not only the registered Parameters, and tie them again."""
        if recurse:
            self.base_layer._apply(fn)  # type: ignore[no-untyped-call]
        for slots in self.structures.values():
            slots.apply(fn)
        if self.structures:
            self.activate(None, self.slot)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        """Keys of the model before attaching are the base layer's; values are copied, so that the Parameters stay tied."""
        for name in self.base_layer.state_dict(keep_vars=True):
            plain, moved = f"{prefix}{name}", f"{prefix}{BASE}.{name}"
            if plain in state_dict and moved not in state_dict and name not in self._parameters:
                state_dict[moved] = state_dict.pop(plain)
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Without Parameters and views: they are tied again to the copy's own storage."""
        return {**self.__dict__, "_parameters": {}, "_settings": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.structures:
            self.activate(None, self.slot)

    def extra_repr(self) -> str:
        """The active structure, slot and number of slots."""
        if not self.structures:
            return ""
        rank = "" if self.slots.rank is None else f", rank up to {self.slots.rank}"
        return f"{self._method.name}, slot {self.slot} of {self.slots.num_slots}{rank}"


def base_weight(module: nn.Module, layer: Layer) -> Tensor:
    """The canonical weight of a layer, adapted or not."""
    return layer.base_tensors(module.base_layer if isinstance(module, Adapted) else module)["weight"].detach()
