"""One adapter as PEFT's layers hold it, turned into what a PEFT folder of it would be."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.adoption.recognition import is_peft, kind_of
from onegraph.adoption.refusals import few, unsupported
from onegraph.adoption.sites import Site
from onegraph.checkpoint.dialects import peft, peft_config
from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm
from onegraph.checkpoint.dialects.peft_methods.lora import ADDED_TWICE, changed_base
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.keys import patterns_of
from onegraph.errors import CheckpointError

_MAGNITUDE = "lora_magnitude_vector"
# Logits of a bank's vectors outside of a mixture: PEFT reads files of the largest alone with -inf there, which no gradient survives.
_OUTSIDE = -2e4


@dataclasses.dataclass(frozen=True)
class Taken:
    """An adapter that was read; nothing is changed yet.

    Args:
        name: What it is called.
        file: It, as a file.
        bias: Which biases of the base it trains: "none", "all", or those of its layers.
        strengths: Module path -> the strength that PEFT's layer has now, where it has one.
        dropouts: Module path -> our setting -> the probability that PEFT's layer has now.
        tensors: Everything it trains.
        layers: Module path -> PEFT's layer.
    """

    name: str
    file: AdapterFile
    bias: str
    strengths: dict[str, float]
    dropouts: dict[str, dict[str, float]]
    tensors: list[Tensor]
    layers: dict[str, nn.Module]


def taken(name: str, config: Any, sites: list[Site], model: nn.Module) -> Taken:
    """Read an adapter out of PEFT's layers.

    Raises:
        AdapterError: ``adopt-unsupported`` for a method or an option that isn't here.
    """
    form = _form(name, config, sites)
    found, shared = _tensors(name, form, sites)
    copies = {site.path: own for site in sites if (own := _copy(site, name)) is not None}
    layers = {path: layer for path, (layer, _, _) in found.items()}
    flat = {f"{peft.SHARED_PREFIX}{own}": tensor for own, tensor in shared.items()}
    for path, (_, target, tensors) in found.items():
        # Whole weights are compared with the model's own, on the CPU as those of a file.
        moved = {ending: tensor.detach().cpu() if ending in form.whole else tensor for ending, tensor in tensors.items()}
        flat |= {peft.key_of(path, ending, target=target): tensor for ending, tensor in moved.items()}
    for path, copy in copies.items():
        flat |= {f"{peft.PREFIX}{path}.{leaf}": tensor.cpu() for leaf, tensor in copy.state_dict().items()}
    values = _values(config)
    values |= {**_as_the_layers_are(form, name, found, values.get("init_r")), "modules_to_save": sorted(copies) or None}
    if changed_base(values) is not None:  # that was before; what is there now is LoRA beside the weights that are there
        values["init_lora_weights"] = True
    place = Path(f"adapter {name!r} of {type(model).__name__}")
    try:
        checked = peft_config.checked(values, form, place)
        parsed = peft.parse(flat, form, checked, place)
    except CheckpointError as error:
        raise unsupported(error.what, why=error.why, hint=_hint(error)) from error
    trained = [tensor for _, _, tensors in found.values() for tensor in tensors.values()]
    trained += [tensor for own, tensor in shared.items() if own not in _PROJECTIONS]
    trained += [parameter for copy in copies.values() for parameter in copy.parameters()]
    return Taken(
        name,
        AdapterFile(
            place,
            "peft",
            {},
            {"": parsed.weights},
            {"": parsed.methods},
            _values(config),
            parsed.base_weights,
            parsed.trained,
            parsed.rewrites,
        ),
        str(checked.values.get("bias", "none")),
        {path: strength for path, (layer, target, _) in found.items() if (strength := _strength(layer, name, target)) is not None},
        {path: _dropouts(layer, name, target) for path, (layer, target, _) in found.items()},
        trained,
        layers,
    )


_Found = dict[str, tuple[nn.Module, str | None, dict[str, Tensor]]]
_PROJECTIONS = frozenset({"vera_A", "vera_B"})
_SHARED = frozenset[str]().union(*(form.shared for form in FORMS.values()))
"""Tables that are the same one in every layer, with the adapters of all layers in them."""


def _form(name: str, config: Any, sites: list[Site]) -> PeftForm:
    kind = kind_of(config)
    if kind in FORMS:
        return FORMS[kind]
    held = next((site for site in sites for layer in site.layers if name in _adapters_in(layer)), None)
    where = f", as on {held.path} ({type(held.layers[0]).__name__})" if held is not None else ""
    raise unsupported(
        f"adapter {name!r} is of PEFT's type {kind}{where}",
        why=f"Here are {', '.join(sorted(FORMS))}.",
        hint=f"delete it first, peft_model.delete_adapter({name!r}), or write it into the weights: peft_model.merge_and_unload()",
    )


def _adapters_in(layer: nn.Module) -> set[str]:
    """The adapters that a layer has anything of."""
    names = [attribute for attribute in getattr(layer, "adapter_layer_names", ()) if attribute not in _SHARED]
    tables = (getattr(layer, attribute, None) for attribute in names)
    return {str(name) for table in tables if table is not None for name in table.keys()}  # noqa: SIM118 (nn.ParameterDict)


def adapters_on(site: Site) -> set[str]:
    """The adapters that a module has anything of."""
    if site.wrapper is not None:
        return set(_copies(site.wrapper).keys())
    return set[str]().union(*(_adapters_in(layer) for layer in site.layers))


def _copies(wrapper: nn.Module) -> nn.ModuleDict:
    copies = wrapper._modules["modules_to_save"]
    assert isinstance(copies, nn.ModuleDict)  # as PEFT makes it
    return copies


def _copy(site: Site, name: str) -> nn.Module | None:
    return None if site.wrapper is None or name not in _copies(site.wrapper) else _copies(site.wrapper)[name]


def _tensors(name: str, form: PeftForm, sites: list[Site]) -> tuple[_Found, dict[str, Tensor]]:
    """Module path -> PEFT's layer, the attention around it, ending -> tensor; and the tensors that all layers have in common."""
    found: _Found = {}
    shared: dict[str, Tensor] = {}
    for site in sites:
        for layer in site.layers:
            if name not in _adapters_in(layer):
                continue
            _refuse_variants(name, site, layer, form)
            tensors = {ending: value for ending in form.endings if (value := _tensor(layer, ending, name)) is not None}
            for own in form.shared:
                if (value := _tensor(layer, own, name)) is not None:
                    shared[own] = value
            if any(value.is_meta for value in tensors.values()):
                raise unsupported(
                    f"adapter {name!r} on {site.path} is on the meta device and has no values", hint="load the adapter's weights first"
                )
            found[site.path] = (layer, site.target, {ending: _finite(value) for ending, value in tensors.items()})
    return found, shared


