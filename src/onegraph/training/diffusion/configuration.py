"""The tree of settings of one training run: a branch a room, a documented field a setting.

Nothing here imports torch: reading flags, printing help and checking settings are instant.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.compile_flags import CompileFlags
from onegraph.training.optimizers import OptimizerSettings as AnyOptimizer
from onegraph.training.schedules import ScheduleSettings
from onegraph.training.settings import range_problems, read_settings, setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The base model and how its text encoder is read."""

    path: str = setting("", "base model: a .safetensors or .ckpt file, a diffusers folder, or a hub name")
    config: str | None = setting(
        None, "for a single file of unusual sizes: a JSON file with unet, vae, text_encoder, scheduler, or a diffusers folder"
    )
    vae: str | None = setting(None, "another VAE: a file or a diffusers folder; the base model's own when absent")
    v2: bool | None = setting(None, "the file must be Stable Diffusion 2.x; found from the file when absent")
    clip_skip: int | None = setting(
        None, "use the text encoder's layer counted from the end, then its final norm (1 is the last)", low=1, high=12
    )
    max_token_length: int = setting(75, "tokens of a caption, start and end not counted", choices=(75, 150, 225))


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The images, their captions, and how they become batches."""

    train_data_dir: str | None = setting(None, "parent of the N_words folders: N repeats, the words are the fallback caption")
    reg_data_dir: str | None = setting(None, "parent of the N_words folders with regularisation images")
    resolution: tuple[int, int] = setting((512, 512), "width, height in pixels, both divisible by 8", low=64, high=8192)
    batch_size: int = setting(1, "images in a batch", low=1)
    caption_extension: str = setting(".caption", "file name ending of the caption beside an image")
    caption_separator: str = setting(",", "what stands between the tags of a caption")
    shuffle_caption: bool = setting(False, "put the tags of a caption in another order each time")
    keep_tokens: int = setting(0, "tags at the start that are never moved or dropped", low=0)
    keep_tokens_separator: str | None = setting(None, "text that ends the kept part of a caption")
    caption_prefix: str = setting("", "text put in front of every caption")
    caption_suffix: str = setting("", "text put behind every caption")
    caption_dropout_rate: float = setting(0.0, "share of captions replaced by the empty one", low=0.0, high=1.0)
    caption_dropout_every_n_epochs: int = setting(0, "every Nth epoch has empty captions; 0: none", low=0)
    caption_tag_dropout_rate: float = setting(0.0, "share of tags left out", low=0.0, high=1.0)
    flip: bool = setting(False, "mirror half of the images left to right")
    color_augmentation: bool = setting(False, "change the colours of images a little each time; not supported yet", choices=(False,))
    random_crop: bool = setting(False, "crop at a random place instead of the centre; not with cached latents")
    enable_bucket: bool = setting(False, "group images by aspect instead of cropping all to one size")
    min_bucket_reso: int = setting(256, "shortest side of a bucket in pixels", low=64)
    max_bucket_reso: int = setting(1024, "longest side of a bucket in pixels", low=64)
    bucket_reso_steps: int = setting(64, "bucket sides are multiples of this many pixels; divisible by 8", low=8)
    bucket_no_upscale: bool = setting(False, "never enlarge an image: small images get small buckets")
    cache_latents: bool = setting(False, "encode every image once before training and keep the latents in memory")
    cache_latents_to_disk: bool = setting(False, "keep the latents in files beside the images; implies cache_latents")
    vae_batch_size: int = setting(1, "images encoded at a time while latents are cached", low=1)
    num_workers: int = setting(2, "threads that load images when latents are not cached; 0 counts as 1", low=0, high=256)
    skip_bad_images: bool = setting(False, "go on without images that can't be read, and count them; else the first one stops the run")


NETWORK_MODULES = ("networks.lora", "lycoris.kohya")
ALGORITHMS = ("lora", "locon", "dora", "loha", "lokr", "full", "ia3", "diag-oft", "boft")
PRESETS = ("full", "full-lin", "attn-mlp", "attn-only", "unet-only", "unet-transformer-only", "unet-convblock-only", "ia3")


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The adapters: which modules, which method, how large."""

    module: str = setting("networks.lora", "kind of network: LoRA, or the methods of LyCORIS", choices=NETWORK_MODULES)
    dim: int | None = setting(None, "rank; 4 when absent", low=1, high=4096)
    alpha: float | None = setting(1.0, "the scale is alpha / rank; 0 or none: alpha is the rank", low=0.0)
    dropout: float | None = setting(None, "share of rank activations set to 0 in training", low=0.0, below=1.0)
    rank_dropout: float | None = setting(None, "share of ranks left out per sample in training", low=0.0, below=1.0)
    module_dropout: float | None = setting(None, "chance that a whole adapter is left out in a step", low=0.0, below=1.0)
    conv_dim: int | None = setting(
        None, "rank of 3x3 convolutions; given: resnets and samplers are adapted too; LyCORIS: network_dim when absent", low=1, high=4096
    )
    conv_alpha: float | None = setting(
        None, "alpha of 3x3 convolutions; 1 when conv_dim is given and this is not; LyCORIS: network_alpha when absent", low=0.0
    )
    block_dims: tuple[int, ...] | None = setting(None, "rank of each UNet block, 25 values for SD 1.x and 2.x; 0: no adapter there", low=0)
    block_alphas: tuple[float, ...] | None = setting(None, "alpha of each UNet block, 25 values", low=0.0)
    conv_block_dims: tuple[int, ...] | None = setting(None, "rank of each UNet block's 3x3 convolutions, 25 values", low=0)
    conv_block_alphas: tuple[float, ...] | None = setting(None, "alpha of each UNet block's 3x3 convolutions, 25 values", low=0.0)
    algo: str = setting("lora", "LyCORIS: the method; locon is lora, dora is lora with dora_wd=True", choices=ALGORITHMS)
    preset: str = setting("full", "LyCORIS: which modules are adapted", choices=PRESETS)
    dora_wd: bool = setting(False, "LyCORIS: train the magnitude of each output feature apart, DoRA; with algo=lora")
    rs_lora: bool = setting(False, "LyCORIS: the scale is alpha / sqrt(rank)")
    use_tucker: bool = setting(False, "LyCORIS: a core tensor in 3x3 convolutions; with algo=loha and algo=lokr")
    factor: int = setting(-1, "LyCORIS: size of LoKr's first matrix where it divides; -1: near the square root", low=-1)
    decompose_both: bool = setting(False, "LyCORIS: LoKr's first matrix may be two factors too")
    full_matrix: bool = setting(False, "LyCORIS: LoKr's two matrices are whole")
    unbalanced_factorization: bool = setting(False, "LyCORIS: LoKr's first matrix has the larger part of the output features")
    rescaled: bool = setting(False, "LyCORIS: a gain of each output feature beside the rotation; with algo=diag-oft and algo=boft")
    train_norm: bool = setting(False, "LyCORIS: train the norms of the adapted parts too")
    arguments: tuple[str, ...] = setting((), "more settings of the network, name=value with blanks between: conv_dim=4 conv_alpha=1")
    train_unet: bool = setting(True, "adapt the UNet")
    train_text_encoder: bool = setting(True, "adapt the text encoder")
    weights: str | None = setting(None, "adapter file to start from")
    dim_from_weights: bool = setting(False, "take each module's rank and alpha from weights")
    scale_weight_norms: float | None = setting(
        None, "after each step, scale down adapters whose weight change has a larger norm", above=0.0
    )

    @property
    def rank(self) -> int:
        """The rank, its default filled in."""
        return 4 if self.dim is None else self.dim

    @property
    def effective_alpha(self) -> float:
        """The alpha, 0 and none read as the rank."""
        return float(self.alpha) if self.alpha else float(self.rank)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(AnyOptimizer):
    """The optimizer, its learning rates and its arguments."""

    unet_lr: float | None = setting(None, "learning rate of the UNet's adapters; learning_rate when absent", low=0.0, high=1e6)
    text_encoder_lr: float | None = setting(
        None, "learning rate of the text encoder's adapters; learning_rate when absent", low=0.0, high=1e6
    )
    loraplus_lr_ratio: float | None = setting(None, "learning rate of the up matrices over that of the down matrices (LoRA+)", above=0.0)
    loraplus_unet_lr_ratio: float | None = setting(None, "the same, for the UNet only", above=0.0)
    loraplus_text_encoder_lr_ratio: float | None = setting(None, "the same, for the text encoder only", above=0.0)
    down_lr_weight: tuple[float, ...] | None = setting(None, "learning-rate factor of each of the 12 input blocks; 0: not trained", low=0.0)
    mid_lr_weight: float | None = setting(None, "learning-rate factor of the middle block; 0: not trained", low=0.0)
    up_lr_weight: tuple[float, ...] | None = setting(None, "learning-rate factor of each of the 12 output blocks; 0: not trained", low=0.0)
    block_lr_zero_threshold: float = setting(0.0, "blocks whose learning-rate factor is not above this get no adapter", low=0.0)

    @property
    def block_lr_weights(self) -> tuple[float, ...] | None:
        """Learning-rate factor of each of the 25 UNet blocks, 12 down, 1 middle, 12 up; None when none was given."""
        if self.down_lr_weight is None and self.mid_lr_weight is None and self.up_lr_weight is None:
            return None
        ones = (1.0,) * 12
        middle = 1.0 if self.mid_lr_weight is None else self.mid_lr_weight
        weights = (*(self.down_lr_weight or ones), middle, *(self.up_lr_weight or ones))
        return tuple(0.0 if weight <= self.block_lr_zero_threshold else weight for weight in weights)

    @property
    def unet_rate(self) -> float:
        """The learning rate of the UNet's adapters."""
        return self.rate if self.unet_lr is None else self.unet_lr

    @property
    def text_encoder_rate(self) -> float:
        """The learning rate of the text encoder's adapters."""
        return self.rate if self.text_encoder_lr is None else self.text_encoder_lr

    def further_rates(self, *, one_rate: bool) -> Mapping[str, float]:
        """Ratios, block factors and the rates of the two parts."""
        names = [f"loraplus_{part}lr_ratio" for part in ("", "unet_", "text_encoder_")]
        names += ["down_lr_weight", "mid_lr_weight", "up_lr_weight"]
        if not (one_rate and self.unet_rate == self.text_encoder_rate):
            names += ["unet_lr", "text_encoder_lr"]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Noise, targets and loss weights."""

    v_parameterization: bool | None = setting(None, "the model predicts v; as the model's files say when absent")
    prior_loss_weight: float = setting(1.0, "weight of regularisation images", low=0.0)
    loss_type: str = setting("l2", "loss per element", choices=("l1", "l2", "huber", "smooth_l1"))
    huber_schedule: str = setting("snr", "how huber_c follows the timestep", choices=("constant", "exponential", "snr"))
    huber_c: float = setting(0.1, "where huber and smooth_l1 turn from squared to absolute", above=0.0)
    huber_scale: float = setting(1.0, "factor of huber_c", above=0.0)
    min_snr_gamma: float | None = setting(None, "weight min(snr, gamma)/snr, or over snr + 1 for v; 5 is usual", above=0.0)
    debiased_estimation_loss: bool = setting(False, "weight 1/sqrt(snr), or 1/(snr + 1) for v")
    scale_v_pred_loss_like_noise_pred: bool = setting(False, "weight snr/(snr + 1): v predictions weigh like noise predictions")
    v_pred_like_loss: float | None = setting(None, "weight 1 + this * (snr + 1)/snr on noise predictions", above=0.0)
    noise_offset: float | None = setting(
        None, "standard deviation of noise that is the same all over a channel; .05 to .1 is usual", above=0.0
    )
    noise_offset_random_strength: bool = setting(False, "draw the strength between 0 and noise_offset")
    adaptive_noise_scale: float | None = setting(None, "add this times the latents' absolute mean to noise_offset")
    multires_noise_iterations: int | None = setting(None, "levels of multi-resolution noise; 6 to 10 is usual", low=1, high=64)
    multires_noise_discount: float = setting(0.3, "strength of each coarser level over the last", above=0.0, high=1.0)
    ip_noise_gamma: float | None = setting(None, "input perturbation: extra noise in the input only; .1 is usual", above=0.0)
    ip_noise_gamma_random_strength: bool = setting(False, "draw the strength between 0 and ip_noise_gamma")
    zero_terminal_snr: bool = setting(False, "rescale the noise schedule so that the last timestep is pure noise")
    min_timestep: int | None = setting(None, "first timestep that is drawn; 0 when absent", low=0, high=999)
    max_timestep: int | None = setting(None, "one past the last timestep that is drawn; 1000 when absent", low=1, high=1000)


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Which number formats the run computes in. Adapters are kept in fp32, and so is the VAE."""

    mixed_precision: str | None = setting(None, "autocast: as accelerate is configured when absent", choices=("no", "fp16", "bf16"))
    allow_fp16_on_cpu: bool = setting(False, "run fp16 on a CPU although bf16 is faster and safer there")


@dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """The files that a run writes."""

    output_dir: str = setting("", "folder for everything that the run writes")
    output_name: str | None = setting(None, "file name without ending; last when absent")
    save_precision: str | None = setting(None, "number format of the saved tensors; float when absent", choices=("float", "fp16", "bf16"))
    save_every_n_epochs: int | None = setting(None, "save after every Nth epoch", low=1)
    save_every_n_steps: int | None = setting(None, "save after every Nth optimizer step", low=1)
    save_n_epoch_ratio: int | None = setting(None, "save at least this many times, at epochs evenly apart", low=1)
    save_last_n_epochs: int | None = setting(None, "keep the files of the last N epochs", low=1)
    save_last_n_epochs_state: int | None = setting(None, "keep the states of the last N epochs; save_last_n_epochs when absent", low=1)
    save_last_n_steps: int | None = setting(None, "remove step files older than N optimizer steps", low=1)
    save_last_n_steps_state: int | None = setting(
        None, "remove step states older than N optimizer steps; save_last_n_steps when absent", low=1
    )
    save_state: bool = setting(False, "save the state to resume from with every file")
    save_state_on_train_end: bool = setting(False, "save the state at the end of the run")
    no_metadata: bool = setting(False, "write only the metadata that readers need")
    training_comment: str | None = setting(None, "free text for the metadata (ss_training_comment)")
    title: str | None = setting(None, "modelspec.title; the output name when absent")
    author: str | None = setting(None, "modelspec.author")
    description: str | None = setting(None, "modelspec.description")
    license: str | None = setting(None, "modelspec.license")
    tags: str | None = setting(None, "modelspec.tags, separated by commas")

    @property
    def name(self) -> str:
        """File name without ending, its default filled in."""
        return self.output_name or "last"


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sample images during training."""

    prompts: str | None = setting(
        None, "file with one prompt a line: prompt --n negative --w width --h height --d seed --s steps --l scale"
    )
    every_n_steps: int | None = setting(None, "sample every Nth optimizer step", low=1)
    every_n_epochs: int | None = setting(None, "sample every Nth epoch; wins over every_n_steps", low=1)
    at_first: bool = setting(False, "sample before the first step too")
    sampler: str = setting(
        "ddim",
        "how sample images are drawn",
        choices=(
            *("ddim", "ddpm", "pndm", "lms", "euler", "euler_a", "heun", "dpm_2", "dpm_2_a", "dpmsolver", "dpmsolver++", "dpmsingle"),
            *("unipc", "k_lms", "k_euler", "k_euler_a", "k_dpm_2", "k_dpm_2_a"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """What the run shows and records."""

    logging_dir: str | None = setting(None, "folder for TensorBoard files; nothing is recorded when absent")
    log_prefix: str | None = setting(None, "text in front of the log folder's time stamp")
    tracker_name: str | None = setting(None, "name of the run inside the log folder; network_train when absent")
    quiet: bool = setting(False, "no progress bar: only the blocks at the start and the end, warnings and errors")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long the run is, how a step is made, and where it starts."""

    max_train_steps: int = setting(1600, "optimizer steps", low=1)
    max_train_epochs: int | None = setting(None, "epochs; wins over max_train_steps", low=1)
    gradient_accumulation_steps: int = setting(1, "batches in an optimizer step; never changes how many steps are made", low=1)
    gradient_checkpointing: bool = setting(False, "compute activations again in backward to save memory")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm; 0: never", low=0.0)
    seed: int | None = setting(None, "seed of everything random; drawn and recorded when absent", low=0, high=2**32 - 1)
    resume: str | None = setting(None, "state folder to go on from")


