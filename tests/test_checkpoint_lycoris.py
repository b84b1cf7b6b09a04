"""LyCORIS files in both directions, each method against the LyCORIS library's own modules."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

lycoris = pytest.importorskip("lycoris")

from lycoris.modules import get_module, make_module  # noqa: E402
from lycoris.modules.boft import ButterflyOFTModule  # noqa: E402
from lycoris.modules.diag_oft import DiagOFTModule  # noqa: E402
from lycoris.modules.dylora import DyLoraModule  # noqa: E402
from lycoris.modules.full import FullModule  # noqa: E402
from lycoris.modules.glora import GLoRAModule  # noqa: E402
from lycoris.modules.ia3 import IA3Module  # noqa: E402
from lycoris.modules.locon import LoConModule  # noqa: E402
from lycoris.modules.loha import LohaModule  # noqa: E402
from lycoris.modules.lokr import LokrModule  # noqa: E402
from lycoris.modules.norms import NormModule  # noqa: E402
from lycoris.modules.tlora import TLoraModule  # noqa: E402

from onegraph import attach, load  # noqa: E402
from onegraph.adapters import Adapters  # noqa: E402
from onegraph.checkpoint import read, save  # noqa: E402
from onegraph.errors import CheckpointError  # noqa: E402
from onegraph.methods import (  # noqa: E402
    BOFT,
    HRA,
    IA3,
    OFT,
    AdaLoRA,
    BitFit,
    Dense,
    DoRA,
    LoHa,
    LoKr,
    LoRA,
    Method,
    NormTuning,
    VeRA,
    WithBias,
)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 8), (3, 12)),
    "linear_bare": (lambda: nn.Linear(8, 16, bias=False), (2, 3, 8)),
    "linear_long": (lambda: nn.Linear(6, 160), (4, 6)),
    "conv": (lambda: nn.Conv2d(4, 8, 3, padding=1, stride=2), (2, 4, 5, 5)),
    "pointwise": (lambda: nn.Conv2d(8, 12, 1), (2, 8, 3, 3)),
    "line": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 5)),
    "norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (2, 8, 3, 3)),
}
PRODUCTS = ("linear", "linear_bare", "conv", "pointwise")


class Model(nn.Module):
    """Every kind of layer under names that a UNet has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mid_block = nn.ModuleDict({name: build() for name, (build, _) in LAYERS.items()})
        for name in ("norm", "group_norm"):
            nn.init.normal_(self.mid_block[name].weight)


def model() -> nn.Module:
    return Model().requires_grad_(False)


