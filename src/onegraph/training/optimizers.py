"""Names -> optimizers, each from the library that wrote it. Importing this file imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from onegraph.errors import ConfigurationError, OnegraphError, nearest
from onegraph.training.settings import parse_arguments, setting

if TYPE_CHECKING:
    from torch.optim import Optimizer

Label = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, its learning rate and its arguments."""

    name: str = setting("AdamW", "optimizer, such as AdamW, AdamW8bit, Lion, Prodigy, Adafactor, or a dotted path to a class")
    arguments: tuple[str, ...] = setting((), "name=value, each value a Python literal, for the optimizer's constructor")
    learning_rate: float | None = setting(None, "learning rate; 1e-4 when absent, 1 for Prodigy and D-Adaptation", low=0.0, high=1e6)

    @property
    def rate(self) -> float:
        """The learning rate, its default filled in."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1.0 if self.name.lower().startswith(("prodigy", "dadapt")) else 1e-4

    def further_rates(self, *, one_rate: bool) -> Mapping[str, float]:
        """Rates and ratios that were given beside the learning rate, by setting; with ``one_rate`` those only that differ from it."""
        return {}


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """Where an optimizer comes from, and its rules.

    Args:
        path: Dotted path of the class.
        install: The pip command when the package is not one of onegraph's own.
        arguments: Arguments that the name implies.
        needs_cuda: Whether it keeps its state in CUDA's paged memory.
        one_rate: Whether it finds its own step size and therefore takes one learning rate for everything.
        schedule_free: Whether it replaces the learning-rate schedule and has a training and an evaluation form of the weights.
    """

    path: str
    install: str = ""
    arguments: Mapping[str, object] | None = None
    needs_cuda: bool = False
    one_rate: bool = False
    schedule_free: bool = False


def _table() -> dict[str, OptimizerEntry]:
    """Every name of the field, as its programs spell it."""
    bitsandbytes, dadaptation = "pip install bitsandbytes", "pip install dadaptation"
    prodigy, schedule_free, lion = "pip install prodigyopt", "pip install schedulefree", "pip install lion-pytorch"
    nesterov = {"nesterov": True, "momentum": 0.9}
    table = {
        "AdamW": OptimizerEntry(path="torch.optim.AdamW"),
        "SGDNesterov": OptimizerEntry(path="torch.optim.SGD", arguments=nesterov),
        "Adafactor": OptimizerEntry(path="transformers.optimization.Adafactor"),
        "Lion": OptimizerEntry(path="lion_pytorch.Lion", install=lion),
        "AdamW8bit": OptimizerEntry(path="bitsandbytes.optim.AdamW8bit", install=bitsandbytes),
        "Lion8bit": OptimizerEntry(path="bitsandbytes.optim.Lion8bit", install=bitsandbytes),
        "AdEMAMix8bit": OptimizerEntry(path="bitsandbytes.optim.AdEMAMix8bit", install=bitsandbytes),
        "SGDNesterov8bit": OptimizerEntry(path="bitsandbytes.optim.SGD8bit", install=bitsandbytes, arguments=nesterov),
        "Prodigy": OptimizerEntry(path="prodigyopt.Prodigy", install=prodigy, one_rate=True),
        "DAdaptation": OptimizerEntry(path="dadaptation.experimental.DAdaptAdamPreprint", install=dadaptation, one_rate=True),
        "DAdaptAdamPreprint": OptimizerEntry(path="dadaptation.experimental.DAdaptAdamPreprint", install=dadaptation, one_rate=True),
        "DAdaptAdanIP": OptimizerEntry(path="dadaptation.experimental.DAdaptAdanIP", install=dadaptation, one_rate=True),
    }
    for name in ("PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit", "PagedAdEMAMix8bit"):
        table[name] = OptimizerEntry(path=f"bitsandbytes.optim.{name}", install=bitsandbytes, needs_cuda=True)
    for name in ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"):
        table[name] = OptimizerEntry(path=f"dadaptation.{name}", install=dadaptation, one_rate=True)
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        table[name] = OptimizerEntry(path=f"schedulefree.{name}", install=schedule_free, schedule_free=True)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
        table[name] = OptimizerEntry(path=f"torch.optim.{name}")
    return table


OPTIMIZERS: Mapping[str, OptimizerEntry] = _table()


def find_optimizer(name: str, label: str = "the optimizer") -> OptimizerEntry:
    """The entry of a name, upper and lower case alike, or of a dotted path to a class.

    Raises:
        ConfigurationError: ``unknown-optimizer``: neither a known name nor a dotted path.
    """
    lowered = {known.lower(): known for known in OPTIMIZERS}
    if name.lower() in lowered:
        return OPTIMIZERS[lowered[name.lower()]]
    if "." in name:
        return OptimizerEntry(path=name, schedule_free=name.lower().endswith("schedulefree"))
    near = [lowered[match] for match in nearest(name.lower(), lowered)]
    raise ConfigurationError(
        f"{label} is {name!r}, which is no optimizer we know",
        why="It takes the name of a known optimizer, or a dotted path to a class such as torch.optim.RAdam.",
        hint=f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(OPTIMIZERS)}",
        code="unknown-optimizer",
    )


def load_class(path: str, label: str, install: str = "") -> type:
    """The class at a dotted path.

    Raises:
        ConfigurationError: ``missing-package``: not installed; ``unknown-class``: the module has no such class.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        package = module_name.split(".")[0]
        raise ConfigurationError(
            f"{label} needs {path}, and {module_name} can't be imported",
            why=str(error),
            hint=install or f"install the package that has the module {package}",
            code="missing-package",
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        near = nearest(class_name, [name for name, value in vars(module).items() if isinstance(value, type)])
        raise ConfigurationError(
            f"{label}: {module_name} has no class {class_name}",
            hint=f"did you mean {', '.join(near)}?" if near else "check the spelling of the dotted path",
            code="unknown-class",
        )
    return found


def check_argument_names(factory: Callable[..., object], arguments: Mapping[str, object], reserved: Sequence[str], label: str) -> None:
    """Refuse arguments that the class or function doesn't take, or that another setting decides.

    Raises:
        ConfigurationError: ``bad-argument``.
    """
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in reserved]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    problems: list[OnegraphError] = []
    for name in arguments:
        if name in reserved:
            what = f"{label}: {name} is decided by another setting"
            problems.append(ConfigurationError(what, hint=f"leave it out of {label}", code="bad-argument"))
        elif name not in known and not takes_all:
            near = nearest(name, known)
            what = f"{label}: {getattr(factory, '__name__', 'it')} takes no argument {name!r}"
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            problems.append(ConfigurationError(what, hint=hint, code="bad-argument"))
    if problems:
        raise ConfigurationError.collected(problems)


