"""Everything that a training run of a language model is told, as documented settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.allocation_settings import AllocationSettings
from onegraph.training.compile_flags import CompileFlags
from onegraph.training.optimizers import OptimizerSettings, optimizer_problems
from onegraph.training.schedules import ScheduleSettings, schedule_problems
from onegraph.training.settings import range_problems, setting

Label = Callable[[str], str]

DEFAULT_EPOCHS = 3


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The language model."""

    path: str = setting("", "a folder of transformers, a .gguf file, or a name on the Hugging Face Hub")
    tokenizer: str | None = setting(None, "folder or name of the tokenizer; the model's own when absent")
    chat_template: str | None = setting(None, "file with a chat template (Jinja); the tokenizer's own when absent")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is learnt, and how it is laid into batches."""

    train: tuple[str, ...] = setting((), "files (.jsonl, .json) or folders of them")
    validation: tuple[str, ...] = setting((), "files or folders of held-out rows")
    validation_share: float = setting(0.0, "share of the training rows that is held out, drawn by the seed", low=0.0, below=1.0)
    train_on: str = setting(
        "answers",
        "which tokens have a loss: those of the assistant or the completion, those of the last answer only, or all",
        choices=("answers", "last_answer", "all"),
    )
    max_length: int = setting(1024, "tokens of a row at most", low=2)
    long: str = setting("truncate", "what happens to a longer row", choices=("truncate", "drop", "split"))
    batch_size: int = setting(8, "rows in a batch", low=1)
    packing: bool = setting(False, "several documents in one row of max_length tokens; they don't see each other")
    num_widths: int = setting(4, "widths that batches are padded to, at most; each is a shape to compile", low=1, high=64)


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """Which adapter goes where."""

    name: str = setting("lora", "lora, dora, oft or another method")
    arguments: tuple[str, ...] = setting((), "fields of the method, as name=value")
    targets: tuple[str, ...] = setting((), "endings of the layers to adapt, or all-linear; all that the method can take when absent")
    exclude: tuple[str, ...] = setting((), "layers that are taken out again")


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Which number formats the run computes in. Adapters are kept in fp32."""

    mixed_precision: str | None = setting(
        None, "autocast, and the frozen weights: as accelerate is configured when absent", choices=("no", "fp16", "bf16")
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long the run is, how a step is made, and where it starts."""

    max_train_steps: int | None = setting(None, "optimizer steps", low=1)
    max_train_epochs: int | None = setting(None, f"epochs; {DEFAULT_EPOCHS} when neither is given", low=1)
    gradient_accumulation_steps: int = setting(1, "batches in an optimizer step; never changes how many steps are made", low=1)
    gradient_checkpointing: bool = setting(False, "compute activations again in backward to save memory")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm; 0: never", low=0.0)
    seed: int | None = setting(None, "seed of everything random; drawn and recorded when absent", low=0, high=2**32 - 1)
    resume: str | None = setting(None, "state folder to go on from")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The loss on held-out rows."""

    every_n_steps: int | None = setting(None, "evaluate every Nth optimizer step", low=1)
    every_n_epochs: int | None = setting(None, "evaluate after every Nth epoch; 1 when neither is given", low=1)
    at_first: bool = setting(True, "evaluate before the first step too")
    patience: int | None = setting(None, "end the run after this many evaluations without a new lowest loss", low=1)
    min_improvement: float = setting(0.0, "how much lower a loss must be to count as a new lowest", low=0.0)


@dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """What a run writes."""

    output_dir: str = setting("", "folder for everything that the run writes")
    output_name: str = setting("adapter", "name of the adapter's folder in it")
    save_precision: str | None = setting(None, "number format of the saved tensors; float when absent", choices=("float", "fp16", "bf16"))
    save_every_n_steps: int | None = setting(None, "save after every Nth optimizer step", low=1)
    save_every_n_epochs: int | None = setting(None, "save after every Nth epoch", low=1)
    keep_last: int | None = setting(None, "keep the last N of those", low=1)
    save_state: bool = setting(False, "save the state to resume from with every adapter; a stopped run always saves it")


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """What the run shows and records."""

    logging_dir: str | None = setting(None, "folder for TensorBoard files; nothing is recorded when absent")
    quiet: bool = setting(False, "no progress: only the blocks at the start and the end, warnings and errors")


@dataclass(frozen=True, kw_only=True)
class TextConfiguration:
    """Everything that a training run is told.

    Example:
        >>> TextConfiguration(run=RunSettings(max_train_steps=10)).run.max_train_steps
        10
    """

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    method: MethodSettings = MethodSettings()
    allocation: AllocationSettings = field(default_factory=AllocationSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    precision: PrecisionSettings = PrecisionSettings()
    compile: CompileFlags = field(default_factory=CompileFlags)
    run: RunSettings = RunSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    saving: SavingSettings = SavingSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def held_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        return bool(self.data.validation) or self.data.validation_share > 0

    def problems(self, device: str | None = None, *, label: Label = str) -> list[OnegraphError]:
        """All that is wrong with the settings, at once; empty when nothing is.

        Args:
            device: Kind of device the run will use, for the problems that depend on it; None leaves them out.
            label: How a setting is called in the messages: "run.seed" -> "--seed".
        """
        found = [*range_problems(self, label), *_contradictions(self, label)]
        found += optimizer_problems(self.optimizer, label)
        found += schedule_problems(self.schedule, self.optimizer, label)
        if device == "cpu" and self.precision.mixed_precision == "fp16":
            what = f"{label('precision.mixed_precision')} is fp16, and the run is on a CPU"
            why = "CPUs compute fp16 slowly, and its narrow range costs accuracy there for nothing."
            found.append(ConfigurationError(what, why=why, hint="bf16, or no", code="fp16-on-cpu"))
        return found


def _contradictions(settings: TextConfiguration, label: Label) -> Iterator[OnegraphError]:
    """What is missing, and what doesn't go together."""
    for path, value, meaning, example in (
        ("model.path", settings.model.path, "the model to train on", "a folder of transformers, or a .gguf file"),
        ("data.train", settings.data.train, "the rows to learn", "a .jsonl file, or a folder of them"),
        ("saving.output_dir", settings.saving.output_dir, "where the adapter goes", "a folder, such as out"),
    ):
        if not value:
            yield ConfigurationError(f"{label(path)} is missing", why=f"It says {meaning}.", hint=example, code="missing-setting")
    pairs = (
        ("data.validation", settings.data.validation, "data.validation_share", settings.data.validation_share),
        ("run.max_train_steps", settings.run.max_train_steps, "run.max_train_epochs", settings.run.max_train_epochs),
        ("evaluation.every_n_steps", settings.evaluation.every_n_steps, "evaluation.every_n_epochs", settings.evaluation.every_n_epochs),
    )
    for first, one, second, other in pairs:
        if one and other:
            what = f"{label(first)} and {label(second)} are both given"
            yield ConfigurationError(
                what, why="Each of them answers the same question.", hint="leave out one of them", code="contradiction"
            )
    if not settings.held_out:
        for name in ("every_n_steps", "every_n_epochs", "patience"):
            if getattr(settings.evaluation, name) is not None:
                what = f"{label(f'evaluation.{name}')} is given, and no rows are held out"
                hint = f"add {label('data.validation')} or {label('data.validation_share')}"
                yield ConfigurationError(what, why="There is nothing to evaluate on.", hint=hint, code="contradiction")
    if settings.allocation != AllocationSettings() and settings.method.name.lower() != "adalora":
        yield ConfigurationError(
            f"[allocation] is given, and {label('method.name')} is {settings.method.name}",
            why="Only AdaLoRA has ranks that are taken away in training.",
            hint=f"{label('method.name')} = adalora, or no [allocation]",
            code="contradiction",
        )
    name = settings.saving.output_name
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        yield ConfigurationError(
            f"{label('saving.output_name')} is {name!r}", hint="a name without slashes; the folder is saving.output_dir", code="bad-value"
        )