@dataclass(frozen=True, kw_only=True)
class TrainingConfiguration:
    """Everything that a training run is told.

    Example:
        >>> settings = TrainingConfiguration(run=RunSettings(max_train_steps=10))
        >>> TrainingConfiguration.from_json(settings.to_json()) == settings
        True
    """

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    network: NetworkSettings = NetworkSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    loss: LossSettings = LossSettings()
    precision: PrecisionSettings = PrecisionSettings()
    compile: CompileFlags = field(default_factory=CompileFlags)
    saving: SavingSettings = SavingSettings()
    sampling: SamplingSettings = SamplingSettings()
    logging: LoggingSettings = LoggingSettings()
    run: RunSettings = RunSettings()
    notes: tuple[str, ...] = setting((), "lines to show once at the start: what a flag means here")

    def problems(self, device: str | None = None, *, label: Callable[[str], str] = str) -> list[OnegraphError]:
        """All that is wrong with the settings, at once; empty when nothing is.

        Args:
            device: Kind of device the run will use ("cpu", "cuda"), for the problems that depend on it; None leaves them out.
            label: How a setting is called in the messages: "run.seed" -> "--seed".
        """
        from onegraph.training.diffusion.contradictions import contradictions

        return [*range_problems(self, label), *contradictions(self, device, label)]

    def check(self, device: str | None = None) -> None:
        """Raise all problems as one error.

        Raises:
            ConfigurationError: what ``problems`` found.
        """
        found = self.problems(device)
        if found:
            raise ConfigurationError.collected(found)

    def to_json(self) -> str:
        """The settings as JSON, for state files."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainingConfiguration:
        """The settings that ``to_json`` wrote; fields that are not there keep their defaults.

        Raises:
            ConfigurationError: ``settings-file``: not JSON, or a branch, field or value that doesn't fit.
        """
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigurationError("the saved settings are not JSON", why=str(error), code="settings-file") from error
        return read_settings(cls, tree)
