"""Names of methods and tasks, as PEFT's configurations spell them."""

from __future__ import annotations

import enum

from onegraph.checkpoint.dialects.peft_methods import FORMS


class PeftType(enum.StrEnum):
    """The methods that there are here."""

    LORA = "LORA"
    ADALORA = "ADALORA"
    IA3 = "IA3"
    LN_TUNING = "LN_TUNING"
    LOHA = "LOHA"
    LOKR = "LOKR"
    VERA = "VERA"
    VBLORA = "VBLORA"
    OFT = "OFT"
    BOFT = "BOFT"
    HRA = "HRA"
    MISS = "MISS"


class TaskType(enum.StrEnum):
    """The tasks that have a model class of their own."""

    SEQ_CLS = "SEQ_CLS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    CAUSAL_LM = "CAUSAL_LM"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"


assert set(PeftType.__members__) == set(FORMS), "every form has a name here"
