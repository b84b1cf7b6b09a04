"""What a network file says about its training: the ``ss_*`` keys of the field and ``modelspec.*`` (sai_model_spec 1.0.1).

Every value is a string; a setting that was not used is the text ``None``, as readers of these files expect.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from onegraph.training.diffusion.configuration import TrainingConfiguration

MODELSPEC_VERSION = "1.0.1"

ALWAYS = ("ss_v2", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_network_args")

SETTINGS: dict[str, str] = {
    "ss_learning_rate": "optimizer.rate",
    "ss_unet_lr": "optimizer.unet_lr",
    "ss_text_encoder_lr": "optimizer.text_encoder_lr",
    "ss_gradient_checkpointing": "run.gradient_checkpointing",
    "ss_gradient_accumulation_steps": "run.gradient_accumulation_steps",
    "ss_lr_warmup_steps": "schedule.warmup",
    "ss_network_dropout": "network.dropout",
    "ss_clip_skip": "model.clip_skip",
    "ss_max_token_length": "model.max_token_length",
    "ss_cache_latents": "data.cache_latents",
    "ss_noise_offset": "loss.noise_offset",
    "ss_noise_offset_random_strength": "loss.noise_offset_random_strength",
    "ss_multires_noise_iterations": "loss.multires_noise_iterations",
    "ss_multires_noise_discount": "loss.multires_noise_discount",
    "ss_adaptive_noise_scale": "loss.adaptive_noise_scale",
    "ss_ip_noise_gamma": "loss.ip_noise_gamma",
    "ss_ip_noise_gamma_random_strength": "loss.ip_noise_gamma_random_strength",
    "ss_zero_terminal_snr": "loss.zero_terminal_snr",
    "ss_training_comment": "saving.training_comment",
    "ss_max_grad_norm": "run.max_grad_norm",
    "ss_caption_dropout_rate": "data.caption_dropout_rate",
    "ss_caption_dropout_every_n_epochs": "data.caption_dropout_every_n_epochs",
    "ss_caption_tag_dropout_rate": "data.caption_tag_dropout_rate",
    "ss_prior_loss_weight": "loss.prior_loss_weight",
    "ss_min_snr_gamma": "loss.min_snr_gamma",
    "ss_debiased_estimation": "loss.debiased_estimation_loss",
    "ss_scale_weight_norms": "network.scale_weight_norms",
    "ss_loss_type": "loss.loss_type",
    "ss_huber_schedule": "loss.huber_schedule",
    "ss_huber_c": "loss.huber_c",
    "ss_huber_scale": "loss.huber_scale",
    "ss_color_aug": "data.color_augmentation",
    "ss_flip_aug": "data.flip",
    "ss_random_crop": "data.random_crop",
    "ss_shuffle_caption": "data.shuffle_caption",
    "ss_keep_tokens": "data.keep_tokens",
    "ss_enable_bucket": "data.enable_bucket",
    "ss_bucket_no_upscale": "data.bucket_no_upscale",
    "ss_min_bucket_reso": "data.min_bucket_reso",
    "ss_max_bucket_reso": "data.max_bucket_reso",
    "ss_batch_size_per_device": "data.batch_size",
    "ss_resolution": "data.resolution",
    "ss_network_module": "network.module",
    "ss_network_dim": "network.rank",
    "ss_network_alpha": "network.effective_alpha",
}
"""Metadata key -> the setting whose effective value it carries."""

MODELSPEC_SETTINGS: dict[str, str] = {
    "modelspec.author": "saving.author",
    "modelspec.description": "saving.description",
    "modelspec.license": "saving.license",
    "modelspec.tags": "saving.tags",
}

ARCHITECTURES = {
    "sd_v1": "stable-diffusion-v1",
    "sd_v2": "stable-diffusion-v2-512",
    "sd_v2_v": "stable-diffusion-v2-768-v",
    "sdxl_base_v1-0": "stable-diffusion-xl-v1-base",
}


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """One training folder: its name, how often its images repeat, and their captions."""

    name: str
    num_repeats: int
    num_images: int
    captions: Sequence[str] = ()
    regularisation: bool = False


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything about a run that is known before its first step and goes into the file.

    Args:
        configuration: The settings; values that were left open are given by the other fields.
        started_at: Seconds since 1970.
        base_model_version: ``sd_v1``, ``sd_v2``, ``sd_v2_v``, ``sdxl_base_v1-0``.
        base_model_hash: First 8 hex digits, the short hash that old programs show; None for a folder.
        base_model_sha256: Of the whole file; None for a folder.
        prediction_type: ``epsilon`` or ``v_prediction``.
        optimizer: Class and arguments, as one text.
        schedule: Name of the learning-rate schedule, or the dotted path of its class.
        bucket_info: Sizes and the images in each, as ``ss_bucket_info`` has it; None without buckets.
        num_processes: Each of them with a batch of its own.
    """

    configuration: TrainingConfiguration
    session_id: str
    started_at: float
    seed: int
    mixed_precision: str
    base_model_version: str
    base_model_name: str
    base_model_hash: str | None
    base_model_sha256: str | None
    prediction_type: str
    optimizer: str
    schedule: str
    num_steps: int
    num_epochs: int
    num_batches_per_epoch: int
    folders: Sequence[FolderFacts]
    bucket_info: Mapping[str, object] | None = None
    num_processes: int = 1


