"""Noise schedule, noising, targets, losses and weights: against diffusers, and against float64 written out from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from onegraph.errors import ConfigurationError, ModelFileError
from onegraph.training.diffusion.configuration import LossSettings
from onegraph.training.diffusion.noise import (
    NoiseSchedule,
    draw_noise,
    draw_timesteps,
    loss_weights,
    noised,
    perturb,
    sample_losses,
)

EPSILON = NoiseSchedule.of()
V = NoiseSchedule.of(prediction_type="v_prediction")
STEPS = torch.tensor([0, 1, 37, 250, 500, 750, 998, 999])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference_snr(*, zero_terminal: bool = False) -> list[float]:
    """alpha_bar / (1 - alpha_bar) of Stable Diffusion, in plain float64 arithmetic."""
    low, high = math.sqrt(0.00085), math.sqrt(0.012)
    product, bars = 1.0, []
    for step in range(1000):
        product *= 1 - (low + (high - low) * step / 999) ** 2
        bars.append(product)
    if zero_terminal:
        roots = [math.sqrt(bar) for bar in bars]
        bars = [((root - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2 for root in roots]
    return [bar / (1 - bar) for bar in bars]


SNR = torch.tensor(reference_snr(), dtype=torch.float64)


@pytest.mark.parametrize("zero_terminal", [False, True], ids=["plain", "zero-terminal"])
def test_tables_against_float64(zero_terminal: bool) -> None:
    schedule = NoiseSchedule.of(prediction_type="v_prediction", zero_terminal_snr=zero_terminal)
    expected = torch.tensor(reference_snr(zero_terminal=zero_terminal), dtype=torch.float64)
    torch.testing.assert_close(schedule.snr.double(), expected, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(schedule.signal.double(), (expected / (1 + expected)).sqrt(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(schedule.signal**2 + schedule.sigma**2, torch.ones(1000))
    assert (float(schedule.snr[-1]) == 0.0) == zero_terminal


@pytest.mark.parametrize("kind", ["scaled_linear", "linear"])
@pytest.mark.parametrize("zero_terminal", [False, True], ids=["plain", "zero-terminal"])
def test_noising_and_velocity_equal_diffusers(kind: str, zero_terminal: bool) -> None:
    config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": kind, "prediction_type": "v_prediction"}
    schedule = NoiseSchedule.from_config({**config, "rescale_betas_zero_snr": zero_terminal})
    theirs = DDPMScheduler(**config, rescale_betas_zero_snr=zero_terminal)
    latents, noise = torch.randn(2, 1000, 4, 2, 2).unbind(0)
    steps = torch.arange(1000)
    torch.testing.assert_close(schedule.add_noise(latents, noise, steps), theirs.add_noise(latents, noise, steps), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(schedule.target(latents, noise, steps), theirs.get_velocity(latents, noise, steps), rtol=1e-4, atol=1e-5)


def test_trained_betas_of_a_configuration_are_used() -> None:
    schedule = NoiseSchedule.from_config({"trained_betas": [0.1, 0.5], "beta_schedule": "anything"})
    torch.testing.assert_close(schedule.signal**2, torch.tensor([0.9, 0.45]))
    assert schedule.num_timesteps == 2


def test_epsilon_target_is_the_noise() -> None:
    latents, noise = torch.randn(2, 3, 4, 2, 2).unbind(0)
    assert EPSILON.target(latents, noise, torch.tensor([1, 2, 3])) is noise


@pytest.mark.parametrize("config", [{"beta_schedule": "squaredcos_cap_v2"}, {"prediction_type": "sample"}], ids=["betas", "prediction"])
def test_another_schedule_is_refused(config: dict[str, str]) -> None:
    with pytest.raises(ModelFileError) as raised:
        NoiseSchedule.from_config(config)
    assert raised.value.code == "noise-schedule"


@pytest.mark.parametrize(
    "config", [{"num_train_timesteps": -1}, {"num_train_timesteps": 0}, {"beta_start": 0.5}, {"beta_end": 3.0}, {"beta_start": -1.0}]
)
def test_an_impossible_schedule_is_refused(config: dict[str, float]) -> None:
    with pytest.raises(ModelFileError) as caught:
        NoiseSchedule.from_config(config)
    assert caught.value.code == "noise-schedule"


def test_zero_terminal_with_epsilon_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        NoiseSchedule.from_config({}, zero_terminal_snr=True)
    assert raised.value.code == "zero-terminal-snr"


# Loss weights

WEIGHTS = [
    pytest.param(EPSILON, {"min_snr_gamma": 5.0}, lambda snr: snr.clamp(max=5) / snr, id="min-snr-epsilon"),
    pytest.param(V, {"min_snr_gamma": 5.0}, lambda snr: snr.clamp(max=5) / (snr + 1), id="min-snr-v"),
    pytest.param(EPSILON, {"debiased_estimation_loss": True}, lambda snr: 1 / snr.clamp(max=1000).sqrt(), id="debiased-epsilon"),
    pytest.param(V, {"debiased_estimation_loss": True}, lambda snr: 1 / (snr.clamp(max=1000) + 1), id="debiased-v"),
    pytest.param(
        V, {"scale_v_pred_loss_like_noise_pred": True}, lambda snr: snr.clamp(max=1000) / (snr.clamp(max=1000) + 1), id="scale-v-like-noise"
    ),
    pytest.param(
        EPSILON, {"v_pred_like_loss": 0.5}, lambda snr: 1 + 0.5 * (snr.clamp(max=1000) + 1) / snr.clamp(max=1000), id="noise-like-v"
    ),
    pytest.param(
        V,
        {"min_snr_gamma": 5.0, "scale_v_pred_loss_like_noise_pred": True},
        lambda snr: snr.clamp(max=5) / (snr + 1) * snr.clamp(max=1000) / (snr.clamp(max=1000) + 1),
        id="two-multiply",
    ),
    pytest.param(EPSILON, {}, torch.ones_like, id="none"),
]


@pytest.mark.parametrize(("schedule", "settings", "expected"), WEIGHTS)
def test_weights_against_float64(schedule: NoiseSchedule, settings: dict[str, float], expected: object) -> None:
    weights = loss_weights(STEPS, schedule, LossSettings(**settings))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected(SNR[STEPS]), rtol=1e-5, atol=0)  # type: ignore[operator]


def test_weights_are_finite_at_zero_terminal_snr() -> None:
    schedule = NoiseSchedule.of(prediction_type="v_prediction", zero_terminal_snr=True)
    settings = LossSettings(min_snr_gamma=5.0, debiased_estimation_loss=True, scale_v_pred_loss_like_noise_pred=True)
    assert loss_weights(torch.arange(1000), schedule, settings).isfinite().all()
    assert float(loss_weights(torch.tensor([999]), schedule, LossSettings(min_snr_gamma=5.0))) == 0.0


@pytest.mark.parametrize(
    ("schedule", "name", "value"), [(V, "v_pred_like_loss", 0.5), (EPSILON, "scale_v_pred_loss_like_noise_pred", True)]
)
def test_a_weight_of_the_other_prediction_type_is_refused(schedule: NoiseSchedule, name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        loss_weights(STEPS, schedule, LossSettings(**{name: value}))


# Losses


def reference_c(settings: LossSettings, step: int) -> float:
    if settings.huber_schedule == "constant":
        return settings.huber_c * settings.huber_scale
    if settings.huber_schedule == "exponential":
        return settings.huber_c ** (step / 1000) * settings.huber_scale
    sigma_over_signal = 1 / math.sqrt(float(SNR[step]))
    return ((1 - settings.huber_c) / (1 + sigma_over_signal) ** 2 + settings.huber_c) * settings.huber_scale


@pytest.mark.parametrize("kind", ["l1", "l2", "huber", "smooth_l1"])
@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
def test_losses_against_float64(kind: str, schedule: str) -> None:
    settings = LossSettings(loss_type=kind, huber_schedule=schedule, huber_c=0.2, huber_scale=1.5)
    prediction, target = torch.randn(2, len(STEPS), 4, 3, 5).unbind(0)
    losses = sample_losses(prediction, target, STEPS, EPSILON, settings)
    for sample, step in enumerate(STEPS.tolist()):
        d = (prediction[sample] - target[sample]).double()
        c = reference_c(settings, step)
        curve = (d**2 + c**2).sqrt() - c
        expected = {"l1": d.abs(), "l2": d**2, "huber": 2 * c * curve, "smooth_l1": 2 * curve}[kind].mean()
        torch.testing.assert_close(losses[sample].double(), expected, rtol=1e-5, atol=0)


def test_losses_of_half_precision_are_computed_in_fp32() -> None:
    prediction = torch.full((1, 1, 64, 64), 300.0, dtype=torch.float16)  # its square overflows fp16
    loss = sample_losses(prediction, torch.zeros_like(prediction), torch.tensor([5]), EPSILON, LossSettings())
    assert loss.dtype == torch.float32
    assert float(loss) == 90000.0


def test_huber_gradient_is_finite_where_the_prediction_is_exact() -> None:
    prediction = torch.zeros(1, 1, 2, 2, requires_grad=True)
    sample_losses(prediction, torch.zeros(1, 1, 2, 2), torch.tensor([5]), EPSILON, LossSettings(loss_type="huber")).sum().backward()
    assert prediction.grad is not None
    assert torch.equal(prediction.grad, torch.zeros(1, 1, 2, 2))


# Noise

LATENTS = torch.randn(2, 4, 16, 16, generator=generator(9))


def test_plain_noise_is_the_generators() -> None:
    expected = torch.randn(2, 4, 16, 16, generator=generator(1))
    assert torch.equal(draw_noise(LATENTS, LossSettings(), generator(1)), expected)


def test_noise_offset_adds_one_number_a_channel() -> None:
    plain = draw_noise(LATENTS, LossSettings(), generator(1))
    offset = draw_noise(LATENTS, LossSettings(noise_offset=0.1), generator(1)) - plain
    assert (offset.amax((2, 3)) - offset.amin((2, 3))).max() < 1e-6
    many = draw_noise(torch.zeros(4000, 4, 1, 1), LossSettings(noise_offset=3.0), generator(1))
    assert float(many.std()) == pytest.approx(math.sqrt(1 + 9), rel=0.03)


def test_noise_offset_with_random_strength_is_between_0_and_the_offset() -> None:
    plain = draw_noise(LATENTS, LossSettings(), generator(1))
    full = draw_noise(LATENTS, LossSettings(noise_offset=0.5), generator(1)) - plain
    sizes = {
        round(float((draw_noise(LATENTS, LossSettings(noise_offset=0.5, noise_offset_random_strength=True), generator(seed))).mean()), 6)
        for seed in range(5)
    }
    assert len(sizes) == 5
    some = draw_noise(LATENTS, LossSettings(noise_offset=0.5, noise_offset_random_strength=True), generator(1)) - plain
    assert 0 < float(some.std()) < 3 * float(full.std())


@pytest.mark.parametrize(("scale", "strength"), [(0.0, 0.1), (0.5, 0.1 + 0.5 * 2.0), (-1.0, 0.0)], ids=["none", "more", "never-negative"])
def test_adaptive_noise_scale_follows_the_latents_mean(scale: float, strength: float) -> None:
    latents = torch.full((1, 4, 8, 8), -2.0)
    plain = draw_noise(latents, LossSettings(), generator(1))
    unit = draw_noise(latents, LossSettings(noise_offset=1.0), generator(1)) - plain
    adapted = draw_noise(latents, LossSettings(noise_offset=0.1, adaptive_noise_scale=scale), generator(1)) - plain
    torch.testing.assert_close(adapted, unit * strength, atol=1e-5, rtol=1e-4)


def neighbours(noise: Tensor) -> float:
    """Correlation of each pixel with its right neighbour."""
    left, right = noise[..., :-1].flatten(), noise[..., 1:].flatten()
    return float(torch.corrcoef(torch.stack([left, right]))[0, 1])


def test_coarser_levels_are_smooth_and_of_unit_deviation() -> None:
    latents = torch.zeros(4, 4, 64, 64)
    plain = draw_noise(latents, LossSettings(), generator(1))
    layered = draw_noise(latents, LossSettings(multires_noise_iterations=8, multires_noise_discount=0.8), generator(1))
    assert float(layered.std()) == pytest.approx(1.0, abs=1e-5)
    assert abs(neighbours(plain)) < 0.02
    assert neighbours(layered) > 0.15
    faint = draw_noise(latents, LossSettings(multires_noise_iterations=8, multires_noise_discount=0.01), generator(1))
    assert abs(neighbours(faint)) < 0.02


def test_coarser_levels_end_at_one_pixel() -> None:
    noise = draw_noise(torch.zeros(1, 4, 2, 2), LossSettings(multires_noise_iterations=64), generator(1))
    assert noise.shape == (1, 4, 2, 2)
    assert noise.isfinite().all()


def test_input_perturbation_changes_the_input_and_not_the_target() -> None:
    settings = LossSettings(ip_noise_gamma=0.1)
    noise = draw_noise(LATENTS, settings, generator(1))
    assert perturb(noise, LossSettings(), generator(2)) is noise
    extra = (perturb(noise, settings, generator(2)) - noise) / 0.1
    torch.testing.assert_close(extra, torch.randn(LATENTS.shape, generator=generator(2)), rtol=1e-4, atol=1e-4)
    plain, perturbed = (noised(LATENTS, EPSILON, given, generator(3)) for given in (LossSettings(), settings))
    assert torch.equal(plain.target, perturbed.target)
    assert torch.equal(plain.timesteps, perturbed.timesteps)
    assert not torch.equal(plain.latents, perturbed.latents)
    varied = LossSettings(ip_noise_gamma=0.1, ip_noise_gamma_random_strength=True)
    strengths = [float((perturb(noise, varied, generator(seed)) - noise).std()) for seed in range(6)]
    assert max(strengths) < 0.11
    assert max(strengths) > 1.5 * min(strengths)


def test_timesteps_stay_in_their_range_and_reach_both_ends() -> None:
    drawn = draw_timesteps(4000, EPSILON, LossSettings(min_timestep=200, max_timestep=220), generator())
    assert set(drawn.tolist()) == set(range(200, 220))
    every = draw_timesteps(40000, EPSILON, LossSettings(), generator())
    assert (int(every.min()), int(every.max())) == (0, 999)
    assert float(every.double().mean()) == pytest.approx(499.5, abs=5)


def test_a_range_past_the_schedules_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has 0 to 2"):
        draw_timesteps(1, NoiseSchedule.from_config({"trained_betas": [0.1, 0.5, 0.6]}), LossSettings(max_timestep=1000), generator())


def test_a_seed_is_a_batch_and_global_randomness_is_not_touched() -> None:
    settings = LossSettings(noise_offset=0.1, multires_noise_iterations=4, ip_noise_gamma=0.1, noise_offset_random_strength=True)
    before = torch.get_rng_state()
    first, second, other = (noised(LATENTS, EPSILON, settings, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.latents, second.latents)
    assert torch.equal(first.timesteps, second.timesteps)
    assert not torch.equal(first.latents, other.latents)


def test_the_batch_keeps_its_dtype() -> None:
    batch = noised(LATENTS.bfloat16(), V, LossSettings(min_snr_gamma=5.0), generator())
    assert (batch.latents.dtype, batch.target.dtype, batch.weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
