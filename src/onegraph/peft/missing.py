"""Names of PEFT that aren't here, and what to use instead."""

from __future__ import annotations

_PROMPTS = "LoraConfig: prompts and prefixes, which are no weights of layers, aren't here"
_METHODS = "LoraConfig, or another of the methods in docs/peft.md: that one isn't here"
_STARTS = "LoraConfig(init_lora_weights=True), or 'gaussian': a start that needs data or changes the base weights isn't here"

_INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        "AdaptionPromptConfig AdaptionPromptModel CPTConfig CPTEmbedding CartridgeConfig CartridgeEncoder MultitaskPromptTuningConfig"
        " MultitaskPromptTuningInit PrefixEncoder PrefixTuningConfig PromptEmbedding PromptEncoder PromptEncoderConfig"
        " PromptEncoderReparameterizationType PromptLearningConfig PromptTuningConfig PromptTuningInit"
        " TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING bloom_model_postprocess_past_key_value compose_cartridge_adapters"
        " initialize_kv_prefix_from_past_key_values initialize_kv_prefix_from_text prompt_embeddings_from_past_key_values".split(),
        _PROMPTS,
    ),
    **dict.fromkeys(
        "AdamssConfig AdamssModel BeftConfig BeftModel C3AConfig C3AModel DeftConfig DeftModel DeloraConfig DeloraModel FourierFTConfig"
        " FourierFTModel FrodConfig FrodModel GloraConfig GloraModel GraloraConfig GraloraModel HiraConfig HiraModel LilyConfig LilyModel"
        " OSFConfig OSFModel PeanutConfig PeanutModel PolyConfig PolyModel PsoftConfig PsoftModel PveraConfig PveraModel RandLoraConfig"
        " RandLoraModel RoadConfig RoadModel ShadowConfig ShadowModel ShiraConfig ShiraModel SupertuningConfig SupertuningModel"
        " TinyLoraConfig TinyLoraModel UniLoraConfig UniLoraModel WaveFTConfig WaveFTModel".split(),
        _METHODS,
    ),
    **dict.fromkeys(
        "EvaConfig LoraGAConfig KasaConfig VeloraConfig get_eva_state_dict initialize_lora_eva_weights preprocess_loraga"
        " find_kappa_target_modules".split(),
        _STARTS,
    ),
    **dict.fromkeys(
        "BaseTunerLayer LoraLayer LoraLinear AdaLoraLayer IA3Layer LoHaLayer LoKrLayer OFTLayer BOFTLayer HRALayer MissLayer VeraLayer"
        " VBLoRALayer LNTuningLayer LycorisLayer ModulesToSaveWrapper AuxiliaryTrainingWrapper".split(),
        "onegraph.adapters.Adapted for every adapted layer, and model.adapters for what is on it",
    ),
    "create_loraplus_optimizer": "an optimizer with two groups of model.named_parameters(): the names with lora_B get the higher rate",
    "create_lorafa_optimizer": "an optimizer over those of model.named_parameters() that have lora_B in their names",
    "hotswap_adapter_from_state_dict": "set_peft_model_state_dict(model, state_dict, adapter_name)",
    "set_adapter": "PeftModel.set_adapter, or onegraph.adapters_of(model).use(name) where adapters were injected",
    "delete_adapter": "PeftModel.delete_adapter, or onegraph.adapters_of(model).delete(name) where adapters were injected",
    "set_requires_grad": "PeftModel.set_requires_grad",
    "cast_adapter_dtype": "get_peft_model(..., autocast_adapter_dtype=...)",
    **dict.fromkeys(
        "update_forward_signature update_generate_signature update_signature".split(),
        "model.get_base_model(), whose signatures are the base model's",
    ),
    "disable_input_dtype_casting": "nothing: an input is cast for its adapter alone",
    "DoraCaching": "nothing: the norm of DoRA is never computed from the whole weight",
    "mark_only_lora_as_trainable": "set_adapter(name): only the active adapter trains",
    "fsdp_auto_wrap_policy": "onegraph.shard(model)",
    **dict.fromkeys(
        "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING".split(),
        "LoraConfig without target_modules, which takes the customary ones",
    ),
    "LoftQConfig": "LoraConfig on the quantised base model: a start that takes up the error of quantisation isn't here",
    "replace_lora_weights_loftq": "LoraConfig on the quantised base model",
    "ArrowConfig": "adapter_names=, which gives every row the adapter you choose",
    "create_arrow_model": "adapter_names=, which gives every row the adapter you choose",
    "XLoraConfig": "add_weighted_adapter, or adapter_names= for every row's own",
    "XLoraModel": "add_weighted_adapter, or adapter_names= for every row's own",
    "BdLoraConfig": "LoraConfig",
    "MontecloraConfig": "LoraConfig",
    "LoraRuntimeConfig": "nothing: tensors are never moved while a model runs",
    "TrainableTokensConfig": 'LoraConfig(modules_to_save=["embed_tokens"])',
    "TrainableTokensModel": 'LoraConfig(modules_to_save=["embed_tokens"])',
    "PeftMixedModel": "PeftModel: its adapters may be of different methods",
    "PEFT_TYPE_TO_MIXED_MODEL_MAPPING": "PEFT_TYPE_TO_TUNER_MAPPING",
    "convert_to_lora": 'model.adapters.combine("name", {"adapter": 1.0}, "svd", rank=8): the LoRA nearest to any adapter, with its error',
    "save_as_lora": 'model.adapters.combine("name", {"adapter": 1.0}, "svd", rank=8), then save_pretrained',
    "get_base_model_state_dict": "model.unload().state_dict(), or model.get_base_model()",
    "set_base_model_state_dict": "model.get_base_model().load_state_dict(state, strict=False): keys of the plain model are understood",
    "shift_tokens_right": "the model's own prepare_decoder_input_ids_from_labels",
}


def instead_of(name: str) -> str | None:
    """What to use instead of a name of PEFT; None for a name that PEFT doesn't have."""
    return _INSTEAD.get(name)
