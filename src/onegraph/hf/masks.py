"""Attention masks of transformers: a batch without padding gets none, which is another graph than a batch with some."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_PLAIN, _MASKED = "sdpa", "sdpa_with_every_mask"


class TorchAttention:
    """Masks of a model that uses torch's attention.

    Without padding, transformers leaves the mask out, and torch's attention can then take its fastest kernels. That stays so where
    all batches are of one size and have no padding.

    Args:
        config: The model's.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def padded(self, kwargs: dict[str, Any]) -> bool:
        """Whether a batch has padding. transformers asks the same of every batch, unless it always gets a mask."""
        mask = kwargs.get("attention_mask")
        return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())

    def choose(self, always: bool) -> None:
        """Blocks get a mask always, or only with padding."""
        wanted = _MASKED if always else _PLAIN
        if self._config._attn_implementation != wanted:
            self._config._attn_implementation = wanted


def masks_of(model: Any) -> TorchAttention | None:
    """What gives the blocks of a model their masks; None for attention that isn't torch's."""
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) not in (_PLAIN, _MASKED):
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def every_mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(_MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(_MASKED, every_mask)
    return TorchAttention(config)
