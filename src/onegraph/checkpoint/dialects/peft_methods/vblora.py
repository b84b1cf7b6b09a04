"""VBLORA: factors put together from a bank of vectors; the logits, or only the k largest of each mixture."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag, number, probability
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, IncompleteError, Layered, PeftForm, Read, Written
from onegraph.methods import Method, VBLoRA

_NAMES = {"vblora_logits_A": "logits_down", "vblora_logits_B": "logits_up"}
_PLACES, _WEIGHTS = "_topk_indices", "_topk_weights"
_BANK = "vblora_vector_bank"

# A vector outside a mixture, and one in it whose weight rounded to 0: far below the logarithm of any weight, and finite.
_OUTSIDE, _NOTHING = -2e4, -1e4


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    config = layer.config
    bank = layer.shared.get(_BANK)
    if bank is None:
        raise IncompleteError(f"{layer.path}: there is no {_BANK}")
    sizes = (config.count("num_vectors"), config.count("vector_length"))
    if tuple(bank.shape) != sizes:
        raise ContradictionError(f"{layer.path}: num_vectors and vector_length are {sizes}, the bank has shape {tuple(bank.shape)}")
    found = {**layer.tensors}
    for name in _NAMES:
        if f"{name}{_PLACES}" in found and f"{name}{_WEIGHTS}" in found:
            found[name] = _logits(found[f"{name}{_PLACES}"], found[f"{name}{_WEIGHTS}"], sizes[0])
    tensors = {_NAMES[name]: tensor for name, tensor in found.items() if name in _NAMES}
    if len(tensors) < len(_NAMES):
        raise IncompleteError(f"{layer.path} has only: {', '.join(sorted(layer.tensors))}")
    rank = config.count("r")
    down = tensors["logits_down"]
    layer.rank_is(rank, down.shape[0], "vblora_logits_A", down.shape)
    return _method(config), tensors


def _method(config: Config) -> VBLoRA:
    return VBLoRA(
        rank=config.count("r"),
        topk=config.count("topk"),
        num_vectors=config.count("num_vectors"),
        vector_length=config.count("vector_length"),
        input_dropout=config.number("vblora_dropout"),
        bank_bound=config.number("init_vector_bank_bound"),
        logits_deviation=config.number("init_logits_std"),
    )


def _logits(places: Tensor, weights: Tensor, num_vectors: int) -> Tensor:
    """Logits whose mixtures are those of the k largest, all but the last of whose weights are stored."""
    weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], dim=-1)
    logits = weights.new_full((*weights.shape[:-1], num_vectors), _OUTSIDE)
    return logits.scatter(-1, places.long(), weights.clamp(min=0).log().clamp(min=_NOTHING))


def _write(written: Layered) -> dict[str, Tensor]:
    found = written.named({ours: theirs for theirs, ours in _NAMES.items()})
    method = written.method
    assert isinstance(method, VBLoRA)
    if not written.config["save_only_topk_weights"]:
        return found
    # As small as PEFT writes them.
    dtype = next(dtype for dtype, bits in ((torch.uint8, 8), (torch.int16, 15), (torch.int32, 31)) if method.num_vectors < 2**bits)
    parts = {}
    for name, logits in found.items():
        largest, places = logits.topk(method.topk)
        parts[f"{name}{_PLACES}"] = places.to(dtype)
        parts[f"{name}{_WEIGHTS}"] = largest.softmax(-1)[..., :-1].contiguous()
    return parts


def _config(adapter: Written) -> dict[str, object]:
    methods = list(adapter.only(VBLoRA).values())
    first = methods[0]
    own = {
        "r": "rank",
        "topk": "topk",
        "num_vectors": "num_vectors",
        "vector_length": "vector_length",
        "vblora_dropout": "input_dropout",
        "init_vector_bank_bound": "bank_bound",
        "init_logits_std": "logits_deviation",
    }
    adapter.same(**{theirs: [getattr(method, ours) for method in methods] for theirs, ours in own.items()})
    return {theirs: getattr(first, ours) for theirs, ours in own.items()}


def _read_shared(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    return {"vector_bank": tensors[_BANK]} if _BANK in tensors else {}


FORM = PeftForm(
    peft_type="VBLORA",
    methods=(VBLoRA,),
    fields=fields(
        {
            "init_logits_std": Field(0.1, number),
            "init_vector_bank_bound": Field(0.02, number),
            "num_vectors": Field(256, count),
            "r": Field(4, count),
            "save_only_topk_weights": Field(False, flag, kept=True),
            "topk": Field(2, count),
            "vblora_dropout": Field(0.0, probability),
            "vector_length": Field(256, count),
        },
        fan_in=True,
    ),
    bias="vblora_only",
    endings=frozenset(f"{name}{ending}" for name in _NAMES for ending in ("", _PLACES, _WEIGHTS)),
    shared=frozenset({_BANK}),
    takes=frozenset({"Linear", "Conv1D"}),
    read=_read,
    create=lambda config, path, layer: _method(config),
    write=_write,
    config=_config,
    read_shared=_read_shared,
    write_shared=lambda tensors, config: {_BANK: tensors["vector_bank"]},
)
