"""Before the first step: every shape of the run is compiled, and the compiled step is compared with eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapters
from onegraph.checking import Comparison, compare_step
from onegraph.compiling import Compiled, CompileSettings, Watch, compile, compile_ahead
from onegraph.compiling.failures import explained
from onegraph.errors import MismatchError
from onegraph.training.diffusion.batches import Batch, Batches
from onegraph.training.diffusion.recipe import Draws, Recipe
from onegraph.training.randomness import nothing_changed

LATENT_CHANNELS = 4
PIXELS_PER_LATENT = 8


@dataclass(kw_only=True)
class WarmUp:
    """What was compiled and how it compared; ``str()`` of it is the block to print before training.

    Args:
        settings: How it was compiled, with the origin of each value.
        compiled: What was compiled.
        watch: Counts on; its own warm-up has ended.
        comparisons: What was compared, in words -> the result.
        num_shapes: How many sizes the run's batches have.
        check: ``off``, ``start`` or ``strict``.
    """

    settings: CompileSettings
    compiled: Sequence[Compiled]
    watch: Watch
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    num_shapes: int = 1
    check: str = "start"

    def __str__(self) -> str:
        lines = ["compilation"]
        rows = self.settings.describe()
        width = max(len(value) for _, value, _ in rows)
        lines += [f"  {name:<12}{value:<{width}}  ({origin})" for name, value, origin in rows]
        lines += [f"  {'note':<12}{note}" for note in self.settings.notes]
        if not self.settings.active:
            return "\n".join([*lines, "  nothing is compiled: the models run eager"])
        lines += [f"  {'compiled':<12}{compiled}" for compiled in self.compiled]
        protections = sorted({name for compiled in self.compiled for name in compiled.protections})
        if protections:
            lines.append(f"  {'protection':<12}{', '.join(protections)}")
        lines += [f"  {'check':<12}{what}: {comparison}" for what, comparison in self.comparisons.items()]
        if self.check == "off":
            lines.append(f"  {'check':<12}off: nobody compared the compiled step with eager (--compile_check=start does)")
        breaks = self.watch.breaks
        lines.append(
            f"  {'result':<12}{self.watch.graphs} graphs for {self.num_shapes} image size{'' if self.num_shapes == 1 else 's'}, "
            f"{len(breaks)} graph breaks, {len(self.watch.recompiles)} recompiles, {self.watch.compile_seconds:.1f} s compiling"
        )
        return "\n".join([*lines, *(f"  {'break':<12}{reason}" for reason in breaks)])


def warm_up(
    recipe: Recipe,
    batches: Batches,
    *,
    settings: CompileSettings,
    check: str,
    parts: Mapping[str, Adapters],
    parameters: Mapping[str, nn.Parameter],
    models: Mapping[str, nn.Module],
    gradient_checkpointing: bool,
    say: Callable[[str], None],
) -> WarmUp:
    """Compiles the models in place and runs the step once for each size, so that nothing is left to compile.

    The weights, the gradients and the random generators are afterwards what they were.

    Args:
        recipe: The step.
        batches: The first real batch is compared; other sizes get made-up latents.
        settings: How to compile.
        check: ``off``, ``start`` (the first batch) or ``strict`` (every size).
        parts: The adapters, whose dropouts are 0 during a comparison.
        parameters: What is trained.
        models: ``unet``, ``text_encoder``.
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
        for name, model in models.items()
    ]
    done = WarmUp(settings=settings, compiled=compiled, watch=Watch().start(), num_shapes=len(batches.sizes), check=check)
    if settings.active:
        origin = settings.sources.get("backend", "default")
        say(
            f"compiling with {settings.backend} ({origin}) for {done.num_shapes} image size{'' if done.num_shapes == 1 else 's'}, "
            f"seed {recipe.seed}; minutes the first time, seconds when the cache folder has it ..."
        )
        with nothing_changed(parameters.values()), explained(settings.backend):
            _compile_ahead(done, recipe, batches, say)
            for number, draws in enumerate(_one_of_each_size(recipe, batches)):
                if check == "strict" or (check == "start" and number == 0):
                    height, width = (side * PIXELS_PER_LATENT for side in draws.noised.latents.shape[2:])
                    try:
                        done.comparisons[f"{width}x{height}"] = compare(recipe, draws, parts=parts, parameters=parameters, models=models)
                    except MismatchError:
                        say(str(done))  # what was compiled, and how, belongs to the error
                        raise
                else:
                    torch.autograd.backward(recipe.loss(draws), inputs=list(parameters.values()))
    done.watch.warm()
    return done


def _compile_ahead(done: WarmUp, recipe: Recipe, batches: Batches, say: Callable[[str], None]) -> None:
    """Several processes compile what the run will call; the time counts as compiling."""

    def every_size() -> None:
        for draws in _one_of_each_size(recipe, batches):
            recipe.loss(draws)

    began = time.perf_counter()
    if compile_ahead(done.compiled, every_size, say=say):
        done.watch.compile_seconds += time.perf_counter() - began


def compare(
    recipe: Recipe, draws: Draws, *, parts: Mapping[str, Adapters], parameters: Mapping[str, nn.Parameter], models: Mapping[str, nn.Module]
) -> Comparison:
    """Compiled against eager on one batch.

    Raises:
        MismatchError: They differ; names the parameters.
        NumericsError: Eager itself gives NaN or infinity.
    """
    comparison = compare_step(
        lambda dtype: recipe.loss(draws, dtype),
        parameters,
        models=list(models.values()),
        adapters=list(parts.values()),
        precision=recipe.precision,
    )
    comparison.raise_if_wrong(
        hint="--dynamo_backend=aot_eager shows whether inductor is at fault; --compile_regions=blocks or whole makes other graphs; "
        "--dynamo_backend=no trains eager"
    )
    return comparison


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
