"""The stress: many adapters of several methods on one compiled model, random actions, and what every one of them must lead to.

The other side of the bookkeeping is plain: for every adapter the method it was added with, copies of its tensors, and the settings it was
given. From these an eager model with that adapter alone is built anew for every output.

    bash scripts/stress --seed 3 --actions 1000
"""

from __future__ import annotations

import argparse
import collections
import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import onegraph
from onegraph.adapters import Adapters, attach
from onegraph.compiling import Watch
from onegraph.layers import describe_any
from onegraph.methods import METHODS, Method

WIDTH, VOCABULARY, POSITIONS, ROWS = 8, 16, 5, 4
RATE = 0.05
NAMES = [
    *("a", "ab", "a.b", "a.b.c", "b", "A", "default", "default2", "default_2", "default.2", "Default", "base_layer", "down", "up"),
    *("scale", "0", "00", "1", "None", "none", "weight", "a b", "a-b", "é", "lora_A", "_orig_mod", "x" * 60, "reserved", "slots"),
    *(f"adapter {number}" for number in range(20)),
]
Values = dict[str, dict[str, Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.query(self.norm(x))))


class Model(nn.Module):
    """Every kind of layer, and two equal blocks."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2))


def _dropouts(random: Random, *names: str) -> dict[str, float]:
    return {name: random.choice([0.0, 0.1, 0.3]) for name in names}


# What is random for each method: only fields that adapters of one graph may differ in. All other fields are the same every time.
KINDS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "lora": lambda r: {
        "rank": r.randint(1, 6),
        "alpha": r.uniform(-4, 8),
        "rslora": r.random() < 0.5,
        **_dropouts(r, "dropout", "input_dropout", "rank_dropout", "module_dropout"),
    },
    "dora": lambda r: {"rank": r.randint(1, 6), "alpha": r.uniform(1, 8), **_dropouts(r, "dropout", "input_dropout")},
    "adalora": lambda r: {"rank": r.randint(1, 6), "alpha": r.uniform(1, 8), **_dropouts(r, "input_dropout")},
    "ia3": lambda r: {},
    "loha": lambda r: {"rank": r.randint(1, 3), "alpha": r.uniform(1, 3), "form": "weight", **_dropouts(r, "rank_dropout")},
    "lokr": lambda r: {
        "rank": r.randint(1, 3),
        "alpha": r.uniform(1, 3),
        "first_form": "full",
        "second_form": "factorised",
        "form": "weight",
        **_dropouts(r, "module_dropout"),
    },
    "vera": lambda r: {
        "rank": r.randint(1, 6),
        "in_width": WIDTH,
        "out_width": WIDTH,
        "projection_key": r.randint(0, 9),
        **_dropouts(r, "input_dropout"),
    },
    "vblora": lambda r: {"rank": 2, "num_vectors": 6, "vector_length": 4, "bank_bound": 0.5, **_dropouts(r, "input_dropout")},
    "oft": lambda r: {"block_size": 4, **_dropouts(r, "module_dropout")},
    "boft": lambda r: {"block_size": 4, "num_factors": 1, **_dropouts(r, "block_dropout")},
    "hra": lambda r: {"rank": 2 * r.randint(1, 3)},
    "miss": lambda r: {"rank": 4, **_dropouts(r, "input_dropout")},
}
MOST: dict[str, dict[str, Any]] = {
    "lora": {"rank": 6, "dropout": 0.1, "input_dropout": 0.1, "rank_dropout": 0.1, "module_dropout": 0.1},
    "dora": {"rank": 6, "dropout": 0.1, "input_dropout": 0.1},
    "adalora": {"rank": 6, "input_dropout": 0.1},
    "loha": {"rank": 3, "rank_dropout": 0.1},
    "lokr": {"rank": 3, "module_dropout": 0.1},
    "vera": {"rank": 6, "input_dropout": 0.1},
    "vblora": {"input_dropout": 0.1},
    "oft": {"module_dropout": 0.1},
    "boft": {"block_dropout": 0.1},
    "hra": {"rank": 6},
    "miss": {"input_dropout": 0.1},
}
"""The largest of each, which room is made for."""


def method_of(kind: str, random: Random) -> Method:
    """An adapter of a method, at random."""
    return METHODS[kind](**KINDS.get(kind, lambda r: {})(random))


@dataclass
class Held:
    """What one adapter must hold: written down here when it is given to it."""

    kind: str
    method: Method
    targets: list[str]
    tensors: Values = field(default_factory=dict)
    settings: dict[str, dict[str, float]] = field(default_factory=dict)  # path -> setting -> value


class MismatchError(AssertionError):
    """Something isn't as the bookkeeping says."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise MismatchError(message)


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 2e-5) -> None:
    error = float((found - expected).detach().abs().max()) if found.numel() else 0.0
    limit = tolerance * max(1.0, float(expected.detach().abs().max()))
    require(error <= limit, f"{what}: off by {error:.2e}, {limit:.1e} is allowed")