def run(of: nn.Module, layer: str) -> Tensor:
    x = torch.randn(LAYERS[layer][1], generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return of.mid_block[layer](x)  # type: ignore[no-any-return,index,operator]


def key(layer: str) -> str:
    return f"lora_unet_mid_block_{layer}"


@dataclass(frozen=True)
class Case:
    """A method on both sides.

    Args:
        theirs: LyCORIS' module and its arguments.
        ours: What is read, on a layer.
        layers: The layers it is tried on.
        loads: Whether LyCORIS' own loader can read it; where it can't, a module is made with ``arguments`` and takes the state dict.
    """

    theirs: type[nn.Module]
    arguments: dict[str, Any]
    ours: Method
    layers: tuple[str, ...] = PRODUCTS
    loads: bool = True


CASES: dict[str, Case] = {
    "locon": Case(LoConModule, {"lora_dim": 2, "alpha": 3.0}, LoRA(rank=2, alpha=3.0)),
    "locon-rs": Case(LoConModule, {"lora_dim": 4, "alpha": 3.0, "rs_lora": True}, LoRA(rank=4, alpha=3.0, rslora=True)),
    "dora": Case(LoConModule, {"lora_dim": 3, "alpha": 1.0, "weight_decompose": True}, DoRA(rank=3, alpha=1.0)),
    "loha": Case(LohaModule, {"lora_dim": 2, "alpha": 1.0}, LoHa(rank=2, alpha=1.0)),
    "loha-tucker": Case(
        LohaModule, {"lora_dim": 3, "alpha": 2.0, "use_tucker": True}, LoHa(rank=3, alpha=2.0, effective_conv=True), ("conv",)
    ),
    "lokr": Case(LokrModule, {"lora_dim": 1, "alpha": 0.5}, LoKr(rank=1, alpha=0.5)),
    "lokr-factor": Case(LokrModule, {"lora_dim": 1, "alpha": 2.0, "factor": 2}, LoKr(rank=1, alpha=2.0, decompose_factor=2)),
    "lokr-swapped": Case(LokrModule, {"lora_dim": 1, "alpha": 2.0, "factor": 4}, LoKr(rank=1, alpha=2.0, outer=(2, 2)), ("linear_bare",)),
    "lokr-both": Case(
        LokrModule, {"lora_dim": 1, "alpha": 2.0, "decompose_both": True}, LoKr(rank=1, alpha=2.0, decompose_both=True), ("linear_long",)
    ),
    "lokr-full": Case(LokrModule, {"lora_dim": 100, "alpha": 3.0}, LoKr(rank=100, alpha=100.0)),
    "lokr-full-line": Case(
        LokrModule, {"lora_dim": 100, "alpha": 3.0}, LoKr(rank=3, first_form="full", second_form="factorised"), ("line",)
    ),
    "lokr-tucker": Case(
        LokrModule, {"lora_dim": 1, "alpha": 2.0, "use_tucker": True}, LoKr(rank=1, alpha=2.0, effective_conv=True), ("conv",), loads=False
    ),
    "full": Case(FullModule, {}, Dense()),
    "norm": Case(NormModule, {}, NormTuning(), ("norm", "group_norm")),
    "ia3": Case(IA3Module, {}, IA3(scales_bias=False), loads=False),
    "ia3-input": Case(IA3Module, {"train_on_input": True}, IA3(on_input=True), loads=False),
    "oft": Case(DiagOFTModule, {"lora_dim": 2}, OFT(block_size=2, exact=True, on_output=True)),
    "oft-long": Case(DiagOFTModule, {"lora_dim": 10}, OFT(block_size=10, exact=True, on_output=True), ("linear_long",)),
    "oft-rescaled": Case(DiagOFTModule, {"lora_dim": 2, "rescaled": True}, BOFT(block_size=2, on_output=True)),
    "boft": Case(
        ButterflyOFTModule, {"lora_dim": 2}, BOFT(block_size=2, num_factors=3, on_output=True, with_gain=False), ("linear", "conv")
    ),
    "boft-rescaled": Case(
        ButterflyOFTModule, {"lora_dim": 4, "rescaled": True}, BOFT(block_size=4, num_factors=2, on_output=True), ("linear", "conv")
    ),
    "boft-long": Case(
        ButterflyOFTModule, {"lora_dim": 10}, BOFT(block_size=10, num_factors=5, on_output=True, with_gain=False), ("linear_long",)
    ),
}
PLACES = [pytest.param(case, layer, id=f"{name}-{layer}") for name, case in CASES.items() for layer in case.layers]


def made(case: Case, layer: str, **arguments: Any) -> tuple[nn.Module, nn.Module]:
    """Their module with random tensors on a copy of a layer, in a model of its own; the model runs it."""
    whole = model()
    base = whole.mid_block[layer]  # type: ignore[index]
    module = case.theirs(key(layer), base, 1.0, **{**case.arguments, **arguments})
    module.apply_to()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            if name in ("dora_scale", "rescale"):
                parameter.copy_(1 + drawn.abs())
            else:
                parameter.add_(drawn)
    return module.eval(), whole


def written(module: nn.Module, layer: str, path: Path) -> Path:
    save_file({f"{key(layer)}.{name}": value.detach().clone().contiguous() for name, value in module.state_dict().items()}, path)
    return path


def randomised(adapters: Adapters) -> Adapters:
    generator = torch.Generator().manual_seed(2)
    for value in adapters.parameters().values():
        value.data.add_(torch.randn(value.shape, generator=generator) * 0.3)
    return adapters


def on(layer: str, method: Method) -> Adapters:
    return randomised(attach(model(), method, targets=[f"mid_block.{layer}"]))


@pytest.mark.parametrize(("case", "layer"), PLACES)
def test_their_files_load_and_compute_the_same(case: Case, layer: str, tmp_path: Path) -> None:
    module, whole = made(case, layer)
    expected = run(whole, layer)
    ours = model()
    adapters = load(ours, written(module, layer, tmp_path / "a.safetensors"))
    torch.testing.assert_close(run(ours, layer), expected, rtol=1e-5, atol=1e-5)
    assert (expected - run(model(), layer)).abs().max() > 1e-2, "the adapter changes something"
    own = adapters.methods("default")[f"mid_block.{layer}"]
    assert type(own) is type(case.ours)
    description = adapters.layers[f"mid_block.{layer}"].layer
    settings = {name: pytest.approx(value) for name, value in case.ours.settings(description).items()}
    assert own.settings(description) == settings
    assert own.parameters(description).keys() == case.ours.settled(description, [description]).parameters(description).keys()


@pytest.mark.parametrize(("case", "layer"), PLACES)
def test_our_files_load_there_and_compute_the_same(case: Case, layer: str, tmp_path: Path) -> None:
    adapters = on(layer, case.ours)
    path = tmp_path / "a.safetensors"
    save(adapters, path, format="lycoris")
    state = load_file(path)
    whole = model()
    base = whole.mid_block[layer]  # type: ignore[index]
    if case.loads:
        kind, values = get_module(state, key(layer))
        assert kind is case.theirs
        module = make_module(kind, values, key(layer), base)
        base.forward = module.forward  # LyCORIS' apply_to() of full differences folds the weight in, which its loader has done
    else:
        module = case.theirs(key(layer), base, 1.0, **case.arguments)
        module.load_state_dict({name.partition(".")[2]: value for name, value in state.items()}, strict=False)
        module.apply_to()
    module.eval()
    torch.testing.assert_close(run(whole, layer), run(adapters.model, layer), rtol=1e-5, atol=1e-5)
    assert (run(adapters.model, layer) - run(model(), layer)).abs().max() > 1e-2


@pytest.mark.parametrize(("case", "layer"), PLACES)
def test_a_round_trip_keeps_the_function(case: Case, layer: str, tmp_path: Path) -> None:
    adapters = on(layer, case.ours)
    save(adapters, tmp_path / "a.safetensors", format="lycoris")
    again = model()
    back = load(again, tmp_path / "a.safetensors")
    torch.testing.assert_close(run(again, layer), run(adapters.model, layer), rtol=1e-6, atol=1e-6)
    save(back, tmp_path / "b.safetensors", format="lycoris")
    first, second = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [DiagOFTModule, ButterflyOFTModule])
