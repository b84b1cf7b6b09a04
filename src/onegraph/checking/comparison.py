"""Compiled against eager against a reference: how far apart may they be, and which gradients are too far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from onegraph.errors import MismatchError

_LISTED = 10
# Standard deviations: an error of relative size e in n elements, without direction, gives a factor of 1 +- e / sqrt(n).
_CHANCE = 8


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much the compiled result may differ from the reference.

    A gradient is a fault when its error exceeds ``eager_factor`` x eager's own error + ``relative`` x its norm + ``absolute`` x the root
    mean square norm over all parameters. The last term keeps parameters quiet whose true gradient is round-off.

    Args:
        eager_factor: Times the error that eager itself has in this precision.
        relative: Share of the reference's norm.
        absolute: Share of the typical norm of all gradients.
        total: Share of the norm of all gradients together, for their error together.
        loss: Share of the loss.
        gain: How far from 1 a common factor of a gradient may be, beside eager's own and what noise of that size makes by chance; None: not
            looked at. Noise has no direction: where it is larger than a fault, the factor still shows the fault.
    """

    eager_factor: float
    relative: float
    absolute: float
    total: float
    loss: float
    gain: float | None = None


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(eager_factor=4, relative=1e-7, absolute=1e-9, total=1e-8, loss=1e-9),
    torch.float32: Tolerance(eager_factor=4, relative=2e-3, absolute=1e-4, total=5e-4, loss=1e-5),
    torch.float16: Tolerance(eager_factor=4, relative=5e-2, absolute=1e-2, total=2e-2, loss=5e-3),
    torch.bfloat16: Tolerance(eager_factor=4, relative=2e-1, absolute=5e-2, total=8e-2, loss=2e-2),
}


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """One parameter's gradient, as norms.

    Args:
        name: The parameter's name.
        norm: Norm of the reference gradient.
        compiled_norm: Norm of the compiled gradient.
        error: Norm of compiled minus reference.
        eager_error: Norm of eager minus reference; 0 where eager is the reference.
        allowed: The largest error that passes.
        gain: The factor by which the compiled gradient is the reference, <compiled, reference> / <reference, reference>.
        gain_allowed: How far from 1 it may be.
    """

    name: str
    norm: float
    compiled_norm: float
    error: float
    eager_error: float
    allowed: float
    gain: float = 1.0
    gain_allowed: float = math.inf

    @property
    def scaled(self) -> bool:
        """True when the whole gradient is too large or too small."""
        return abs(self.gain - 1) > self.gain_allowed

    @property
    def wrong(self) -> bool:
        """True when the error is too large, or not a number, or when the whole gradient is scaled."""
        return self.scaled or not self.error <= self.allowed

    def __str__(self) -> str:
        share = f"{self.error / self.norm:.1%}" if self.norm > 0 else "-"
        zero = ", compiled gradient is exactly zero" if self.compiled_norm == 0 and self.norm > 0 else ""
        scaled = f", all of it times {self.gain:.3g}" if self.scaled and not zero else ""
        return f"{self.name}: norm {self.norm:.3g}, compiled {self.compiled_norm:.3g}, error {self.error:.3g} ({share}){zero}{scaled}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of one comparison; ``str()`` of it is the line or lines to print.

    Args:
        precision: The dtype the training step computes in.
        reference: The dtype of the eager reference.
        loss: Reference loss.
        compiled_loss: The compiled step's loss.
        eager_loss: The eager step's loss in the training precision.
        rows: One per trained parameter.
        tolerance: What was allowed.
    """

    precision: torch.dtype
    reference: torch.dtype
    loss: float
    compiled_loss: float
    eager_loss: float
    rows: Sequence[GradientRow] = field(repr=False)
    tolerance: Tolerance

    @property
    def faults(self) -> list[GradientRow]:
        """Parameters whose compiled gradient is wrong, worst first."""
        return sorted((row for row in self.rows if row.wrong), key=lambda row: -_badness(row))

    @property
    def total_norm(self) -> float:
        """Norm of all reference gradients together."""
        return math.hypot(*(row.norm for row in self.rows))

    @property
    def total_error(self) -> float:
        """Norm of all errors together, relative to ``total_norm``."""
        return _ratio(math.hypot(*(row.error for row in self.rows)), self.total_norm)

    @property
    def eager_total_error(self) -> float:
        """The same for eager in the training precision."""
        return _ratio(math.hypot(*(row.eager_error for row in self.rows)), self.total_norm)

    @property
    def loss_error(self) -> float:
        """Relative error of the compiled loss."""
        return _ratio(abs(self.compiled_loss - self.loss), abs(self.loss))

    @property
    def loss_wrong(self) -> bool:
        """True when the compiled loss is too far from the reference."""
        eager_error = _ratio(abs(self.eager_loss - self.loss), abs(self.loss))
        return not self.loss_error <= self.tolerance.eager_factor * eager_error + self.tolerance.loss

    @property
    def total_wrong(self) -> bool:
        """True when all errors together are too large, even if no single one is."""
        return not self.total_error <= 2 * self.eager_total_error + self.tolerance.total

    @property
    def right(self) -> bool:
        """True when loss and gradients agree."""
        return not (self.loss_wrong or self.total_wrong or self.faults)

    def __str__(self) -> str:
        names = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
        eager = "" if self.reference == self.precision else f", {self.eager_total_error:.1e} for eager {names.get(self.precision)}"
        verdict = "agree" if self.right else "DIFFER"
        return (
            f"compiled and eager {verdict}: loss {self.compiled_loss:.6g} against {self.loss:.6g} ({self.loss_error:.1e}), "
            f"{len(self.rows)} gradients, error {self.total_error:.1e} of their norm against eager {names.get(self.reference)}{eager}"
        )

    def raise_if_wrong(self, *, hint: str = "") -> None:
        """Raises when the compiled result is wrong.

        Raises:
            MismatchError: ``compiled-differs-from-eager``, with the parameters named.
        """
        if self.right:
            return
        faults = self.faults
        zero = sum(row.compiled_norm == 0 and row.norm > 0 for row in faults)
        lines = [str(self)]
        if faults:
            lines.append(f"{len(faults)} of {len(self.rows)} gradients are wrong" + (f", {zero} of them exactly zero:" if zero else ":"))
            lines += [f"  {row}" for row in faults[:_LISTED]]
            if len(faults) > _LISTED:
                lines.append(f"  and {len(faults) - _LISTED} more")
        raise MismatchError(
            "\n".join(lines),
            why="The compiled step computes something else than the model: training on it would be training on wrong gradients.",
            hint=hint
            or "compile by blocks (regions='blocks'), try backend='aot_eager' to see whether inductor is at fault, or update torch",
        )


def compare(
    *,
    precision: torch.dtype,
    reference: torch.dtype,
    losses: tuple[float, float, float],
    gradients: Mapping[str, tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]],
    tolerance: Tolerance | None = None,
) -> Comparison:
    """Weighs one step.

    Args:
        precision: The dtype of the training step.
        reference: The dtype of the reference.
        losses: Reference, compiled, eager.
        gradients: Name -> gradients in the same order; None counts as zero.
        tolerance: Defaults to the one of ``precision``.
    """
    tolerance = tolerance or TOLERANCES[precision]
    norms = [_norm(triple[0]) for triple in gradients.values()]
    typical = math.sqrt(sum(norm * norm for norm in norms) / max(1, len(norms)))
    rows = []
    for (name, (expected, compiled, eager)), norm in zip(gradients.items(), norms, strict=True):
        eager_error = _distance(eager, expected)
        allowed = tolerance.eager_factor * eager_error + tolerance.relative * norm + tolerance.absolute * typical
        error = _distance(compiled, expected)
        gain, gain_allowed = 1.0, math.inf
        if tolerance.gain is not None and expected is not None and norm > tolerance.absolute * typical:
            gain = _gain(compiled, expected)
            by_chance = _CHANCE * error / norm / math.sqrt(expected.numel())
            gain_allowed = tolerance.gain + tolerance.eager_factor * abs(_gain(eager, expected) - 1) + by_chance
        rows.append(
            GradientRow(
                name=name,
                norm=norm,
                compiled_norm=_norm(compiled),
                error=error,
                eager_error=eager_error,
                allowed=allowed,
                gain=gain,
                gain_allowed=gain_allowed,
            )
        )
    return Comparison(
        precision=precision,
        reference=reference,
        loss=losses[0],
        compiled_loss=losses[1],
        eager_loss=losses[2],
        rows=rows,
        tolerance=tolerance,
    )


def _norm(gradient: torch.Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(in_double(gradient)))


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        return _norm(expected if found is None else found)
    return float(torch.linalg.vector_norm(in_double(found) - in_double(expected)))


def _gain(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    reference = in_double(expected).flatten()
    return 0.0 if found is None else float(in_double(found).flatten() @ reference / (reference @ reference))


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole


def _badness(row: GradientRow) -> float:
    return math.inf if math.isnan(row.error) else row.error
