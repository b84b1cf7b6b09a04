"""Runs a model compiled and eager and says whether they are the same: outputs, loss, gradients, other situations, a training run.

  onegraph check FOLDER                          a folder of diffusers or transformers, or a pipeline's (--part)
  onegraph check model.safetensors               a Stable Diffusion file
  onegraph check my_module:build                 a function that returns model, batch[, loss]
  onegraph check FOLDER --adapter lora.safetensors
  onegraph check FOLDER --method lora,dora       each attached in turn; "all" is every method that fits

Exit status: 0 right, 1 wrong, 2 could not run. Graph breaks and recompiles are reported; with --strict they count as wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from onegraph import explain
from onegraph.adapters import adapters_of, attach
from onegraph.checking import Report, check
from onegraph.checking.batches import batch_for
from onegraph.checking.page import page
from onegraph.checking.report import plain
from onegraph.checking.targets import PARTS, Target, from_folder, from_function, is_function
from onegraph.checkpoint import load
from onegraph.checkpoint.atomic import atomic_write, check_writable
from onegraph.cli.explain import offer
from onegraph.compiling import CompileSettings, check_toolchain, resolve_backend
from onegraph.errors import ConfigurationError, ModelFileError, OnegraphError, OutputError, TargetError, nearest
from onegraph.layers import describe
from onegraph.methods import METHODS, Method
from onegraph.training.output import lasting_output

RIGHT, WRONG, COULD_NOT_RUN = 0, 1, 2
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}
_TOLD_LINES = 8
_SCRIPTS = "onegraph-check"
_FITS_NONE = "unsupported-layer"
# A part of another method, never alone.
_METHODS = {name: kind for name, kind in METHODS.items() if name != "with_bias"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a single file, or module:function")
    parser.add_argument("--part", choices=PARTS, help="which model of a pipeline; by default the first that is there")
    parser.add_argument("--adapter", metavar="FILE", help="an adapter file or folder to load")
    parser.add_argument("--method", metavar="NAMES", help=f"methods to attach, each in turn: {', '.join(_METHODS)}, or all")
    parser.add_argument("--rank", type=_at_least(1), help="the rank of each method that has one")
    parser.add_argument("--targets", metavar="NAMES", help="endings of the layers to adapt; by default all that the method can take")
    parser.add_argument("--backend", default="inductor", help="a backend's name or module:function; default inductor")
    parser.add_argument("--regions", choices=("blocks", "whole"), default="blocks", help="what is compiled by itself; default blocks")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they are")
    parser.add_argument("--reference", choices=DTYPES, help="of the eager reference; by default float64 where it fits")
    parser.add_argument("--device", help="cpu, cuda, ...; by default where the model is")
    parser.add_argument("--batch-size", type=_at_least(1), default=2, help="rows of the batch that is made for a model; default 2")
    parser.add_argument("--length", type=_at_least(1), default=32, help="tokens of that batch; default 32")
    parser.add_argument("--size", type=_at_least(1), default=16, help="height and width of its latents; default 16")
    parser.add_argument("--steps", type=_at_least(0), default=20, help="steps of the training run, 2 or more, 0 for none; default 20")
    parser.add_argument("--quick", action="store_true", help="outputs, loss and gradients only")
    parser.add_argument("--situations", metavar="NAMES", help="only these, by comma")
    parser.add_argument("--script", metavar="FOLDER", help=f"for a program that shows a fault; default {_SCRIPTS}")
    parser.add_argument("--strict", action="store_true", help="graph breaks and recompiles count as wrong")
    parser.add_argument("--json", metavar="FILE", help="the figures; - for standard output")
    parser.add_argument("--html", metavar="FILE", help="one page with plots")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def run(arguments: argparse.Namespace) -> int:
    """Checks; returns the exit status. A reader that went away doesn't change it."""
    with lasting_output():
        if arguments.json != "-":
            return _run(arguments)
        output = sys.stdout
        # what the model or its function prints belongs to nobody's JSON
        with contextlib.redirect_stdout(sys.stderr):
            return _run(arguments, output)


