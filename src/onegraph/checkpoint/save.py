"""From a model into a file. Saving is pure: it changes nothing and asks no network."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from onegraph.adapters import Adapters, adapters_of
from onegraph.adapters.walk import plain_class, unwrapped
from onegraph.checkpoint import hashes
from onegraph.checkpoint.atomic import atomic_write, check_writable
from onegraph.checkpoint.container import cast, serialise, write_bytes
from onegraph.checkpoint.contents import chosen_name, contents
from onegraph.checkpoint.detection import check_format, family_of_model
from onegraph.checkpoint.dialects import diffusers, kohya, lycoris, native
from onegraph.checkpoint.dialects.peft_methods.form import whole
from onegraph.checkpoint.dialects.peft_methods.lora import plain_alpha
from onegraph.checkpoint.keys import file_paths, first_ten
from onegraph.checkpoint.origin import started_by
from onegraph.checkpoint.save_peft import peft_config_of, save_peft
from onegraph.errors import CheckpointError
from onegraph.methods import DoRA, LoRA, Method

logger = logging.getLogger(__name__)

# How the paths of a UNet's layers begin.
_UNET_STARTS = ("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_out", "time_embedding.", "conv_norm_out")


def save(
    adapters: Adapters | nn.Module,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    format: str = "native",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Save an adapter. The file is written whole or not at all, and the model stays as it is, compiled or not.

    Args:
        adapters: The adapters of a model, or the model that has them.
        path: A file; for ``peft`` a folder, which is created.
        name: The adapter, the active one when omitted. ``peft`` writes all of them when omitted: ``default`` into the folder itself, the
            others into folders of their names; one that is named goes into ``path`` itself.
        format: ``native``, ``peft``, ``kohya``, ``lycoris`` or ``diffusers``.
        dtype: Of the tensors in the file; their own when omitted.
        metadata: Strings for the header; for ``peft`` fields of ``adapter_config.json`` such as ``task_type``.

    Raises:
        CheckpointError: ``adapter-unsupported`` where the format has no place for what the adapter is, ``metadata``, ``adapter-format``.
        AdapterError: ``no-adapter`` or ``unknown-adapter``.
        ConfigurationError: ``not-a-model``.
        NumericsError: ``not-finite`` or ``overflow``.
        OutputError: The place can't be written; the old file is still there.
    """
    if not isinstance(adapters, Adapters):
        adapters = _attached(adapters)
    check_format(format)
    target = Path(path)
    if format == "peft":
        save_peft(adapters, target, name, dtype, metadata or {})
        return
    check_writable(target)
    strings = _strings(metadata or {})
    started = started_by(adapters, chosen_name(adapters, name))
    if started is not None and format != "native":
        logger.warning("%s is for base weights that %s changed, and the format %r can't say so: keep them beside it", path, started, format)
    if format in ("kohya", "lycoris"):
        save_kohya({_part_of(adapters): adapters}, target, name=name, form=format, dtype=dtype, metadata=strings)
        return
    found = contents(adapters, chosen_name(adapters, name))
    if format == "native":
        flat, own = native.write(found.name, found.tensors, found.methods, found.shared)
        clash = sorted(native.RESERVED_KEYS & strings.keys())
        if clash:
            raise CheckpointError(f"The metadata entry {clash[0]!r} is written by the format itself.", hint="Rename it.", code="metadata")
        strings = {**strings, **own, **({native.STARTED_KEY: started} if started is not None else {})}
    else:
        part = _part_of(adapters)
        _only_lora(found.methods, "diffusers")
        flat = {
            diffusers.key_of(part, layer, parameter): tensor
            for layer, values in found.tensors.items()
            for parameter, tensor in values.items()
        }
        _, config, _ = peft_config_of(adapters, found)
        kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora", "lora_bias")
        strings = {**strings, **diffusers.adapter_metadata({part: {field: config[field] for field in kept}})}
    data = serialise(cast(flat, dtype, f"adapter {found.name!r}"), strings)
    atomic_write(target, partial(write_bytes, data), num_bytes=len(data))


def _attached(model: nn.Module) -> Adapters:
    adapters = adapters_of(model)
    if adapters is None:
        parts = [name for name, part in model.named_modules() if name and adapters_of(part) is not None]
        raise CheckpointError(
            f"{type(model).__name__} has no adapters.",
            hint=f"They are on its part {parts[0]!r}: give that one." if parts else "onegraph.attach(model, ...) first.",
            code="no-adapter",
        )
    return adapters


