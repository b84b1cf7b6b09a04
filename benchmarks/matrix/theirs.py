"""What PEFT does with the same work, through its own interface."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from matrix.theirs_session import Session, compare_rows, further, of_adapter, randomised, taken
from matrix.work import FIRST_BLOCK, IDS, ROWS, Case, Cell, NoSuchFeatureError, counted, difference, differences, first_line, make_model
from onegraph.compiling import Watch


class Theirs:
    """Runs the cells of a method. Every cell has a session of its own: what one recompiled must not help the next."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.names = "a" if case.alone else "abc"
        self.fullgraph: bool | None = None
        self.why_not = ""

    def session(self, mode: str, **arguments: Any) -> Session:
        """Compiled and warm."""
        if self.fullgraph is None:
            self.fullgraph = True
            try:
                for training in (True, False):
                    Session(self.case, names="a").step(training=training)
            except Exception as error:
                self.fullgraph, self.why_not = False, first_line(error)
        session = Session(self.case, fullgraph=self.fullgraph, **{"names": self.names, **arguments})
        session.step(training=mode == "train")
        for name in "abc":
            taken(session.model, name)
        return session

    @property
    def limit(self) -> str:
        """What "b" is here, where it can't be what it is for onegraph."""
        return '"b" has the rank of "a": two ranks fail' if self.case.one_rank else '"b" is on the layers of "a": others fail'

    def forget(self) -> None:
        """Nothing is kept."""

    def run(self, feature: str, mode: str) -> Cell:
        """One cell."""
        if self.case.peft is None:
            raise NoSuchFeatureError(self.case.no_peft)
        cell = Cell()
        found = FEATURES.get(feature)
        if found is None:
            raise NoSuchFeatureError(MISSING[feature])
        found(self, cell, mode)
        if self.why_not and cell.breaks is not None and feature not in {"whole", "blocks"}:
            cell.note = "; ".join(filter(None, [cell.note, "compiled with breaks: as a whole it doesn't"]))
        if (self.case.one_rank or self.case.one_place) and feature in {
            "use",
            "add and delete",
            "dense alongside",
            "copies",
            "file",
            "to(dtype)",
        }:
            cell.note = "; ".join(filter(None, [cell.note, self.limit]))
        return cell


def cold(theirs: Theirs, cell: Cell, mode: str, regions: str) -> None:
    session = Session(theirs.case, names="a", regions=regions)
    with Watch() as watch:
        session.compare(cell, "a", mode)
    counted(cell, watch, warm=False)
    if regions == "blocks" and mode == "train":
        cell.allowed, cell.note = 1, FIRST_BLOCK


