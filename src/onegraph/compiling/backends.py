"""What each dynamo backend name means today: runs, runs under another name, or is gone."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onegraph.errors import CompileError, nearest

_OFFER = "set `dynamo_backend: INDUCTOR` in the file that `accelerate config` wrote, or pass --dynamo_backend=inductor"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One name a configuration may hold.

    Args:
        runs_as: The torch name to use, None when it can't run any more.
        says: One line printed when it runs (mapped, or for debugging only).
        gone: Why it can't run.
        instead: What to do instead.
        needs_module: A package that must be importable, because torch lists the name without it.
        needs_cuda: True when it only works on a CUDA device.
        options: Options the backend needs in training.
    """

    runs_as: str | None = None
    says: str = ""
    gone: str = ""
    instead: str = _OFFER
    needs_module: str = ""
    needs_cuda: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


_NVFUSER = Backend(gone="nvFuser left torch in 2.2, and this backend with it")
_XLA = "torch_xla with the same version number as torch"
_DEBUG = "traces and differentiates, but generates no code: for debugging, no faster than eager"
_INFERENCE_ONLY = "it only ever ran inference, so it can't train an adapter"

BACKENDS: dict[str, Backend] = {
    "no": Backend(runs_as="no"),
    "inductor": Backend(runs_as="inductor"),
    "eager": Backend(runs_as="eager", says="backend eager only traces: for debugging, no faster than no compilation"),
    "aot_eager": Backend(runs_as="aot_eager", says=f"backend aot_eager {_DEBUG}"),
    "cudagraphs": Backend(runs_as="cudagraphs", needs_cuda=True),
    "aot_cudagraphs": Backend(runs_as="cudagraphs", needs_cuda=True, says="aot_cudagraphs is called cudagraphs in today's torch"),
    "nvfuser": _NVFUSER,
    "aot_nvfuser": _NVFUSER,
    "aot_ts_nvfuser": _NVFUSER,
    "nvprims_nvfuser": _NVFUSER,
    "ofi": Backend(
        gone=f"torch no longer registers it, and {_INFERENCE_ONLY} (optimize_for_inference)", instead=f"inductor replaced it: {_OFFER}"
    ),
    "fx2trt": Backend(
        gone=f"torch no longer registers it, and {_INFERENCE_ONLY} (TensorRT)",
        instead=f"for training: {_OFFER}. For inference, torch_tensorrt replaced it",
    ),
    "onnxrt": Backend(
        gone=f"torch removed its registration, and {_INFERENCE_ONLY} (ONNX Runtime)",
        instead=f"for training: {_OFFER}. For inference, export with torch.onnx.export",
    ),
    "ipex": Backend(
        runs_as="ipex",
        needs_module="intel_extension_for_pytorch",
        instead=(
            "intel_extension_for_pytorch registers it and only works with the torch of the same major.minor number "
            f"(2.8 is its last release, for torch 2.8); its CPU work moved into inductor, so {_OFFER}"
        ),
    ),
    "tensorrt": Backend(runs_as="tensorrt", needs_module="torch_tensorrt", instead=f"pip install torch-tensorrt, or {_OFFER}"),
    "torch_tensorrt": Backend(runs_as="torch_tensorrt", needs_module="torch_tensorrt", instead=f"pip install torch-tensorrt, or {_OFFER}"),
    "tvm": Backend(runs_as="tvm", needs_module="tvm", instead=f"install Apache TVM, or {_OFFER}"),
    "openvino": Backend(
        runs_as="openvino",
        needs_module="openvino",
        options={"aot_autograd": True},
        says="backend openvino gets options={'aot_autograd': True}: without it it can't train",
        instead=f"pip install openvino, or {_OFFER}",
    ),
    "openxla": Backend(runs_as="openxla", needs_module="torch_xla", instead=f"install {_XLA}, or {_OFFER}"),
    "torchxla_trace_once": Backend(
        runs_as="openxla",
        needs_module="torch_xla",
        says="torchxla_trace_once is called openxla in today's torch",
        instead=f"install {_XLA}, or {_OFFER}",
    ),
    "aot_torchxla_trace_once": Backend(
        runs_as="openxla",
        needs_module="torch_xla",
        says="aot_torchxla_trace_once is called openxla in today's torch",
        instead=f"install {_XLA}, or {_OFFER}",
    ),
    "hpu_backend": Backend(
        runs_as="hpu_backend", needs_module="habana_frameworks", instead=f"it needs an Intel Gaudi machine; else {_OFFER}"
    ),
    "neuron": Backend(runs_as="neuron", needs_module="torch_neuronx", instead=f"it needs an AWS Neuron machine; else {_OFFER}"),
}


