"""What onegraph does with files, copies and other dtypes."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path

import torch

import onegraph
import onegraph.checkpoint
from matrix.session import Ours, Session, compare_with, copied, randomise
from matrix.work import IDS, Cell, NoSuchFeatureError, counted, difference, make_model
from onegraph.adapters import Adapters, attach
from onegraph.compiling import Watch
from onegraph.methods import Method


def _load(ours: Ours, cell: Cell, mode: str, session: Session, method: Method, targets: list[str]) -> None:
    """A file of that method and these layers, loaded into the compiled model."""
    other = attach(make_model(), method, targets=targets, name="file")
    randomise(other, "file", 21)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        other.save(path, "file")
        session.adapters.load(path, name="file")
    try:
        session.adapters.use("file")
        compare_with(session, cell, other, "file", "file", mode)
        session.untouched(*session.held)
    finally:
        session.adapters.delete("file")


def load_rank(ours: Ours, cell: Cell, mode: str) -> None:
    if "rank" not in ours.case.second:
        raise NoSuchFeatureError(ours.case.no_rank or "no rank")
    if ours.case.room is not None:
        cell.note = f"reserve(rank={ours.case.room})"
    with ours.warm(cell) as session:
        for rank in (1, 3, ours.case.room or 3) if ours.case.name != "hra" else (2,):
            _load(ours, cell, mode, session, ours.case.method(rank=rank), list(ours.case.targets))


def load_subset(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.warm(cell) as session:
        for targets in (ours.case.fewer, ours.case.fewer[:1]):
            _load(ours, cell, mode, session, ours.case.method(), targets)


def load_superset(ours: Ours, cell: Cell, mode: str) -> None:
    """The first adapter is on one layer, room was made on all of them, the file is on all of them."""
    ours.forget()
    torch._dynamo.reset()
    session = Session(ours.case, names="b")
    session.adapters.reserve(num_adapters=4)
    session.adapters.reserve(method=ours.case.method(), targets=list(ours.case.targets), rank=ours.case.room)
    onegraph.compile(session.model, backend="aot_eager", regions="whole")
    session.compare(cell, "b", mode)
    with Watch() as watch:
        _load(ours, cell, mode, session, ours.case.method(), list(ours.case.targets))
        session.adapters.use("b")
        session.compare(cell, "b", mode)
    counted(cell, watch, warm=True)


def load_scale(ours: Ours, cell: Cell, mode: str) -> None:
    if "alpha" not in ours.case.first:
        raise NoSuchFeatureError("the method has no alpha; its strength is what scale() sets")
    with ours.warm(cell) as session:
        _load(ours, cell, mode, session, ours.case.method(alpha=17.0), list(ours.case.targets))


def to_dtype(ours: Ours, cell: Cell, mode: str) -> None:
    session = ours.session()
    try:
        session.model.double()
        session.base.double()
        session.held = {
            name: {p: {k: v.double() for k, v in own.items()} for p, own in held.items()} for name, held in session.held.items()
        }
        session.options = {"dtype": None}
        with Watch() as watch:
            for name in ("a", "b"):
                session.adapters.use(name)
                alone = attach(copy.deepcopy(session.base), ours.case.method(name), targets=ours.case.where(name), name=name, dtype=None)
                alone.load_tensors(name, session.held[name])
                compare_with(session, cell, alone, name, name, mode)
        counted(cell, watch, warm=True)
        cell.allowed, cell.note = 1, "to float64: another dtype is another graph, for all adapters"
    finally:
        ours.forget()


def copies(ours: Ours, cell: Cell, mode: str) -> None:
    session = ours.session()
    for name, copy_of in (("deepcopy", copy.deepcopy), ("pickle", lambda adapters: pickle.loads(pickle.dumps(adapters)))):
        again: Adapters = copy_of(session.adapters)
        for adapter in ("a", "b"):
            again.use(adapter)
            again.model.eval()
            expected, _ = session.expected(adapter, training=False)
            cell.see(difference(again.model(IDS), expected))
        before = copied(session.adapters.tensors("b"))
        randomise(again, "b", 99)
        if any(
            not torch.equal(value, session.adapters.tensors("b")[path][key]) for path, own in before.items() for key, value in own.items()
        ):
            raise AssertionError(f"{name}: the copy shares memory with the model")


def state_dict(ours: Ours, cell: Cell, mode: str) -> None:
    session = ours.session()
    state = {key: value.clone() for key, value in session.model.state_dict().items()}
    if any("_orig_mod" in key for key in state):
        raise AssertionError("_orig_mod in the state dict")
    other = Session(ours.case, names="a")
    other.adapters.reserve(rank=ours.case.room)
    randomise(other.adapters, "a", 77)
    other.model.load_state_dict(state, strict=True)
    other.model.eval()
    expected, _ = session.expected("a", training=False)
    cell.see(difference(other.model(IDS), expected))
    cell.note = "no _orig_mod; loads into another model with strict=True"


def native_file(ours: Ours, cell: Cell, mode: str) -> None:
    from safetensors.torch import load_file

    session = ours.session()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            path = Path(folder) / f"{name}.safetensors"
            session.adapters.save(path, name)
            if any("_orig_mod" in key for key in load_file(path)):
                raise AssertionError("_orig_mod in the file")
            model = copy.deepcopy(session.base)
            loaded = onegraph.load(model, path)
            if any(
                not torch.equal(value, loaded.tensors("default")[part][key])
                for part, own in session.held[name].items()
                for key, value in own.items()
            ):
                raise AssertionError("another tensor after loading")
            expected, _ = session.expected(name, training=False)
            cell.see(difference(model.eval()(IDS), expected))
    cell.note = "no _orig_mod; the tensors bit for bit"


def peft_file_out(ours: Ours, cell: Cell, mode: str) -> None:
    if ours.case.peft is None and ours.case.no_peft:
        raise NoSuchFeatureError(f"PEFT has {ours.case.no_peft}")
    from peft import PeftModel

    session = ours.session()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            path = Path(folder) / name
            session.adapters.save(path, name, format="peft")
            theirs = PeftModel.from_pretrained(copy.deepcopy(session.base), str(path)).eval()
            expected, _ = session.expected(name, training=False)
            cell.see(difference(theirs(IDS), expected))


def peft_file_in(ours: Ours, cell: Cell, mode: str) -> None:
    if ours.case.peft is None and ours.case.no_peft:
        raise NoSuchFeatureError(f"PEFT has {ours.case.no_peft}")
    from peft import get_peft_model

    from matrix.theirs_session import randomised

    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            theirs = randomised(get_peft_model(make_model(), ours.case.config(name)), 5).eval()
            path = Path(folder) / name
            theirs.save_pretrained(str(path))
            model = make_model().eval()
            onegraph.load(model, path)
            model.eval()
            cell.see(difference(model(IDS), theirs(IDS)))
