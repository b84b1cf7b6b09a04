"""A compiled model of onegraph's with three adapters, and what they must give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import onegraph
import onegraph.checkpoint
from matrix.work import IDS, Case, Cell, Model, counted, difference, differences, make_model
from onegraph.adapters import Adapters, attach
from onegraph.compiling import Watch

Values = dict[str, dict[str, Tensor]]


def copied(tensors: Any) -> Values:
    return {path: {key: value.detach().clone() for key, value in own.items()} for path, own in tensors.items()}


def randomise(adapters: Adapters, name: str, seed: int) -> None:
    """Random values for everything that is trained, near where it starts."""
    generator = torch.Generator().manual_seed(seed)
    trained = adapters.parameters(name).keys()
    values = {
        path: {
            key: value + torch.randn(value.shape, generator=generator).to(value) * 0.2
            if (f"{path}.{key}" if path else key) in trained
            else value
            for key, value in own.items()
        }
        for path, own in copied(adapters.tensors(name)).items()
    }
    adapters.load_tensors(name, values)


def settings_of(adapters: Adapters, name: str) -> dict[str, dict[str, float]]:
    """Path -> setting -> value."""
    found: dict[str, dict[str, float]] = {path: {} for path in adapters.methods(name)}
    for setting in adapters.setting_names(name):
        for path, value in adapters.settings_of(name, setting).items():
            found[path][setting] = value
    return found


def gradients(adapters: Adapters, name: str) -> dict[str, Tensor]:
    """The gradients of an adapter, cut to its true rank; they are taken away."""
    parameters = adapters.parameters(name)
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        found = {
            f"{path}.{key}" if path else key: value for path, own in copied(adapters.tensors(name)).items() for key, value in own.items()
        }
        for key, parameter in parameters.items():
            parameter.copy_(before[key])
            parameter.grad = None
    return {key: found[key] for key in parameters}


class Session:
    """A compiled model with the adapters "a", "b" and "c" of a method, and what they must give, from copies made at the start.

    Args:
        case: The method.
        more: Further fields of its adapters.
        options: Of ``attach`` and ``add``.
        compile: Of ``onegraph.compile``; None: the model stays eager.
    """

    def __init__(
        self,
        case: Case,
        *,
        more: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        compile: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        names: str = "abc",
    ) -> None:
        self.case, self.more, self.options = case, more or {}, options or {}
        self.base = make_model().to(dtype)
        self.adapters = self._attached(copy.deepcopy(self.base), names[0])
        if len(names) > 1:
            self.adapters.reserve(num_adapters=6, rank=case.room)
        for name in names[1:]:
            self.adapters.add(name, case.method(name, **self.more), targets=case.where(name), **self.options)
        for number, name in enumerate(names):
            randomise(self.adapters, name, number)
        self.held = {name: copied(self.adapters.tensors(name)) for name in names}
        self.settings = {name: settings_of(self.adapters, name) for name in names}
        if compile is not None:
            onegraph.compile(self.model, backend="aot_eager", **compile)

    def _attached(self, model: Model, name: str) -> Adapters:
        generator = torch.Generator().manual_seed(5)
        return attach(
            model, self.case.method(name, **self.more), targets=self.case.where(name), name=name, generator=generator, **self.options
        )

    @property
    def model(self) -> Model:
        return self.adapters.model  # type: ignore[return-value]

    def alone(self, name: str) -> Adapters:
        """An eager model with one adapter, built anew."""
        adapters = self._attached(copy.deepcopy(self.base), name)
        adapters.load_tensors(name, self.held[name])
        for setting in adapters.setting_names(name):
            adapters.set_setting(name, setting, {path: own.get(setting, 0.0) for path, own in self.settings[name].items()})
        return adapters

    def expected(self, name: str | None, ids: Tensor = IDS, *, training: bool, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of the eager model."""
        if name is None:
            return self.base(ids).detach(), {}
        adapters = self.alone(name)
        adapters.model.train(training)
        with adapters.without_randomness():
            output = adapters.model(ids)
        if not training:
            return output.detach(), {}
        (output.float().square().sum() * scale).backward()
        return output.detach(), gradients(adapters, name)

    def step(self, *, training: bool) -> Tensor:
        """A pass of the compiled model, in training with the backward one."""
        self.model.train(training)
        with torch.set_grad_enabled(training), self.adapters.without_randomness():
            output: Tensor = self.model(IDS)
            if training:
                output.float().square().sum().backward()
        return output.detach()

    def compare(self, cell: Cell, name: str | None, mode: str) -> None:
        """The compiled model with what is active, against the eager one with that adapter."""
        training = mode == "train"
        output = self.step(training=training)
        expected, gradient = self.expected(name, training=training)
        cell.see(difference(output, expected))
        if training and name is not None:
            cell.see(None, differences(gradients(self.adapters, name), gradient))

    def untouched(self, *names: str) -> None:
        """These hold what they held, bit for bit."""
        for name in names:
            present = self.adapters.tensors(name)
            for path, own in self.held[name].items():
                for key, value in own.items():
                    if not torch.equal(present[path][key], value):
                        raise AssertionError(f"{name!r} has changed: {path}.{key}")


class Ours:
    """Runs the cells of a method, a function each. The compiled session is shared as long as nothing was wrong with it."""

    def __init__(self, case: Case, features: Mapping[str, Callable[[Ours, Cell, str], None]]) -> None:
        self.case, self.features = case, features
        self._session: Session | None = None

    def session(self) -> Session:
        """The compiled model, warm: training, inference."""
        if self._session is None:
            torch._dynamo.reset()
            self._session = Session(self.case, compile={"regions": "whole"})
            self._session.step(training=True)
            gradients(self._session.adapters, "a")
            self._session.step(training=False)
        self._session.adapters.use("a")
        return self._session

    def forget(self) -> None:
        """Let the next cell begin anew."""
        self._session = None

    @contextmanager
    def cold(self, cell: Cell, **arguments: Any) -> Any:
        """A session of its own, compiled here."""
        self.forget()
        torch._dynamo.reset()
        session = Session(self.case, **arguments)
        with Watch() as watch:
            yield session
        counted(cell, watch, warm=False)
        torch._dynamo.reset()

    @contextmanager
    def warm(self, cell: Cell) -> Any:
        """The shared session; every compilation counts."""
        session = self.session()
        with Watch() as watch:
            yield session
        counted(cell, watch, warm=True)

    def run(self, feature: str, mode: str) -> Cell:
        """One cell."""
        cell = Cell()
        self.features[feature](self, cell, mode)
        return cell


def compare_with(session: Session, cell: Cell, alone: Adapters, name: str, alone_name: str, mode: str) -> None:
    """The active adapter against an eager model that was made otherwise."""
    training = mode == "train"
    output = session.step(training=training)
    alone.model.train(training)
    with torch.set_grad_enabled(training), alone.without_randomness():
        expected = alone.model(IDS)
        if training:
            expected.float().square().sum().backward()
    cell.see(difference(output, expected))
    if training:
        cell.see(None, differences(gradients(session.adapters, name), gradients(alone, alone_name)))
