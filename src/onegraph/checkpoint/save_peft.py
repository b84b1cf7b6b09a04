"""From a model into a PEFT folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapters
from onegraph.adapters.walk import places, plain_class, unwrapped
from onegraph.checkpoint.atomic import atomic_write_all, make_folder
from onegraph.checkpoint.base_weights import Whole, require_whole, whole_weights, without_bias
from onegraph.checkpoint.container import cast, serialise, write_bytes
from onegraph.checkpoint.contents import Contents, chosen_name, contents
from onegraph.checkpoint.dialects import peft, peft_config
from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.checkpoint.dialects.peft_methods.form import Layered, PeftForm, Written, class_of
from onegraph.checkpoint.dialects.peft_methods.lora import ADDED_TWICE
from onegraph.checkpoint.keys import file_paths, first_ten, targets_of
from onegraph.checkpoint.origin import remembered
from onegraph.errors import CheckpointError
from onegraph.layers import Layer, LinearLayer
from onegraph.layers.attention import AttentionLayer, ReadLinearLayer
from onegraph.methods import LoRA, Method

# As PEFT has it: a targeted embedding of these names is saved with the adapter.
_SAVED_EMBEDDINGS = ("embed_tokens", "lm_head")
_BASE = ".base_layer.weight"


def save_peft(adapters: Adapters, folder: Path, name: str | None, dtype: torch.dtype | None, fields: Mapping[str, object]) -> None:
    """Write one adapter, or all of them, into a folder: see :func:`onegraph.checkpoint.save`."""
    names = list(adapters.names) if name is None else [chosen_name(adapters, name)]
    written: dict[Path, bytes] = {}
    for adapter in names:
        place = folder if name is not None or adapter == "default" else folder / adapter
        config, flat = peft_contents(adapters, adapter, fields)
        require_whole(flat.values(), config["peft_type"])
        written[place / peft.WEIGHTS_NAME] = serialise(cast(flat, dtype, f"adapter {adapter!r}"), {"format": "pt"})
        written[place / peft.CONFIG_NAME] = peft_config.dump_config(config)
    for place in {path.parent for path in written}:
        make_folder(place)
    writers = {path: partial(write_bytes, data) for path, data in written.items()}
    atomic_write_all(writers, num_bytes=sum(map(len, written.values())))


def _adapter_tensors(form: PeftForm, config: Mapping[str, object], whole: Whole, found: Contents) -> dict[str, Tensor]:
    """Key -> tensor, of the layers that the file's own method is on."""
    targets = _attentions_of(whole.methods, found.layers)
    flat: dict[str, Tensor] = {}
    for path, method in whole.methods.items():
        parameters, target = whole.parameters[path], targets.get(path)
        if target is not None:
            own, other = method, whole.methods[target]
            assert isinstance(own, LoRA)  # as _attentions_of leaves them
            assert isinstance(other, LoRA)
            factor = own.scale / (ADDED_TWICE * other.scale)
            parameters = {name: value * factor if name.startswith("up") else value for name, value in parameters.items()}
        for ending, tensor in form.write(Layered(method, parameters, found.layers[path], config)).items():
            flat[peft.key_of(path, ending, target=target)] = tensor
    return flat


