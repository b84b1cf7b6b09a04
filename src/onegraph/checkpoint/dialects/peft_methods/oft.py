"""OFT, in four generations: read all of them, write the newest.

``oft_r`` without ``oft_s`` (PEFT up to 0.13) rotates the output; where its blocks don't fill it, the layer gets the whole difference.
With ``oft_s`` (0.14, 0.15) it is a rotation of the input and a gain: BOFT with one stage. ``oft_R`` (0.16 on) rotates the input; before
0.18 the last term of the series had the factor 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag, number, probability, whole_number
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, Layered, PeftForm, Read, Written
from onegraph.errors import CheckpointError
from onegraph.layers import Layer
from onegraph.methods import BOFT, OFT, Method
from onegraph.methods.rotations import cayley_change

_NAMES = {"oft_R.weight": "rotation", "oft_embedding_R.weight": "rotation"}
_ONE_LAST_TERM = (0, 18, 0)


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    config = layer.config
    if "oft_r" in layer.tensors:
        return _read_gained(layer) if "oft_s" in layer.tensors else _read_output(layer)
    tensors = layer.named(_NAMES, needed=("rotation",))
    rotation = tensors["rotation"]
    size = _block_size(rotation.shape[-1]) if rotation.dim() == 2 else 0
    if not size:
        raise ContradictionError(f"{layer.path}: oft_R has shape {tuple(rotation.shape)}, not (blocks, size (size - 1) / 2)")
    num_blocks, asked = config.count("r"), config.count("oft_block_size")
    by_number = asked == 0 and (config.flag("block_share") or rotation.shape[0] == num_blocks)
    return _method(config, size=0 if by_number else size, num=num_blocks), tensors


def _method(config: Config, *, size: int, num: int) -> OFT:
    return OFT(
        block_size=size or None,
        num_blocks=None if size else num,
        exact=not config.flag("use_cayley_neumann"),
        num_terms=config.count("num_cayley_neumann_terms"),
        last_term_twice=_last_term_twice(config),
        block_share=config.flag("block_share"),
        coft=config.flag("coft"),
        eps=config.number("eps"),
        module_dropout=config.number("module_dropout"),
    )


def _create(config: Config, path: str, layer: Layer) -> Method:
    columns = layer.out_features if layer.kind == "embedding" else layer.num_weight_columns
    size, num = config.count("oft_block_size"), config.count("r")
    return _method(config, size=size and _nearest_divisor(columns, size), num=num and _nearest_divisor(columns, num))


def _block_size(num_elements: int) -> int:
    """The b of b (b - 1) / 2 elements, 0 where there is none."""
    size = (1 + math.isqrt(1 + 8 * num_elements)) // 2
    return size if size * (size - 1) // 2 == num_elements and size > 1 else 0


def _last_term_twice(config: Config) -> bool:
    """The version is in the configuration from 0.18 on."""
    return config.flag("use_cayley_neumann") and (config.version or (0, 0, 0)) < _ONE_LAST_TERM


def _read_output(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    rotation = layer.tensors["oft_r"]
    size = rotation.shape[-1]
    rotation = _bounded(rotation, layer.config, size)
    rows, columns = torch.triu_indices(size, size, 1)
    above = (rotation - rotation.mT)[:, rows, columns] / 2
    share = layer.config.flag("block_share")
    return OFT(block_size=size, exact=True, on_output=True, block_share=share, module_dropout=layer.config.number("module_dropout")), {
        "rotation": above.contiguous()
    }


def _read_gained(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    rotation, gain = layer.tensors["oft_r"], layer.tensors["oft_s"].reshape(-1)
    num_blocks = layer.config.count("r") or rotation.shape[0]
    rotation = _bounded(rotation, layer.config, math.ceil(gain.shape[0] / num_blocks))
    if layer.config.flag("block_share"):
        rotation = rotation.expand(num_blocks, -1, -1)
    return BOFT(block_size=rotation.shape[-1], block_dropout=layer.config.number("module_dropout")), {
        "rotation": rotation.unsqueeze(0).contiguous(),
        "gain": gain,
    }


def _bounded(rotation: Tensor, config: Config, chunk: int) -> Tensor:
    """The tensors as the next forward pass of a coft adapter would have left them, in PEFT up to 0.15."""
    if not config.flag("coft"):
        return rotation
    limit = config.number("eps") * chunk * chunk / math.sqrt(rotation.shape[0])
    norm = rotation.flatten(1).norm(dim=1).clamp(min=torch.finfo(rotation.dtype).tiny).reshape(-1, 1, 1)
    return torch.where(norm <= limit, rotation, rotation * (limit / norm))


def _rewrite(layer: Read) -> Callable[[Tensor], Tensor] | None:
    """The oldest generation: W' = R^T W, with R cut to the outputs where its blocks are more, which leaves no rotation."""
    if "oft_r" not in layer.tensors or "oft_s" in layer.tensors:
        return None
    num_blocks = layer.config.rank(layer.path)

    def rotated(weight: Tensor) -> Tensor:
        rows = weight.flatten(1)
        rotation = layer.tensors["oft_r"].to(rows.device, torch.float64)
        rotation = _bounded(rotation, layer.config, rotation.shape[-1])
        change = cayley_change((rotation - rotation.mT) / 2)
        blocks = [change[0]] * num_blocks if change.shape[0] == 1 else list(change)
        whole: Tensor = torch.block_diag(*blocks)[: rows.shape[0], : rows.shape[0]]  # type: ignore[no-untyped-call]
        turned: Tensor = rows.double() + whole.t() @ rows.double()
        return turned.to(weight.dtype).reshape(weight.shape)

    return rotated


