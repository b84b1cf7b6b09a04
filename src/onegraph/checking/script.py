"""A program that shows a fault with one module alone: the module, what it was called with, and a comparison, in a folder of their own."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onegraph.checking.situations import Situation
from onegraph.checking.subject import Subject
from onegraph.checkpoint.atomic import atomic_write_all, make_folder

SCRIPT = "reproduce.py"
DATA = "reproduce.pt"

_PROGRAM = '''"""{title}

python reproduce.py: exit status 1 when the compiled module differs from eager, 0 when it doesn't.
The module and what it was called with are in {data}, beside this file. {classes}
"""

import sys
from pathlib import Path

import torch

{backend}
OPTIONS = {options!r}
DYNAMIC = {dynamic!r}
ALLOWED = {allowed!r}  # of the norm

saved = torch.load(Path(__file__).with_name("{data}"), weights_only=False)
module = saved["module"]


def run(call, arguments):
    args, kwargs = arguments
    torch.manual_seed(0)
    module.zero_grad(set_to_none=True)
    leaves = []

    def fresh(tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if not tensor.requires_grad:
            return tensor.clone() if saved["writes"] else tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone() if saved["writes"] else leaves[-1]

    args, kwargs = torch.utils._pytree.tree_map(fresh, (args, kwargs))
    outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = [output for output in outputs if output.is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    loss = sum((output * torch.randn(output.shape, generator=generator).to(output)).sum() for output in outputs)
    found = {{f"output {{place}}": output.detach() for place, output in enumerate(outputs)}}
    if loss.requires_grad:
        loss.backward()
    for name, tensor in [*module.named_parameters(), *((f"input {{place}}", leaf) for place, leaf in enumerate(leaves))]:
        if tensor.requires_grad and tensor.grad is not None:
            found[f"gradient of {{name}}"] = tensor.grad.clone()
    return found


compiled = torch.compile(module, backend=BACKEND, dynamic=DYNAMIC, **({{"options": OPTIONS}} if OPTIONS else {{}}))
wrong = False
for mode in (module.train, module.eval):
    mode()
    run(compiled, saved["first"])  # what came before
    if saved["weights"] is not None:
        before = {{name: tensor.detach().clone() for name, tensor in module.named_parameters()}}
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                tensor.copy_(saved["weights"][name])
    expected, found = run(module, saved["then"]), run(compiled, saved["then"])
    if saved["weights"] is not None:
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                tensor.copy_(before[name])
    typical = (sum(value.double().norm() ** 2 for value in expected.values()) / max(1, len(expected))) ** 0.5
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).norm().item() if name in found else float("nan")
        off = not difference <= ALLOWED * (value.double().norm().item() + 0.05 * float(typical))
        wrong = wrong or off
        print(f"{{'WRONG' if off else 'right'}}  {{mode.__name__:5}}  {{name}}: norm {{value.norm():.4g}}, difference {{difference:.4g}}")
sys.exit(1 if wrong else 0)
'''


def write_script(
    folder: Path,
    subject: Subject,
    situation: Situation,
    *,
    backend: Any,
    backend_name: str,
    options: Any,
    dynamic: bool | None,
    allowed: float,
) -> tuple[Path | None, bool | None, str]:
    """Writes the program and its data, and runs it here.

    Returns:
        The program, whether it showed the fault (None: it can't be run without a hand), and why there is none or what is missing.

    Raises:
        OutputError: The folder can't be written.
    """
    if situation.everywhere:
        return None, None, "no script: rows of several adapters belong to the whole model"
    with situation.enter(subject):
        after = {name: tensor.detach().clone() for name, tensor in subject.model.named_parameters()}
        then = situation.batch or subject.batch
    before = dict(subject.model.named_parameters())
    changed = any(name in before and not torch.equal(before[name], value) for name, value in after.items())
    saved = {
        "module": subject.model,
        "first": _loose(subject.batch),
        "then": _loose(then),
        "weights": after if changed else None,
        "writes": subject.writes,
    }
    buffer = io.BytesIO()
    try:
        torch.save(saved, buffer)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        return None, None, f"no script: the module can't be written to a file: {error}"
    line, runnable = _backend_line(backend, backend_name)
    program = _PROGRAM.format(
        title=f"{subject.path or type(subject.model).__name__} is wrong when compiled with {backend_name}.",
        data=DATA,
        classes=f"Its class is {type(subject.model).__module__}.{type(subject.model).__qualname__}.",
        backend=line,
        options=_plain(options) if backend_name == "inductor" else {},
        dynamic=dynamic,
        allowed=allowed,
    )
    path = folder / SCRIPT
    make_folder(folder)
    # together: of two checks at once, the program must not read the other's data
    atomic_write_all(
        {
            folder / DATA: lambda there: there.write_bytes(buffer.getvalue()),
            path: lambda there: there.write_text(program, encoding="utf-8"),
        },
        num_bytes=len(buffer.getvalue()),
    )
    if not runnable:
        return path, None, "the backend is an object of your program: put it into the script by hand"
    return path, _shows(path), ""


def _loose(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), batch)


def _plain(options: Any) -> dict[str, Any]:
    """Those that can be written down; a partitioner object can't."""
    return {name: value for name, value in dict(options).items() if isinstance(value, bool | int | float | str | None)}


def _backend_line(backend: Any, name: str) -> tuple[str, bool]:
    if isinstance(backend, str):
        return f"BACKEND = {backend!r}", True
    module, _, attribute = name.partition(":")
    if attribute:
        return f"from {module} import {attribute} as BACKEND", True
    module, attribute = getattr(backend, "__module__", ""), getattr(backend, "__qualname__", "")
    with contextlib.suppress(ImportError):
        if attribute.isidentifier() and getattr(importlib.import_module(module), attribute, None) is backend:
            return f"from {module} import {attribute} as BACKEND", True
    return f"BACKEND = None  # put {name} here", False


def _shows(path: Path) -> bool:
    """Runs it in this process, quietly: its exit status says whether the fault is there."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return end.code == 1
    except Exception:
        return False
    return False
