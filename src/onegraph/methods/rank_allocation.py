"""AdaLoRA in training: the loss that keeps its factors orthogonal, and the allocator that takes triplets away.

Both are tensor operations of fixed shapes: no step asks the host anything, and a compiled one stays the same graph as the budget falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onegraph.errors import AdapterError, ConfigurationError
from onegraph.methods.fields import is_whole, raise_all, whole_problems
from onegraph.methods.precision import full_precision

NamedTensors = Mapping[str, Mapping[str, Tensor]]
"""Path of a layer -> "down", "up" and "singular"."""

_NAMES = ("down", "up", "singular")


def orthogonality(parameters: NamedTensors, masks: Mapping[str, Tensor] | None = None) -> Tensor:
    """The mean of ||D D^T - 1|| and ||U^T U - 1|| (Frobenius) over all layers: what is added to the loss, times 0.5 as a rule.

    Shapes:
        ``down`` (R, I, *kernel), ``up`` (O, R), masks (R,): 1 for a triplet, 0 for padding -> a scalar, in float32 at least.

    Args:
        parameters: The adapter's tensors.
        masks: For layers that are padded to a larger rank, which triplets there are; without, all. See ``rank_masks``.

    Source:
        Zhang et al. 2023, https://arxiv.org/abs/2303.10512, equation 4; the mean of the norms, as PEFT takes it.
    """
    if not isinstance(parameters, Mapping) or not parameters or not all("down" in own and "up" in own for own in parameters.values()):
        raise ConfigurationError(
            f"orthogonality() was given {type(parameters).__name__}, which has no factors of AdaLoRA",
            hint="{path: {'down': ..., 'up': ...}}, the Parameters of the adapter",
            code="allocator-tensors",
        )
    distances: list[Tensor] = []
    for path, tensors in parameters.items():
        for factor in (tensors["down"].flatten(1), tensors["up"].t()):
            rows = factor.to(torch.promote_types(factor.dtype, torch.float32))
            mask = torch.ones(len(rows), device=rows.device) if masks is None or path not in masks else masks[path]
            with full_precision(rows):  # a distance from 1 has no digits to spare
                distances.append(torch.linalg.vector_norm(rows @ rows.t() - torch.diag(mask.to(rows.dtype))))
    return torch.stack([distance.to(distances[0].device) for distance in distances]).mean()


def rank_masks(parameters: NamedTensors, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """For each layer, 1 for the triplets of its true rank and 0 for those it is padded with."""
    return {
        path: (torch.arange(len(tensors["singular"]), device=tensors["singular"].device) < ranks[path]).float()
        for path, tensors in parameters.items()
    }


@dataclass(frozen=True, kw_only=True)
class BudgetSchedule:
    """How many triplets all layers together may have at a step: ``initial`` at first, falling with a cube to ``target``, then ``target``.

    Args:
        initial: Triplets at the start.
        target: Triplets at the end, at most ``initial``.
        total_steps: Steps of the training.
        warm_up_steps: Steps at the start without any allocation.
        final_steps: Steps at the end in which the choice is fixed.
        interval: Steps between two allocations.

    Raises:
        ConfigurationError: ``whole-number``; ``budget-phases`` where no step is left to allocate in; ``budget-target``.

    Source:
        Zhang et al. 2023, https://arxiv.org/abs/2303.10512, equation 12.
    """

    initial: int
    target: int
    total_steps: int
    warm_up_steps: int = 0
    final_steps: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        raise_all(
            whole_problems("initial", self.initial, why="It is the number of triplets at the start."),
            whole_problems("target", self.target, least=0, why="It is the number of triplets at the end."),
            whole_problems("total_steps", self.total_steps, why="The budget falls over the steps of the training."),
            whole_problems("warm_up_steps", self.warm_up_steps, least=0, why="It is a number of steps."),
            whole_problems("final_steps", self.final_steps, least=0, why="It is a number of steps."),
            whole_problems("interval", self.interval, why="It is the number of steps between two allocations."),
        )
        if self.warm_up_steps >= self.last_step:
            raise ConfigurationError(
                f"warm_up_steps={self.warm_up_steps} and final_steps={self.final_steps} leave nothing of total_steps={self.total_steps}",
                why="The budget falls in the steps between the two.",
                hint=f"together they are to be less than {self.total_steps}",
                code="budget-phases",
            )
        if self.target > self.initial:
            raise ConfigurationError(
                f"the budget is to end at {self.target} triplets, above the {self.initial} it starts from",
                why="Triplets are taken away, never added.",
                hint="a target rank below the rank that the adapter has",
                code="budget-target",
            )

    @property
    def last_step(self) -> int:
        """The step whose allocation is the last one."""
        return self.total_steps - self.final_steps

    def budget(self, step: int) -> int:
        """Triplets that may be left after a step."""
        if step <= self.warm_up_steps:
            return self.initial
        if step > self.last_step:
            return self.target
        left = 1 - (step - self.warm_up_steps) / (self.last_step - self.warm_up_steps)
        return int((self.initial - self.target) * left**3 + self.target)

    def allocates(self, step: int) -> bool:
        """Whether the choice is made anew at a step."""
        return step == self.last_step or (self.warm_up_steps < step < self.last_step and step % self.interval == 0)


class RankAllocator:
    """Gives the triplets of all layers one budget, and those that matter least a singular value of 0.

    Importance is |p * gradient|, smoothed, times its smoothed deviation; a triplet's is that of its singular value plus the means over its
    row of ``down`` and its column of ``up``. ``step`` belongs after the optimizer's step and before the gradients are cleared; the first
    call is step 1. It can be compiled with ``fullgraph=True``: what changes from step to step is in tensors.

    Args:
        parameters: Path -> ``down`` (R, I, *kernel), ``up`` (O, R), ``singular`` (R,): the Parameters that are trained.
        target_rank: Triplets a layer at the end, on average.
        total_steps: Steps of the training.
        warm_up_steps: Steps at the start without any allocation (PEFT's ``tinit``).
        final_steps: Steps at the end in which the choice is fixed (``tfinal``).
        interval: Steps between two allocations (``deltaT``).
        beta1: Smoothing of the importance, in (0, 1).
        beta2: Smoothing of its deviation, in (0, 1).
        ranks: The true rank on each layer, where the Parameters are padded; None: they are not.

    Raises:
        ConfigurationError: As ``BudgetSchedule``; ``smoothing``; ``allocator-tensors``.

    Source:
        Zhang et al. 2023, https://arxiv.org/abs/2303.10512, equations 8 to 12. At every step the choice is PEFT's.
    """

    def __init__(
        self,
        parameters: NamedTensors,
        *,
        target_rank: int,
        total_steps: int,
        warm_up_steps: int = 0,
        final_steps: int = 0,
        interval: int = 1,
        beta1: float = 0.85,
        beta2: float = 0.85,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        _check(parameters, ranks, {"beta1": beta1, "beta2": beta2})
        raise_all(whole_problems("target_rank", target_rank, least=0, why="It is the number of triplets a layer at the end."))
        self._parameters = {path: {name: tensors[name] for name in _NAMES} for path, tensors in parameters.items()}
        self._ranks = {path: len(own["singular"]) if ranks is None else ranks[path] for path, own in self._parameters.items()}
        self.schedule = BudgetSchedule(
            initial=sum(self._ranks.values()),
            target=target_rank * len(self._ranks),
            total_steps=total_steps,
            warm_up_steps=warm_up_steps,
            final_steps=final_steps,
            interval=interval,
        )
        self._betas = beta1, beta2
        everything = [tensor for own in self._parameters.values() for tensor in own.values()]
        self._device = everything[0].device
        with torch.no_grad():
            self._means = {path: {name: _zeros_like(tensor) for name, tensor in own.items()} for path, own in self._parameters.items()}
            self._deviations = {path: {name: torch.zeros_like(mean) for name, mean in own.items()} for path, own in self._means.items()}
            masks = rank_masks(self._parameters, self._ranks)
            self._kept = {path: mask > 0 for path, mask in masks.items()}
            # Padding counts as more important than anything: it is never among those that are taken away.
            self._handicaps = {path: torch.where(mask > 0, 0.0, math.inf) for path, mask in masks.items()}
        steps = range(self.schedule.last_step + 1)
        taken = [self.schedule.initial - self.schedule.budget(step) if self.schedule.allocates(step) else -1 for step in steps]
        self._taken = torch.tensor(taken, dtype=torch.int64, device=self._device)
        self._number = torch.ones((), dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def step(self) -> None:
        """Take in the gradients, allocate where it is time to, and set the singular values of what was taken away to 0.

        Raises:
            AdapterError: ``no-gradient``.
        """
        gradients = {path: {name: _gradient(path, name, tensor) for name, tensor in own.items()} for path, own in self._parameters.items()}
        last = len(self._taken) - 1
        taken = self._taken.index_select(0, self._number.clamp(max=last).reshape(1))
        allocating, fixed = (taken >= 0) & (self._number <= last), self._number > last
        for path, own in self._parameters.items():
            for name, tensor in own.items():
                self._take_in(path, name, tensor * gradients[path][name], self._number < last)
        scores = {path: self._scores(path) for path in self._parameters}
        ordered = torch.cat([(scores[path] + handicap).to(self._device) for path, handicap in self._handicaps.items()]).sort().values
        threshold = torch.where(taken > 0, ordered.index_select(0, (taken - 1).clamp(min=0)), -math.inf)
        for path, own in self._parameters.items():
            kept, singular = self._kept[path], own["singular"]
            present = self._handicaps[path] == 0
            chosen = (scores[path] > threshold.to(kept.device)) & present
            kept.copy_(torch.where(allocating.to(kept.device), chosen, kept))
            cut = (allocating | fixed).to(kept.device) & ~kept
            singular.copy_(torch.where(cut, 0, singular))
        self._number.add_(1)

    @property
    def kept(self) -> dict[str, Tensor]:
        """For each layer, which triplets the last allocation left, (R,) bool; False for padding."""
        return dict(self._kept)

    def rank_pattern(self) -> dict[str, list[bool]]:
        """The same as lists cut to the true rank: what a file says. It waits for the device."""
        return {path: kept[: self._ranks[path]].tolist() for path, kept in self._kept.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that goes on from one step to the next: the tensors themselves, not copies."""
        state = {"number": self._number}
        for path, kept in self._kept.items():
            state[f"{path}.kept"] = kept
            for name in _NAMES:
                state[f"{path}.{name}.mean"] = self._means[path][name]
                state[f"{path}.{name}.deviation"] = self._deviations[path][name]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where another allocator of the same layers was; copied in place.

        Raises:
            ConfigurationError: ``allocator-state``; nothing has changed then.
        """
        own = self.state_dict()
        wrong = sorted(own.keys() ^ state.keys()) or sorted(name for name in own if own[name].shape != state[name].shape)
        if wrong:
            raise ConfigurationError(
                f"the state doesn't fit these layers: {', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}",
                why="It has a tensor for each layer, of the rank that the adapter had.",
                hint="attach the adapter to the same layers with the same rank",
                code="allocator-state",
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def _take_in(self, path: str, name: str, product: Tensor, updating: Tensor) -> None:
        mean, deviation = self._means[path][name], self._deviations[path][name]
        beta1, beta2 = self._betas
        importance = product.abs()
        new_mean = beta1 * mean + (1 - beta1) * importance
        new_deviation = beta2 * deviation + (1 - beta2) * (importance - new_mean).abs()
        updating = updating.to(mean.device)
        mean.copy_(torch.where(updating, new_mean, mean))
        deviation.copy_(torch.where(updating, new_deviation, deviation))

    def _scores(self, path: str) -> Tensor:
        element = {name: mean * self._deviations[path][name] for name, mean in self._means[path].items()}
        return element["singular"] + element["down"].flatten(1).mean(1) + element["up"].mean(0)


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _gradient(path: str, name: str, tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise AdapterError(
            f"{path}.{name} has no gradient",
            why="A triplet's importance is made of its gradients.",
            hint="call step() after backward() and before the gradients are cleared",
            code="no-gradient",
        )
    return tensor.grad


def _check(parameters: NamedTensors, ranks: Mapping[str, int] | None, betas: Mapping[str, float]) -> None:
    for name, beta in betas.items():
        if not 0.0 < beta < 1.0:
            raise ConfigurationError(
                f"{name}={beta!r} is not in (0, 1)",
                why="It is the part of the past in a running mean.",
                hint="0.85 is usual",
                code="smoothing",
            )
    if not parameters:
        raise ConfigurationError(
            "there are no layers to allocate ranks to", hint="give path -> down, up, singular", code="allocator-tensors"
        )
    for path, own in parameters.items():
        missing = [name for name in _NAMES if name not in own]
        if missing:
            raise ConfigurationError(f"{path} has no {', '.join(missing)}", hint="give its down, up and singular", code="allocator-tensors")
        sizes = {"down": own["down"].shape[0], "up": own["up"].shape[-1], "singular": own["singular"].shape[0]}
        if len(set(sizes.values())) > 1 or own["up"].dim() != 2 or own["singular"].dim() != 1:
            shapes = ", ".join(f"{name} {tuple(own[name].shape)}" for name in _NAMES)
            raise ConfigurationError(
                f"{path}: {shapes} are no triplets of one rank",
                why="down is (R, I, *kernel), up (O, R), singular (R,).",
                hint="give the tensors as AdaLoRA names and shapes them",
                code="allocator-tensors",
            )
        if ranks is not None and not (is_whole(ranks.get(path), 0) and ranks[path] <= sizes["singular"]):
            raise ConfigurationError(
                f"ranks[{path!r}]={ranks.get(path)!r} is not in 0 to {sizes['singular']}",
                why="It is the part of the padded tensors that is the adapter's own.",
                hint="give the rank of every layer, or no ranks",
                code="allocator-tensors",
            )
