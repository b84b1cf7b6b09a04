"""HRA: a chain of reflections."""

from __future__ import annotations

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag
from onegraph.checkpoint.dialects.peft_methods.form import Layered, PeftForm, Read, Written
from onegraph.methods import HRA, Method

_NAMES = {"hra_u": "vectors"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = layer.named(_NAMES, needed=_NAMES.values())
    rank, vectors = layer.config.count("r"), tensors["vectors"]
    layer.rank_is(rank, vectors.shape[1] if vectors.dim() == 2 else -1, "hra_u", vectors.shape)
    return _method(layer.config), tensors


def _method(config: Config) -> HRA:
    return HRA(rank=config.count("r"), gram_schmidt=config.flag("apply_GS"))


def _write(written: Layered) -> dict[str, Tensor]:
    return written.named({ours: theirs for theirs, ours in _NAMES.items()})


def _config(adapter: Written) -> dict[str, object]:
    methods = list(adapter.only(HRA).values())
    adapter.same(r=(method.rank for method in methods), apply_GS=(method.gram_schmidt for method in methods))
    return {"r": methods[0].rank, "apply_GS": methods[0].gram_schmidt}


FORM = PeftForm(
    peft_type="HRA",
    methods=(HRA,),
    fields=fields(
        {"apply_GS": Field(False, flag), "init_weights": Field(True, flag, kept=True), "r": Field(8, count)},
    ),
    bias="hra_only",
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear", "Conv2d"}),
    read=_read,
    create=lambda config, path, layer: _method(config),
    write=_write,
    config=_config,
)
