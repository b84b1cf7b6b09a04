"""What this process was started with: accelerate's device and precision, the compile settings, the processes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, TorchDynamoPlugin
from torch.amp import GradScaler

from onegraph.compiling import CompileSettings, check_toolchain, resolve_settings
from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.compile_flags import CompileFlags
from onegraph.training.metrics import ProgressDisplay
from onegraph.training.ranks import Ranks

Label = Callable[[str], str]


class Precise(Protocol):
    """The part of a configuration that says what is computed in."""

    @property
    def mixed_precision(self) -> str | None:
        """``no``, ``fp16``, ``bf16``, or None for what accelerate says."""


class Launchable(Protocol):
    """A configuration that a run can be started with: a frozen dataclass with these branches."""

    @property
    def precision(self) -> Precise:
        """A frozen dataclass."""

    @property
    def compile(self) -> CompileFlags:
        """What it says about compiling."""

    def problems(self, device: str | None = None, *, label: Label = str) -> list[OnegraphError]:
        """All that is wrong with it."""


C = TypeVar("C", bound=Launchable)

PRECISIONS: Mapping[str, torch.dtype] = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The names of mixed precision -> what is computed in."""

PATIENCE = timedelta(hours=3)
"""How long a process waits for another: one that draws samples, compiles, or reads a model over a network."""


@dataclass(frozen=True, kw_only=True)
class Launch(Generic[C]):
    """Where and how a run computes.

    Args:
        configuration: The settings, with the precision that accelerate decided filled in.
        device: Where the models go.
        precision: fp32, or the dtype of autocast and of the frozen weights.
        scaler: For fp16 only.
        compile_settings: How models are compiled, with the origin of each value.
        label: How a setting is called in messages: "run.seed" -> "--seed".
        ranks: The processes of the run, of which this is one.
    """

    configuration: C
    device: torch.device
    precision: torch.dtype
    scaler: GradScaler | None
    compile_settings: CompileSettings
    label: Label = str
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16`` or ``bf16``."""
        return next(name for name, dtype in PRECISIONS.items() if dtype == self.precision)

    def progress(self, num_steps: int, num_epochs: int, *, done: int, quiet: bool) -> ProgressDisplay:
        """What people watch: in the first process alone."""
        first = self.ranks.first
        return ProgressDisplay(num_steps, done=done, num_epochs=num_epochs, quiet=quiet or not first, stream=self.ranks.stream)


@contextlib.contextmanager
def launched(
    configuration: C,
    environment: Mapping[str, str] | None = None,
    *,
    label: Label = str,
    program: str = "-m onegraph.train_network",
    backend: str = "no",
) -> Iterator[Launch[C]]:
    """Reads accelerate's settings and checks them, the compiler included, before anything is loaded.

    accelerate is told not to compile: what ``accelerate config`` says about dynamo is read here, and the models are compiled in place.

    Args:
        configuration: What the run is told.
        environment: Of the process when omitted.
        label: How a setting is called in messages.
        program: How the command is started, for hints.
        backend: Of torch.compile, where neither the configuration nor accelerate says one.

    Raises:
        ConfigurationError: All problems with the settings at once; ``several-processes``, ``launcher-one-process``.
        CompileError: A backend that can't run, a missing compiler.
    """
    environment = os.environ if environment is None else environment
    _require_data_parallel(environment, program)
    _require_all_that_were_asked_for(environment, program)
    mixed = configuration.precision.mixed_precision or environment.get("ACCELERATE_MIXED_PRECISION", "no").lower() or "no"
    if mixed not in PRECISIONS:
        raise ConfigurationError(
            f"mixed_precision is {mixed} (from ACCELERATE_MIXED_PRECISION)",
            why="Adapters are trained in fp32, with frozen weights in fp32, bf16 or fp16.",
            hint="--mixed_precision=bf16",
            code="bad-value",
        )
    precision = replace(cast(Any, configuration.precision), mixed_precision=mixed)
    configuration = cast(C, replace(cast(Any, configuration), precision=precision))
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes"} or not torch.accelerator.is_available()
    if problems := configuration.problems("cpu" if on_cpu else None, label=label):
        raise ConfigurationError.collected(problems)
    flags = configuration.compile.flags()
    unsaid = "backend" not in flags and "ACCELERATE_DYNAMO_BACKEND" not in environment
    settings = resolve_settings(environment, flags={"backend": backend, **flags} if unsaid else flags)
    if unsaid:
        settings = replace(settings, sources={**settings.sources, "backend": "default"})
    check_toolchain(settings, device="cpu" if on_cpu else "cuda")
    _quiet_libraries()
    ours = not is_initialized()
    accelerator = Accelerator(
        cpu=on_cpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        mixed_precision=mixed,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_plugin=TorchDynamoPlugin(backend="no", mode="default", dynamic=False, fullgraph=False, use_regional_compilation=False),
    )
    scaler = accelerator.scaler
    if scaler is None and mixed == "fp16":
        scaler = GradScaler(accelerator.device.type)  # accelerate has none for the CPU
    device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device  # not "cpu:0", as it is with several processes
    try:
        yield Launch(
            configuration=configuration,
            device=device,
            precision=PRECISIONS[mixed],
            scaler=scaler,
            compile_settings=settings,
            label=label,
            ranks=Ranks(rank=accelerator.process_index, count=accelerator.num_processes, device=device),
        )
    finally:
        if ours:
            accelerator.state.destroy_process_group()
            # accelerate keeps its state in the process and refuses another precision later: leave none behind
            AcceleratorState._reset_state(reset_partial_state=True)


def _quiet_libraries() -> None:
    """Notices that say nothing to someone who trains: missing optional kernels, empty lists of modules to keep in fp32."""
    for name in ("bitsandbytes", "diffusers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _require_data_parallel(environment: Mapping[str, str], program: str) -> None:
    """Several processes each have the whole model and a part of the data; what cuts a model in pieces isn't for these commands."""
    used = [kind for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") if environment.get(f"ACCELERATE_USE_{kind}", "").lower() in {"1", "true"}]
    if used:
        raise ConfigurationError(
            f"accelerate was told to use {used[0]}.",
            why="Here every process has the whole model, and what is trained, the adapters, is small: there is little to cut in pieces.",
            hint=f"accelerate launch --multi_gpu --num_processes=2 {program} ...",
            code="several-processes",
        )


def _require_all_that_were_asked_for(environment: Mapping[str, str], program: str) -> None:
    """On a CPU accelerate's launcher starts several processes with MPI only; without, it starts one and says nothing.

    It has set the place where the processes would meet, and nobody has numbered them.
    """
    numbered = any(name in environment for name in ("WORLD_SIZE", "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"))
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment and not numbered:
        raise ConfigurationError(
            "accelerate launch was told to start several processes, and has started one.",
            why="For processes on a CPU it needs mpirun and --mpirun_hostfile; without, it starts a single one and says nothing. "
            "That one would train with a part of the batch that was meant.",
            hint=f"accelerate launch --multi_gpu --num_processes=2 {program} ... (it starts them on a machine without a GPU, too), "
            f"torchrun --nproc_per_node=2 {program} ..., or --num_processes=1",
            code="launcher-one-process",
        )
