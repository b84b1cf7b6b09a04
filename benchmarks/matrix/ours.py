"""What onegraph does: each feature on a compiled model, against a freshly built eager one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

import onegraph
import onegraph.checkpoint
from matrix import ours_files
from matrix.session import Ours, Session, compare_with, copied, gradients, randomise, settings_of
from matrix.work import DENSE, FIRST_BLOCK, IDS, ROWS, Cell, NoSuchFeatureError, counted, defined, difference, differences
from onegraph.compiling import Watch


def definition(ours: Ours, cell: Cell, mode: str) -> None:
    session = Session(ours.case, names="a")
    model = defined(session.base, [(1.0, session.adapters.methods("a"), session.held["a"], session.settings["a"])])
    session.model.eval()
    cell.see(difference(session.model(IDS), model(IDS)))


def whole(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.cold(cell, compile={"regions": "whole"}, names="a") as session:
        session.compare(cell, "a", mode)


def blocks(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.cold(cell, compile={"regions": "blocks"}, names="a") as session:
        session.compare(cell, "a", mode)
    _first_block(cell, mode)


def _first_block(cell: Cell, mode: str) -> None:
    if mode == "train":
        cell.allowed, cell.note = 1, FIRST_BLOCK


def before_attaching(ours: Ours, cell: Cell, mode: str) -> None:
    ours.forget()
    torch._dynamo.reset()
    session = Session(ours.case, names="a")
    model = copy.deepcopy(session.base)
    onegraph.compile(model, backend="aot_eager", regions="whole")
    model(IDS)
    session.adapters = session._attached(model, "a")
    session.adapters.load_tensors("a", session.held["a"])
    with Watch() as watch:
        session.compare(cell, "a", mode)
    counted(cell, watch, warm=True)
    cell.allowed, cell.note = 1, "another model than before attaching: one graph"
    if any("_orig_mod" in key for key in model.state_dict()):
        raise AssertionError("_orig_mod in the state dict")


def use(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.warm(cell) as session:
        for name in ("a", "b", None, "c", "b", "a"):
            session.adapters.use(name)
            session.compare(cell, name, mode)
        session.untouched("a", "b", "c")


def disabled(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.warm(cell) as session:
        with session.adapters.disabled():
            session.compare(cell, None, mode)
        session.compare(cell, "a", mode)


def scale(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.warm(cell) as session:
        strength = {path: own["scale"] for path, own in session.settings["a"].items()}
        try:
            for factor in (0.5, -1.0, 1.0):
                session.adapters.scale("a", factor)
                for path, value in strength.items():
                    session.settings["a"][path]["scale"] = value * factor
                session.compare(cell, "a", mode)
            session.adapters.scale("a", 0.0)
            off = session.step(training=mode == "train")
            session.adapters.use(None)
            if not torch.equal(off, session.step(training=mode == "train")):
                raise AssertionError("scale 0 isn't the base model bit for bit")
            cell.note = "scale 0 is the base model bit for bit"
        finally:
            session.adapters.scale("a", 1.0)
            for parameter in session.adapters.parameters("a").values():
                parameter.grad = None


def add_delete(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.warm(cell) as session:
        for number, like in enumerate(("b", "a", "b")):
            name = ("a.b", "ab", "a2")[number]
            session.adapters.add(name, ours.case.method(like), targets=ours.case.where(like))
            randomise(session.adapters, name, 10 + number)
            session.held[name], session.settings[name] = copied(session.adapters.tensors(name)), settings_of(session.adapters, name)
            session.adapters.use(name)
            alone = session._attached(copy.deepcopy(session.base), like)
            alone.load_tensors(like, session.held[name])
            compare_with(session, cell, alone, name, like, mode)
            session.adapters.delete(name)
            del session.held[name], session.settings[name]
        session.adapters.use("a")
        session.untouched("a", "b", "c")
        session.compare(cell, "a", mode)


def rows(ours: Ours, cell: Cell, mode: str) -> None:
    """One graph as the assignment changes: the first one of rows doesn't count."""
    session, training = ours.session(), mode == "train"
    for warm, assignment in enumerate((["a", "b", None, "c"], ["b", "b", "a", "a"], [None, "c", None, "b"])):
        if warm == 1:
            watch = Watch().start()
        names = list(assignment)
        session.model.train(training)
        with torch.set_grad_enabled(training), session.adapters.rows(names), session.adapters.without_randomness():
            output = session.model(IDS)
            if training:
                output.square().sum().backward()
        for name in dict.fromkeys(names):
            places = [row for row, other in enumerate(names) if other == name]
            expected, gradient = session.expected(name, IDS[places], training=training)
            cell.see(difference(output[places], expected))
            if training and name is not None:
                cell.see(None, differences(gradients(session.adapters, name), gradient))
    watch.stop()
    counted(cell, watch, warm=True)
    cell.note = f"{ROWS} rows, three assignments; the first compiles"


