"""From a model into a file. Saving is pure: it changes nothing and asks no network."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from onegraph.adapters import Adapters
from onegraph.adapters.walk import places, unwrapped
from onegraph.checkpoint import hashes
from onegraph.checkpoint.atomic import atomic_write, atomic_write_all, check_writable, make_folder
from onegraph.checkpoint.container import cast, serialise, write_bytes
from onegraph.checkpoint.detection import check_format, family_of_model
from onegraph.checkpoint.dialects import diffusers, kohya, native, peft, peft_config
from onegraph.checkpoint.keys import file_paths, first_ten
from onegraph.checkpoint.origin import remembered
from onegraph.errors import AdapterError, CheckpointError
from onegraph.methods import LoRA, Method

logger = logging.getLogger(__name__)

# As PEFT has it: a targeted embedding of these names is saved with the adapter.
_SAVED_EMBEDDINGS = ("embed_tokens", "lm_head")


def save(
    adapters: Adapters,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    format: str = "native",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Save an adapter. The file is written whole or not at all, and the model stays as it is, compiled or not.

    Args:
        adapters: The adapters of a model.
        path: A file; for ``peft`` a folder, which is created.
        name: The adapter, the active one when omitted. ``peft`` writes all of them when omitted: ``default`` into the folder itself, the
            others into folders of their names; one that is named goes into ``path`` itself.
        format: ``native``, ``peft``, ``kohya`` or ``diffusers``.
        dtype: Of the tensors in the file; their own when omitted.
        metadata: Strings for the header; for ``peft`` fields of ``adapter_config.json`` such as ``task_type``.

    Raises:
        CheckpointError: ``adapter-unsupported`` where the format has no place for what the adapter is, ``metadata``, ``adapter-format``.
        AdapterError: ``no-adapter`` or ``unknown-adapter``.
        NumericsError: ``not-finite`` or ``overflow``.
        OutputError: The place can't be written; the old file is still there.
    """
    check_format(format)
    target = Path(path)
    if format == "peft":
        _save_peft(adapters, target, name, dtype, metadata or {})
        return
    check_writable(target)
    strings = _strings(metadata or {})
    if format == "kohya":
        save_kohya({_part_of(adapters): adapters}, target, name=name, dtype=dtype, metadata=strings)
        return
    chosen = _chosen(adapters, name)
    tensors, methods = _contents(adapters, chosen)
    if format == "native":
        flat, own = native.write(chosen, tensors, methods)
        clash = sorted(native.RESERVED_KEYS & strings.keys())
        if clash:
            raise CheckpointError(f"The metadata entry {clash[0]!r} is written by the format itself.", hint="Rename it.", code="metadata")
        strings = {**strings, **own}
    else:
        part = _part_of(adapters)
        _only_lora(methods, "diffusers")
        flat = {
            diffusers.key_of(part, layer, parameter): tensor for layer, values in tensors.items() for parameter, tensor in values.items()
        }
        config = _peft_config(adapters, methods, {})
        kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora", "lora_bias")
        strings = {**strings, **diffusers.adapter_metadata({part: {field: config[field] for field in kept}})}
    data = serialise(cast(flat, dtype, f"adapter {chosen!r}"), strings)
    atomic_write(target, partial(write_bytes, data), num_bytes=len(data))


