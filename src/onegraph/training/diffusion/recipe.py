"""One training step: a batch becomes a loss.

In two parts. ``draw`` makes every random decision and depends on nothing but the batch, the seed and the number of the step; ``loss``
computes from what was drawn. So the same loss can be computed again, compiled, eager or in another precision.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel

from onegraph.compiling import eager
from onegraph.errors import NumericsError
from onegraph.training.diffusion.batches import Batch
from onegraph.training.diffusion.conditioning import encode
from onegraph.training.diffusion.configuration import LossSettings
from onegraph.training.diffusion.noise import Noised, NoiseSchedule, noised, sample_losses
from onegraph.training.finite import finite, watched
from onegraph.training.ranks import Ranks
from onegraph.training.streams import stream_seed


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What a loss is computed from: every random decision is made.

    Shapes:
        input_ids: (B, chunks, 77) int64
        loss_weights: (B,) fp32, the prior loss weight for regularisation images, else 1

    Args:
        noised: The model's input, its target, the timesteps and the weights that depend on them.
        paths: The images, for messages.
    """

    noised: Noised
    input_ids: Tensor
    loss_weights: Tensor
    paths: tuple[str, ...]


class Recipe:
    """Stable Diffusion's training step, loss = mean(weights * mean_pixels(distance(unet(x_t, t, text), target))).

    Args:
        unet: With its adapters; called with the noised latents, the timesteps and the encoded text.
        text_encoder: With its adapters if it is trained.
        vae: Encodes images; None when the batches carry latents.
        schedule: The noise schedule.
        settings: The loss.
        clip_skip: Layer of the text encoder, counted from the end; None for the last.
        scaling_factor: The VAE's.
        seed: The run's seed.
        device: Where the models are.
        precision: What is computed in: fp32, or the dtype of autocast.
        train_text_encoder: Whether gradients flow into the text encoder.
        ranks: The processes of the run: together they draw what one would draw for all their images.
    """

    def __init__(
        self,
        *,
        unet: nn.Module,
        text_encoder: CLIPTextModel,
        vae: nn.Module | None,
        schedule: NoiseSchedule,
        settings: LossSettings,
        clip_skip: int | None,
        scaling_factor: float,
        seed: int,
        device: torch.device,
        precision: torch.dtype = torch.float32,
        train_text_encoder: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.unet = unet
        self.text_encoder = text_encoder
        self.vae = vae
        self.schedule = schedule.to(device)
        self.settings = settings
        self.clip_skip = clip_skip
        self.scaling_factor = scaling_factor
        self.seed = seed
        self.device = device
        self.precision = precision
        self.train_text_encoder = train_text_encoder
        self.ranks = ranks or Ranks()
        self._weight_dtype = _weight_dtype(unet)

    def draw(self, batch: Batch, micro_step: int) -> Draws:
        """Makes the random decisions of batch number ``micro_step`` of the run: latents, noise, timesteps.

        Raises:
            NumericsError: ``latent-not-finite``, with the images named.
        """
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "step", micro_step))
        with torch.no_grad():
            latents = self._latents(batch, generator)
            drawn = self._noised(latents, generator)
        return Draws(
            noised=drawn,
            input_ids=batch["input_ids"].to(self.device),
            loss_weights=batch["loss_weights"].to(self.device),
            paths=tuple(batch["paths"]),
        )

    def loss(self, draws: Draws, dtype: torch.dtype | None = None) -> Tensor:
        """The loss, a scalar in fp32.

        Args:
            draws: What ``draw`` made.
            dtype: None to compute as in training; else compute everything in this dtype, to which the models were raised, without autocast.
        """
        drawn = draws.noised
        with self._autocast(dtype):
            text = self.encode_text(draws.input_ids)
            prediction = self._predict(drawn.latents, drawn.timesteps, text, dtype)
        losses = sample_losses(prediction, drawn.target, drawn.timesteps, self.schedule, self.settings)
        return (losses * drawn.weights * draws.loss_weights).mean()

    def encode_text(self, input_ids: Tensor) -> Tensor:
        """The text as the UNet reads it, with a gradient only if the text encoder is trained."""
        with contextlib.nullcontext() if self.train_text_encoder else torch.no_grad():
            return encode(self.text_encoder, input_ids, self.clip_skip)

    def first_not_finite(self, draws: Draws) -> str:
        """A sentence that names the first thing that is NaN or infinite when this loss is computed, run eager."""
        for part, model in (("UNet", self.unet), ("text encoder", self.text_encoder)):
            wrong = [name for name, value in model.named_parameters() if value.requires_grad and not bool(value.isfinite().all())]
            if wrong:
                return f"The adapters' own weights are not finite any more: {wrong[0]} of the {part} and {len(wrong) - 1} others."
        inputs: Mapping[str, Tensor] = {
            "noised latents": draws.noised.latents,
            "target": draws.noised.target,
            "loss weights": draws.noised.weights,
        }
        for name, value in inputs.items():
            if not bool(value.isfinite().all()):
                return f"The {name} are not finite at timesteps {draws.noised.timesteps.tolist()}."
        found: list[str] = []
        with eager(), torch.no_grad(), watched({"text encoder": self.text_encoder, "UNet": self.unet}, found):
            loss = float(self.loss(draws))
        if found:
            broken = [name for model in (self.unet, self.text_encoder) for name, value in model.named_parameters() if not finite(value)]
            base = f" The base model itself has weights that are not finite, the first in {broken[0]}." if broken else ""
            return f"The first module with a NaN or infinite output is {found[0]}.{base}"
        if math.isfinite(loss):
            return f"Run eager, the same batch has the loss {loss:.6g}: the compiled model is wrong. Go on with --dynamo_backend=no."
        return "Every module's output is finite; the loss itself overflows."

    def _latents(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """(B, 4, h, w) fp32, scaled: from the cache, or sampled from what the VAE gives."""
        if "latents" in batch:
            return batch["latents"].to(self.device, torch.float32)
        assert self.vae is not None, "batches without latents need a VAE"
        weight = next(self.vae.parameters())
        posterior = self.vae.encode(batch["images"].to(weight.device, weight.dtype)).latent_dist  # type: ignore[operator]
        mean, deviation = posterior.mean.float(), posterior.std.float()
        noise = self.ranks.part_of_rows(torch.randn(len(mean) * self.ranks.count, *mean.shape[1:], generator=generator))
        latents: Tensor = (mean + deviation * noise.to(mean.device)) * self.scaling_factor
        if not bool(latents.isfinite().all()):
            wrong = [path for path, latent in zip(batch["paths"], latents, strict=True) if not bool(latent.isfinite().all())]
            raise NumericsError(
                f"The VAE makes NaN or infinity from {', '.join(wrong)}.",
                why=f"It ran in {str(weight.dtype).removeprefix('torch.')}.",
                hint="another VAE with --vae=FILE",
                code="latent-not-finite",
            )
        return latents

    def _noised(self, latents: Tensor, generator: torch.Generator) -> Noised:
        """This process's part of what is drawn for the images of all: no two of them get the same noise, and any number gets it alike."""
        ranks = self.ranks
        if not ranks.several:
            return noised(latents, self.schedule, self.settings, generator)
        whole = latents.new_zeros(len(latents) * ranks.count, *latents.shape[1:])
        ranks.part_of_rows(whole).copy_(latents)
        drawn = noised(whole, self.schedule, self.settings, generator)
        return Noised(**{field.name: ranks.part_of_rows(getattr(drawn, field.name)).clone() for field in fields(drawn)})

    def _predict(self, latents: Tensor, timesteps: Tensor, text: Tensor, dtype: torch.dtype | None) -> Tensor:
        # The input takes the dtype of the weights: normalisation layers don't mix formats, and autocast leaves them alone.
        inner = dtype if dtype is not None else self._weight_dtype
        prediction: Tensor = self.unet(latents.to(inner), timesteps, text.to(inner), return_dict=False)[0]
        return prediction

    def _autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
        """Entered outside the compiled modules, so that it is part of what they are compiled for and no graph break."""
        if dtype is not None or self.precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision)


def _weight_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the frozen weights; adapters are kept in fp32 and don't count."""
    parameters = list(model.parameters())
    frozen = next((parameter for parameter in parameters if not parameter.requires_grad and parameter.is_floating_point()), parameters[0])
    return frozen.dtype
