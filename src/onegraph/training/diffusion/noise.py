"""The noise schedule, noising, targets, losses and loss weights. All randomness comes from a generator that is passed in.

Shapes, here and below: B samples, C latent channels, H x W latent pixels, T timesteps of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from onegraph.errors import ConfigurationError, ModelFileError

if TYPE_CHECKING:
    from onegraph.training.diffusion.configuration import LossSettings

PREDICTIONS = ("epsilon", "v_prediction")
_LARGEST_SNR = 1000.0  # what the field's programs cut SNR to in the weights that divide by it or by SNR + 1


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """How much signal and noise each timestep has: x_t = signal_t x_0 + sigma_t noise, with signal^2 + sigma^2 = 1.

    Shapes:
        signal: (T,) fp32, sqrt of the cumulative product of alphas.
        sigma: (T,) fp32, sqrt(1 - signal^2).
        snr: (T,) fp32, (signal / sigma)^2.

    Args:
        prediction_type: What the model predicts: "epsilon" the noise, "v_prediction" v = signal noise - sigma x_0.

    Source: DDPM (Ho et al. 2020, arXiv 2006.11239), eq. 4; v: Progressive Distillation (Salimans & Ho 2022, arXiv 2202.00512), appendix D.
    """

    signal: Tensor
    sigma: Tensor
    snr: Tensor
    prediction_type: str = "epsilon"

    @classmethod
    def of(
        cls,
        *,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: str = "scaled_linear",
        num_timesteps: int = 1000,
        prediction_type: str = "epsilon",
        zero_terminal_snr: bool = False,
    ) -> NoiseSchedule:
        """The schedule from its betas, computed in float64; the defaults are Stable Diffusion's.

        Args:
            beta_start: Variance of the noise added at the first timestep, 0 to 1.
            beta_end: The same at the last timestep.
            beta_schedule: How the betas go from one to the other: "scaled_linear" (linear in the square root) or "linear".
            num_timesteps: T.
            prediction_type: "epsilon" or "v_prediction".
            zero_terminal_snr: Rescale so that the last timestep has no signal.

        Raises:
            ModelFileError: ``noise-schedule``: another kind of schedule or prediction.
            ConfigurationError: ``zero-terminal-snr``: asked for with epsilon prediction.

        Source: rescaling: Common Diffusion Noise Schedules and Sample Steps are Flawed (Lin et al. 2023, arXiv 2305.08891), algorithm 1.
        """
        if num_timesteps < 2 or not 0 < beta_start <= beta_end < 1:
            what = f"the model's noise schedule has {num_timesteps} timesteps, and betas from {beta_start:g} to {beta_end:g}"
            raise ModelFileError(
                what, why="Betas are between 0 and 1 and don't fall; Stable Diffusion has 1000 of them.", code="noise-schedule"
            )
        if beta_schedule == "scaled_linear":
            betas = torch.linspace(beta_start**0.5, beta_end**0.5, num_timesteps, dtype=torch.float64) ** 2
        elif beta_schedule == "linear":
            betas = torch.linspace(beta_start, beta_end, num_timesteps, dtype=torch.float64)
        else:
            known = "It can be scaled_linear or linear."
            raise ModelFileError(f"the model's noise schedule is {beta_schedule!r}", why=known, code="noise-schedule")
        return cls._from_betas(betas, prediction_type, zero_terminal_snr)

    @classmethod
    def _from_betas(cls, betas: Tensor, prediction_type: str, zero_terminal_snr: bool) -> NoiseSchedule:
        """The tables from float64 betas."""
        if prediction_type not in PREDICTIONS:
            why = "It can be epsilon or v_prediction."
            raise ModelFileError(f"the model's prediction type is {prediction_type!r}", why=why, code="noise-schedule")
        signal = (1 - betas).cumprod(0).sqrt()
        if zero_terminal_snr:
            if prediction_type == "epsilon":
                raise ConfigurationError(
                    "zero_terminal_snr with a model that predicts the noise (epsilon)",
                    why="At the last timestep the input is the noise itself: there is nothing to learn there.",
                    hint="train a v-prediction model with --v_parameterization, or leave out --zero_terminal_snr",
                    code="zero-terminal-snr",
                )
            first, last = signal[0], signal[-1]
            signal = (signal - last) * (first / (first - last))
        sigma = (1 - signal**2).sqrt()
        snr = (signal / sigma) ** 2
        return cls(signal=signal.float(), sigma=sigma.float(), snr=snr.float(), prediction_type=prediction_type)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None = None, *, prediction_type: str | None = None, zero_terminal_snr: bool = False
    ) -> NoiseSchedule:
        """The schedule that a diffusers ``scheduler_config.json`` describes.

        Args:
            config: The file's content; fields that are not there are Stable Diffusion's.
            prediction_type: Wins over the file's.
            zero_terminal_snr: Rescale even where the file doesn't ask for it.

        Raises:
            ModelFileError: ``noise-schedule``.
            ConfigurationError: ``zero-terminal-snr``.
        """
        config = config or {}
        prediction = prediction_type or str(config.get("prediction_type", "epsilon"))
        zero = zero_terminal_snr or bool(config.get("rescale_betas_zero_snr", False))
        if config.get("trained_betas") is not None:
            return cls._from_betas(torch.tensor(config["trained_betas"], dtype=torch.float64), prediction, zero)
        return cls.of(
            beta_start=float(config.get("beta_start", 0.00085)),
            beta_end=float(config.get("beta_end", 0.012)),
            beta_schedule=str(config.get("beta_schedule", "scaled_linear")),
            num_timesteps=int(config.get("num_train_timesteps", 1000)),
            prediction_type=prediction,
            zero_terminal_snr=zero,
        )

    @property
    def num_timesteps(self) -> int:
        """T."""
        return self.signal.shape[0]

    def to(self, device: torch.device | str) -> NoiseSchedule:
        """The same schedule with its tables on a device."""
        signal, sigma, snr = (table.to(device) for table in (self.signal, self.sigma, self.snr))
        return NoiseSchedule(signal=signal, sigma=sigma, snr=snr, prediction_type=self.prediction_type)

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t = signal_t x_0 + sigma_t noise.

        Shapes: latents, noise, result (B, C, H, W) of the latents' dtype; timesteps (B,) int64.
        """
        signal, sigma = (_per_sample(table[timesteps], latents) for table in (self.signal, self.sigma))
        return signal * latents + sigma * noise

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the model should predict: the noise, or v = signal_t noise - sigma_t x_0.

        Shapes: latents, noise, result (B, C, H, W) of the latents' dtype; timesteps (B,) int64.
        """
        if self.prediction_type == "epsilon":
            return noise
        signal, sigma = (_per_sample(table[timesteps], latents) for table in (self.signal, self.sigma))
        return signal * noise - sigma * latents


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """(B,) as (B, 1, 1, 1) on the device and in the dtype of another tensor."""
    return values.to(device=like.device, dtype=like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, drawn where the generator is, so that a seed means the same on every device."""
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(device=like.device, dtype=like.dtype)


