"""The graph budget: how many graphs a compiled region can come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onegraph.methods import Method


@dataclass(frozen=True)
class Graphs:
    """How many graphs each compiled region can come to for inputs of one kind, whatever is switched, disabled, rescaled or merged.

    A kind of input is its shape and dtype, and in training whether it needs a gradient: blocks that share a compilation are two kinds, the
    first, whose input comes from frozen layers alone, and the others. ``no_grad`` and ``inference_mode`` are two kinds of inference.

    Args:
        assignments: Adapters that run the same graph, together; one entry a graph.
    """

    assignments: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, adapters: Mapping[str, Mapping[str, Method]]) -> Graphs:
        """From adapter -> path -> structure."""
        found: dict[tuple[tuple[str, Method], ...], list[str]] = {}
        for name, assignment in adapters.items():
            found.setdefault(tuple(assignment.items()), []).append(name)
        return cls(tuple(tuple(names) for names in found.values()))

    @property
    def training(self) -> int:
        """Graphs for training with one adapter at a time."""
        return len(self.assignments)

    @property
    def inference(self) -> int:
        """Graphs for inference with one adapter at a time."""
        return len(self.assignments)

    @property
    def rows(self) -> int:
        """Further graphs for batches with an adapter a row: one for training, one for inference."""
        return 2 if self.assignments else 0

    def __str__(self) -> str:
        if not self.assignments:
            return "no adapter: the base model's own graphs"
        lines = [f"for each compiled region and kind of input at most {self.training} in training, {self.inference} in inference:"]
        lines += [f"  {', '.join(names)}" for names in self.assignments]
        lines += [
            "and, with rows(), one more of each",
            "(a kind: the shape, and in training whether it needs a gradient: a first block's doesn't)",
        ]
        return "\n".join(lines)
