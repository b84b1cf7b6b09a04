"""Counts what dynamo does from a moment on: graphs, breaks, recompiles with their causes, compile seconds."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch._dynamo.utils as dynamo_utils
from torch._dynamo.callback import callback_handler

_METRICS_KEPT = 4096


@dataclass(frozen=True, kw_only=True)
class Recompile:
    """One compilation after the warm-up.

    Args:
        function: The compiled code's name and line.
        reason: The guard that failed, as dynamo words it; "first compilation" for code not compiled before.
        others: Guards of the code's other versions that failed since the warm-up: a call is compiled when it fits none of them.
    """

    function: str
    reason: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join((f"{self.function}: {self.reason}", *self.others))


class Watch:
    """Counts from ``start()`` (or entering it as a context) until ``stop()``; several may run at once.

    ``warm()`` ends the warm-up: later compilations are recompiles.
    """

    def __init__(self) -> None:
        self.compile_seconds = 0.0
        self._began: float | None = None
        self._running = False
        self._warm_metrics: int | None = None
        self._final: tuple[int, dict[str, int], list[Any]] | None = None

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Watch:
        """Starts counting from zero."""
        if len(dynamo_utils.get_compilation_metrics()) > _METRICS_KEPT // 2:
            dynamo_utils.clear_compilation_metrics()
        dynamo_utils.set_compilation_metrics_limit(_METRICS_KEPT)
        self.compile_seconds = 0.0
        self._seen = {id(metric): metric for metric in dynamo_utils.get_compilation_metrics()}
        self._graphs_before = _unique_graphs()
        self._breaks_before = collections.Counter(dynamo_utils.counters["graph_break"])
        self._warm_metrics = None
        self._final = None
        self._guards_before = _failed_guards()
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)
        self._running = True
        return self

    def stop(self) -> None:
        """Freezes the counts."""
        if not self._running:
            return
        self._final = (self.graphs, self.breaks, self._metrics())
        self._guards_after = _failed_guards()
        callback_handler.remove_start_callback(self._on_start)
        callback_handler.remove_end_callback(self._on_end)
        self._running = False

    def warm(self) -> None:
        """Ends the warm-up: what is compiled from here on is a recompile."""
        self._warm_metrics = len(self._forward_metrics())
        self._guards_before = _failed_guards()

    @property
    def graphs(self) -> int:
        """Graphs captured since the start."""
        return self._final[0] if self._final else _unique_graphs() - self._graphs_before

    @property
    def breaks(self) -> dict[str, int]:
        """Reason and place of each graph break -> how often dynamo met it (each frame that it unwinds counts it again)."""
        if self._final:
            return self._final[1]
        return dict(collections.Counter(dynamo_utils.counters["graph_break"]) - self._breaks_before)

    @property
    def compilations(self) -> list[Recompile]:
        """Every compilation since the start, first ones included."""
        return [_described(metric) for metric in self._forward_metrics()]

    @property
    def recompiles(self) -> list[Recompile]:
        """Compilations since ``warm()``; before it, those of code that had been compiled already."""
        if self._warm_metrics is None:
            return [found for found in self.compilations if found.reason != _FIRST]
        return [self._with_others(found) for found in self.compilations[self._warm_metrics :]]

    def _with_others(self, found: Recompile) -> Recompile:
        failed = (self._guards_after if self._final else _failed_guards()).get(found.function, ())
        failed = failed[len(self._guards_before.get(found.function, ())) :]
        return replace(found, others=tuple(dict.fromkeys(reason for reason in failed if reason != found.reason)))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of compiling, none counted twice; a phase that took no time isn't there."""
        total = dict.fromkeys(("dynamo", "aot_autograd", "inductor", "code generation"), 0.0)
        for metric in self._metrics():

            def seconds(name: str, metric: Any = metric) -> float:
                return (getattr(metric, f"{name}_cumulative_compile_time_us", None) or 0) / 1e6

            inductor, code = seconds("inductor"), seconds("inductor_code_gen")
            outer = seconds("aot_autograd") or seconds("backward")
            total["dynamo"] += max(0.0, seconds("dynamo") - seconds("aot_autograd"))
            total["aot_autograd"] += max(0.0, outer - inductor)
            total["inductor"] += max(0.0, inductor - code)
            total["code generation"] += code
        return {name: value for name, value in total.items() if value}

    def _metrics(self) -> list[Any]:
        if self._final:
            return self._final[2]
        return [metric for metric in dynamo_utils.get_compilation_metrics() if id(metric) not in self._seen]

    def _forward_metrics(self) -> list[Any]:
        return [metric for metric in self._metrics() if metric.is_forward is not False and metric.co_name is not None]

    def _on_start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _on_end(self, _: Any) -> None:
        if self._began is not None:
            self.compile_seconds += time.perf_counter() - self._began
            self._began = None


_FIRST = "first compilation"


def _described(metric: Any) -> Recompile:
    reason = metric.recompile_reason or (f"failed: {metric.fail_reason}" if metric.fail_reason else _FIRST)
    return Recompile(function=_label(metric), reason=_guard(reason))


def _guard(reason: object) -> str:
    """What failed and where, without the stack that dynamo adds."""
    return " ".join(str(reason).partition("User stack trace:")[0].split())


def _label(code: Any) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _failed_guards() -> dict[str, tuple[str, ...]]:
    """Code -> every guard of it that failed, in order."""
    return {_label(code): tuple(_guard(reason) for reason in reasons) for code, reasons in dynamo_utils.guard_failures.items()}


def _unique_graphs() -> int:
    return int(dynamo_utils.counters["stats"]["unique_graphs"])
