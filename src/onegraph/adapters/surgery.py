"""Replacing layers by adapted ones, and putting them back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.walk import Place, plain_name

RECORD = "_onegraph_adapters"


class Surgery:
    """What was changed in a model, so that it can be undone without a trace."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.undone = False
        self._frozen: set[str] | None = None
        self._replaced: list[tuple[nn.Module, str, nn.Module | None]] = []

    def wrap(self, layers: Mapping[str, tuple[Place, Adapted]]) -> None:
        """Hang adapted layers where the plain ones are, everywhere they are. The first time, freeze the whole model."""
        if self._frozen is None:
            self._frozen = set()
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    self._frozen.add(plain_name(name))
                    parameter.requires_grad_(False)
        for place, adapted in layers.values():
            for parameter in adapted.base_layer.parameters():
                parameter.requires_grad_(False)
            for parent, name in place.parents:
                self._replaced.append((parent, name, parent._modules[name]))
                parent._modules[name] = adapted

    def undo(self) -> None:
        """Hang the plain layers back and thaw what was frozen."""
        for parent, name, plain in reversed(self._replaced):
            parent._modules[name] = plain
        frozen = self._frozen or set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if plain_name(name) in frozen:
                parameter.requires_grad_(True)
        self.model.__dict__.pop(RECORD, None)
        self._replaced, self.undone = [], True
