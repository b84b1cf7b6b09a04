"""From the groundwork to a training that is ready to run: model, adapter, batches, optimizer, compilation with its check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from onegraph.adapters import Adapters
from onegraph.compiling import Watch, compile
from onegraph.methods import AdaLoRA
from onegraph.training.allocation import Allocation
from onegraph.training.metrics import TensorBoard, run_folder
from onegraph.training.optimizers import make_optimizer
from onegraph.training.randomness import seed_everything
from onegraph.training.resuming import require_steps_left
from onegraph.training.schedules import make_schedule
from onegraph.training.state import check_fingerprints
from onegraph.training.streams import stream_seed
from onegraph.training.text.attaching import attach_adapter
from onegraph.training.text.base_model import BaseModel, load_model
from onegraph.training.text.batches import Batch, Batches
from onegraph.training.text.configuration import DEFAULT_EPOCHS
from onegraph.training.text.encoding import Encoded
from onegraph.training.text.groundwork import FREEDOM, Groundwork, Say, settings_record
from onegraph.training.text.loop import Evaluations, Training
from onegraph.training.text.recipe import Recipe, require_looking_back, require_separate_documents
from onegraph.training.text.saving import AdapterWriter, SavePlan
from onegraph.training.warm_up import Loss, Subject, WarmUp, warm_up

HINT = (
    "compile.backend = aot_eager (--backend) shows whether inductor is at fault; compile.regions = whole makes other graphs; "
    "compile.backend = no trains eager"
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A training that is ready to run.

    Args:
        training: What the loop moves.
        base: The language model.
        adapters: Its adapter.
        warm_up: What was compiled and how it compared.
    """

    training: Training
    base: BaseModel
    adapters: Adapters
    warm_up: WarmUp


def prepare(ground: Groundwork, say: Say) -> Prepared:
    """Loads the model, attaches the adapter, makes batches and optimizer, compiles and compares.

    Raises:
        ModelFileError: The model can't be read, or can't keep packed documents apart.
        TargetError: Targets that match nothing.
        MismatchError: Compiled and eager differ.
    """
    with ground.launch.ranks.together():
        prepared = _prepare(ground, say)
        training = prepared.training
        training.begin(ground.saved)
        if ground.saved is not None:
            training.evaluations = Evaluations.read(dict(ground.saved.notes), ground.configuration.evaluation.min_improvement)
    return prepared


def _prepare(ground: Groundwork, say: Say) -> Prepared:
    configuration, launch = ground.configuration, ground.launch
    seed_everything(ground.seed)
    # frozen weights in the precision of autocast
    base = load_model(configuration.model, ground.tokenizer, launch.precision)
    model = base.model.to(launch.device)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(stream_seed(ground.seed, "adapters"))
    adapters = attach_adapter(base.model, configuration.method, generator=generator, label=launch.label)
    model.train()
    parameters = adapters.parameters()
    num_parameters = sum(value.numel() for value in parameters.values())
    say(f"adapter: {configuration.method.name} on {len(adapters.layers)} layers, {num_parameters:,} parameters")
    recipe = Recipe(model=model, device=launch.device, precision=launch.precision)
    require_looking_back(recipe, len(ground.tokenizer))
    if configuration.data.packing:
        require_separate_documents(recipe, len(ground.tokenizer))
    batches = _batches(ground, ground.train, base, seed=ground.seed)
    base.require_positions(batches.widths[-1], launch.label("data.max_length"))
    say(str(batches))
    held_out = None if ground.held_out is None else _batches(ground, ground.held_out, base, seed=None, widths=batches.widths)
    # as the model itself knows it, which is what readers of the adapter compare; training.json has the path that was given
    name = str(getattr(base.model.config, "_name_or_path", "") or base.path)
    writer = AdapterWriter(adapters=adapters, configuration=configuration, seed=ground.seed, base=name)
    if writer.peft_refusal:
        say(f"note: the adapter is saved in onegraph's format only. {writer.peft_refusal}")
    accumulation = configuration.run.gradient_accumulation_steps
    num_steps = configuration.run.max_train_steps
    if num_steps is None:
        num_steps = (configuration.run.max_train_epochs or DEFAULT_EPOCHS) * batches.steps_per_epoch(accumulation)
    adaptive = all(isinstance(method, AdaLoRA) for method in adapters.methods("default").values())
    allocation = Allocation(adapters, configuration.allocation, num_steps) if adaptive else None
    fingerprints = _fingerprints(ground, base)
    require_steps_left(ground.saved, num_steps, "--steps ")
    group = {"params": list(parameters.values()), "lr": configuration.optimizer.rate, "name": "adapter"}
    optimizer = make_optimizer(configuration.optimizer, [group], label=launch.label)
    schedule = make_schedule(configuration.schedule, optimizer, num_steps, optimizer_settings=configuration.optimizer, label=launch.label)
    subject = Subject(models={"model": model}, parts={"model": adapters}, parameters=parameters, precision=launch.precision, hint=HINT)
    warmed = _warm_up(ground, subject, recipe, batches, held_out, say)
    num_epochs = batches.num_epochs(num_steps, accumulation)
    strict = configuration.compile.check == "strict" and launch.compile_settings.active
    training = Training(
        batches=batches,
        configuration=configuration,
        recipe=recipe,
        plan=SavePlan(configuration.saving),
        writer=writer,
        held_out=held_out,
        parameters=parameters,
        allocation=allocation,
        optimizer=optimizer,
        schedule=schedule,
        scaler=launch.scaler,
        accumulation=accumulation,
        max_grad_norm=configuration.run.max_grad_norm,
        num_steps=num_steps,
        num_epochs=num_epochs,
        seed=ground.seed,
        fingerprints=fingerprints,
        progress=launch.progress(
            num_steps, num_epochs, done=ground.saved.position.step if ground.saved else 0, quiet=configuration.logging.quiet
        ),
        ranks=launch.ranks,
        watch=warmed.watch,
        check=(lambda batch: subject.compare(_loss_of(recipe, batch))) if strict else None,
        board=_make_board(ground),
    )
    training.timings.add_compile(warmed.watch.compile_seconds)
    return Prepared(training=training, base=base, adapters=adapters, warm_up=warmed)