def test_a_bound_is_applied_once_and_for_all(kind: type[nn.Module], tmp_path: Path) -> None:
    """Alpha is a constraint there: it is kept with 0, none, and the rotation that it left."""
    case = Case(kind, {"lora_dim": 2, "constraint": 0.01}, OFT())
    module, whole = made(case, "linear")
    bounded = run(whole, "linear")
    module.constraint = 0
    assert (run(whole, "linear") - bounded).abs().max() > 1e-2, "the bound acts"
    ours = model()
    path = written(module, "linear", tmp_path / "a.safetensors")
    assert float(load_file(path)[f"{key('linear')}.alpha"]) == pytest.approx(0.01)
    adapters = load(ours, path)
    torch.testing.assert_close(run(ours, "linear"), bounded, rtol=1e-5, atol=1e-5)
    save(adapters, tmp_path / "b.safetensors", format="lycoris")
    assert float(load_file(tmp_path / "b.safetensors")[f"{key('linear')}.alpha"]) == 0


def test_a_middle_tensor_becomes_one_factor(tmp_path: Path) -> None:
    module, whole = made(Case(LoConModule, {"lora_dim": 2, "alpha": 3.0, "use_tucker": True}, LoRA()), "conv")
    path = written(module, "conv", tmp_path / "a.safetensors")
    assert f"{key('conv')}.lora_mid.weight" in load_file(path)
    ours = model()
    adapters = load(ours, path)
    torch.testing.assert_close(run(ours, "conv"), run(whole, "conv"), rtol=1e-5, atol=1e-5)
    assert adapters.methods("default")["mid_block.conv"] == LoRA(rank=2, alpha=3.0)


