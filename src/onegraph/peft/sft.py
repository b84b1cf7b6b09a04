"""TRL's SFTTrainer with a configuration of ours: ``peft_config=`` makes a model of ours instead of PEFT's."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from onegraph.errors import ConfigurationError
from onegraph.peft.configs import PeftConfig
from onegraph.peft.functions import get_peft_model

MODULE = "trl.trainer.sft_trainer"
_MARK = "_onegraph_looks"


def prepare(module: ModuleType) -> None:
    """Let the constructor of ``SFTTrainer`` take our configurations; with any other it does what it did."""
    from_here = module.SFTTrainer.__init__
    if hasattr(from_here, _MARK):
        return

    @functools.wraps(from_here)
    def construct(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(kwargs.get("peft_config"), PeftConfig):
            model = _adapted(module, model, kwargs.get("args", args[0] if args else None), kwargs)
        from_here(self, model, *args, **kwargs)

    setattr(construct, _MARK, True)
    module.SFTTrainer.__init__ = construct


def _adapted(module: ModuleType, model: Any, arguments: Any, given: dict[str, Any]) -> Any:
    """The model with its adapter; takes out of the arguments what it used."""
    template = getattr(arguments, "chat_template_path", None)
    if template is not None and not (Path(template).is_file() and Path(template).suffix in {".jinja", ".j2"}):
        raise ConfigurationError(
            f"SFTConfig(chat_template_path={str(template)!r}) may add tokens, and their rows of the embedding would not train.",
            why="Training single rows of an embedding isn't here.",
            hint="a file that ends in .jinja; or trl.clone_chat_template first, and modules_to_save=['embed_tokens', 'lm_head']",
            code="sft-new-tokens",
        )
    if isinstance(model, str):
        options = dict(getattr(arguments, "model_init_kwargs", None) or {})
        quantised = given.pop("quantization_config", None)
        if quantised is not None:
            options["quantization_config"] = quantised
        options.setdefault("trust_remote_code", getattr(arguments, "trust_remote_code", False))
        model = module.create_model_from_path(model, **options)
        if arguments is not None:
            arguments.model_init_kwargs = None  # used
    return get_peft_model(model, given.pop("peft_config"))
