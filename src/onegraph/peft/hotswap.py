"""Room for adapters that are exchanged while a compiled model runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from onegraph.peft.configs import PeftConfig
from onegraph.peft.exchange import adapters_and_configs
from onegraph.peft.mistakes import as_value_errors


def prepare_model_for_compiled_hotswap(
    model: nn.Module,
    *,
    target_rank: int | None = None,
    config: PeftConfig | Mapping[str, PeftConfig] | None = None,
    check_compiled: str = "error",
) -> None:
    """Make room for the highest rank that ``hotswap_adapter`` will bring, so that none of them recompiles.

    Strengths are tensors anyway. On a model that is compiled already this is one recompile, now.

    Args:
        model: A model with an adapter.
        target_rank: The highest rank to come; None: that of the adapter that is there.
        config: Without effect: configurations keep the ranks of their adapters.
        check_compiled: Without effect: compiled before or after, both work.

    Raises:
        UsageError: ``peft-no-adapters``. ConfigurationError: ``reserve`` for a rank below 1.
    """
    with as_value_errors():
        adapters, _ = adapters_and_configs(model)
        if target_rank is not None:
            adapters.reserve(rank=target_rank)