def _tensor(layer: nn.Module, ending: str, name: str) -> Tensor | None:
    """What an ending of a key stands for in a layer: ``lora_A.weight`` is in a module, ``ia3_l`` is a Parameter itself."""
    head, _, leaf = ending.partition(".")
    table = getattr(layer, head, None)
    if table is None or name not in table:
        return None
    value = table[name]
    found = getattr(value, leaf or "weight", None) if isinstance(value, nn.Module) else value
    return found if isinstance(found, Tensor) else None


def _finite(value: Tensor) -> Tensor:
    return torch.where(value == -torch.inf, _OUTSIDE, value.detach()) if bool((value == -torch.inf).any()) else value


def _refuse_variants(name: str, site: Site, layer: nn.Module, form: PeftForm) -> None:
    """Raise for what a layer computes, or trains, otherwise than its configuration's fields say."""
    variant = getattr(layer, "lora_variant", {}).get(name)
    if variant is not None and not type(variant).__name__.startswith("Dora"):
        raise unsupported(
            f"adapter {name!r} on {site.path} is a {type(variant).__name__} of PEFT's",
            why="Of the variants of LoRA there is DoRA.",
            hint="keep it in PEFT",
        )
    heads = {ending.partition(".")[0] for ending in form.endings | form.shared}
    names = getattr(layer, "adapter_layer_names", ())
    unknown = [own for own in names if own not in heads and (table := getattr(layer, own, None)) is not None and name in table]
    if unknown:
        raise unsupported(
            f"adapter {name!r} on {site.path} has {few(unknown)}, which no {form.peft_type} adapter here has", hint="keep it in PEFT"
        )
    if getattr(layer, "frozen_peft_weight_names", {}).get(name):
        raise unsupported(
            f"adapter {name!r} trains only a part of its tensors on {site.path}", why="Here all are trained.", hint="keep it in PEFT"
        )


