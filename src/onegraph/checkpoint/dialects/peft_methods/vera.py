"""VERA: two vectors a layer, and projections that all layers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag, integer, number, probability
from onegraph.checkpoint.dialects.peft_methods.form import IncompleteError, Layered, PeftForm, Read, Written
from onegraph.methods import Method, VeRA

_NAMES = {"vera_lambda_d": "gain_down", "vera_lambda_b": "gain_up"}
_SHARED = {"vera_A": "projection_down", "vera_B": "projection_up"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = layer.named(_NAMES, needed=_NAMES.values())
    config, rank = layer.config, layer.config.count("r")
    gain = tensors["gain_down"]
    layer.rank_is(rank, gain.shape[0] if gain.dim() else -1, "vera_lambda_d", gain.shape)
    there = sorted(layer.shared.keys() & _SHARED.keys())
    if len(there) == 1 or (config.flag("save_projection") and not there):
        raise IncompleteError(f"{layer.path}: save_projection is true, and of the projections there is: {', '.join(there) or 'none'}")
    down, up = layer.shared.get("vera_A"), layer.shared.get("vera_B")
    in_width, out_width = None if down is None else down.shape[-1], None if up is None else up.shape[0]
    return dataclasses.replace(_method(config), in_width=in_width, out_width=out_width), tensors


def _method(config: Config) -> VeRA:
    return VeRA(
        rank=config.count("r"),
        d_initial=config.number("d_initial"),
        projection_key=config.count("projection_prng_key"),
        input_dropout=config.number("vera_dropout"),
    )


def _read_shared(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Projections of several adapters are as large as the largest needs them."""
    rank = config.count("r")
    cut = {"vera_A": lambda tensor: tensor[:rank], "vera_B": lambda tensor: tensor[:, :rank]}
    return {_SHARED[name]: cut[name](tensor) for name, tensor in tensors.items()}


def _write(written: Layered) -> dict[str, Tensor]:
    return written.named({ours: theirs for theirs, ours in _NAMES.items()})


def _write_shared(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, Tensor]:
    return {theirs: tensors[ours] for theirs, ours in _SHARED.items()} if config["save_projection"] else {}


def _config(adapter: Written) -> dict[str, object]:
    methods = list(adapter.only(VeRA).values())
    adapter.same(
        r=(method.rank for method in methods),
        d_initial=(method.d_initial for method in methods),
        projection_prng_key=(method.projection_key for method in methods),
        vera_dropout=(method.input_dropout for method in methods),
    )
    first = methods[0]
    return {
        "r": first.rank,
        "d_initial": first.d_initial,
        "projection_prng_key": first.projection_key,
        "vera_dropout": first.input_dropout,
    }


FORM = PeftForm(
    peft_type="VERA",
    methods=(VeRA,),
    fields=fields(
        {
            "d_initial": Field(0.1, number),
            "init_weights": Field(True, flag, kept=True),
            "projection_prng_key": Field(0, integer),
            "r": Field(256, count),
            "save_projection": Field(True, flag, kept=True),
            "vera_dropout": Field(0.0, probability),
        },
        exclude=False,
        fan_in=True,
    ),
    bias="vera_only",
    endings=frozenset(_NAMES),
    shared=frozenset(_SHARED),
    takes=frozenset({"Linear", "Conv1D"}),
    read=_read,
    create=lambda config, path, layer: _method(config),
    write=_write,
    config=_config,
    read_shared=_read_shared,
    write_shared=_write_shared,
)
