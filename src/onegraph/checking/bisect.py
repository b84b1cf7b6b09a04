"""Where a compiled model is wrong: which backend first, which region, and the smallest module in it that is wrong by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from onegraph.checking.comparison import GradientRow
from onegraph.checking.isolation import Captured, alone, called_inside, capture, history, run_alone, signature
from onegraph.checking.situations import Situation, Variation, run
from onegraph.checking.step import probe_values, without_dropout
from onegraph.checking.subject import Subject
from onegraph.compiling import CompileSettings, compile, regions_of, set_aside
from onegraph.compiling.failures import explained
from onegraph.errors import OnegraphError

# Each takes what comes before it and adds a stage: tracing, differentiating, generating code.
LADDER = ("eager", "aot_eager")
_MOST_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Where the fault is.

    Args:
        situation: In which situation it was looked for.
        backend: The first backend that is wrong; empty when the whole model is right with each, so that the fault couldn't be shown again.
        backends: Backend -> "right", "wrong", or why it couldn't run, in the order tried.
        region: Path of the first compiled region that is wrong by itself.
        path: Path of the smallest module that is wrong by itself; "" is the whole model.
        class_name: Its class.
        faults: Its wrong outputs and gradients.
        tried: How many modules were compiled by themselves.
        note: What else is to be said.
        script: A program that shows the fault with this module alone, when one was asked for and could be written.
        shown: Whether the script was run and showed it.
    """

    situation: str
    backend: str
    backends: Mapping[str, str]
    region: str | None = None
    path: str | None = None
    class_name: str = ""
    faults: tuple[GradientRow, ...] = ()
    tried: int = 0
    note: str = ""
    script: Path | None = None
    shown: bool | None = None

    def __str__(self) -> str:
        lines = ["backends    " + (", ".join(f"{name} {verdict}" for name, verdict in self.backends.items()) or "not tried")]
        if self.path is not None:
            where = f"{self.path} ({self.class_name})" if self.path else f"the whole model ({self.class_name})"
            lines.append(f"smallest    {where}, in the situation: {self.situation}; {self.tried} modules tried by themselves")
            lines += [f"  wrong     {row}" for row in self.faults[:5]]
        if self.note:
            lines.append(f"  note      {self.note}")
        if self.script is not None:
            shown = {True: "it shows the fault", False: "it does NOT show the fault", None: "not run"}[self.shown]
            lines.append(f"  script    {self.script} ({shown})")
        return "\n".join(lines)


@dataclass
class _Search:
    """A search through the modules with one backend in one situation."""

    subject: Subject
    situation: Situation
    settings: CompileSettings
    protect: bool
    say: Callable[[str], None]
    tried: int = 0
    right: set[str] = field(default_factory=set)
    found: tuple[Subject, Situation, Variation] | None = None

    def first_wrong(self, subject: Subject, situation: Situation, modules: Mapping[str, nn.Module], suspects: Iterable[str]) -> str | None:
        """The first of these modules that is wrong by itself: suspects first, then in the order of their calls, each kind once."""
        plain = capture(subject, Situation(name="plain"), modules)
        there = capture(subject, situation, modules)
        names = list(suspects)
        paths = [path for path in plain if path in there]
        paths.sort(key=lambda path: -sum(_inside(name, path) for name in names))
        # once each kind, then those that look like one that was right
        for again in (False, True):
            for path in paths:
                kind = signature(modules[path], there[path])
                if (kind in self.right) is not again:
                    continue
                if self.tried >= _MOST_TRIED:
                    return None
                if self._is_wrong(subject, situation, path, modules[path], plain[path], there[path]):
                    return path
                self.right.add(kind)
        return None

    def _is_wrong(self, subject: Subject, situation: Situation, path: str, module: nn.Module, plain: Captured, there: Captured) -> bool:
        self.tried += 1
        own, reached = alone(subject, path, module, plain, there, situation)
        self.say(f"bisecting: {own.path} by itself ...")
        try:
            variation = run_alone(own, reached, self.settings, protect=self.protect)
        except Exception:
            return False  # it can't be compared by itself: eager fails in other company, or the backend does
        if variation.outcome == "wrong":
            self.found = own, reached, variation
            return True
        return False