def save_kohya(
    parts: Mapping[str, Adapters],
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save the adapters of several models as one sd-scripts network file, with its hashes.

    Args:
        parts: ``unet``, ``text_encoder`` -> the adapters of that model.
        path: The file.
        name: The adapter, the active one of each part when omitted.
        dtype: Of every tensor in the file, alpha too; their own when omitted.
        metadata: Strings for the header (``ss_*``, ``modelspec.*``). What readers need is filled in where it is missing.

    Raises:
        CheckpointError: ``adapter-unsupported`` for another method than LoRA, a bias, or a model whose keys are named otherwise.
        AdapterError, NumericsError, OutputError: As :func:`save`.
    """
    target = Path(path)
    check_writable(target)
    prefixes = kohya.prefixes_for(parts)
    tensors: dict[str, torch.Tensor] = {}
    all_methods: list[LoRA] = []
    for part, prefix in prefixes.items():
        adapters = parts[part]
        if family_of_model(unwrapped(adapters.model)) == "Stable Diffusion XL":
            raise CheckpointError(
                "kohya files of SDXL name the UNet's layers in another way, which isn't written yet.",
                hint="Save it with format='diffusers' or format='native'.",
                code="adapter-unsupported",
            )
        layers, methods = _contents(adapters, _chosen(adapters, name))
        loras = _only_lora(methods, "kohya")
        all_methods += loras.values()
        keys = {layer: kohya.module_key(prefix, layer) for layer in layers}
        if len(set(keys.values())) < len(keys):
            raise CheckpointError(
                f"Two layers of the part {part!r} have the same kohya key, because dots become underscores.",
                hint="Save it with format='native'.",
                code="adapter-unsupported",
            )
        for layer, values in layers.items():
            for parameter, tensor in values.items():
                tensors[f"{keys[layer]}.{kohya.PARAMETERS[parameter]}"] = tensor
            own = next(iter(values.values())).dtype
            tensors[f"{keys[layer]}.{kohya.ALPHA}"] = torch.tensor(_plain_alpha(loras[layer]), dtype=own)
        _warn_of_lost_alphas(prefix, loras)
    ready = cast(tensors, dtype, f"the parts {', '.join(prefixes)}")
    strings = {**_network_metadata(parts, all_methods), **_strings(metadata or {})}
    strings |= hashes.network_hashes(ready, strings)
    data = serialise(ready, strings)
    atomic_write(target, partial(write_bytes, data), num_bytes=len(data))


def _warn_of_lost_alphas(prefix: str, loras: Mapping[str, LoRA]) -> None:
    """Diffusers (0.42) loses the alpha of attention projections and of text encoders where it isn't the commonest of the part."""
    alphas = {path: _plain_alpha(method) for path, method in loras.items()}
    values = list(alphas.values())
    common = max(set(values), key=values.count)
    lost = [
        path
        for path, alpha in alphas.items()
        if alpha != common and (prefix in kohya.TEXT_ENCODER_PREFIXES or path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")))
    ]
    if lost:
        logger.warning(
            "%d layers of %s have another alpha than %g, the commonest; diffusers would use %g for them. Other programs read the file as it"
            " is; for diffusers save with format='diffusers'. The first: %s",
            len(lost), prefix, common, common, lost[0],
        )  # fmt: skip


def _save_peft(adapters: Adapters, folder: Path, name: str | None, dtype: torch.dtype | None, fields: Mapping[str, object]) -> None:
    names = list(adapters.names) if name is None else [_chosen(adapters, name)]
    contents: dict[Path, bytes] = {}
    for adapter in names:
        place = folder if name is not None or adapter == "default" else folder / adapter
        tensors, methods = _contents(adapters, adapter)
        loras = _only_lora(methods, "peft")
        kinds = _kinds(adapters, adapter)
        biased = sorted(layer for layer, values in tensors.items() if "up_bias" in values and kinds[layer] == "embedding")
        if biased:
            raise CheckpointError(
                "PEFT has no bias on the adapter of an embedding.",
                why=f"These layers have one:\n{first_ten(biased)}",
                hint="Save it with format='native'.",
                code="adapter-unsupported",
            )
        flat = {
            peft.key_of(layer, kinds[layer], parameter): tensor for layer, values in tensors.items() for parameter, tensor in values.items()
        }
        flat |= _embedding_weights(adapters, adapter)
        contents[place / peft.WEIGHTS_NAME] = serialise(cast(flat, dtype, f"adapter {adapter!r}"), {"format": "pt"})
        given = {**remembered(adapters, adapter), **fields}
        config = _peft_config(adapters, loras, {**_model_fields(adapters.model, given.get("task_type")), **given})
        contents[place / peft.CONFIG_NAME] = peft_config.dump_config(config)
    for place in {path.parent for path in contents}:
        make_folder(place)
    writers = {path: partial(write_bytes, data) for path, data in contents.items()}
    atomic_write_all(writers, num_bytes=sum(map(len, contents.values())))


def _chosen(adapters: Adapters, name: str | None) -> str:
    """The adapter meant: the named one, else the active one."""
    chosen = adapters.active if name is None else name
    if chosen is None:
        raise AdapterError(
            "No adapter is active, so none can be saved without its name.",
            hint=f"Name one: {', '.join(map(repr, adapters.names))}.",
            code="no-adapter",
        )
    if chosen not in adapters.names:
        raise AdapterError(
            f"There is no adapter {chosen!r}.", hint=f"There are: {', '.join(map(repr, adapters.names))}.", code="unknown-adapter"
        )
    return chosen


def _contents(adapters: Adapters, name: str) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Method]]:
    """Tensors and methods of one adapter under the paths that files hold."""
    tensors, methods = adapters.tensors(name), adapters.methods(name)
    _check_padding(adapters, name, tensors)
    paths = file_paths(adapters.model, tensors)
    return {paths[layer]: dict(values) for layer, values in tensors.items()}, {paths[layer]: method for layer, method in methods.items()}


