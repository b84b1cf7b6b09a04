"""LN_TUNING: norms trained whole. A file holds their values; here they are differences from the model's own."""

from __future__ import annotations

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import fields
from onegraph.checkpoint.dialects.peft_methods.form import Layered, PeftForm, Read, Written
from onegraph.methods import Method, NormTuning

_WHOLE = {"ln_tuning_layers.weight": "weight", "ln_tuning_layers.bias": "bias"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    raise AssertionError(layer.path)  # every ending is one of a whole tensor


def _write(written: Layered) -> dict[str, Tensor]:
    return {theirs: written.tensors[own] for theirs, own in _WHOLE.items() if own in written.tensors}


def _config(adapter: Written) -> dict[str, object]:
    return {}


FORM = PeftForm(
    peft_type="LN_TUNING",
    methods=(NormTuning,),
    fields=fields({}, layers=False),
    endings=frozenset(_WHOLE),
    takes=frozenset({"norm"}),
    whole=_WHOLE,
    read=_read,
    create=lambda config, path, layer: NormTuning(),
    write=_write,
    config=_config,
)
