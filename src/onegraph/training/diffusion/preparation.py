"""From the groundwork to a training that is ready to run: base model, adapters, latents, optimizer, compilation with its check."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from onegraph.adapters import Adapters
from onegraph.checkpoint import file_hash, save_kohya
from onegraph.checkpoint.atomic import atomic_write, make_folder
from onegraph.compiling import eager
from onegraph.training.diffusion.base_model import BaseModel, load_base_model
from onegraph.training.diffusion.batches import Batches
from onegraph.training.diffusion.conditioning import check_clip_skip, tokenize
from onegraph.training.diffusion.dataset import Dataset
from onegraph.training.diffusion.groundwork import Groundwork, Say
from onegraph.training.diffusion.latents import LatentCache, default_cache_folder
from onegraph.training.diffusion.loop import Training
from onegraph.training.diffusion.metadata import RunFacts, training_metadata
from onegraph.training.diffusion.network import attach_networks, block_of, limit_norms
from onegraph.training.diffusion.noise import NoiseSchedule
from onegraph.training.diffusion.parameter_groups import parameter_groups
from onegraph.training.diffusion.recipe import Recipe
from onegraph.training.diffusion.resuming import FREEDOM
from onegraph.training.diffusion.sampling import sample
from onegraph.training.diffusion.saving import SavePlan
from onegraph.training.diffusion.warm_up import HINT, warm_up
from onegraph.training.metrics import TensorBoard, run_folder
from onegraph.training.optimizers import make_optimizer
from onegraph.training.randomness import seed_everything
from onegraph.training.resuming import require_steps_left
from onegraph.training.schedules import make_schedule
from onegraph.training.settings import branches
from onegraph.training.state import check_fingerprints
from onegraph.training.streams import stream_seed
from onegraph.training.warm_up import Subject, WarmUp


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A training that is ready to run.

    Args:
        training: What the loop moves.
        base: The base model.
        parts: ``unet``, ``text_encoder`` -> their adapters.
        warm_up: What was compiled and how it compared.
        dataset: The images.
    """

    training: Training
    base: BaseModel
    parts: Mapping[str, Adapters]
    warm_up: WarmUp
    dataset: Dataset


def prepare(ground: Groundwork, say: Say) -> Prepared:
    """Loads the model, attaches the adapters, caches the latents, makes the optimizer, compiles and compares.

    Raises:
        ModelFileError: The base model can't be read.
        MismatchError: Compiled and eager differ.
        NumericsError: Latents that are not finite.
    """
    with ground.launch.ranks.together():
        prepared = _prepare(ground, say)
        prepared.training.begin(ground.saved)
    return prepared