def test_a_middle_tensor_with_more_rows_than_columns(tmp_path: Path) -> None:
    """Alpha is divided by the rows of down, whatever the rank of the product is."""
    down, mid, up = torch.randn(2, 4, 1, 1), torch.randn(3, 2, 3, 3), torch.randn(8, 3, 1, 1)
    name = key("conv")
    tensors = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": torch.tensor(5.0)}
    save_file({f"{name}.{ending}": value for ending, value in tensors.items()}, tmp_path / "a.safetensors")
    ours = model()
    adapters = load(ours, tmp_path / "a.safetensors")
    base = model().mid_block["conv"]  # type: ignore[index]
    base.weight.add_(torch.einsum("or,rskl,si->oikl", up[:, :, 0, 0], mid, down[:, :, 0, 0]) * 5 / 2)
    torch.testing.assert_close(run(ours, "conv"), base(torch.randn(LAYERS["conv"][1], generator=torch.Generator().manual_seed(9))))
    save(adapters, tmp_path / "b.safetensors", format="lycoris")
    assert "lora_mid" not in "".join(load_file(tmp_path / "b.safetensors"))


def test_dylora_files_are_lora(tmp_path: Path) -> None:
    module, _ = made(Case(DyLoraModule, {"lora_dim": 4, "alpha": 2.0, "block_size": 2}, LoRA()), "linear")
    path = written(module, "linear", tmp_path / "a.safetensors")
    assert read(path).format == "kohya"
    assert read(path).methods["lora_unet"][key("linear")] == LoRA(rank=4, alpha=2.0)


@pytest.mark.parametrize("absent", ["diff_b", "b_norm"])
def test_a_bias_that_did_not_change_may_be_missing(absent: str, tmp_path: Path) -> None:
    name, layer = {"diff_b": ("full", "linear"), "b_norm": ("norm", "norm")}[absent]
    module, whole = made(CASES[name], layer)
    tensors = load_file(written(module, layer, tmp_path / "a.safetensors"))
    change = tensors.pop(f"{key(layer)}.{absent}")
    save_file(tensors, tmp_path / "b.safetensors")
    ours = model()
    load(ours, tmp_path / "b.safetensors")
    shape = (1, -1) if layer == "linear" else (-1,)
    torch.testing.assert_close(run(ours, layer) + change.reshape(shape), run(whole, layer), rtol=1e-5, atol=1e-5)


def test_a_bias_alone_is_bitfit(tmp_path: Path) -> None:
    adapters = on("linear", BitFit())
    save(adapters, tmp_path / "a.safetensors", format="lycoris")
    assert set(load_file(tmp_path / "a.safetensors")) == {f"{key('linear')}.diff_b"}
    ours = model()
    assert type(load(ours, tmp_path / "a.safetensors").methods("default")["mid_block.linear"]) is BitFit
    torch.testing.assert_close(run(ours, "linear"), run(adapters.model, "linear"))


def test_blocks_of_one_feature_change_nothing_or_are_a_gain(tmp_path: Path) -> None:
    """LyCORIS splits a prime number of features into blocks of one."""
    name = key("linear")
    blocks = {f"{name}.oft_blocks": torch.randn(8, 1, 1), f"{name}.alpha": torch.tensor(0.0)}
    other = {f"{key('conv')}.{end}": value for end, value in {"diff": torch.ones(8, 4, 3, 3)}.items()}
    save_file({**blocks, **other}, tmp_path / "a.safetensors")
    assert list(load(model(), tmp_path / "a.safetensors").layers) == ["mid_block.conv"]
    save_file(blocks, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match="nothing that changes a layer"):
        load(model(), tmp_path / "c.safetensors")
    save_file({**blocks, f"{name}.rescale": torch.full((8, 1), 2.0)}, tmp_path / "b.safetensors")
    ours, plain = model(), model()
    load(ours, tmp_path / "b.safetensors")
    bias = plain.mid_block["linear"].bias  # type: ignore[index]
    torch.testing.assert_close(run(ours, "linear") - bias, 2 * (run(plain, "linear") - bias))