def _uniform(generator: torch.Generator) -> float:
    """One number from 0 to 1."""
    return float(torch.rand((), generator=generator, device=generator.device, dtype=torch.float64))


def draw_noise(latents: Tensor, settings: LossSettings, generator: torch.Generator) -> Tensor:
    """The noise of a batch, with its offset and its coarser levels where they are on.

    Shapes: latents and result (B, C, H, W), dtype kept.

    Source: noise offset: Guttenberg 2023, crosslabs.org "Diffusion with Offset Noise"; coarser levels: Whitaker 2023,
        "Multi-Resolution Noise for Diffusion Model Training" (scaled back to unit deviation over the batch, as there).
    """
    noise = _normal(tuple(latents.shape), latents, generator)
    if settings.noise_offset is not None:
        noise = noise + _offset(latents, settings, generator)
    if settings.multires_noise_iterations is not None:
        noise = _with_coarser_levels(noise, settings.multires_noise_iterations, settings.multires_noise_discount, generator)
    return noise


def _offset(latents: Tensor, settings: LossSettings, generator: torch.Generator) -> Tensor:
    """(B, C, 1, 1): one number a channel, scaled by noise_offset."""
    strength: float | Tensor = settings.noise_offset or 0.0
    if settings.noise_offset_random_strength:
        strength = strength * _uniform(generator)
    if settings.adaptive_noise_scale is not None:
        strength = (strength + settings.adaptive_noise_scale * latents.mean(dim=(2, 3), keepdim=True).abs()).clamp(min=0)
    return strength * _normal((*latents.shape[:2], 1, 1), latents, generator)


