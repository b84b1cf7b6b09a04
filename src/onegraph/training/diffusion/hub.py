"""A base model by its hub name: from the local cache, else from the network, else an error at once."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from onegraph.errors import ModelFileError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CONFIGURATIONS = ["model_index.json", "*/config.json", "scheduler/*", "tokenizer/*"]
WEIGHT_NAMES = {
    "unet": ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    "vae": ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    "text_encoder": ("model.safetensors", "pytorch_model.bin"),
}


def is_hub_name(name: str) -> bool:
    """Whether ``name`` could be ``owner/model``, and not a file: it has one slash and no suffix of a model file."""
    return HUB_NAME.fullmatch(name) is not None and not name.endswith((".safetensors", ".ckpt", ".pt", ".pth", ".bin"))


def download(name: str, *, timeout_seconds: float = 5.0) -> Path:
    """The local folder of a hub model, downloaded once.

    Args:
        name: ``owner/model``.
        timeout_seconds: How long to wait for the hub's first answer; it is asked once.

    Raises:
        ModelFileError: ``hub-unreachable``, ``hub-not-found``, ``hub-gated``, ``hub-not-diffusers``.
    """
    cached = _cached(name)
    if cached is not None:
        return cached
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(name, "HF_HUB_OFFLINE is set, and the model is not in the local cache.")
    try:
        listed = HfApi(endpoint=constants.ENDPOINT).model_info(name, timeout=timeout_seconds).siblings or []
    except GatedRepoError as error:
        raise ModelFileError(
            f"{name} is gated on the hub",
            why="Its owner gives it only to accounts that accepted the terms.",
            hint="Accept them on the model's page, then run `hf auth login`.",
            code="hub-gated",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelFileError(
            f"{name} is neither a path on this machine nor a model on the hub",
            why="There is no such file or folder, and the hub knows no model of that name (or it is private).",
            hint="Check the spelling, or run `hf auth login` for a private model.",
            code="hub-not-found",
        ) from error
    except HfHubHTTPError as error:
        raise _unreachable(name, f"The hub answered: {error}") from error
    except Exception as error:
        # The client raises its transport's own exceptions, which differ between its versions.
        raise _unreachable(name, f"The hub can't be reached: {error}") from error
    files = {entry.rfilename for entry in listed}
    chosen = [_chosen(files, part, names) for part, names in WEIGHT_NAMES.items()]
    if "model_index.json" not in files or None in chosen:
        single = sorted(file for file in files if file.endswith((".safetensors", ".ckpt")) and "/" not in file)
        raise ModelFileError(
            f"{name} is no Stable Diffusion model in diffusers' layout",
            why="It lacks model_index.json or the weights of unet, vae or text_encoder.",
            hint=f"Download one of its files and pass its path: {', '.join(single[:3])}." if single else "Choose another model.",
            code="hub-not-diffusers",
        )
    try:
        return Path(snapshot_download(name, allow_patterns=[*CONFIGURATIONS, *(file for file in chosen if file)]))
    except Exception as error:
        raise _unreachable(name, f"The download broke off: {error}") from error


def _cached(name: str) -> Path | None:
    """The folder of an earlier download, if it is whole."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception:
        # Not cached; the client's exception for that has changed its name before.
        return None
    whole = all(any((folder / part / file).is_file() for file in names) for part, names in WEIGHT_NAMES.items())
    return folder if whole else None


def _chosen(files: set[str], part: str, names: tuple[str, ...]) -> str | None:
    """The best weights file of one model that the hub lists."""
    return next((f"{part}/{file}" for file in names if f"{part}/{file}" in files), None)


def _unreachable(name: str, why: str) -> ModelFileError:
    return ModelFileError(
        f"{name} is not a path on this machine, and it can't be fetched from the hub",
        why=why,
        hint="Download the model elsewhere and pass its folder or its .safetensors file; everything else works offline.",
        code="hub-unreachable",
    )