def test_one_file_holds_several_methods(tmp_path: Path) -> None:
    """train_norm, for one, writes norms beside LoRA."""
    overrides: dict[str, Method] = {"linear$": DoRA(rank=2), "norm": NormTuning(), "pointwise": LoKr(rank=1, init="random")}
    adapters = randomised(attach(model(), LoRA(rank=2), targets=["conv", "linear", "norm", "pointwise"], overrides=overrides))
    save(adapters, tmp_path / "a.safetensors", format="lycoris", dtype=torch.float16)
    file = read(tmp_path / "a.safetensors")
    assert file.format == "lycoris"
    ours = model()
    load(ours, tmp_path / "a.safetensors")
    for layer in ("conv", "linear", "norm", "pointwise"):
        torch.testing.assert_close(run(ours, layer), run(adapters.model, layer), rtol=1e-2, atol=1e-2)
    assert {str(value.dtype) for value in load_file(tmp_path / "a.safetensors").values()} == {"torch.float16"}


FACTS = {"loha": ("2", "1", {"algo": "loha"}), "ia3": ("None", "None", {"algo": "ia3"}), "dora": ("3", "1", {"algo": "locon"})}


@pytest.mark.parametrize(("case", "facts"), FACTS.items())
def test_metadata_says_what_it_is(case: str, facts: tuple[str, str, dict[str, str]], tmp_path: Path) -> None:
    save(on("linear", CASES[case].ours), tmp_path / "a.safetensors", format="lycoris")
    metadata = read(tmp_path / "a.safetensors").metadata
    assert metadata["ss_network_module"] == "lycoris.kohya"
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"], json.loads(metadata["ss_network_args"])) == facts


def test_plain_lora_is_the_same_file_in_both_forms(tmp_path: Path) -> None:
    adapters = on("linear", CASES["locon"].ours)
    save(adapters, tmp_path / "a.safetensors", format="lycoris")
    save(adapters, tmp_path / "b.safetensors", format="kohya")
    first, second = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for format in ("kohya", "lycoris", None):
        ours = model()
        load(ours, tmp_path / "a.safetensors", format=format)
        torch.testing.assert_close(run(ours, "linear"), run(adapters.model, "linear"), rtol=0, atol=0)


# What has no place


@pytest.mark.parametrize(("kind", "name"), [(GLoRAModule, "GLoRA"), (TLoraModule, "T-LoRA")], ids=["glora", "tlora"])
def test_other_methods_are_named(kind: type[nn.Module], name: str, tmp_path: Path) -> None:
    module = kind(key("linear"), model().mid_block["linear"], 1.0, lora_dim=2, alpha=1.0)  # type: ignore[index]
    refused(written(module, "linear", tmp_path / "a.safetensors"), "adapter-unsupported", name)


@pytest.mark.parametrize("kind", [LohaModule, LokrModule])
def test_a_magnitude_beside_other_methods_is_named(kind: type[nn.Module], tmp_path: Path) -> None:
    module, _ = made(Case(kind, {"lora_dim": 1, "alpha": 1.0, "weight_decompose": True}, LoHa()), "linear")
    refused(written(module, "linear", tmp_path / "a.safetensors"), "adapter-unsupported", "with a dora_scale")


def test_a_magnitude_of_input_features_is_named(tmp_path: Path) -> None:
    module, _ = made(Case(LoConModule, {"lora_dim": 1, "alpha": 1.0, "weight_decompose": True, "wd_on_out": False}, LoHa()), "linear")
    refused(written(module, "linear", tmp_path / "a.safetensors"), "adapter-unsupported", "wd_on_output=False")


