"""LOKR: a Kronecker product; each of its two matrices is whole or two factors, which the keys tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, fields, flag, integer, one_of
from onegraph.checkpoint.dialects.peft_methods.form import IncompleteError, Layered, PeftForm, Read, Written
from onegraph.checkpoint.dialects.peft_methods.loha import LYCORIS_FIELDS, lycoris_config, with_square_cores, with_upright
from onegraph.errors import CheckpointError
from onegraph.layers import Layer
from onegraph.methods import LoKr, Method

_NAMES = {
    "lokr_w1": "first",
    "lokr_w1_a": "first_up",
    "lokr_w1_b": "first_down",
    "lokr_w2": "second",
    "lokr_w2_a": "second_up",
    "lokr_w2_b": "second_down",
    "lokr_t2": "second_core",
}
_INITS = {True: "zero", False: "random", "lycoris": "lycoris"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = with_upright(layer.named(_NAMES))
    for side in ("first", "second"):
        if side not in tensors and not {f"{side}_up", f"{side}_down"} <= tensors.keys():
            raise IncompleteError(f"{layer.path} has only: {', '.join(sorted(layer.tensors))}")
    method = _method(layer.config, layer.path)
    for side, name in (("first_down", "lokr_w1_b"), ("second_down", "lokr_w2_b")):
        if side in tensors:
            layer.rank_is(method.rank, tensors[side].shape[0], name, tensors[side].shape)
    first, second = ("full" if side in tensors else "factorised" for side in ("first", "second"))
    return dataclasses.replace(method, first_form=first, second_form=second), tensors


def _method(config: Config, path: str) -> LoKr:
    init = config.values["init_weights"]
    assert isinstance(init, bool | str)
    return LoKr(
        rank=config.rank(path),
        alpha=config.alpha(path),
        rank_dropout=config.number("rank_dropout"),
        rank_dropout_scale=config.flag("rank_dropout_scale"),
        module_dropout=config.number("module_dropout"),
        decompose_both=config.flag("decompose_both"),
        decompose_factor=config.count("decompose_factor"),
        effective_conv=config.flag("use_effective_conv2d"),
        init=_INITS[init],
    )


def _write(written: Layered) -> dict[str, Tensor]:
    theirs = {ours: name for name, ours in _NAMES.items()}
    return {theirs[name]: tensor for name, tensor in with_square_cores(with_upright(written.tensors)).items()}


def _config(adapter: Written) -> dict[str, object]:
    methods = adapter.only(LoKr)
    if any(method.sides(layer) != dataclasses.replace(method, outer=None).sides(layer) for method, layer in _placed(adapter, methods)):
        raise CheckpointError(
            "The layers of this LoKr adapter are split in a way that no decompose_factor gives.",
            hint="Save it with format='lycoris' or format='native'.",
            code="adapter-unsupported",
        )
    adapter.same(
        decompose_both=(method.decompose_both for method in methods.values()),
        decompose_factor=(method.decompose_factor for method in methods.values()),
        rank_dropout_scale=(method.rank_dropout_scale for method in methods.values()),
    )
    first = next(iter(methods.values()))
    return {
        **lycoris_config(methods, adapter),
        "decompose_both": first.decompose_both,
        "decompose_factor": first.decompose_factor,
        "rank_dropout_scale": first.rank_dropout_scale,
        "init_weights": next(theirs for theirs, ours in _INITS.items() if ours == first.init),
    }


def _placed(adapter: Written, methods: Mapping[str, LoKr]) -> Iterator[tuple[LoKr, Layer]]:
    return ((method, adapter.layers[path]) for path, method in methods.items())


def _factor(name: str, value: object) -> Iterator[str]:
    if any(integer(name, value)) or not isinstance(value, int) or (value < 1 and value != -1):
        yield f"{name} = {value!r}: a whole number of at least 1, or -1, was expected"


FORM = PeftForm(
    peft_type="LOKR",
    methods=(LoKr,),
    fields=fields(
        {
            **LYCORIS_FIELDS,
            "decompose_both": Field(False, flag),
            "decompose_factor": Field(-1, _factor),
            "init_weights": Field(True, one_of(*_INITS)),
            "rank_dropout_scale": Field(False, flag),
        }
    ),
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear", "Conv1d", "Conv2d"}),
    read=_read,
    create=lambda config, path, layer: _method(config, path),
    write=_write,
    config=_config,
)
