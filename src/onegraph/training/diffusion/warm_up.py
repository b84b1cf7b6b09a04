"""One batch of each image size, for the warm-up: compiled before the first step, compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onegraph.compiling import CompileSettings, Watch, compile
from onegraph.training.diffusion.batches import Batch, Batches
from onegraph.training.diffusion.recipe import Draws, Recipe
from onegraph.training.warm_up import Loss, Subject, WarmUp
from onegraph.training.warm_up import warm_up as warm_up_shapes

LATENT_CHANNELS = 4
PIXELS_PER_LATENT = 8
HINT = (
    "--dynamo_backend=aot_eager shows whether inductor is at fault; --compile_regions=blocks or whole makes other graphs; "
    "--dynamo_backend=no trains eager"
)


def warm_up(
    recipe: Recipe,
    batches: Batches,
    subject: Subject,
    *,
    settings: CompileSettings,
    check: str,
    gradient_checkpointing: bool,
    say: Callable[[str], None],
) -> WarmUp:
    """Compiles the models in place and runs the step once for each size, so that nothing is left to compile.

    Args:
        recipe: The step.
        batches: The first real batch is compared; other sizes get made-up latents.
        subject: The models ``unet`` and ``text_encoder``, their adapters and what is trained.
        settings: How to compile.
        check: ``off``, ``start`` (the first batch) or ``strict`` (every size).
        gradient_checkpointing: Compute activations again in backward, inside the graph.
        say: Prints a line for the user.

    Raises:
        MismatchError: Compiled and eager differ.
        CompileError: The backend fails, or the model is not one graph.
    """
    compiled = [
        # encode() calls the text encoder's layers, not the model: it is compiled by layers in either case
        compile(
            model, settings, gradient_checkpointing=gradient_checkpointing, regions="blocks" if name == "text_encoder" else settings.regions
        )
        for name, model in subject.models.items()
    ]
    done = WarmUp(
        settings=settings, compiled=compiled, watch=Watch().start(), num_shapes=len(batches.sizes), shape="image size", check=check
    )

    def steps() -> Iterator[tuple[str, Loss]]:
        for draws in _one_of_each_size(recipe, batches):
            height, width = (side * PIXELS_PER_LATENT for side in draws.noised.latents.shape[2:])
            yield f"{width}x{height}", lambda dtype, draws=draws: recipe.loss(draws, dtype)  # type: ignore[misc]

    return warm_up_shapes(done, subject, steps, seed=recipe.seed, say=say)


def _one_of_each_size(recipe: Recipe, batches: Batches) -> Iterator[Draws]:
    """The first real batch, then one of each other size with made-up latents: only its shape counts."""
    first = next(batches.epoch(0))
    draws = recipe.draw(first, 0)
    yield draws
    seen = tuple(draws.noised.latents.shape[2:])
    for width, height in batches.sizes:
        shape = (height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)
        if shape != seen:
            latents = torch.randn(batches.batch_size, LATENT_CHANNELS, *shape, generator=torch.Generator().manual_seed(0))
            yield recipe.draw(_with_latents(first, latents), 0)


def _with_latents(batch: Batch, latents: Tensor) -> Batch:
    return Batch(
        latents=latents, input_ids=batch["input_ids"], loss_weights=batch["loss_weights"], captions=batch["captions"], paths=batch["paths"]
    )