def _run(arguments: argparse.Namespace, output: IO[str] | None = None) -> int:
    jobs = _jobs(arguments)
    _find_places(arguments)
    if arguments.device is not None:
        _require_device(arguments.device)
    settings = _settings(arguments)
    try:
        target = _target(arguments)
    except OnegraphError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function or a library raises
        print(f"error: {arguments.model} can't be built\n{_told(error)}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN
    reports: list[Report] = []
    failed: list[tuple[str, str]] = []
    skipped: list[tuple[str, str]] = []
    for name, prepare in jobs:
        try:
            with prepare(target.model):
                reports.append(_checked(target, name, settings, arguments, script=_script(arguments, name, alone=len(jobs) == 1)))
            print(reports[-1], flush=True)
        except (Exception, SystemExit) as error:
            if arguments.method == "all" and isinstance(error, TargetError) and error.code == _FITS_NONE:
                skipped.append((name, f"{error.what} {error.why}"))
                print(f"{name}: not tried: {skipped[-1][1]}", flush=True)
                continue
            failed.append((name, _told(error)))
            print(f"{name}: could not run\n{failed[-1][1]}", file=sys.stderr, flush=True)
    # "all" is those that fit; not one is a mistake
    status = _status(reports, failed if reports or failed else skipped, strict=arguments.strict)
    verdict = {RIGHT: "right", WRONG: "wrong", COULD_NOT_RUN: "could not run"}[status]
    try:
        if arguments.json is not None:
            _write_json(arguments.json, target, reports, {"failed": failed, "skipped": skipped}, status, output)
        if arguments.html is not None:
            _write(Path(arguments.html), page(target.name, reports, failed=failed, skipped=skipped, verdict=verdict))
    except OutputError as error:  # the disk is full by now: what was found counts all the same
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = status or COULD_NOT_RUN
    print(f"{target.name}: {verdict}", flush=True)
    return status


def _find_places(arguments: argparse.Namespace) -> None:
    """Whether what will be found can be written, before anything is looked for.

    Raises:
        OutputError: Of the file, or of the script's folder.
    """
    for file in (arguments.json, arguments.html):
        if file is not None and file != "-":
            check_writable(Path(file))
    if arguments.script:
        folder = Path(arguments.script)
        check_writable(next(place for place in (folder / "there", folder, *folder.parents) if place.parent.exists()))


def _script(arguments: argparse.Namespace, name: str, *, alone: bool) -> Path | None:
    """A folder for each of several jobs: one must not write over another's."""
    if arguments.script == "":
        return None
    folder = Path(arguments.script or _SCRIPTS)
    return folder if alone else folder / re.sub(r"[^\w.-]+", "-", name).strip("-.")


def _status(reports: list[Report], failed: list[tuple[str, str]], *, strict: bool) -> int:
    if any(not (report.right if strict else report.agrees) for report in reports):
        return WRONG
    return COULD_NOT_RUN if failed or any(report.compiled_nothing for report in reports) else RIGHT


def _checked(target: Target, name: str, settings: CompileSettings, arguments: argparse.Namespace, *, script: Path | None) -> Report:
    if not any(parameter.requires_grad for parameter in target.model.parameters()):
        for parameter in target.model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)
    situations: bool | list[str] = not arguments.quick
    if arguments.situations:
        situations = [situation.strip() for situation in arguments.situations.split(",")]
    report = check(
        target.model,
        target.batch,
        loss=target.loss,
        settings=settings,
        reference=DTYPES.get(arguments.reference),
        thorough=situations,
        steps=0 if arguments.quick else arguments.steps,
        bisect=True,
        script=script,
        name=name,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return replace(report, notes=(*report.notes, target.note)) if target.note else report


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, Callable[[nn.Module], contextlib.AbstractContextManager[None]]]]:
    """What to check in turn, all of it known before anything is loaded: the adapter's file, each method, or the model alone."""
    jobs: list[tuple[str, Callable[[nn.Module], contextlib.AbstractContextManager[None]]]] = []
    if arguments.adapter is not None:
        if not Path(arguments.adapter).exists():
            raise ConfigurationError(
                f"--adapter {arguments.adapter} doesn't exist", hint="a file or folder with an adapter", code="not-found"
            )
        jobs.append((arguments.adapter, lambda model: _loaded(model, arguments.adapter)))
    names = list(dict.fromkeys(name.strip() for name in (arguments.method or "").split(",") if name.strip()))
    if arguments.method is not None and not names:
        raise ConfigurationError("--method names no method", hint=f"{', '.join(_METHODS)}, or all", code="method-unknown")
    problems: list[OnegraphError] = []
    for name in list(_METHODS) if names == ["all"] else names:
        kind = _METHODS.get(name)
        if kind is None:
            near = nearest(name, _METHODS) or list(_METHODS)
            problems.append(ConfigurationError(f"--method {name} is no method", hint=f"{', '.join(near)}, or all", code="method-unknown"))
            continue
        ranked = arguments.rank is not None and any(field.name == "rank" for field in fields(kind))
        method = kind(**({"rank": arguments.rank} if ranked else {}))
        jobs.append((name, lambda model, method=method: _attached(model, method, arguments.targets)))  # type: ignore[misc]
    if problems:
        raise ConfigurationError.collected(problems)
    return jobs or [("model", lambda model: contextlib.nullcontext())]


@contextlib.contextmanager
def _loaded(model: nn.Module, path: str) -> Iterator[None]:
    adapters = load(model, path, name="default")
    try:
        yield
    finally:
        adapters.detach()


@contextlib.contextmanager
def _attached(model: nn.Module, method: Method, targets: str | None) -> Iterator[None]:
    adapters = adapters_of(model)
    if adapters is not None:
        raise ConfigurationError(
            "The model has adapters already, so no method can be tried on it alone.",
            hint="leave --method out to check the adapters that it has",
            code="adapters-there",
        )
    chosen: Any = [name.strip() for name in targets.split(",")] if targets else _all_of(model, method)
    adapters = attach(model, method, targets=chosen, generator=torch.Generator().manual_seed(0))
    try:
        yield
    finally:
        adapters.detach()