class Stress:
    """The model under stress.

    Args:
        seed: Of every random choice.
        kinds: Names of the methods.
        num_adapters: How many adapters there are at the start; they are deleted and added all along.
        regions: "whole" or "blocks"; None: it stays eager.
    """

    def __init__(self, seed: int, kinds: Sequence[str], num_adapters: int = 32, regions: str | None = "whole") -> None:
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kinds = list(kinds)
        self.held: dict[str, Held] = {}
        self.done: collections.Counter[str] = collections.Counter()
        self.num_compared = 0
        self.base = Model()
        for parameter in self.base.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=self.generator) * 0.5)
        self.model = copy.deepcopy(self.base)
        self.layers = {kind: self._layers(kind) for kind in self.kinds}
        self.names = NAMES[:]
        self.random.shuffle(self.names)
        self.active: str | None = None
        self.adapters = self._attached()
        if num_adapters > 1:
            for kind in self.kinds:
                self.adapters.reserve(method=METHODS[kind](**self._most(kind)), targets=self.layers[kind])
            self.adapters.reserve(num_adapters=num_adapters)  # of each structure that there is by now
        while len(self.held) < num_adapters:
            self.add(self.kinds[len(self.held) % len(self.kinds)])
        self.num_adapters = num_adapters
        if regions is not None:
            onegraph.compile(self.model, backend="aot_eager", regions=regions)

    def _most(self, kind: str) -> dict[str, Any]:
        return {**KINDS.get(kind, lambda r: {})(Random(0)), **MOST.get(kind, {})}

    def _layers(self, kind: str) -> list[str]:
        """The layers that a method can be on: all of them that it takes."""
        method = method_of(kind, Random(0))
        found = []
        for path, module in self.base.named_modules():
            layer = describe_any(module)
            if layer is not None and layer.kind in method.kinds and method.check(layer) is None:
                found.append(path)
        return found

    # Bookkeeping

    def _new(self, kind: str) -> tuple[Held, int]:
        method, all_paths = method_of(kind, self.random), self.layers[kind]
        paths = all_paths if self.random.random() < 0.4 else self.random.sample(all_paths, self.random.randint(1, len(all_paths)))
        paths = [path for path in all_paths if path in paths]
        held = Held(kind, method, paths)
        for path in paths:
            layer = describe_any(self.base.get_submodule(path))
            assert layer is not None
            held.settings[path] = method.settled(layer, [layer]).settings(layer)
        return held, self.random.randrange(1 << 30)

    def _attached(self) -> Adapters:
        kind = self.kinds[0]
        held, seed = self._new(kind)
        name = self.names.pop()
        adapters = attach(self.model, held.method, targets=held.targets, name=name, generator=torch.Generator().manual_seed(seed))
        self.adapters, self.active = adapters, name
        self._enter(name, held, seed)
        return adapters

    def _enter(self, name: str, held: Held, seed: int) -> None:
        """Write a new adapter down: what it starts from is what it starts from alone; then give it random values."""
        alone = attach(
            copy.deepcopy(self.base), held.method, targets=held.targets, name="alone", generator=torch.Generator().manual_seed(seed)
        )
        held.tensors = copied(alone.tensors("alone"))
        self.held[name] = held
        self._check_held(name)
        self.load(name, partial=False)

    def alone(self, name: str) -> Adapters:
        """An eager model with that adapter alone, built anew from what was written down."""
        held = self.held[name]
        adapters = attach(copy.deepcopy(self.base), held.method, targets=held.targets, name="alone")
        adapters.load_tensors("alone", held.tensors)
        for setting in adapters.setting_names("alone"):
            adapters.set_setting("alone", setting, {path: values.get(setting, 0.0) for path, values in held.settings.items()})
        return adapters

    def eager(self, name: str | None, *, training: bool, ids: Tensor) -> tuple[Tensor, Adapters | None]:
        """The output of the model with one adapter, eager, without dropouts."""
        if name is None:
            return self.base(ids), None
        adapters = self.alone(name)
        adapters.model.train(training)
        with adapters.without_randomness():
            return adapters.model(ids), adapters

    def _check_held(self, name: str) -> None:
        """An adapter holds what was written down, bit for bit."""
        held, present = self.held[name], self.adapters.tensors(name)
        require(present.keys() == held.tensors.keys(), f"{name!r} is on {sorted(present)}, not {sorted(held.tensors)}")
        for path, tensors in held.tensors.items():
            require(present[path].keys() == tensors.keys(), f"{name!r} on {path!r} has {sorted(present[path])}")
            for key, value in tensors.items():
                require(torch.equal(present[path][key], value), f"{name!r} on {path!r}: {key} isn't what it was given")
        for setting in self.adapters.setting_names(name):
            for path, value in self.adapters.settings_of(name, setting).items():
                wanted = held.settings[path].get(setting, 0.0)
                require(abs(value - wanted) <= 1e-6 * max(1.0, abs(wanted)), f"{name!r} on {path!r}: {setting} is {value}, not {wanted}")

    def check_all(self) -> None:
        """Every adapter, and nothing but them; nobody has a gradient."""
        require(sorted(self.adapters.names) == sorted(self.held), "the names aren't those that were added")
        require(self.adapters.active == self.active, f"{self.adapters.active!r} is active, not {self.active!r}")
        for name in self.held:
            self._check_held(name)
            for key, parameter in self.adapters.parameters(name).items():
                require(parameter.grad is None, f"{name!r} has a gradient of {key}")
        for (path, plain), present in zip(self.base.named_parameters(), self._base_parameters()):
            require(torch.equal(plain, present), f"the base weight {path} has changed")

    def _base_parameters(self) -> Iterator[Tensor]:
        for path, _ in self.base.named_parameters():
            owner, _, name = path.rpartition(".")
            layer = self.adapters.layers.get(owner)
            yield (self.model.get_submodule(owner) if layer is None else layer.base_layer).get_parameter(name)

    def check_slots(self) -> None:
        """No slot is lost or used twice; free ones and the first are the identity; nothing trained the padding."""
        for structure, state in self.adapters._structures.items():
            used = [record.slots[structure] for record in self.adapters._records.values() if structure in record.slots]
            require(
                sorted([*used, *state.free]) == list(range(1, state.num_slots)),
                f"{structure.name}: {state.num_slots} slots, but {sorted(used)} in use and {state.free} free",
            )
            for path, layer in self.adapters.layers.items():
                slots = layer.structures.get(structure)
                if slots is None:
                    continue
                on = {r.slots[structure] for r in self.adapters._records.values() if r.structures.get(path) == structure}
                identity = slots.identity(slots.rank)
                for slot in set(range(slots.num_slots)) - on:
                    for key, value in identity.items():
                        require(torch.equal(slots.block.parameter(key, slot), value), f"{path}: slot {slot} isn't the identity in {key}")
                    for setting in slots.block.settings_memory:
                        require(float(slots.block.setting(setting, slot)) == 0, f"{path}: slot {slot} has a {setting}")
        for name in self.held:
            for path, tensors in self.adapters.tensors(name).items():
                record = self.adapters._records[name]
                if path in record.structures:
                    slots, slot = self.adapters.layers[path].structures[record.structures[path]], record.slots[record.structures[path]]
                    for key, value in tensors.items():
                        whole = slots.block.parameter(key, slot)
                        require(int(whole.count_nonzero()) == int(value.count_nonzero()), f"{name!r} on {path}: padding of {key} isn't 0")

    # What is compared

    def ids(self, rows: int = ROWS) -> Tensor:
        return torch.randint(0, VOCABULARY, (rows, POSITIONS), generator=self.generator)

    def infer(self, expected_name: str | None) -> None:
        """The compiled output is that of the adapter alone."""
        ids = self.ids()
        self.model.eval()
        with torch.no_grad():
            found = self.model(ids)
            expected, _ = self.eager(expected_name, training=False, ids=ids)
        close(found, expected, f"inference with {expected_name!r}")
        self.num_compared += 1

    def train(self, expected_name: str | None) -> None:
        """Output and gradients of a step are those of the adapter alone; then it is taken."""
        ids = self.ids()
        self.model.train()
        with self.adapters.without_randomness():
            output = self.model(ids)
            output.square().mean().backward()
        expected, alone = self.eager(expected_name, training=True, ids=ids)
        close(output, expected, f"training with {expected_name!r}")
        if expected_name is not None:
            assert alone is not None
            expected.square().mean().backward()
            self._compare_gradients(expected_name, alone)
            self._step(expected_name)
        self.num_compared += 1

    def _compare_gradients(self, name: str, alone: Adapters) -> None:
        found, expected = gradients(self.adapters, name), gradients(alone, "alone")
        require(found.keys() == expected.keys(), f"{name!r} has gradients of {sorted(found)}, not {sorted(expected)}")
        largest = max(float(value.abs().max()) for value in expected.values())
        for key, value in expected.items():
            close(found[key] / (largest + 1e-12), value / (largest + 1e-12), f"gradient of {name!r} in {key}", 2e-4)

    def _step(self, name: str) -> None:
        """Plain descent with weight decay, through an optimizer over the Parameters; the new values are written down."""
        optimizer = torch.optim.SGD(self.adapters.parameters(name).values(), lr=RATE, weight_decay=0.01)
        optimizer.step()
        optimizer.zero_grad()
        before = self.held[name].tensors
        self.held[name].tensors = copied(self.adapters.tensors(name))
        moved = any(
            not torch.equal(before[path][key], value) for path, own in self.held[name].tensors.items() for key, value in own.items()
        )
        require(moved, f"a step on {name!r} changed nothing")

    # Actions

    def add(self, kind: str | None = None) -> None:
        """A new adapter, of any kind on any of its layers; a later one may have the name of one that was deleted."""
        held, seed = self._new(kind or self.random.choice(self.kinds))
        name = self.names.pop(self.random.randrange(len(self.names)))
        self.adapters.add(name, held.method, targets=held.targets, generator=torch.Generator().manual_seed(seed))
        self._enter(name, held, seed)

    def delete(self) -> None:
        """One goes, perhaps the active one, and another comes."""
        name = self.pick()
        self.adapters.delete(name)
        del self.held[name]
        self.names.append(name)
        if self.active == name:
            self.active = None
        self.add()

    def use(self) -> None:
        self.active = self.random.choice([None, *self.held])
        self.adapters.use(self.active)
        self.infer(self.active)

    def disable(self) -> None:
        with self.adapters.disabled():
            self.infer(None)
        self.infer(self.active)

    def scale(self) -> None:
        name, factor = self.use_one(), self.random.choice([0.0, 0.5, 1.0, -1.0, 1.7])
        self.adapters.scale(name, factor)
        held = self.held[name]
        for path in held.targets:
            layer = describe_any(self.base.get_submodule(path))
            assert layer is not None
            held.settings[path]["scale"] = held.method.settled(layer, [layer]).settings(layer)["scale"] * factor
        self.infer(name)
        if factor == 0.0:
            ids = self.ids()
            with torch.no_grad():
                off = self.model(ids)
                with self.adapters.disabled():
                    require(torch.equal(off, self.model(ids)), f"{name!r} with scale 0 isn't the base model bit for bit")

    def set_setting(self) -> None:
        name = self.use_one()
        setting = self.random.choice(self.adapters.setting_names(name))
        values = {path: round(self.random.uniform(0, 0.9), 2) for path in self.held[name].targets}
        kept = self.adapters.settings_of(name, setting).keys()
        values = {path: value for path, value in values.items() if path in kept}
        self.adapters.set_setting(name, setting, values)
        for path, value in values.items():
            self.held[name].settings[path][setting] = value
        self.train(name)

    def load(self, name: str | None = None, *, partial: bool | None = None) -> None:
        """New tensors, all or some of them."""
        name = name or self.pick()
        held = self.held[name]
        partial = self.random.random() < 0.5 if partial is None else partial
        fixed = {key for method in self.adapters.methods(name).values() for key, spec in specs_of(self, name, method) if not spec.trained}
        tensors = {
            path: {
                key: value if key in fixed else value + torch.randn(value.shape, generator=self.generator) * 0.2
                for key, value in own.items()
                if not partial or self.random.random() < 0.5
            }
            for path, own in held.tensors.items()
            if not partial or self.random.random() < 0.5
        }
        # Random walks would end in large numbers, where round-off is large as well.
        tensors = {path: {key: v if key in fixed else v.clamp(-1, 1.5) for key, v in own.items()} for path, own in tensors.items()}
        self.adapters.load_tensors(name, tensors, partial=partial)
        for path, own in tensors.items():
            held.tensors[path].update(copied({path: own})[path])

    def rows(self) -> None:
        """Any mix of adapters in one batch, each row what its adapter gives alone; in training, the gradients too."""
        names = [self.random.choice([None, *self.held]) for _ in range(ROWS)]
        if self.random.random() < 0.3:
            names[1] = names[0]
        ids, training = self.ids(), self.random.random() < 0.6
        self.model.train(training)
        distinct = [name for name in dict.fromkeys(names) if name is not None]
        with torch.set_grad_enabled(training), self.adapters.rows(names), self.adapters.without_randomness():
            found = self.model(ids)
            if training:
                found.square().mean().backward()
        for name in dict.fromkeys(names):
            places = [row for row, other in enumerate(names) if other == name]
            with torch.set_grad_enabled(training):
                expected, alone = self.eager(name, training=training, ids=ids[places])
            close(found[places], expected, f"rows {places} of {names}, {'training' if training else 'inference'}")
            if training and alone is not None:
                assert name is not None
                (expected.square().sum() / found.numel()).backward()
                self._compare_gradients(name, alone)
        for name in distinct if training else ():
            self._step(name)
        self.num_compared += 1

    def draw(self) -> None:
        """A step with dropouts: finite, and another one every time where there are any."""
        name = self.use_one()
        self.model.train()
        output = self.model(self.ids())
        output.sum().backward()
        require(bool(output.isfinite().all()), f"{name!r} with dropouts isn't finite")
        for parameter in self.adapters.parameters(name).values():
            parameter.grad = None

    def take_step(self) -> None:
        self.train(self.use_one() if self.random.random() < 0.8 else self.use_none())

    def merge(self) -> None:
        """One or two merged: what they are alone, or the weighted sum of their changes; then the very same base weights again."""
        names = self.random.sample(list(self.held), self.random.choice([1, 1, 2]))
        weights = [1.0] if len(names) == 1 else [round(self.random.uniform(-1, 1), 2) for _ in names]
        before = [id(parameter) for parameter in self._base_parameters()]
        self.adapters.merge(names, weights=weights)
        ids = self.ids()
        self.model.eval()
        with torch.no_grad():
            found = self.model(ids)
            if len(names) == 1:
                expected, _ = self.eager(names[0], training=False, ids=ids)
            else:
                expected = self._sum_of(dict(zip(names, weights)))(ids)
        close(found, expected, f"{names} merged with {weights}", 1e-4)
        self.adapters.unmerge()
        require(before == [id(parameter) for parameter in self._base_parameters()], "unmerging gave other base weights")
        self.infer(self.active)

    def _sum_of(self, weights: Mapping[str, float]) -> nn.Module:
        """The plain model with W + sum_i w_i (adapt_i(W) - W), in float64 from the definition of each method."""
        model = copy.deepcopy(self.base).double()
        with torch.no_grad():
            for path, module in model.named_modules():
                layer = describe_any(module)
                if layer is None:
                    continue
                base = {key: value.clone() for key, value in layer.base_tensors(module).items()}
                total = {key: value.clone() for key, value in base.items()}
                for name, weight in weights.items():
                    held = self.held[name]
                    if path not in held.targets:
                        continue
                    p = {key: value.double() for key, value in {**held.tensors.get("", {}), **held.tensors[path]}.items()}
                    p |= {key: torch.tensor(value, dtype=torch.float64) for key, value in held.settings[path].items()}
                    for key, value in held.method.settled(layer, [layer]).adapt_tensors(base, p, layer).items():
                        total[key] += weight * (value - base[key])
                for key, value in layer.base_tensors(module).items():
                    value.copy_(total[key])
        return model.float()

    def pick(self) -> str:
        return self.random.choice(list(self.held))

    def use_one(self) -> str:
        """The active adapter, most of the time another one."""
        if self.active is None or self.random.random() < 0.8:
            self.active = self.pick()
            self.adapters.use(self.active)
        return self.active

    def use_none(self) -> None:
        self.active = None
        self.adapters.use(None)

    @property
    def actions(self) -> dict[str, Callable[[], None]]:
        return {
            "use": self.use,
            "disabled": self.disable,
            "scale": self.scale,
            "setting": self.set_setting,
            "load": self.load,
            "rows": self.rows,
            "train": self.take_step,
            "dropout": self.draw,
            "delete and add": self.delete,
            "merge": self.merge,
        }

    # Running

    def warm_up(self) -> int:
        """Each graph of the budget once, in training and in inference; how many there were."""
        with Watch() as watch:
            for names in self.adapters.graphs.assignments:
                self.active = names[0]
                self.adapters.use(self.active)
                self.train(self.active)
                self.infer(self.active)
            while self.done["rows, training"] == 0 or self.done["rows, inference"] == 0:
                self.rows()
                self.done["rows, training" if self.model.training else "rows, inference"] += 1
            self.merge()
            require(not watch.breaks, f"graph breaks: {watch.breaks}")
            return watch.graphs

    def act(self, count: int, report: Callable[[str], None] = lambda line: None) -> None:
        """Random actions, where a recompile is an error; after each of them every adapter is looked at."""
        with torch.compiler.set_stance("fail_on_recompile"):
            for number in range(count):
                action = self.random.choice(list(self.actions))
                try:
                    self.actions[action]()
                    self.check_all()
                except Exception as error:
                    error.add_note(f"action {number}: {action}, active {self.active!r}")
                    raise
                self.done[action] += 1
                if (number + 1) % 100 == 0:
                    self.check_slots()
                    report(f"{number + 1} actions, {self.num_compared} outputs compared")
        self.check_slots()


