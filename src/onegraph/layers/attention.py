"""``nn.MultiheadAttention``: its input projections as one weight, and its output projection, which it reads and never calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from onegraph.layers.linear import LinearLayer

_ATTRIBUTES = {"weight": "in_proj_weight", "bias": "in_proj_bias"}
_KEY_AND_VALUE_BIAS = ("bias_k", "bias_v")


@dataclass(frozen=True, kw_only=True)
class AttentionLayer(LinearLayer):
    """The projections of query, key and value: ``[q; k; v] = x W^T + b`` with W (3E, E), inside the attention that uses them.

    The product happens inside the module's own forward, which also chooses between several kernels: it runs as it is, with the
    adapted weight in place of its own.

    Args:
        batch_first: Whether the batch is the first axis of its inputs, or the second.
        has_key_and_value_bias: Whether it has ``bias_k`` and ``bias_v``; they go with it for methods that change every tensor.
    """

    by_weight: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("out_proj",)
    input_name: ClassVar[str] = "query"

    batch_first: bool = False
    has_key_and_value_bias: bool = False

    @property
    def batch_axis(self) -> int:
        """As the module has it."""
        return 0 if self.batch_first else 1

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """``weight`` (3E, E), ``bias`` (3E,), and ``bias_k`` and ``bias_v`` (1, 1, E)."""
        extra = _KEY_AND_VALUE_BIAS if self.has_key_and_value_bias else ()
        return {**super().tensor_shapes(), **dict.fromkeys(extra, (1, 1, self.in_features))}

    def attribute(self, name: str) -> str:
        """``in_proj_weight`` and ``in_proj_bias``."""
        return _ATTRIBUTES.get(name, name)

    def base_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's own."""
        return {name: getattr(module, self.attribute(name)) for name in self.tensor_shapes()}

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the module with these in place of its own: (attended, attention weights or None)."""
        return functional_call(module, {self.attribute(name): value for name, value in tensors.items()}, args, kwargs)

    def call_rows(
        self,
        module: nn.Module,
        adapted: Callable[..., Mapping[str, Tensor]],
        rows: Sequence[Mapping[str, Tensor]],
        x: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Every row as an input without a batch axis, with its own weight. Arguments are those of the module.

        It asks for the attention weights whether they are wanted or not: torch's fused attention can't be batched once more on
        every device, the one that keeps (B, heads, T, T) can.
        """
        names = ("key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
        given = {**dict(zip(names, args)), **kwargs}
        axis, num_rows = self.batch_axis, x.shape[self.batch_axis]
        carried = {"query": x, "key": given.pop("key"), "value": given.pop("value")}
        axes: dict[str, int | None] = dict.fromkeys(carried, axis)
        if (padding := given.pop("key_padding_mask", None)) is not None:
            carried["key_padding_mask"], axes["key_padding_mask"] = padding, 0
        if (mask := given.pop("attn_mask", None)) is not None:
            per_row = mask.dim() == 3  # (B * heads, T, T)
            carried["attn_mask"] = mask.reshape(num_rows, -1, *mask.shape[1:]) if per_row else mask
            axes["attn_mask"] = 0 if per_row else None
        wanted = given.pop("need_weights", True)

        def one(inputs: dict[str, Tensor], *p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = self.call(module, adapted(*p), **inputs, **given, need_weights=True)
            return found

        run = vmap(one, in_dims=(axes, *(0 for _ in rows)), out_dims=(axis, 0), randomness="different")
        y, weights = run(carried, *rows)
        return y, weights if wanted else None


@dataclass(frozen=True, kw_only=True)
class ReadLinearLayer(LinearLayer):
    """The ``out_proj`` of a ``nn.MultiheadAttention``: ``y = x W^T + b``, multiplied by its owner, which runs its rows too."""

    by_weight: ClassVar[bool] = True
    is_read: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False


def describe_attention(module: nn.Module) -> LinearLayer | None:
    """The description of an ``nn.MultiheadAttention`` or of its ``out_proj``; None for anything else."""
    if isinstance(module, nn.MultiheadAttention):
        if refusal_of_attention(module) is not None or type(module).forward is not nn.MultiheadAttention.forward:
            return None
        return AttentionLayer(
            in_features=module.embed_dim,
            out_features=3 * module.embed_dim,
            weight_shape=(3 * module.embed_dim, module.embed_dim),
            has_bias=module.in_proj_bias is not None,
            batch_first=module.batch_first,
            has_key_and_value_bias=module.bias_k is not None,
        )
    if not isinstance(module, NonDynamicallyQuantizableLinear) or type(module).forward is not nn.Linear.forward:
        return None
    if type(module.weight) is not nn.Parameter:
        return None
    return ReadLinearLayer(
        in_features=module.in_features,
        out_features=module.out_features,
        weight_shape=(module.out_features, module.in_features),
        has_bias=module.bias is not None,
    )


def refusal_of_attention(module: nn.Module) -> str | None:
    """Why an ``nn.MultiheadAttention`` can't be adapted; None where it can, or for anything else."""
    if not isinstance(module, nn.MultiheadAttention) or module._qkv_same_embed_dim:
        return None
    sizes = f"kdim={module.kdim} and vdim={module.vdim} beside embed_dim={module.embed_dim}"
    return f"its input projections are three weights ({sizes}); only those that are one in_proj_weight can be adapted, and its out_proj"
