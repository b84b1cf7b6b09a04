"""MISS: a small block repeated over the weight, in three forms."""

from __future__ import annotations

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, one_of, probability
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, Layered, PeftForm, Read, Written
from onegraph.methods import Method, MiSS

_NAMES = {"miss_block": "block"}
_FORMS = {"bat": "bat", "mini": "mini", True: "balance", False: "balance"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = layer.named(_NAMES, needed=_NAMES.values())
    method, block = _method(layer.config), tensors["block"]
    if block.dim() != (3 if method.form == "bat" else 2):
        init = layer.config.values["init_weights"]
        raise ContradictionError(f"{layer.path}: init_weights is {init!r}, miss_block has shape {tuple(block.shape)}")
    layer.rank_is(method.rank, block.shape[1 if method.form == "bat" else 0], "miss_block", block.shape)
    return method, tensors


def _method(config: Config) -> MiSS:
    init = config.values["init_weights"]
    assert isinstance(init, bool | str)
    form = _FORMS[init]
    return MiSS(
        rank=config.count("r"),
        form=form,
        out_rank=config.count("mini_r") if form == "mini" else 1,
        input_dropout=0.0 if form == "bat" else config.number("miss_dropout"),  # PEFT has no dropout in that form
    )


def _write(written: Layered) -> dict[str, Tensor]:
    return written.named({ours: theirs for theirs, ours in _NAMES.items()})


def _config(adapter: Written) -> dict[str, object]:
    methods = list(adapter.only(MiSS).values())
    adapter.same(
        r=(method.rank for method in methods),
        init_weights=(method.form for method in methods),
        mini_r=(method.out_rank for method in methods),
        miss_dropout=(method.input_dropout for method in methods),
    )
    first = methods[0]
    return {
        "r": first.rank,
        "init_weights": first.form if first.form in ("bat", "mini") else True,
        "mini_r": first.out_rank,
        "miss_dropout": first.input_dropout,
    }


FORM = PeftForm(
    peft_type="MISS",
    methods=(MiSS,),
    fields=fields(
        {
            "init_weights": Field(True, one_of(*_FORMS)),
            "mini_r": Field(1, count),
            "miss_dropout": Field(0.0, probability),
            "r": Field(64, count),
        },
    ),
    bias="MiSS_only",
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear"}),
    read=_read,
    create=lambda config, path, layer: _method(config),
    write=_write,
    config=_config,
)