def refused(path: Path, code: str, text: str) -> None:
    whole = model()
    with pytest.raises(CheckpointError) as raised:
        load(whole, path)
    assert raised.value.code == code, str(raised.value)
    assert text in str(raised.value)
    assert not any("Adapted" in type(module).__name__ for module in whole.modules())


DAMAGED: dict[str, tuple[str, dict[str, Tensor | None], str, str]] = {
    "dora without down": ("dora", {"lora_down.weight": None}, "adapter-incomplete", "has no lora_down.weight"),
    "loha without a factor": ("loha", {"hada_w2_b": None}, "adapter-incomplete", "has no hada_w2_b"),
    "loha of two ranks": ("loha", {"hada_w1_a": torch.ones(8, 3)}, "adapter-shape", "don't share a rank"),
    "half a core": ("loha", {"hada_t1": torch.ones(2, 2, 1, 1)}, "adapter-shape", "hada_t1 and hada_t2"),
    "lokr without its second": ("lokr", {"lokr_w2_a": None, "lokr_w2_b": None}, "adapter-incomplete", "lokr_w2 nor lokr_w2_a"),
    "half of two factors": ("lokr", {"lokr_w2_b": None}, "adapter-shape", "second matrix"),
    "other sides": ("lokr", {"lokr_w1": torch.ones(3, 3)}, "adapter-shape", "no multiples of outer=(3, 3)"),
    "alpha is a vector": ("loha", {"alpha": torch.ones(2)}, "adapter-shape", "one number was expected"),
    "ia3 without a side": ("ia3", {"on_input": None}, "adapter-incomplete", "has no on_input"),
    "blocks that are not square": ("oft", {"oft_blocks": torch.ones(4, 2, 3)}, "adapter-shape", "oft_blocks is (4, 2, 3)"),
    "stages beyond the blocks": ("boft", {"oft_blocks": torch.ones(5, 4, 2, 2)}, "adapter-shape", "other blocks"),
    "another magnitude": ("dora", {"dora_scale": torch.ones(7, 1)}, "adapter-shape", "dora_scale is (7, 1)"),
    "two methods": ("loha", {"diff": torch.ones(8, 12)}, "adapter-unsupported", "LoHa and full differences in one module"),
    "unknown parameter": ("loha", {"hada_w3": torch.ones(2)}, "adapter-keys", "hada_w3"),
    "another width": ("loha", {"hada_w1_a": torch.ones(9, 2), "hada_w2_a": torch.ones(9, 2)}, "adapter-shape", "first_up is (9, 2)"),
    "an old OFT": ("loha", {"oft_diag": torch.ones(4, 2, 2)}, "adapter-unsupported", "OFT of LyCORIS before"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_refused_and_the_model_stays(kind: str, tmp_path: Path) -> None:
    case, changes, code, text = DAMAGED[kind]
    layer = "linear_long" if kind in ("other sides", "half of two factors", "lokr without its second") else "linear"
    module, _ = made(CASES[case], layer)
    tensors = load_file(written(module, layer, tmp_path / "a.safetensors"))
    for name, value in changes.items():
        if value is None:
            del tensors[f"{key(layer)}.{name}"]
        else:
            tensors[f"{key(layer)}.{name}"] = value
    save_file(tensors, tmp_path / "b.safetensors")
    refused(tmp_path / "b.safetensors", code, text)


@pytest.mark.parametrize(
    ("method", "layer", "text"),
    [
        (HRA(rank=2), "linear", "no place for hra"),
        (AdaLoRA(rank=2), "linear", "no place for adalora"),
        (VeRA(rank=2), "linear", "no place for vera"),
        (WithBias(inner=LoRA(rank=2)), "linear", "no place for with_bias"),
        (LoRA(rank=2, bias=True), "linear", "bias=True"),
        (IA3(), "linear", "scales the weight and not the bias"),
        (OFT(block_size=2), "linear", "on_output=True"),
        (OFT(block_size=2, on_output=True), "linear", "no series"),
        (OFT(block_size=2, on_output=True, exact=True, coft=True), "linear", "bound"),
        (OFT(block_size=4, on_output=True, exact=True), "linear", "2 of 4"),
        (BOFT(block_size=2), "linear", "rotates outputs"),
        (BOFT(block_size=6, on_output=True), "pointwise", None),
        (BOFT(block_size=4, num_factors=1, on_output=True), "pointwise", "3 of 4"),
    ],
    ids=str,
)
def test_what_the_files_have_no_place_for_is_refused(method: Method, layer: str, text: str | None, tmp_path: Path) -> None:
    adapters, path = on(layer, method), tmp_path / "a.safetensors"
    if text is None:  # two blocks of six: one stage, with a second one that changes nothing
        save(adapters, path, format="lycoris")
        ours = model()
        load(ours, path)
        torch.testing.assert_close(run(ours, layer), run(adapters.model, layer), rtol=1e-5, atol=1e-5)
        return
    with pytest.raises(CheckpointError) as raised:
        save(adapters, path, format="lycoris")
    assert raised.value.code == "adapter-unsupported"
    assert text in str(raised.value)
    assert not path.exists()


def test_kohya_stays_lora_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lycoris"):
        save(on("linear", DoRA(rank=2)), tmp_path / "a.safetensors", format="kohya")


def test_shared_rotation_is_written_for_each_block(tmp_path: Path) -> None:
    adapters = on("linear", OFT(block_size=2, on_output=True, exact=True, block_share=True))
    save(adapters, tmp_path / "a.safetensors", format="lycoris")
    assert load_file(tmp_path / "a.safetensors")[f"{key('linear')}.oft_blocks"].shape == (4, 2, 2)
    ours = model()
    load(ours, tmp_path / "a.safetensors")
    torch.testing.assert_close(run(ours, "linear"), run(adapters.model, "linear"))


def test_two_whole_matrices_keep_their_strength(tmp_path: Path) -> None:
    """Readers take it for 1 there, whatever alpha says."""
    adapters = on("linear", LoKr(rank=100, alpha=50.0, init="random"))
    save(adapters, tmp_path / "a.safetensors", format="lycoris")
    ours = model()
    load(ours, tmp_path / "a.safetensors")
    torch.testing.assert_close(run(ours, "linear"), run(adapters.model, "linear"), rtol=1e-5, atol=1e-5)
    state = load_file(tmp_path / "a.safetensors")
    theirs = model()
    module = make_module(*get_module(state, key("linear")), key("linear"), theirs.mid_block["linear"])  # type: ignore[index]
    module.apply_to()
    torch.testing.assert_close(run(theirs, "linear"), run(adapters.model, "linear"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("effective", [False, True])
@pytest.mark.parametrize("layer", ["conv", "line", "linear"])
def test_factors_of_a_high_rank_are_written_whole(layer: str, effective: bool, tmp_path: Path) -> None:
    """LyCORIS has no factors of a rank as large as half a side: its loader would find no place for them."""
    ours = on(layer, LoKr(rank=7, alpha=3.0, first_form="factorised", second_form="factorised", effective_conv=effective))
    save(ours, tmp_path / "a.safetensors", format="lycoris")
    state, whole = load_file(tmp_path / "a.safetensors"), model()
    base = whole.mid_block[layer]  # type: ignore[index]
    kind, values = get_module(state, key(layer))
    make_module(kind, values, key(layer), base).eval().apply_to()
    torch.testing.assert_close(run(whole, layer), run(ours.model, layer), rtol=1e-5, atol=1e-5)
    again = model()
    load(again, tmp_path / "a.safetensors")
    torch.testing.assert_close(run(again, layer), run(ours.model, layer), rtol=1e-5, atol=1e-5)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Negative control: a rotation the other way round is another function."""
    module, whole = made(CASES["oft"], "linear")
    wrong = copy.deepcopy(module.state_dict())
    wrong["oft_blocks"] = wrong["oft_blocks"].mT
    save_file({f"{key('linear')}.{name}": value.contiguous() for name, value in wrong.items()}, tmp_path / "a.safetensors")
    ours = model()
    load(ours, tmp_path / "a.safetensors")
    assert (run(ours, "linear") - run(whole, "linear")).abs().max() > 1e-2
