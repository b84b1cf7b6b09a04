"""The methods of LyCORIS files: what each one's tensors are called, and the way between theirs and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.checkpoint.dialects import lycoris_rotations as rotations
from onegraph.checkpoint.dialects.lycoris_form import Form, Read, ShapeError, UnsupportedError, Writer
from onegraph.layers import Layer
from onegraph.methods import BOFT, IA3, OFT, BitFit, Dense, DoRA, LoHa, LoKr, LoRA, Method, NormTuning
from onegraph.methods.factorise import with_core
from onegraph.methods.lokr import FACTORISED, FULL

_UP, _DOWN, _MID, _DORA = "lora_up.weight", "lora_down.weight", "lora_mid.weight", "dora_scale"
_LOHA = {"hada_w1_a": "first_up", "hada_w1_b": "first_down", "hada_w2_a": "second_up", "hada_w2_b": "second_down"}
_LOHA_CORES = {"hada_t1": "first_core", "hada_t2": "second_core"}
_LOKR = {
    "lokr_w1": "first",
    "lokr_w1_a": "first_up",
    "lokr_w1_b": "first_down",
    "lokr_w2": "second",
    "lokr_w2_a": "second_up",
    "lokr_w2_b": "second_down",
    "lokr_t2": "second_core",
}


def _read_lora(read: Read) -> tuple[Method, dict[str, Tensor]]:
    """A middle tensor is multiplied into ``down``: mid of down is one convolution with the kernel of mid."""
    down, up = read.tensors[_DOWN], read.tensors[_UP]
    alpha = read.alpha
    if (mid := read.tensors.get(_MID)) is not None:
        points = math.prod(down.shape[2:])
        if mid.dim() < 2 or down.dim() < 2 or points != 1 or mid.shape[1] != down.shape[0] or up.shape[1] != mid.shape[0]:
            raise ShapeError(f"down {_shape(down)}, mid {_shape(mid)} and up {_shape(up)} don't make one difference")
        # The strength is alpha over the rows of down; of the product, over those of mid.
        alpha = (down.shape[0] if alpha is None else alpha) * mid.shape[0] / down.shape[0]
        down = torch.einsum("rs...,si->ri...", mid.float(), down.float().flatten(1))
    if down.dim() < 2 or up.dim() < 2 or 0 in (*down.shape, *up.shape) or down.shape[0] % up.shape[1]:
        raise ShapeError(f"down {_shape(down)} and up {_shape(up)} don't share a rank")
    rank = down.shape[0]
    alpha = float(rank) if alpha is None else alpha
    if _DORA not in read.tensors:
        return LoRA(rank=rank, alpha=alpha), {"down": down, "up": up}
    magnitude = read.tensors[_DORA]
    if magnitude.numel() != up.shape[0] or (magnitude.dim() > 1 and magnitude.shape[0] != up.shape[0]):
        if magnitude.dim() > 1 and magnitude.shape[:2] == (1, down.shape[1]):
            raise UnsupportedError("DoRA whose magnitude is that of each input feature (wd_on_output=False)")
        raise ShapeError(f"{_DORA} is {_shape(magnitude)}, up is {_shape(up)}")
    return DoRA(rank=rank, alpha=alpha), {"down": down, "up": up, "magnitude": magnitude.reshape(-1)}


def _write_lora(method: LoRA | DoRA, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    if isinstance(method, LoRA) and method.bias:
        raise UnsupportedError("they have no place for the bias of LoRA(bias=True)")
    if layer.groups > 1:
        raise UnsupportedError("a grouped convolution has another rank on either side in them")
    found = {_DOWN: tensors["down"], _UP: tensors["up"], **_alpha(method.scale * method.rank if method.rslora else method.alpha, tensors)}
    if isinstance(method, DoRA):
        found[_DORA] = tensors["magnitude"].reshape(_beside(layer))
    return found


def _read_loha(read: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = {ours: read.tensors[name] for name, ours in {**_LOHA, **_LOHA_CORES}.items() if name in read.tensors}
    cored = "first_core" in tensors
    if cored != ("second_core" in tensors):
        raise ShapeError("one of hada_t1 and hada_t2 is missing")
    if cored:
        for name in ("first_up", "second_up"):  # beside a core (R, O)
            tensors[name] = tensors[name].t()
    ranks = {tensors[name].shape[0] for name in ("first_down", "second_down")}
    ranks |= {tensors[name].shape[-1] for name in ("first_up", "second_up")}
    if len(ranks) > 1 or any(tensors[name].dim() != 2 for name in _LOHA.values()):
        raise ShapeError(f"its factors don't share a rank: {_shapes(read.tensors)}")
    rank = ranks.pop()
    return LoHa(rank=rank, alpha=float(rank) if read.alpha is None else read.alpha, effective_conv=cored, init="lycoris"), tensors


def _write_loha(method: LoHa, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    cored = "first_core" in tensors
    found = {}
    for name, ours in {**_LOHA, **(_LOHA_CORES if cored else {})}.items():
        found[name] = tensors[ours].t() if cored and ours.endswith("up") else tensors[ours]
    return {**found, **_alpha(method.alpha, tensors)}


def _read_lokr(read: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = {ours: read.tensors[name] for name, ours in _LOKR.items() if name in read.tensors}
    forms = {}
    for side in ("first", "second"):
        pair = {f"{side}_up", f"{side}_down"} & tensors.keys()
        if (side in tensors) == bool(pair) or len(pair) == 1:
            raise ShapeError(f"its {side} matrix is neither whole nor two factors: {_shapes(read.tensors)}")
        forms[side] = FULL if side in tensors else FACTORISED
    cored = "second_core" in tensors
    if cored:
        tensors["second_up"] = tensors["second_up"].t()  # beside a core (R, K)
    alpha = read.alpha
    if any(tensors[name].dim() != 2 for name in tensors.keys() & {"first", "first_up", "first_down"}):
        raise ShapeError(f"its first matrix has no two axes: {_shapes(read.tensors)}")
    if "second" in tensors and tensors["second"].dim() == 3:
        tensors, alpha = _without_kernel(tensors, alpha), None
        forms = {"first": FULL, "second": FACTORISED}
    ranks = {tensors[name].shape[0] for name in ("first_down", "second_down") if name in tensors}
    ranks |= {tensors[name].shape[-1] for name in ("first_up", "second_up") if name in tensors}
    if len(ranks) > 1:
        raise ShapeError(f"its factors don't share a rank: {_shapes(read.tensors)}")
    rows, columns = tensors["first"].shape if "first" in tensors else (tensors["first_up"].shape[0], tensors["first_down"].shape[1])
    if ranks:
        rank = ranks.pop()
        alpha = float(rank) if alpha is None else alpha
    else:  # two whole matrices: their strength is 1 whatever alpha says, which is the rank that training was asked for
        rank = int(read.alpha) if read.alpha is not None and read.alpha >= 1 and read.alpha.is_integer() else 1
        alpha = float(rank)
    method = LoKr(
        rank=rank,
        alpha=alpha,
        outer=(rows, columns),
        effective_conv=cored,
        init="lycoris",
        first_form=forms["first"],
        second_form=forms["second"],
    )
    return method, tensors


def _without_kernel(tensors: dict[str, Tensor], alpha: float | None) -> dict[str, Tensor]:
    """On a Conv1d a whole second matrix is PEFT's other product here; theirs is two factors, one of them 1, of the strength 1."""
    found = {name: value for name, value in tensors.items() if name == "first"}
    if not found:
        up, down = tensors["first_up"].float(), tensors["first_down"].float()
        if down.shape[0] != up.shape[1]:
            raise ShapeError(f"its factors don't share a rank: {_shapes(tensors)}")
        found["first"] = up @ down * (1.0 if alpha is None else alpha / down.shape[0])
    second = tensors["second"].flatten(1)
    one = torch.eye(min(second.shape), dtype=second.dtype)
    up, down = (one, second) if len(one) == len(second) else (second, one)
    return {**found, "second_up": up, "second_down": down}


