"""PEFT's API over onegraph: ``from onegraph.peft import LoraConfig, get_peft_model`` in place of ``from peft import ...``."""

from __future__ import annotations

from typing import Any

from onegraph.errors import nearest
from onegraph.hf.registration import after_import, register
from onegraph.peft import sft, trl
from onegraph.peft.auto import (
    AutoPeftModel,
    AutoPeftModelForCausalLM,
    AutoPeftModelForFeatureExtraction,
    AutoPeftModelForQuestionAnswering,
    AutoPeftModelForSeq2SeqLM,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    check_if_peft_model,
)
from onegraph.peft.configs import CONFIGS as PEFT_TYPE_TO_CONFIG_MAPPING
from onegraph.peft.configs import (
    AdaLoraConfig,
    BOFTConfig,
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_config,
)
from onegraph.peft.exchange import (
    get_peft_model_state_dict,
    hotswap_adapter,
    inject_adapter_in_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from onegraph.peft.functions import get_peft_model
from onegraph.peft.hotswap import prepare_model_for_compiled_hotswap
from onegraph.peft.kinds import PeftType, TaskType
from onegraph.peft.missing import instead_of
from onegraph.peft.mistakes import NoMatchingPeftModuleError, PeftError, PeftWarning
from onegraph.peft.model import PeftModel
from onegraph.peft.places import furnish
from onegraph.peft.preparing import cast_mixed_precision_params, prepare_model_for_kbit_training
from onegraph.peft.scaling import rescale_adapter_scale
from onegraph.peft.status import get_layer_status, get_model_status
from onegraph.peft.tasks import (
    MODEL_TYPE_TO_PEFT_MODEL_MAPPING,
    PeftModelForCausalLM,
    PeftModelForFeatureExtraction,
    PeftModelForQuestionAnswering,
    PeftModelForSeq2SeqLM,
    PeftModelForSequenceClassification,
    PeftModelForTokenClassification,
)
from onegraph.peft.tuners import TUNERS as PEFT_TYPE_TO_TUNER_MAPPING
from onegraph.peft.tuners import (
    AdaLoraModel,
    BOFTModel,
    HRAModel,
    IA3Model,
    LNTuningModel,
    LoHaModel,
    LoKrModel,
    LoraModel,
    MissModel,
    OFTModel,
    VBLoRAModel,
    VeraModel,
)

__all__ = [
    "MODEL_TYPE_TO_PEFT_MODEL_MAPPING",
    "PEFT_TYPE_TO_CONFIG_MAPPING",
    "PEFT_TYPE_TO_TUNER_MAPPING",
    "AdaLoraConfig",
    "AdaLoraModel",
    "AutoPeftModel",
    "AutoPeftModelForCausalLM",
    "AutoPeftModelForFeatureExtraction",
    "AutoPeftModelForQuestionAnswering",
    "AutoPeftModelForSeq2SeqLM",
    "AutoPeftModelForSequenceClassification",
    "AutoPeftModelForTokenClassification",
    "BOFTConfig",
    "BOFTModel",
    "HRAConfig",
    "HRAModel",
    "IA3Config",
    "IA3Model",
    "LNTuningConfig",
    "LNTuningModel",
    "LoHaConfig",
    "LoHaModel",
    "LoKrConfig",
    "LoKrModel",
    "LoraConfig",
    "LoraModel",
    "MissConfig",
    "MissModel",
    "NoMatchingPeftModuleError",
    "OFTConfig",
    "OFTModel",
    "PeftConfig",
    "PeftError",
    "PeftModel",
    "PeftModelForCausalLM",
    "PeftModelForFeatureExtraction",
    "PeftModelForQuestionAnswering",
    "PeftModelForSeq2SeqLM",
    "PeftModelForSequenceClassification",
    "PeftModelForTokenClassification",
    "PeftType",
    "PeftWarning",
    "TaskType",
    "VBLoRAConfig",
    "VBLoRAModel",
    "VeraConfig",
    "VeraModel",
    "cast_mixed_precision_params",
    "check_if_peft_model",
    "get_layer_status",
    "get_model_status",
    "get_peft_config",
    "get_peft_model",
    "get_peft_model_state_dict",
    "hotswap_adapter",
    "inject_adapter_in_model",
    "load_peft_weights",
    "prepare_model_for_compiled_hotswap",
    "prepare_model_for_kbit_training",
    "rescale_adapter_scale",
    "set_peft_model_state_dict",
]

register()
after_import(sft.MODULE, sft.prepare)
for _module in trl.MODULES:
    after_import(_module, trl.prepare)


def __getattr__(name: str) -> Any:
    """Say what to use in place of a name of PEFT that isn't here."""
    instead = instead_of(name)
    if instead is not None:
        raise ImportError(f"onegraph.peft has no {name}: use {instead}")
    close = nearest(name, __all__)
    raise AttributeError(f"module 'onegraph.peft' has no attribute {name!r}" + (f": did you mean {close[0]}?" if close else ""))


furnish()
