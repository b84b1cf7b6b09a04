"""Sample images during training: the live modules in diffusers' pipeline, eager, leaving no trace in modes or random state."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image
from torch import nn

from onegraph.errors import ConfigurationError, nearest
from onegraph.training.diffusion.base_model import BaseModel
from onegraph.training.diffusion.conditioning import check_clip_skip, encode, num_chunks, tokenize

# Name: (diffusers' class, settings that go over the base model's).
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": ("LMSDiscreteScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm_2": ("KDPM2DiscreteScheduler", {}),
    "dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmsolver": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmsingle": ("DPMSolverSinglestepScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
ALIASES = {"k_lms": "lms", "k_euler": "euler", "k_euler_a": "euler_a", "k_dpm_2": "dpm_2", "k_dpm_2_a": "dpm_2_a"}


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """One picture to draw; None means the caller's setting."""

    prompt: str
    negative: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    sampler: str | None = None


def scheduler_for(sampler: str, scheduler_config: dict[str, Any]) -> Any:
    """The scheduler of diffusers by the name people type, with the base model's noise schedule and prediction type.

    Args:
        sampler: One of ``SAMPLERS``, or the ``k_`` names of old.
        scheduler_config: ``BaseModel.scheduler_config``.

    Raises:
        ConfigurationError: ``sampler``, with the nearest names.
    """
    name = ALIASES.get(sampler, sampler)
    if name not in SAMPLERS:
        near = nearest(name, [*SAMPLERS, *ALIASES]) or list(SAMPLERS)
        raise ConfigurationError(f"no sampler is called {sampler}", hint=f"Use {', '.join(near)}.", code="sampler")
    kind, settings = SAMPLERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(diffusers, kind).from_config({**_schedule(scheduler_config), **settings})


def sample(
    base: BaseModel,
    prompts: Sequence[str | SamplePrompt],
    *,
    width: int = 512,
    height: int = 512,
    steps: int = 30,
    guidance: float = 7.5,
    seed: int | None = None,
    negative: str = "",
    sampler: str = "ddim",
    clip_skip: int | None = None,
    max_token_length: int | None = None,
    running: AbstractContextManager[object] | None = None,
) -> list[Image.Image]:
    """Pictures from the live modules, with whatever adapters are attached.

    Training modes, the random state of torch and the place of the VAE are as before afterwards. Weights in half precision run under
    autocast, so that adapters in fp32 fit.

    Args:
        base: The model; its modules are used as they are.
        prompts: Texts, or ``SamplePrompt`` whose own settings win over the arguments.
        width: In pixels, a multiple of 8; so is ``height``.
        height: In pixels.
        steps: Of the sampler.
        guidance: Classifier-free guidance; 1 leaves it out.
        seed: The same for every prompt without its own; None takes a new one for each.
        negative: Prompt to steer away from.
        sampler: One of ``SAMPLERS``.
        clip_skip: As in training: 1 or None the last layer, 2 the one before.
        max_token_length: 77, 150 or 225.
        running: Entered around all of it, e.g. ``compiling.eager()``.

    Raises:
        ConfigurationError: ``sample-settings``, ``sampler``, ``clip-skip`` or ``max-token-length``, before anything is drawn.
    """
    defaults = SamplePrompt(
        prompt="", negative=negative, width=width, height=height, steps=steps, guidance=guidance, seed=seed, sampler=sampler
    )
    wanted = [_with_defaults(SamplePrompt(prompt=prompt) if isinstance(prompt, str) else prompt, defaults) for prompt in prompts]
    for prompt in wanted:
        _check(prompt)
    check_clip_skip(base.text_encoder, clip_skip)
    num_chunks(max_token_length)
    modules = (base.unet, base.vae, base.text_encoder)
    devices = [base.unet.device] if base.unet.device.type == "cuda" else []
    with (
        running if running is not None else nullcontext(),
        torch.random.fork_rng(devices=devices),
        _evaluating(modules),
        _beside(base.vae, base.unet.device),
        torch.no_grad(),
        _precision(base),
        warnings.catch_warnings(),
    ):
        # The schedulers of diffusers lag behind numpy, which is nothing a user can act on.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return [_draw(base, prompt, clip_skip, max_token_length) for prompt in wanted]