def optimizer_problems(settings: OptimizerSettings, label: Label) -> Iterator[OnegraphError]:
    """All that is wrong with an optimizer's settings and can be known before there is a model.

    Args:
        settings: Name, arguments and learning rates.
        label: How a setting is called in the messages: "optimizer.name" -> "--optimizer_type".
    """
    name_label, arguments_label = label("optimizer.name"), label("optimizer.arguments")
    try:
        entry = find_optimizer(settings.name, name_label)
        arguments = parse_arguments(settings.arguments, arguments_label)
        package = entry.path.split(".")[0]
        if entry.install and importlib.util.find_spec(package) is None:
            what = f"{name_label} {settings.name} needs the package {package}, which is not installed"
            raise ConfigurationError(what, hint=entry.install, code="missing-package")
        if arguments or entry.path == settings.name:  # a known name without arguments needs no look into its package, which takes seconds
            check_argument_names(load_class(entry.path, name_label, entry.install), arguments, _RESERVED, arguments_label)
    except OnegraphError as error:
        yield from error.problems if isinstance(error, ConfigurationError) and error.problems else (error,)
        return
    if entry.one_rate or (entry.path.endswith(".Adafactor") and _relative_step(arguments)):
        yield from _rate_problems(settings, entry, label)


_RESERVED = ("self", "params", "lr")


