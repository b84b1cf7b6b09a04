"""The one module of this package: a layer with the active adapter's Parameters beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from onegraph.adapters.row_errors import require_one_meaning, require_rows
from onegraph.adapters.run import Inside, run, run_rows
from onegraph.adapters.slots import Rows, Slots
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
        self.shared: dict[Method, Slots] = {}
        self.slot = 0
        self._shared_slot = 0
        self._layer = layer
        self._constants: dict[str, Tensor] = {}
        self._rows: list[tuple[Method, list[Rows]]] | None = None
        self._assigned: tuple[Mapping[Method, tuple[Tensor, set[int]]], object] = ({}, None)
        self.training = base_layer.training

    @property
    def layer(self) -> Layer:
        """The description of the base layer."""
        return self._layer

    @property
    def slots(self) -> Slots:
        """The storage of the active structure."""
        return self.structures[self._method]

    def activate(self, structure: Method | None, slot: int, shared_slot: int = 0) -> None:
        """Register the Parameters of a slot; None keeps the structure that is active.

        Layers that the adapter isn't on run the identity, with the adapter's shared tensors all the same: which layers share
        a tensor is something that a graph depends on.
        """
        if structure is not None:
            self._method = structure
        self.slot, self._shared_slot = slot, shared_slot
        self._register()

    def forget(self, old: Method, new: Method) -> None:
        """Let one structure stand in the place of another, with what the layer runs on its identity until it is activated again."""
        slots = self.structures.pop(new)
        found = {new if structure == old else structure: slots if structure == old else own for structure, own in self.structures.items()}
        self.structures = found
        if self._method == old:
            self.activate(new, 0)

    def _running(self) -> tuple[Method, int, int]:
        """The structure and the slots whose Parameters are registered."""
        if self._rows is not None and not self._layer.takes_rows:
            # The owner's graph for rows depends on the names that it finds: always the same ones, whichever adapter is active.
            return next(iter(self.structures)), 0, 0
        return self._method, self.slot, self._shared_slot

    def _register(self) -> None:
        method, slot, shared_slot = self._running()
        slots = self.structures[method]
        parameters = dict(slots.parameters(slot))
        self._constants = slots.settings(slot)
        if method in self.shared:
            parameters |= self.shared[method].parameters(shared_slot)
            # What isn't trained is written to no state dict: it would be there once a layer.
            fixed = [name for name, parameter in parameters.items() if not parameter.requires_grad]
            self._constants |= {name: parameters.pop(name) for name in fixed}
        registered = self.__dict__["_parameters"]
        registered.clear()
        registered.update(parameters)

    def assign_rows(self, indices: Mapping[Method, tuple[Tensor, set[int]]] | None, batch: object = None) -> None:
        """Give every row of the batch its own adapter; None ends it.

        Args:
            indices: Structure -> the slot of each row, and which of them are adapters on this layer.
            batch: The same object for all layers of a batch.
        """
        if indices is None:
            self._rows = None
            if self.structures and not self._layer.takes_rows:
                self._register()
            return
        self._assigned = indices, batch
        rows = []
        for structure in self.structures:
            index, slots = indices[structure]
            storages = [self.structures[structure]] + ([self.shared[structure]] if structure in self.shared else [])
            rows.append((structure, [storage.rows(index, slots, batch) for storage in storages]))
        self._rows = rows
        if not self._layer.takes_rows:
            self._register()

    def replaced_parameters(self) -> dict[str, nn.Parameter]:
        """Our own Parameters of the active slot that others hang in the place of: FSDP2, for one, puts its pieces there."""
        if not self.structures:
            return {}
        method, slot, shared_slot = self._running()
        own = dict(self.structures[method].parameters(slot))
        if method in self.shared:
            own |= self.shared[method].parameters(shared_slot)
        return {name: own[name] for name, present in self._parameters.items() if name in own and present is not own[name]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The adapted layer's output, in the base layer's dtype."""
        base: nn.Module = self._modules[BASE]  # type: ignore[assignment]
        input, args = (args[0], args[1:]) if args else (kwargs.pop(self._layer.input_name), ())
        if self._rows is not None:
            if not self._layer.takes_rows:
                return self._layer.forward(base, input, *args, **kwargs)
            x = _batch(input, self._rows[0][1][0].index.shape[0], self._layer)
            inside = self._read_inside(base)
            return run_rows(self._gathered(), self._layer, base, x, *args, training=self.training, inside=inside, **kwargs)
        return run(self._method, self._layer, base, input, self._present(), *args, training=self.training, **kwargs)

    def _present(self) -> dict[str, Tensor]:
        """The active slot's tensors, read through __dict__ tables: __getattr__ below would be traced for every name."""
        parameters: dict[str, Tensor] = self._parameters  # type: ignore[assignment]
        return {**parameters, **self._constants}

    def _gathered(self) -> list[tuple[Method, dict[str, Tensor]]]:
        """Each structure with the tensors of every row."""
        return [(method, {name: value for rows in parts for name, value in rows.gather().items()}) for method, parts in self._rows or ()]

    def _read_inside(self, base: nn.Module) -> list[Inside]:
        """The adapted layers that the base layer reads, for the rows of a batch."""
        found = []
        for name in self._layer.reads:
            module = base._modules[name]
            if isinstance(module, Adapted):
                inner: nn.Module = module._modules[BASE]  # type: ignore[assignment]
                found.append(Inside(f"{name}.{BASE}.", module._layer, inner, module._gathered()))
        return found

    def _handed_out(self, name: str) -> Tensor | None:
        """The adapted tensor, for an owner that reads it and multiplies by itself."""
        base = self._layer.base_tensors(self._modules[BASE])  # type: ignore[arg-type]
        if self._rows is not None:
            return base.get(name)
        return self._method.adapt_tensors(base, self._present(), self._layer, training=self.training).get(name)

    def __getattr__(self, name: str) -> Any:
        """Registered names first, then the base layer's: code that peeks at ``weight`` or ``in_features`` finds them."""
        tables = self.__dict__
        for table in ("_parameters", "_modules", "_buffers"):
            if table in tables and name in tables[table]:
                return tables[table][name]
        if name.startswith("__") or "_modules" not in tables or BASE not in tables["_modules"]:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in ("weight", "bias") and tables["_layer"].is_read:
            return self._handed_out(name)
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
        for slots in [*self.structures.values(), *self.shared.values()]:
            slots.apply(fn)
        if self.structures:
            self.activate(None, self.slot, self._shared_slot)
        if self._rows:
            indices, batch = self._assigned
            device = self.slots.device
            self.assign_rows({structure: (index.to(device), slots) for structure, (index, slots) in indices.items()}, batch)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        """Keys of the model before attaching are the base layer's; values are copied, so that the Parameters stay tied."""
        for inner in self.base_layer.state_dict(keep_vars=True):
            name = inner.replace(f"{BASE}.", "")  # an adapted layer inside moves its own keys further
            plain, moved = f"{prefix}{name}", f"{prefix}{BASE}.{name}"
            if plain in state_dict and moved not in state_dict and name not in self._parameters:
                state_dict[moved] = state_dict.pop(plain)
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Without Parameters and views: they are tied again to the copy's own storage."""
        return {**self.__dict__, "_parameters": {}, "_constants": {}, "_rows": None, "_assigned": ({}, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.structures:
            self.activate(None, self.slot, self._shared_slot)

    def extra_repr(self) -> str:
        """The active structure, slot and number of slots."""
        if not self.structures:
            return ""
        rank = "" if self.slots.rank is None else f", rank up to {self.slots.rank}"
        return f"{self._method.name}, slot {self.slot} of {self.slots.num_slots}{rank}"


def _batch(x: Tensor, num_rows: int, layer: Layer) -> Tensor:
    """The input with one row an adapter; positions, the same for every row, come as a single one or without a batch axis."""
    if layer.kind == "embedding" and x.dim() < 2:
        # As many as there are rows can be the positions of all of them, or a class for each: another output.
        one_meaning = x.dim() == 0 or x.shape[0] != num_rows or num_rows == 1
        require_one_meaning(one_meaning, num_rows)
        return x.expand(num_rows, *x.shape)
    if layer.kind == "embedding" and x.shape[0] == 1:
        return x.expand(num_rows, *x.shape[1:])
    fits = x.dim() > layer.batch_axis and x.shape[layer.batch_axis] == num_rows
    require_rows(fits, num_rows, x.shape)
    return x


def base_weight(module: nn.Module, layer: Layer) -> Tensor:
    """The canonical weight of a layer, adapted or not; the first tensor of a module that has none of that name.

    One that is cut in pieces over several processes is put together: each of them has to ask.
    """
    own = layer.base_tensors(module.base_layer if isinstance(module, Adapted) else module)
    weight = own.get("weight", next(iter(own.values()))).detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
