"""Where an adapter is: a folder on this machine, or a repository of the Hub that is downloaded into its cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onegraph.checkpoint.dialects import peft
from onegraph.errors import CheckpointError

_OPTIONS = (
    "revision",
    "cache_dir",
    "token",
    "local_files_only",
    "force_download",
    "proxies",
    "etag_timeout",
    "repo_type",
    "use_auth_token",
)


def download_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a download takes."""
    found = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    token = found.pop("use_auth_token", None)
    return {"token": token, **found} if token is not None else found


def config_path(model_id: str | os.PathLike[str], *, subfolder: str | None = None, **options: Any) -> Path:
    """The path of ``adapter_config.json``; downloaded when ``model_id`` is no folder.

    Raises:
        CheckpointError: ``peft-repository``.
    """
    folder = _place(model_id, subfolder)
    if folder.is_dir():
        return folder / peft.CONFIG_NAME
    return _downloaded(model_id, peft.CONFIG_NAME, subfolder, options)


def adapter_folder(model_id: str | os.PathLike[str], *, subfolder: str | None = None, **options: Any) -> Path:
    """The folder with configuration and weights of an adapter; downloaded when ``model_id`` is none.

    Raises:
        CheckpointError: ``peft-repository``.
    """
    folder = _place(model_id, subfolder)
    if folder.is_dir():
        return folder
    config = _downloaded(model_id, peft.CONFIG_NAME, subfolder, options)
    try:
        _downloaded(model_id, peft.WEIGHTS_NAME, subfolder, options)
    except CheckpointError:
        _downloaded(model_id, peft.PICKLED_WEIGHTS_NAME, subfolder, options)
    return config.parent


def _place(model_id: str | os.PathLike[str], subfolder: str | None) -> Path:
    if not isinstance(model_id, str | os.PathLike):
        raise CheckpointError(
            f"A {type(model_id).__name__} was given where the name of a folder or repository belongs.",
            hint='"path/of/folder" or "owner/name"; from_pretrained takes the model first',
            code="peft-repository",
        )
    return Path(model_id) / (subfolder or "")


def _downloaded(model_id: str | os.PathLike[str], name: str, subfolder: str | None, options: Mapping[str, Any]) -> Path:
    from huggingface_hub import hf_hub_download  # a folder needs no network

    try:
        return Path(hf_hub_download(str(model_id), name, subfolder=subfolder, **options))
    except Exception as error:  # the Hub's client raises errors of many kinds, those of its transport included
        raise CheckpointError(
            f"There is no {name} at {str(model_id)!r}.",
            why=f"It is no folder on this machine, and as a repository of the Hub it can't be read: {error}",
            hint="name a folder that save_pretrained wrote, or a repository that exists",
            code="peft-repository",
        ) from error