def specs_of(stress: Stress, name: str, method: Method) -> Iterator[tuple[str, Any]]:
    """The tensors of a method on any layer of an adapter."""
    for path in stress.held[name].targets:
        layer = describe_any(stress.base.get_submodule(path))
        assert layer is not None
        yield from {**method.parameters(layer), **method.shared_parameters()}.items()


def copied(tensors: Mapping[str, Mapping[str, Tensor]]) -> Values:
    return {path: {key: value.detach().clone() for key, value in own.items()} for path, own in tensors.items()}


def gradients(adapters: Adapters, name: str) -> dict[str, Tensor]:
    """The gradients of an adapter, cut to the true rank as its tensors are; the padding must not have any."""
    parameters = adapters.parameters(name)
    with _holding_gradients(parameters):
        found = copied(adapters.tensors(name))
    cut = {f"{path}.{key}" if path else key: value for path, own in found.items() for key, value in own.items()}
    cut = {key: value for key, value in cut.items() if key in parameters}
    for key, parameter in parameters.items():
        require(parameter.grad is not None, f"{name!r} has no gradient of {key}")
        assert parameter.grad is not None
        require(int(parameter.grad.count_nonzero()) == int(cut[key].count_nonzero()), f"{name!r}: the padding of {key} has a gradient")
    return cut