def use(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session(mode, names="abc")
    with Watch() as watch:
        for name in ("a", "b", "c", "b", "a"):
            session.use(name)
            session.compare(cell, name, mode)
    counted(cell, watch, warm=True)


def disabled(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session(mode)
    with Watch() as watch:
        with session.model.disable_adapter():
            session.compare(cell, None, mode)
        session.compare(cell, "a", mode)
    counted(cell, watch, warm=True)


def scale(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session(mode)
    layers = [module for module in session.model.modules() if hasattr(module, "set_scale")]
    if not layers:
        raise NoSuchFeatureError("its layers have no set_scale")
    with Watch() as watch:
        for factor in (0.5, -1.0, 1.0):
            for layer in layers:
                try:
                    layer.set_scale("a", factor)
                except AttributeError as error:
                    raise NoSuchFeatureError(f"set_scale: {first_line(error)}") from error
            output = session.step(training=mode == "train")
            alone = session.alone("a")
            for layer in [module for module in alone.modules() if hasattr(module, "set_scale")]:
                layer.set_scale("a", factor)
            alone.train(mode == "train")
            expected = alone(IDS)
            cell.see(difference(output, expected))
            if mode == "train":
                expected.square().sum().backward()
                cell.see(None, differences(taken(session.model, "a"), taken(alone, "a")))
    counted(cell, watch, warm=True)


def add_delete(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session(mode, names="ac")
    with Watch() as watch:
        for _ in range(3):
            session.model.add_adapter("b", theirs.case.config("b", **further(theirs.case)))
            randomised(session.model, 10, "b")
            session.use("b")
            session.compare(cell, "b", mode)
            session.model.delete_adapter("b")
        session.use("a")
        session.compare(cell, "a", mode)
    counted(cell, watch, warm=True)


def _hotswapped(theirs: Theirs, cell: Cell, mode: str, fields: dict[str, Any], targets: list[str]) -> None:
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    case = theirs.case
    config = case.peft({**case.first, **fields, "targets": targets})  # type: ignore[misc]
    other = randomised(get_peft_model(make_model(), config), 21)
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        if case.name in {"lora"}:
            session = theirs.session(mode, names="a", prepare=lambda model: prepare_model_for_compiled_hotswap(model, target_rank=8))
            with Watch() as watch:
                hotswap_adapter(session.model, folder, adapter_name="a")
                _as(session, other, cell, "a", mode)
            cell.note = "hotswap_adapter: in the place of an adapter"
        else:
            session = theirs.session(mode, names="a")
            with Watch() as watch:
                session.model.load_adapter(folder, adapter_name="file", is_trainable=not further(session.case))
                session.use("file")
                _as(session, other, cell, "file", mode)
            cell.note = "load_adapter; hotswap_adapter is for LoRA"
    counted(cell, watch, warm=True)


def _as(session: Session, other: Any, cell: Cell, name: str, mode: str) -> None:
    output = session.step(training=mode == "train")
    other.train(mode == "train")
    expected = other(IDS)
    cell.see(difference(output, expected))
    if mode == "train":
        expected.square().sum().backward()
        found, wanted = taken(session.model, name), taken(other, "default")
        if all(found[key].shape == wanted[key].shape for key in wanted if key in found):
            cell.see(None, differences({key: found[key] for key in wanted}, wanted))


def load_rank(theirs: Theirs, cell: Cell, mode: str) -> None:
    if "rank" not in theirs.case.first:
        raise NoSuchFeatureError(theirs.case.no_rank or "no rank")
    _hotswapped(theirs, cell, mode, {"rank": theirs.case.first["rank"] // 2}, list(theirs.case.targets))


def load_subset(theirs: Theirs, cell: Cell, mode: str) -> None:
    _hotswapped(theirs, cell, mode, {}, theirs.case.fewer)


def load_superset(theirs: Theirs, cell: Cell, mode: str) -> None:
    case = theirs.case
    other = randomised(get_peft_model(make_model(), case.config("a")), 21)
    session = theirs.session(mode, names="b")
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        with Watch() as watch:
            session.model.load_adapter(folder, adapter_name="file", is_trainable=not further(session.case))
            session.use("file")
            _as(session, other, cell, "file", mode)
    counted(cell, watch, warm=True)
    cell.note = "load_adapter; room can't be made before"


def load_scale(theirs: Theirs, cell: Cell, mode: str) -> None:
    if "alpha" not in theirs.case.first:
        raise NoSuchFeatureError("the method has no alpha")
    _hotswapped(theirs, cell, mode, {"alpha": 17.0}, list(theirs.case.targets))


ROWS_OF = (["a", "b", "__base__", "c"], ["b", "b", "a", "a"], ["__base__", "c", "__base__", "b"])


def rows(theirs: Theirs, cell: Cell, mode: str) -> None:
    """Compiled as a whole, from the outside, where the hooks that hand the names on are seen."""
    session = Session(theirs.case, regions=None)
    session.model.train(mode == "train")
    eager = Cell()
    try:
        compare_rows(session, eager, session.model(IDS, adapter_names=ROWS_OF[0]), ROWS_OF[0])
    except (TypeError, ValueError) as error:
        raise NoSuchFeatureError(f"adapter_names: {first_line(error)}") from error
    if eager.verdict == "fail":
        cell.see(eager.output_error)
        cell.note = "adapter_names is taken and ignored without a word, eager too: it is for LoRA"
        return
    session.model.compile(backend="aot_eager")
    with torch.set_grad_enabled(mode == "train"):
        for warm, assignment in enumerate(ROWS_OF):
            if warm == 1:
                watch = Watch().start()
            compare_rows(session, cell, session.model(IDS, adapter_names=assignment), assignment)
    watch.stop()
    counted(cell, watch, warm=True)
    cell.note = f"adapter_names, {ROWS} rows, three assignments; the first compiles"
    warm_session, ignored = theirs.session(mode), Cell()
    with torch.set_grad_enabled(mode == "train"):
        compare_rows(warm_session, ignored, warm_session.model(IDS, adapter_names=ROWS_OF[0]), ROWS_OF[0])
    if ignored.verdict == "fail":
        cell.note += "; with the base model compiled and run once, the names are ignored without a word"


def merged(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session("infer")
    weights = {path: value.detach().clone() for path, value in session.model.named_parameters() if "base_layer" in path}
    with Watch() as watch:
        expected, _ = session.expected("a", training=False)
        session.model.merge_adapter(["a"])
        cell.see(difference(session.step(training=False), expected))
        session.model.unmerge_adapter()
        session.compare(cell, "a", "infer")
    counted(cell, watch, warm=True)
    worst = max(difference(value, weights[path]) for path, value in session.model.named_parameters() if path in weights)
    cell.note = "one; unmerging " + ("restores bit for bit" if worst == 0 else f"leaves {worst:.1g} of the weights behind")


def combined(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = Session(theirs.case, regions=None)
    if not hasattr(session.model.base_model, "add_weighted_adapter"):
        raise NoSuchFeatureError("add_weighted_adapter is for LoRA and IA3")
    try:
        if theirs.case.name == "ia3":
            session.model.add_weighted_adapter(["a", "c"], [0.5, -1.5], "sum")
            cell.note = "the weighted sum of the gains, not of the changes"
        else:
            session.model.add_weighted_adapter(["a", "c"], [0.5, -1.5], "sum", combination_type="svd", svd_rank=16)
            cell.note = "combination_type='svd'; of adapters on the same layers"
    except TypeError as error:
        raise NoSuchFeatureError(first_line(error)) from error
    session.use("sum")
    summed = copy.deepcopy(session.base)
    for name, weight in (("a", 0.5), ("c", -1.5)):
        plain = session.alone(name).merge_and_unload()
        with torch.no_grad():
            for (_, total), (_, value), (_, start) in zip(
                summed.named_parameters(), plain.named_parameters(), session.base.named_parameters()
            ):
                total += weight * (value - start)
    cell.see(difference(session.step(training=False), summed(IDS)))


def dense(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session(mode, names="abc", more={"modules_to_save": ["head"]})
    with Watch() as watch:
        for name in ("a", "c", "b", "a"):
            session.use(name)
            output = session.step(training=mode == "train")
            alone = session.alone(name)
            mine = {k.replace(f".{name}", ""): v for k, v in session.model.named_parameters() if f"modules_to_save.{name}." in k}
            with torch.no_grad():
                for key, value in alone.named_parameters():
                    if key.replace(f".{name}", "") in mine:
                        value.copy_(mine[key.replace(f".{name}", "")])
            alone.train(mode == "train")
            cell.see(difference(output, alone(IDS)))
    counted(cell, watch, warm=True)
    cell.note = "modules_to_save"


def dropout(theirs: Theirs, cell: Cell, mode: str) -> None:
    name = None if theirs.case.dropout is None else theirs.case.dropout[1]
    if name is None:
        raise NoSuchFeatureError("the method has no dropout")
    session = Session(theirs.case, names="a", more={name: 0.4})
    with Watch() as watch:
        session.model.train()
        drawn = [session.compiled(IDS) for _ in range(6)]
        if not any(not torch.equal(drawn[0], other) for other in drawn[1:]):
            raise AssertionError("dropout drew the same every time")
        drawn[0].sum().backward()
    counted(cell, watch, warm=False)
    cell.note = "drawn anew each pass; another probability has no interface"


def to_dtype(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session(mode)
    session.model.double()
    session.base.double()
    with Watch() as watch:
        for name in theirs.names[:2]:
            session.use(name)
            session.compare(cell, name, mode)
    counted(cell, watch, warm=True)
    cell.allowed = 1


def copies(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session("infer")
    for copy_of in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        again = copy_of(session.model).eval()
        for name in theirs.names[:2]:
            again.set_adapter(name)
            expected, _ = session.expected(name, training=False)
            cell.see(difference(again(IDS), expected))


def state_dict(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session("infer")
    state = get_peft_model_state_dict(session.model, adapter_name="a")
    if any("_orig_mod" in key for key in state):
        raise AssertionError("_orig_mod in the state dict")
    other = Session(theirs.case, names="a", regions=None)
    randomised(other.model, 77, "a")
    set_peft_model_state_dict(other.model, state, adapter_name="a")
    expected, _ = session.expected("a", training=False)
    cell.see(difference(other.step(training=False), expected))


def native_file(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = theirs.session("infer")
    with tempfile.TemporaryDirectory() as folder:
        session.model.save_pretrained(folder, selected_adapters=list(theirs.names[:2]))
        for name in theirs.names[:2]:
            model = PeftModel.from_pretrained(copy.deepcopy(session.base), str(Path(folder) / name)).eval()
            expected, _ = session.expected(name, training=False)
            cell.see(difference(model(IDS), expected))
    cell.note = "save_pretrained"


def bf16(theirs: Theirs, cell: Cell, mode: str) -> None:
    session = Session(theirs.case, names="a", dtype=torch.bfloat16)
    with Watch() as watch:
        session.compare(cell, "a", mode)
    counted(cell, watch, warm=False)
    cell.output_tolerance = cell.gradient_tolerance = 0.02
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in of_adapter(session.model, "a").values()}
    cell.note = f"adapter in {', '.join(sorted(dtypes))}"


FEATURES: dict[str, Callable[[Theirs, Cell, str], None]] = {
    "whole": partial(cold, regions="whole"),
    "blocks": partial(cold, regions="blocks"),
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
    "to(dtype)": to_dtype,
    "copies": copies,
    "state dict": state_dict,
    "file": native_file,
    "bf16 base": bf16,
}

MISSING = {
    "definition": "measured for onegraph's forms alone",
    "before attaching": "PEFT wraps the model; the wrapper is compiled",
    "gradient checkpointing": "the model's own switch, not PEFT's",
    "to PEFT": "PEFT's own format: see file",
    "from PEFT": "PEFT's own format: see file",
}