def _relative_step(arguments: Mapping[str, object]) -> bool:
    """Whether Adafactor computes its own learning rate: it does unless told otherwise."""
    return bool(arguments.get("relative_step", True) or arguments.get("warmup_init", False))


def _rate_problems(settings: OptimizerSettings, entry: OptimizerEntry, label: Label) -> Iterator[OnegraphError]:
    """Learning rates that an optimizer which finds its own can't honour."""
    own = f"{settings.name} finds its own step size"
    why = f"{own}, one for all parameters." if entry.one_rate else "With relative_step=True Adafactor computes the learning rate itself."
    hint = "leave it out" if entry.one_rate else f'leave it out, or add {label("optimizer.arguments")} "relative_step=False"'
    for name, value in settings.further_rates(one_rate=entry.one_rate).items():
        what = f"{label('optimizer.' + name)} is {value}, with optimizer {settings.name}"
        yield ConfigurationError(what, why=why, hint=hint, code="learning-rates")


def make_optimizer(settings: OptimizerSettings, groups: Sequence[dict[str, Any]], *, label: Label = str) -> Optimizer:
    """The optimizer of a name, over groups with their own learning rates.

    Args:
        settings: Name and arguments.
        groups: What ``parameter_groups`` gave.
        label: How a setting is called in the messages.

    Raises:
        ConfigurationError: ``unknown-optimizer``, ``missing-package``, ``bad-argument``, ``learning-rates``;
            ``optimizer-needs-cuda``: a paged optimizer with parameters that are not on a CUDA device;
            ``nothing-to-train``: no parameters.
    """
    problems = list(optimizer_problems(settings, label))
    if problems:
        raise ConfigurationError.collected(problems)
    entry = find_optimizer(settings.name, label("optimizer.name"))
    arguments = {**(entry.arguments or {}), **parse_arguments(settings.arguments, label("optimizer.arguments"))}
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not parameters:
        raise ConfigurationError("there is nothing to train: no adapter has a parameter", code="nothing-to-train")
    if entry.needs_cuda and any(parameter.device.type != "cuda" for parameter in parameters):
        raise ConfigurationError(
            f"{label('optimizer.name')} is {settings.name}, and the adapters are on {parameters[0].device}",
            why="Paged optimizers keep their state in CUDA's unified memory.",
            hint=f"use {entry.path.rpartition('.')[2].replace('Paged', '').replace('32bit', '')} here",
            code="optimizer-needs-cuda",
        )
    made = [dict(group) for group in groups]
    rate: float | None = settings.rate
    if entry.path.endswith(".Adafactor") and entry.path.startswith("transformers"):
        arguments["relative_step"] = _relative_step(arguments)
        if arguments["relative_step"]:
            rate, made = None, [{name: value for name, value in group.items() if name != "lr"} for group in made]
    found = load_class(entry.path, label("optimizer.name"), entry.install)
    try:
        return cast("Optimizer", found(made, lr=rate, **arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(settings.arguments) or "none"
        raise ConfigurationError(
            f"{settings.name} can't be made with learning rate {rate} and the arguments: {given}",
            why=str(error),
            hint=f"see {entry.path} for the values it takes",
            code="bad-argument",
        ) from error


def before_training(optimizer: object) -> None:
    """Call before the first step and after each ``before_saving``: schedule-free optimizers put the training form of the weights back."""
    _call(optimizer, "train")


def before_saving(optimizer: object) -> None:
    """Call before weights are saved, sampled from or evaluated: schedule-free optimizers put the averaged weights in place."""
    _call(optimizer, "eval")


def _call(optimizer: object, name: str) -> None:
    """Call a method that only schedule-free optimizers have."""
    method = getattr(optimizer, name, None)
    if callable(method):
        method()