def find_culprit(
    subject: Subject,
    situation: Situation,
    settings: CompileSettings,
    *,
    backend_name: str,
    protect: bool = True,
    suspects: Iterable[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Culprit, tuple[Subject, Situation] | None]:
    """The backend, region and module that are wrong, by compiling less and less; and the module as a subject of its own.

    Args:
        subject: The model that was found wrong.
        situation: The situation in which it was.
        settings: How it was compiled.
        backend_name: The backend's name.
        protect: Whether the switches against known faults of the compiler were set.
        suspects: Names of parameters with wrong gradients: modules that hold them are tried first.
        say: Gets a line of progress.
    """
    # a break is not what is looked for here
    settings = replace(settings, fullgraph=False)
    adapters = [] if subject.adapters is None or situation.random else [subject.adapters]
    with set_aside(subject.model), without_dropout(adapters), probe_values(subject.trained()):
        backends, first = _first_wrong_backend(subject, situation, settings, backend_name, protect, say)
        if first is None:
            note = "compiled once more, the whole model is right with every backend: the fault depends on what was compiled before"
            return Culprit(situation=situation.name, backend="", backends=backends, note=note), None
        search = _Search(subject=subject, situation=situation, settings=first, protect=protect, say=say)
        return _search(search, backends, suspects)


def _search(search: _Search, backends: Mapping[str, str], suspects: Iterable[str]) -> tuple[Culprit, tuple[Subject, Situation] | None]:
    subject, situation = search.subject, search.situation
    names = list(suspects)
    regions = {region.path: region.module for region in regions_of(subject.model)} if search.settings.regions == "blocks" else {}
    regions.pop("", None)
    region = None
    note = ""
    if regions:
        region = search.first_wrong(subject, situation, regions, names)
        if region is None:
            note = "no region is wrong by itself: the fault needs several of them"
    path, here, there = "", subject, situation
    if region is not None and search.found is not None:
        path, (here, there, _) = region, search.found
    while not regions or region is not None:
        called = capture(here, there, dict(here.model.named_modules()))
        inside = called_inside(here.model, [name for name in called if name])
        if not inside:
            break
        local = [name.removeprefix(f"{path}.") for name in names if _inside(name, path)] if path else names
        child = search.first_wrong(here, there, inside, local)
        if child is None:
            if path or search.tried:
                note = f"none of the {len(inside)} modules that it calls is wrong by itself"
            break
        assert search.found is not None
        here, there, _ = search.found
        path = here.path
    faults = tuple(search.found[2].faults) if search.found is not None else ()
    culprit = Culprit(
        situation=situation.name,
        backend=next(name for name, verdict in backends.items() if verdict == "wrong"),
        backends=backends,
        region=region,
        path=path,
        class_name=type(here.model).__name__,
        faults=faults,
        tried=search.tried,
        note=note,
    )
    return culprit, (here, there)


def _first_wrong_backend(
    subject: Subject, situation: Situation, settings: CompileSettings, name: str, protect: bool, say: Callable[[str], None]
) -> tuple[dict[str, str], CompileSettings | None]:
    """Tries tracing alone, then differentiating, then the backend itself."""
    rungs = {rung: replace(settings, backend=rung, mode="default", options={}) for rung in LADDER if rung != name}
    if name == LADDER[0]:
        rungs = {}
    verdicts: dict[str, str] = {}
    for rung, its_settings in {**rungs, name: settings}.items():
        say(f"bisecting: the whole model with {rung} ...")
        try:
            with explained(rung):
                verdicts[rung] = _whole(subject, situation, its_settings, protect).outcome
        except OnegraphError as error:
            verdicts[rung] = f"failed: {error.what.partition(chr(10))[0]}"
        if verdicts[rung] == "wrong":
            return verdicts, its_settings
    return verdicts, None


def _whole(subject: Subject, situation: Situation, settings: CompileSettings, protect: bool) -> Variation:
    compiled = compile(subject.model, settings, protect=protect)
    try:
        history(subject)
        return run(subject, situation)
    finally:
        compiled.restore()


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
