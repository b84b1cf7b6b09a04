"""The model classes of tasks: the arguments that each takes, and the heads that are trained whole."""

from __future__ import annotations

from typing import Any

from onegraph.peft.configs import PeftConfig
from onegraph.peft.kinds import TaskType
from onegraph.peft.model import PeftModel
from onegraph.peft.targets import CLASSIFIERS


def _given(**arguments: Any) -> dict[str, Any]:
    """Without those that are None: a model needn't know them."""
    return {name: value for name, value in arguments.items() if value is not None}


class PeftModelForCausalLM(PeftModel):
    """A language model."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        task_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What the model computes; see ``PeftModel.forward``."""
        own = _given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            labels=labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            task_ids=task_ids,
        )
        return super().forward(**own, **kwargs)


class PeftModelForSeq2SeqLM(PeftModel):
    """A model that turns a text into another."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        decoder_inputs_embeds: Any = None,
        labels: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        task_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What the model computes; see ``PeftModel.forward``."""
        own = _given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds,
            labels=labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            task_ids=task_ids,
        )
        return super().forward(**own, **kwargs)


def _train_whole(config: PeftConfig, heads: tuple[str, ...]) -> None:
    """Add a head, which is new, to what is trained whole."""
    if isinstance(config.modules_to_save, str):  # no list: refused with all else that is wrong, and not taken apart here
        return
    present = list(config.modules_to_save or ())
    config.modules_to_save = [*present, *(name for name in heads if name not in present)]


class PeftModelForSequenceClassification(PeftModelForCausalLM):
    """A model that sorts texts; "classifier" or "score" is trained whole."""

    def settle_config(self, config: PeftConfig) -> None:
        """Add the head to ``modules_to_save``."""
        _train_whole(config, CLASSIFIERS)


class PeftModelForTokenClassification(PeftModelForSequenceClassification):
    """A model that sorts tokens; "classifier" or "score" is trained whole."""


class PeftModelForQuestionAnswering(PeftModel):
    """A model that finds answers in a text; "qa_outputs" is trained whole."""

    def settle_config(self, config: PeftConfig) -> None:
        """Add the head to ``modules_to_save``."""
        _train_whole(config, ("qa_outputs",))

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        start_positions: Any = None,
        end_positions: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        task_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What the model computes; see ``PeftModel.forward``."""
        own = _given(token_type_ids=token_type_ids, position_ids=position_ids, start_positions=start_positions, end_positions=end_positions)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            task_ids=task_ids,
            **own,
            **kwargs,
        )


class PeftModelForFeatureExtraction(PeftModel):
    """A model whose hidden states are wanted."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        task_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What the model computes; see ``PeftModel.forward``."""
        own = _given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            task_ids=task_ids,
        )
        return super().forward(**own, **kwargs)


MODEL_TYPE_TO_PEFT_MODEL_MAPPING: dict[str, type[PeftModel]] = {
    TaskType.SEQ_CLS.value: PeftModelForSequenceClassification,
    TaskType.SEQ_2_SEQ_LM.value: PeftModelForSeq2SeqLM,
    TaskType.CAUSAL_LM.value: PeftModelForCausalLM,
    TaskType.TOKEN_CLS.value: PeftModelForTokenClassification,
    TaskType.QUESTION_ANS.value: PeftModelForQuestionAnswering,
    TaskType.FEATURE_EXTRACTION.value: PeftModelForFeatureExtraction,
}
"""Task -> the class for it."""
