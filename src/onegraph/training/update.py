"""One optimiser step from gradients that are there: unscaled, measured, clipped, taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onegraph.training.ranks import Ranks


@dataclass(kw_only=True)
class Update:
    """The optimizer with what stands around it.

    Args:
        parameters: Name -> trained parameter.
        optimizer: Moves them.
        schedule: Its learning rates; one step each optimiser step.
        scaler: For fp16 gradients only.
        max_grad_norm: Gradients are clipped to this norm; 0: never.
        ranks: The processes of the run, which take the step together.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: GradScaler | None
    max_grad_norm: float
    ranks: Ranks = field(default_factory=Ranks)

    def backward(self, loss: Tensor) -> None:
        """Adds this loss's gradients to those that are there."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def measured(self, losses: Sequence[Tensor]) -> tuple[list[float], Tensor, float]:
        """The losses as numbers, the gradients' norm as a tensor and as a number: one wait for the device a step.

        With several processes, gradients and losses are the means over them from here on.
        """
        self.ranks.average_gradients(list(self.parameters.values()))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        read: list[float] = torch.stack(
            [*self.ranks.mean(torch.stack([loss.float() for loss in losses])), norm.to(losses[0].device).float()]
        ).tolist()
        return read[:-1], norm, read[-1]

    def take(self, norm: Tensor) -> bool:
        """Clips and steps; False when the scaler left the step out because of an overflow."""
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm)
        taken = True
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            taken = self.scaler.get_scale() >= before
        if taken:
            self.schedule.step()
        return taken

    @property
    def overflows_at_every_scale(self) -> bool:
        """True when the loss scale has fallen below 1: the gradients themselves are infinite."""
        return self.scaler is not None and self.scaler.get_scale() < 1.0

    def forget(self) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradients are NaN or infinite."""
        return [name for name, value in self.parameters.items() if value.grad is not None and not bool(value.grad.isfinite().all())]
