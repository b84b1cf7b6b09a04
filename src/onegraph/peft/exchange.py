"""Adapters as dictionaries and folders of PEFT: read, written, exchanged while the model runs."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapted, Adapters, adapters_of
from onegraph.adapters.walk import places, unwrapped
from onegraph.checkpoint import load
from onegraph.checkpoint.atomic import atomic_write_all, make_folder
from onegraph.checkpoint.base_weights import require_whole
from onegraph.checkpoint.container import cast, read_container, serialise, write_bytes
from onegraph.checkpoint.dialects import peft, peft_config
from onegraph.checkpoint.file import AdapterFile
from onegraph.checkpoint.matching import fit
from onegraph.checkpoint.reading import read
from onegraph.checkpoint.save_peft import peft_contents
from onegraph.errors import AdapterError
from onegraph.peft import repositories
from onegraph.peft.configs import PeftConfig
from onegraph.peft.injection import inject
from onegraph.peft.mistakes import UsageError, as_value_errors
from onegraph.peft.names import Names, paths_in
from onegraph.peft.rows import refuse_base_name
from onegraph.peft.tuner import BaseTuner

_OF_THE_MODEL = ("auto_mapping", "base_model_name_or_path")
_BIASES = ("bias_change", "bias_difference")


class LoadResult(NamedTuple):
    """What didn't go together when tensors were loaded."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def tuner_of(model: nn.Module) -> BaseTuner | None:
    """What holds the adapters of a ``PeftModel``; None for a model that adapters were injected into."""
    found = unwrapped(model)
    inner = found._modules.get("base_model")
    return found if isinstance(found, BaseTuner) else inner if isinstance(inner, BaseTuner) else None


def adapters_and_configs(model: nn.Module) -> tuple[Adapters, dict[str, PeftConfig]]:
    """The adapters of a model, and their configurations.

    Raises:
        UsageError: ``peft-no-adapters``.
    """
    tuner = tuner_of(model)
    base = unwrapped(model) if tuner is None else tuner.model
    adapters = adapters_of(base)
    if adapters is None:
        raise UsageError(
            f"{type(base).__name__} has no adapters", hint="get_peft_model() or inject_adapter_in_model() adds one", code="peft-no-adapters"
        )
    configs: Any = getattr(base, "peft_config", {})
    return adapters, dict(configs)


