"""``add_weighted_adapter``: PEFT's names for combinations, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onegraph.adapters import Adapters
from onegraph.checkpoint.contents import contents
from onegraph.checkpoint.save_peft import peft_config_of
from onegraph.peft.configs import PeftConfig
from onegraph.peft.mistakes import UsageError, as_value_errors
from onegraph.peft.rows import refuse_base_name

_HOW = {
    "cat": "cat",
    "linear": "sum",
    "svd": "svd",
    "ties": "ties",
    "ties_svd": "ties",
    "dare_linear": "dare",
    "dare_linear_svd": "dare",
    "dare_ties": "dare_ties",
    "dare_ties_svd": "dare_ties",
    "magnitude_prune": "magnitude",
    "magnitude_prune_svd": "magnitude",
}
_WITHOUT_EFFECT = {"svd_full_matrices", "svd_driver"}


def combine_as_peft(
    adapters: Adapters,
    configs: Mapping[str, PeftConfig],
    names: list[str],
    weights: list[float],
    name: str,
    combination_type: str,
    *,
    rank: int | None = None,
    density: float | None = None,
    majority_sign: str = "total",
    further: Mapping[str, Any] | None = None,
) -> PeftConfig:
    """Add an adapter that is made from others.

    Where PEFT combines the factors of the adapters, which gives the products of one's ``lora_B`` with another's ``lora_A`` too, here the
    changes of the weights are combined:

    - "linear" is the weighted sum itself, concatenated: its rank is the sum of the ranks, as for "cat".
    - "ties", "dare_linear", "dare_ties" and "magnitude_prune" are what they are with "_svd" at the end: pruned in the change of the
      weights, not in the factors, and decomposed to ``rank``; without it, to the largest rank of the adapters.
    - The adapters may have different ranks, methods and layers, and layers that are trained whole in several of them are combined too.

    ``svd_driver`` and ``svd_full_matrices`` have no effect on what comes out. DoRA adapters can only be decomposed.

    Args:
        adapters: The adapters of the model.
        configs: Adapter -> configuration.
        names: Which adapters.
        weights: How much of each.
        name: Of the new adapter.
        combination_type: PEFT's name for it.
        rank: ``svd_rank``.
        density: Part of each that is kept where parts are dropped.
        majority_sign: "total" or "frequency".
        further: Other arguments.

    Returns:
        The configuration of what was made.

    Raises:
        UsageError: ``peft-combination``.
        ConfigurationError, AdapterError: See ``onegraph.adapters.combine.combine``.
    """
    refuse_base_name(name)
    refused = [key for key, value in (further or {}).items() if key not in _WITHOUT_EFFECT and value is not None]
    listed = isinstance(names, list | tuple) and isinstance(weights, list | tuple) and len(names) == len(weights) > 0
    if refused or combination_type not in _HOW or not listed:
        raise UsageError(
            f"add_weighted_adapter({names}, {weights}, combination_type={combination_type!r}"
            + "".join(f", {key}={(further or {})[key]!r}" for key in refused)
            + ") can't be done",
            why="Every adapter needs a weight; values can't be clamped.",
            hint=f"combination_type is one of {', '.join(_HOW)}",
            code="peft-combination",
        )
    with as_value_errors():
        ranks = [rank_on for each in names for method, layer in _layers(adapters, each) if (rank_on := method.rank_on(layer)) is not None]
        how = "sum" if len(names) == 1 and combination_type != "cat" else _HOW[combination_type]
        options: dict[str, Any] = {}
        if how not in ("cat", "sum"):
            options["rank"] = rank or max(ranks)
        if how in ("ties", "dare", "dare_ties", "magnitude"):
            options["density"] = density
        if how.endswith("ties"):
            options["majority_sign"] = majority_sign
        adapters.combine(name, dict(zip(names, weights, strict=True)), how, **options)
    first = configs[names[0]]
    _, fields, _ = peft_config_of(adapters, contents(adapters, name), {"task_type": first.json_fields()["task_type"]})
    config = type(first)(**{key: value for key, value in fields.items() if key in first.to_dict()})
    config.base_model_name_or_path, config.revision, config.inference_mode = first.base_model_name_or_path, first.revision, True
    return config


def _layers(adapters: Adapters, name: str) -> list[tuple[Any, Any]]:
    return [(method, adapters.layers[path].layer) for path, method in adapters.methods(name).items()]