def _warm_up(ground: Groundwork, subject: Subject, recipe: Recipe, batches: Batches, held_out: Batches | None, say: Say) -> WarmUp:
    """Compiles the model in place; every width is run once in training and once in evaluation."""
    configuration, settings = ground.configuration, ground.launch.compile_settings
    compiled = compile(subject.models["model"], settings, gradient_checkpointing=configuration.run.gradient_checkpointing)
    widths = {*batches.widths, *(held_out.widths if held_out is not None else ())}
    done = WarmUp(
        settings=settings,
        compiled=[compiled],
        watch=Watch().start(),
        num_shapes=len(widths),
        shape="width",
        check=configuration.compile.check,
        check_hint="compile.check = start",
    )

    def steps() -> Iterator[tuple[str, Loss]]:
        for batch in batches.one_of_each_width():
            yield f"{batch['input_ids'].shape[0]} x {batch['input_ids'].shape[1]} tokens", _loss_of(recipe, batch)

    def evaluate() -> None:
        if held_out is not None:
            recipe.mean_loss(held_out.one_of_each_width())

    return warm_up(done, subject, steps, seed=ground.seed, say=say, also=evaluate)


def _loss_of(recipe: Recipe, batch: Batch) -> Loss:
    return lambda dtype: recipe.loss(batch, dtype=dtype)


def _batches(ground: Groundwork, encoded: Encoded, base: BaseModel, *, seed: int | None, widths: list[int] | None = None) -> Batches:
    data = ground.configuration.data
    return Batches(
        encoded.documents,
        batch_size=data.batch_size,
        max_length=data.max_length,
        packing=data.packing,
        num_widths=data.num_widths,
        pad_id=base.pad_id,
        seed=seed,
        widths=widths,
        ranks=ground.launch.ranks,
    )


def _fingerprints(ground: Groundwork, base: BaseModel) -> dict[str, str]:
    """Which base model and which rows."""
    found = {"base model": base.fingerprint(), **ground.fingerprints, **ground.launch.ranks.fingerprint(ground.saved)}
    if ground.saved is not None:
        check_fingerprints(ground.saved, found, FREEDOM)
    return found


def _make_board(ground: Groundwork) -> TensorBoard | None:
    folder = ground.configuration.logging.logging_dir
    if folder is None or not ground.launch.ranks.first:
        return None
    return TensorBoard(run_folder(Path(folder), "", ground.started_at, "train_text"), settings_record(ground))
