"""The training step: drawn once, computed as often as wanted, always from the seed and the step's number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from onegraph.errors import NumericsError
from onegraph.training.diffusion.batches import Batch
from onegraph.training.diffusion.configuration import LossSettings, NetworkSettings
from onegraph.training.diffusion.network import attach_networks
from onegraph.training.diffusion.noise import NoiseSchedule
from onegraph.training.diffusion.recipe import Recipe
from tiny_diffusion import build, configuration


class Models:
    """A tiny random model with adapters that do something."""

    def __init__(self, dtype: torch.dtype = torch.float32, **network: Any) -> None:
        components = configuration()
        self.unet: Any = build("unet", components["unet"]).requires_grad_(False).to(dtype)
        self.text_encoder: Any = build("text_encoder", components["text_encoder"]).requires_grad_(False).to(dtype)
        self.vae: Any = build("vae", components["vae"]).requires_grad_(False)
        self.adapters = attach_networks(self, NetworkSettings(**network), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for adapters in self.adapters.values():
                for name, value in adapters.parameters().items():
                    if name.endswith(".up"):
                        value.normal_(0, 0.1)

    def recipe(self, *, cached: bool = True, seed: int = 1, settings: LossSettings | None = None, **more: Any) -> Recipe:
        return Recipe(
            unet=self.unet,
            text_encoder=self.text_encoder,
            vae=None if cached else self.vae,
            schedule=NoiseSchedule.of(),
            settings=settings or LossSettings(),
            clip_skip=None,
            scaling_factor=0.18215,
            seed=seed,
            device=torch.device("cpu"),
            train_text_encoder="text_encoder" in self.adapters,
            **more,
        )


def batch(size: int = 2, **changes: Any) -> Batch:
    made: dict[str, Any] = {
        "latents": torch.randn(size, 4, 8, 8, generator=torch.Generator().manual_seed(2)),
        "input_ids": torch.randint(0, 49408, (size, 1, 77), generator=torch.Generator().manual_seed(3)),
        "loss_weights": torch.ones(size),
        "captions": [""] * size,
        "paths": [f"{number}.png" for number in range(size)],
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def test_the_draws_depend_on_the_seed_and_the_step_alone() -> None:
    models = Models()
    recipe = models.recipe()
    first = recipe.draw(batch(), 5)
    torch.randn(3)
    recipe.draw(batch(), 4)
    again = models.recipe().draw(batch(), 5)
    assert torch.equal(first.noised.latents, again.noised.latents)
    assert torch.equal(first.noised.timesteps, again.noised.timesteps)
    assert not torch.equal(first.noised.latents, recipe.draw(batch(), 6).noised.latents)
    assert not torch.equal(first.noised.latents, models.recipe(seed=2).draw(batch(), 5).noised.latents)


def test_drawing_leaves_the_global_generators_alone() -> None:
    recipe = Models().recipe()
    state = torch.get_rng_state()
    recipe.loss(recipe.draw(batch(), 0))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_is_the_weighted_mean_of_the_samples() -> None:
    models = Models()
    recipe = models.recipe(settings=LossSettings(min_snr_gamma=5.0))
    weights = torch.tensor([1.0, 0.25])
    draws = recipe.draw(batch(loss_weights=weights), 0)
    drawn = draws.noised
    with torch.no_grad():
        hidden = models.text_encoder(draws.input_ids[:, 0]).last_hidden_state
        prediction = models.unet(drawn.latents, drawn.timesteps, hidden).sample
    snr = NoiseSchedule.of().snr[drawn.timesteps]
    expected = sum(
        functional.mse_loss(prediction[row], drawn.target[row]) * min(snr[row].item(), 5.0) / snr[row].item() * weights[row]
        for row in (0, 1)
    )
    assert recipe.loss(draws).item() == pytest.approx(float(expected) / 2, rel=1e-5)


def test_gradients_reach_every_adapter_that_is_trained() -> None:
    models = Models()
    recipe = models.recipe()
    recipe.loss(recipe.draw(batch(), 0)).backward()
    for part, adapters in models.adapters.items():
        still = [name for name, value in adapters.parameters().items() if value.grad is None or not bool(value.grad.any())]
        assert not still, part


def test_a_frozen_text_encoder_builds_no_graph() -> None:
    models = Models(train_text_encoder=False)
    recipe = models.recipe()
    assert not recipe.encode_text(batch()["input_ids"]).requires_grad
    assert Models().recipe().encode_text(batch()["input_ids"]).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_fp32_and_the_loss_is_fp32(dtype: torch.dtype) -> None:
    plain, half = Models(), Models(dtype)
    draws = plain.recipe().draw(batch(), 0)
    expected = plain.recipe().loss(draws)
    recipe = half.recipe(precision=dtype)
    found = recipe.loss(draws)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=0.03)
    assert found.item() != expected.item()
    found.backward()
    assert {value.grad.dtype for value in half.adapters["unet"].parameters().values() if value.grad is not None} == {torch.float32}


def test_asked_for_a_dtype_it_leaves_autocast_off() -> None:
    half = Models(torch.bfloat16)
    recipe = half.recipe(precision=torch.bfloat16)
    draws = recipe.draw(batch(), 0)
    rounded = recipe.loss(draws)
    half.unet.float()
    half.text_encoder.float()
    exact = recipe.loss(draws, torch.float32)
    assert exact.item() == pytest.approx(rounded.item(), rel=0.03)
    assert exact.item() != rounded.item()


def test_images_are_encoded_as_the_cache_does() -> None:
    models = Models()
    recipe = models.recipe(cached=False)
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    made = batch(images=images)
    del made["latents"]
    drawn = recipe.draw(made, 0)
    posterior = models.vae.encode(images).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(9))
    latents = recipe._latents(made, torch.Generator().manual_seed(9))
    torch.testing.assert_close(latents, (posterior.mean + posterior.std * noise) * 0.18215)
    assert drawn.noised.latents.shape == (2, 4, 8, 8)


def test_an_image_whose_latents_are_not_finite_is_named() -> None:
    models = Models()
    images = torch.rand(2, 3, 64, 64)
    images[1] = float("nan")
    made = batch(images=images)
    del made["latents"]
    with pytest.raises(NumericsError) as caught:
        models.recipe(cached=False).draw(made, 0)
    assert caught.value.code == "latent-not-finite"
    assert "1.png" in str(caught.value)
    assert "0.png" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("unet.up_blocks.0.resnets.0.conv1.weight", "up_blocks.0.resnets.0.conv1 of the UNet"),
        ("text_encoder.encoder.layers.0.mlp.fc1.base_layer.weight", "encoder.layers.0.mlp.fc1.base_layer of the text encoder"),
    ],
)
def test_the_first_module_that_fails_is_named(path: str, words: str) -> None:
    models = Models()
    part, _, name = path.partition(".")
    with torch.no_grad():
        dict(getattr(models, part).named_parameters())[name].fill_(float("inf"))
    recipe = models.recipe()
    said = recipe.first_not_finite(recipe.draw(batch(), 0))
    assert words in said
    assert f"The base model itself has weights that are not finite, the first in {name}" in said
    assert not any(module._forward_hooks for module in models.unet.modules())


def test_latents_that_are_not_finite_are_told_apart_from_modules() -> None:
    recipe = Models().recipe()
    draws = recipe.draw(batch(latents=torch.full((2, 4, 8, 8), float("nan"))), 0)
    assert recipe.first_not_finite(draws).startswith("The noised latents are not finite at timesteps")


def test_a_finite_eager_loss_blames_the_compiled_model() -> None:
    recipe = Models().recipe()
    assert "the compiled model is wrong" in recipe.first_not_finite(recipe.draw(batch(), 0))
