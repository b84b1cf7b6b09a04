"""Linear layers with a quantised weight: 8 and 4 bits of bitsandbytes, and weights of torchao.

They are known by the names of their classes: neither library is imported for a model that has nothing of it. A method beside the
layer uses the library's own product, which expands the weight again for the backward pass instead of keeping it; a method by the
weight, one that reads the weight, and merging get the expanded weight. By the weight, 8 bits of bitsandbytes are the library's product
plus one with the change, since it rounds the input too, and an adapter that is off has to be the layer as it is.
"""

from __future__ import annotations

import copy
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from onegraph.errors import TargetError
from onegraph.layers.linear import LinearLayer

_LARGEST_CODE = 127.0  # of a signed byte: what a row's largest weight is stored as


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear(LinearLayer):
    """``y = x W^T + b`` with W stored in few bits; the product in the dtype of ``x`` or in the module's ``compute_dtype``."""

    @abstractmethod
    def expanded(self, module: nn.Module) -> Tensor:
        """The weight (O, I) as floating-point numbers."""

    def base_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The expanded weight, and the bias."""
        bias = module._parameters["bias"]
        return {"weight": self.expanded(module), **({} if bias is None else {"bias": bias})}

    def compute_dtype(self, module: nn.Module, x: Tensor) -> torch.dtype:
        """The dtype of the product."""
        return x.dtype

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The dense product with these tensors, in the dtype that the module computes in."""
        (x,) = args
        dtype = self.compute_dtype(module, x)
        bias = tensors.get("bias")
        return functional.linear(x.to(dtype), tensors["weight"].to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class EightBitLinear(QuantizedLinear):
    """``Linear8bitLt`` of bitsandbytes: bytes and a scale for each row, the largest magnitude in it.

    Its product rounds the input to 8 bits as well, except for columns with a value above its ``threshold``, and in training on a CPU.
    The gradient of the input is that of the expanded weight.
    """

    adds_change: ClassVar[bool] = True

    def settle(self, module: Any) -> None:
        """Bytes and scales back from ``state`` to the weight, from where a copy, a move and ``state_dict`` take them along."""
        if module.weight.SCB is None:  # CB alone may be there all the same
            module.weight.CB, module.weight.SCB = module.state.CB, module.state.SCB
            module.state.CB = module.state.SCB = None

    def expanded(self, module: nn.Module) -> Tensor:
        """From bytes (O, I) and scales (O,), in float32."""
        codes, scales = _codes_and_scales(module)
        return codes * (scales / _LARGEST_CODE).unsqueeze(1)

    def forward(self, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The library's product. The module's own forward moves its tensors about between calls: a graph would be compiled for each."""
        state = sys.modules["bitsandbytes"].MatmulLtState()
        state.CB, state.SCB = _codes_and_scales(module)
        state.threshold, state.has_fp16_weights, state.is_training = module.state.threshold, False, module.training
        bias = None if module.bias is None else module.bias.to(x.dtype)
        y: Tensor = sys.modules["bitsandbytes"].matmul(x, module.weight, bias=bias, state=state)
        return y

    def weight_parameter(self, module: Any, merged: Tensor) -> nn.Parameter:
        """Rounded to bytes again, with new scales, as the library does it: through float16."""
        codes, scales, _ = sys.modules["bitsandbytes"].functional.int8_vectorwise_quant(merged.to(torch.float16).contiguous())
        kind = type(module.weight)
        parameter: nn.Parameter = kind(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        return parameter


@dataclass(frozen=True, kw_only=True)
class FourBitLinear(QuantizedLinear):
    """``Linear4bit`` of bitsandbytes: a table of 16 values (nf4, fp4), and a scale for each block, which may be quantised in turn."""

    def settle(self, module: Any) -> None:
        """On a CPU the module packs its weight anew in its first inference, in a form that no gradient passes through."""
        module.weight.data, module.weight.quant_state = _unpacked(module.weight.data, module.weight.quant_state)

    def expanded(self, module: Any) -> Tensor:
        """In the dtype that was quantised."""
        packed, state = module.weight.data, module.weight.quant_state
        if _is_packed_for_cpu(state):
            packed, state = _unpacked(packed, copy.deepcopy(state))
        weight: Tensor = sys.modules["bitsandbytes"].functional.dequantize_4bit(packed, state)
        return weight

    def compute_dtype(self, module: Any, x: Tensor) -> torch.dtype:
        """The module's; one that hasn't run yet takes that of its input."""
        dtype = module.compute_dtype
        return dtype if isinstance(dtype, torch.dtype) and module.compute_type_is_set else x.dtype

    def forward(self, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The library's product, without what the module's own forward changes in itself: the bias, and on a CPU the packing."""
        dtype = self.compute_dtype(module, x)
        bias = None if module.bias is None else module.bias.to(dtype)
        weight = module.weight
        product = sys.modules["bitsandbytes"].matmul_4bit
        y: Tensor = product(x.to(dtype), weight.t(), quant_state=weight.quant_state, bias=bias)
        return y.to(x.dtype)

    def weight_parameter(self, module: Any, merged: Tensor) -> nn.Parameter:
        """Quantised again with the same table and blocks."""
        present = module.weight
        kind, state = type(present), present.quant_state
        fresh = kind(
            merged.to(state.dtype).contiguous(),
            requires_grad=False,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=present.quant_storage,
        )
        parameter: nn.Parameter = fresh.to(present.device)
        return parameter


@dataclass(frozen=True, kw_only=True)
class TensorSubclassLinear(QuantizedLinear):
    """An ``nn.Linear`` whose weight is a quantised tensor of torchao, which computes its own product, its gradient too."""

    def expanded(self, module: Any) -> Tensor:
        """As the tensor expands itself."""
        weight: Tensor = module.weight.dequantize()
        return weight

    def weight_parameter(self, module: Any, merged: Tensor) -> nn.Parameter:
        """Quantised again by the same rule; int8 weights only."""
        present = module.weight
        library = sys.modules["torchao.quantization"]
        if type(present) is not getattr(library, "Int8Tensor", None) or not _is_weight_only(present):
            raise TargetError(
                f"an adapter can't be merged into a {type(present).__name__} of torchao",
                why="How this weight was quantised isn't stored with it, so that it can't be done again.",
                hint="run the adapter beside it, or merge into the model before quantising it",
                code="quantised-merge",
            )
        rows, columns = present.block_size
        if columns < present.shape[1]:
            granularity = library.PerGroup(columns)
        else:
            granularity = library.PerRow() if rows == 1 else library.PerTensor()
        again = type(present).from_hp(merged.to(present.dtype), granularity, reduce_range=present.reduce_range)
        return nn.Parameter(again, requires_grad=False)


def describe_quantized(module: nn.Module) -> QuantizedLinear | None:
    """The description of a quantised Linear of these libraries; None for anything else."""
    kind = _kind(module)
    if kind is None or refusal_of_quantized(module) is not None:
        return None
    assert isinstance(module, nn.Linear)
    return kind(
        in_features=module.in_features,
        out_features=module.out_features,
        weight_shape=(module.out_features, module.in_features),
        has_bias=module.bias is not None,
    )


def refusal_of_quantized(module: nn.Module) -> str | None:
    """Why a quantised Linear can't be adapted; None where it can, or for anything else."""
    kind = _kind(module)
    if kind is FourBitLinear:
        state = getattr(module.weight, "quant_state", None)
        if state is None:
            return "it isn't quantised yet: bitsandbytes does that when it is moved to its device, before attaching"
        if tuple(state.shape) != (module.out_features, module.in_features):
            return f"its weight was quantised in the shape {tuple(state.shape)}, not (out_features, in_features)"
    if kind is EightBitLinear:
        if getattr(module.weight, "has_fp16_weights", False):
            return "it keeps a float16 weight that it quantises anew in every call; has_fp16_weights=False quantises it once"
        if module.weight.dtype != torch.int8:
            return "it isn't quantised yet: bitsandbytes does that when it is moved to its device, before attaching"
    return None


def _kind(module: nn.Module) -> type[QuantizedLinear] | None:
    if not isinstance(module, nn.Linear):
        return None
    for base in type(module).__mro__:
        if base.__module__.startswith("bitsandbytes.nn") and base.__name__ in ("Linear8bitLt", "Linear4bit"):
            runs = type(module).forward is vars(base).get("forward")
            return (EightBitLinear if base.__name__ == "Linear8bitLt" else FourBitLinear) if runs else None
    weight = module._parameters.get("weight")
    if weight is None or type(module).forward is not nn.Linear.forward or not type(weight).__module__.startswith("torchao."):
        return None
    return TensorSubclassLinear if hasattr(weight, "dequantize") else None


def _codes_and_scales(module: Any) -> tuple[Tensor, Tensor]:
    """On the weight, or where a call of the module itself has moved them."""
    owner = module.state if module.weight.SCB is None else module.weight
    return owner.CB, owner.SCB


def _is_packed_for_cpu(state: Any) -> bool:
    return bool(getattr(state, "packing_format_for_cpu", False))


def _unpacked(packed: Tensor, state: Any) -> tuple[Tensor, Any]:
    """As it was before the library packed it for its CPU kernel; ``state`` is changed."""
    if not _is_packed_for_cpu(state):
        return packed, state
    found: tuple[Tensor, Any] = sys.modules["bitsandbytes"].functional._convert_weight_packed_for_cpu_inverse(packed, state)
    return found


def _is_weight_only(weight: Any) -> bool:
    """Symmetric, with nothing about activations in it."""
    others = (weight.act_quant_kwargs, weight.act_quant_scale, weight.act_quant_zero_point, weight.act_pre_scale)
    symmetric = weight.zero_point is None or not bool(weight.zero_point.any())
    return symmetric and all(value is None for value in others)
