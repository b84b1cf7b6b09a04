"""ADALORA: a singular value decomposition whose triplets are taken away in training."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, integer, number, probability, whole_number
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, Layered, PeftForm, Read, Written, whole
from onegraph.checkpoint.dialects.peft_methods.lora import FIELDS as LORA_FIELDS
from onegraph.checkpoint.dialects.peft_methods.lora import refuse_inits, refuse_new
from onegraph.layers import ConvLayer
from onegraph.methods import AdaLoRA, Method

_NAMES = {"lora_A": "down", "lora_B": "up", "lora_E": "singular"}
_PATTERN_KEY = ".lora_E"


def _triplets(name: str, value: object) -> Iterator[str]:
    """A table of layers, each with a list that says which triplets are left."""
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{name} = {value!r}: a table of layers and lists of true and false was expected"
        return
    for key, own in value.items():
        if not isinstance(own, list) or not all(isinstance(entry, bool) for entry in own):
            yield f"{name}[{key!r}] = {own!r}: a list of true and false was expected"


def _kept(layer: Read) -> list[bool] | None:
    """Which triplets of a layer are left, by the configuration; the adapter's name may stand in the key."""
    pattern = layer.config.values["rank_pattern"] or {}
    assert isinstance(pattern, dict)
    key = re.compile(rf"(?:.*\.)?{re.escape(layer.path)}\.lora_E(?:\.[^.]+)?")
    exact = pattern.get(f"{layer.path}{_PATTERN_KEY}")
    return exact if exact is not None else next((own for name, own in pattern.items() if key.fullmatch(name)), None)


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = layer.named(_NAMES, needed=_NAMES.values())
    config, rank = layer.config, layer.config.count("init_r")
    kept = _kept(layer)
    found = tensors["down"].shape[0] if tensors["down"].dim() else -1
    left = rank if kept is None else sum(kept)
    if found != left or (kept is not None and len(kept) != rank):
        raise ContradictionError(
            f"{layer.path}: init_r is {rank} and {left} of its triplets are left, lora_A has shape {tuple(tensors['down'].shape)}"
        )
    if not left:
        # Nothing is left: one triplet whose singular value is 0 is the same, and can be trained on.
        tensors = {
            name: tensor.new_zeros([size or 1 for size in tensor.shape]) if 0 in tensor.shape else tensor
            for name, tensor in tensors.items()
        }
    tensors["singular"] = tensors["singular"].reshape(-1)
    return _method(config, kept_rank=None if left == rank else max(left, 1)), tensors


def _method(config: Config, *, kept_rank: int | None = None) -> AdaLoRA:
    return AdaLoRA(
        rank=config.count("init_r"),
        alpha=config.number("lora_alpha"),
        input_dropout=config.number("lora_dropout"),
        kept_rank=kept_rank,
    )


def _write(written: Layered) -> dict[str, Tensor]:
    found = written.named({ours: theirs for theirs, ours in _NAMES.items()})
    found["lora_E"] = found["lora_E"].reshape(-1, 1)
    if isinstance(written.layer, ConvLayer):
        found["lora_A"] = found["lora_A"].flatten(1)
    return found


def _config(adapter: Written) -> dict[str, object]:
    methods = adapter.only(AdaLoRA)
    adapter.same(
        init_r=(method.rank for method in methods.values()),
        lora_alpha=(method.alpha for method in methods.values()),
        lora_dropout=(method.input_dropout for method in methods.values()),
    )
    first = next(iter(methods.values()))
    kept = {path: method.rank if method.kept_rank is None else method.kept_rank for path, method in methods.items()}
    pattern = {f"{path}{_PATTERN_KEY}": [place < left for place in range(first.rank)] for path, left in kept.items()}
    return {
        "init_r": first.rank,
        "lora_alpha": whole(float(first.rank if first.alpha is None else first.alpha)),
        "lora_dropout": first.input_dropout,
        "rank_pattern": pattern if any(left < first.rank for left in kept.values()) else None,
        # PEFT refuses a configuration without it, in inference too.
        "total_step": 1,
    }


def _any_count(name: str, value: object) -> Iterator[str]:
    if value is not None:
        yield from whole_number(name, value)


FORM = PeftForm(
    peft_type="ADALORA",
    methods=(AdaLoRA,),
    fields=fields(
        {
            **LORA_FIELDS,
            "alpha_pattern": Field({}),  # PEFT has the field, and no use for it
            "beta1": Field(0.85, number, kept=True),
            "beta2": Field(0.85, number, kept=True),
            "deltaT": Field(1, count, kept=True),
            "init_lora_weights": Field(True, kept=True),
            "init_r": Field(12, count),
            "lora_dropout": Field(0.0, probability),
            "orth_reg_weight": Field(0.5, number, kept=True),
            "r": Field(8, integer, kept=True),
            "rank_pattern": Field(None, _triplets),
            "target_r": Field(8, integer, kept=True),
            "tfinal": Field(0, integer, kept=True),
            "tinit": Field(0, integer, kept=True),
            "total_step": Field(None, _any_count, kept=True),
            "lora_bias": Field(False, refused="a bias on lora_B"),
            "use_dora": Field(False, refused="DoRA"),
            "use_rslora": Field(False),
        },
        fan_in=True,
    ),
    bias="lora_only",
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear", "Conv1D", "Conv2d"}),
    read=_read,
    create=lambda config, path, layer: _method(config),
    write=_write,
    config=_config,
    refuse=refuse_inits,
    refuse_new=refuse_new,
)
