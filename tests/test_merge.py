"""Merging: the same numbers as beside the layer, the old Parameters back, one graph, nothing left behind."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case
from onegraph.adapters import Adapters, adapters_of, attach
from onegraph.adapters.merge import merge, merge_and_unload, merged, unmerge
from onegraph.errors import AdapterError, NumericsError, OnegraphError, TargetError
from onegraph.layers import Layer
from onegraph.methods import LoRA, Method, ParameterSpec
from test_slots_graph import Graphs, compiled

IDS = torch.tensor([[1, 2, 3, 9], [0, 5, 5, 2]])
TARGETS = ["embed", "query", "up", "conv"]
LAYERS = "linear linear-no-bias linear-wide linear-transposed embedding conv1d conv2d-3x3 conv2d-grouped module".split()
CHOSEN = {name: case for name, case in CASES.items() if name.split("-on-")[1] in LAYERS or "-on-norm" in name}
"""Every method on every kind of layer; how a convolution is padded makes no difference to its weight."""


class Model(nn.Module):
    """An output head tied to the embedding, a layer without bias, a convolution laid out with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.query = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.up(torch.tanh(self.query(x))))
        x = x + self.conv(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Gain(Method):
    """W' = W (1 + s g), b' = b (1 + s g): by the weight, and a different change for a different base."""

    name: ClassVar[str] = "gain"
    additive: ClassVar[bool] = False

    def parameters(self, layer: Layer) -> dict[str, ParameterSpec]:
        return {"gain": ParameterSpec(shape=(layer.out_features,))}

    def initial(self, layer: Layer, weight: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.identity(layer)

    def beside(self, layer: Layer) -> bool:
        return False

    def adapt(self, weight: Tensor, p: Mapping[str, Tensor], layer: Layer, *, training: bool = False) -> Tensor:
        return weight * (1 + p["scale"] * p["gain"]).reshape(-1, *(1 for _ in weight.shape[1:]))

    def adapt_bias(self, bias: Tensor | None, p: Mapping[str, Tensor], layer: Layer) -> Tensor | None:
        return None if bias is None else bias * (1 + p["scale"] * p["gain"])


def randomize(adapters: Adapters, name: str, seed: int = 1, size: float = 0.5) -> None:
    generator = torch.Generator().manual_seed(seed)
    adapters.load_tensors(
        name,
        {
            path: {key: size * torch.randn(value.shape, generator=generator, dtype=torch.float64) for key, value in tensors.items()}
            for path, tensors in adapters.tensors(name).items()
        },
    )


def model_with(**methods: Method) -> tuple[Model, Adapters]:
    """A model with an adapter a keyword, each with random values; the last is used."""
    model = Model()
    for seed, (name, method) in enumerate(methods.items()):
        adapters = attach(model, method, targets=TARGETS, name=name)
        randomize(adapters, name, seed)
    return model.eval(), adapters


def own(model: nn.Module) -> dict[str, nn.Parameter]:
    """The base layers' Parameters by the names they had before attaching."""
    found = model.named_parameters(remove_duplicate=False)
    return {name.replace("base_layer.", ""): value for name, value in found if not name.endswith(("down", "up", "up_bias", "gain"))}


def snapshot(model: nn.Module, adapters: Adapters) -> object:
    """All that merging could change."""
    return (
        adapters.active,
        merged(adapters),
        [(name, id(value), value.requires_grad, value.detach().clone().tolist()) for name, value in model.named_parameters()],
        [(name, id(module), sorted(module.__dict__)) for name, module in model.named_modules()],
        [layer.layer for layer in adapters.layers.values()],
    )


def code_of(action: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(OnegraphError) as raised:
        action(*args, **kwargs)  # type: ignore[operator]
    assert raised.value.hint or raised.value.why, "an error says why, or what to do"
    return raised.value.code


# Numbers


@pytest.mark.parametrize("case", CHOSEN.values(), ids=CHOSEN.keys())
def test_every_method_merged_equals_its_reference(case: Case) -> None:
    module, layer, x, _ = case.build()
    plain = copy.deepcopy(module)
    model = nn.Sequential(module)
    adapters = attach(model, case.method_case.method, targets=["0"], dtype=torch.float64) if not _is_module(layer) else _also(model, case)
    values = {
        path: {name: case.method_case.random(name, tuple(value.shape)).double() for name, value in tensors.items()}
        for path, tensors in adapters.tensors("default").items()
    }
    adapters.load_tensors("default", values)
    p = {name: value.numpy() for tensors in values.values() for name, value in tensors.items()}
    p |= {setting: np.float64(adapters.settings_of("default", setting)["0"]) for setting in adapters.setting_names("default")}
    unmerged = model(x)
    weights = {name: value.clone() for name, value in model[0].base_layer.named_parameters()}
    try:
        case.method.adapt_tensors(layer.base_tensors(plain), case.build()[3], layer)
    except TargetError:
        assert code_of(merge, adapters) == "unmergeable"
        assert torch.equal(model(x), unmerged)
        return
    merge(adapters)
    expected = case.method_case.reference(plain, x.numpy(), p)
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(unmerged.detach().numpy(), expected, rtol=1e-10, atol=1e-10)
    assert not np.allclose(plain(x).detach().numpy(), expected)
    unmerge(adapters)
    assert torch.equal(model(x), unmerged)
    assert all(torch.equal(value, weights[name]) for name, value in model[0].base_layer.named_parameters())
    assert merge_and_unload(adapters) is model
    assert type(model[0]) is type(plain)
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def _is_module(layer: Layer) -> bool:
    return layer.kind == "module"


def _also(model: nn.Module, case: Case) -> Adapters:
    return attach(model, case.method_case.method, targets=[], also={"0": case.method_case.method}, dtype=torch.float64)


def test_merged_equals_unmerged_to_round_off() -> None:
    model, adapters = model_with(one=LoRA(rank=3, alpha=5, bias=True, dropout=0.3))
    before = model(IDS)
    merge(adapters)
    torch.testing.assert_close(model(IDS), before, rtol=2e-6, atol=2e-5)
    model.train()  # the dropout of what was merged is off, and the identity's too
    torch.testing.assert_close(model(IDS), before, rtol=2e-6, atol=2e-5)


def test_one_adapter_is_exactly_its_new_weight() -> None:
    _, adapters = model_with(one=LoRA(rank=3, alpha=5), two=Gain())
    layers = {path: (layer.layer, layer.layer.base_tensors(layer.base_layer)) for path, layer in adapters.layers.items()}
    for name in ("one", "two"):
        adapters.scale(name, 0.75)
        merge(adapters, name)
        scale = adapters.settings_of(name, "scale")
        for path, (layer, base) in layers.items():
            p = {**adapters.tensors(name)[path], "scale": torch.tensor(scale[path])}
            expected = adapters.methods(name)[path].adapt_tensors(base, p, layer)
            found = layer.base_tensors(adapters.layers[path].base_layer)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
        unmerge(adapters)


def test_several_adapters_with_weights() -> None:
    model, adapters = model_with(one=LoRA(rank=3, alpha=5), two=LoRA(rank=2, rslora=True, bias=True), three=Gain())
    adapters.scale("two", 3.0)
    before = {name: value.detach().double().numpy().copy() for name, value in own(model).items()}
    first, second, third = (adapters.tensors(name) for name in ("one", "two", "three"))
    merge(adapters, ["one", "two", "three"], weights={"one": 0.5, "two": -2.0, "three": 0.25})
    assert merged(adapters) == ["one", "two", "three"]
    after = {name: value.detach().double().numpy() for name, value in own(model).items()}

    def array(tensor: Tensor) -> np.ndarray:
        return tensor.detach().double().numpy()

    factor = 3 * np.sqrt(2)  # alpha = rank = 2, over its root, three times as strong
    for path in TARGETS:
        weight = before[f"{path}.weight"].T if path == "embed" else before[f"{path}.weight"]
        expected = weight.reshape(len(weight), -1).copy()
        matrix = expected.copy()
        for tensors, size in ((first[path], 0.5 * 5 / 3), (second[path], -2 * factor)):
            expected += size * array(tensors["up"]).reshape(len(matrix), -1) @ array(tensors["down"]).reshape(tensors["down"].shape[0], -1)
        expected += 0.25 * array(third[path]["gain"])[:, None] * matrix
        bias = -2 * factor * array(second[path]["up_bias"])
        if path == "embed":
            expected, bias = (expected + bias[:, None]).T, None
        elif f"{path}.bias" in before:
            bias = before[f"{path}.bias"] * (1 + 0.25 * array(third[path]["gain"])) + bias
        np.testing.assert_allclose(after[f"{path}.weight"], expected.reshape(before[f"{path}.weight"].shape), rtol=1e-5, atol=1e-5)
        if bias is not None:
            np.testing.assert_allclose(after[f"{path}.bias"], bias, rtol=1e-5, atol=1e-5)
    unmerge(adapters)
    merge(adapters, ["one", "two", "three"], weights=[0.5, -2.0, 0.25])
    assert all(np.array_equal(value.detach().double().numpy(), after[name]) for name, value in own(model).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    _, adapters = model_with(one=LoRA(rank=4), two=LoRA(rank=4))
    for layer in adapters.layers.values():
        layer.base_layer.to(dtype)
    weight = adapters.layers["up"].base_layer.weight.detach()
    factors = [adapters.tensors(name)["up"] for name in ("one", "two")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        merge(adapters, ["one", "two"])
    found = adapters.layers["up"].base_layer.weight
    assert found.dtype == dtype
    products = [p["up"].detach().double() @ p["down"].detach().double() for p in factors]
    assert torch.equal(found, (weight.double() + sum(products)).to(dtype))
    rounded_at_each_step = weight
    for product in products:
        rounded_at_each_step = rounded_at_each_step + product.to(dtype)
    assert not torch.equal(found, rounded_at_each_step)


def test_equals_what_peft_merges() -> None:
    theirs = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6), nn.Unflatten(2, (6, 1, 1)), nn.Flatten(0, 1), nn.Conv2d(6, 4, 1))
    ours = copy.deepcopy(theirs)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["0", "1", "4"], use_rslora=True)
    wrapped = peft.get_peft_model(theirs, config)
    adapters = attach(ours, LoRA(rank=3, alpha=7, rslora=True), targets=["0", "1", "4"])
    randomize(adapters, "default")
    for path, tensors in adapters.tensors("default").items():
        layer = wrapped.base_model.model.get_submodule(path)
        table = path == "0"
        down, up = (layer.lora_embedding_A, layer.lora_embedding_B) if table else (layer.lora_A, layer.lora_B)
        (down["default"] if table else down["default"].weight).data.copy_(tensors["down"])
        (up["default"] if table else up["default"].weight).data.copy_(tensors["up"])
    expected = wrapped.merge_and_unload().state_dict()
    found = merge_and_unload(adapters).state_dict()
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    assert not torch.equal(found["1.weight"], copy.deepcopy(ours)[1].weight.new_zeros(6, 8))


# Back again


def test_unmerge_hangs_the_same_parameters_back() -> None:
    model, adapters = model_with(one=LoRA(rank=3), two=LoRA(rank=2, bias=True))
    before = snapshot(model, adapters)
    output = model(IDS)
    for names in ("one", ["one", "two"], None):
        merge(adapters, names)
        assert adapters.active is None
        assert not torch.equal(model(IDS), output) or names is None
        unmerge(adapters)
        assert snapshot(model, adapters) == before
        assert torch.equal(model(IDS), output)
    assert merged(adapters) == []


def test_layout_and_the_untouched_stay() -> None:
    model, adapters = model_with(one=LoRA(rank=3))
    before = own(model)
    merge(adapters)
    after = own(model)
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] is not before[name]}
    assert changed == {f"{path}.weight" for path in TARGETS}  # a bias that doesn't change is left alone
    for name in changed:
        assert after[name].stride() == before[name].stride()
        assert (after[name].dtype, after[name].requires_grad) == (before[name].dtype, False)
    assert after["conv.weight"].is_contiguous(memory_format=torch.channels_last)