def _check_padding(adapters: Adapters, name: str, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Parameters are padded with zeros to the capacity; where something else stands there, the file would be another adapter."""
    wrong = []
    for path, parameter in adapters.parameters(name).items():
        layer, _, leaf = path.rpartition(".")
        if parameter.shape != tensors[layer][leaf].shape and torch.count_nonzero(parameter) != torch.count_nonzero(tensors[layer][leaf]):
            wrong.append(path)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"Adapter {name!r} has numbers beyond its rank, in {', '.join(wrong[:3])}{more}.",
            why="Its parameters are padded with zeros to the capacity. Something wrote there: it acts, and no file holds it.",
            hint="set weights with load_tensors(name, tensors), which takes tensors of the true rank; or add the adapter with that rank",
            code="beyond-rank",
        )


def _kinds(adapters: Adapters, name: str) -> dict[str, str]:
    paths = file_paths(adapters.model, adapters.tensors(name))
    return {plain: adapters.layers[layer].layer.kind for layer, plain in paths.items()}


def _only_lora(methods: Mapping[str, Method], format: str) -> dict[str, LoRA]:
    """The methods as LoRA, checked to mean the same in a format that knows nothing else."""
    loras = {path: method for path, method in methods.items() if isinstance(method, LoRA)}
    other = sorted({method.name for method in methods.values()} - {LoRA.name})
    if other or len(loras) < len(methods):
        raise CheckpointError(
            f"The format {format!r} is written for LoRA; this adapter uses {', '.join(other)}.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    if format == "kohya" and any(method.bias for method in loras.values()):
        raise CheckpointError(
            "kohya files have no place for the bias of this adapter.",
            why="It was made with LoRA(bias=True).",
            hint="Save it with format='peft' or format='native'.",
            code="adapter-unsupported",
        )
    return loras


def _plain_alpha(method: LoRA) -> float:
    """The alpha with which alpha / rank is this method's scale."""
    return method.scale * method.rank if method.rslora or method.alpha is None else float(method.alpha)


def _peft_config(adapters: Adapters, methods: Mapping[str, Method], fields: Mapping[str, object]) -> dict[str, object]:
    loras = _only_lora(methods, "peft")
    mixed = len({method.rslora for method in loras.values()}) > 1
    if len({(method.bias, method.input_dropout) for method in loras.values()}) > 1:
        raise CheckpointError(
            "A PEFT configuration has one lora_bias and one lora_dropout for all layers; the layers of this adapter differ.",
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    first = next(iter(loras.values()))
    everywhere = [place.path for place in places(adapters.model)]
    return peft_config.config_of(
        {path: method.rank for path, method in loras.items()},
        {path: _plain_alpha(method) if mixed or method.alpha is None else float(method.alpha) for path, method in loras.items()},
        file_paths(adapters.model, everywhere).values(),
        dropout=first.input_dropout,
        rslora=first.rslora and not mixed,
        lora_bias=first.bias,
        init=first.init,
        extra=fields,
    )


def _model_fields(model: nn.Module, task_type: object) -> dict[str, object]:
    """What PEFT records of the base model: the name it was loaded under, and its class where no task type says how to find it."""
    base = unwrapped(model)
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return {
        "auto_mapping": mapping if task_type is None else None,
        "base_model_name_or_path": base.__dict__.get("name_or_path") or None,
    }


def _embedding_weights(adapters: Adapters, name: str) -> dict[str, torch.Tensor]:
    """The base weights of adapted embeddings: PEFT saves them with the adapter where they are targeted by one of the usual names."""
    base = unwrapped(adapters.model)
    ends = [getattr(base, getter)() for getter in ("get_input_embeddings", "get_output_embeddings") if hasattr(base, getter)]
    paths = file_paths(adapters.model, adapters.methods(name))
    if not ends or not any(path.rpartition(".")[2] in _SAVED_EMBEDDINGS for path in paths):
        return {}
    return {
        f"{peft.PREFIX}{plain}.base_layer.{leaf}": tensor
        for path, plain in paths.items()
        if any(adapters.layers[path] is end for end in ends)
        for leaf, tensor in adapters.layers[path].base_layer.named_parameters()
    }


def _part_of(adapters: Adapters) -> str:
    """Which part of a pipeline a model is, by the names of its layers."""
    for part, starts in (("unet", ("down_blocks.", "mid_block.", "up_blocks.")), ("text_encoder", ("encoder.", "text_model."))):
        if all(path.startswith(starts) for path in file_paths(adapters.model, adapters.layers).values()):
            return part
    raise CheckpointError(
        f"Only UNets and CLIP text encoders can be saved in this format, not {type(unwrapped(adapters.model)).__name__}.",
        why=f"Its adapted layers are:\n{first_ten(adapters.layers)}",
        hint="Save it with format='native' or format='peft'.",
        code="adapter-unsupported",
    )


def _network_metadata(parts: Mapping[str, Adapters], methods: list[LoRA]) -> dict[str, str]:
    """The entries without which readers of network files don't know what they have."""
    ranks = [method.rank for method in methods]
    rank = max(set(ranks), key=ranks.count)
    alpha = next(_plain_alpha(method) for method in methods if method.rank == rank)
    families = {family_of_model(unwrapped(adapters.model)) for adapters in parts.values()}
    second = "Stable Diffusion 2.x" in families
    return {
        "ss_v2": str(second),
        "ss_base_model_version": "sd_v2" if second else "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(peft_config.whole(alpha)),
        "ss_network_args": "{}",
    }


def _strings(metadata: Mapping[str, object]) -> dict[str, str]:
    wrong = [f"{key} is of type {type(value).__name__}" for key, value in metadata.items() if not isinstance(value, str)]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} metadata entries are no strings.",
            why=f"A safetensors header holds strings only:\n{first_ten(wrong)}",
            hint="Turn numbers into text with str(), anything else with json.dumps().",
            code="metadata",
        )
    return {key: str(value) for key, value in metadata.items()}