# What the layers say of themselves


def _strength(layer: nn.Module, name: str, target: str | None) -> float | None:
    """The factor in front of the change: what ``set_scale``, or diffusers' ``set_adapters``, have set."""
    scaling = getattr(layer, "scaling", {}).get(name)
    if scaling is None:
        return None
    ranks = getattr(layer, "ranknum", None)
    strength = float(scaling) / (float(ranks[name]) if ranks is not None and name in ranks else 1.0)
    return strength * ADDED_TWICE if target is not None else strength


_DROPOUTS = {
    "lora_dropout": "input_dropout",
    "vera_dropout": "input_dropout",
    "vblora_dropout": "input_dropout",
    "miss_dropout": "input_dropout",
    "boft_dropout": "block_dropout",
    "oft_dropout": "module_dropout",
    "rank_dropout": "rank_dropout",
    "module_dropout": "module_dropout",
}


def _dropouts(layer: nn.Module, name: str, target: str | None) -> dict[str, float]:
    """Our setting -> probability. In an attention there are dropouts that PEFT never calls."""
    if target is not None or is_peft(layer, "MultiheadAttention"):
        return dict.fromkeys(_DROPOUTS.values(), 0.0)
    found = {}
    for theirs, ours in _DROPOUTS.items():
        table = getattr(layer, theirs, None)
        if table is not None and name in table:
            value = table[name]
            found[ours] = float(getattr(value, "p", 0.0)) if isinstance(value, nn.Module) else float(value)
    return found


def _as_the_layers_are(form: PeftForm, name: str, found: _Found, first_rank: object) -> dict[str, object]:
    """Fields of the configuration that the layers know better: it may have been made for other ones, or changed since."""
    fields: dict[str, object] = {"peft_version": getattr(sys.modules.get("peft"), "__version__", None)}
    if form.peft_type == "ADALORA":
        # Where its allocator masked triplets they are still there; only a file read with a pattern lacks them.
        whole = all(tensors["lora_A"].shape[0] == first_rank for _, _, tensors in found.values())
        return fields | ({"rank_pattern": None} if whole else {})
    if form.peft_type not in ("LORA", "LOHA", "LOKR") or not found:
        return fields
    alpha = "lora_alpha" if form.peft_type == "LORA" else "alpha"
    ranks, alphas = {}, {}
    for path, (layer, _, tensors) in found.items():
        rank, strength = float(layer.r[name]), float(getattr(layer, alpha)[name])  # type: ignore[index]
        ranks[path] = _rank(form, tensors, rank)
        if ranks[path] != rank:  # padded for other ones to come: the strength was made with the rank before
            strength *= math.sqrt(ranks[path] / rank) if layer.use_rslora[name] else ranks[path] / rank  # type: ignore[index]
        alphas[path] = strength
    rank_table, alpha_table = patterns_of(ranks), patterns_of(alphas)
    return fields | {
        "r": int(rank_table.default),
        "rank_pattern": {path: int(value) for path, value in rank_table.exceptions.items()},
        alpha: alpha_table.default,
        "alpha_pattern": alpha_table.exceptions,
    }


def _rank(form: PeftForm, tensors: Mapping[str, Tensor], rank: float) -> float:
    down = tensors.get("lora_A.weight", tensors.get("lora_embedding_A")) if form.peft_type == "LORA" else None
    return rank if down is None else float(down.shape[0])


def _values(config: Any) -> dict[str, object]:
    """The fields of a configuration, as a file would hold them."""
    found = {name: _plain(value) for name, value in config.to_dict().items()}
    return {name: value for name, value in found.items() if name != peft_config.RUNTIME}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(own) for own in value)
    return [_plain(own) for own in value] if isinstance(value, Collection) and not isinstance(value, str | bytes) else value


def _hint(error: CheckpointError) -> str:
    if error.code == "adapter-unsupported":
        return error.hint if "path_initial_model" in error.hint else "keep it in PEFT, or write it into the weights: merge_and_unload()"
    return "save it with PEFT's save_pretrained(), and onegraph.load() it onto a plain model"