@contextmanager
def _holding_gradients(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, the Parameters hold their gradients in place of their values."""
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        yield
        for key, parameter in parameters.items():
            parameter.copy_(before[key])


def main() -> None:
    parser = argparse.ArgumentParser(description="Random actions on a compiled model with many adapters; stops at the first thing wrong.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actions", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--methods", default="", help="comma separated; six at random when omitted; 'all'")
    parser.add_argument("--regions", default="whole", choices=("whole", "blocks"))
    given = parser.parse_args()
    logging.getLogger("onegraph").setLevel(logging.WARNING)
    torch.manual_seed(given.seed)
    known = list(METHODS)
    kinds = Random(given.seed).sample(known, min(6, len(known))) if not given.methods else given.methods.split(",")
    kinds = known if given.methods == "all" else kinds
    began = time.perf_counter()
    stress = Stress(given.seed, kinds, given.adapters, given.regions)
    print(f"seed {given.seed}: {given.adapters} adapters of {', '.join(kinds)}; {given.regions}, aot_eager, fullgraph")
    print(stress.adapters.graphs)
    graphs = stress.warm_up()
    print(f"{graphs} graphs after warm-up, {time.perf_counter() - began:.0f} s")
    with Watch() as watch:
        stress.act(given.actions, print)
    print(", ".join(f"{count} {action}" for action, count in sorted(stress.done.items())))
    print(
        f"{given.actions} actions, {stress.num_compared} outputs equal to a fresh eager model's, {len(watch.compilations)} recompiles, "
        f"no slot lost, {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