def inject_adapter_in_model(
    peft_config: PeftConfig,
    model: nn.Module,
    adapter_name: str = "default",
    low_cpu_mem_usage: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Add an adapter to a model in place, without a ``PeftModel`` around it; its Parameters keep our names.

    Args:
        peft_config: What it gets.
        model: It.
        adapter_name: What the adapter is called.
        low_cpu_mem_usage: Without effect.
        state_dict: Its keys say which layers are adapted, in place of ``target_modules``.
    """
    with as_value_errors():
        inject(model, peft_config, adapter_name, only=None if state_dict is None else paths_in(state_dict, peft_config))
    configs: Any = dict(getattr(model, "peft_config", None) or {})
    vars(model)["peft_config"] = {**configs, adapter_name: peft_config}
    return model


# Dictionaries


def get_peft_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None = None,
    adapter_name: str = "default",
    unwrap_compiled: bool = False,
    save_embedding_layers: bool | str = "auto",
) -> dict[str, Tensor]:
    """What a PEFT file holds of one adapter: the adapter's name isn't in the keys, and modules trained whole are there whole.

    Args:
        model: A ``PeftModel``, or a model that adapters were injected into; compiled or not.
        state_dict: The model's state, where it can't be read from the model (sharded over processes).
        adapter_name: Which adapter.
        unwrap_compiled: Without effect: wrappers are always looked through.
        save_embedding_layers: Whether embeddings are in it: True, False, or "auto": those that are adapted.

    Raises:
        UsageError: ``peft-no-adapters``. AdapterError: ``unknown-adapter``.
    """
    _, flat = folder_contents(model, adapter_name, save_embedding_layers, state_dict)
    if tuner_of(model) is not None:
        return flat
    return {key.removeprefix(peft.PREFIX).removeprefix(peft.SHARED_PREFIX): tensor for key, tensor in flat.items()}


def folder_contents(
    model: nn.Module, name: str, embeddings: bool | str = "auto", state: Mapping[str, Any] | None = None
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The configuration and the tensors of the folder of an adapter."""
    with as_value_errors():
        adapters, configs = adapters_and_configs(model)
        adapters.methods(name)
        config = configs.get(name)
        fields = {} if config is None else config.json_fields()
        fields = {key: value for key, value in fields.items() if value is not None or key not in _OF_THE_MODEL}
        written, flat = peft_contents(adapters, name, {**fields, "inference_mode": True})
    if embeddings is not True and embeddings != "auto":
        flat = {key: tensor for key, tensor in flat.items() if not key.endswith(".base_layer.weight")}
    if embeddings is True:
        flat |= _embeddings(adapters)
    if state is not None and config is not None:
        flat |= _from_state(adapters, name, config, flat, state)
    pattern = written.get("rank_pattern")
    if written["peft_type"] == "ADALORA" and isinstance(pattern, dict):
        flat = _without_cut(flat, pattern)
    return written, flat


def _from_state(
    adapters: Adapters, name: str, config: PeftConfig, flat: Mapping[str, Tensor], state: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a file as a state of the whole model has them, for those that are the same in both."""
    found = {}
    for entry in Names(adapters, {name: config}).entries[name]:
        head, _, leaf = entry.name.partition(f".{name}")
        key = f"{peft.SHARED_PREFIX}{head}{leaf}"
        key = key if key in flat else key.removesuffix(".weight")
        value = next((state[own] for prefix in ("base_model.", "") if (own := f"{prefix}{entry.name}") in state), None)
        if key in flat and isinstance(value, Tensor) and value.shape == flat[key].shape:
            found[key] = value
    return found


def _embeddings(adapters: Adapters) -> dict[str, Tensor]:
    """The tables of input and output embeddings that aren't adapted."""
    base: Any = unwrapped(adapters.model)
    ends = [getattr(base, getter)() for getter in ("get_input_embeddings", "get_output_embeddings") if hasattr(base, getter)]
    found: dict[str, Tensor] = {}
    for place in places(adapters.model):
        if not isinstance(place.module, Adapted) and any(place.module is end for end in ends):
            found |= {f"{peft.PREFIX}{place.path}.{leaf}": value.detach() for leaf, value in place.module.named_parameters()}
    return found


def _without_cut(flat: Mapping[str, Tensor], pattern: Mapping[str, list[bool]]) -> dict[str, Tensor]:
    """Without the triplets that AdaLoRA has taken away: what a file with a ``rank_pattern`` holds."""
    found = dict(flat)
    for key, kept in pattern.items():
        head = f"{peft.PREFIX}{key.partition('.lora_E')[0]}"
        mask = torch.tensor(kept)
        for leaf in ("lora_A", "lora_E"):
            found[f"{head}.{leaf}"] = flat[f"{head}.{leaf}"][mask]
        found[f"{head}.lora_B"] = flat[f"{head}.lora_B"][:, mask]
    return found


def set_peft_model_state_dict(
    model: nn.Module,
    peft_model_state_dict: Mapping[str, Tensor],
    adapter_name: str = "default",
    ignore_mismatched_sizes: bool = False,
    low_cpu_mem_usage: bool = False,
) -> LoadResult:
    """Load what ``get_peft_model_state_dict`` gave, or a PEFT file holds, into an adapter that is there; in place, on the same graph.

    Args:
        model: A ``PeftModel``, or a model that adapters were injected into.
        peft_model_state_dict: The tensors.
        adapter_name: Which adapter.
        ignore_mismatched_sizes: Leave out tensors of another shape instead of refusing them.
        low_cpu_mem_usage: Without effect.

    Returns:
        The adapter's keys that weren't given, which keep their values, and the keys that it doesn't have.

    Raises:
        CheckpointError: The tensors don't fit; the code says how. Nothing has changed.
    """
    if not isinstance(peft_model_state_dict, Mapping):
        raise UsageError(
            f"set_peft_model_state_dict() got a {type(peft_model_state_dict).__name__} for tensors",
            hint="a dictionary, such as safetensors.torch.load_file(path) gives",
            code="peft-usage",
        )
    adapters, _ = adapters_and_configs(model)
    fields, present = folder_contents(model, adapter_name)
    plain = tuner_of(model) is None
    given = {_whole_key(key, present) if plain else key: value for key, value in peft_model_state_dict.items()}
    if ignore_mismatched_sizes:
        given = {key: value for key, value in given.items() if key not in present or value.shape == present[key].shape}
    unexpected = sorted(given.keys() - present.keys())
    known = {key: given.get(key, value) for key, value in present.items()}
    with as_value_errors():
        form = peft_config.form_of(fields, Path("state_dict"))
        parsed = peft.parse(known, form, peft_config.checked(fields, form, Path("state_dict")), Path("state_dict"))
        file = AdapterFile(
            Path("state_dict"),
            "peft",
            {},
            {"": parsed.weights},
            {"": parsed.methods},
            fields,
            parsed.base_weights,
            parsed.trained,
            parsed.rewrites,
        )
        placement = fit(file, adapters.model)
        # A bias that is the model's own again isn't in what was read.
        zeros = {
            path: own
            for path, tensors in adapters.tensors(adapter_name).items()
            if (own := {key: torch.zeros_like(value) for key, value in tensors.items() if key in _BIASES})
        }
        tensors = {path: {**zeros.get(path, {}), **placement.tensors.get(path, {})} for path in {**zeros, **placement.tensors}}
        adapters.load_tensors(adapter_name, tensors, partial=True)
    return LoadResult(sorted(present.keys() - given.keys()), unexpected)


def _whole_key(key: str, present: Mapping[str, Tensor]) -> str:
    return next((whole for prefix in (peft.PREFIX, peft.SHARED_PREFIX, "") if (whole := f"{prefix}{key}") in present), key)


def load_peft_weights(
    model_id: str | os.PathLike[str], device: str | None = None, key_mapping: Mapping[str, str] | None = None, **kwargs: Any
) -> dict[str, Tensor]:
    """The tensors of a folder, or of a repository of the Hub.

    Raises:
        CheckpointError: They can't be read.
    """
    refuse_key_mapping(key_mapping)
    options = repositories.download_options(kwargs)
    with as_value_errors():
        folder = repositories.adapter_folder(model_id, subfolder=kwargs.get("subfolder"), **options)
        tensors = read_container(folder / peft.WEIGHTS_NAME).tensors
    return {key: tensor.to(device or "cpu") for key, tensor in tensors.items()}


# Folders


def save_adapters(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    names: list[str],
    *,
    safe: bool = True,
    embeddings: bool | str = "auto",
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write adapters: "default" into the folder itself, the others into folders of their names; all or none.

    Raises:
        OutputError: They can't be written. CheckpointError, NumericsError: They can't be saved as they are.
    """
    files: dict[Path, bytes] = {}
    for name in names:
        place = Path(save_directory) / (name if name != "default" else "")
        config, flat = folder_contents(model, name, embeddings, state)
        require_whole(flat.values(), config["peft_type"])
        ready = cast(flat, None, f"adapter {name!r}")
        files[place / (peft.WEIGHTS_NAME if safe else peft.PICKLED_WEIGHTS_NAME)] = (
            serialise(ready, {"format": "pt"}) if safe else _pickled(ready)
        )
        files[place / peft.CONFIG_NAME] = peft_config.dump_config(config)
    for folder in {path.parent for path in files}:
        make_folder(folder)
    atomic_write_all({path: partial(write_bytes, data) for path, data in files.items()}, num_bytes=sum(map(len, files.values())))


def _pickled(tensors: Mapping[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    return buffer.getvalue()


def put(model: nn.Module, folder: Path, name: str) -> None:
    """Load a folder as an adapter of this name, also in place of one that has other layers or ranks; it is not active then.

    On an error nothing has changed.
    """
    refuse_base_name(name)
    adapters = adapters_of(model)
    if adapters is None or name not in adapters.names:
        load(model, folder, name=name)
        return
    try:
        load(model, folder, name=name)
    except AdapterError as error:
        if error.code != "adapter-exists":
            raise
        fit(read(folder), model)  # all that is wrong with it is found before the old one is gone
        adapters.delete(name)
        load(model, folder, name=name)


def hotswap_adapter(
    model: nn.Module, model_name_or_path: str | os.PathLike[str], adapter_name: str, torch_device: str | None = None, **kwargs: Any
) -> None:
    """Put another adapter in the place of one, under its name, while the model runs: no recompile up to the rank there is room for.

    Other than PEFT's, it takes any method, other ranks, alphas and layers; layers that the new one lacks run as the base model.

    Raises:
        CheckpointError: The folder can't be read or doesn't fit; nothing has changed.
        AdapterError: ``unknown-adapter``, ``merged``.
    """
    adapters, configs = adapters_and_configs(model)
    options = repositories.download_options(kwargs)
    with as_value_errors():
        adapters.methods(adapter_name)
        folder = repositories.adapter_folder(model_name_or_path, subfolder=kwargs.get("subfolder"), **options)
        config = PeftConfig.from_pretrained(str(folder))
        active = adapters.active
        put(adapters.model, folder, adapter_name)
        adapters.use(active)
    config.inference_mode = configs[adapter_name].inference_mode if adapter_name in configs else True
    tuner = tuner_of(model)
    if tuner is not None:
        tuner.register(adapter_name, config)
    else:
        getattr(adapters.model, "peft_config", {})[adapter_name] = config


def refuse_key_mapping(key_mapping: Mapping[str, str] | None) -> None:
    """Raise for keys that are to be renamed.

    Raises:
        UsageError: ``peft-key-mapping``.
    """
    if key_mapping:
        raise UsageError(
            "key_mapping is not honoured",
            why="Layers are matched with the model's own names.",
            hint="rename the keys and load them with set_peft_model_state_dict()",
            code="peft-key-mapping",
        )
