"""Compiling ahead: several processes compile a model's regions at once into inductor's cache folder, where the model then finds them.

Dynamo and inductor work on one core. A model by blocks has many regions that don't depend on each other, so each worker takes some of
them, without their weights: shapes are all that a compilation needs. Whatever a worker can't do, the model compiles itself.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from onegraph.compiling.compile import Compiled, caller, eager
from onegraph.compiling.regions import Region
from onegraph.compiling.settings import CompileSettings
from onegraph.compiling.tuning import device_of

# Starting a worker takes as long as a few small compilations, so each should have this many.
_JOBS_PER_WORKER = 4
# Each worker holds torch and the model libraries, about 0.6 GiB.
_MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """What a compilation reads of an input: everything but the values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """The shape of a tensor."""
        return cls(
            size=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
        )

    def made(self) -> Tensor:
        """A tensor of this shape, filled with 0; one with a gradient is no leaf, as between two regions."""
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()
        return tensor.requires_grad_().clone() if self.requires_grad else tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One region to compile: a module without weights, what it is called with, and how it is compiled.

    Args:
        module: On the meta device.
        device: Where its weights are.
        arguments: Positions and keywords, with a ``TensorShape`` in each tensor's place.
        settings: How to compile.
        gradient_checkpointing: Whether backward recomputes the region.
        protect: Whether the compiler's protections are set.
        autocast: The dtype of autocast around the call, or None.
        num_threads: OpenMP threads that the code is made for.
    """

    module: nn.Module
    device: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    settings: CompileSettings
    gradient_checkpointing: bool
    protect: bool
    autocast: torch.dtype | None
    num_threads: int

    @property
    def signature(self) -> str:
        """Equal for jobs that share a compilation, in this process and in another."""
        tensors = [(name, TensorShape.of(tensor)) for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]]
        how = (self.settings, self.gradient_checkpointing, self.protect, self.autocast, self.num_threads, self.module.training)
        return f"{type(self.module).__name__} {self.arguments} {tensors} {how} {torch.__version__}"

    def run(self) -> None:
        """Compiles forward and backward by calling the region once, on zeros."""
        torch.set_num_threads(self.num_threads)
        module = self.module.to_empty(device=self.device)
        run = caller(
            Region(path="", module=module), self.settings, gradient_checkpointing=self.gradient_checkpointing, protect=self.protect
        )
        args, kwargs = tree_map_only(TensorShape, TensorShape.made, self.arguments)
        with _autocast(self.device, self.autocast):
            outputs, _ = tree_flatten(run(module, *args, **kwargs))
        wanted = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])


def compile_ahead(
    models: Sequence[Compiled],
    run: Callable[[], object],
    *,
    num_workers: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Compiles the regions of compiled models in several processes, into inductor's cache folder.

    Args:
        models: What ``compile`` gave, before the first compiled call.
        run: Calls the models once, as they will be called; it is run eager, without gradients kept.
        num_workers: Processes; by default one for each core that this process may use, at most 8. Below 2 nothing is done.
        say: Gets a line when workers are started, and one with the reason when they left something undone.

    Returns:
        How many regions were compiled; 0 where it doesn't pay: one core, few regions, another backend than inductor, a GPU (whose
        kernels inductor compiles in parallel itself), or a cache folder that holds them already.
    """
    models = [compiled for compiled in models if compiled.settings.backend == "inductor"]
    if not models:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # every process of a run on this machine compiles
    num_workers = min(cores, _MOST_WORKERS) if num_workers is None else num_workers
    if num_workers < 2:
        return 0
    jobs = [job for job in _distinct(_captured(models, run)) if job.device == "cpu"]
    folder = _cache_folder() / "onegraph-ahead"
    jobs = [job for job in jobs if not (folder / _digest(job)).exists()]
    num_workers = min(num_workers, len(jobs) // _JOBS_PER_WORKER)
    if num_workers < 2:
        return 0
    say(f"compiling {len(jobs)} regions ahead in {num_workers} processes ...")
    done, reason = _work(_shared_out(jobs, num_workers))
    if len(done) < len(jobs):
        say(f"{len(jobs) - len(done)} of them are left to the model" + (f": {reason}" if reason else ""))
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for job in done:
            (folder / _digest(job)).touch()
    return len(done)


def _captured(models: Sequence[Compiled], run: Callable[[], object]) -> Iterator[Job]:
    """The jobs of one eager call of the models."""
    jobs: list[Job] = []
    with contextlib.ExitStack() as stack:
        for compiled in models:
            for region in compiled.regions:

                def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: Compiled = compiled) -> None:
                    jobs.append(_job(module, args, kwargs, compiled))

                stack.callback(region.module.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.enter_context(eager())
        run()
    yield from jobs


def _job(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: Compiled) -> Job:
    device = device_of(module)
    kind = device.type
    whole = compiled.settings.regions == "whole"
    return Job(
        module=module,
        device=str(device),
        arguments=tree_map_only(Tensor, TensorShape.of, (args, kwargs)),
        settings=compiled.settings,
        gradient_checkpointing=compiled.gradient_checkpointing and not whole,
        protect=bool(compiled.protections) or not compiled.settings.active,
        autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        num_threads=torch.get_num_threads(),
    )


def _distinct(jobs: Iterator[Job]) -> Iterator[Job]:
    seen: set[str] = set()
    for job in jobs:
        signature = job.signature
        if signature not in seen:
            seen.add(signature)
            yield job


def _digest(job: Job) -> str:
    return hashlib.sha256(job.signature.encode()).hexdigest()


def _cache_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _shared_out(jobs: Sequence[Job], num_workers: int) -> list[list[Job]]:
    """The jobs in ``num_workers`` lots of about equal work, the largest first; the number of modules stands for the work."""
    lots: list[list[Job]] = [[] for _ in range(num_workers)]
    work = [0] * num_workers
    for job in sorted(jobs, key=lambda job: -sum(1 for _ in job.module.modules())):
        lightest = work.index(min(work))
        lots[lightest].append(job)
        work[lightest] += sum(1 for _ in job.module.modules())
    return lots


def _work(lots: Sequence[Sequence[Job]]) -> tuple[list[Job], str]:
    """Runs a worker process a lot; returns the jobs that were done, and why the first other one was not: the last line of its error."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(_cache_folder()),
        # each worker has a core of its own; this is no part of inductor's cache key
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done: list[Job] = []
    reason = ""
    with tempfile.TemporaryDirectory(prefix="onegraph-ahead-") as folder:
        running: list[tuple[Sequence[Job], subprocess.Popen[str]]] = []
        try:
            for lot in lots:
                packed = {job: data for job in lot if (data := _packed(job)) is not None}
                if not packed:
                    continue
                lot = list(packed)
                file = Path(folder) / f"lot-{len(running)}.pickle"
                file.write_bytes(pickle.dumps(list(packed.values())))
                command = [sys.executable, "-m", "onegraph.compiling.worker", str(file)]
                with file.with_suffix(".errors").open("wb") as errors:
                    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
                running.append((lot, process))
            for number, (lot, process) in enumerate(running):
                output, _ = process.communicate()
                mine = [lot[int(line)] for line in output.split() if line.isdigit() and int(line) < len(lot)]
                done += mine
                if len(mine) < len(lot) and not reason:
                    reason = _last_error(Path(folder) / f"lot-{number}.errors")
        finally:
            for _, process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return done, reason


def _last_error(file: Path) -> str:
    """The line of the last exception in a worker's output, without what torch says below it."""
    lines = [
        line for line in file.read_text(errors="replace").splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)
    ]
    return lines[-1][:300] if lines else ""


def _packed(job: Job) -> bytes | None:
    """The job as a worker reads it; None for a module that can't travel, such as one of a class made inside a function."""
    try:
        return pickle.dumps(_without_weights(job))
    except Exception:
        return None


def _without_weights(job: Job) -> Job:
    module = copy.deepcopy(job.module)
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    return Job(**{**vars(job), "module": module.to("meta")})


def _autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(torch.device(device).type, dtype) if dtype is not None else contextlib.nullcontext()