def _prepare(ground: Groundwork, say: Say) -> Prepared:
    configuration, launch = ground.configuration, ground.launch
    seed_everything(ground.seed)
    base = load_base_model(
        configuration.model.path,
        vae=configuration.model.vae,
        v2=configuration.model.v2,
        v_parameterization=configuration.loss.v_parameterization,
        model_config=configuration.model.config,
    )
    for note in base.notes:
        say(f"note: {note}")
    check_clip_skip(base.text_encoder, configuration.model.clip_skip)
    schedule = NoiseSchedule.from_config(
        base.scheduler_config, prediction_type=base.prediction_type, zero_terminal_snr=configuration.loss.zero_terminal_snr
    )
    # frozen weights in the precision of autocast; the VAE stays fp32, since some overflow in fp16
    for model in (base.unet, base.text_encoder):
        move(model, launch.device, launch.precision)
    generator = torch.Generator().manual_seed(stream_seed(ground.seed, "adapters"))
    parts = attach_networks(base, configuration.network, optimizer=configuration.optimizer, generator=generator)
    for part, adapters in parts.items():
        num_parameters = sum(value.numel() for value in adapters.parameters().values())
        ranks = sorted({entry.rank for entry in adapters.plan if entry.rank is not None})
        rank = "" if not ranks else f"rank {ranks[0]}, " if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}, "
        say(f"{part}: adapters on {len(adapters.layers)} layers, {rank}{num_parameters:,} parameters")
    base.unet.train()  # also where only the text encoder is adapted: gradient checkpointing asks for it
    base.text_encoder.train("text_encoder" in parts)
    parameters = {f"{part}.{name}": value for part, adapters in parts.items() for name, value in adapters.parameters().items()}
    fingerprints = _fingerprints(ground, base)
    batches = _make_batches(ground, base, say)
    num_steps = configuration.run.max_train_steps
    accumulation = configuration.run.gradient_accumulation_steps
    if configuration.run.max_train_epochs is not None:
        num_steps = configuration.run.max_train_epochs * batches.steps_per_epoch(accumulation)
    require_steps_left(ground.saved, num_steps, "--max_train_steps=")
    num_epochs = batches.num_epochs(num_steps, accumulation)
    groups = parameter_groups({part: adapters.parameters() for part, adapters in parts.items()}, configuration.optimizer, block_of=block_of)
    optimizer = make_optimizer(configuration.optimizer, groups, label=launch.label)
    learning_rates = make_schedule(
        configuration.schedule, optimizer, num_steps, optimizer_settings=configuration.optimizer, label=launch.label
    )
    recipe = Recipe(
        unet=base.unet,
        text_encoder=base.text_encoder,
        vae=None if configuration.data.cache_latents else base.vae,
        schedule=schedule,
        settings=configuration.loss,
        clip_skip=configuration.model.clip_skip,
        scaling_factor=base.scaling_factor,
        seed=ground.seed,
        device=launch.device,
        precision=launch.precision,
        train_text_encoder="text_encoder" in parts,
        ranks=launch.ranks,
    )
    models: dict[str, nn.Module] = {"unet": base.unet, "text_encoder": base.text_encoder}
    plan = SavePlan(configuration.saving, num_epochs=num_epochs)
    facts = _run_facts(ground, base, batches, optimizer, num_steps=num_steps, num_epochs=num_epochs)

    def save_network(path: Path, steps: int, epoch: int) -> None:
        form = "kohya" if configuration.network.module == "networks.lora" else "lycoris"
        metadata = training_metadata(facts, steps=steps, epoch=epoch, now=time.time())
        save_kohya(parts, path, form=form, dtype=plan.dtype, metadata=metadata)

    subject = Subject(models=models, parts=parts, parameters=parameters, precision=recipe.precision, hint=HINT)
    warmed = warm_up(
        recipe,
        batches,
        subject,
        settings=launch.compile_settings,
        check=configuration.compile.check,
        gradient_checkpointing=configuration.run.gradient_checkpointing,
        say=say,
    )
    strict = configuration.compile.check == "strict" and launch.compile_settings.active
    limit = configuration.network.scale_weight_norms
    training = Training(
        configuration=configuration,
        recipe=recipe,
        batches=batches,
        parameters=parameters,
        optimizer=optimizer,
        schedule=learning_rates,
        scaler=launch.scaler,
        accumulation=accumulation,
        max_grad_norm=configuration.run.max_grad_norm,
        plan=plan,
        num_steps=num_steps,
        num_epochs=num_epochs,
        seed=ground.seed,
        fingerprints=fingerprints,
        save_network=save_network,
        progress=launch.progress(
            num_steps, num_epochs, done=ground.saved.position.step if ground.saved else 0, quiet=configuration.logging.quiet
        ),
        ranks=launch.ranks,
        watch=warmed.watch,
        sample=partial(draw_samples, ground, base) if ground.prompts else None,
        check=(lambda draws: subject.compare(partial(recipe.loss, draws))) if strict else None,
        after_update=partial(_limit_norms, parts, limit) if limit is not None else None,
        board=_make_board(ground),
    )
    training.timings.add_compile(warmed.watch.compile_seconds)
    return Prepared(training=training, base=base, parts=parts, warm_up=warmed, dataset=ground.dataset)


def move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """To a device and a precision, in place; past diffusers' own ``to``, which warns of lists that are empty."""
    nn.Module.to(model, device=device, dtype=dtype)


def draw_samples(ground: Groundwork, base: BaseModel, step: int, epoch: int) -> list[Path]:
    """Draws every prompt with the model as it is, eager; writes ``OUT/sample/{name}_{step}_{number}_{seed}.png``."""
    configuration = ground.configuration
    width, height = configuration.data.resolution
    folder = Path(configuration.saving.output_dir) / "sample"
    make_folder(folder)
    images: list[Image.Image] = sample(
        base,
        ground.prompts,
        width=width,
        height=height,
        seed=ground.seed,
        sampler=configuration.sampling.sampler,
        clip_skip=configuration.model.clip_skip,
        max_token_length=configuration.model.max_token_length,
        running=eager(),
    )
    paths = []
    for number, (prompt, image) in enumerate(zip(ground.prompts, images, strict=True)):
        seed = ground.seed if prompt.seed is None else prompt.seed
        path = folder / f"{configuration.saving.name}_{step:06d}_{number:02d}_{seed}.png"
        atomic_write(path, partial(image.save, format="PNG"))
        paths.append(path)
    return paths


