"""``og.check``: a user's model and batch, compiled against eager: outputs, gradients, other situations, a training run, graphs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onegraph.checking.bisect import Culprit, find_culprit
from onegraph.checking.comparison import Comparison
from onegraph.checking.report import Report
from onegraph.checking.script import write_script
from onegraph.checking.situations import Situation, Variation, run, skipped_in_eager
from onegraph.checking.step import gradients_kept, probe_values, without_dropout
from onegraph.checking.subject import Subject, buffers_kept, subject_of, without_model_dropout
from onegraph.checking.train_run import train
from onegraph.checking.variations import situations
from onegraph.compiling import Compiled, CompileSettings, Watch, break_mark, breaks_since, compile, compiled_of, set_aside
from onegraph.compiling.failures import explained
from onegraph.errors import CompileError, ConfigurationError, NumericsError, OutputError

FIRST = "the batch itself"
_RANDOM = {"fallback_random": True}
# Of the norm of all gradients: where eager's own error is larger, agreement says little.
_MUCH = 0.2


def check(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    settings: CompileSettings | None = None,
    reference: torch.dtype | None = None,
    thorough: bool | Sequence[str] = False,
    steps: int | None = None,
    bisect: bool | None = None,
    script: str | Path | None = None,
    name: str = "",
    say: Callable[[str], None] = lambda _: None,
    **overrides: Any,
) -> Report:
    """Runs ``model`` on ``batch``, compiled and eager, in training and in inference, and compares.

    A model that is compiled by ``onegraph.compile`` already is checked as it is; another one is compiled for the check and put back.
    Weights, gradients, buffers, adapters, dropouts and the random state are afterwards what they were.

    Args:
        model: The model, with or without adapters. Its trained parameters are those with ``requires_grad``.
        batch: A mapping (passed as keywords), a tuple (passed as positions) or one tensor. Inputs that require a gradient have theirs
            checked.
        loss: From the model's output to a scalar; by default its ``loss``, else a fixed random projection of its floating-point tensors.
        settings: How to compile; see ``onegraph.compile``, as ``**overrides``. ``backend`` may be "module:function".
        reference: The dtype of the reference; by default float64 where memory and the model allow it, else float32, else the model's own.
        thorough: Try other situations too: batches of other sizes, gradients of all inputs, weights changed in place, adapters switched,
            disabled and mixed in rows, dropouts. Names of situations: those alone.
        steps: Length of a training run, compiled and eager; 20 when ``thorough``, else none.
        bisect: When something differs, look for the backend, region and module that do it; by default when ``thorough``.
        script: A folder for a program that shows the fault with that module alone.
        name: A name for the report.
        say: Gets lines of progress.

    Raises:
        ConfigurationError: ``nothing-trained``: no parameter requires a gradient; ``backend-not-found``; ``situation-unknown``.
        NumericsError: Eager itself gives NaN or infinity.
        CompileError: ``graph-break`` under ``fullgraph``, ``backend-failed``, ``recompile-limit``, ``not-compiled``.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            "No parameter of the model requires a gradient, so there is no gradient to check.",
            hint="attach an adapter first: onegraph.attach(model, onegraph.LoRA(rank=8), targets=[...])",
            code="nothing-trained",
        )
    settings, backend_name = _with_backend(settings, overrides)
    subject = subject_of(model, batch, loss=loss, reference=reference)
    chosen = _chosen(situations(subject), thorough) if thorough else []
    earlier = compiled_of(model)
    compiled = earlier if earlier is not None else compile(model, settings, **_drawn(subject, settings, overrides))
    backend_name = backend_name or str(compiled.settings.backend)
    run_length = steps if steps is not None else 20 if thorough else 0
    try:
        with _as_before(subject), explained(str(compiled.settings.backend)):
            report = _measured(subject, compiled, backend_name, chosen, steps=run_length, name=name, say=say)
            if earlier is None and not report.graphs:
                report = replace(report, compiled_nothing=True)
            if _faulty(report) and (thorough if bisect is None else bisect):
                culprit = _located(subject, compiled, report, backend_name, None if script is None else Path(script), say)
                report = replace(report, culprit=culprit)
    finally:
        if earlier is None:
            compiled.restore()
    return report


