"""Attaching, switching, moving, copying, saving into state dicts, detaching: on small models, eager."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import onegraph as og
from onegraph.adapters import Adapted, Adapters, adapters_of, attach, register_file_functions
from onegraph.adapters import files as files_room
from onegraph.errors import AdapterError, ConfigurationError, OnegraphError, TargetError
from onegraph.methods import LoRA

TARGETS = ["query", "conv", "embed"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.value = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.query(x) + self.value(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


IDS = torch.tensor([[1, 2, 3, 9], [0, 5, 5, 2]])


def randomize(adapters: Adapters, name: str, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    adapters.load_tensors(
        name,
        {
            path: {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in tensors.items()}
            for path, tensors in adapters.tensors(name).items()
        },
    )


def code_of(action: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(OnegraphError) as raised:
        action(*args, **kwargs)  # type: ignore[operator]
    assert raised.value.hint or raised.value.why, "an error says why, or what to do"
    return raised.value.code


def snapshot(model: nn.Module) -> object:
    """All that attaching could change."""
    return (
        [(name, type(module).__name__, id(module)) for name, module in model.named_modules()],
        [
            (name, id(parameter), parameter.requires_grad, parameter.detach().clone().tolist())
            for name, parameter in model.named_parameters()
        ],
        {name: set(module.__dict__) for name, module in model.named_modules()},
    )


# Attach


def test_attach_freezes_the_base_and_registers_the_active_adapter() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    assert list(adapters.layers) == ["embed", "blocks.0.query", "blocks.1.query", "conv"]
    assert adapters_of(model) is adapters
    assert adapters.names == ["default"]
    assert adapters.active == "default"
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{path}.{key}" for path in adapters.layers for key in ("down", "up")}
    assert adapters.parameters().keys() == trained
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in adapters.parameters().items())


def test_a_new_adapter_is_the_identity() -> None:
    model = Model()
    before = model(IDS)
    attach(model, LoRA(rank=2), targets=TARGETS)
    assert torch.equal(model(IDS), before)


def test_training_writes_into_the_storage() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(IDS).square().sum().backward()
    optimizer.step()
    for layer in adapters.layers.values():
        for key in ("down", "up"):
            assert torch.equal(layer.slots.stacked(key)[1], getattr(layer, key))
            assert layer.slots.stacked(key)[1].data_ptr() == getattr(layer, key).data_ptr()
            assert not layer.slots.stacked(key)[0].any()
    assert any(layer.up.any() for layer in adapters.layers.values() if layer.layer.kind != "embedding")


def test_data_that_a_program_assigns_is_the_adapter_from_then_on() -> None:
    """``parameter.data = ...``, as ``vector_to_parameters`` does: the Parameter then lies outside of the storage."""
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    adapters.add("other", LoRA(rank=2))
    nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in adapters.parameters().values())), adapters.parameters().values())
    expected = model(IDS).detach()
    values = {key: value.detach().clone() for key, value in adapters.parameters().items()}
    saved = {f"{path}.{key}": value.clone() for path, own in adapters.tensors("default").items() for key, value in own.items()}
    assert all(torch.equal(saved[key], value) for key, value in values.items())
    adapters.parameters()["blocks.0.query.up"].data = values["blocks.0.query.up"].clone()
    with adapters.rows(["default"] * len(IDS)):
        torch.testing.assert_close(model(IDS), expected)
    adapters.add("third", LoRA(rank=5))  # the storage grows
    torch.testing.assert_close(model(IDS), expected)
    adapters.parameters()["blocks.0.query.up"].data = torch.zeros(1)
    assert code_of(adapters.tensors, "default") == "tensor-shape"


def test_every_slot_is_aligned_and_contiguous() -> None:
    adapters = attach(nn.Sequential(nn.Linear(3, 5)), LoRA(rank=3), targets=["0"])
    for number in range(5):
        adapters.add(f"more-{number}", LoRA(rank=1 + number % 3))
    slots = adapters.layers["0"].slots
    for slot in range(slots.num_slots):
        for value in [*slots.parameters(slot).values(), *slots.settings(slot).values()]:
            assert value.is_contiguous()
            assert value.storage_offset() * value.element_size() % 64 == 0


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        (["query"], (), ["blocks.0.query", "blocks.1.query"]),
        (["blocks.0.query", "head"], (), ["blocks.0.query", "head"]),
        (["0.query"], (), ["blocks.0.query"]),
        (r"blocks\.\d\.(query|value)", (), ["blocks.0.query", "blocks.0.value", "blocks.1.query", "blocks.1.value"]),
        ("all-linear", (), ["blocks.0.query", "blocks.0.value", "blocks.1.query", "blocks.1.value"]),
        ("all-linear", ["value"], ["blocks.0.query", "blocks.1.query"]),
        ("all-linear", r"blocks\.0\..*", ["blocks.1.query", "blocks.1.value"]),
        (lambda path, module: isinstance(module, nn.Embedding | nn.Conv1d), (), ["embed", "conv"]),
    ],
    ids=["ending", "paths", "two-parts", "regex", "all-linear", "exclude-ending", "exclude-regex", "function"],
)
def test_targets(targets: object, exclude: object, expected: list[str]) -> None:
    adapters = attach(Model(), LoRA(rank=2), targets=targets, exclude=exclude)  # type: ignore[arg-type]
    assert list(adapters.layers) == expected


def test_an_ending_matches_whole_parts_only() -> None:
    model = nn.ModuleDict({"to_q": nn.Linear(2, 2), "not_to_q": nn.Linear(2, 2)})
    assert list(attach(model, LoRA(), targets=["to_q"]).layers) == ["to_q"]


def test_overrides_follow_the_first_match() -> None:
    adapters = attach(
        Model(),
        LoRA(rank=2),
        targets=TARGETS,
        overrides={"blocks.0.query": LoRA(rank=5, alpha=1), "query": LoRA(rank=3), r"con\w": LoRA(rank=1)},
    )
    ranks = {path: method.rank for path, method in adapters.methods("default").items() if isinstance(method, LoRA)}
    assert ranks == {"embed": 2, "blocks.0.query": 5, "blocks.1.query": 3, "conv": 1}
    assert adapters.settings_of("default", "scale")["blocks.0.query"] == pytest.approx(0.2)


def test_plan_folds_what_looks_alike() -> None:
    adapters = attach(Model(), LoRA(rank=2), targets="all-linear")
    lines = str(adapters.plan).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["2", "blocks.*.query", "linear", "lora", "2", "6x6", "48"]
    assert lines[-1].split() == ["4", "total", "96"]
    assert len(adapters.plan) == 4
    assert adapters.plan.num_parameters == sum(value.numel() for value in adapters.parameters().values())


# Errors: each leaves the model as it was


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        ({"targets": ["qeury"]}, "no-target-matched", "'query'"),
        ({"targets": ["query", "vlaue"]}, "target-without-match", "'value'"),
        ({"targets": r"blocks\.7\..*"}, "no-target-matched", "regular expression"),
        ({"targets": "(["}, "target-pattern", "not a regular expression"),
        ({"targets": [3]}, "target-pattern", "3 is no text"),
        ({"targets": 3}, "target-pattern", "3 is no text"),
        ({"targets": {"qeury"}}, "no-target-matched", "'query'"),
        ({"targets": ["query"], "exclude": ["query"]}, "no-target-matched", "excluded"),
        ({"targets": ["query"], "exclude": ["quary"]}, "target-without-match", "'query'"),
        ({"targets": ["norm"]}, "unsupported-layer", "LayerNorm"),
        ({"targets": ["blocks.0"]}, "unsupported-layer", "query, value"),
        ({"targets": []}, "no-target-matched", "endings|end in|kinds"),
        ({"targets": lambda path, module: False}, "no-target-matched", "function"),
        ({"targets": ["query"], "overrides": {"vaule": LoRA(rank=4)}}, "override-without-match", "vaule"),
        ({"targets": ["query"], "capacity": 2}, "rank-above-capacity", "capacity=3"),
        ({"targets": ["query"], "capacity": 0}, "capacity", "capacity=0"),
        ({"targets": ["query"], "name": ""}, "adapter-name", "''"),
        ({"targets": ["query"], "name": "a/b"}, "adapter-name", "folders"),
        ({"targets": ["query"], "name": ".."}, "adapter-name", "folders"),
        ({"targets": ["query"], "name": "a\0b"}, "adapter-name", "folders"),
        ({"targets": ["query"], "dtype": torch.int8}, "dtype", "int8"),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value else None,
)
def test_refused(settings: dict[str, object], code: str, says: str) -> None:
    model = Model()
    before = snapshot(model)
    with pytest.raises(OnegraphError, match=f"(?s)({says})") as raised:
        attach(model, LoRA(rank=3), **settings)  # type: ignore[arg-type]
    assert raised.value.code == code
    assert snapshot(model) == before
    assert adapters_of(model) is None


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ConfigurationError, match="3 is not a model") as raised:
        attach(3, LoRA(rank=3), targets=["0"])  # type: ignore[arg-type]
    assert raised.value.code == "not-a-model"


def test_grouped_convolution_needs_a_rank_of_its_groups() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(TargetError, match="multiple of 2, not 3"):
        attach(model, LoRA(rank=3), targets=["0"])


def test_many_unsupported_layers_are_a_short_message() -> None:
    model = nn.Sequential(*(nn.LayerNorm(2) for _ in range(50)))
    with pytest.raises(TargetError) as raised:
        attach(model, LoRA(), targets=r"\d+")
    assert len(str(raised.value)) < 500
    assert "47 more" in str(raised.value)


def test_not_a_method() -> None:
    assert code_of(attach, Model(), {"rank": 4}, targets=TARGETS) == "not-a-method"


def test_refused_later() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS, name="style")
    before = snapshot(model)
    assert code_of(attach, model, LoRA(rank=2), targets=TARGETS, name="style") == "adapter-exists"
    assert code_of(adapters.add, "style", LoRA()) == "adapter-exists"
    assert code_of(adapters.add, "other", LoRA(), targets=["nothing"]) == "no-target-matched"
    assert code_of(adapters.use, "stile") == "unknown-adapter"
    assert code_of(adapters.scale, "stile", 1.0) == "unknown-adapter"
    assert code_of(adapters.scale, "style", float("nan")) == "not-finite-value"
    assert code_of(adapters.scale, "style", "1") == "not-finite-value"
    assert code_of(adapters.scale, "style", None) == "not-finite-value"
    assert code_of(adapters.delete, "stile") == "unknown-adapter"
    assert code_of(adapters.set_setting, "style", "dropout", 0.5) == "unknown-setting"
    assert code_of(adapters.reserve, rank=0) == "reserve"
    assert code_of(adapters.tensors, "stile") == "unknown-adapter"
    adapters.set_setting("style", "dropout", 0.0)  # a setting that isn't in the graph is 0 already
    assert adapters.settings_of("style", "dropout") == {}
    with pytest.raises(AdapterError, match="did you mean 'style'"):
        adapters.use("stile")
    assert snapshot(model) == before
    adapters.use(None)
    assert code_of(adapters.parameters) == "no-active-adapter"


def test_tensors_that_do_not_fit_change_nothing() -> None:
    adapters = attach(Model(), LoRA(rank=2), targets=TARGETS)
    before = {path: {key: value.clone() for key, value in tensors.items()} for path, tensors in adapters.tensors("default").items()}
    good = {path: {key: torch.ones_like(value) for key, value in tensors.items()} for path, tensors in before.items()}
    assert code_of(adapters.load_tensors, "default", {**good, "blocks.0.qeury": good["conv"]}) == "tensor-unknown"
    assert code_of(adapters.load_tensors, "default", {**good, "conv": {**good["conv"], "sideways": torch.ones(1)}}) == "tensor-unknown"
    assert code_of(adapters.load_tensors, "default", {**good, "conv": {**good["conv"], "down": torch.ones(3, 6, 3)}}) == "tensor-shape"
    with pytest.raises(AdapterError, match=r"conv: no tensor for down, up"):
        adapters.load_tensors("default", {path: tensors for path, tensors in good.items() if path != "conv"})
    for path, tensors in adapters.tensors("default").items():
        for key, value in tensors.items():
            assert torch.equal(value, before[path][key])
    adapters.load_tensors("default", {"conv": {"up": good["conv"]["up"]}}, partial=True)
    assert adapters.tensors("default")["conv"]["up"].eq(1).all()
    assert torch.equal(adapters.tensors("default")["conv"]["down"], before["conv"]["down"])


# Switching


def test_use_disabled_scale_delete() -> None:
    model = Model()
    plain = model(IDS)
    adapters = attach(model, LoRA(rank=2, alpha=4), targets=TARGETS, name="a")
    adapters.add("b", LoRA(rank=2), targets=["query"])
    assert adapters.active == "a"
    randomize(adapters, "a", 1)
    randomize(adapters, "b", 2)
    out_a = model(IDS)
    adapters.use("b")
    out_b = model(IDS)
    assert not torch.equal(out_a, out_b)
    assert not torch.equal(out_a, plain)
    assert {name for name, p in model.named_parameters() if p.requires_grad and p.any()} == set(adapters.parameters("b"))
    with adapters.disabled():
        assert adapters.active is None
        assert torch.equal(model(IDS), plain)
        model(IDS).sum().backward()
    assert adapters.active == "b"
    assert torch.equal(model(IDS), out_b)
    assert all(p.grad is None for layer in adapters.layers.values() for p in layer.slots.parameters(0).values())
    adapters.use("a")
    adapters.scale("a", 0.0)
    assert torch.equal(model(IDS), plain)
    adapters.scale("a", 0.5)
    assert set(adapters.settings_of("a", "scale").values()) == {1.0}
    adapters.scale("a", 1.0)
    assert torch.equal(model(IDS), out_a)
    adapters.delete("a")
    assert adapters.active is None
    assert adapters.names == ["b"]
    assert torch.equal(model(IDS), plain)
    adapters.use("b")
    assert torch.equal(model(IDS), out_b)


def test_a_failing_block_switches_back() -> None:
    adapters = attach(Model(), LoRA(rank=2), targets=TARGETS)
    with pytest.raises(ZeroDivisionError), adapters.disabled():
        raise ZeroDivisionError
    assert adapters.active == "default"


def test_optimizing_while_disabled_leaves_the_identity_alone() -> None:
    model = Model()
    plain = model(IDS)
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    with adapters.disabled():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        model(IDS).sum().backward()
        optimizer.step()
        assert torch.equal(model(IDS), plain)


def test_deleted_parameters_write_nowhere() -> None:
    adapters = attach(Model(), LoRA(rank=2), targets=TARGETS, name="a")
    adapters.add("b", LoRA(rank=2))
    stale = list(adapters.parameters("b").values())
    adapters.delete("b")
    adapters.add("c", LoRA(rank=2))
    before = {name: value.clone() for name, value in adapters.parameters("c").items()}
    for parameter in stale:
        parameter.data.fill_(7.0)
    assert all(torch.equal(value, before[name]) for name, value in adapters.parameters("c").items())
    assert not any(value is old for value in adapters.parameters("c").values() for old in stale)


def test_growing_keeps_parameters_and_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS, name="a")
    randomize(adapters, "a")
    parameters = adapters.parameters("a")
    out = model(IDS)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    model(IDS).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    out = model(IDS)
    with caplog.at_level(logging.INFO, logger="onegraph"):
        for number in range(5):
            adapters.add(f"more-{number}", LoRA(rank=2))
    assert not caplog.records  # more slots change no shape: nothing compiles again
    assert all(adapters.parameters("a")[name] is parameter for name, parameter in parameters.items())
    assert torch.equal(model(IDS), out)
    model(IDS).sum().backward()
    optimizer.step()
    assert not torch.equal(model(IDS), out)
    assert torch.equal(adapters.layers["conv"].slots.stacked("up")[1], parameters["conv.up"])


def test_a_larger_rank_is_announced_and_exact(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=3), targets=TARGETS, name="a")
    randomize(adapters, "a")
    out = model(IDS)
    with caplog.at_level(logging.INFO, logger="onegraph"):
        adapters.add("b", LoRA(rank=7, dropout=0.1))
    assert "from rank 3 to 12" in caplog.text
    assert "first to use dropout" in caplog.text
    torch.testing.assert_close(model(IDS), out)
    assert adapters.layers["conv"].down.shape[0] == 12
    assert {tensors["down"].shape[0] for tensors in adapters.tensors("a").values()} == {3}
    assert {tensors["down"].shape[0] for tensors in adapters.tensors("b").values()} == {7}
    with caplog.at_level(logging.INFO, logger="onegraph"):
        adapters.add("c", LoRA(rank=1), targets=["head"])
    assert "1 layers that were not adapted before" in caplog.text
    torch.testing.assert_close(model(IDS), out)


def test_padding_stays_zero_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Flatten(2), nn.Linear(9, 5))
    adapters = attach(model, LoRA(rank=2, dropout=0.2, rank_dropout=0.2, bias=True), targets=["0", "2"], capacity=8)
    randomize(adapters, "default")
    kept = {path: {key: value.clone() for key, value in tensors.items()} for path, tensors in adapters.tensors("default").items()}
    optimizer = torch.optim.AdamW(adapters.parameters().values(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        model(torch.randn(2, 4, 3, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = adapters.tensors("default")
    for path, layer in adapters.layers.items():
        rest = {key: value.detach().clone() for key, value in layer.slots.parameters(1).items()}
        true = layer.slots.specs(2)
        count = sum(int(value.count_nonzero()) for key, value in rest.items())
        assert count == sum(int(value.count_nonzero()) for value in trained[path].values())
        assert all(tuple(trained[path][key].shape) == true[key].shape for key in true)
        assert all(not torch.equal(trained[path][key], kept[path][key]) for key in kept[path])


def test_padded_grouped_convolution_is_exact() -> None:
    base = nn.Conv2d(4, 6, 3, groups=2)
    x = torch.randn(2, 4, 5, 5)
    narrow, wide = nn.Sequential(copy.deepcopy(base)), nn.Sequential(copy.deepcopy(base))
    one = attach(narrow, LoRA(rank=4), targets=["0"])
    two = attach(wide, LoRA(rank=4), targets=["0"], capacity=8)
    randomize(one, "default")
    two.load_tensors("default", one.tensors("default"))
    torch.testing.assert_close(wide(x), narrow(x))
    assert torch.equal(two.tensors("default")["0"]["down"], one.tensors("default")["0"]["down"])


def test_dropout_can_be_switched_off_in_place() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2, dropout=0.5, module_dropout=0.25), targets=TARGETS)
    randomize(adapters, "default")
    model.eval()
    expected = model(IDS)
    model.train()
    assert not torch.equal(model(IDS), model(IDS))
    with adapters.without_randomness():
        torch.testing.assert_close(model(IDS), expected)
    assert set(adapters.settings_of("default", "dropout").values()) == {0.5}
    assert set(adapters.settings_of("default", "module_dropout").values()) == {0.25}
    assert adapters.setting_names("default") == ["dropout", "module_dropout", "scale"]


def test_without_randomness_holds_whatever_runs_inside() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS, name="first")
    adapters.add("dropped", LoRA(rank=2, dropout=0.5))
    adapters.add("gone", LoRA(rank=2, dropout=0.5))
    randomize(adapters, "dropped")
    with adapters.without_randomness():
        adapters.use("dropped")
        assert torch.equal(model(IDS), model(IDS))
        with adapters.rows(["dropped"] * len(IDS)):
            assert torch.equal(model(IDS), model(IDS))
        adapters.delete("gone")
    assert not torch.equal(model(IDS), model(IDS))
    adapters.merge("dropped")
    with adapters.without_randomness():
        assert torch.equal(model(IDS), model(IDS))
    adapters.unmerge()
    assert set(adapters.settings_of("dropped", "dropout").values()) == {0.5}


def test_input_dropout_beside_an_embedding() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2, input_dropout=0.5), targets=TARGETS)
    randomize(adapters, "default")
    assert not torch.equal(model(IDS), model(IDS))
    with adapters.without_randomness():
        assert torch.equal(model(IDS), model(IDS))


def test_reserved_room_is_used_before_any_growing(caplog: pytest.LogCaptureFixture) -> None:
    adapters = attach(Model(), LoRA(rank=2), targets=TARGETS, name="a")
    adapters.reserve(num_adapters=5, rank=9)
    slots = adapters.layers["conv"].slots
    memory = slots.stacked("up").data_ptr()
    with caplog.at_level(logging.INFO, logger="onegraph"):
        for number in range(4):
            adapters.add(f"more-{number}", LoRA(rank=9 - number))
    assert not caplog.records
    assert slots.stacked("up").data_ptr() == memory
    assert (slots.num_slots, slots.rank) == (6, 9)


def test_dtype_of_the_adapter() -> None:
    model = Model().to(torch.bfloat16)
    assert {value.dtype for value in attach(copy.deepcopy(model), LoRA(), targets=TARGETS).parameters().values()} == {torch.float32}
    assert {value.dtype for value in attach(model, LoRA(), targets=TARGETS, dtype=None).parameters().values()} == {torch.bfloat16}


# Moving, copying, saving


@pytest.mark.parametrize(
    "move", [lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.half().float()], ids=["double", "bf16", "half"]
)
def test_moving_keeps_the_ties(move: object) -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2, alpha=0.6), targets=TARGETS)
    adapters.add("b", LoRA(rank=2))
    parameters = adapters.parameters("default")
    model(IDS).sum().backward()
    move(model)  # type: ignore[operator]
    for path, layer in adapters.layers.items():
        for key in ("down", "up"):
            value = getattr(layer, key)
            assert value is parameters[f"{path}.{key}"]
            assert value.dtype == layer.base_layer.weight.dtype
            assert value.grad is not None
            assert value.grad.dtype == value.dtype
            assert value.data_ptr() == layer.slots.stacked(key)[1].data_ptr()
    assert adapters.layers["conv"].slots.settings(1)["scale"].dtype == torch.float32
    assert list(adapters.settings_of("default", "scale").values()) == pytest.approx([0.3] * 4)
    adapters.use("b")
    assert model(IDS).dtype == adapters.layers["conv"].weight.dtype


def test_meta_device_and_back() -> None:
    with torch.device("meta"):
        model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    assert adapters.layers["conv"].down.device.type == "meta"
    model.to_empty(device="cpu")
    assert adapters.layers["conv"].down.device.type == "cpu"
    assert list(adapters.settings_of("default", "scale").values()) == [1.0] * 4
    assert not any(layer.slots.stacked(key)[0].any() for layer in adapters.layers.values() for key in ("down", "up"))
    assert adapters.layers["conv"].down.data_ptr() == adapters.layers["conv"].slots.stacked("down")[1].data_ptr()


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_whole_and_apart(copying: object) -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS, name="a")
    adapters.add("b", LoRA(rank=2, dropout=0.5))
    randomize(adapters, "a", 1)
    randomize(adapters, "b", 2)
    model.eval()
    copied = copying(model)  # type: ignore[operator]
    assert torch.equal(copied(IDS), model(IDS))
    others = adapters_of(copied)
    assert others is not None
    assert others.model is copied
    others.use("b")
    adapters.use("b")
    assert torch.equal(copied(IDS), model(IDS))
    layer = others.layers["conv"]
    assert copied.conv is layer
    assert layer.down.data_ptr() == layer.slots.stacked("down")[2].data_ptr()
    layer.down.data.add_(1)
    assert not torch.equal(copied(IDS), model(IDS))
    with others.disabled():
        copied(IDS).sum().backward()
        assert all(p.grad is None for p in copied.parameters())  # the identity forgets gradients in copies too
    others.detach()
    assert isinstance(model.conv, Adapted)
    assert isinstance(copied.conv, nn.Conv1d)


def test_torch_save() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    randomize(adapters, "default")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(IDS), model(IDS))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict(assign: bool) -> None:
    plain = Model()
    base = plain.state_dict()
    model = copy.deepcopy(plain)
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    randomize(adapters, "default")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert {name for name in state if name.startswith("conv")} == {"conv.down", "conv.up", "conv.base_layer.weight", "conv.base_layer.bias"}
    other = Model()
    others = attach(other, LoRA(rank=2), targets=TARGETS)
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(IDS), model(IDS))
    assert others.layers["conv"].down.data_ptr() == others.layers["conv"].slots.stacked("down")[1].data_ptr()
    # Weights of the model as it was before attaching go into the base layers.
    third = Model()
    attach(third, LoRA(rank=2), targets=TARGETS)
    result = third.load_state_dict(base, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) == {name for name in state if name.endswith((".down", ".up"))}
    assert torch.equal(third(IDS), plain(IDS))


def test_functional_call_replaces_adapter_parameters() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    plain = model(IDS)
    random = {name: torch.randn_like(value) for name, value in adapters.parameters().items()}
    assert not torch.equal(torch.func.functional_call(model, random, (IDS,)), plain)
    assert torch.equal(model(IDS), plain)


def test_detach_leaves_no_trace() -> None:
    model = Model()
    model.head.weight.requires_grad_(False)
    model.blocks[0].eval()
    before = snapshot(model)
    out = model(IDS)
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    randomize(adapters, "default")
    adapters.add("b", LoRA(rank=4), targets="all-linear")
    assert not model.blocks[0].query.training
    assert adapters.detach() is model
    assert snapshot(model) == before
    assert torch.equal(model(IDS), out)
    assert adapters_of(model) is None
    assert code_of(adapters.use, "default") == "detached"
    attach(model, LoRA(rank=2), targets=TARGETS)


# Odd models


def test_a_module_used_twice_has_one_adapter() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared, nn.ReLU())})
    adapters = attach(model, LoRA(rank=2), targets=["second.0"])
    assert list(adapters.layers) == ["first.0"]
    assert model["first"][0] is model["second"][0]
    assert len(adapters.parameters()) == 2
    adapters.detach()
    assert model["first"][0] is shared
    assert model["second"][0] is shared


def test_weights_can_be_tied_through_an_adapted_layer() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    attach(model, LoRA(rank=2), targets=["embed"])
    model["head"].weight = model["embed"].weight
    assert model["head"].weight is model["embed"].base_layer.weight
    replaced = nn.Parameter(torch.zeros(5, 4), requires_grad=False)
    model["embed"].weight = replaced
    assert model["embed"].base_layer.weight is replaced
    assert "weight" not in model["embed"]._parameters


def test_an_adapted_layer_looks_like_its_base() -> None:
    model = Model()
    linear, conv, embed = model.head, model.conv, model.embed
    attach(model, LoRA(rank=2), targets=["head", "conv", "embed"])
    assert model.head.weight is linear.weight
    assert model.head.bias is linear.bias
    assert (model.head.in_features, model.head.out_features) == (4, 3)
    assert model.head.weight.dtype == torch.float32
    assert (model.conv.kernel_size, model.conv.out_channels, model.conv.padding_mode) == ((3,), 4, "zeros")
    assert (model.embed.num_embeddings, model.embed.padding_idx) == (10, None)
    assert conv is model.conv.base_layer
    assert embed is model.embed.base_layer
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.head.nonsense
    assert not hasattr(model.head, "nonsense")
    model.head.in_features = 9
    assert linear.in_features == 9
    model.head.mark = 1
    assert not hasattr(linear, "mark")


@pytest.mark.parametrize("inner", [False, True], ids=["whole-model", "one-block"])
def test_a_compiled_wrapper_is_not_in_the_paths(inner: bool) -> None:
    model = Model()
    if inner:
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        outer: nn.Module = model
    else:
        outer = torch.compile(model, backend="eager")
    plain = model(IDS)
    adapters = attach(outer, LoRA(rank=2), targets=TARGETS)
    assert list(adapters.layers) == ["embed", "blocks.0.query", "blocks.1.query", "conv"]
    assert adapters_of(outer) is adapters
    assert adapters_of(model) is adapters
    torch.testing.assert_close(outer(IDS), plain)
    randomize(adapters, "default")
    changed = outer(IDS)
    assert not torch.allclose(changed, plain)
    adapters.detach()
    torch.testing.assert_close(outer(IDS), plain)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_compiled_leaf_is_adapted_inside_its_wrapper() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"))
    x = torch.randn(2, 3)
    plain = model(x)
    adapters = attach(model, LoRA(rank=2), targets=["0"])
    randomize(adapters, "default")
    assert not torch.allclose(model(x), plain)
    adapters.detach()
    torch.testing.assert_close(model(x), plain)


def test_parts_of_a_model_are_adapted_once() -> None:
    model = nn.ModuleDict({"unet": Model(), "other": Model()})
    attach(model["unet"], LoRA(rank=2), targets=TARGETS)
    before = snapshot(model)
    assert code_of(attach, model, LoRA(rank=2), targets=["unet.conv"]) == "adapted-elsewhere"
    assert snapshot(model) == before
    adapters = attach(model, LoRA(rank=2), targets=["other.conv"])
    assert list(adapters.layers) == ["other.conv"]


def test_attach_again_adds_to_the_same_set() -> None:
    model = Model()
    first = attach(model, LoRA(rank=2), targets=["query"], name="a")
    second = attach(model, LoRA(rank=2), targets=["conv"], name="b")
    assert second is first
    assert first.names == ["a", "b"]
    assert first.active == "b"
    assert list(first.methods("b")) == ["conv"]


def test_two_structures_on_a_layer() -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS, name="plain")
    randomize(adapters, "plain", 1)
    out = model(IDS)
    adapters.add("biased", LoRA(rank=3, bias=True))
    randomize(adapters, "biased", 2)
    assert torch.equal(model(IDS), out)
    adapters.use("biased")
    assert set(adapters.parameters()) == {f"{path}.{key}" for path in adapters.layers for key in ("down", "up", "up_bias")}
    assert not torch.equal(model(IDS), out)
    adapters.use("plain")
    assert torch.equal(model(IDS), out)
    assert "conv.up_bias" not in dict(model.named_parameters())


def test_hooks_of_the_base_layer_still_run() -> None:
    model = Model()
    seen: list[int] = []
    model.conv.register_forward_hook(lambda module, args, output: seen.append(1))
    attach(model, LoRA(rank=2), targets=["conv"])
    model(IDS)
    assert seen == [1]


# Files and names


def test_save_and_load_call_what_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    adapters = attach(model, LoRA(rank=2), targets=TARGETS)
    monkeypatch.setattr(files_room, "_registered", [])
    assert code_of(adapters.save, "there") == "no-file-functions"
    calls: list[object] = []
    register_file_functions(
        save=lambda adapters, path, **options: calls.append(("save", adapters, path, options)),  # type: ignore[arg-type]
        load=lambda model, path, **options: calls.append(("load", model, path, options)),  # type: ignore[arg-type,return-value]
    )
    adapters.save("there", format="peft")
    adapters.load("here", name="new")
    assert calls == [
        ("save", adapters, "there", {"name": "default", "format": "peft"}),
        ("load", model, "here", {"name": "new", "format": None}),
    ]
    assert code_of(adapters.save, "there", name="defualt") == "unknown-adapter"


def test_public_names() -> None:
    assert og.attach is attach
    assert og.LoRA is LoRA
    assert og.errors.AdapterError is AdapterError
    assert {"attach", "adapters_of", "LoRA", "Adapters", "errors"} <= set(dir(og))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = og.nothing_like_it


def test_import_alone_does_not_wait_for_torch() -> None:
    code = "import sys, onegraph; dir(onegraph); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=120)


def test_what_computes_a_weight_is_no_layer() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    # the module that computes the weight of "0" has a path that ends in "0" as well
    assert list(attach(model, LoRA(rank=2), targets=["0"]).layers) == ["0"]
