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
        self._switched_off: list[tuple[nn.Module, str, int]] = []

    def wrap(self, layers: Mapping[str, tuple[Place, Adapted]]) -> None:
        """Hang adapted layers where the plain ones are, everywhere they are. The first time, freeze the whole model."""
        if self._frozen is None:
            self._frozen = set()
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    self._frozen.add(plain_name(name))
                    parameter.requires_grad_(False)
        for place, adapted in layers.values():
            adapted.layer.settle(adapted.base_layer)
            for name, parameter in adapted.base_layer.named_parameters():
                if not _is_adapter(adapted.base_layer, name):
                    parameter.requires_grad_(False)
            for parent, name in place.parents:
                self._replaced.append((parent, name, parent._modules[name]))
                parent._modules[name] = adapted
        self._switch_fused_kernels_off()

    def _switch_fused_kernels_off(self) -> None:
        """In inference, nn.TransformerEncoderLayer hands all its weights to one kernel, which would pass the adapters by.

        Both values are ones that the modules themselves choose where the kernel can't be used, and nothing else reads them.
        """
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(inner, Adapted) for inner in module.modules()):
                self._switch_off(module, "activation_relu_or_gelu")
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoder) and any(
                not vars(layer).get("activation_relu_or_gelu", 1) for layer in module.layers
            ):
                self._switch_off(module, "use_nested_tensor")

    def _switch_off(self, module: nn.Module, attribute: str) -> None:
        present = vars(module).get(attribute)
        if present:
            self._switched_off.append((module, attribute, present))
            setattr(module, attribute, type(present)(0))

    def undo(self) -> None:
        """Hang the plain layers back and thaw what was frozen."""
        for parent, name, plain in reversed(self._replaced):
            parent._modules[name] = plain
        for module, attribute, value in self._switched_off:
            setattr(module, attribute, value)
        frozen = self._frozen or set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if plain_name(name) in frozen:
                parameter.requires_grad_(True)
        self.model.__dict__.pop(RECORD, None)
        self._replaced, self._switched_off, self.undone = [], [], True


def _is_adapter(module: nn.Module, name: str) -> bool:
    """Whether a parameter inside a base layer belongs to an adapted layer in it."""
    owner, _, _ = name.rpartition(".")
    return isinstance(module.get_submodule(owner), Adapted)
