"""LyCORIS network files: sd-scripts' keys, with the tensors of other methods than LoRA behind them.

Conventions as LyCORIS 4.1 reads and writes them, which A1111's web UI and ComfyUI share: a strength of alpha / rank once, rotations
on the outputs, gains and differences of the weight that leave the bias to tensors of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from onegraph.checkpoint.dialects import kohya
from onegraph.checkpoint.dialects.lycoris_form import Form, IncompleteError, Read, ShapeError, UnsupportedError
from onegraph.checkpoint.dialects.lycoris_methods import FORMS, writer_of
from onegraph.checkpoint.file import Weights
from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError
from onegraph.layers import Layer
from onegraph.methods import Method

logger = logging.getLogger(__name__)

NETWORK_MODULE = "lycoris.kohya"
"""What ``ss_network_module`` says."""
DORA = "dora_scale"
_COMMON = frozenset({kohya.ALPHA, DORA})

OPTIONAL = frozenset({"bias_difference"})
"""Our parameters that a file may leave out where nothing changed."""

# Key of a parameter -> the method it belongs to, for methods that have no place here.
_REFUSED = {
    "a1.weight": "GLoRA",
    "a2.weight": "GLoRA",
    "b1.weight": "GLoRA",
    "b2.weight": "GLoRA",
    "bm.weight": "GLoRA",
    "lambda_layer": "T-LoRA",
    "p_layer.weight": "T-LoRA",
    "q_layer.weight": "T-LoRA",
    "oft_diag": "OFT of LyCORIS before 2.1",
    "lokr_t1": "LoKr with a core in its first matrix",
    "set_weight": "whole weights",
    "reshape_weight": "reshaped weights",
    "lora_up.bias": "LoRA with a bias",
}
_FORM_OF = {key: form for form in FORMS for key in form.keys}


@dataclass(frozen=True)
class Parsed:
    """A file's contents.

    Args:
        parts: Prefix -> module key -> our parameters.
        methods: Prefix -> module key -> method.
    """

    parts: dict[str, dict[str, Weights]]
    methods: dict[str, dict[str, Method]]


def looks_like(keys: Iterable[str]) -> bool:
    """True where a network file has tensors that sd-scripts' own LoRA hasn't."""
    found = list(keys)
    plain = {*kohya.PARAMETERS.values(), kohya.ALPHA}
    known = (_FORM_OF.keys() | _REFUSED.keys() | {DORA}) - plain
    return kohya.looks_like(found) and any(key.partition(".")[2] in known for key in found)


def parse(tensors: Mapping[str, Tensor], path: Path) -> Parsed:
    """The modules of a file, each with its method.

    Raises:
        CheckpointError: ``adapter-keys`` for keys that mean nothing; ``adapter-unsupported`` for methods that have no place here, and for
            modules with tensors of several; ``adapter-incomplete``; ``adapter-shape``.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    unknown: list[str] = []
    refused: dict[str, str] = {}
    for key, tensor in tensors.items():
        module, _, suffix = key.partition(".")
        if suffix in _REFUSED:
            refused.setdefault(_REFUSED[suffix], key)
        elif suffix not in _FORM_OF and suffix not in _COMMON:
            unknown.append(key)
        else:
            modules.setdefault(module, {})[suffix] = tensor
    parsed = Parsed({}, {})
    incomplete, shapes = [], []
    for module, own in modules.items():
        prefix = kohya.prefix_of(module)
        assert prefix is not None  # as looks_like saw
        try:
            found = _read(module, own)
        except UnsupportedError as error:
            refused.setdefault(str(error), module)
        except IncompleteError as error:
            incomplete.append(f"{module} {error}")
        except ShapeError as error:
            shapes.append(f"{module}: {error}")
        else:
            if found is None:
                logger.debug("%s rotates blocks of one feature, which changes nothing", module)
                continue
            parsed.methods.setdefault(prefix, {})[module], weights = found
            parsed.parts.setdefault(prefix, {})[module] = weights
    _raise(path, unknown, refused, incomplete, shapes)
    if not parsed.parts:
        raise CheckpointError(
            f"{path} holds nothing that changes a layer.",
            why=f"All of its {len(modules)} modules rotate blocks of one feature: a prime number of features has no other ones.",
            hint="Adapt layers of another size, or train another method.",
            code="adapter-unsupported",
        )
    return parsed


