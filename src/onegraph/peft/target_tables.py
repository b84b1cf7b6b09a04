"""The layers that each architecture is customarily adapted on: what ``target_modules=None`` means.

For the architectures that PEFT 0.21.2 knows these are its choices, so that a program trains the same layers; the others are the query
and value projections, by the names that transformers gives them.
"""

from __future__ import annotations

from onegraph.checkpoint.dialects.peft_methods import FORMS

Names = list[str] | str

_QUERY_VALUE = {
    ("q_proj", "v_proj"): (
        "bart blenderbot clip cohere cohere2 gemma gemma2 gemma3_text glm glm4 gpt_neo gptj granite llama llama4 m2m_100 marian mbart"
        " mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt pegasus phimoe qwen2 qwen2_moe qwen3 qwen3_moe siglip smollm3 stablelm"
        " starcoder2 whisper xglm"
    ),
    ("query", "value"): "albert beit bert camembert deit dinov2 electra ernie layoutlm roberta vit xlm-roberta",
    ("q", "v"): "longt5 mpnet mt5 t5 umt5",
    ("q_lin", "v_lin"): "distilbert",
    ("query_key_value",): "RefinedWeb RefinedWebModel bloom chatglm falcon gpt_neox",
    ("c_attn",): "gpt2 gpt_bigcode",
    ("qkv_proj",): "codegen phi3",
    ("query_proj", "value_proj"): "deberta-v2",
    ("in_proj",): "deberta",
    ("Wqkv",): "modernbert mpt",
    ("c_proj", "c_attn"): "btlm",
    ("q", "v", "q_proj", "v_proj"): "blip-2",
    ("q_proj", "v_proj", "fc1", "fc2"): "phi",
    ("q_proj", "k_proj", "v_proj", "o_proj"): "nemotron_h",
    ("key", "value", "receptance", "output"): "rwkv",
    ("r_proj", "k_proj", "v_proj", "o_proj", "key", "value"): "rwkv7",
}
_GEMMA_4 = r".*language_model\..*\.(q_proj|v_proj)"

_ALL_OF_AN_ENCODER = {"opt": "q_proj k_proj v_proj out_proj fc1 fc2", "bart": "q_proj k_proj v_proj out_proj fc1 fc2"}
_WHOLE_BLOCKS = {
    **_ALL_OF_AN_ENCODER,
    "t5": "q k v o wi wo",
    "mt5": "q k v o wi_0 wi_1 wo",
    "deberta-v2": "query_proj key_proj value_proj dense",
}

# The architectures that PEFT has for the method that spends its ranks where they matter; it takes more layers of some.
_ADALORA = "bloom gptj gpt2 gpt_neox gpt_neo llama llama4 bert gpt_bigcode deberta gemma gemma2 gemma3_text gemma4 qwen2 qwen3 nemotron_h"

# (output gains, input gains of the feed-forward part) by architecture.
_IA3 = {
    ("k v", "wo"): "t5",
    ("k v wi_1", ""): "mt5",
    ("c_attn", "mlp.c_proj"): "gpt2 gpt_bigcode",
    ("query_key_value", "mlp.dense_4h_to_h"): "bloom",
    ("key value", "output.dense"): "bert roberta",
    ("q_proj k_proj", "fc2"): "opt",
    ("q_proj v_proj", "fc_out"): "gptj",
    ("query_key_value", "dense_4h_to_h"): "RefinedWeb RefinedWebModel falcon gpt_neox",
    ("q_proj v_proj", "c_proj"): "gpt_neo",
    ("q_proj v_proj", "fc2"): "bart phi",
    ("k_proj v_proj", "down_proj"): "llama mistral",
    ("q_proj v_proj", "down_proj"): "gemma gemma2 gemma3_text llama4 qwen2 qwen3",
    ("k_proj v_proj", "w2"): "mixtral",
    ("key_proj value_proj", "output.dense"): "deberta-v2",
    ("in_proj", "output.dense"): "deberta",
}

_NORMS = {
    "input_layernorm post_attention_layernorm norm": "gemma llama mistral",
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm norm": "gemma2 gemma3_text",
    "input_layernorm post_attention_layernorm ln_f": "bloom falcon",
    "input_layernorm final_layernorm": "phi",
    "post_attention_layernorm": "qwen2 qwen3",
    "layer_norm final_layer_norm": "mt5 t5",
    "self_attn_layer_norm encoder_attn_layer_norm final_layer_norm": "bart",
    "ln_1 ln_2 ln_f": "gpt2",
    "ln_1 ln_f": "gptj",
    "layernorm LayerNorm final_layer_norm self_attn_layer_norm": "blip-2",
    "multi_modal_projector input_layernorm post_attention_layernorm norm embed_tokens lm_head": "llava",
}


def _spread(table: dict[tuple[str, ...], str]) -> dict[str, Names]:
    return {model: list(names) for names, models in table.items() for model in models.split()}


def _table_for(peft_type: str) -> dict[str, Names]:
    attention: dict[str, Names] = {**_spread(_QUERY_VALUE), "gemma4": _GEMMA_4}
    whole: dict[str, Names] = {model: names.split() for model, names in _WHOLE_BLOCKS.items()}
    if peft_type == "IA3":
        return {model: f"{out} {inner}".split() for (out, inner), models in _IA3.items() for model in models.split()}
    if peft_type == "LN_TUNING":
        return {model: names.split() for names, models in _NORMS.items() for model in models.split()}
    if peft_type in ("ADALORA", "VBLORA"):
        table = {model: attention[model] for model in _ADALORA.split()} | whole
        return table | {"roberta": ["query", "key", "value", "dense"] if peft_type == "ADALORA" else ["query", "value"]}
    return attention | ({"phi": ["q_proj", "v_proj"]} if peft_type == "VERA" else {})


TARGETS: dict[str, dict[str, Names]] = {peft_type: _table_for(peft_type) for peft_type in FORMS}
"""``peft_type`` -> ``model_type`` of a transformers configuration -> target modules."""

FEEDFORWARD: dict[str, list[str]] = {model: inner.split() for (_, inner), models in _IA3.items() for model in models.split()}
"""``model_type`` -> the feed-forward modules of IA3."""
