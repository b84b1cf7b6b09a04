"""Combining: the weighted sum against independent float64 computations and PEFT, truncation and pruning as they are defined."""

from __future__ import annotations

import copy
import logging
import re

import numpy as np
import peft
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cases import Case
from onegraph.adapters import Adapters, attach
from onegraph.adapters.combine import combine
from onegraph.adapters.merge import merge, unmerge
from onegraph.adapters.mixing import largest, mean_of_majority, randomly_kept
from onegraph.errors import AdapterError, ConfigurationError, TargetError
from onegraph.methods import Dense, DoRA, LoHa, LoRA, Method
from test_merge import CHOSEN, Gain, code_of, randomize

Array = NDArray[np.float64]
TARGETS = ["embed", "first", "plain", "conv"]
IDS = torch.tensor([[1, 2, 3, 9, 4], [0, 5, 5, 2, 7]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.first = nn.Linear(6, 8)
        self.plain = nn.Linear(8, 6, bias=False)
        self.conv = nn.Conv1d(6, 8, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.plain(torch.tanh(self.first(self.embed(ids))))
        return self.conv(x.transpose(1, 2))


def model_with(targets: list[str] = TARGETS, **methods: Method) -> tuple[Model, Adapters]:
    model = Model()
    for seed, (name, method) in enumerate(methods.items()):
        adapters = attach(model, method, targets=targets, name=name)
        randomize(adapters, name, seed)
    return model.eval(), adapters


def matrix(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().double().reshape(tensor.shape[0], -1))


def lora_change(adapters: Adapters, name: str, path: str, scale: float) -> Array:
    tensors = adapters.tensors(name)[path]
    return scale * matrix(tensors["up"]) @ matrix(tensors["down"])


def changes(adapters: Adapters, name: str) -> dict[str, Array]:
    """Path -> the change that an adapter makes, as a matrix with output features first: read from the merged weights."""
    before = {path: weight_of(adapters, path) for path in adapters.layers}
    active = adapters.active
    merge(adapters, name)
    found = {path: weight_of(adapters, path) - before[path] for path in adapters.layers}
    unmerge(adapters)
    assert adapters.active == active
    return found


def weight_of(adapters: Adapters, path: str) -> Array:
    weight = adapters.layers[path].base_layer.weight
    return matrix(weight.t() if isinstance(adapters.layers[path].base_layer, nn.Embedding) else weight)


def truncated(change: Array, rank: int) -> Array:
    left, values, right = np.linalg.svd(change, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def tail(change: Array, rank: int) -> float:
    values = np.linalg.svd(change, compute_uv=False)
    return float(np.sqrt((values[rank:] ** 2).sum() / (values**2).sum()))


# The sum


SUMMED = {name: case for name, case in CHOSEN.items() if not name.endswith("-on-module")}
"""The output of any module needn't be linear in its tensors: see test_layers_that_take_no_lora."""


@pytest.mark.parametrize("case", SUMMED.values(), ids=SUMMED.keys())
def test_every_method_the_sum_is_the_sum(case: Case) -> None:
    module, layer, x, _ = case.build()
    plain, model = copy.deepcopy(module), nn.Sequential(module)
    method = case.method_case.method
    base = plain(x).detach().numpy()
    expected = base.copy()
    for name, weight in (("one", 0.75), ("two", -1.5)):
        adapters = attach(model, method, targets=["0"], name=name, dtype=torch.float64)
        values = {
            path: {key: case.method_case.random(key, tuple(value.shape)).double() for key, value in tensors.items()}
            for path, tensors in adapters.tensors(name).items()
        }
        adapters.load_tensors(name, values)
        p = {key: value.numpy() for tensors in values.values() for key, value in tensors.items()}
        p |= {setting: np.float64(adapters.settings_of(name, setting)["0"]) for setting in adapters.setting_names(name)}
        expected += weight * (case.method_case.reference(plain, x.numpy(), p) - base)
    try:
        case.method.adapt_tensors(layer.base_tensors(plain), case.build()[3], layer)
    except TargetError:
        if not isinstance(case.method, LoRA):  # neither a new weight nor a sum of its own class
            assert code_of(combine, adapters, "sum", {"one": 0.75, "two": -1.5}) == "not-combinable"
            return
    report = combine(adapters, "sum", {"one": 0.75, "two": -1.5})
    assert report.relative_error < 1e-8
    adapters.use("sum")
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-7, atol=1e-7)
    assert not np.allclose(expected, base)


def test_concatenation_of_any_ranks_and_strengths() -> None:
    model, adapters = model_with(a=LoRA(rank=2, alpha=5), b=LoRA(rank=3, rslora=True, dropout=0.2), c=LoRA(rank=1, alpha=-2, bias=True))
    adapters.add("d", LoRA(rank=2), targets=["first"], overrides={"first": LoRA(rank=4, alpha=1)})
    randomize(adapters, "d", 9)
    adapters.scale("a", 0.5)
    weights = {"a": 0.7, "b": -0.3, "c": 2.0, "d": 1.0}
    scales = {"a": 0.5 * 5 / 2, "b": 3 / np.sqrt(3), "c": -2.0, "d": 1 / 4}
    before = {name: copy.deepcopy(adapters.tensors(name)) for name in weights}
    for how in ("sum", "cat"):
        report = combine(adapters, how, weights, how=how)
        assert report.relative_error == 0
        tensors, methods = adapters.tensors(how), adapters.methods(how)
        for path in TARGETS:
            on = [name for name in weights if path in adapters.methods(name)]
            rank = sum(adapters.tensors(name)[path]["down"].shape[0] for name in on)
            assert methods[path] == LoRA(rank=rank, bias=True)
            assert tensors[path]["down"].shape[0] == rank == (10 if path == "first" else 6)
            expected = sum(weights[name] * lora_change(adapters, name, path, scales[name]) for name in on)
            np.testing.assert_allclose(lora_change(adapters, how, path, 1.0), expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(matrix(tensors[path]["up_bias"])[:, 0], -4 * matrix(before["c"][path]["up_bias"])[:, 0], rtol=1e-6)
    for name, values in before.items():  # the sources are as they were
        for path, tensors_ in values.items():
            assert all(torch.equal(value, adapters.tensors(name)[path][key]) for key, value in tensors_.items())
    adapters.use("cat")
    assert torch.isfinite(model(IDS)).all()


def test_sum_over_layers_that_only_some_are_on() -> None:
    _, adapters = model_with(["embed", "first"], a=LoRA(rank=2))
    adapters.add("b", LoRA(rank=2, bias=True), targets=["first", "conv"])
    randomize(adapters, "b", 3)
    combine(adapters, "sum", {"a": 1.0, "b": 0.5})
    assert list(adapters.methods("sum")) == ["embed", "first", "conv"]
    assert {method.structure() for method in adapters.methods("sum").values()} == {LoRA(bias=True).structure()}
    for path, expected in {
        "embed": lora_change(adapters, "a", "embed", 1.0),
        "first": lora_change(adapters, "a", "first", 1.0) + 0.5 * lora_change(adapters, "b", "first", 1.0),
        "conv": 0.5 * lora_change(adapters, "b", "conv", 1.0),
    }.items():
        np.testing.assert_allclose(lora_change(adapters, "sum", path, 1.0), expected, rtol=1e-5, atol=1e-6)
    assert not adapters.tensors("sum")["embed"]["up_bias"].any()


def test_paths_that_end_alike_get_their_own_rank() -> None:
    model = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.ModuleDict({"b": nn.Linear(4, 4)})})
    adapters = attach(model, LoRA(rank=1), targets=r"b|a\.b", overrides={r"a\.b": LoRA(rank=3)})
    randomize(adapters, "default")
    combine(adapters, "twice", {"default": 2.0}, how="cat")
    assert {path: method.rank for path, method in adapters.methods("twice").items()} == {"b": 1, "a.b": 3}  # type: ignore[attr-defined]
    for path in ("b", "a.b"):
        np.testing.assert_allclose(lora_change(adapters, "twice", path, 1.0), 2 * lora_change(adapters, "default", path, 1.0), rtol=1e-6)


def test_grouped_convolutions_are_concatenated() -> None:
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, groups=2))
    for name, rank in (("a", 2), ("b", 4)):
        adapters = attach(model, LoRA(rank=rank), targets=["0"], name=name)
        randomize(adapters, name, rank)
    x = torch.randn(2, 4, 5)
    outputs = {}
    for name in ("a", "b", None):
        adapters.use(name)
        outputs[name] = model(x).detach()
    combine(adapters, "sum", {"a": 0.5, "b": -2.0})
    adapters.use("sum")
    expected = outputs[None] + 0.5 * (outputs["a"] - outputs[None]) - 2 * (outputs["b"] - outputs[None])
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert code_of(combine, adapters, "svd", {"a": 1.0}, how="svd", rank=2) == "not-combinable"
    assert adapters.names == ["a", "b", "sum"]