def resolve_backend(name: str, *, source: str = "") -> tuple[str, dict[str, Any], str]:
    """The torch name, the options and the line to print for a backend name out of any configuration.

    Args:
        name: As written, in any case; "no" and "" mean no compilation.
        source: Where the name was written, for the error.

    Returns:
        ``(name for torch.compile or "no", options, line to print or "")``.

    Raises:
        CompileError: ``backend-gone``, ``backend-needs-package``, ``backend-needs-cuda`` or ``backend-unknown``.
    """
    key = name.strip().lower() or "no"
    origin = f" (from {source})" if source else ""
    backend = BACKENDS.get(key)
    if backend is None:
        return _unlisted(key, name, origin)
    if backend.runs_as is None:
        raise CompileError(
            f"The dynamo backend {name!r}{origin} can't run.", why=backend.gone + ".", hint=backend.instead, code="backend-gone"
        )
    if backend.needs_module and importlib.util.find_spec(backend.needs_module) is None:
        raise CompileError(
            f"The dynamo backend {name!r}{origin} isn't available.",
            why=f"It comes with the package {backend.needs_module}, which isn't installed here.",
            hint=backend.instead,
            code="backend-needs-package",
        )
    if backend.needs_cuda and not torch.cuda.is_available():
        raise CompileError(
            f"The dynamo backend {name!r}{origin} needs a CUDA device.",
            why="It replays recorded CUDA graphs, and torch sees no CUDA device here.",
            hint=backend.instead,
            code="backend-needs-cuda",
        )
    _require_registered(backend.runs_as, name, origin, backend)
    return backend.runs_as, dict(backend.options), backend.says


def _require_registered(runs_as: str, name: str, origin: str, backend: Backend) -> None:
    """An installed package may still fail to register its backend: pinned to another torch, for one."""
    if runs_as in {"no", "inductor"}:
        return
    if backend.needs_module:
        try:
            importlib.import_module(backend.needs_module)
        except Exception as error:
            raise CompileError(
                f"The dynamo backend {name!r}{origin} isn't available: importing {backend.needs_module} failed with {error!r}.",
                why=f"Such packages are built for one torch release; this is torch {torch.__version__}.",
                hint=backend.instead,
                code="backend-needs-package",
            ) from error
    registered = torch.compiler.list_backends(None)
    if runs_as not in registered:
        raise CompileError(
            f"The dynamo backend {name!r}{origin} isn't registered with torch {torch.__version__}.",
            why=f"{backend.needs_module or 'torch'} is installed but doesn't provide it.",
            hint=backend.instead,
            code="backend-needs-package",
        )


def _unlisted(key: str, name: str, origin: str) -> tuple[str, dict[str, Any], str]:
    """A name outside the table: fine when some package registered it, else an error with the nearest names."""
    registered = torch.compiler.list_backends(None)
    if key in registered:
        return key, {}, f"backend {key} is registered with torch, but onegraph has never been tried with it"
    close = nearest(key, dict.fromkeys([*BACKENDS, *registered]))
    raise CompileError(
        f"There is no dynamo backend {name!r}{origin}.",
        why="Neither torch nor an installed package registers that name.",
        hint=(f"did you mean {' or '.join(close)}? " if close else "") + _OFFER,
        code="backend-unknown",
    )
