"""Two processes with half the batch each against one process with all of it.

In float64 the weights agree to 1e-9 of the largest after a few steps: only the order of sums differs. Two processes agree bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor, nn

import onegraph as og
from onegraph.errors import OnegraphError
from process_programs import accelerated, adapted, different_adapters, llama, peft_names, plain_loop, trainer
from processes import run_in

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """The plain loop in one process, compiled."""
    (found,) = run_in(1, plain_loop, "nothing", "compile first", str(folder))
    return found


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference, as a part of the largest value."""
    assert left.keys() == right.keys()
    largest = max(float(value.abs().max()) for value in right.values())
    return max(float((left[name] - right[name]).abs().max()) for name in right) / largest


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("way", "order"), [("replicate", "compile first"), ("shard", "compile first"), ("shard", "compile last")])
def test_a_plain_loop(way: str, order: str, alone: dict[str, Any], folder: Path) -> None:
    first, second = run_in(2, plain_loop, way, order, str(folder))
    for name in ("default", "second", "loaded"):
        assert same(first[name], second[name])
        assert distance(first[name], alone[name]) < TOLERANCE
    for mine, others, expected in zip(first["rows"], second["rows"], alone["rows"], strict=True):
        assert same(mine, others)
        assert distance(mine, expected) < TOLERANCE
    assert torch.allclose(first["base"], alone["base"], atol=1e-9)
    assert (first["graphs"], first["breaks"], first["after switching"]) == (alone["graphs"], 0, 0)
    assert first["whole"]
    assert first["sharded"] == (first["weights"] if way == "shard" else 0)
    assert first["twice"] == ("replicated-twice", "sharded-twice" if way == "shard" else "replicated-twice")
    assert first["pieces"] == first["sharded"]  # what was put together for a file is in pieces again
    written = (folder / way / "adapter_model.safetensors").read_bytes()
    assert written == (folder / "nothing" / "adapter_model.safetensors").read_bytes()
    assert {"lm_head.weight", "model.norm.weight"} <= {key.removeprefix("base_model.model.") for key in load(written)}
    if way == "shard":
        assert first["merge"] == "unmergeable"


def test_without_either_each_process_trains_for_itself(alone: dict[str, Any], folder: Path) -> None:
    first, second = run_in(2, plain_loop, "nothing", "not compiled", str(folder))
    assert distance(first["default"], second["default"]) > 0.01
    assert distance(first["default"], alone["default"]) > 0.01


@pytest.mark.parametrize("way", ["ddp", "shard", "fsdp"])
def test_accelerate(way: str, folder: Path) -> None:
    (folder / "alone").mkdir(exist_ok=True)
    (alone,) = run_in(1, accelerated, way, str(folder / "alone"))
    first, second = run_in(2, accelerated, way, str(folder))
    assert first["wrapper"] == {"ddp": "DistributedDataParallel", "shard": "FSDPLlamaForCausalLM", "fsdp": "FSDPLlamaForCausalLM"}[way]
    assert same(first["default"], second["default"])
    assert distance(first["default"], alone["default"]) < TOLERANCE
    assert (first["graphs"], first["breaks"]) == (alone["graphs"], 0)
    model = llama()
    file = og.load(model, folder / f"{way}.safetensors", name="default")
    saved = {f"{path}.{key}": value for path, tensors in file.tensors("default").items() for key, value in tensors.items()}
    assert same(saved, first["default"])
    assert torch.allclose(first["base"], alone["base"], atol=1e-9)
    if way == "fsdp":
        assert first["refused"] == ["adapters-sharded"] * 3
        assert all(not value.any() for value in second["loaded"].values())


@pytest.mark.parametrize("way", ["attached", "peft"])
def test_transformers_trainer(way: str, folder: Path) -> None:
    """Unchanged, compiled; attached to be compared with one process, as a model of ours for PEFT with dropout to be stopped."""
    place = folder / f"trainer-{way}"
    first, second = run_in(2, trainer, way, str(place))
    assert first["wrapper"] == "DistributedDataParallel"
    assert same(first["default"], second["default"])
    assert same(first["resumed"], first["default"])
    assert same(second["resumed"], first["default"])
    names = {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"}
    assert {*first["files"]} - {"README.md"} == {*names, "trainer_state.json", "training_args.bin"}
    assert ["adapter_model.safetensors" in found["written"] for found in (first, second)] == [True, False]
    if way == "attached":
        (alone,) = run_in(1, trainer, way, str(folder / "trainer-alone"))
        assert distance(first["default"], alone["default"]) < TOLERANCE
        assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert (first["graphs"], first["breaks"]) == (alone["graphs"], 0)


def test_a_program_written_for_peft(folder: Path) -> None:
    (alone,) = run_in(1, peft_names, str(folder / "one"))
    first, second = run_in(2, peft_names, str(folder / "two"))
    assert first["wrapper"] == "DistributedDataParallel"
    assert first["trained"] == second["trained"] == first["saved"]
    assert torch.allclose(first["trained"], alone["trained"], rtol=1e-5)


def test_processes_with_different_adapters() -> None:
    assert run_in(2, different_adapters) == [["processes-differ"] * 3 + ["no error"]] * 2


def refusal(call: Any) -> OnegraphError:
    with pytest.raises(OnegraphError) as caught:
        call()
    return caught.value


def test_without_processes() -> None:
    model, _ = adapted()
    assert refusal(lambda: og.replicate(model)).code == "no-process-group"
    assert refusal(lambda: og.shard(model)).code == "no-process-group"
    before = [parameter.clone() for parameter in model.parameters()]
    og.average_gradients(model.parameters())
    assert all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))


@pytest.fixture
def one_process() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_what_is_refused_before_anything_changes(tmp_path: Path) -> None:
    assert refusal(lambda: og.shard(llama())).code == "nothing-adapted"
    model, adapters = adapted()
    compiled = og.compile(model, backend="eager", regions="whole")
    assert refusal(lambda: og.shard(model)).code == "compiled-whole"
    compiled.restore()
    assert refusal(lambda: og.replicate(nn.parallel.DistributedDataParallel(model))).code == "replicated-twice"
    adapters.merge()
    assert refusal(lambda: og.shard(model)).code == "merged"
    adapters.unmerge()
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    adapters.add("norms", og.NormTuning(), targets=["input_layernorm"])
    og.shard(model)
    assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
    assert refusal(lambda: adapters.save(tmp_path / "peft", name="norms", format="peft")).code == "weights-sharded"
    with og.gathered(model):
        adapters.save(tmp_path / "norms", name="norms", format="peft")
    assert refusal(lambda: adapters.save(tmp_path / "peft", name="norms", format="peft")).code == "weights-sharded"
    adapters.save(tmp_path / "norms.safetensors", name="norms")
    adapters.add("words", og.LoRA(rank=2), targets=["embed_tokens"])  # PEFT writes an adapted embedding beside its adapter
    assert refusal(lambda: adapters.save(tmp_path / "peft", name="words", format="peft")).code == "weights-sharded"
    adapters.save(tmp_path / "peft", name="default", format="peft")
    of_the_base = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["auto_mapping"]
    assert of_the_base == {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    assert "FSDP" not in repr(adapters)
    og.compile(model, backend="eager", regions="whole")
    assert refusal(lambda: model(input_ids=torch.zeros(1, 3, dtype=torch.long))).code == "compiled-whole"