def test_tied_weights() -> None:
    model, adapters = model_with(one=LoRA(rank=3))
    x = torch.randn(2, 8)
    table, scores, looked_up = model.head.weight, model.head(x), model.embed(IDS)
    merge(adapters)
    assert model.head.weight is table
    assert torch.equal(model.head(x), scores)
    torch.testing.assert_close(model.embed(IDS), looked_up)
    assert not torch.equal(model.embed.weight, model.head.weight)
    unmerge(adapters)
    assert model.embed.base_layer.weight is model.head.weight is table


def test_tied_weights_that_both_have_an_adapter() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=["embed", "head"])
    randomize(adapters, "default")
    before = model(IDS)
    merge(adapters)
    torch.testing.assert_close(model(IDS), before, rtol=1e-5, atol=1e-4)
    assert not torch.equal(model.embed.weight, model.head.weight)


def test_a_bias_comes_and_goes() -> None:
    model, adapters = model_with(one=LoRA(rank=2, bias=True))
    before = model(IDS)
    keys = set(model.state_dict())
    merge(adapters)
    assert set(model.state_dict()) - keys == {"up.base_layer.bias"}
    assert adapters.layers["up"].layer.has_bias
    torch.testing.assert_close(model(IDS), before, rtol=1e-5, atol=1e-5)
    unmerge(adapters)
    assert set(model.state_dict()) == keys
    assert model.up.base_layer.bias is None
    assert not adapters.layers["up"].layer.has_bias