def write(method: Method, tensors: Mapping[str, Tensor], layer: Layer, where: str) -> dict[str, Tensor]:
    """The end of each key of a layer, and its tensor.

    Args:
        method: The layer's method.
        tensors: Our parameters.
        layer: What is adapted.
        where: Its path, for errors.

    Raises:
        CheckpointError: ``adapter-unsupported`` where these files have no place for it.
    """
    writer = writer_of(method)
    reason = f"they have no place for {method.name}"
    if writer is not None:
        try:
            if layer.kind == "embedding":
                raise UnsupportedError("they have no embeddings")
            return writer(method, tensors, layer)
        except UnsupportedError as error:
            reason = str(error)
    raise CheckpointError(
        f"{where}: LyCORIS files can't hold this adapter; {reason}.",
        why=f"Its method is {method}.",
        hint="Save it with format='native'.",
        code="adapter-unsupported",
    )


def algorithm(methods: Iterable[Method]) -> str | None:
    """What LyCORIS calls the method of these layers; None where they have several, or one without a name of its own."""
    names = {form.algorithm for method in methods for form in FORMS if type(method) in form.methods} - {""}
    return next(iter(names)) if len(names) == 1 else None


def _read(module: str, own: Mapping[str, Tensor]) -> tuple[Method, Weights] | None:
    """One module; None for one that changes nothing."""
    forms: list[Form] = [form for form in FORMS if form.keys & own.keys()]
    if len(forms) > 1:
        raise UnsupportedError(f"{' and '.join(form.name for form in forms)} in one module")
    if not forms:
        raise IncompleteError(f"has only: {', '.join(sorted(own))}")
    form = forms[0]
    if missing := [names for names in form.needed if not own.keys() & set(names)]:
        raise IncompleteError(f"has no {' nor '.join(missing[0])}, only: {', '.join(sorted(own))}")
    if DORA in own and not form.decomposes:
        raise UnsupportedError(f"{form.name} with a {DORA}")
    alpha = own.get(kohya.ALPHA)
    if alpha is not None and alpha.numel() != 1:
        raise ShapeError(f"alpha has shape {tuple(alpha.shape)}; one number was expected")
    found = form.read(Read(own, None if alpha is None else float(alpha)))
    if found is None:
        return None
    method, tensors = found
    weights: Weights = dict(tensors)
    if alpha is not None:
        weights[kohya.ALPHA] = float(alpha)
    return method, weights


def _raise(path: Path, unknown: list[str], refused: Mapping[str, str], incomplete: list[str], shapes: list[str]) -> None:
    damaged = "The file is damaged; download it or train it again."
    if refused:
        raise CheckpointError(
            f"{path} holds {', '.join(sorted(refused))}, which can't be read here.",
            why=f"For example:\n{first_ten(refused.values())}",
            hint=f"These are read: {', '.join(form.name for form in FORMS)}.",
            code="adapter-unsupported",
        )
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} keys of {path} are no keys of a network file.",
            why=f"They are:\n{first_ten(unknown)}",
            hint="A network file holds lora_unet_... and lora_te_... keys with the parameters of LoRA or of a LyCORIS method.",
            code="adapter-keys",
        )
    if incomplete:
        raise CheckpointError(
            f"{len(incomplete)} modules of {path} are incomplete.",
            why=f"A part of their tensors is missing:\n{first_ten(incomplete)}",
            hint=damaged,
            code="adapter-incomplete",
        )
    if shapes:
        raise CheckpointError(
            f"{len(shapes)} modules of {path} have tensors that don't belong together.",
            why=f"They are:\n{first_ten(shapes)}",
            hint=damaged,
            code="adapter-shape",
        )
