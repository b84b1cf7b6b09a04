"""Storage: for each adapted layer one tensor a parameter, with a leading slot axis. Slot 0 is the identity.

Every slot's ``nn.Parameter`` shares memory with the storage, so training one writes where a batch of mixed adapters reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.errors import AdapterError
from onegraph.layers import Layer
from onegraph.methods import Method, ParameterSpec

ALIGNMENT = 64
"""Each slot starts at a multiple of so many elements. Compiled kernels assume that a parameter stays as aligned as the first was."""


@dataclass(frozen=True)
class Block:
    """The tensors of one structure on one layer, for a number of slots: what growing replaces as a whole."""

    num_slots: int
    rank: int | None
    sizes: Method  # the structure, for shared tensors with the sizes that hold every adapter's
    shapes: dict[str, tuple[int, ...]]
    memory: dict[str, Tensor]  # parameters: (S, numel rounded up)
    settings_memory: dict[str, Tensor]  # (S, alignment), the first element of each row is used

    def parameter(self, name: str, slot: int) -> Tensor:
        """A view of one slot's tensor, contiguous."""
        shape = self.shapes[name]
        return self.memory[name][slot, : math.prod(shape)].view(shape)

    def setting(self, name: str, slot: int) -> Tensor:
        """A 0-d view of one slot's setting."""
        return self.settings_memory[name][slot, 0]


@dataclass(frozen=True)
class Rows:
    """The adapters of a batch, one a row: read inside a graph, so that every pass sees the present values.

    Args:
        index: (B,) the slot of each row.
        memory: Parameters of all slots, (S, numel rounded up).
        shapes: Their shapes.
        settings_memory: Settings of all slots, (S, alignment).
    """

    index: Tensor
    memory: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    settings_memory: dict[str, Tensor]

    def gather(self) -> dict[str, Tensor]:
        """The tensors of each row, (B, *shape)."""
        found = {}
        for name, memory in self.memory.items():
            shape = self.shapes[name]
            found[name] = memory.index_select(0, self.index)[:, : math.prod(shape)].view(-1, *shape)
        for name, memory in self.settings_memory.items():
            found[name] = memory[:, 0].index_select(0, self.index)
        return found


