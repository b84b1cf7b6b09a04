"""Any other module that has parameters: they are replaced as a whole, whatever it computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call

from onegraph.layers.base import Layer


@dataclass(frozen=True, kw_only=True)
class ModuleLayer(Layer):
    """A module without parts of its own kind: its floating-point parameters by name, in the shapes they are stored in.

    Args:
        shapes: Name and shape of each.
    """

    kind: ClassVar[str] = "module"

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """That of its ``weight``, or of its first parameter."""
        return self.weight_shape

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return dict(self.shapes)

    def base_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's own floating-point parameters."""
        own = module._parameters
        return {name: value for name, _ in self.shapes if (value := own[name]) is not None}

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the module with these in place of its own."""
        return functional_call(module, dict(tensors), args, kwargs)


def describe_module(module: nn.Module) -> ModuleLayer | None:
    """The description of a module with floating-point parameters and no modules inside that runs by itself; None for anything else."""
    if module._modules or type(module).forward is nn.Module.forward:  # a ParameterList, for one, is never called
        return None
    # An LSTM and its like run from a list of weights of their own, and the out_proj of nn.MultiheadAttention isn't called at all:
    # tensors put in place of theirs would change nothing, without a word.
    if isinstance(module, nn.RNNBase | nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    shapes = {name: tuple(value.shape) for name, value in module._parameters.items() if value is not None and value.is_floating_point()}
    if not shapes:
        return None
    return ModuleLayer(
        in_features=0,
        out_features=0,
        weight_shape=shapes.get("weight", next(iter(shapes.values()))),
        has_bias="bias" in shapes,
        shapes=tuple(shapes.items()),
    )