def _measured(
    subject: Subject,
    compiled: Compiled,
    backend_name: str,
    chosen: Sequence[Situation],
    *,
    steps: int,
    name: str,
    say: Callable[[str], None],
) -> Report:
    watch, mark = Watch().start(), break_mark()
    try:
        say(f"compiling {compiled} ...")
        first = run(subject, Situation(name=FIRST))
        watch.warm()
        # the second round, where nothing is new
        _again(subject)
        recompiles = tuple(watch.recompiles)
        training = None
        if steps > 1:
            say(f"{steps} steps, eager and compiled ...")
            training = train(subject, steps=steps)
        variations = [
            _with_dropout(subject, situation, compiled, backend_name, say)
            if situation.random
            else _tried(subject, situation, backend_name, say)
            for situation in chosen
        ]
    finally:
        watch.stop()
    assert first.comparison is not None
    return Report(
        comparison=first.comparison,
        output_error=first.output_error,
        output_allowed=first.comparison.tolerance.total,
        outputs=first.outputs,
        graphs=watch.graphs,
        breaks=watch.breaks,
        break_points=breaks_since(mark),
        recompiles=recompiles,
        compile_seconds=watch.compile_seconds,
        phases=watch.phases,
        compiled=str(compiled).replace(str(compiled.settings.backend), backend_name),
        name=name,
        variations=tuple(variations),
        training=training,
        notes=_notes(subject, first.comparison),
    )


def _faulty(report: Report) -> bool:
    """Whether a number is wrong, so that a module can be looked for."""
    failed = any(variation.failed for variation in report.variations)
    others = replace(report, variations=tuple(variation for variation in report.variations if not variation.failed)) if failed else report
    return not others.agrees


def _chosen(known: list[Situation], wanted: bool | Sequence[str]) -> list[Situation]:
    """All of them, or those named.

    Raises:
        ConfigurationError: ``situation-unknown``.
    """
    if isinstance(wanted, bool):
        return known
    names = [situation.name for situation in known]
    for name in wanted:
        if name not in names:
            raise ConfigurationError(
                f"There is no situation {name!r} for this model and batch.", hint=f"there are: {', '.join(names)}", code="situation-unknown"
            )
    return [situation for situation in known if situation.name in wanted]


def _again(subject: Subject) -> None:
    with torch.random.fork_rng(devices=[]), without_model_dropout(subject.model):
        subject.model.train()
        subject.loss(subject.call(subject.batch)).backward()  # type: ignore[no-untyped-call]
        subject.model.eval()
        with torch.no_grad():
            subject.call(subject.batch)


def _tried(subject: Subject, situation: Situation, backend: str, say: Callable[[str], None]) -> Variation:
    say(f"situation: {situation.name} ...")
    try:
        reason = skipped_in_eager(subject, situation)
        if reason:
            return Variation(name=situation.name, skipped=reason)
        with explained(backend):
            return run(subject, situation)
    except NumericsError as error:
        return Variation(name=situation.name, skipped=error.what)
    except CompileError as error:  # what was found so far counts
        return Variation(name=situation.name, failed=" ".join(filter(None, (error.what, error.why))))


def _with_dropout(subject: Subject, situation: Situation, compiled: Compiled, backend: str, say: Callable[[str], None]) -> Variation:
    """Inductor draws its own random numbers unless told otherwise, so this needs another compilation."""
    if compiled.settings.backend != "inductor":
        return _tried(subject, situation, backend, say)
    protect = bool(compiled.protections)
    with set_aside(subject.model):
        other = compile(subject.model, compiled.settings, options={**compiled.settings.options, **_RANDOM}, protect=protect)
        try:
            return _tried(subject, situation, backend, say)
        finally:
            other.restore()


