"""A model of PEFT's with three adapters, compiled where it goes, and what they must give."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

from matrix.work import IDS, Case, Cell, difference, differences, make_model

# What PEFT says at every call; the cells say it themselves.
warnings.filterwarnings("ignore", module=r"peft\..*")
warnings.filterwarnings("ignore", message=r".*(adapter|merge|recompile|cpp extension|CUDA).*")


def of_adapter(model: Any, name: str) -> dict[str, torch.nn.Parameter]:
    """The parameters of an adapter, under names without the adapter's."""
    return {
        key.replace(f".{name}", ""): parameter
        for key, parameter in model.named_parameters()
        if f".{name}." in f"{key}." and "base_layer" not in key and model.base_model.prefix in key
    }


def randomised(model: Any, seed: int, name: str = "default") -> Any:
    """Random values for everything an adapter trains, near where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in of_adapter(model, name).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def further(case: Case) -> dict[str, Any]:
    """What the configuration of a second adapter needs: PEFT has one trainable AdaLoRA at a time."""
    return {"inference_mode": True} if case.name == "adalora" else {}


class Session:
    """A model with the adapters "a", "b" and "c"; compiled, as a whole graph where that goes, else with breaks."""

    def __init__(
        self,
        case: Case,
        *,
        names: str = "abc",
        regions: str | None = "whole",
        fullgraph: bool = True,
        dtype: torch.dtype = torch.float32,
        more: dict[str, Any] | None = None,
        prepare: Callable[[Any], None] | None = None,
    ) -> None:
        torch._dynamo.reset()
        self.case, self.more = case, more or {}
        self.base = make_model().to(dtype)
        self.model = get_peft_model(copy.deepcopy(self.base), case.config(names[0], **self.more), adapter_name=names[0])
        for name in names[1:]:
            self.model.add_adapter(name, case.config(name, **further(case), **self.more))
        for number, name in enumerate(names):
            randomised(self.model, number, name)
        self.use(names[0])
        if prepare is not None:
            prepare(self.model)
        self.fullgraph = fullgraph
        self.compiled = self.model.get_base_model()
        for module in {"whole": [self.compiled], "blocks": list(self.compiled.blocks)}.get(regions or "", []):
            module.compile(backend="aot_eager", fullgraph=fullgraph)

    def use(self, name: str) -> None:
        """The active adapter, trainable."""
        self.model.set_adapter(name)

    def step(self, *, training: bool) -> Tensor:
        self.model.train(training)
        with torch.set_grad_enabled(training):
            output: Tensor = self.compiled(IDS)
            if training:
                output.float().square().sum().backward()
        return output.detach()

    def alone(self, name: str) -> Any:
        """An eager model with one adapter, built anew."""
        model = get_peft_model(copy.deepcopy(self.base), self.case.config(name, **self.more), adapter_name=name)
        own = of_adapter(self.model, name)
        with torch.no_grad():
            for key, parameter in of_adapter(model, name).items():
                parameter.data = parameter.data.to(own[key].dtype)
                parameter.copy_(own[key])
        return model

    def expected(self, name: str | None, ids: Tensor = IDS, *, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
        if name is None:
            return self.base(ids).detach(), {}
        model = self.alone(name)
        model.train(training)
        output = model(ids)
        if not training:
            return output.detach(), {}
        output.float().square().sum().backward()
        return output.detach(), taken(model, name)

    def compare(self, cell: Cell, name: str | None, mode: str) -> None:
        training = mode == "train"
        if name is None and training:  # nothing to train
            output = self.compiled(IDS).detach()
        else:
            output = self.step(training=training)
        expected, gradient = self.expected(name, training=training)
        cell.see(difference(output, expected))
        if training and name is not None:
            cell.see(None, differences(taken(self.model, name), gradient))


def taken(model: Any, name: str) -> dict[str, Tensor]:
    """The gradients of an adapter; they are taken away. Those that are none at all count as 0."""
    found = {}
    for key, parameter in of_adapter(model, name).items():
        found[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    return found


def compare_rows(session: Session, cell: Cell, output: Tensor, assignment: list[str]) -> None:
    """Each row against its adapter alone, eager."""
    for name in dict.fromkeys(assignment):
        places = [row for row, other in enumerate(assignment) if other == name]
        expected, _ = session.expected(None if name == "__base__" else name, IDS[places], training=False)
        cell.see(difference(output[places], expected))
