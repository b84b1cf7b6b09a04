"""``AutoPeftModel`` and its kin: base model and adapter by the adapter's folder alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar

from onegraph.errors import OnegraphError
from onegraph.peft import repositories
from onegraph.peft.configs import PeftConfig
from onegraph.peft.mistakes import UsageError
from onegraph.peft.model import PeftModel
from onegraph.peft.tasks import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

_LIBRARIES = ("diffusers", "transformers")


def check_if_peft_model(model_name_or_path: str) -> bool:
    """Whether an adapter's configuration is there: in a folder, or in a repository of the Hub."""
    try:
        PeftConfig.from_pretrained(model_name_or_path)
    except (OnegraphError, ValueError):
        return False
    return True


class AutoPeftModel:
    """The base model that an adapter's configuration names, with the adapter; of the class that it names too."""

    base_class: ClassVar[str | None] = None
    task: ClassVar[str | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            f"{type(self).__name__} isn't made by itself", hint=f"{type(self).__name__}.from_pretrained(folder)", code="peft-auto"
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        adapter_name: str = "default",
        is_trainable: bool = False,
        config: PeftConfig | None = None,
        revision: str | None = None,
        import_allowlist: list[str] | None = None,
        **kwargs: Any,
    ) -> PeftModel:
        """Load both.

        Args:
            pretrained_model_name_or_path: Folder or repository of the adapter.
            adapter_name: What it is called.
            is_trainable: Whether it is to train.
            config: Its configuration, where it was read before.
            revision: Of the adapter's repository.
            import_allowlist: Libraries that the base model's class may come from.
            **kwargs: Of the base model's ``from_pretrained``, and of the download.

        Raises:
            UsageError: ``peft-auto`` where task, class and configuration don't go together.
        """
        options = repositories.download_options({**kwargs, "revision": revision})
        found = PeftConfig.from_pretrained(pretrained_model_name_or_path, **options) if config is None else config
        task = found.json_fields()["task_type"]
        if task != cls.task:
            hint = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(task))
            raise UsageError(
                f"{cls.__name__} is for task_type {cls.task!r}; the adapter in {pretrained_model_name_or_path} has {task!r}",
                hint=f"use Auto{hint.__name__}" if hint else "use AutoPeftModel",
                code="peft-auto",
            )
        if not found.base_model_name_or_path:
            raise UsageError(
                f"the adapter in {pretrained_model_name_or_path} doesn't say which base model it is for",
                hint="load the base model yourself, then PeftModel.from_pretrained(model, folder)",
                code="peft-auto",
            )
        base = _base_class(cls, found, import_allowlist).from_pretrained(found.base_model_name_or_path, revision=found.revision, **kwargs)
        _resize(base, pretrained_model_name_or_path)
        return PeftModel.from_pretrained(
            base, pretrained_model_name_or_path, adapter_name, is_trainable=is_trainable, config=found, **options
        )


def _base_class(kind: type[AutoPeftModel], config: PeftConfig, allowed: list[str] | None) -> Any:
    if kind.base_class is not None:
        import transformers  # only where a model of its own is made

        return getattr(transformers, kind.base_class)
    mapping = config.auto_mapping or {}
    library = mapping.get("parent_library", "")
    # A configuration is data: what it names is imported only from libraries that are known.
    if library.split(".")[0] not in (allowed or _LIBRARIES):
        raise UsageError(
            f"the adapter's base model is a class of {library!r}, which isn't imported because a configuration says so",
            hint=f"import_allowlist=[{library.split('.')[0]!r}] where you trust it",
            code="peft-auto",
        )
    return getattr(importlib.import_module(library), mapping["base_model_class"])


def _resize(model: Any, folder: str) -> None:
    """Make room for the tokens that a tokenizer beside the adapter has more."""
    if not (Path(folder) / "tokenizer_config.json").is_file() or not hasattr(model, "get_input_embeddings"):
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))


class AutoPeftModelForCausalLM(AutoPeftModel):
    """A language model with its adapter."""

    base_class, task = "AutoModelForCausalLM", "CAUSAL_LM"


class AutoPeftModelForSeq2SeqLM(AutoPeftModel):
    """A model that turns a text into another, with its adapter."""

    base_class, task = "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"


class AutoPeftModelForSequenceClassification(AutoPeftModel):
    """A model that sorts texts, with its adapter."""

    base_class, task = "AutoModelForSequenceClassification", "SEQ_CLS"


class AutoPeftModelForTokenClassification(AutoPeftModel):
    """A model that sorts tokens, with its adapter."""

    base_class, task = "AutoModelForTokenClassification", "TOKEN_CLS"


class AutoPeftModelForQuestionAnswering(AutoPeftModel):
    """A model that finds answers in a text, with its adapter."""

    base_class, task = "AutoModelForQuestionAnswering", "QUESTION_ANS"


class AutoPeftModelForFeatureExtraction(AutoPeftModel):
    """A model whose hidden states are wanted, with its adapter."""

    base_class, task = "AutoModel", "FEATURE_EXTRACTION"
