"""Weights of the base model that a file holds whole: in files their values, here differences from the model's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from onegraph.adapters import Adapters
from onegraph.checkpoint.contents import Contents
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm
from onegraph.errors import CheckpointError
from onegraph.methods import Method


@dataclass(frozen=True)
class Whole:
    """An adapter split for a file that holds whole weights.

    Args:
        methods: Module path -> method, for the layers that the file's own method is on.
        tensors: Name in the model -> the weight with the adapter's difference in it.
        fields: What the configuration says about them.
    """

    methods: dict[str, Method]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)


def whole_weights(adapters: Adapters, found: Contents, form: PeftForm) -> Whole:
    """Split an adapter.

    Raises:
        CheckpointError: ``adapter-unsupported`` for layers with a method that has no place beside the file's own.
    """
    own = {path: method for path, method in found.methods.items() if isinstance(method, form.methods)}
    other = sorted({method.name for path, method in found.methods.items() if path not in own})
    if other:
        raise CheckpointError(
            f"A PEFT folder of the type {form.peft_type} has no place for {', '.join(other)}.",
            why="The layers of this adapter have several methods.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    return Whole(own)
