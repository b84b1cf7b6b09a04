"""Our own format: what is saved is what is loaded, and saving changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import onegraph
from onegraph import LoRA, adapters_of, attach, load, save
from onegraph.adapters import Adapters
from onegraph.checkpoint import read
from onegraph.checkpoint.dialects import native
from onegraph.errors import AdapterError, CheckpointError, NumericsError, OutputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(6, 8, 3, padding=1, groups=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(OrderedDict(query=nn.Linear(8, 8), act=nn.GELU(), value=nn.Linear(8, 8))) for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.conv(self.table(ids).movedim(-1, 1)).movedim(1, -1)
        for block in self.blocks:
            h = h + block(h)
        return h


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def ids() -> torch.Tensor:
    return torch.arange(18).reshape(2, 3, 3) % 11


def randomise(adapters: Adapters, name: str) -> Adapters:
    generator = torch.Generator().manual_seed(1)
    for value in adapters.parameters(name).values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return adapters


def assert_same(first: Adapters, second: Adapters, name: str = "default") -> None:
    ours, theirs = first.tensors(name), second.tensors(name)
    assert ours.keys() == theirs.keys()
    for path, layer in ours.items():
        assert layer.keys() == theirs[path].keys()
        for key, tensor in layer.items():
            assert torch.equal(tensor, theirs[path][key]), f"{path}.{key}"
    assert first.methods(name) == second.methods(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_round_trip_is_exact_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = net()
    adapters = attach(
        model,
        LoRA(rank=4, alpha=3, rslora=True, rank_dropout=0.25, init="gaussian", bias=True),
        targets=lambda path, module: isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding),
        overrides={"blocks.1.value": LoRA(rank=2, alpha=7.5, bias=True)},
        dtype=dtype,
    )
    randomise(adapters, "default")
    save(adapters, tmp_path / "adapter.safetensors")
    other = net()
    loaded = load(other, tmp_path / "adapter.safetensors")
    assert loaded.active == "default"
    assert_same(adapters, loaded)
    if dtype == torch.float32:
        model.eval(), other.eval()
        assert torch.equal(model(ids()), other(ids()))
        assert not torch.equal(net()(ids()), other(ids())), "the adapter must do something, or equal outputs show nothing"
    save(loaded, tmp_path / "again.safetensors", dtype=dtype)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "adapter.safetensors").read_bytes()


def test_keys_are_path_and_parameter_and_the_metadata_says_who_wrote_it(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["blocks.0.query"])
    save(adapters, tmp_path / "a.safetensors", metadata={"comment": "first"})
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"blocks.0.query.down", "blocks.0.query.up"}
        assert file.metadata()["comment"] == "first"
        assert file.metadata()["onegraph_version"] == onegraph.__version__
    assert read(tmp_path / "a.safetensors").metadata["comment"] == "first"


def test_every_field_of_a_method_is_recorded() -> None:
    method = LoRA(
        rank=3, alpha=5.5, rslora=True, dropout=0.1, input_dropout=0.2, rank_dropout=0.3, module_dropout=0.4, init="gaussian", bias=True
    )
    defaults = LoRA()
    assert all(getattr(method, field.name) != getattr(defaults, field.name) for field in dataclasses.fields(method)), (
        "a field is left out here"
    )
    assert native.method_of(native.record_of(method)) == method


def test_saving_changes_nothing(tmp_path: Path) -> None:
    model = net()
    adapters = attach(model, LoRA(rank=2, dropout=0.5), targets=["query", "value"])
    randomise(adapters, "default")
    model.train()

    def state() -> tuple[object, ...]:
        values = {name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest() for name, value in model.state_dict().items()}
        return (
            values,
            [id(p) for p in model.parameters()],
            [p.requires_grad for p in model.parameters()],
            model.training,
            torch.get_rng_state().tolist(),
        )

    before = state()
    for format in ("native", "peft"):
        save(adapters, tmp_path / format, format=format, dtype=torch.float16)
    assert state() == before


@pytest.mark.parametrize("format", ["native", "peft"])
def test_a_file_has_the_trained_strength_and_a_combination_the_present_one(tmp_path: Path, format: str) -> None:
    adapters = randomise(attach(net(), LoRA(rank=2, alpha=6.0), targets=["query", "value"]), "default")
    whole = adapters.model(ids())
    adapters.scale("default", 0.5)
    half = adapters.model(ids())
    adapters.combine("half", {"default": 1.0})
    for name, expected in {"default": whole, "half": half}.items():
        save(adapters, tmp_path / name, name=name, format=format)
        torch.testing.assert_close(load(net(), tmp_path / name).model(ids()), expected)
    assert not torch.allclose(whole, half, atol=1e-2)


def test_the_old_file_stays_when_the_weights_are_not_finite(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["query"])
    save(adapters, tmp_path / "a.safetensors")
    old = (tmp_path / "a.safetensors").read_bytes()
    next(iter(adapters.parameters().values())).data.fill_(float("nan"))
    with pytest.raises(NumericsError):
        save(adapters, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == old


def test_a_model_compiled_in_place_and_as_a_whole_saves_plain_keys(tmp_path: Path) -> None:
    plain = net()
    adapters = attach(plain, LoRA(rank=2), targets=["query", "value"])
    randomise(adapters, "default")
    save(adapters, tmp_path / "plain.safetensors")
    plain.blocks[0].compile(backend="eager")
    plain.blocks[1] = torch.compile(plain.blocks[1], backend="eager")  # type: ignore[assignment]
    whole = torch.compile(plain, backend="eager")
    whole(ids())
    found = adapters_of(whole)  # type: ignore[arg-type]
    assert found is adapters
    save(found, tmp_path / "compiled.safetensors")
    assert (tmp_path / "compiled.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_a_file_loads_onto_a_compiled_model(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["query", "value"])
    randomise(adapters, "default")
    save(adapters, tmp_path / "a.safetensors")
    other = net()
    other.blocks[1] = torch.compile(other.blocks[1], backend="eager")  # type: ignore[assignment]
    loaded = load(torch.compile(other, backend="eager"), tmp_path / "a.safetensors")  # type: ignore[arg-type]
    assert_same(adapters, loaded)


def wrapped_in_checkpointing(model: Net) -> nn.Module:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {"data parallel": nn.DataParallel, "activation checkpointing": wrapped_in_checkpointing}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrapped_models_save_plain_keys_and_load_plain_files(tmp_path: Path, kind: str) -> None:
    plain = randomise(attach(net(), LoRA(rank=2), targets=["query", "value"]), "default")
    save(plain, tmp_path / "plain.safetensors")
    wrapped = WRAPPERS[kind](net())
    loaded = load(wrapped, tmp_path / "plain.safetensors")
    save(loaded, tmp_path / "wrapped.safetensors")
    assert (tmp_path / "wrapped.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    torch.testing.assert_close(wrapped(ids()), plain.model(ids()))


@pytest.mark.parametrize("wrap", ["_orig_mod.{}", "module.{}", "_fsdp_wrapped_module.blocks.1._checkpoint_wrapped_module.{}"])
def test_a_file_with_wrappers_in_its_keys_loads(tmp_path: Path, wrap: str) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["blocks.1.query"])
    randomise(adapters, "default")
    save(adapters, tmp_path / "a", format="peft")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    start = "base_model.model."
    inner = "blocks.1." if "{}" in wrap and "blocks.1." in wrap else ""
    renamed = {start + wrap.format(key.removeprefix(start + inner)): value for key, value in load_file(weights).items()}
    assert all("_" in key for key in renamed)
    save_file(renamed, weights)
    assert_same(adapters, load(net(), tmp_path / "a"))


def test_loading_a_second_adapter_keeps_the_first_and_the_graph_structure(tmp_path: Path) -> None:
    source = attach(net(), LoRA(rank=4, alpha=2), targets=["query", "value"])
    randomise(source, "default")
    source.save(tmp_path / "a.safetensors")
    model = net()
    adapters = attach(model, LoRA(rank=8), targets=["query", "value"], name="mine")
    adapters.load(tmp_path / "a.safetensors", name="french")
    assert adapters.names == ["mine", "french"]
    for path, layer in source.tensors("default").items():
        assert all(torch.equal(tensor, adapters.tensors("french")[path][key]) for key, tensor in layer.items())
    adapters.use("french")
    expected = attach(net(), LoRA(rank=4, alpha=2), targets=["query", "value"])
    expected.load_tensors("default", source.tensors("default"))
    torch.testing.assert_close(model(ids()), expected.model(ids()))


def test_loading_under_a_name_that_is_there_replaces_its_weights_in_place(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["query"])
    randomise(adapters, "default")
    adapters.save(tmp_path / "a.safetensors")
    saved = {key: value.clone() for key, value in adapters.parameters().items()}
    parameters = {key: id(value) for key, value in adapters.parameters().items()}
    for value in adapters.parameters().values():
        value.data.zero_()
    adapters.load(tmp_path / "a.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in adapters.parameters().items())
    assert {key: id(value) for key, value in adapters.parameters().items()} == parameters


def test_a_name_that_is_there_with_another_rank_is_refused(tmp_path: Path) -> None:
    attach(net(), LoRA(rank=2), targets=["query"]).save(tmp_path / "a.safetensors")
    adapters = attach(net(), LoRA(rank=4), targets=["query"])
    with pytest.raises(AdapterError) as raised:
        adapters.load(tmp_path / "a.safetensors")
    assert raised.value.code == "adapter-exists"
    assert "adapters.delete('default')" in str(raised.value)


def test_a_layer_that_the_model_has_twice_is_saved_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        shared = nn.Linear(4, 4)
        return nn.ModuleDict({"first": shared, "second": shared})

    adapters = attach(tied(), LoRA(rank=2), targets=["first"])
    randomise(adapters, "default")
    save(adapters, tmp_path / "a.safetensors")
    flat = load_file(tmp_path / "a.safetensors")
    assert set(flat) == {"first.down", "first.up"}
    assert_same(adapters, load(tied(), tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        ({native.FORMAT_KEY: "9"}, "adapter-newer"),
        ({native.ADAPTER_KEY: "{"}, "adapter-config"),
        ({native.ADAPTER_KEY: '{"methods": [{"method": "lora", "rank": 0}], "layers": {"blocks.0.query": 0}}'}, "adapter-config"),
        ({native.ADAPTER_KEY: '{"methods": [{"method": "magic"}], "layers": {"blocks.0.query": 0}}'}, "adapter-unsupported"),
        ({native.ADAPTER_KEY: '{"methods": [{"method": "lora", "colour": 1}], "layers": {"blocks.0.query": 0}}'}, "adapter-unsupported"),
        ({native.ADAPTER_KEY: '{"methods": [{"method": "lora"}], "layers": {"blocks.0.value": 0}}'}, "adapter-keys"),
        ({native.ADAPTER_KEY: '{"methods": [{"method": "lora", "rank": 3}], "layers": {"blocks.0.query": 0}}'}, "adapter-shape"),
    ],
    ids=["later format", "no JSON", "bad rank", "unknown method", "unknown field", "other layer", "other rank"],
)
def test_a_record_that_cannot_be_honoured_is_an_error(tmp_path: Path, edit: dict[str, str], code: str) -> None:
    save(attach(net(), LoRA(rank=2), targets=["blocks.0.query"]), tmp_path / "a.safetensors")
    file = read(tmp_path / "a.safetensors")
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", metadata={**file.metadata, **edit})
    model = net()
    with pytest.raises(CheckpointError) as raised:
        load(model, tmp_path / "b.safetensors")
    assert raised.value.code == code, str(raised.value)
    assert adapters_of(model) is None


def test_an_adapter_for_another_architecture_names_ten_missing_layers(tmp_path: Path) -> None:
    large = nn.ModuleList(nn.Linear(4, 4) for _ in range(14))
    save(attach(large, LoRA(rank=2), targets="all-linear"), tmp_path / "a.safetensors")
    small = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    with pytest.raises(CheckpointError) as raised:
        load(small, tmp_path / "a.safetensors")
    assert raised.value.code == "adapter-architecture"
    assert "12 of the 14 layers" in str(raised.value)
    assert "and 2 more" in str(raised.value)
    assert adapters_of(small) is None
    assert all(type(layer) is nn.Linear for layer in small)


@pytest.mark.parametrize("format", ["native", "kohya", "diffusers"])
def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path, format: str) -> None:
    adapters = attach(nn.ModuleDict({"mid_block": nn.ModuleDict({"a": nn.Linear(2, 2)})}), LoRA(rank=2), targets=["a"])
    with pytest.raises(OutputError) as raised:
        save(adapters, tmp_path, format=format)
    assert raised.value.code == "is-a-folder"


@pytest.mark.parametrize(
    ("metadata", "what"), [({"steps": 3}, "steps is of type int"), ({native.FORMAT_KEY: "1"}, "written by the format itself")]
)
def test_metadata_that_cannot_be_written_is_an_error(tmp_path: Path, metadata: dict[str, object], what: str) -> None:
    with pytest.raises(CheckpointError, match=what) as raised:
        save(attach(net(), LoRA(rank=2), targets=["query"]), tmp_path / "a.safetensors", metadata=metadata)
    assert raised.value.code == "metadata"


def test_saving_without_an_active_adapter_asks_for_a_name(tmp_path: Path) -> None:
    adapters = attach(net(), LoRA(rank=2), targets=["query"])
    adapters.use(None)
    with pytest.raises(AdapterError, match="'default'"):
        save(adapters, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError) as raised:
        save(adapters, tmp_path / "a.safetensors", name="defualt")
    assert raised.value.code == "unknown-adapter"
    save(adapters, tmp_path / "a.safetensors", name="default")


@pytest.mark.parametrize("format", ["native", "peft"])
def test_numbers_beyond_the_rank_are_not_dropped_without_a_word(tmp_path: Path, format: str) -> None:
    place = tmp_path / ("x.safetensors" if format == "native" else "x")
    model = net()
    adapters = attach(model, LoRA(rank=2), targets=["query"], name="small", capacity=4)
    randomise(adapters, "small")  # writes into the padding too
    with pytest.raises(CheckpointError, match=r"blocks\.0\.query\.down, blocks\.0\.query\.up") as caught:
        save(adapters, place, name="small", format=format)
    assert caught.value.code == "beyond-rank"
    assert not list(tmp_path.rglob("*.*"))
    adapters.load_tensors(
        "small", {path: {key: value.clone() for key, value in layer.items()} for path, layer in adapters.tensors("small").items()}
    )
    save(adapters, place, name="small", format=format)
    again = load(net(), place, name="small")
    assert torch.equal(again.model(ids()), model(ids()))
