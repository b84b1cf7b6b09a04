"""BOFT: a product of sparse rotations.

The number of stages is what the tensors have: PEFT without its CUDA extension writes one stage whatever the configuration says.
"""

from __future__ import annotations

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag, probability, whole_number
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, Layered, PeftForm, Read, Written
from onegraph.errors import CheckpointError
from onegraph.layers import Layer
from onegraph.methods import BOFT, Method

_NAMES = {"boft_R": "rotation", "boft_s": "gain"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = layer.named(_NAMES, needed=_NAMES.values())
    config, rotation = layer.config, tensors["rotation"]
    size, num = config.count("boft_block_size"), config.count("boft_block_num")
    if rotation.dim() != 4 or rotation.shape[2] != rotation.shape[3]:
        raise ContradictionError(f"{layer.path}: boft_R has shape {tuple(rotation.shape)}, not (stages, blocks, size, size)")
    num_factors, num_blocks, block_size, _ = rotation.shape
    if (size and size != block_size) or (num and num != num_blocks):
        raise ContradictionError(
            f"{layer.path}: boft_block_size is {size} and boft_block_num {num}, boft_R has {num_blocks} blocks of {block_size}"
        )
    tensors["gain"] = tensors["gain"].reshape(-1)
    method = _method(config, size=block_size if size else 0, num=num_blocks, num_factors=num_factors)
    return method, tensors


def _method(config: Config, *, size: int, num: int, num_factors: int) -> BOFT:
    dropout = config.number("boft_dropout")
    if size:
        return BOFT(block_size=size, num_factors=num_factors, block_dropout=dropout)
    return BOFT(num_blocks=num, num_factors=num_factors, block_dropout=dropout)


def _create(config: Config, path: str, layer: Layer) -> Method:
    return _method(
        config,
        size=config.count("boft_block_size"),
        num=config.count("boft_block_num"),
        num_factors=config.count("boft_n_butterfly_factor"),
    )


def _write(written: Layered) -> dict[str, Tensor]:
    gain = written.tensors["gain"]
    return {"boft_R": written.tensors["rotation"], "boft_s": gain.reshape(1, -1) if written.layer.kernel_size else gain.reshape(-1, 1)}


def _config(adapter: Written) -> dict[str, object]:
    methods = list(adapter.only(BOFT).values())
    if any(method.on_output or not method.with_gain for method in methods):
        raise CheckpointError(
            "This BOFT adapter rotates outputs, or has no gain; PEFT's rotates inputs, and has one.",
            hint="Save it with format='lycoris' or format='native'.",
            code="adapter-unsupported",
        )
    adapter.same(
        boft_block_size=(method.block_size for method in methods),
        boft_block_num=(method.num_blocks for method in methods),
        boft_n_butterfly_factor=(method.num_factors for method in methods),
        boft_dropout=(method.block_dropout for method in methods),
    )
    first = methods[0]
    return {
        "boft_block_size": first.block_size or 0,
        "boft_block_num": first.num_blocks or 0,
        "boft_n_butterfly_factor": first.num_factors,
        "boft_dropout": first.block_dropout,
    }


FORM = PeftForm(
    peft_type="BOFT",
    methods=(BOFT,),
    fields=fields(
        {
            "boft_block_num": Field(0, whole_number),
            "boft_block_size": Field(4, whole_number),
            "boft_dropout": Field(0.0, probability),
            "boft_n_butterfly_factor": Field(1, count),
            "init_weights": Field(True, flag, kept=True),
        },
        fan_in=True,
    ),
    bias="boft_only",
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear", "Conv2d"}),
    read=_read,
    create=_create,
    write=_write,
    config=_config,
)
