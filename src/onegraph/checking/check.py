"""``og.check``: a user's model and batch, compiled against eager: outputs, gradients, graphs, breaks, recompiles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from onegraph.adapters import adapters_of
from onegraph.checking.comparison import Comparison
from onegraph.checking.random_state import same_random_state
from onegraph.checking.step import compare_step, gradients_kept
from onegraph.compiling import CompileSettings, Recompile, Watch, compile, compiled_of, eager
from onegraph.compiling.failures import explained
from onegraph.errors import ConfigurationError, MismatchError


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``check`` found; ``print(report)`` shows it, ``report.right`` says it in one word.

    Args:
        comparison: Loss and gradients.
        output_error: Largest norm of a difference between a compiled and an eager output, as a share of that output's norm.
        graphs: Graphs that one training step and one inference call needed.
        breaks: Reason and place of each graph break -> how often it was met.
        recompiles: Compilations in the second round, where nothing new was met.
        compile_seconds: Seconds spent compiling.
        compiled: What was compiled, in words.
    """

    comparison: Comparison
    output_error: float
    output_allowed: float
    graphs: int
    breaks: Mapping[str, int] = field(default_factory=dict)
    recompiles: tuple[Recompile, ...] = ()
    compile_seconds: float = 0.0
    compiled: str = ""

    @property
    def right(self) -> bool:
        """True when numbers agree, and nothing broke or recompiled."""
        return self.comparison.right and self.output_error <= self.output_allowed and not self.breaks and not self.recompiles

    def __str__(self) -> str:
        lines = [
            self.compiled,
            f"outputs     error {self.output_error:.1e} of their norm (allowed {self.output_allowed:.0e})",
            f"training    {self.comparison}",
            f"graphs      {self.graphs} in {self.compile_seconds:.1f} s, breaks {len(self.breaks)}, recompiles {len(self.recompiles)}",
        ]
        lines += [f"  wrong     {row}" for row in self.comparison.faults[:10]]
        lines += [f"  break     {reason}" for reason in self.breaks]
        lines += [f"  recompile {recompile}" for recompile in self.recompiles]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The figures as JSON."""
        comparison = self.comparison
        return json.dumps(
            {
                "right": self.right,
                "output_error": self.output_error,
                "loss": comparison.loss,
                "compiled_loss": comparison.compiled_loss,
                "loss_error": comparison.loss_error,
                "gradient_error": comparison.total_error,
                "eager_gradient_error": comparison.eager_total_error,
                "gradients": len(comparison.rows),
                "faults": [{"name": row.name, "norm": row.norm, "error": row.error} for row in comparison.faults],
                "graphs": self.graphs,
                "breaks": dict(self.breaks),
                "recompiles": [str(recompile) for recompile in self.recompiles],
                "compile_seconds": self.compile_seconds,
            },
            indent=2,
        )

    def raise_if_wrong(self) -> None:
        """Raises when anything is wrong.

        Raises:
            MismatchError: The report as its text.
        """
        if not self.right:
            raise MismatchError(str(self), why="The compiled model isn't the eager model, or doesn't stay one graph.")


def check(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    settings: CompileSettings | None = None,
    reference: torch.dtype | None = None,
    **overrides: Any,
) -> Report:
    """Runs ``model`` on ``batch``, compiled and eager, in training and in inference, and compares.

    A model that is compiled by ``onegraph.compile`` already is checked as it is; another one is compiled for the check and put back.

    Args:
        model: The model, with or without adapters. Its trained parameters are those with ``requires_grad``.
        batch: A mapping (passed as keywords), a tuple (passed as positions) or one tensor.
        loss: From the model's output to a scalar; by default its ``loss``, else a fixed random projection of its floating-point tensors.
        settings: How to compile; see ``onegraph.compile``, as ``**overrides``.
        reference: The dtype of the reference; fp64 by default.

    Raises:
        ConfigurationError: ``nothing-trained``: no parameter requires a gradient.
        NumericsError: Eager itself gives NaN or infinity.
        CompileError: ``graph-break`` under ``fullgraph``, ``backend-failed``, ``recompile-limit``, ``not-compiled``.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ConfigurationError(
            "No parameter of the model requires a gradient, so there is no gradient to check.",
            hint="attach an adapter first: onegraph.attach(model, onegraph.LoRA(rank=8), targets=[...])",
            code="nothing-trained",
        )
    reference = reference or torch.float64
    precision = next(iter(model.parameters())).dtype
    adapters = adapters_of(model)
    earlier = compiled_of(model)
    compiled = earlier if earlier is not None else compile(model, settings, **overrides)
    was_training = model.training
    measure = loss if loss is not None else _projection

    def step(dtype: torch.dtype | None) -> torch.Tensor:
        return measure(_call(model, batch, dtype))

    watch = Watch().start()
    kept = contextlib.ExitStack()
    try:
        with explained(compiled.settings.backend):
            kept.enter_context(same_random_state())
            kept.enter_context(gradients_kept(parameters))
            model.train()
            comparison = compare_step(
                step,
                parameters,
                models=[model],
                adapters=[adapters] if adapters is not None else [],
                precision=precision,
                reference=reference,
            )
            model.eval()
            output_error = _output_error(model, batch)
            watch.warm()
            model.train()
            step(None).backward()  # type: ignore[no-untyped-call]
            model.eval()
            with torch.no_grad():
                _call(model, batch, None)
    finally:
        kept.close()
        watch.stop()
        model.train(was_training)
        if earlier is None:
            compiled.restore()
    return Report(
        comparison=comparison,
        output_error=output_error,
        output_allowed=comparison.tolerance.total,
        graphs=watch.graphs,
        breaks=watch.breaks,
        recompiles=tuple(watch.recompiles),
        compile_seconds=watch.compile_seconds,
        compiled=str(compiled),
    )


def _call(model: nn.Module, batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is not None:
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _float_tensors(output: Any) -> list[torch.Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    leaves, _ = tree_flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _projection(output: Any) -> torch.Tensor:
    """The output's own loss, or the mean square of its tensors against fixed random targets: every element gets a gradient of its own."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.ndim == 0:
        return own
    generator = torch.Generator().manual_seed(1)
    total: torch.Tensor | None = None
    for tensor in _float_tensors(output):
        target = torch.randn(tensor.shape, generator=generator).to(tensor)
        term = (tensor - target).float().square().mean() if tensor.dtype != torch.float64 else (tensor - target).square().mean()
        total = term if total is None else total + term
    if total is None:
        raise ConfigurationError(
            "The model's output holds no floating-point tensor, so there is no loss to check.",
            hint="pass loss=, a function from the output to a scalar",
            code="no-loss",
        )
    return total


def _output_error(model: nn.Module, batch: Any) -> float:
    """Largest relative difference between compiled and eager outputs, in inference."""
    with torch.no_grad():
        with eager():
            expected = _float_tensors(_call(model, batch, None))
        found = _float_tensors(_call(model, batch, None))
    worst = 0.0
    for left, right in zip(found, expected, strict=True):
        norm = float(torch.linalg.vector_norm(right.double()))
        error = float(torch.linalg.vector_norm(left.double() - right.double()))
        worst = max(worst, error / norm if norm else error)
    return worst