def _write_lokr(method: LoKr, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    if "second" in tensors and len(layer.kernel_size) == 1:
        raise UnsupportedError("a whole second matrix on a Conv1d stands for another product in them")
    ours = _factors_of_lycoris(tensors, layer)
    if "second_core" in ours:
        ours["second_up"] = ours["second_up"].t()
    alpha = method.alpha
    if {"first", "second"} <= ours.keys():
        alpha = float(method.rank)
        if method.scale != 1.0:
            ours["first"] = ours["first"] * method.scale
    return {**{name: ours[own] for name, own in _LOKR.items() if own in ours}, **_alpha(alpha, tensors)}


def _factors_of_lycoris(tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """With those factors multiplied that LyCORIS doesn't look for: of a rank as large as half a side, or beside a whole second matrix."""
    found = dict(tensors)
    if "second" not in found:
        up, down, core = found["second_up"], found["second_down"], found.get("second_core")
        points = math.prod(layer.kernel_size)
        if 2 * up.shape[1] >= max(up.shape[0], down.shape[1] if core is not None else down.shape[1] // points):
            whole = up @ (down if core is None else with_core(core, down))
            found = {name: value for name, value in found.items() if not name.startswith("second")}
            found["second"] = whole.reshape(len(whole), -1, *layer.kernel_size)
    if "first" not in found:
        up, down = found["first_up"], found["first_down"]
        if "second" in found or 2 * up.shape[1] >= max(up.shape[0], down.shape[1]):
            found = {name: value for name, value in found.items() if not name.startswith("first")} | {"first": up @ down}
    return found


def _read_difference(read: Read) -> tuple[Method, dict[str, Tensor]]:
    weight, bias = read.tensors.get("diff"), read.tensors.get("diff_b")
    tensors = {name: value for name, value in (("weight_difference", weight), ("bias_difference", bias)) if value is not None}
    return (Dense() if weight is not None else BitFit()), tensors


def _read_norm(read: Read) -> tuple[Method, dict[str, Tensor]]:
    names = {"w_norm": "weight_difference", "b_norm": "bias_difference"}
    return NormTuning(), {ours: read.tensors[name] for name, ours in names.items() if name in read.tensors}


def _write_difference(method: Method, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    names = {"weight_difference": "diff", "bias_difference": "diff_b"}
    if layer.kind == "norm":
        names = {"weight_difference": "w_norm", "bias_difference": "b_norm"}
    if other := sorted(tensors.keys() - names.keys()):
        raise UnsupportedError(f"they have no place for {other[0]}")
    if layer.kind == "norm" and "weight_difference" not in tensors:
        tensors = {"weight_difference": torch.zeros_like(tensors["bias_difference"]), **tensors}
    return {names[name]: value for name, value in tensors.items()}


def _read_ia3(read: Read) -> tuple[Method, dict[str, Tensor]]:
    if (flag := read.tensors["on_input"]).numel() != 1:
        raise ShapeError(f"on_input has shape {_shape(flag)}; one number was expected")
    gain = 1 + read.tensors["weight"].float().reshape(-1)
    return IA3(on_input=bool(flag), scales_bias=False), {"gain": gain}


def _write_ia3(method: IA3, tensors: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    if method.scales_bias and layer.has_bias and not method.on_input:
        raise UnsupportedError("their IA3 scales the weight and not the bias, this one scales both: IA3(scales_bias=False) is theirs")
    change = tensors["gain"] - 1
    if layer.kernel_size:
        change = change.reshape(1, -1, *(1 for _ in layer.kernel_size))
    return {"weight": change, "on_input": torch.tensor(int(method.on_input))}


def _alpha(alpha: float | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"alpha": torch.tensor(alpha, dtype=next(iter(tensors.values())).dtype)}


def _beside(layer: Layer) -> tuple[int, ...]:
    """The shape of a vector of output features that is multiplied with the weight."""
    return (-1, *(1 for _ in layer.canonical_shape[1:]))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {_shape(tensor)}" for name, tensor in sorted(tensors.items()))


FORMS: tuple[Form, ...] = (
    Form("LoRA", "locon", (LoRA, DoRA), {_UP, _DOWN, _MID}, ((_UP,), (_DOWN,)), _read_lora, _write_lora, decomposes=True),
    Form("LoHa", "loha", (LoHa,), {*_LOHA, *_LOHA_CORES}, tuple((name,) for name in _LOHA), _read_loha, _write_loha),
    Form("LoKr", "lokr", (LoKr,), {*_LOKR}, (("lokr_w1", "lokr_w1_a"), ("lokr_w2", "lokr_w2_a")), _read_lokr, _write_lokr),
    Form("full differences", "full", (Dense, BitFit), {"diff", "diff_b"}, (), _read_difference, _write_difference),
    Form("norms", "", (NormTuning,), {"w_norm", "b_norm"}, (("w_norm",),), _read_norm, _write_difference),
    Form("IA3", "ia3", (IA3,), {"weight", "on_input"}, (("weight",), ("on_input",)), _read_ia3, _write_ia3),
    Form("OFT", "diag-oft", (OFT,), {"oft_blocks", "rescale"}, (("oft_blocks",),), rotations.read, rotations.write_oft),
    Form("BOFT", "boft", (BOFT,), set(), (), rotations.read, rotations.write_boft),
)
"""In the order in which messages name them. OFT and BOFT are told apart by the axes of one tensor."""


def writer_of(method: Method) -> Writer | None:
    """What writes a method; None where these files have no place for it."""
    return next((form.write for form in FORMS if type(method) in form.methods), None)