def test_a_bias_counts_once_where_the_identity_runs_by_the_weight() -> None:
    model, adapters = model_with(one=LoRA(rank=2, bias=True), two=Gain())
    adapters.use("one")
    before = model(IDS)
    adapters.use("two")
    merge(adapters, "one")
    torch.testing.assert_close(model(IDS), before, rtol=1e-5, atol=1e-5)


def test_moved_while_merged() -> None:
    model, adapters = model_with(one=LoRA(rank=3))
    weight = model.up.weight.detach().clone()
    merge(adapters)
    model.double()
    unmerge(adapters)
    assert {value.dtype for value in model.parameters()} == {torch.float64}
    assert torch.equal(model.up.weight, weight.double())
    assert model.embed.weight is model.head.weight
    model(IDS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_unmerges_by_itself(copied: object) -> None:
    model, adapters = model_with(one=LoRA(rank=3))
    base = {name: value.detach().clone() for name, value in own(model).items()}
    merge(adapters)
    output = model(IDS)
    other = copied(model)  # type: ignore[operator]
    found = adapters_of(other)
    assert found is not None
    assert merged(found) == ["one"]
    unmerge(found)
    assert all(torch.equal(value, base[name]) for name, value in own(other).items())
    assert other.embed.base_layer.weight is other.head.weight
    assert merged(adapters) == ["one"]
    assert torch.equal(model(IDS), output)


# Unloading


def test_unloaded_is_the_plain_model() -> None:
    plain = Model()
    plain.norm.requires_grad_(False)
    trainable = {name: value.requires_grad for name, value in plain.named_parameters(remove_duplicate=False)}
    kinds = [(name, type(module)) for name, module in plain.named_modules()]
    attributes = {name: set(module.__dict__) for name, module in plain.named_modules()}
    keys = list(plain.state_dict())
    adapters = attach(plain, LoRA(rank=3), targets=TARGETS)
    randomize(adapters, "default")
    plain.eval()
    before = plain(IDS)
    model = merge_and_unload(adapters)
    assert model is plain
    assert adapters_of(model) is None
    assert list(model.state_dict()) == keys
    assert [(name, type(module)) for name, module in model.named_modules()] == kinds
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert {name: value.requires_grad for name, value in model.named_parameters(remove_duplicate=False)} == trainable
    assert not any(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in model.modules())
    torch.testing.assert_close(model(IDS), before, rtol=1e-5, atol=1e-5)
    model(IDS).sum().backward()
    assert model.up.weight.grad is not None


def test_unloading_what_is_merged_already() -> None:
    model, adapters = model_with(one=LoRA(rank=2, bias=True), two=LoRA(rank=3))
    merge(adapters, ["one", "two"], weights=[1.0, 0.5])
    before = model(IDS)
    assert code_of(merge_and_unload, adapters, "one") == "merged"
    assert code_of(merge_and_unload, adapters, weights=[1.0]) == "merged"
    assert torch.equal(merge_and_unload(adapters)(IDS), before)
    assert model.up.bias.requires_grad  # a bias that came trains like its weight
    assert code_of(merge, adapters, "one") in {"unknown-adapter", "detached"}


# Refused, and nothing has changed


def test_not_finite_is_refused_by_name() -> None:
    model, adapters = model_with(one=LoRA(rank=2), two=LoRA(rank=2))
    adapters.layers["query"].slots.stacked("up")[1].fill_(float("nan"))
    before = snapshot(model, adapters)[:2]  # type: ignore[index]
    weights = {name: (value, value.detach().clone()) for name, value in own(model).items()}
    with pytest.raises(NumericsError) as raised:
        merge(adapters, ["two", "one"])
    assert raised.value.code == "not-finite"
    assert "query" in str(raised.value)
    assert "embed" not in str(raised.value)
    assert snapshot(model, adapters)[:2] == before  # type: ignore[index]
    assert all(own(model)[name] is value and torch.equal(value, copied) for name, (value, copied) in weights.items())
    merge(adapters, "two")
    unmerge(adapters)
    merge(adapters, "one", safe=False)
    assert model.query.weight.isnan().all()


def test_a_sum_too_large_for_half_precision_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.float16))
    adapters = attach(model, LoRA(rank=2), targets=["0"])
    adapters.load_tensors("default", {"0": {"down": torch.full((2, 4), 300.0), "up": torch.full((4, 2), 300.0)}})
    assert code_of(merge, adapters) == "not-finite"
    adapters.scale("default", 0.1)
    merge(adapters)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 3, padding=1)
        self.grouped = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.scaled = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scaled(self.grouped(self.first(x)).transpose(1, 2)))


