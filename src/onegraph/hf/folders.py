"""Folders of adapters, where transformers has folders of whole models: written, and read back to the last bit."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from onegraph.adapters import Adapters, adapters_of
from onegraph.checkpoint import load, save
from onegraph.checkpoint.dialects import peft
from onegraph.checkpoint.origin import started_by
from onegraph.errors import CheckpointError, ConfigurationError
from onegraph.methods import BitFit, Dense, Method, WithBias

# Beside a PEFT file that holds whole weights: the differences from the base that train, as they are. W + d - W isn't d to the last bit.
EXACT = "adapter_state.safetensors"
_DEFAULT = "default"
# What PEFT fills in from the model where a configuration says nothing.
_OF_THE_MODEL = ("auto_mapping", "base_model_name_or_path")


def save_as_adapters(model: nn.Module) -> None:
    """Let ``save_pretrained`` of an adapted model of transformers write its adapters, as PEFT's folders, instead of all weights.

    Without it the base would be written under the names that adapted layers give it, and no program would find its weights again.
    """
    known = sys.modules.get("transformers.modeling_utils")
    if known is not None and isinstance(model, known.PreTrainedModel):
        vars(model)["save_pretrained"] = functools.partial(_save_pretrained, model)


def _save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    **options: Any,
) -> None:
    """Write the adapters; a model that has none any more is written whole, as transformers does."""
    adapters = adapters_of(model)
    if adapters is None:
        type(model).save_pretrained(
            model, save_directory, is_main_process=is_main_process, state_dict=state_dict, push_to_hub=push_to_hub, **options
        )
        return
    if push_to_hub:
        raise ConfigurationError(
            "save_pretrained(push_to_hub=True) of a model with adapters isn't there",
            hint='model.push_to_hub("name/repository") uploads the adapters',
            code="trainer-save",
        )
    if is_main_process:
        write_folders(adapters, save_directory)


def write_folders(adapters: Adapters, folder: str | os.PathLike[str]) -> None:
    """Write all adapters as PEFT's folders: "default" into the folder itself, the others into folders of their names in it.

    Raises:
        CheckpointError, NumericsError: They can't be saved as they are. OutputError: They can't be written.
    """
    for name in adapters.names:
        save(adapters, _place(folder, name), name=name, format="peft", metadata=_fields(adapters.model, name))


def write_exact(adapters: Adapters, folder: str | os.PathLike[str]) -> None:
    """Write what a PEFT file doesn't hold to the last bit; nothing for adapters that have no such part."""
    for name in adapters.names:
        if started_by(adapters, name) is not None or any(map(_added_to_base, adapters.methods(name).values())):
            save(adapters, _place(folder, name) / EXACT, name=name)


def read_folders(adapters: Adapters, folder: str | os.PathLike[str]) -> None:
    """Give every adapter the weights that a folder has for it, in place.

    Raises:
        CheckpointError: ``resume-adapter`` where the folder lacks one; otherwise as ``onegraph.load``.
    """
    found = {name: _weights(folder, name, alone=len(adapters.names) == 1) for name in adapters.names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise CheckpointError(
            f"{os.fspath(folder)} has no adapter {', '.join(map(repr, missing))}.",
            why=f"An adapter is a folder with {peft.CONFIG_NAME}: 'default' the checkpoint itself, others in folders of their names in it.",
            hint="resume from a checkpoint that was written while the model had the same adapters",
            code="resume-adapter",
        )
    active = adapters.active
    for name, path in found.items():
        assert path is not None
        load(adapters.model, path, name=name)
    adapters.use(active)


def _weights(folder: str | os.PathLike[str], name: str, *, alone: bool) -> Path | None:
    """The file with an adapter's exact state, or its folder."""
    places = [_place(folder, name), *([Path(folder)] if alone else [])]
    for place in places:
        if (place / EXACT).is_file():
            return place / EXACT
        if any((place / file).is_file() for file in (peft.WEIGHTS_NAME, peft.PICKLED_WEIGHTS_NAME)):
            return place
    return None


def _place(folder: str | os.PathLike[str], name: str) -> Path:
    return Path(folder) / (name if name != _DEFAULT else "")


def _fields(model: nn.Module, name: str) -> dict[str, object]:
    """The fields of the configuration that the adapter was made from, where there is one."""
    configs: Any = getattr(model, "peft_config", None) or {}
    config = configs.get(name)
    fields = {} if config is None else dict(config.json_fields())
    return {key: value for key, value in fields.items() if value is not None or key not in _OF_THE_MODEL} | {"inference_mode": True}


def can_be_written(adapters: Adapters) -> None:
    """Find out before training whether its adapters can be written.

    Raises:
        CheckpointError: They can't.
    """
    from onegraph.checkpoint.save_peft import peft_contents

    for name in adapters.names:
        peft_contents(adapters, name, _fields(adapters.model, name))


def _added_to_base(method: Method) -> bool:
    """Whether a PEFT file holds a method's tensors added to the base's."""
    return isinstance(method, Dense | BitFit | WithBias)
