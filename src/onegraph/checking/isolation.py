"""A module of a model by itself: what reached it in the model, and whether it is right when it alone is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onegraph.checking.random_state import same_random_state
from onegraph.checking.situations import Situation, Variation, run
from onegraph.checking.subject import Arguments, Subject, tensors_of, versions, without_model_dropout
from onegraph.compiling import CompileSettings, compile, eager


@dataclass
class Captured:
    """One call of a module inside the model.

    Args:
        arguments: What it was called with, copied; tensors require a gradient where they did there.
        gradients: Place among the output's tensors -> the gradient that came back to it.
        writes: Whether the call wrote into its arguments, as ``ReLU(inplace=True)`` does.
    """

    arguments: Arguments
    gradients: dict[int, Tensor]
    writes: bool = False


def capture(subject: Subject, situation: Situation, modules: Mapping[str, nn.Module]) -> dict[str, Captured]:
    """The first call of each module in one eager training step; a module that isn't called is left out. In the order of the calls."""
    found: dict[str, Captured] = {}
    before: dict[str, list[int]] = {}
    with contextlib.ExitStack() as stack:
        for path, module in modules.items():
            stack.callback(module.register_forward_hook(_note(found, path, before), with_kwargs=True).remove)
            stack.callback(module.register_forward_pre_hook(_arrive(found, path, before), with_kwargs=True).remove)
        stack.enter_context(_training(subject))
        stack.enter_context(same_random_state())
        stack.enter_context(eager())
        stack.enter_context(contextlib.nullcontext() if situation.random else without_model_dropout(subject.model))
        stack.enter_context(situation.enter(subject))
        with torch.set_grad_enabled(situation.gradients):
            batch = situation.batch or subject.batch
            if situation.inputs:
                batch = _requiring(batch)
            loss = subject.loss(subject.call(batch))
        if loss.requires_grad:
            leaves = [tensor for tensor in [*subject.model.parameters(), *tensors_of(batch)] if tensor.requires_grad and tensor.is_leaf]
            gradients = [leaf.grad for leaf in leaves]
            loss.backward()  # type: ignore[no-untyped-call]
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
    return found


def alone(
    subject: Subject, path: str, module: nn.Module, plain: Captured, there: Captured, situation: Situation
) -> tuple[Subject, Situation]:
    """The module as a subject of its own, with the situation as it reaches it."""
    own = replace(
        subject,
        writes=there.writes or plain.writes,
        model=module,
        batch=plain.arguments,
        loss=_loss(there.gradients),
        path=f"{subject.path}.{path}" if subject.path else path,
    )
    wants = bool(own.trained()) or any(tensor.requires_grad for tensor in tensors_of(there.arguments))
    gradients = situation.gradients and bool(there.gradients) and wants
    return own, replace(situation, batch=there.arguments, inputs=False, may_compile=True, gradients=gradients)


def run_alone(subject: Subject, situation: Situation, settings: CompileSettings, *, protect: bool) -> Variation:
    """Compiles one module, calls it as it is called at first, then compares in the situation.

    The first call is its history: a fault may be that something of it is still there.
    """
    compiled = compile(subject.model, settings, regions="whole", protect=protect)
    try:
        history(subject)
        return run(subject, situation)
    finally:
        compiled.restore()


def history(subject: Subject) -> None:
    """One training step and one evaluation with the subject's own batch; nothing is left of it but what was compiled."""
    was_training = subject.model.training
    parameters = subject.trained()
    before = {name: parameter.grad for name, parameter in parameters.items()}
    with same_random_state(), without_model_dropout(subject.model):
        try:
            subject.model.train()
            loss = subject.loss(subject.call(subject.batch))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            subject.model.eval()
            with torch.no_grad():
                subject.call(subject.batch)
        finally:
            subject.model.train(was_training)
            for name, parameter in parameters.items():
                parameter.grad = before[name]


def called_inside(module: nn.Module, called: Iterable[str]) -> dict[str, nn.Module]:
    """The nearest modules inside this one that are called: a list of layers isn't, its layers are."""
    seen = set(called)

    def below(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if path in seen:
                yield path, child
            else:
                yield from below(child, f"{path}.")

    return dict(below(module, ""))


def signature(module: nn.Module, captured: Captured) -> str:
    """Equal for modules that a compiler sees as the same: class, shapes, and plain attributes."""
    tensors = [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in module.named_parameters()]
    arguments = tree_map_only(Tensor, lambda tensor: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad), captured.arguments)
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str) and not name.startswith("_")}
    return f"{type(module).__qualname__} {tensors} {arguments} {plain} {sorted(captured.gradients)}"


@contextlib.contextmanager
def _training(subject: Subject) -> Iterator[None]:
    was_training = subject.model.training
    subject.model.train()
    try:
        yield
    finally:
        subject.model.train(was_training)


def _arrive(found: dict[str, Captured], path: str, before: dict[str, list[int]]) -> Callable[..., None]:
    def arrive(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in found:
            positions, keywords = tree_map_only(Tensor, _copied, (args, kwargs))
            found[path] = Captured(arguments=(positions, keywords), gradients={})
            before[path] = versions((args, kwargs))

    return arrive


def _note(found: dict[str, Captured], path: str, before: dict[str, list[int]]) -> Callable[..., None]:
    done: list[bool] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if done:
            return
        done.append(True)
        found[path].writes = versions((args, kwargs)) != before[path]
        for place, tensor in enumerate(_float_leaves(output)):
            if tensor.requires_grad:

                def keep(gradient: Tensor, place: int = place) -> None:
                    before = found[path].gradients.get(place)
                    found[path].gradients[place] = gradient.detach().clone() if before is None else before + gradient

                tensor.register_hook(keep)  # type: ignore[no-untyped-call]

    return note


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _requiring(batch: Arguments) -> Arguments:
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor, batch
    )
    return args, kwargs


def _float_leaves(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]


def _loss(gradients: Mapping[int, Tensor]) -> Callable[[Any], Tensor]:
    """A loss whose gradient at each output is the one that came back in the model; a fixed random one where none came."""

    def loss(output: Any) -> Tensor:
        tensors = _float_leaves(output)
        generator = torch.Generator().manual_seed(3)
        total = torch.zeros((), dtype=torch.float32)
        for place, tensor in enumerate(tensors):
            if gradients and place not in gradients:
                continue
            gradient = gradients.get(place)
            if gradient is None or gradient.shape != tensor.shape:
                gradient = torch.randn(tensor.shape, generator=generator)
            if gradient.norm() > 0:
                gradient = gradient / gradient.norm()
            # plus a constant: a sum near 0 would have a relative error of any size
            term = (tensor * gradient.to(tensor)).sum() + 2 * tensor.detach().norm()
            total = total.to(term.device) + (term if term.dtype == torch.float64 else term.float())
        return total

    return loss
