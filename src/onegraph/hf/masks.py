"""Attention masks of transformers: a batch without padding gets none, which is another graph than a batch with some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PLAIN, _MASKED = "sdpa", "sdpa_with_every_mask"


def masks_always(model: Any) -> Callable[[bool], None] | None:
    """What lets the graph for every size of batch always have a mask; None for attention that makes none or that isn't torch's.

    Without padding, transformers leaves the mask out, and torch's attention can then take its fastest kernels. That stays so for the graph
    for one size, where fixed lengths run.
    """
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != _PLAIN:
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def every_mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(_MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(_MASKED, every_mask)

    def choose(every: bool) -> None:
        wanted = _MASKED if every else _PLAIN
        if config._attn_implementation != wanted:  # type: ignore[union-attr]
            config._attn_implementation = wanted  # type: ignore[union-attr]

    return choose