def training_metadata(run: RunFacts, *, steps: int, epoch: int, now: float) -> dict[str, str]:
    """The metadata of a file written after optimiser step ``steps`` in epoch ``epoch`` (both from 1).

    With ``--no_metadata`` only what programs need to load the file.

    Args:
        now: Seconds since 1970, the time of saving.
    """
    values: dict[str, object] = {key: _setting(run.configuration, path) for key, path in SETTINGS.items()}
    train = [folder for folder in run.folders if not folder.regularisation]
    regularisation = [folder for folder in run.folders if folder.regularisation]
    values |= {
        "ss_v2": run.base_model_version.startswith("sd_v2"),
        "ss_base_model_version": run.base_model_version,
        "ss_network_args": _json(_arguments(run.configuration.network.arguments)),
        "ss_session_id": run.session_id,
        "ss_training_started_at": run.started_at,
        "ss_training_finished_at": now,
        "ss_output_name": run.configuration.saving.name,
        "ss_sd_model_name": run.base_model_name,
        "ss_sd_model_hash": run.base_model_hash,
        "ss_new_sd_model_hash": run.base_model_sha256,
        "ss_optimizer": run.optimizer,
        "ss_lr_scheduler": run.schedule,
        "ss_mixed_precision": run.mixed_precision,
        "ss_seed": run.seed,
        "ss_max_train_steps": run.num_steps,
        "ss_num_train_images": _num_images(train),
        "ss_num_reg_images": _num_images(regularisation),
        "ss_num_batches_per_epoch": run.num_batches_per_epoch,
        "ss_num_epochs": run.num_epochs,
        "ss_total_batch_size": run.configuration.data.batch_size * run.num_processes,
        "ss_dataset_dirs": _json(_folder_table(train)),
        "ss_reg_dataset_dirs": _json(_folder_table(regularisation)),
        "ss_tag_frequency": _json({folder.name: tag_frequency(folder.captions) for folder in train}),
        "ss_bucket_info": _json(run.bucket_info),
        "ss_steps": steps,
        "ss_epoch": epoch,
    }
    if vae := run.configuration.model.vae:
        values["ss_vae_name"] = PurePath(vae).name
    if run.configuration.saving.no_metadata:
        return {key: _storable(text(values[key])) for key in ALWAYS}
    strings = {key: text(value) for key, value in values.items()} | _modelspec(run, now)
    return {key: _storable(value) for key, value in strings.items()}


def _storable(value: str) -> str:
    """Names of files that are no UTF-8, as old archives hold them, in a form that a header can hold."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def tag_frequency(captions: Iterable[str]) -> dict[str, int]:
    """How often each comma-separated part of the captions occurs, in lower case, in order of first appearance."""
    counts = Counter(tag for caption in captions for part in caption.split(",") if (tag := part.strip().lower()))
    return dict(counts)


def text(value: object) -> str:
    """A metadata value as text: tuples as ``(512, 512)``, whole floats with their ``.0``, nothing as ``None``."""
    return value if isinstance(value, str) else str(value)


def _modelspec(run: RunFacts, now: float) -> dict[str, str]:
    settings = run.configuration
    width, height = settings.data.resolution
    # whole seconds in UTC without an offset: the form that the specification shows
    date = datetime.datetime.fromtimestamp(int(now), tz=datetime.UTC).replace(tzinfo=None).isoformat()
    metadata = {
        "modelspec.sai_model_spec": MODELSPEC_VERSION,
        "modelspec.architecture": ARCHITECTURES[run.base_model_version] + "/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": settings.saving.title or settings.saving.name,
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.date": date,
        "modelspec.prediction_type": "v" if run.prediction_type.startswith("v") else "epsilon",
        "modelspec.encoder_layer": text(settings.model.clip_skip or 1),
    }
    for key, path in MODELSPEC_SETTINGS.items():
        if value := _setting(settings, path):
            metadata[key] = str(value)
    lowest, highest = settings.loss.min_timestep, settings.loss.max_timestep
    if lowest is not None or highest is not None:
        metadata["modelspec.timestep_range"] = f"{lowest or 0},{1000 if highest is None else highest}"
    return metadata


def _setting(configuration: TrainingConfiguration, path: str) -> object:
    branch, name = path.split(".")
    return getattr(getattr(configuration, branch), name)


def _arguments(arguments: Iterable[str]) -> dict[str, str]:
    """``name=value`` items as a dict, the values as they were written."""
    return {name: value for name, _, value in (item.partition("=") for item in arguments)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _num_images(folders: Sequence[FolderFacts]) -> int:
    return sum(folder.num_images * folder.num_repeats for folder in folders)


def _folder_table(folders: Sequence[FolderFacts]) -> dict[str, dict[str, int]]:
    return {folder.name: {"n_repeats": folder.num_repeats, "img_count": folder.num_images} for folder in folders}
