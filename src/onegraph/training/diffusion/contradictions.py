"""Settings that don't go together, or that are missing: each becomes one error, all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.diffusion.configuration import TrainingConfiguration

Label = Callable[[str], str]


def contradictions(settings: TrainingConfiguration, device: str | None, label: Label) -> Iterator[OnegraphError]:
    """Every missing setting and every pair that can't both be honoured.

    Args:
        settings: The whole tree.
        device: Kind of device the run will use; None leaves out what depends on it.
        label: How a setting is called in the messages: "run.seed" -> "--seed".
    """
    for check in (_model, _data, _network, _optimizer, _loss, _saving, _sampling):
        yield from check(settings, label)
    if device == "cpu" and settings.precision.mixed_precision == "fp16" and not settings.precision.allow_fp16_on_cpu:
        precision = label("precision.mixed_precision")
        yield ConfigurationError(
            f"{precision} is fp16, and the run is on a CPU",
            why="CPUs compute fp16 slowly, and its narrow range costs accuracy there for nothing.",
            hint=f"use {precision}=bf16, or say {label('precision.allow_fp16_on_cpu')}",
            code="fp16-on-cpu",
        )


def _problem(what: str, why: str, hint: str, code: str = "contradiction") -> OnegraphError:
    return ConfigurationError(what, why=why, hint=hint, code=code)


def _missing(what: str, meaning: str, hint: str) -> OnegraphError:
    return _problem(f"{what} is missing", f"It names the {meaning}.", hint, "missing-setting")


def _model(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    if not settings.model.path:
        yield _missing(label("model.path"), "base model to train on", f"add {label('model.path')}=MODEL.safetensors or a diffusers folder")


def _data(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    data = settings.data
    if not data.train_data_dir:
        yield _missing(label("data.train_data_dir"), "folder with the training images", f"add {label('data.train_data_dir')}=FOLDER")
    width, height = data.resolution
    if width % 8 or height % 8:
        near = f"{max(64, round(width / 8) * 8)},{max(64, round(height / 8) * 8)}"
        why = "The VAE makes one latent of 8 x 8 pixels."
        yield _problem(f"{label('data.resolution')} is {width},{height}: not divisible by 8", why, f"use {near}", "resolution")
    if (data.cache_latents or data.cache_latents_to_disk) and data.random_crop:
        what = f"{label('data.random_crop')} with {label('data.cache_latents')}"
        yield _problem(what, "A cached latent is the same picture every time.", "leave out one of them")
    if data.enable_bucket:
        yield from _buckets(settings, label)
    if data.shuffle_caption is False and data.keep_tokens and not data.caption_tag_dropout_rate:
        what = f"{label('data.keep_tokens')} is {data.keep_tokens}, and nothing moves or drops tags"
        yield _problem(
            what,
            "It has no effect alone.",
            f"add {label('data.shuffle_caption')} or {label('data.caption_tag_dropout_rate')}, or leave it out",
        )


def _buckets(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    data = settings.data
    steps, lowest, highest = label("data.bucket_reso_steps"), label("data.min_bucket_reso"), label("data.max_bucket_reso")
    if data.bucket_reso_steps % 8:
        yield _problem(
            f"{steps} is {data.bucket_reso_steps}: not divisible by 8", "The VAE makes one latent of 8 x 8 pixels.", "64 is usual"
        )
    if data.min_bucket_reso > data.max_bucket_reso:
        yield _problem(f"{lowest} {data.min_bucket_reso} is above {highest} {data.max_bucket_reso}", "No bucket fits between.", "swap them")
    if not data.bucket_no_upscale and min(data.resolution) < data.min_bucket_reso:
        what = f"{lowest} is {data.min_bucket_reso}, and the resolution is {data.resolution[0]},{data.resolution[1]}"
        yield _problem(
            what, "Not even a square bucket of that area fits.", f"use {lowest}={max(64, min(data.resolution) // 2 // 8 * 8)} or less"
        )
    if not data.bucket_no_upscale and max(data.resolution) > data.max_bucket_reso:
        what = f"{highest} is {data.max_bucket_reso}, and the resolution is {data.resolution[0]},{data.resolution[1]}"
        yield _problem(what, "Not even a square bucket of that area fits.", f"use {highest}={max(data.resolution) * 2} or more")


def _network(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    network = settings.network
    if not network.train_unet and not network.train_text_encoder:
        what = f"{label('network.train_unet')} and {label('network.train_text_encoder')}: nothing would be trained"
        yield _problem(what, "Each of the two leaves out what the other trains.", "give at most one of the two")
    if network.dim_from_weights and not network.weights:
        what = f"{label('network.dim_from_weights')} without {label('network.weights')}"
        yield _problem(what, "There is no file to take ranks from.", f"add {label('network.weights')}=FILE")
    if network.module == "lycoris.kohya":
        yield from _lycoris(settings, label)
    elif network.conv_alpha is not None and network.conv_dim is None and network.conv_block_dims is None:
        yield _problem(
            "conv_alpha without conv_dim", "Without conv_dim no 3x3 convolution is adapted.", 'add "conv_dim=4" to --network_args'
        )
    if network.conv_block_alphas and not (network.conv_block_dims or network.conv_dim):
        what = "conv_block_alphas without conv_block_dims or conv_dim"
        yield _problem(what, "No 3x3 convolution would be adapted.", 'add "conv_dim=4" to --network_args')
    for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
        values = getattr(network, name)
        if values is not None and len(values) != 25:
            why = "SD 1.x and 2.x UNets have 25 blocks: 12 down, 1 middle, 12 up."
            yield _problem(f"{name} has {len(values)} values", why, f'give 25 values: --network_args "{name}=4,4,..."', "block-values")


_LORA = ("lora", "locon", "dora")
_PRODUCTS = ("loha", "lokr")
_ALGORITHMS_WITH = {
    "network.dropout": _LORA,
    "network.rank_dropout": (*_LORA, *_PRODUCTS),
    "network.module_dropout": (*_LORA, *_PRODUCTS),
    "network.scale_weight_norms": _LORA,
    "network.dora_wd": _LORA,
    "network.rs_lora": (*_LORA, *_PRODUCTS),
    "network.use_tucker": _PRODUCTS,
    "network.factor": ("lokr",),
    "network.decompose_both": ("lokr",),
    "network.full_matrix": ("lokr",),
    "network.unbalanced_factorization": ("lokr",),
    "network.rescaled": ("diag-oft", "boft"),
    "optimizer.loraplus_lr_ratio": _LORA,
    "optimizer.loraplus_unet_lr_ratio": _LORA,
    "optimizer.loraplus_text_encoder_lr_ratio": _LORA,
}
"""Setting -> the algorithms of LyCORIS that it has a meaning for."""
_NOT_IN_LYCORIS = (
    *(f"network.{name}" for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas")),
    *(f"optimizer.{name}" for name in ("down_lr_weight", "mid_lr_weight", "up_lr_weight")),
)


def _lycoris(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    """What an algorithm has no place for; LyCORIS itself leaves it out and says nothing."""
    algorithm = settings.network.algo
    for path, algorithms in _ALGORITHMS_WITH.items():
        if _is_given(settings, path) and algorithm not in algorithms:
            what = f"{label(path)} with algo={algorithm}"
            yield _problem(what, f"It has a meaning for {', '.join(algorithms)} alone.", "leave it out, or take another algo")
    for path in _NOT_IN_LYCORIS:
        if _is_given(settings, path):
            what = f"{label(path)} with {label('network.module')}=lycoris.kohya"
            yield _problem(what, "It belongs to networks.lora.", f"leave it out, or use {label('network.module')}=networks.lora")
    network = settings.network
    if network.preset.startswith("unet-") and not network.train_unet:
        what = f"preset={network.preset} with {label('network.train_unet')}: nothing would be trained"
        yield _problem(what, "It has no modules of the text encoder.", "use preset=full")


def _is_given(settings: TrainingConfiguration, path: str) -> bool:
    """Whether a setting differs from what it is when nothing is said."""
    branch, _, name = path.partition(".")
    return bool(getattr(getattr(settings, branch), name) != getattr(getattr(TrainingConfiguration(), branch), name))


def _optimizer(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    from onegraph.training.optimizers import optimizer_problems
    from onegraph.training.schedules import schedule_problems

    yield from optimizer_problems(settings.optimizer, label)
    yield from schedule_problems(settings.schedule, settings.optimizer, label)
    for name, count in (("down_lr_weight", 12), ("up_lr_weight", 12)):
        values = getattr(settings.optimizer, name)
        if values is not None and len(values) != count:
            what = f"{name} has {len(values)} values"
            yield _problem(
                what,
                f"SD 1.x and 2.x UNets have {count} such blocks.",
                f'give {count} values: --network_args "{name}=1,1,..."',
                "block-values",
            )


def _loss(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    loss = settings.loss
    if loss.adaptive_noise_scale is not None and loss.noise_offset is None:
        what = f"{label('loss.adaptive_noise_scale')} without {label('loss.noise_offset')}"
        yield _problem(what, "It changes the noise offset, which is off.", f"add {label('loss.noise_offset')}=0.05")
    for name, needs in (("noise_offset_random_strength", "noise_offset"), ("ip_noise_gamma_random_strength", "ip_noise_gamma")):
        if getattr(loss, name) and getattr(loss, needs) is None:
            what = f"{label('loss.' + name)} without {label('loss.' + needs)}"
            yield _problem(what, "There is no strength to draw.", f"add {label('loss.' + needs)}")
    low = 0 if loss.min_timestep is None else loss.min_timestep
    high = 1000 if loss.max_timestep is None else loss.max_timestep
    if low >= high:
        what = f"{label('loss.min_timestep')} is {low} and {label('loss.max_timestep')} is {high}"
        yield _problem(what, "No timestep lies between.", f"make {label('loss.min_timestep')} the smaller one")
    v_flag = label("loss.v_parameterization")
    if loss.v_parameterization is False and (loss.scale_v_pred_loss_like_noise_pred or loss.zero_terminal_snr):
        name = "scale_v_pred_loss_like_noise_pred" if loss.scale_v_pred_loss_like_noise_pred else "zero_terminal_snr"
        yield _problem(
            f"{label('loss.' + name)} without v-prediction", "It is defined for v-prediction models only.", f"add {v_flag}, or leave it out"
        )
    if loss.v_parameterization and loss.v_pred_like_loss is not None:
        what = f"{label('loss.v_pred_like_loss')} with {v_flag}"
        yield _problem(what, "It makes noise prediction weigh like v-prediction, which this already is.", "leave out one of them")


def _saving(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    saving = settings.saving
    if not saving.output_dir:
        yield _missing(label("saving.output_dir"), "folder for the results", f"add {label('saving.output_dir')}=FOLDER")
    if saving.output_name and ("/" in saving.output_name or "\\" in saving.output_name):
        what = f"{label('saving.output_name')} is {saving.output_name!r}"
        yield _problem(what, "It is a file name, not a path.", f"put the folder into {label('saving.output_dir')}", "bad-value")
    by_epoch = saving.save_every_n_epochs or saving.save_n_epoch_ratio
    for name, period, needs in (
        ("save_last_n_epochs", by_epoch, "save_every_n_epochs"),
        ("save_last_n_epochs_state", by_epoch, "save_every_n_epochs"),
        ("save_last_n_steps", saving.save_every_n_steps, "save_every_n_steps"),
        ("save_last_n_steps_state", saving.save_every_n_steps, "save_every_n_steps"),
    ):
        if getattr(saving, name) and not period:
            what = f"{label('saving.' + name)} without {label('saving.' + needs)}"
            yield _problem(what, "Nothing would be saved that could be removed.", f"add {label('saving.' + needs)}, or leave it out")
        if getattr(saving, name) and name.endswith("_state") and not saving.save_state:
            what = f"{label('saving.' + name)} without {label('saving.save_state')}"
            yield _problem(what, "No state would be saved during the run.", f"add {label('saving.save_state')}, or leave it out")


def _sampling(settings: TrainingConfiguration, label: Label) -> Iterator[OnegraphError]:
    sampling = settings.sampling
    period = sampling.every_n_steps or sampling.every_n_epochs or sampling.at_first
    every, prompts = label("sampling.every_n_steps"), label("sampling.prompts")
    if period and not sampling.prompts:
        yield _problem("sample images are asked for, but no prompts are given", "There is nothing to draw.", f"add {prompts}=FILE")
    if sampling.prompts and not period:
        yield _problem(
            f"{prompts} is given, but not when to sample", "No image would be drawn.", f"add {every}=N, or {label('sampling.at_first')}"
        )