def test_layers_that_cannot_be_written_are_named_together() -> None:
    model = Grouped()
    adapters = attach(model, LoRA(rank=2), targets=["first", "grouped", "scaled", "last"])
    randomize(adapters, "default")
    before = snapshot(model, adapters)
    with pytest.raises(AdapterError) as raised:
        merge(adapters)
    assert raised.value.code == "unmergeable"
    assert "2 layers" in raised.value.what
    assert "grouped" in raised.value.what
    assert "scaled" in raised.value.what
    assert "last" not in raised.value.what
    assert snapshot(model, adapters) == before
    assert code_of(merge_and_unload, adapters) == "unmergeable"
    assert snapshot(model, adapters) == before


def test_an_unexpected_error_midway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = model_with(one=LoRA(rank=2))
    before = snapshot(model, adapters)
    calls = []

    def adapt(self: LoRA, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError
        return weight + 1

    monkeypatch.setattr(LoRA, "adapt", adapt)
    with pytest.raises(MemoryError):
        merge(adapters)
    assert len(calls) == 3
    assert snapshot(model, adapters) == before


def test_a_quantised_weight_is_named() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(8, 8))
    adapters = attach(model, LoRA(rank=2), targets=["0"])
    model[0].base_layer.weight = bitsandbytes.nn.Params4bit(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False, bnb_quantized=True)
    assert code_of(merge, adapters) == "unmergeable"
    model[0].base_layer.weight = nn.Parameter(torch.zeros(8, 8, device="meta"), requires_grad=False)
    assert code_of(merge, adapters) == "unmergeable"


