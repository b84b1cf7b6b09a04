"""``get_peft_model``: the way in."""

from __future__ import annotations

import warnings

from torch import nn

from onegraph.adapters import adapters_of
from onegraph.adapters.walk import check_model
from onegraph.peft.configs import PeftConfig, require_config
from onegraph.peft.mistakes import as_value_errors
from onegraph.peft.model import PeftModel
from onegraph.peft.targets import choose
from onegraph.peft.tasks import MODEL_TYPE_TO_PEFT_MODEL_MAPPING


def get_peft_model(
    model: nn.Module,
    peft_config: PeftConfig,
    adapter_name: str = "default",
    mixed: bool = False,
    autocast_adapter_dtype: bool = True,
    revision: str | None = None,
    low_cpu_mem_usage: bool = False,
) -> PeftModel:
    """A model with an adapter, of the class that the configuration's task has; ``model`` is changed in place.

    Args:
        model: Any model; compiled or not.
        peft_config: What it gets. Its ``base_model_name_or_path``, and ``target_modules`` where it names none, are filled in.
        adapter_name: What the adapter is called.
        mixed: Without effect: adapters of several methods are always possible.
        autocast_adapter_dtype: Whether the adapter of a model in half precision is in float32.
        revision: Of the base model.
        low_cpu_mem_usage: Without effect.

    Raises:
        ConfigurationError, TargetError, AdapterError: As ``onegraph.attach``; all are ValueErrors too. The model is as before.
    """
    require_config(peft_config)
    with as_value_errors():
        check_model(model)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    before, name = peft_config.base_model_name_or_path, inner.__dict__.get("name_or_path") or None
    present = adapters_of(inner)
    if present is not None:
        warnings.warn("This model has adapters already; unload() takes them off again.", stacklevel=2)
    if before is not None and before != name:
        warnings.warn(f"base_model_name_or_path was {before!r} and is {name!r} now: is it the right base model?", stacklevel=2)
    peft_config.base_model_name_or_path = name
    if revision is not None:
        if peft_config.revision not in (None, revision):
            warnings.warn(f"revision was {peft_config.revision!r} and is {revision!r} now.", stacklevel=2)
        peft_config.revision = revision
    if present is not None and adapter_name in present.names:
        with as_value_errors():
            choose(peft_config.copy(), inner)  # all that is wrong is found before the old one is gone
            present.delete(adapter_name)
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(peft_config.json_fields()["task_type"]), PeftModel)
    return kind(inner, peft_config, adapter_name, autocast_adapter_dtype=autocast_adapter_dtype)
