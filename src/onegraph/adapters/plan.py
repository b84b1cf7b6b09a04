"""What will be adapted, as a table to read before anything happens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from onegraph.layers import Layer
from onegraph.methods import Method


@dataclass(frozen=True)
class PlanEntry:
    """One layer of a plan.

    Args:
        path: Where it is in the model.
        layer: Its description.
        method: The method with this layer's rank and alpha.
    """

    path: str
    layer: Layer
    method: Method

    @property
    def rank(self) -> int | None:
        """The rank on this layer."""
        return self.method.rank_on(self.layer)

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(math.prod(spec.shape) for spec in self.method.parameters(self.layer).values() if spec.trained)


@dataclass(frozen=True)
class Plan:
    """The layers that an adapter is on, in the model's order. Print it: layers that look alike are folded into a line."""

    entries: tuple[PlanEntry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[PlanEntry]:
        return iter(self.entries)

    @property
    def num_parameters(self) -> int:
        """Trained numbers of all layers."""
        return sum(entry.num_parameters for entry in self.entries)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str, str], list[PlanEntry]] = {}
        for entry in self.entries:
            rank = "-" if entry.rank is None else str(entry.rank)
            groups.setdefault((_folded(entry.path), entry.layer.kind, entry.method.name, rank), []).append(entry)
        header = ("layers", "path", "kind", "method", "rank", "weight", "parameters")
        rows = [header]
        for (path, kind, method, rank), members in groups.items():
            shown = members[0].path if len(members) == 1 else path
            count = sum(member.num_parameters for member in members)
            rows.append((str(len(members)), shown, kind, method, rank, _shapes(members), f"{count:,}"))
        rows.append((str(len(self)), "total", "", "", "", "", f"{self.num_parameters:,}"))
        return aligned(rows, right={0, 4, 6})


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Rows of cells as lines of columns; those in ``right`` end together, the others begin together."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(cell.rjust(width) if column in right else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _folded(path: str) -> str:
    """The last three parts with numbers as *: what repeated blocks have in common."""
    return ".".join("*" if part.isdigit() else part for part in path.split(".")[-3:])


def _shapes(entries: list[PlanEntry]) -> str:
    shapes = list(dict.fromkeys("x".join(map(str, entry.layer.weight_shape)) for entry in entries))
    return ", ".join(shapes) if len(shapes) <= 3 else f"{shapes[0]}, {shapes[1]} … {shapes[-1]}"
