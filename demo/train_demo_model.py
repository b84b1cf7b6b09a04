"""Trains a small Stable Diffusion like demo/model/tiny-sd.safetensors: VAE, then UNet and text encoder, then one file.

Run by ``bash scripts/train_demo_model``, which fetches the pictures. From nothing it takes about two hours on two cores;
``--start FILE`` goes on from a model (full fine-tuning), and then the VAE is kept unless ``--vae-steps`` says otherwise.
The file is written every ``--save-every`` steps and at the end, so stopping early leaves a model.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel

from onegraph.training.diffusion.base_model import BaseModel, load_base_model
from onegraph.training.diffusion.conditioning import encode, tokenize
from onegraph.training.diffusion.families import SD_V1, Components
from onegraph.training.diffusion.sampling import sample
from onegraph.training.diffusion.single_file import save_single_file

SIZE = 128
LOG_VARIANCE = -6.0
CAPTION = "a 3d emoji of {article} {name}"
# Unicode blocks of what the model is taught: plants and foods, animals, faces, vehicles, more faces, more foods, more animals.
SUBJECTS = ((0x1F32D, 0x1F37F), (0x1F400, 0x1F43F), (0x1F600, 0x1F64F), (0x1F680, 0x1F6FC), (0x1F910, 0x1F92F), (0x1F950, 0x1F9AE))
LICENCE = "Apache-2.0"
SHOWN = ("red apple", "tiger face", "hamburger", "bear", "frog", "grinning face")


@dataclass(frozen=True)
class Data:
    """All pictures and captions in memory. Shapes: images (N, 3, 128, 128) fp32 in [-1, 1], ids (N, 1, 77)."""

    images: Tensor
    captions: list[str]


def main() -> int:
    arguments = parse()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    data = read_data(arguments.images, arguments.subjects)
    print(f"{len(data.captions)} pictures, e.g. {data.captions[0]!r}")
    base = new_model() if arguments.start is None else load_base_model(arguments.start)
    vae_steps = arguments.vae_steps if arguments.vae_steps is not None else (2600 if arguments.start is None else 0)
    if vae_steps:
        train_vae(base.vae, data, vae_steps, arguments)
        base = with_scaling(base, data)
    if arguments.steps:
        base = train_unet(base, data, arguments)
    save(base, arguments.output)
    draw(base, data, arguments.output.with_suffix(".png"))
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.1f} MB; samples: {arguments.output.with_suffix('.png')}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder of pictures named by code points, e.g. 1f34e.webp")
    parser.add_argument("--output", type=Path, required=True, help="the .safetensors to write")
    parser.add_argument("--start", type=Path, help="a model to go on from; from nothing when absent")
    parser.add_argument("--vae-steps", type=int, help="2600 from nothing, 0 with --start")
    parser.add_argument("--steps", type=int, default=3250, help="of UNet and text encoder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3, help="of AdamW, cosine to zero")
    parser.add_argument("--subjects", type=int, help="only so many of them, for a quick try")
    parser.add_argument("--save-every", type=int, default=250, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def read_data(folder: Path, count: int | None) -> Data:
    """Pictures on white with their names as captions; the names are those of the package emoji."""
    try:
        import emoji
    except ImportError:
        sys.exit("train_demo_model: the package emoji is missing.\n\nhint: run bash scripts/train_demo_model, which installs it")
    images, captions = [], []
    for character, entry in sorted(emoji.EMOJI_DATA.items()):
        wanted = len(character) == 1 and any(first <= ord(character) <= last for first, last in SUBJECTS)
        path = folder / f"{ord(character[0]):x}.webp"
        if not wanted or not path.is_file():
            continue
        name = entry["en"].strip(":").replace("_", " ").replace("-", " ").lower()
        captions.append(CAPTION.format(article="an" if name[0] in "aeiou" else "a", name=name))
        images.append(on_white(path))
    if not images:
        sys.exit(
            f"train_demo_model: {folder} holds no picture of the subjects.\n\nhint: run bash scripts/train_demo_model, which fetches them"
        )
    return Data(torch.stack(images)[:count], captions[:count])


def on_white(path: Path) -> Tensor:
    """One picture composed on white, 128x128, in [-1, 1]."""
    with Image.open(path) as opened:
        picture = opened.convert("RGBA").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    white = Image.new("RGBA", picture.size, "white")
    raw = Image.alpha_composite(white, picture).convert("RGB").tobytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(SIZE, SIZE, 3).permute(2, 0, 1).float() / 127.5 - 1


def new_model() -> BaseModel:
    """The architecture of the demo model with random weights."""
    components: Components = SD_V1.configuration()
    components["unet"].update(block_out_channels=[64, 96, 96, 96], attention_head_dim=4, cross_attention_dim=64, sample_size=SIZE // 8)
    components["vae"].update(block_out_channels=[32, 32, 64, 64], sample_size=SIZE, scaling_factor=1.0)
    components["text_encoder"].update(hidden_size=64, intermediate_size=256, num_attention_heads=4, num_hidden_layers=3, projection_dim=64)
    unet: Any = UNet2DConditionModel.from_config(components["unet"])
    nn.init.zeros_(unet.conv_out.weight)
    return BaseModel(
        unet=unet,
        vae=AutoencoderKL.from_config(components["vae"]),
        text_encoder=CLIPTextModel(CLIPTextConfig.from_dict(components["text_encoder"])),
        tokenizer=SD_V1.tokenizer(),
        family=SD_V1,
        prediction_type="epsilon",
        scheduler_config=components["scheduler"],
        scaling_factor=1.0,
        name="tiny-sd",
        path=Path("tiny-sd"),
        configuration=components,
    )


class Average:
    """The exponential average of parameters, faster at the start so that the random weights leave it."""

    def __init__(self, modules: list[Any], decay: float = 0.998) -> None:
        self.live = [parameter for module in modules for parameter in module.parameters()]
        self.averaged = [copy.deepcopy(module).requires_grad_(False) for module in modules]
        self.kept = [parameter for module in self.averaged for parameter in module.parameters()]
        self.decay = decay
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10))
        torch._foreach_lerp_(self.kept, self.live, 1 - decay)


def optimizer_for(parameters: list[nn.Parameter], rate: float, steps: int) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with a short warm-up and a cosine to zero."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=1e-2)
    warm_up = max(1, min(100, steps // 10))
    shape = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))
    )
    return optimizer, shape


def batches(count: int, size: int, steps: int) -> Iterator[Tensor]:
    """Row numbers: every picture once before any twice."""
    waiting = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        while len(waiting) < size:
            waiting = torch.cat([waiting, torch.randperm(count)])
        yield waiting[:size]
        waiting = waiting[size:]


def train_vae(vae: Any, data: Data, steps: int, arguments: argparse.Namespace) -> None:
    """Pictures through four channels and back: absolute and squared error, latents kept small, a fixed small posterior."""
    channels = vae.config.latent_channels
    vae.requires_grad_(True).train()
    with torch.no_grad():
        vae.quant_conv.weight[channels:] = 0
        vae.quant_conv.bias[channels:] = LOG_VARIANCE
    optimizer, rate = optimizer_for(list(vae.parameters()), arguments.rate, steps)
    average = Average([vae])
    started = time.monotonic()
    for step, rows in enumerate(batches(len(data.images), min(arguments.batch, 16), steps), 1):
        images = data.images[rows]
        mean = vae.quant_conv(vae.encoder(images))[:, :channels]
        decoded = vae.decode(mean + math.exp(LOG_VARIANCE / 2) * torch.randn_like(mean)).sample
        loss = functional.l1_loss(decoded, images) + functional.mse_loss(decoded, images) + 1e-4 * mean.square().mean()
        advance(loss, vae, optimizer, rate)
        with torch.no_grad():
            # Weight decay would move the fixed variance.
            vae.quant_conv.weight[channels:] = 0
            vae.quant_conv.bias[channels:] = LOG_VARIANCE
        average.update()
        report("vae", step, steps, loss.item(), started, arguments.save_every)
    vae.load_state_dict(average.averaged[0].state_dict())
    vae.requires_grad_(False).eval()
    print(f"vae: {signal_to_noise(vae, data):.1f} dB")


@torch.no_grad()
def signal_to_noise(vae: Any, data: Data) -> float:
    """Peak signal-to-noise ratio of the reconstruction, in decibels."""
    errors = [
        functional.mse_loss(vae.decode(vae.encode(part).latent_dist.mode()).sample.clamp(-1, 1), part) for part in data.images.split(32)
    ]
    return 10 * math.log10(4 / float(torch.stack(errors).mean()))


@torch.no_grad()
def latents_of(vae: Any, data: Data) -> Tensor:
    return torch.cat([vae.encode(part).latent_dist.mode() for part in data.images.split(32)])


def with_scaling(base: BaseModel, data: Data) -> BaseModel:
    """The factor that gives the latents unit variance, in the model and its configuration."""
    factor = 1 / float(latents_of(base.vae, data).std())
    vae: Any = base.vae
    vae.register_to_config(scaling_factor=factor)
    return replace(base, scaling_factor=factor)


def train_unet(base: BaseModel, data: Data, arguments: argparse.Namespace) -> BaseModel:
    """UNet and text encoder together: epsilon, min-SNR 5, one caption in ten empty, exponential average."""
    unet: Any = base.unet
    text: Any = base.text_encoder
    scheduler: Any = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000)
    signal = scheduler.alphas_cumprod
    weights = torch.clamp(5 * (1 - signal) / signal, max=1.0)
    latents = latents_of(base.vae, data) * base.scaling_factor
    ids = tokenize(base.tokenizer, data.captions)
    (empty,) = tokenize(base.tokenizer, [""])
    unet.requires_grad_(True).train()
    text.requires_grad_(True).train()
    both = nn.ModuleList([unet, text])
    optimizer, rate = optimizer_for(list(both.parameters()), arguments.rate, arguments.steps)
    average = Average([unet, text])
    averaged = replace(base, unet=average.averaged[0], text_encoder=average.averaged[1])
    started = time.monotonic()
    for step, rows in enumerate(batches(len(latents), arguments.batch, arguments.steps), 1):
        clean = latents[rows]
        # A few pixels to the side: the subjects are the same ones every time.
        clean = torch.roll(clean, shifts=tuple(torch.randint(-1, 2, (2,)).tolist()), dims=(2, 3))
        dropped = torch.rand(len(rows)) < 0.1
        tokens = torch.where(dropped[:, None, None], empty, ids[rows])
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 1000, (len(rows),))
        predicted = unet(scheduler.add_noise(clean, noise, timesteps), timesteps, encode(text, tokens)).sample
        loss = (functional.mse_loss(predicted, noise, reduction="none").mean(dim=(1, 2, 3)) * weights[timesteps]).mean()
        advance(loss, both, optimizer, rate)
        average.update()
        report("unet", step, arguments.steps, loss.item(), started, arguments.save_every)
        if step % arguments.save_every == 0 and step < arguments.steps:
            save(averaged, arguments.output)
    return averaged


def advance(loss: Tensor, module: nn.Module, optimizer: torch.optim.Optimizer, rate: torch.optim.lr_scheduler.LambdaLR) -> None:
    """One optimizer step, gradients clipped to norm 1."""
    if not torch.isfinite(loss):
        sys.exit(f"train_demo_model: the loss is {loss.item()}.\n\nhint: lower --rate; the last saved file is still there")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    rate.step()


def report(stage: str, step: int, steps: int, loss: float, started: float, every: int) -> None:
    if step % min(every, 50) == 0 or step in (1, steps):
        print(f"{stage} {step}/{steps} loss {loss:.4f} {(time.monotonic() - started) / step:.2f} s/step", flush=True)


def save(base: BaseModel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_single_file(base, path, dtype=torch.float16, metadata={"modelspec.title": path.stem, "modelspec.license": LICENCE})


def draw(base: BaseModel, data: Data, path: Path) -> None:
    """A row of samples beside the file."""
    prompts = [caption for caption in data.captions if caption.endswith(SHOWN)][: len(SHOWN)] or data.captions[: len(SHOWN)]
    pictures = sample(base, prompts, width=SIZE, height=SIZE, steps=30, guidance=4.0, seed=5)
    row = Image.new("RGB", (SIZE * len(pictures), SIZE))
    for number, picture in enumerate(pictures):
        row.paste(picture, (SIZE * number, 0))
    row.save(path)


if __name__ == "__main__":
    raise SystemExit(main())