def _settle(values: Mapping[str, object]) -> Mapping[str, object]:
    """Up to 0.13 the configuration had patterns, which the newer ones have not; the tensors say what they said."""
    return {name: value for name, value in values.items() if value or name not in ("alpha_pattern", "rank_pattern")}


def _write(written: Layered) -> dict[str, Tensor]:
    name = "oft_embedding_R.weight" if written.layer.kind == "embedding" else "oft_R.weight"
    return {name: written.tensors["rotation"]}


def _config(adapter: Written) -> dict[str, object]:
    methods = adapter.only(OFT)
    every = list(methods.values())
    if any(method.on_output for method in every):
        raise CheckpointError(
            "This OFT adapter rotates outputs, as PEFT did up to 0.13; later versions rotate inputs.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    if any(method.last_term_twice and not method.exact for method in every):
        raise CheckpointError(
            "This OFT adapter has the series of PEFT 0.16 and 0.17, which later versions don't compute.",
            why="Its last term has the factor 2; from 0.18 on it has the factor 1, and the same tensor is another rotation.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    own = {
        "num_cayley_neumann_terms": "num_terms",
        "block_share": "block_share",
        "coft": "coft",
        "eps": "eps",
        "module_dropout": "module_dropout",
    }
    adapter.same(use_cayley_neumann=(method.exact for method in every))
    adapter.same(**{theirs: [getattr(method, ours) for method in every] for theirs, ours in own.items()})
    return {
        **_blocks(methods, adapter),
        **{theirs: getattr(every[0], ours) for theirs, ours in own.items()},
        "use_cayley_neumann": not every[0].exact,
    }


def _blocks(methods: dict[str, OFT], adapter: Written) -> dict[str, object]:
    """``oft_block_size`` or ``r``: a number for which PEFT, which goes to the nearest divisor, finds the blocks of every layer."""
    layers = {path: adapter.layers[path] for path in methods}
    columns = {path: layer.out_features if layer.kind == "embedding" else layer.num_weight_columns for path, layer in layers.items()}
    sizes = {path: method.block_size_on(adapter.layers[path]) for path, method in methods.items()}
    numbers = {path: columns[path] // sizes[path] for path in methods}
    by_number = any(method.num_blocks is not None for method in methods.values())
    for name, wanted in (("r", numbers), ("oft_block_size", sizes)) if by_number else (("oft_block_size", sizes), ("r", numbers)):
        for asked in sorted(set(wanted.values()), reverse=True):
            if all(_nearest_divisor(columns[path], asked) == own for path, own in wanted.items()):
                return {"r": 0, "oft_block_size": 0, name: asked}
    adapter.same(oft_block_size=sizes.values())
    return {"r": 0, "oft_block_size": next(iter(sizes.values()))}


def _nearest_divisor(size: int, asked: int) -> int:
    """What PEFT makes of a block size or number that doesn't divide: the nearest that does, the smaller one of two."""
    if asked >= size:
        return size
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    return min(divisors, key=lambda number: (abs(number - asked), number))


FORM = PeftForm(
    peft_type="OFT",
    methods=(OFT,),
    fields=fields(
        {
            "block_share": Field(False, flag),
            "coft": Field(False, flag),
            "eps": Field(6e-5, number),
            "init_weights": Field(True, flag, kept=True),
            "module_dropout": Field(0.0, probability),
            "num_cayley_neumann_terms": Field(5, count),
            "oft_block_size": Field(32, whole_number),
            "r": Field(0, whole_number),
            "use_cayley_neumann": Field(True, flag),
        },
        fan_in=True,
    ),
    bias="oft_only",
    endings=frozenset({*_NAMES, "oft_r", "oft_s"}),
    takes=frozenset({"Linear", "Conv2d", "Embedding"}),
    read=_read,
    create=_create,
    rewrite=_rewrite,
    write=_write,
    config=_config,
    settle=_settle,
)