def test_sum_of_different_methods() -> None:
    _, adapters = model_with(a=LoRA(rank=1), b=LoHa(rank=1))
    first, second = changes(adapters, "a"), changes(adapters, "b")
    report = combine(adapters, "sum", {"a": 1.0, "b": 0.5})
    for path, change in changes(adapters, "sum").items():
        np.testing.assert_allclose(change, first[path] + 0.5 * second[path], rtol=1e-5, atol=2e-6)
    assert 0 < report.relative_error < 1e-6
    # A LoHa of rank 1 changes by a matrix of rank 1: with the LoRA it takes a LoRA of rank 2, smaller than a full difference.
    assert set(adapters.methods("sum").values()) == {LoRA(rank=2)}
    assert report.relative == ()
    assert code_of(combine, adapters, "cat", {"a": 1.0, "b": 0.5}, how="cat") == "not-combinable"


def test_a_sum_of_full_rank_is_a_full_difference() -> None:
    model, adapters = model_with(a=LoRA(rank=1), b=Gain())
    first, second = changes(adapters, "a"), changes(adapters, "b")
    bias = model.first.bias.detach().clone()
    gain = adapters.tensors("b")["first"]["gain"]
    report = combine(adapters, "sum", {"a": 1.0, "b": -1.0})
    assert set(adapters.methods("sum").values()) == {Dense()}
    assert report.relative == ("b",)
    assert "'b' makes depends on the base weights" in str(report)
    for path, change in changes(adapters, "sum").items():
        np.testing.assert_allclose(change, first[path] - second[path], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(adapters.tensors("sum")["first"]["bias_difference"], -bias * gain)


def test_layers_that_take_no_lora() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for name in ("a", "b"):
        adapters = attach(model, LoRA(rank=1), targets=["0"], also={"1": Dense()}, name=name)
        randomize(adapters, name, ord(name))
    for how, options in (("sum", {}), ("svd", {"rank": 2}), ("ties", {"rank": 2, "density": 1.0})):
        combine(adapters, how, {"a": 1.0, "b": 0.5}, how=how, **options)
        assert adapters.methods(how) == {"0": LoRA(rank=2), "1": Dense()}
        a, b = (adapters.tensors(name)["1"]["bias_difference"].numpy() for name in ("a", "b"))
        expected = a + 0.5 * b
        if how == "ties":
            same = np.sign(a) == np.sign(b)
            expected = np.where(same, expected / 2, np.where(abs(a) > abs(0.5 * b), a, 0.5 * b))
        np.testing.assert_allclose(adapters.tensors(how)["1"]["bias_difference"].numpy(), expected, rtol=1e-5)


# Truncated


def test_svd_is_the_best_of_its_rank_and_says_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    _, adapters = model_with(a=LoRA(rank=3, alpha=5), b=LoRA(rank=2), c=DoRA(rank=2), d=Gain())
    names = {"a": 1.0, "b": -0.5, "c": 2.0, "d": 0.25}
    each = {name: changes(adapters, name) for name in names}
    wanted = {path: sum(weight * each[name][path] for name, weight in names.items()) for path in TARGETS}
    with caplog.at_level(logging.INFO, logger="onegraph"):
        report = combine(adapters, "svd", names, how="svd", rank=2)
    assert str(report) in caplog.text
    assert report.relative == ("c", "d")
    found = changes(adapters, "svd")
    lost, norm = 0.0, 0.0
    for layer in report.layers:
        path = layer.path
        assert adapters.methods("svd")[path] == layer.method == LoRA(rank=2, bias=True)
        np.testing.assert_allclose(found[path], truncated(wanted[path], 2), rtol=1e-4, atol=1e-5)
        assert layer.norm is not None
        bias = matrix(adapters.tensors("svd")[path]["up_bias"])
        size = np.linalg.norm(wanted[path]) ** 2 + np.linalg.norm(bias) ** 2
        expected = tail(wanted[path], 2) * np.linalg.norm(wanted[path]) / np.sqrt(size)
        assert layer.relative_error == pytest.approx(expected, rel=1e-3)
        assert re.search(rf"{path} +lora of rank 2, relative error {re.escape(f'{layer.relative_error:.2g}')}", str(report))
        lost, norm = lost + layer.error**2, norm + layer.norm**2
    assert report.relative_error == pytest.approx(np.sqrt(lost / norm))
    assert 0.05 < report.relative_error < 1


def test_svd_of_loras_goes_by_their_factors_and_agrees() -> None:
    _, adapters = model_with(a=LoRA(rank=2, alpha=5), b=LoRA(rank=1))
    adapters.add("as weights", LoHa(rank=1))  # all zero: with it, the difference is decomposed whole
    zeros = {path: {key: torch.zeros_like(value) for key, value in own.items()} for path, own in adapters.tensors("as weights").items()}
    adapters.load_tensors("as weights", zeros)
    one = combine(adapters, "factors", {"a": 1.0, "b": -0.5}, how="svd", rank=2)
    other = combine(adapters, "whole", {"a": 1.0, "b": -0.5, "as weights": 1.0}, how="svd", rank=2)
    assert one.relative_error == pytest.approx(other.relative_error, rel=1e-6)
    first, second = changes(adapters, "factors"), changes(adapters, "whole")
    for path in TARGETS:
        np.testing.assert_allclose(first[path], second[path], rtol=1e-4, atol=2e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(first["first"], second["conv"][:, :6], rtol=1e-4, atol=2e-6)


def test_energy_decides_the_rank_of_each_layer() -> None:
    _, adapters = model_with(a=LoRA(rank=4), b=LoRA(rank=2))
    each = {name: changes(adapters, name) for name in ("a", "b")}
    combine(adapters, "most", {"a": 1.0, "b": 1.0}, how="svd", energy=0.9)
    combine(adapters, "capped", {"a": 1.0, "b": 1.0}, how="svd", energy=0.9, rank=2)
    combine(adapters, "all", {"a": 1.0}, how="svd", energy=1.0)
    combine(adapters, "more than there is", {"a": 1.0}, how="svd", rank=50)
    for path in TARGETS:
        wanted = each["a"][path] + each["b"][path]
        rank = adapters.methods("most")[path].rank  # type: ignore[attr-defined]
        assert tail(wanted, rank) ** 2 <= 0.1 < tail(wanted, rank - 1) ** 2
        assert adapters.methods("capped")[path].rank == min(rank, 2)  # type: ignore[attr-defined]
        assert adapters.methods("all")[path].rank == 4  # type: ignore[attr-defined]
        assert adapters.methods("more than there is")[path].rank == 4  # type: ignore[attr-defined]


def test_nothing_at_all_is_a_lora_of_rank_one() -> None:
    _, adapters = model_with(a=LoRA(rank=2))
    report = combine(adapters, "nothing", {"a": 0.0}, how="svd", rank=4)
    assert report.relative_error == 0
    assert set(adapters.methods("nothing").values()) == {LoRA(rank=1)}
    assert not any(change.any() for change in changes(adapters, "nothing").values())
    combine(adapters, "concatenated", {"a": 0.0})
    assert not any(change.any() for change in changes(adapters, "concatenated").values())


# PEFT


class Layers(nn.Module):
    """What PEFT can combine: it doesn't decompose the weights of one-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.first = nn.Linear(6, 8)
        self.conv = nn.Conv2d(6, 8, 3)
        self.pointwise = nn.Conv2d(6, 8, 1)


def pair(**ranks: int) -> tuple[peft.PeftModel, Adapters]:
    """The same LoRA adapters on the same model, in PEFT and here."""
    theirs, targets = Layers(), ["embed", "first", "conv", "pointwise"]
    ours = copy.deepcopy(theirs)
    wrapped = None
    for seed, (name, rank) in enumerate(ranks.items()):
        config = peft.LoraConfig(r=rank, lora_alpha=5, target_modules=targets)
        if wrapped is None:
            wrapped = peft.get_peft_model(theirs, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
        adapters = attach(ours, LoRA(rank=rank, alpha=5), targets=targets, name=name)
        randomize(adapters, name, seed)
        for path, tensors in adapters.tensors(name).items():
            layer = wrapped.base_model.model.get_submodule(path)
            table = path == "embed"
            down, up = (layer.lora_embedding_A[name], layer.lora_embedding_B[name]) if table else (layer.lora_A[name], layer.lora_B[name])
            (down if table else down.weight).data.copy_(tensors["down"])
            (up if table else up.weight).data.copy_(tensors["up"])
    assert wrapped is not None
    return wrapped, adapters


def peft_change(wrapped: peft.PeftModel, name: str, path: str) -> Array:
    change = wrapped.base_model.model.get_submodule(path).get_delta_weight(name)
    return matrix(change.t() if path == "embed" else change)


@pytest.mark.parametrize(
    ("how", "theirs", "options", "their_options"),
    [
        ("cat", "cat", {}, {}),
        ("svd", "svd", {"rank": 2}, {"svd_rank": 2}),
        ("magnitude", "magnitude_prune_svd", {"rank": 3, "density": 0.5}, {"svd_rank": 3, "density": 0.5}),
        ("ties", "ties_svd", {"rank": 3, "density": 0.5}, {"svd_rank": 3, "density": 0.5}),
    ],
)
def test_equals_peft(how: str, theirs: str, options: dict[str, float], their_options: dict[str, float]) -> None:
    wrapped, adapters = pair(legal=3, french=2)
    weights = {"legal": 0.5, "french": 0.5} if how == "ties" else {"legal": 0.7, "french": -0.4}
    wrapped.add_weighted_adapter(list(weights), list(weights.values()), "both", combination_type=theirs, **their_options)
    combine(adapters, "both", weights, how=how, **options)  # type: ignore[arg-type]
    for path in adapters.layers:
        expected = peft_change(wrapped, "both", path)
        np.testing.assert_allclose(lora_change(adapters, "both", path, 1.0), expected, rtol=1e-4, atol=1e-5)
        assert np.abs(expected).max() > 0.1


# Pruned


def loop_ties(values: list[Array], weights: list[float], density: float, sign: str) -> Array:
    """TIES number by number, as algorithm 1 has it."""
    trimmed = []
    for each in values:
        order = sorted(range(each.size), key=lambda number: -abs(each.flat[number]))
        kept = np.zeros(each.size)
        for number in order[: round(density * each.size)]:
            kept[number] = each.flat[number]
        trimmed.append(kept)
    merged = np.zeros(values[0].size)
    for number in range(values[0].size):
        column = [weight * each[number] for each, weight in zip(trimmed, weights)]
        elected = np.sign(sum(column))
        if sign == "frequency":
            votes = sum(int(np.sign(value)) for value in column)
            elected = np.sign(votes) if votes else elected
        agreeing = [value for value in column if np.sign(value) == elected and elected != 0]
        merged[number] = sum(agreeing) / len(agreeing) if agreeing else 0.0
    return merged.reshape(values[0].shape)


@pytest.mark.parametrize("sign", ["total", "frequency"])
def test_ties(sign: str) -> None:
    _, adapters = model_with(a=LoRA(rank=2), b=LoRA(rank=2, alpha=4), c=LoRA(rank=3))
    weights = {"a": 1.0, "b": 0.5, "c": -0.75}
    each = {name: changes(adapters, name) for name in weights}
    report = combine(adapters, "ties", weights, how="ties", density=0.5, majority_sign=sign, energy=1.0)
    assert report.relative_error < 1e-6
    differs = False
    for path, found in changes(adapters, "ties").items():
        values = [each[name][path] for name in weights]
        np.testing.assert_allclose(found, loop_ties(values, list(weights.values()), 0.5, sign), rtol=1e-4, atol=1e-5)
        other = loop_ties(values, list(weights.values()), 0.5, {"total": "frequency", "frequency": "total"}[sign])
        differs |= not np.allclose(found, other, rtol=1e-4, atol=1e-5)
    assert differs


def test_magnitude() -> None:
    _, adapters = model_with(a=LoRA(rank=2), b=LoHa(rank=2))
    each = {name: changes(adapters, name) for name in ("a", "b")}
    combine(adapters, "part", {"a": 1.0, "b": 2.0}, how="magnitude", density=0.25, energy=1.0)
    for path, found in changes(adapters, "part").items():
        expected = np.zeros_like(found)
        for name, weight in (("a", 1.0), ("b", 2.0)):
            change = each[name][path]
            limit = np.sort(np.abs(change), axis=None)[-round(0.25 * change.size)]
            expected += weight * np.where(np.abs(change) >= limit, change, 0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_dare_drops_and_makes_up_for_it() -> None:
    _, adapters = model_with(a=LoRA(rank=2))
    whole = changes(adapters, "a")
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        combine(adapters, name, {"a": 3.0}, how="dare", density=0.5, energy=1.0, generator=torch.Generator().manual_seed(seed))
    first, again, other = (changes(adapters, name) for name in ("first", "again", "other"))
    kept, total = 0, 0
    for path in TARGETS:
        np.testing.assert_allclose(first[path], again[path], atol=1e-7)
        assert not np.allclose(first[path], other[path], atol=1e-3)
        there = np.abs(first[path]) > 1e-5
        np.testing.assert_allclose(first[path][there], 6 * whole[path][there], rtol=1e-3, atol=1e-4)
        kept, total = kept + int(there.sum()), total + there.size
    assert 0.4 < kept / total < 0.6
    combine(adapters, "elected", {"a": 3.0, "first": 1.0}, how="dare_ties", density=0.5, energy=1.0)


def test_parts() -> None:
    values = torch.tensor([[3.0, -5.0], [0.5, 4.0]])
    assert largest(values, 0.5).tolist() == [[0, -5], [0, 4]]
    assert largest(values, 0.01).tolist() == [[0, -5], [0, 0]]
    assert torch.equal(largest(values, 1.0), values)
    assert torch.equal(randomly_kept(values, 1.0, None), values)
    kept = randomly_kept(torch.ones(100_000), 0.2, torch.Generator().manual_seed(0))
    assert set(kept.tolist()) == {0.0, 5.0}
    assert kept.mean().item() == pytest.approx(1.0, abs=0.03)
    stacked = torch.tensor([[1.0, -1.0, 2.0, 0.0, 3.0], [2.0, 1.0, -1.0, 0.0, -1.0], [0.0, 0.0, 0.5, 0.0, -1.0]])
    assert mean_of_majority(stacked, "total").tolist() == [1.5, 0.0, 1.25, 0.0, 3.0]
    assert mean_of_majority(stacked, "frequency").tolist() == [1.5, 0.0, 1.25, 0.0, -1.0]


# The rest


def test_a_combination_is_an_adapter_like_any_other() -> None:
    model, adapters = model_with(a=LoRA(rank=2, dropout=0.1), b=LoRA(rank=2))
    adapters.use("a")
    state = torch.get_rng_state()
    combine(adapters, "both", {"a": 1.0, "b": 1.0})
    assert torch.equal(torch.get_rng_state(), state)
    assert adapters.active == "a"
    assert adapters.names == ["a", "b", "both"]
    adapters.use("both")
    before = model(IDS)
    model.train()
    assert torch.equal(model(IDS), before)  # no dropout
    before.square().sum().backward()
    assert all(value.grad is not None for value in adapters.parameters("both").values())
    combine(adapters, "again", {"both": 0.5, "a": -0.5})
    changed = changes(adapters, "again")
    np.testing.assert_allclose(changed["first"], 0.5 * changes(adapters, "b")["first"], rtol=1e-4, atol=1e-5)


def test_half_precision_base_and_inference_mode() -> None:
    model = Model().to(torch.bfloat16)
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    randomize(adapters, "default")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        combine(adapters, "half", {"default": 0.5}, how="svd", rank=2)
    found, expected = (lora_change(adapters, name, "first", 1.0) for name in ("half", "default"))
    np.testing.assert_allclose(found, 0.5 * expected, rtol=1e-4, atol=1e-6)
    adapters.use("half")
    model(IDS).sum().backward()


@pytest.mark.parametrize(
    ("weights", "options", "code"),
    [
        ({}, {}, "combine-weights"),
        (["a", "b"], {}, "combine-weights"),
        ({"a": float("nan")}, {}, "not-finite-value"),
        ({"a": 1.0, "B": 1.0}, {}, "unknown-adapter"),
        ({"a": 1.0}, {"how": "tie"}, "combine-how"),
        ({"a": 1.0}, {"how": "svd"}, "combine-rank"),
        ({"a": 1.0}, {"how": "svd", "rank": 0}, "combine-rank"),
        ({"a": 1.0}, {"how": "svd", "rank": 2.5}, "combine-rank"),
        ({"a": 1.0}, {"how": "svd", "energy": 0.0}, "combine-energy"),
        ({"a": 1.0}, {"how": "svd", "energy": float("nan")}, "combine-energy"),
        ({"a": 1.0}, {"how": "ties", "rank": 2}, "combine-density"),
        ({"a": 1.0}, {"how": "ties", "rank": 2, "density": 0.0}, "combine-density"),
        ({"a": 1.0}, {"how": "dare", "rank": 2, "density": 1.5}, "combine-density"),
        ({"a": 1.0}, {"how": "ties", "rank": 2, "density": 0.5, "majority_sign": "most"}, "combine-sign"),
        ({"a": 1.0}, {"how": "sum", "rank": 2}, "combine-option"),
        ({"a": 1.0}, {"how": "svd", "rank": 2, "density": 0.5}, "combine-option"),
        ({"a": 1.0}, {"how": "svd", "rank": 2, "generator": torch.Generator()}, "combine-option"),
        ({"a": 1.0}, {"how": "svd", "rank": 2, "majority_sign": "frequency"}, "combine-option"),
        ({"a": 1.0}, {"how": "svd", "rank": 2, "capacity": 1}, "rank-above-capacity"),
    ],
    ids=str,
)
def test_bad_requests_change_nothing(weights: dict[str, float], options: dict[str, object], code: str) -> None:
    model, adapters = model_with(a=LoRA(rank=2), b=LoRA(rank=2))
    before = model(IDS)
    assert code_of(combine, adapters, "c", weights, **options) == code
    assert adapters.names == ["a", "b"]
    assert adapters.active == "b"
    assert torch.equal(model(IDS), before)


def test_bad_names_and_states() -> None:
    _, adapters = model_with(a=LoRA(rank=2), b=LoRA(rank=2))
    assert code_of(combine, adapters, "b", {"a": 1.0}) == "adapter-exists"
    assert code_of(combine, adapters, "a/b", {"a": 1.0}) == "adapter-name"
    with pytest.raises(ConfigurationError) as several:
        combine(adapters, "c", {"a": 1.0}, how="ties", density=2.0, majority_sign="most")
    assert [problem.code for problem in several.value.problems] == ["combine-rank", "combine-density", "combine-sign"]
    merge(adapters, "a")
    assert code_of(combine, adapters, "c", {"a": 1.0}) == "merged"
    unmerge(adapters)
    adapters.layers["first"].slots.stacked("up")[2].fill_(float("inf"))
    with pytest.raises(AdapterError) as raised:
        combine(adapters, "c", {"a": 1.0, "b": 1.0}, how="svd", rank=2)
    assert raised.value.code == "not-combinable"
    assert "first: 'b'" in raised.value.what
    assert "conv" not in raised.value.what
    assert adapters.names == ["a", "b"]


def test_a_failure_while_loading_leaves_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    _, adapters = model_with(a=LoRA(rank=2))

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(adapters, "load_tensors", fail)
    with pytest.raises(MemoryError):
        combine(adapters, "c", {"a": 1.0})
    assert adapters.names == ["a"]