def _all_of(model: nn.Module, method: Method) -> Callable[[str, nn.Module], bool]:
    """Every linear layer but the output head, or every norm for a method of norms: those that the method can take."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    kind = "linear" if "linear" in method.kinds else "norm"

    def wanted(_: str, module: nn.Module) -> bool:
        layer = describe(module) if module is not head else None
        return layer is not None and layer.kind == kind and next(module.children(), None) is None and method.check(layer) is None

    if not any(wanted(path, module) for path, module in model.named_modules()):
        layers = [layer for module in model.modules() if (layer := describe(module)) is not None and layer.kind == kind]
        raise TargetError(
            f"{method.name} fits no layer of this model.",
            why=f"It has no {kind} layer." if not layers else f"Its {len(layers)} {kind} layers: {method.check(layers[0]) or 'not alone'}.",
            hint="another method, or --rank or --targets",
            code=_FITS_NONE,
        )
    return wanted


def _settings(arguments: argparse.Namespace) -> CompileSettings:
    """By blocks or whole, with breaks allowed, so that all of them are found."""
    if ":" in arguments.backend:
        return CompileSettings(backend=arguments.backend, regions=arguments.regions, fullgraph=False)
    backend, options, line = resolve_backend(arguments.backend, source="--backend")
    if line:
        print(line, file=sys.stderr, flush=True)
    if backend == "no":
        raise ConfigurationError(
            "--backend no compiles nothing, so there is nothing to check", hint="--backend inductor", code="nothing-compiled"
        )
    settings = CompileSettings(backend=backend, options=options, regions=arguments.regions, fullgraph=False)
    check_toolchain(settings)
    return settings


def _require_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(
            f"--device {name} can't be used: {str(error).partition(chr(10))[0]}",
            hint="onegraph doctor says which devices torch sees; without --device the model stays where it is",
            code="device-unusable",
        ) from error


def _target(arguments: argparse.Namespace) -> Target:
    dtype = DTYPES.get(arguments.dtype)
    sizes = {"rows": arguments.batch_size, "length": arguments.length, "size": arguments.size}
    path = Path(arguments.model).expanduser()
    if is_function(arguments.model):
        target = from_function(arguments.model)
        if dtype is not None:
            target.model.to(dtype)
            target = replace(target, batch=_in(target.batch, dtype))
    elif path.is_dir():
        target = from_folder(path, part=arguments.part, dtype=dtype, **sizes)
    elif path.is_file():
        target = _single_file(path, arguments.part, dtype, sizes)
    else:
        raise ModelFileError(
            f"{arguments.model} is neither a folder, a file nor module:function",
            hint="check the path; a function is written my_module:build",
            code="not-found",
        )
    if arguments.device is not None:
        target.model.to(arguments.device)
        target = replace(target, batch=_in(target.batch, torch.device(arguments.device)))
    return target


def _in(batch: Any, where: torch.dtype | torch.device) -> Any:
    from torch.utils._pytree import tree_map_only

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(where) if isinstance(where, torch.device) or tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, moved, batch)


def _single_file(path: Path, part: str | None, dtype: torch.dtype | None, sizes: dict[str, int]) -> Target:
    from onegraph.training.diffusion.base_model import load_base_model

    base = load_base_model(path, dtype=dtype)
    chosen = part or "unet"
    if chosen == "transformer":
        raise ConfigurationError(
            "--part transformer: a Stable Diffusion file has none", hint="--part unet, text_encoder or vae", code="part-unknown"
        )
    model: nn.Module = getattr(base, chosen)
    return Target(name=f"{path} ({chosen})", model=model, batch=batch_for(model, **sizes))


def _told(error: BaseException) -> str:
    """The error, where it was raised, and the entries of the catalogue that may explain it."""
    if isinstance(error, OnegraphError):
        return f"{error}\n{offer(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    said = str(error).strip().splitlines() or [""]
    if len(said) > _TOLD_LINES:
        said = [*said[:_TOLD_LINES], f"... and {len(said) - _TOLD_LINES} more lines"]
    if isinstance(error, SystemExit):
        said.append("It ended the program (sys.exit) where a result was expected.")
    said[0] = f"{type(error).__name__}: {said[0]}{place}"
    lines = said
    lines += [f"see: onegraph explain {found.entry.id}" for found in explain.explain(error)[:3]]
    return "\n".join(lines)


def _write_json(
    file: str, target: Target, reports: list[Report], others: dict[str, list[tuple[str, str]]], status: int, output: IO[str] | None
) -> None:
    record = {
        "target": target.name,
        "status": status,
        "torch": torch.__version__,
        "reports": [report.record() for report in reports],
        "failed": [{"name": name, "error": error} for name, error in others["failed"]],
        "skipped": [{"name": name, "reason": reason} for name, reason in others["skipped"]],
    }
    text = json.dumps(plain(record), indent=2)
    if file == "-":
        print(text, file=output, flush=True)
    else:
        _write(Path(file), text)


def _write(path: Path, text: str) -> None:
    atomic_write(path, lambda target: target.write_text(text, encoding="utf-8"))