def _draw(base: BaseModel, prompt: SamplePrompt, clip_skip: int | None, max_token_length: int | None) -> Image.Image:
    """One picture. The prompt is encoded here: the pipeline knows neither long prompts nor, with transformers 5, clip_skip."""
    device, dtype = base.unet.device, base.unet.dtype
    ids = tokenize(base.tokenizer, [prompt.prompt, prompt.negative or ""], max_token_length).to(device)
    conditions = encode(base.text_encoder, ids, clip_skip).to(dtype)
    pipeline = _pipeline_class()(
        vae=base.vae,
        text_encoder=base.text_encoder,
        tokenizer=base.tokenizer,
        unet=base.unet,
        scheduler=scheduler_for(prompt.sampler or "ddim", base.scheduler_config),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    seed = int(torch.seed()) if prompt.seed is None else prompt.seed
    latents = pipeline(
        prompt_embeds=conditions[:1],
        negative_prompt_embeds=conditions[1:],
        width=prompt.width,
        height=prompt.height,
        num_inference_steps=prompt.steps,
        guidance_scale=prompt.guidance,
        generator=torch.Generator("cpu").manual_seed(seed % 2**63),
        output_type="latent",
    ).images
    decoded = base.vae.decode(latents.to(base.vae.dtype) / base.scaling_factor, return_dict=False)[0]
    picture: Image.Image = pipeline.image_processor.postprocess(decoded.float(), output_type="pil")[0]
    return picture


def _pipeline_class() -> Any:
    """The pipeline of diffusers; importing it makes transformers warn about image processors that nothing here uses."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
    finally:
        transformers.logging.set_verbosity(verbosity)
    return StableDiffusionPipeline


def _with_defaults(prompt: SamplePrompt, defaults: SamplePrompt) -> SamplePrompt:
    """The prompt with the caller's settings where it has none."""
    missing = {name: getattr(defaults, name) for name, value in vars(prompt).items() if value is None}
    return replace(prompt, **missing)


def _check(prompt: SamplePrompt) -> None:
    """Settings that can't be drawn, found before anything is."""
    problems = []
    for name in ("width", "height"):
        size = getattr(prompt, name)
        if size < 8 or size % 8:
            problems.append(ConfigurationError(f"{name} is {size}", hint="Use a multiple of 8.", code="sample-settings"))
    if (prompt.steps or 0) < 1:
        problems.append(ConfigurationError(f"steps is {prompt.steps}", hint="Use 1 or more.", code="sample-settings"))
    try:
        scheduler_for(prompt.sampler or "ddim", {})
    except ConfigurationError as error:
        problems.append(error)
    if problems:
        raise ConfigurationError.collected(problems)


def _schedule(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a scheduler's configuration that describes the training noise, not a sampler."""
    names = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type", "rescale_betas_zero_snr")
    kept = {name: config[name] for name in names if config.get(name) is not None}
    return {
        **kept,
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "timestep_spacing": config.get("timestep_spacing", "leading"),
    }


@contextlib.contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode; afterwards each module, children too, is in the mode it was in."""
    training = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in training:
            part.training = mode


@contextlib.contextmanager
def _beside(vae: nn.Module, device: torch.device) -> Iterator[None]:
    """The VAE on the UNet's device; a trainer that cached latents may have put it away."""
    home = next(vae.parameters()).device
    if home == device:
        yield
        return
    vae.to(device)
    try:
        yield
    finally:
        vae.to(home)


def _precision(base: BaseModel) -> AbstractContextManager[object]:
    """Autocast for weights in half precision; nothing for fp32."""
    dtype = base.unet.dtype
    return torch.autocast(base.unet.device.type, dtype=dtype) if dtype in (torch.float16, torch.bfloat16) else nullcontext()
