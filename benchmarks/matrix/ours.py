"""What onegraph does: each feature on a compiled model, against a freshly built eager one."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onegraph
import onegraph.checkpoint
from matrix.work import DENSE, IDS, ROWS, Case, Cell, Model, NoSuchFeatureError, counted, defined, difference, differences, make_model
from onegraph.adapters import Adapters, attach
from onegraph.compiling import Watch
from onegraph.methods import Method

Values = dict[str, dict[str, Tensor]]


def copied(tensors: Any) -> Values:
    return {path: {key: value.detach().clone() for key, value in own.items()} for path, own in tensors.items()}


def randomise(adapters: Adapters, name: str, seed: int) -> None:
    """Random values for everything that is trained, near where it starts."""
    generator = torch.Generator().manual_seed(seed)
    trained = adapters.parameters(name).keys()
    values = {
        path: {
            key: value + torch.randn(value.shape, generator=generator).to(value) * 0.2
            if (f"{path}.{key}" if path else key) in trained
            else value
            for key, value in own.items()
        }
        for path, own in copied(adapters.tensors(name)).items()
    }
    adapters.load_tensors(name, values)


def settings_of(adapters: Adapters, name: str) -> dict[str, dict[str, float]]:
    """Path -> setting -> value."""
    found: dict[str, dict[str, float]] = {path: {} for path in adapters.methods(name)}
    for setting in adapters.setting_names(name):
        for path, value in adapters.settings_of(name, setting).items():
            found[path][setting] = value
    return found


def gradients(adapters: Adapters, name: str) -> dict[str, Tensor]:
    """The gradients of an adapter, cut to its true rank; they are taken away."""
    parameters = adapters.parameters(name)
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        found = {
            f"{path}.{key}" if path else key: value for path, own in copied(adapters.tensors(name)).items() for key, value in own.items()
        }
        for key, parameter in parameters.items():
            parameter.copy_(before[key])
            parameter.grad = None
    return {key: found[key] for key in parameters}


class Session:
    """A compiled model with the adapters "a", "b" and "c" of a method, and what they must give, from copies made at the start.

    Args:
        case: The method.
        more: Further fields of its adapters.
        options: Of ``attach`` and ``add``.
        compile: Of ``onegraph.compile``; None: the model stays eager.
    """

    def __init__(
        self,
        case: Case,
        *,
        more: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        compile: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        names: str = "abc",
    ) -> None:
        self.case, self.more, self.options = case, more or {}, options or {}
        self.base = make_model().to(dtype)
        self.adapters = self._attached(copy.deepcopy(self.base), names[0])
        if len(names) > 1:
            self.adapters.reserve(num_adapters=6)
        for name in names[1:]:
            self.adapters.add(name, case.method(name, **self.more), targets=case.where(name), **self.options)
        for number, name in enumerate(names):
            randomise(self.adapters, name, number)
        self.held = {name: copied(self.adapters.tensors(name)) for name in names}
        self.settings = {name: settings_of(self.adapters, name) for name in names}
        if compile is not None:
            onegraph.compile(self.model, backend="aot_eager", **compile)

    def _attached(self, model: Model, name: str) -> Adapters:
        generator = torch.Generator().manual_seed(5)
        return attach(
            model, self.case.method(name, **self.more), targets=self.case.where(name), name=name, generator=generator, **self.options
        )

    @property
    def model(self) -> Model:
        return self.adapters.model  # type: ignore[return-value]

    def alone(self, name: str) -> Adapters:
        """An eager model with one adapter, built anew."""
        adapters = self._attached(copy.deepcopy(self.base), name)
        adapters.load_tensors(name, self.held[name])
        for setting in adapters.setting_names(name):
            adapters.set_setting(name, setting, {path: own.get(setting, 0.0) for path, own in self.settings[name].items()})
        return adapters

    def expected(self, name: str | None, ids: Tensor = IDS, *, training: bool, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of the eager model."""
        if name is None:
            return self.base(ids).detach(), {}
        adapters = self.alone(name)
        adapters.model.train(training)
        with adapters.without_randomness():
            output = adapters.model(ids)
        if not training:
            return output.detach(), {}
        (output.float().square().sum() * scale).backward()
        return output.detach(), gradients(adapters, name)

    def step(self, *, training: bool) -> Tensor:
        """A pass of the compiled model, in training with the backward one."""
        self.model.train(training)
        with torch.set_grad_enabled(training), self.adapters.without_randomness():
            output: Tensor = self.model(IDS)
            if training:
                output.float().square().sum().backward()
        return output.detach()

    def compare(self, cell: Cell, name: str | None, mode: str) -> None:
        """The compiled model with what is active, against the eager one with that adapter."""
        training = mode == "train"
        output = self.step(training=training)
        expected, gradient = self.expected(name, training=training)
        cell.see(difference(output, expected))
        if training and name is not None:
            cell.see(None, differences(gradients(self.adapters, name), gradient))

    def untouched(self, *names: str) -> None:
        """These hold what they held, bit for bit."""
        for name in names:
            present = self.adapters.tensors(name)
            for path, own in self.held[name].items():
                for key, value in own.items():
                    if not torch.equal(present[path][key], value):
                        raise AssertionError(f"{name!r} has changed: {path}.{key}")


