"""TRL's trainers other than SFTTrainer: a configuration of ours as ``peft_config``, and the reference model without a second copy."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import nn

from onegraph.adapters import adapters_of
from onegraph.checkpoint.save_peft import peft_contents
from onegraph.errors import ConfigurationError
from onegraph.hf.registration import WITH_REFERENCE
from onegraph.peft import functions
from onegraph.peft.configs import PeftConfig, get_peft_config
from onegraph.peft.model import PeftModel
from onegraph.peft.tasks import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

_WITHOUT = ("trl.trainer.reward_trainer", "trl.trainer.distillation_trainer", "trl.experimental.utils")
_FURTHER = ("bco", "cpo", "iw_opd", "online_dpo", "orpo", "prm", "sdft", "sdpo", "ssd", "tpo")
MODULES = (*WITH_REFERENCE, *_WITHOUT, *(f"trl.experimental.{name}.{name}_trainer" for name in _FURTHER))
"""The modules that make a model of a ``peft_config``."""

_DEFAULT = "default"  # the one adapter that TRL looks for
_MARK = "_onegraph_looks"


def prepare(module: ModuleType) -> None:
    """Let the trainers of a module take our configurations and models; with any other they do what they did."""
    if not hasattr(module, _MARK):
        setattr(module, _MARK, True)
        _prepare_configurations(module)
        if module.__name__ in WITH_REFERENCE:
            _prepare_reference(getattr(module, WITH_REFERENCE[module.__name__]))


def _prepare_configurations(module: ModuleType) -> None:
    """What a module imported of PEFT: the class that it asks for, and the function that it calls."""
    theirs, make = getattr(module, "PeftConfig", None), getattr(module, "get_peft_model", None)
    if theirs is not None:
        vars(module)["PeftConfig"] = _Either("PeftConfig", (), {"kinds": (theirs, PeftConfig)})
    if make is not None:

        @functools.wraps(make)
        def get_peft_model(model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = functions.get_peft_model if isinstance(peft_config, PeftConfig) else make
            return chosen(model, peft_config, *args, **kwargs)

        vars(module)["get_peft_model"] = get_peft_model


class _Either(type):
    """A class whose objects are those of several others."""

    kinds: tuple[type, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.kinds)


def _prepare_reference(kind: Any) -> None:
    from_here = kind.__init__

    @functools.wraps(from_here)
    def construct(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        ours = isinstance(kwargs.get("peft_config"), PeftConfig) or (isinstance(model, nn.Module) and adapters_of(model) is not None)
        if ours:
            _require_peft(kind.__name__)
            if kwargs.get("peft_config") is None and not isinstance(model, PeftModel):
                model = as_peft_model(model)
        from_here(self, model, *args, **kwargs)

    kind.__init__ = construct


def _require_peft(name: str) -> None:
    """Without PEFT, TRL takes every model for a plain one: it would load a second one as the reference."""
    from transformers.utils.import_utils import is_peft_available

    if not is_peft_available():
        raise ConfigurationError(
            f"{name} needs the package peft beside a model with adapters.",
            why="Without it TRL knows no adapters, and its reference is a second model, loaded anew from where the first one came from.",
            hint="pip install peft",
            code="trl-needs-peft",
        )


def as_peft_model(model: Any) -> PeftModel:
    """The face of PEFT for a model that ``onegraph.attach`` adapted: the same adapters, no copy.

    Raises:
        ConfigurationError: ``trl-adapters`` for other adapters than one, named "default". CheckpointError: PEFT has no form for it.
    """
    adapters = adapters_of(model)
    assert adapters is not None
    if list(adapters.names) != [_DEFAULT] or adapters.active != _DEFAULT:
        raise ConfigurationError(
            f"TRL trains the adapter 'default' and no other; this model has {', '.join(map(repr, adapters.names)) or 'none'}.",
            why="Its reference is a copy of that adapter as it is before training.",
            hint="onegraph.attach(model, method) without a name",
            code="trl-adapters",
        )
    written, _ = peft_contents(adapters, _DEFAULT, {"task_type": "CAUSAL_LM"})
    config = get_peft_config({name: value for name, value in written.items() if name != "inference_mode"})
    return MODEL_TYPE_TO_PEFT_MODEL_MAPPING["CAUSAL_LM"](adapters.model, config, _DEFAULT, loaded=True)