def _with_coarser_levels(noise: Tensor, levels: int, discount: float, generator: torch.Generator) -> Tensor:
    """Noise plus upsampled noise of ever smaller sizes, each level weaker by the discount; unit deviation again."""
    height, width = noise.shape[2:]
    for level in range(levels):
        shrink = (2 + 2 * _uniform(generator)) ** level  # each level is 2 to 4 times smaller than the last
        size = max(1, int(height / shrink)), max(1, int(width / shrink))
        coarse = _normal((*noise.shape[:2], *size), noise, generator)
        noise = noise + discount**level * functional.interpolate(coarse, size=(height, width), mode="bilinear")
        if 1 in size:
            break
    return noise / noise.std()


def perturb(noise: Tensor, settings: LossSettings, generator: torch.Generator) -> Tensor:
    """The noise that goes into the input: the same noise, or with input perturbation noise + gamma more noise. The target keeps the old.

    Shapes: noise and result (B, C, H, W), dtype kept.

    Source: Input Perturbation Reduces Exposure Bias in Diffusion Models (Ning et al. 2023, arXiv 2301.11706), eq. 9.
    """
    if settings.ip_noise_gamma is None:
        return noise
    strength = settings.ip_noise_gamma * (_uniform(generator) if settings.ip_noise_gamma_random_strength else 1.0)
    return noise + strength * _normal(tuple(noise.shape), noise, generator)


def draw_timesteps(num_samples: int, schedule: NoiseSchedule, settings: LossSettings, generator: torch.Generator) -> Tensor:
    """Timesteps, uniform from min_timestep to max_timestep - 1.

    Shapes: result (num_samples,) int64, on the schedule's device.

    Raises:
        ConfigurationError: ``bad-value``: the range goes past the schedule's end.
    """
    low = settings.min_timestep or 0
    high = schedule.num_timesteps if settings.max_timestep is None else settings.max_timestep
    if not 0 <= low < high <= schedule.num_timesteps:
        what = f"timesteps {low} to {high - 1} are asked for, and the model's schedule has 0 to {schedule.num_timesteps - 1}"
        raise ConfigurationError(what, hint="change --min_timestep and --max_timestep", code="bad-value")
    drawn = torch.randint(low, high, (num_samples,), generator=generator, device=generator.device)
    return drawn.to(schedule.signal.device)


def loss_weights(timesteps: Tensor, schedule: NoiseSchedule, settings: LossSettings) -> Tensor:
    """The factor of each sample's loss; several settings multiply.

    - min_snr_gamma: min(snr, gamma) / snr for epsilon, / (snr + 1) for v
    - scale_v_pred_loss_like_noise_pred: snr / (snr + 1)
    - v_pred_like_loss: 1 + v_pred_like_loss (snr + 1) / snr
    - debiased_estimation_loss: 1 / sqrt(snr) for epsilon, 1 / (snr + 1) for v

    Shapes: timesteps and result (B,), the result fp32.

    Raises:
        ConfigurationError: ``contradiction``: a weight that is defined for the other prediction type.

    Source: min-SNR: Hang et al. 2023, arXiv 2303.09556, section 3.4; debiased: Yu et al. 2023, arXiv 2310.08442.
        The other two are sd-scripts' conventions; SNR is cut to 1000 in all but min-SNR, as there.
    """
    _refuse_other_prediction(schedule, settings)
    is_v = schedule.prediction_type == "v_prediction"
    snr = schedule.snr[timesteps]
    limited = snr.clamp(max=_LARGEST_SNR)
    weights = torch.ones_like(snr)
    if settings.min_snr_gamma is not None:
        weights = weights * snr.clamp(max=settings.min_snr_gamma) / (snr + 1 if is_v else snr)
    if settings.scale_v_pred_loss_like_noise_pred:
        weights = weights * limited / (limited + 1)
    if settings.v_pred_like_loss is not None:
        weights = weights * (1 + settings.v_pred_like_loss * (limited + 1) / limited)
    if settings.debiased_estimation_loss:
        weights = weights * (1 / (limited + 1) if is_v else limited.rsqrt())
    return weights