def _located(
    subject: Subject, compiled: Compiled, report: Report, backend_name: str, folder: Path | None, say: Callable[[str], None]
) -> Culprit:
    situation, suspects = _where(subject, report)
    protect = bool(compiled.protections) or compiled.settings.backend != "inductor"
    settings = compiled.settings
    if situation.random and settings.backend == "inductor":
        settings = replace(settings, options={**settings.options, **_RANDOM})
    try:
        culprit, found = find_culprit(subject, situation, settings, backend_name=backend_name, protect=protect, suspects=suspects, say=say)
    except Exception as error:  # what was found wrong stays wrong
        said = f"the search for it failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Culprit(situation=situation.name, backend="", backends={}, note=said)
    if found is None or folder is None:
        return culprit
    own, there = found
    first_wrong = settings.backend if culprit.backend == backend_name else culprit.backend
    adapters = [] if subject.adapters is None else [subject.adapters]
    with set_aside(subject.model), without_dropout(adapters), probe_values(subject.trained()):
        try:
            path, shown, note = write_script(
                folder,
                own,
                there,
                backend=first_wrong,
                backend_name=culprit.backend,
                options=settings.options,
                dynamic=settings.dynamic,
                allowed=report.comparison.tolerance.relative,
            )
        except OutputError as error:  # a full disk doesn't take back what was found
            path, shown, note = None, None, f"no script: {error.what}"
    notes = "; ".join(filter(None, (culprit.note, note)))
    return replace(culprit, script=path, shown=shown, note=notes)


def _where(subject: Subject, report: Report) -> tuple[Situation, list[str]]:
    """The first situation that is wrong, and the parameters with wrong gradients in it."""
    if not report.comparison.right or any(row.wrong for row in report.outputs):
        return Situation(name=FIRST), [row.name for row in report.comparison.faults]
    wrong = next((variation for variation in report.variations if variation.outcome == "wrong" and not variation.failed), None)
    if wrong is None:  # the training run alone: weights that change between two calls
        return next(situation for situation in situations(subject) if situation.name == "weights changed in place"), []
    faults = [] if wrong.comparison is None else [row.name.rpartition(": ")[2] for row in wrong.comparison.faults]
    return next(situation for situation in situations(subject) if situation.name == wrong.name), faults


@contextlib.contextmanager
def _as_before(subject: Subject) -> Iterator[None]:
    """Afterwards the model is as it was, and until then nothing that is trained is all zero."""
    parameters = subject.trained()
    was_training = subject.model.training
    modes = [(module, module.training) for module in subject.model.modules()]
    with torch.random.fork_rng(), gradients_kept(parameters), buffers_kept(subject.model), probe_values(parameters):
        try:
            yield
        finally:
            subject.model.train(was_training)
            for module, mode in modes:
                module.training = mode


def _drawn(subject: Subject, settings: CompileSettings | None, overrides: dict[str, Any]) -> dict[str, Any]:
    """A model that draws random numbers of its own is compiled so that it draws eager's."""
    backend = overrides.get("backend", settings.backend if settings is not None else CompileSettings().backend)
    if not subject.draws or backend != "inductor":
        return overrides
    options = overrides.get("options", settings.options if settings is not None else {})
    return {**overrides, "options": {**options, **_RANDOM}}


def _with_backend(settings: CompileSettings | None, overrides: dict[str, Any]) -> tuple[CompileSettings | None, str]:
    """A backend given as "module:function" is that function; the name is kept."""
    named = overrides.get("backend", settings.backend if settings is not None else "")
    if not isinstance(named, str):
        return settings, str(getattr(named, "__qualname__", "") or f"{type(named).__name__} object")
    module, colon, attribute = named.partition(":")
    if not colon:
        return settings, named
    try:
        overrides["backend"] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The backend {named} can't be found: {error}",
            why="It is read as the function of that name in that module.",
            hint="a module that Python can import, then a colon, then a function: my_package.my_backends:mine",
            code="backend-not-found",
        ) from error
    return settings, named


def _notes(subject: Subject, comparison: Comparison) -> tuple[str, ...]:
    notes = []
    if comparison.eager_total_error > _MUCH:
        off = f"eager itself is off by {comparison.eager_total_error:.0%} in this precision"
        notes.append(f"{off}, so only large faults can be seen: check it in fp32 too")
    reference = str(subject.reference).removeprefix("torch.")
    if subject.draws:
        notes.append(f"the model draws random numbers of its own, so the reference is eager in {reference}, with the same numbers")
    elif subject.reference != torch.float64:
        notes.append(f"the reference is eager in {reference}: another one was asked for, or float64 doesn't fit or doesn't run")
    return tuple(notes)