def save_kohya(
    parts: Mapping[str, Adapters],
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    form: str = "kohya",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save the adapters of several models as one sd-scripts network file, with its hashes.

    Args:
        parts: ``unet``, ``text_encoder`` -> the adapters of that model.
        path: The file.
        name: The adapter, the active one of each part when omitted.
        form: ``kohya``, LoRA alone, which every program reads; ``lycoris``, the methods that LyCORIS has.
        dtype: Of every tensor in the file, alpha too; their own when omitted.
        metadata: Strings for the header (``ss_*``, ``modelspec.*``). What readers need is filled in where it is missing.

    Raises:
        CheckpointError: ``adapter-unsupported`` for what the form has no place for, or a model whose keys are named otherwise.
        AdapterError, NumericsError, OutputError: As :func:`save`.
    """
    target = Path(path)
    check_writable(target)
    prefixes = kohya.prefixes_for(parts)
    tensors: dict[str, torch.Tensor] = {}
    all_methods: list[Method] = []
    for part, prefix in prefixes.items():
        adapters = parts[part]
        if family_of_model(unwrapped(adapters.model)) == "Stable Diffusion XL":
            raise CheckpointError(
                "kohya files of SDXL name the UNet's layers in another way, which isn't written yet.",
                hint="Save it with format='diffusers' or format='native'.",
                code="adapter-unsupported",
            )
        found = contents(adapters, chosen_name(adapters, name))
        loras = _only_lora(found.methods, "kohya") if form == "kohya" else {}
        all_methods += found.methods.values()
        keys = {layer: kohya.module_key(prefix, layer) for layer in found.tensors}
        if len(set(keys.values())) < len(keys):
            raise CheckpointError(
                f"Two layers of the part {part!r} have the same kohya key, because dots become underscores.",
                hint="Save it with format='native'.",
                code="adapter-unsupported",
            )
        for layer, values in found.tensors.items():
            written = lycoris.write(found.methods[layer], values, found.layers[layer], layer)
            tensors |= {f"{keys[layer]}.{ending}": tensor for ending, tensor in written.items()}
        if loras:
            _warn_of_lost_alphas(prefix, loras)
    ready = cast(tensors, dtype, f"the parts {', '.join(prefixes)}")
    strings = {**_network_metadata(parts, all_methods, form), **_strings(metadata or {})}
    strings |= hashes.network_hashes(ready, strings)
    data = serialise(ready, strings)
    atomic_write(target, partial(write_bytes, data), num_bytes=len(data))


def _warn_of_lost_alphas(prefix: str, loras: Mapping[str, LoRA]) -> None:
    """Diffusers (0.42) loses the alpha of attention projections and of text encoders where it isn't the commonest of the part."""
    alphas = {path: plain_alpha(method) for path, method in loras.items()}
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


def _only_lora(methods: Mapping[str, Method], format: str) -> dict[str, LoRA]:
    """The methods as LoRA, checked to mean the same in a format that knows nothing else."""
    loras = {path: method for path, method in methods.items() if isinstance(method, LoRA)}
    other = sorted({method.name for method in methods.values()} - {LoRA.name})
    if other or len(loras) < len(methods):
        raise CheckpointError(
            f"The format {format!r} is written for LoRA; this adapter uses {', '.join(other)}.",
            hint="Save it with format='lycoris', which has more methods, or format='native'.",
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


def _part_of(adapters: Adapters) -> str:
    """Which part of a pipeline a model is, by the names of its layers."""
    for part, starts in (("unet", _UNET_STARTS), ("text_encoder", ("encoder.", "text_model."))):
        if all(path.startswith(starts) for path in file_paths(adapters.model, adapters.layers).values()):
            return part
    raise CheckpointError(
        f"Only UNets and CLIP text encoders can be saved in this format, not {plain_class(unwrapped(adapters.model)).__name__}.",
        why=f"Its adapted layers are:\n{first_ten(adapters.layers)}",
        hint="Save it with format='native' or format='peft'.",
        code="adapter-unsupported",
    )


def _network_metadata(parts: Mapping[str, Adapters], methods: list[Method], form: str) -> dict[str, str]:
    """The entries without which readers of network files don't know what they have."""
    strengths = [(rank, alpha) for method in methods if (rank := getattr(method, "rank", None)) is not None for alpha in [_alpha(method)]]
    ranks = [rank for rank, _ in strengths]
    rank = max(set(ranks), key=ranks.count, default=None)
    alpha = next((alpha for own, alpha in strengths if own == rank), None)
    families = {family_of_model(unwrapped(adapters.model)) for adapters in parts.values()}
    second = "Stable Diffusion 2.x" in families
    return {
        "ss_v2": str(second),
        "ss_base_model_version": "sd_v2" if second else "sd_v1",
        "ss_network_module": "networks.lora" if form == "kohya" else lycoris.NETWORK_MODULE,
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(None if alpha is None else whole(alpha)),
        "ss_network_args": json.dumps({} if form == "kohya" or (name := lycoris.algorithm(methods)) is None else {"algo": name}),
    }


def _alpha(method: Method) -> float | None:
    return plain_alpha(method) if isinstance(method, LoRA | DoRA) else getattr(method, "alpha", None)


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