def peft_contents(adapters: Adapters, name: str, fields: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The configuration and the tensors of the folder of one adapter.

    Args:
        adapters: The adapters of the model.
        name: One of them.
        fields: Further fields of the configuration; they win.

    Raises:
        CheckpointError: ``adapter-unsupported`` for what PEFT has no place for; ``adapter-merged``.
    """
    found = contents(adapters, name)
    given = {**remembered(adapters, name), **fields}
    form, config, whole = peft_config_of(adapters, found, {**_model_fields(adapters.model, given.get("task_type")), **given})
    flat = _adapter_tensors(form, config, whole, found)
    flat |= {f"{peft.SHARED_PREFIX}{own}": tensor for own, tensor in form.write_shared(found.shared, config).items()}
    flat |= {f"{peft.PREFIX}{own}": tensor for own, tensor in whole.tensors.items()}
    flat |= _embedding_weights(adapters, whole.methods)
    if adapters.merged and (whole.tensors or form.whole or any(_BASE in key for key in flat)):
        raise CheckpointError(
            f"Adapter {name!r} is written with weights of the base model, and {', '.join(map(repr, adapters.merged))} is merged.",
            why="The weights that the model has now are not the base model's.",
            hint="adapters.unmerge() first.",
            code="adapter-merged",
        )
    return config, flat


def peft_config_of(
    adapters: Adapters, found: Contents, fields: Mapping[str, object] | None = None
) -> tuple[PeftForm, dict[str, object], Whole]:
    """How PEFT writes an adapter, the configuration, and the weights that it holds whole.

    Args:
        adapters: The adapters of the model.
        found: One of them.
        fields: Further fields, such as ``task_type``; they win.

    Raises:
        CheckpointError: ``adapter-unsupported`` for what PEFT has no place for.
    """
    given = dict(fields or {})
    form = _form_of({path: without_bias(method) for path, method in found.methods.items()})
    whole = whole_weights(adapters, found, form, given)
    given |= {name: value for name, value in whole.fields.items() if name in given}
    layers = {path: found.layers[path] for path in whole.methods}
    everywhere = file_paths(adapters.model, [place.path for place in places(adapters.model)]).values()
    if elsewhere := sorted(f"{path} ({class_of(layer)})" for path, layer in layers.items() if class_of(layer) not in form.takes):
        raise CheckpointError(
            f"PEFT's {form.peft_type} is for {', '.join(sorted(form.takes))}; {len(elsewhere)} layers of this adapter are something else.",
            why=f"They are:\n{first_ten(elsewhere)}",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    # PEFT targets an attention, never its output projection, which gets the same settings.
    inside = _attentions_of(whole.methods, layers)
    methods = {path: method for path, method in whole.methods.items() if path not in inside}
    layers = {path: layers[path] for path in methods}
    targets = targets_of(methods, everywhere)
    own: dict[str, object] = {"target_modules": targets, **whole.fields}
    if "fan_in_fan_out" in form.fields:
        # PEFT finds out by itself where a layer is turned round, but not that an attention isn't.
        turned = any(isinstance(layer, LinearLayer) and layer.transposed for layer in layers.values())
        own["fan_in_fan_out"] = turned and not any(isinstance(layer, AttentionLayer) for layer in layers.values())
    own |= form.config(Written(methods, layers, targets, given))
    return form, {**form.defaults, **own, **given}, whole


def _attentions_of(methods: Mapping[str, Method], layers: Mapping[str, Layer]) -> dict[str, str]:
    """The output projection of each adapted attention -> the attention.

    Raises:
        CheckpointError: ``adapter-unsupported`` for one without the other, or with another method.
    """
    found = {path: path.rpartition(".")[0] for path in methods if isinstance(layers[path], ReadLinearLayer)}
    attentions = {path for path in methods if isinstance(layers[path], AttentionLayer)}
    alone = sorted(attentions - set(found.values()))
    for path, target in found.items():
        own, other = methods[path], methods.get(target)
        if not isinstance(own, LoRA) or not isinstance(other, LoRA) or (own.rank, own.bias) != (other.rank, other.bias) or not other.scale:
            alone.append(path)
    if alone:
        raise CheckpointError(
            f"PEFT has one LoRA of one rank for an attention and its output projection together; {alone[0]} is adapted otherwise.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    return found


def _form_of(methods: Mapping[str, Method]) -> PeftForm:
    """The form that most layers are of; the others have to be what any folder can hold beside it."""
    fits = {form.peft_type: sum(isinstance(method, form.methods) for method in methods.values()) for form in FORMS.values()}
    # Norms stand beside any method, and by themselves only where there is none.
    best = max(fits, key=lambda peft_type: (fits[peft_type] > 0, not FORMS[peft_type].whole, fits[peft_type]))
    if not fits[best]:
        names = ", ".join(sorted({method.name for method in methods.values()}))
        raise CheckpointError(
            f"The format 'peft' has no type for an adapter of {names} alone.",
            why=f"It knows {', '.join(sorted(FORMS))}.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    return FORMS[best]


def _model_fields(model: nn.Module, task_type: object) -> dict[str, object]:
    """What PEFT records of the base model: the name it was loaded under, and its class where no task type says how to find it."""
    base = unwrapped(model)
    found = plain_class(base)
    mapping = {"base_model_class": found.__name__, "parent_library": found.__module__}
    return {
        "auto_mapping": mapping if task_type is None else None,
        "base_model_name_or_path": base.__dict__.get("name_or_path") or None,
    }


def _embedding_weights(adapters: Adapters, adapted: Collection[str]) -> dict[str, Tensor]:
    """The base weights of adapted embeddings: PEFT saves them with the adapter where they are targeted by one of the usual names."""
    base = unwrapped(adapters.model)
    ends = [getattr(base, getter)() for getter in ("get_input_embeddings", "get_output_embeddings") if hasattr(base, getter)]
    paths = {path: plain for path, plain in file_paths(adapters.model, adapters.layers).items() if plain in adapted}
    if not ends or not any(path.rpartition(".")[2] in _SAVED_EMBEDDINGS for path in paths):
        return {}
    return {
        f"{peft.PREFIX}{plain}.base_layer.{leaf}": tensor
        for path, plain in paths.items()
        if any(adapters.layers[path] is end for end in ends)
        for leaf, tensor in adapters.layers[path].base_layer.named_parameters()
    }
