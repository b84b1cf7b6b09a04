"""What was given: a PeftModel, a model with PEFT's layers in it, one of ours, or neither. PEFT itself is never imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from onegraph.adapters import Adapters, adapters_of
from onegraph.adapters.walk import unwrapped
from onegraph.adoption.emptied import Emptied, refusal
from onegraph.adoption.refusals import unsupported
from onegraph.errors import AdapterError, ConfigurationError

# What PEFT, transformers and diffusers note on a model that they inject adapters into.
NOTES = ("peft_config", "_hf_peft_config_loaded")


def is_peft(thing: object, name: str) -> bool:
    """Whether an object is of a class of PEFT's, or of one made from it."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == "peft" for kind in type(thing).__mro__)


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether it is a layer with adapters beside it."""
    return is_peft(module, "BaseTunerLayer")


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is a module that is trained whole, or in part, beside the one that was there."""
    return is_peft(module, "AuxiliaryTrainingWrapper")


@dataclass(frozen=True)
class Held:
    """A model that PEFT's layers are in.

    Args:
        model: The model itself.
        configs: Adapter -> PEFT's configuration of it.
        holder: The module of PEFT's that has the model as its ``model``; None where adapters were injected.
    """

    model: nn.Module
    configs: dict[str, Any]
    holder: nn.Module | None


def recognised(x: object) -> Held | Adapters:
    """What is to be taken over, or the adapters where they are ours already.

    Raises:
        ConfigurationError: ``not-a-model``.
        AdapterError: ``adopt-nothing`` for a model that isn't adapted, ``adopt-both``, ``adopt-unsupported``, ``adopted``.
    """
    if not isinstance(x, nn.Module):
        raise ConfigurationError(
            f"{type(x).__name__} is not a model", hint="a torch.nn.Module or a diffusers pipeline with adapters", code="not-a-model"
        )
    if any(isinstance(module, Emptied) for module in x.modules()):
        raise refusal("given to adopt()")
    ours = [found for module in x.modules() if (found := adapters_of(module)) is not None]
    theirs = [name for name, module in x.named_modules() if is_tuner_layer(module) or is_wrapper(module)]
    if ours and theirs:
        raise AdapterError(
            f"{type(x).__name__} has adapters of onegraph and of PEFT, for one at {theirs[0]}",
            why="A layer inside a layer would be adapted twice. Nothing has changed.",
            hint="take one of them out first: adapters.detach(), or PEFT's unload()",
            code="adopt-both",
        )
    if ours:
        return ours[0]
    held = _held(x)
    if not held.configs and theirs:
        raise _elsewhere(x, theirs)
    if not theirs:
        _refuse_prompts(held)
        raise AdapterError(
            f"{type(x).__name__} isn't adapted: it has no layer of PEFT's",
            hint="onegraph.attach(model, onegraph.LoRA(rank=16), targets=[...]) adapts it; onegraph.load(model, path) loads a file",
            code="adopt-nothing",
        )
    return held


def _held(x: nn.Module) -> Held:
    model: Any = unwrapped(x)
    holder: Any = None
    configs: Any = vars(model).get("peft_config")
    if is_peft(model, "PeftModel") or is_peft(model, "PeftMixedModel"):
        configs = model.peft_config
        if is_peft(model.base_model, "BaseTuner"):
            model = model.base_model
    if is_peft(model, "BaseTuner"):
        configs, holder = model.peft_config, model
        model = holder._modules.get("model", model)
    found = {str(name): config for name, config in configs.items()} if isinstance(configs, Mapping) else {}
    return Held(unwrapped(model), found, holder)


def _refuse_prompts(held: Held) -> None:
    """Raise for methods that change what goes into a model, and no layer of it."""
    for name, config in held.configs.items():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
            raise unsupported(
                f"adapter {name!r} of {type(held.model).__name__} is of PEFT's type {kind_of(config)}",
                why="It adds to the model's input; adapters here change layers.",
                hint="keep it in PEFT",
            )


def kind_of(config: Any) -> str:
    """PEFT's name for a method."""
    found = getattr(config, "peft_type", None)
    return str(getattr(found, "value", found))


def _elsewhere(x: nn.Module, theirs: list[str]) -> AdapterError:
    """The error where PEFT's layers are there, and the configurations are on a part of the model, or nowhere."""
    parts = [name for name, module in x.named_modules() if name and isinstance(vars(module).get("peft_config"), Mapping)]
    return unsupported(
        f"{type(x).__name__} has layers of PEFT's, for one at {theirs[0]}, and no configuration of them",
        why="Only the configuration says what a layer of PEFT's computes.",
        hint=f"adopt the part that was adapted: adopt(model.{parts[0]})" if parts else "give what PEFT returned, such as the PeftModel",
    )