class Slots:
    """The adapters of one structure on one layer.

    Args:
        structure: The method without its per-adapter values; equal for all layers, so that they share a graph.
        layer: What is adapted; None for the tensors that all layers of an adapter have in common.
        rank: Capacity: the rank that every slot is padded to; None for methods without one.
        num_slots: Number of slots, the identity included.
        settings: Names of the settings kept.
        dtype: Of the parameters. Settings are float32, or float64 with float64 parameters.
        device: Where both live.
        sizes: For tensors that all layers have in common: the structure with the sizes that they need.
    """

    def __init__(
        self,
        structure: Method,
        layer: Layer | None,
        *,
        rank: int | None,
        num_slots: int,
        settings: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        sizes: Method | None = None,
    ) -> None:
        self.structure = structure
        self.layer = layer
        self.dtype = dtype
        self.device = device
        self.block = self._allocate(num_slots, rank, settings, structure if sizes is None else sizes)
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}
        self._batch: object = None
        self._leaves: dict[str, Tensor] = {}
        self._row_parameters: dict[int, dict[str, nn.Parameter]] = {}
        for slot in range(num_slots):
            self.reset(slot)

    @property
    def num_slots(self) -> int:
        """Slots in the storage, the identity included."""
        return self.block.num_slots

    @property
    def rank(self) -> int | None:
        """Capacity."""
        return self.block.rank

    def specs(self, rank: int | None, sizes: Method | None = None) -> dict[str, ParameterSpec]:
        """The tensors at a rank; with the sizes of the storage, or those of one adapter."""
        method = (self.block.sizes if sizes is None else sizes).with_rank(rank)
        return method.shared_parameters() if self.layer is None else method.parameters(self.layer)

    def identity(self, rank: int | None, sizes: Method | None = None) -> dict[str, Tensor]:
        """What a slot without an adapter holds."""
        if self.layer is None:
            return {name: torch.zeros(spec.shape) for name, spec in self.specs(rank, sizes).items()}
        return self.structure.with_rank(rank).identity(self.layer)

    def parameters(self, slot: int, method: Method | None = None) -> dict[str, nn.Parameter]:
        """The Parameters of a slot: the same objects at every call, views of the storage. Of one adapter's method, those that it has."""
        if slot not in self._parameters:
            specs = self.specs(self.rank)
            tied = {name: nn.Parameter(self.block.parameter(name, slot), requires_grad=specs[name].trained) for name in self.block.shapes}
            if slot == 0:
                for parameter in tied.values():
                    # It must require a gradient like every other slot, or a compiled graph would notice the switch; but the
                    # identity is never trained, so no optimizer may find a gradient here.
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_forget_gradient)  # type: ignore[no-untyped-call]
            self._parameters[slot] = tied
        if method is None or self.layer is None:
            return self._parameters[slot]
        own = method.parameters(self.layer)
        return {name: parameter for name, parameter in self._parameters[slot].items() if name in own}

    @torch.no_grad()
    def tie(self) -> None:
        """Take in what programs have assigned as ``parameter.data``, and let the Parameters be views of the storage again.

        Raises:
            AdapterError: ``tensor-shape``: it was assigned another shape.
        """
        for slot, tied in self._parameters.items():
            for name, parameter in tied.items():
                view = self.block.parameter(name, slot)
                if parameter.data_ptr() == view.data_ptr() and parameter.dtype == view.dtype:
                    continue
                if parameter.shape != view.shape:
                    shapes = f"{tuple(parameter.shape)}, not {tuple(view.shape)}"
                    raise AdapterError(
                        f"a Parameter {name!r} of an adapter was assigned data of shape {shapes}",
                        hint="adapters.load_tensors(name, tensors) takes tensors of the adapter's rank",
                        code="tensor-shape",
                    )
                if slot != 0:  # the identity stays what it is
                    view.copy_(parameter)
                parameter.data = view

    def settings(self, slot: int) -> dict[str, Tensor]:
        """The settings of a slot as 0-d views of the storage."""
        return {name: self.block.setting(name, slot) for name in self.block.settings_memory}

    @torch.no_grad()
    def set(self, slot: int, setting: str, value: float) -> None:
        """Set a setting in place: a compiled graph reads the new value."""
        self.block.setting(setting, slot).fill_(value)

    def rows(self, index: Tensor, slots: AbstractSet[int], batch: object) -> Rows:
        """What a batch with an adapter a row reads: the memory of all slots, and the slot of each row.

        Args:
            index: (B,) int64, the slot of each row.
            slots: Those in it that are adapters; a backward pass gives their Parameters the gradients.
            batch: The same object for all layers of a batch. Each batch has leaves of its own, which know whom they are for.
        """
        self.tie()
        if batch is not self._batch:
            self._batch, self._leaves, self._row_parameters = batch, {}, {}
        self._row_parameters |= {slot: self.parameters(slot) for slot in slots}
        return Rows(index, {name: self._leaf(name) for name in self.block.memory}, self.block.shapes, self.block.settings_memory)

    def stacked(self, name: str) -> Tensor:
        """The tensors of all slots, (S, *shape): a view of the storage."""
        shape = self.block.shapes[name]
        return self.block.memory[name][:, : math.prod(shape)].view(self.num_slots, *shape)

    @property
    def leaves(self) -> list[Tensor]:
        """The trained leaves of autograd of the present batch with an adapter a row."""
        return [leaf for leaf in self._leaves.values() if leaf.requires_grad]

    def _leaf(self, name: str) -> Tensor:
        """The memory of a parameter as a leaf of autograd."""
        if name not in self._leaves:
            leaf = self.block.memory[name].detach()
            if self.specs(self.rank)[name].trained:
                share_out = partial(_share_out, name, self._row_parameters, self.block.shapes[name])
                leaf.requires_grad_().register_post_accumulate_grad_hook(share_out)  # type: ignore[no-untyped-call]
            self._leaves[name] = leaf
        return self._leaves[name]

    @torch.no_grad()
    def reset(self, slot: int) -> None:
        """Make a slot the identity. Whoever still holds its Parameters keeps a copy that nothing reads any more."""
        for parameter in self._parameters.pop(slot, {}).values():
            parameter.data = parameter.data.clone()
        self._clear(slot)
        for name in self.block.settings_memory:
            self.block.setting(name, slot).zero_()

    def _clear(self, slot: int) -> None:
        identity = self.identity(self.rank)
        for name in self.block.shapes:
            self.block.parameter(name, slot).copy_(identity[name])

    @torch.no_grad()
    def write(self, slot: int, rank: int | None, tensors: Mapping[str, Tensor], sizes: Method | None = None) -> None:
        """Copy tensors of a true rank (and true sizes, or some of the structure's names) into a slot; the rest of each is zero."""
        self.tie()
        specs = self.specs(rank, sizes)
        for name, value in tensors.items():
            _fill(self.block.parameter(name, slot), specs[name], value)

    def read(self, slot: int, rank: int | None, sizes: Method | None = None) -> dict[str, Tensor]:
        """The tensors of a slot, cut to a true rank (and true sizes and names): views where the layout allows."""
        self.tie()
        specs = self.specs(rank, sizes)
        return {name: _cut(self.block.parameter(name, slot), specs[name]) for name in self.block.shapes if name in specs}

    @torch.no_grad()
    def grown(self, num_slots: int, rank: int | None, settings: Iterable[str], sizes: Method | None = None) -> Block:
        """A larger block with the same contents. Nothing changes before ``adopt``."""
        self.tie()
        block = self._allocate(num_slots, rank, settings, self.block.sizes if sizes is None else sizes)
        old = self.specs(self.rank)
        identity = self.identity(rank, block.sizes)
        for name in block.shapes:
            for slot in range(num_slots):
                if slot < self.num_slots:
                    _fill(block.parameter(name, slot), old[name], self.block.parameter(name, slot))
                else:
                    block.parameter(name, slot).copy_(identity[name])
        for name, values in self.block.settings_memory.items():
            block.settings_memory[name][: self.num_slots].copy_(values)
        return block

    def handed_over(self, slot: int) -> dict[str, nn.Parameter]:
        """The Parameters of a slot, which are this storage's no more."""
        parameters = self.parameters(slot)
        del self._parameters[slot]
        return parameters

    def take(self, slot: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let a slot have Parameters that were another storage's: whoever holds them goes on with them."""
        own = self.parameters(slot)
        for name in own.keys() - parameters.keys():
            own[name].requires_grad_(any(parameter.requires_grad for parameter in parameters.values()))
        for name, parameter in parameters.items():
            view = own[name].data
            if parameter.grad is not None and parameter.grad.shape != view.shape:
                parameter.grad = None
            parameter.data = view
        self._parameters[slot] = {**own, **parameters}

    def adopt(self, block: Block) -> None:
        """Make a block the storage: the Parameters stay the same objects and are views of it from now on.

        Between the meta device and a real one that can't be: there, new Parameters are made.
        """
        before = next(iter(self.block.memory.values())).device.type
        self.block = block
        self._batch = None
        if "meta" in {before, self.device.type} and before != self.device.type:
            self._parameters.clear()
        for slot, tied in self._parameters.items():
            for name, parameter in tied.items():
                view = block.parameter(name, slot)
                if parameter.grad is not None and parameter.grad.shape != view.shape:
                    parameter.grad = None
                parameter.data = view

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move storage and gradients as ``nn.Module._apply`` does. Settings follow the device and keep their dtype."""
        self.tie()
        from_meta = self.device.type == "meta"
        memory = {name: function(storage) for name, storage in self.block.memory.items()}
        first = next(iter(memory.values()))
        self.dtype, self.device = first.dtype, first.device
        settings = {name: values.to(_settings_device(self.device)) for name, values in self.block.settings_memory.items()}
        moved = [
            (parameter, function(parameter.grad))
            for tied in self._parameters.values()
            for parameter in tied.values()
            if parameter.grad is not None
        ]
        for parameter, _ in moved:
            parameter.grad = None
        self.adopt(replace(self.block, memory=memory, settings_memory=settings))
        for parameter, gradient in moved:
            parameter.grad = gradient
        if from_meta and self.device.type != "meta":
            # Memory that nobody has written: at least the identity and the padding have to be what they are.
            for slot in range(self.num_slots):
                self._clear(slot)

    def _allocate(self, num_slots: int, rank: int | None, settings: Iterable[str], sizes: Method) -> Block:
        shapes = {name: spec.shape for name, spec in self.specs(rank, sizes).items()}
        precision = torch.float64 if self.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):
            memory = {name: _zeros(num_slots, math.prod(shape), self.dtype, self.device) for name, shape in shapes.items()}
            device = _settings_device(self.device)
            return Block(num_slots, rank, sizes, shapes, memory, {name: _zeros(num_slots, 1, precision, device) for name in settings})

    def __getstate__(self) -> dict[str, Any]:
        """Storage only: copies and pickles tie their own Parameters to it."""
        return {**self.__dict__, "_parameters": {}, "_batch": None, "_leaves": {}, "_row_parameters": {}}


def _zeros(num_slots: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_slots, -(-numel // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device)


def _settings_device(device: torch.device) -> torch.device:
    """Settings keep their values while a model has none: nothing initialises them later."""
    return torch.device("cpu") if device.type == "meta" else device


def _cut(padded: Tensor, spec: ParameterSpec) -> Tensor:
    """The part of a padded tensor that a spec of a smaller rank, or of smaller sizes, fills."""
    for axis, size in enumerate(spec.shape):
        if axis not in spec.rank_axes:
            padded = padded.narrow(axis, 0, size)
    for axis in spec.rank_axes:
        size = spec.shape[axis] // spec.rank_blocks
        if spec.rank_blocks == 1:
            padded = padded.narrow(axis, 0, size)
        else:
            padded = _split(padded, axis, spec.rank_blocks).narrow(axis + 1, 0, size).flatten(axis, axis + 1)
    return padded


def _fill(padded: Tensor, spec: ParameterSpec, value: Tensor) -> None:
    """Write a tensor of a spec's shape into a padded one and zero the rest."""
    padded.zero_()
    if spec.rank_blocks == 1 or not spec.rank_axes:
        _cut(padded, spec).copy_(value)
        return
    (axis,) = spec.rank_axes
    blocks = _split(value.contiguous(), axis, spec.rank_blocks)
    _split(padded, axis, spec.rank_blocks).narrow(axis + 1, 0, blocks.shape[axis + 1]).copy_(blocks)


def _split(tensor: Tensor, axis: int, blocks: int) -> Tensor:
    """One axis as two: blocks, and places within a block."""
    return tensor.view(*tensor.shape[:axis], blocks, -1, *tensor.shape[axis + 1 :])


def _share_out(name: str, parameters: Mapping[int, Mapping[str, nn.Parameter]], shape: tuple[int, ...], leaf: Tensor) -> None:
    """Hand the gradient of all slots on to the Parameters of those that were in the batch."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return
    for slot, own in parameters.items():
        parameter, part = own[name], gradient[slot, : math.prod(shape)].view(shape)
        if parameter.shape == part.shape:  # it has another one where the capacity grew meanwhile
            parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None