def test_what_cannot_be_merged_is_said_before_anything_changes() -> None:
    model, adapters = model_with(one=LoRA(rank=2), two=LoRA(rank=2))
    before = snapshot(model, adapters)
    assert code_of(unmerge, adapters) == "not-merged"
    assert code_of(merge, adapters, "thre") == "unknown-adapter"
    assert code_of(merge, adapters, []) == "merge-names"
    assert code_of(merge, adapters, ["one", "one"]) == "merge-names"
    assert code_of(merge, adapters, ["one", "two"], weights=[1.0]) == "merge-weights"
    assert code_of(merge, adapters, ["one", "two"], weights={"one": 1.0, "three": 2.0}) == "merge-weights"
    assert code_of(merge, adapters, "one", weights=[float("nan")]) == "not-finite-value"
    assert code_of(merge, adapters, "one", weights={"one": float("inf")}) == "not-finite-value"
    with adapters.rows(["one", "two"]):
        assert code_of(merge, adapters, "one") == "rows-active"
    assert snapshot(model, adapters) == before
    merge(adapters, "one")
    inside = snapshot(model, adapters)
    assert code_of(merge, adapters, "two") == "merged"
    assert code_of(adapters.use, "two") == "merged"
    assert code_of(adapters.add, "three", LoRA(rank=2)) == "merged"
    assert code_of(adapters.delete, "one") == "merged"
    assert snapshot(model, adapters) == inside
    unmerge(adapters)
    adapters.use(None)
    assert code_of(merge, adapters) == "no-active-adapter"