class Ours:
    """Runs the cells of a method. The compiled session is shared as long as nothing was wrong with it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._session: Session | None = None

    def session(self) -> Session:
        """The compiled model, warm: training, inference."""
        if self._session is None:
            torch._dynamo.reset()
            self._session = Session(self.case, compile={"regions": "whole"})
            self._session.step(training=True)
            gradients(self._session.adapters, "a")
            self._session.step(training=False)
        self._session.adapters.use("a")
        return self._session

    def forget(self) -> None:
        """Let the next cell begin anew."""
        self._session = None

    @contextmanager
    def cold(self, cell: Cell, **arguments: Any) -> Any:
        """A session of its own, compiled here."""
        self.forget()
        torch._dynamo.reset()
        session = Session(self.case, **arguments)
        with Watch() as watch:
            yield session
        counted(cell, watch, warm=False)
        torch._dynamo.reset()

    @contextmanager
    def warm(self, cell: Cell) -> Any:
        """The shared session; every compilation counts."""
        session = self.session()
        with Watch() as watch:
            yield session
        counted(cell, watch, warm=True)

    def run(self, feature: str, mode: str) -> Cell:
        """One cell."""
        cell = Cell()
        FEATURES[feature](self, cell, mode)
        return cell


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
        cell.allowed, cell.note = 1, "the first block's input needs no gradient: one graph, the other blocks another"


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
            _compare_with(session, cell, alone, name, like, mode)
            session.adapters.delete(name)
            del session.held[name], session.settings[name]
        session.adapters.use("a")
        session.untouched("a", "b", "c")
        session.compare(cell, "a", mode)


def _compare_with(session: Session, cell: Cell, alone: Adapters, name: str, alone_name: str, mode: str) -> None:
    """The active adapter against an eager model that was made otherwise."""
    training = mode == "train"
    output = session.step(training=training)
    alone.model.train(training)
    with torch.set_grad_enabled(training), alone.without_randomness():
        expected = alone.model(IDS)
        if training:
            expected.float().square().sum().backward()
    cell.see(difference(output, expected))
    if training:
        cell.see(None, differences(gradients(session.adapters, name), gradients(alone, alone_name)))


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
        _compare_with(session, cell, other, "file", "file", mode)
        session.untouched(*session.held)
    finally:
        session.adapters.delete("file")


def load_rank(ours: Ours, cell: Cell, mode: str) -> None:
    if "rank" not in ours.case.second:
        if "rank" not in ours.case.first:
            raise NoSuchFeatureError(ours.case.no_rank or "no rank")
        cell.allowed, cell.note = 1, ours.case.no_rank or ""
        with ours.cold(cell, compile={"regions": "whole"}) as session:
            session.step(training=mode == "train")
            gradients(session.adapters, "a")
            _load(ours, cell, mode, session, ours.case.method(rank=ours.case.first["rank"] // 2), list(ours.case.targets))
        return
    with ours.warm(cell) as session:
        for rank in (1, 3) if ours.case.name != "hra" else (2,):
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
    session.adapters.reserve(method=ours.case.method(), targets=list(ours.case.targets))
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
                _compare_with(session, cell, alone, name, name, mode)
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

    from matrix.theirs import randomised

    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            theirs = randomised(get_peft_model(make_model(), ours.case.config(name)), 5).eval()
            path = Path(folder) / name
            theirs.save_pretrained(str(path))
            model = make_model().eval()
            onegraph.load(model, path)
            model.eval()
            cell.see(difference(model(IDS), theirs(IDS)))


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
    "load: another rank": load_rank,
    "load: fewer layers": load_subset,
    "load: more layers": load_superset,
    "load: another alpha": load_scale,
    "rows": rows,
    "merge": merged,
    "combine": combined,
    "dense alongside": dense,
    "dropout": dropout,
    "gradient checkpointing": checkpointing,
    "to(dtype)": to_dtype,
    "copies": copies,
    "state dict": state_dict,
    "file": native_file,
    "to PEFT": peft_file_out,
    "from PEFT": peft_file_in,
    "bf16 base": bf16,
}
