"""AdaLoRA in a training run: the loss that keeps its factors near orthogonal, and the triplets that are taken away."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onegraph.adapters import Adapters
from onegraph.methods import AdaLoRA, Method, RankAllocator, orthogonality, rank_masks
from onegraph.methods.rank_allocation import BudgetSchedule
from onegraph.training.allocation_settings import AllocationSettings


def check_allocation(settings: AllocationSettings, method: Method, num_steps: int | None) -> None:
    """Finds out early whether the steps and ranks go together.

    Args:
        settings: How ranks are taken away.
        method: The run's.
        num_steps: Optimizer steps of the run; None where they aren't known yet.

    Raises:
        ConfigurationError: ``budget-phases``, ``budget-target``.
    """
    if isinstance(method, AdaLoRA) and settings.target_rank is not None:
        BudgetSchedule(
            initial=method.rank,
            target=settings.target_rank,
            total_steps=settings.warm_up_steps + settings.final_steps + 1 if num_steps is None else num_steps,
            warm_up_steps=settings.warm_up_steps,
            final_steps=settings.final_steps,
            interval=settings.interval,
        )


class Allocation:
    """What a step of a run with AdaLoRA has more: a loss before it, and the allocator after it.

    Args:
        adapters: With one adapter, AdaLoRA.
        settings: How ranks are taken away.
        num_steps: Optimizer steps of the whole run.

    Raises:
        ConfigurationError: ``budget-phases``, ``budget-target``, ``smoothing``.
    """

    def __init__(self, adapters: Adapters, settings: AllocationSettings, num_steps: int) -> None:
        name = str(adapters.active)
        self._weight = settings.orthogonality
        self._parameters = adapters.parameters_by_layer(name)
        ranks = {path: len(own["singular"]) for path, own in adapters.tensors(name).items()}
        self._masks = rank_masks(self._parameters, ranks)
        self._allocator: RankAllocator | None = None
        if settings.target_rank is not None:
            self._allocator = RankAllocator(
                self._parameters,
                target_rank=settings.target_rank,
                total_steps=num_steps,
                warm_up_steps=settings.warm_up_steps,
                final_steps=settings.final_steps,
                interval=settings.interval,
                beta1=settings.beta1,
                beta2=settings.beta2,
                ranks=ranks,
            )

    @property
    def loss(self) -> Tensor | None:
        """The weighted distance of the factors from orthogonal ones, once a step whatever is accumulated; None where its weight is 0."""
        return self._weight * orthogonality(self._parameters, self._masks) if self._weight else None

    def step(self, number: int) -> None:
        """After the optimizer's step, with its gradients still there.

        Args:
            number: Of the step, from 1: also one that was left out because of an overflow has counted.
        """
        if self._allocator is not None:
            self._allocator.state_dict()["number"].fill_(number)
            self._allocator.step()

    def ranks(self) -> dict[str, int] | None:
        """For each layer, how many triplets are left; None where none are taken away."""
        return None if self._allocator is None else {path: sum(kept) for path, kept in self._allocator.rank_pattern().items()}

    def state_dict(self) -> dict[str, Any]:
        """What goes on from one step to the next."""
        return {} if self._allocator is None else self._allocator.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if self._allocator is not None:
            self._allocator.load_state_dict(state_dict)