def test_the_active_adapter_may_be_gone_when_unmerging() -> None:
    model, adapters = model_with(one=LoRA(rank=2), two=LoRA(rank=2))
    merge(adapters, "one")
    adapters.delete("two")
    unmerge(adapters)
    assert adapters.active is None
    model(IDS)


@pytest.mark.parametrize("bias", [True, False])
def test_attention(bias: bool) -> None:
    plain = nn.MultiheadAttention(8, 2, batch_first=True, bias=bias).eval()
    model = nn.ModuleDict({"attention": plain})
    keys = list(model.state_dict())
    adapters = attach(model, LoRA(rank=2, bias=True), targets=["attention", "out_proj"])
    randomize(adapters, "default")
    x = torch.randn(2, 3, 8)
    before = model["attention"](x, x, x)[0]
    parameters = own(model)
    merge(adapters)
    assert plain.out_proj.weight is not None
    torch.testing.assert_close(model["attention"](x, x, x)[0], before, rtol=1e-5, atol=1e-5)
    unmerge(adapters)
    assert torch.equal(model["attention"](x, x, x)[0], before)
    assert all(own(model)[name] is value for name, value in parameters.items())
    merge_and_unload(adapters)
    assert model["attention"] is plain
    torch.testing.assert_close(plain(x, x, x)[0], before, rtol=1e-5, atol=1e-5)
    gained = [] if bias else ["attention.in_proj_bias", "attention.out_proj.bias"]
    assert set(model.state_dict()) == {*keys, *gained}
    assert all(value.requires_grad for value in model.parameters())


# Compiled


def untied(**methods: Method) -> tuple[Model, Adapters]:
    model, adapters = model_with(**methods)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
    return model, adapters


@pytest.mark.parametrize("method", [LoRA(rank=3), Gain()], ids=["lora", "gain"])
def test_merging_does_not_recompile(method: Method) -> None:
    model, adapters = untied(one=method, two=method)
    reference, eager = copy.deepcopy(model), None
    eager = adapters_of(reference)
    assert eager is not None
    graphs = compiled(model)
    rows = nn.Parameter(torch.zeros(8))

    def same() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model(IDS), reference(IDS), rtol=1e-5, atol=1e-5)
        model.train()
        (model(IDS) + rows.sum()).sum().backward()
        model.eval()

    same()
    warm = graphs.count
    with torch.compiler.set_stance("fail_on_recompile"):
        for names, weights in ((None, None), ("one", [0.5]), (["one", "two"], [1.0, -1.0])):
            for each in (adapters, eager):
                merge(each, names, weights=weights)
            same()
            for each in (adapters, eager):
                unmerge(each)
            same()
    assert graphs.count == warm


def test_a_recompile_would_be_seen() -> None:
    model, adapters = untied(one=LoRA(rank=3, bias=True))
    compiled(model)
    with torch.no_grad():
        model(IDS)
        with torch.compiler.set_stance("fail_on_recompile"):
            merge(adapters)  # `up` has a bias now that had none
            with pytest.raises(RuntimeError, match="recompile"):
                model(IDS)


def test_tied_weights_cost_one_graph_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model, adapters = model_with(one=LoRA(rank=3))
    graphs: Graphs = compiled(model)
    with torch.no_grad():
        model(IDS)
        with caplog.at_level(logging.INFO, logger="onegraph"):
            merge(adapters)
        assert "embed" in caplog.text
        assert "query" not in caplog.text
        model(IDS)
        warm = graphs.count
        assert warm == 2
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(2):
                unmerge(adapters)
                model(IDS)
                merge(adapters)
                model(IDS)
    assert graphs.count == warm