def _make_batches(ground: Groundwork, base: BaseModel, say: Say) -> Batches:
    """The batches; with cached latents every image is encoded here, and the VAE goes back to the CPU."""
    data, device = ground.configuration.data, ground.launch.device
    cache = None
    move(base.vae, device, torch.float32)
    if data.cache_latents:
        cache = LatentCache(
            base.vae,
            base.scaling_factor,
            batch_size=data.vae_batch_size,
            to_disk=default_cache_folder(Path(data.train_data_dir or "")) if data.cache_latents_to_disk else None,
            seed=ground.seed,
        )
        say(str(cache.fill(ground.dataset.encodings(flip=data.flip))))
        move(base.vae, torch.device("cpu"), torch.float32)
    batches = Batches(
        ground.dataset,
        batch_size=data.batch_size,
        seed=ground.seed,
        tokenize=partial(tokenize, base.tokenizer, max_token_length=ground.configuration.model.max_token_length),
        latents=cache,
        prior_loss_weight=ground.configuration.loss.prior_loss_weight,
        flip=data.flip,
        random_crop=data.random_crop,
        num_workers=data.num_workers,
        ranks=ground.launch.ranks,
    )
    say(str(batches))
    return batches


def _run_facts(
    ground: Groundwork, base: BaseModel, batches: Batches, optimizer: torch.optim.Optimizer, *, num_steps: int, num_epochs: int
) -> RunFacts:
    configuration = ground.configuration
    kind = type(optimizer)
    return RunFacts(
        configuration=configuration,
        session_id=str(random.SystemRandom().randrange(2**32)),
        started_at=ground.started_at,
        seed=ground.seed,
        mixed_precision=ground.launch.mixed_precision,
        base_model_version=base.family.name,
        base_model_name=base.name,
        base_model_hash=base.model_hash(),
        base_model_sha256=base.new_model_hash(),
        prediction_type=base.prediction_type,
        optimizer=f"{kind.__module__}.{kind.__qualname__}({','.join(configuration.optimizer.arguments)})",
        schedule=configuration.schedule.type or configuration.schedule.name,
        num_steps=num_steps,
        num_epochs=num_epochs,
        num_batches_per_epoch=len(batches),
        folders=ground.dataset.folder_facts,
        bucket_info=ground.dataset.bucket_report.metadata() if configuration.data.enable_bucket else None,
        num_processes=ground.launch.ranks.count,
    )


def _fingerprints(ground: Groundwork, base: BaseModel) -> dict[str, str]:
    """Which base model and which images: only worked out where a state is read or written, since it reads all of a model folder."""
    saving = ground.configuration.saving
    if ground.saved is None and not (saving.save_state or saving.save_state_on_train_end):
        return {}
    model = base.new_model_hash()
    if model is None:
        files = sorted(path for path in base.path.rglob("*") if path.is_file() and path.suffix in {".safetensors", ".bin", ".json"})
        model = hashlib.sha256("".join(f"{path.relative_to(base.path)} {file_hash(path)}\n" for path in files).encode()).hexdigest()
    found = {"base model": model, "data set": ground.dataset.fingerprint} | ground.launch.ranks.fingerprint(ground.saved)
    if ground.saved is not None:
        check_fingerprints(ground.saved, found, FREEDOM)
    return found


def _make_board(ground: Groundwork) -> TensorBoard | None:
    logging = ground.configuration.logging
    if logging.logging_dir is None or not ground.launch.ranks.first:
        return None
    folder = run_folder(Path(logging.logging_dir), logging.log_prefix or "", ground.started_at, logging.tracker_name or "network_train")
    return TensorBoard(folder, dict(branches(ground.configuration)) | {"run.seed": ground.seed})


def _limit_norms(parts: Mapping[str, Adapters], largest: float) -> None:
    for adapters in parts.values():
        limit_norms(adapters, largest)