def _refuse_other_prediction(schedule: NoiseSchedule, settings: LossSettings) -> None:
    """Raise where a weight is asked for that the model's prediction type doesn't have."""
    is_v = schedule.prediction_type == "v_prediction"
    name = "v_pred_like_loss" if settings.v_pred_like_loss is not None and is_v else ""
    if settings.scale_v_pred_loss_like_noise_pred and not is_v:
        name = "scale_v_pred_loss_like_noise_pred"
    if name:
        what = f"--{name} with a model whose prediction type is {schedule.prediction_type}"
        why = "This weight makes one prediction type weigh like the other, which this model already is."
        raise ConfigurationError(what, why=why, hint=f"leave out --{name}", code="contradiction")


def sample_losses(prediction: Tensor, target: Tensor, timesteps: Tensor, schedule: NoiseSchedule, settings: LossSettings) -> Tensor:
    """The loss of each sample: the mean over its elements, in fp32, not yet weighted.

    - l2: d^2; l1: |d|
    - huber: 2 c (sqrt(d^2 + c^2) - c); smooth_l1: 2 (sqrt(d^2 + c^2) - c)
    - c: constant huber_c; exponential huber_c^(t/T); snr (1 - huber_c) / (1 + sigma_t / signal_t)^2 + huber_c; all times huber_scale

    Shapes: prediction, target (B, C, H, W) of any float dtype; timesteps (B,) int64; result (B,) fp32.

    Source: pseudo-Huber loss with a schedule: Khrapov et al. 2024, arXiv 2403.16728.
        sd-scripts leaves huber_scale out of the snr schedule; here it acts on all three.
    """
    difference = prediction.float() - target.float()
    if settings.loss_type == "l2":
        loss = difference**2
    elif settings.loss_type == "l1":
        loss = difference.abs()
    else:
        c = _per_sample(_huber_c(timesteps, schedule, settings), difference)
        # d^2 / (sqrt(d^2 + c^2) + c) is sqrt(d^2 + c^2) - c without the cancellation at small d
        loss = 2 * difference**2 / ((difference**2 + c**2).sqrt() + c)
        if settings.loss_type == "huber":
            loss = c * loss
    return loss.mean(dim=tuple(range(1, loss.dim())))


def _huber_c(timesteps: Tensor, schedule: NoiseSchedule, settings: LossSettings) -> Tensor:
    """(B,): where the loss turns from squared to absolute."""
    c = settings.huber_c
    if settings.huber_schedule == "constant":
        values = torch.full(timesteps.shape, c, device=schedule.signal.device)
    elif settings.huber_schedule == "exponential":
        values = torch.exp(math.log(c) * timesteps.to(schedule.signal) / schedule.num_timesteps)
    else:
        values = (1 - c) / (1 + schedule.sigma[timesteps] / schedule.signal[timesteps]) ** 2 + c
    return values * settings.huber_scale


@dataclass(frozen=True, kw_only=True)
class Noised:
    """One noised batch.

    Shapes:
        latents: (B, C, H, W), the model's input.
        target: (B, C, H, W), what it should predict.
        timesteps: (B,) int64.
        weights: (B,) fp32, the factor of each sample's loss.
    """

    latents: Tensor
    target: Tensor
    timesteps: Tensor
    weights: Tensor


def noised(latents: Tensor, schedule: NoiseSchedule, settings: LossSettings, generator: torch.Generator) -> Noised:
    """Noise a batch: draw noise and timesteps, mix, and say what the model should predict and how much each sample counts.

    Shapes: latents (B, C, H, W), already scaled; dtype kept.

    Raises:
        ConfigurationError: as ``draw_timesteps`` and ``loss_weights``.
    """
    noise = draw_noise(latents, settings, generator)
    timesteps = draw_timesteps(latents.shape[0], schedule, settings, generator)
    mixed = schedule.add_noise(latents, perturb(noise, settings, generator), timesteps)
    weights = loss_weights(timesteps, schedule, settings)
    return Noised(latents=mixed, target=schedule.target(latents, noise, timesteps), timesteps=timesteps, weights=weights)