def merged(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.warm(cell) as session:
        weights = {path: value.detach().clone() for path, value in session.model.named_parameters() if "base_layer" in path}
        session.adapters.merge("a")
        expected, _ = session.expected("a", training=False)
        cell.see(difference(session.step(training=False), expected))
        session.adapters.unmerge()
        for path, value in session.model.named_parameters():
            if path in weights and not torch.equal(value, weights[path]):
                raise AssertionError(f"unmerging gave another {path}")
        session.adapters.merge(["a", "b"], weights=[0.5, -1.5])
        summed = [(weight, session.adapters.methods(n), session.held[n], session.settings[n]) for n, weight in (("a", 0.5), ("b", -1.5))]
        cell.see(difference(session.step(training=False), defined(session.base, summed)(IDS)))
        session.adapters.unmerge()
        session.compare(cell, "a", "infer")
        cell.note = "one; two, weighted; unmerging restores bit for bit"


def combined(ours: Ours, cell: Cell, mode: str) -> None:
    ours.forget()
    torch._dynamo.reset()
    session = Session(ours.case)
    done = session.adapters.combine("sum", {"a": 0.5, "b": -1.5}, how="svd", energy=1.0)
    session.adapters.use("sum")
    onegraph.compile(session.model, backend="aot_eager", regions="whole")
    summed = [(weight, session.adapters.methods(n), session.held[n], session.settings[n]) for n, weight in (("a", 0.5), ("b", -1.5))]
    with Watch() as watch:
        cell.see(difference(session.step(training=False), defined(session.base, summed)(IDS)))
    counted(cell, watch, warm=False)
    session.untouched("a", "b", "c")
    cell.note = f"true weighted sum, relative error {done.relative_error:.1g}"


def dense(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.cold(cell, options={"also": {"head": DENSE}}, compile={"regions": "whole"}) as session:
        for name in ("a", "c", "b", None, "a"):
            session.adapters.use(name)
            session.compare(cell, name, mode)


def dropout(ours: Ours, cell: Cell, mode: str) -> None:
    if ours.case.dropout is None:
        raise NoSuchFeatureError("the method has no dropout")
    name = ours.case.dropout[0]
    with ours.cold(cell, more={name: 0.4}, compile={"regions": "whole"}, names="a") as session:
        session.model.train()
        drawn = [session.model(IDS) for _ in range(6)]
        if not any(not torch.equal(drawn[0], other) for other in drawn[1:]):
            raise AssertionError("dropout drew the same every time")
        session.adapters.set_setting("a", name, 0.1)
        session.model(IDS).sum().backward()
        gradients(session.adapters, "a")
        session.adapters.set_setting("a", name, 0.4)
        session.compare(cell, "a", "train")  # with the probability 0
        session.model.eval()
        cell.note = "drawn anew each pass; another probability and none on the same graph"


def checkpointing(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.cold(cell, compile={"regions": "blocks", "gradient_checkpointing": True}, names="a") as session:
        session.compare(cell, "a", mode)
    _first_block(cell, mode)


def bf16(ours: Ours, cell: Cell, mode: str) -> None:
    with ours.cold(cell, compile={"regions": "whole"}, dtype=torch.bfloat16, names="a") as session:
        output = session.step(training=mode == "train")
        if output.dtype != torch.bfloat16 or any(p.dtype != torch.float32 for p in session.adapters.parameters().values()):
            raise AssertionError(f"output {output.dtype}")
        expected, gradient = session.expected("a", training=mode == "train")
        cell.see(difference(output, expected))
        if mode == "train":
            cell.see(None, differences(gradients(session.adapters, "a"), gradient))
        own = [(1.0, session.adapters.methods("a"), session.held["a"], session.settings["a"])]
        exact = difference(output, defined(session.base, own)(IDS))
        cell.output_tolerance = cell.gradient_tolerance = 0.02
        if exact > 0.05:
            raise AssertionError(f"off by {exact:.2g} from float64")
        cell.note = f"float32 adapter; {exact:.1g} from float64"


FEATURES: dict[str, Callable[[Ours, Cell, str], None]] = {
    "definition": definition,
    "whole": whole,
    "blocks": blocks,
    "before attaching": before_attaching,
    "use": use,
    "disabled": disabled,
    "scale": scale,
    "add and delete": add_delete,
    "load: another rank": ours_files.load_rank,
    "load: fewer layers": ours_files.load_subset,
    "load: more layers": ours_files.load_superset,
    "load: another alpha": ours_files.load_scale,
    "rows": rows,
    "merge": merged,
    "combine": combined,
    "dense alongside": dense,
    "dropout": dropout,
    "gradient checkpointing": checkpointing,
    "to(dtype)": ours_files.to_dtype,
    "copies": ours_files.copies,
    "state dict": ours_files.state_dict,
    "file": ours_files.native_file,
    "to PEFT": ours_files.peft_file_out,
    "from PEFT": ours_files.peft_file_in,
    "bf16 base": bf16,
}
