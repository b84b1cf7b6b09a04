"""PEFT folders of every method: the same file means the same function on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from onegraph import load, save
from onegraph.adapters import Adapters, adapters_of, attach
from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.errors import CheckpointError
from onegraph.methods import BOFT, HRA, IA3, BitFit, Dense, LoRA, Method, NormTuning, WithBias

# PEFT warns of what it adjusts, of saved embeddings and of projections that it leaves out.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class Net(nn.Module):
    """Every kind of layer that PEFT's methods are for, and names that end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.block = nn.ModuleDict({"narrow": nn.Linear(16, 8), "wide": nn.Linear(8, 16, bias=False)})
        self.head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # PEFT's OFT takes every tensor of four axes for images, so only the convolution sees some.
        h = torch.tanh(self.conv(self.table(ids).mT.unflatten(-1, (4, 4)))).flatten(2)
        h = self.norm((h + self.line(h)).mT)
        h = self.block["narrow"](torch.tanh(self.wide(h) + self.block["wide"](h)))
        return self.head(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def ids() -> torch.Tensor:
    return torch.arange(32).reshape(2, 16) % 12


LINEAR = ["wide", "narrow"]
TRAINED = ("lora_", "ia3_", "hada_", "lokr_", "vera_lambda", "oft_", "boft_", "hra_", "miss_", "vblora_", "ln_tuning", "modules_to_save")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        config: Of PEFT.
        settings: Its arguments.
        merged: Whether PEFT is right only once it is merged: its unmerged OFT is wrong on convolutions with a kernel.
        change: What is done to PEFT's model besides random values.
        same_config: Fields that may differ, since they mean the same.
    """

    config: type[peft.PeftConfig]
    settings: dict[str, Any]
    merged: bool = False
    change: Callable[[peft.PeftModel], None] = lambda model: None
    deviation: float = 0.3
    differing: frozenset[str] = field(default_factory=frozenset)


def prune(model: peft.PeftModel) -> None:
    """What AdaLoRA's allocator leaves: some triplets of each layer, none of one."""
    left = {
        "wide": [True, False, True],
        "block.narrow": [False, False, False],
        "block.wide": [True, True, True],
        "conv": [False, True, False],
    }
    pattern = {f"{path}.lora_E": kept for path, kept in left.items()}
    model.peft_config["default"].rank_pattern = pattern
    model.base_model.resize_modules_by_rank_pattern(pattern, "default")
    # Resizing sets the rank that the strength is made with to what is left; loading keeps the first, so that is what a file means.
    for module in model.modules():
        if hasattr(module, "ranknum"):
            module.ranknum["default"].data.fill_(3.0)


def biased(model: peft.PeftModel) -> None:
    """Train the biases that the configuration says are trained."""
    for name, value in model.named_parameters():
        if name.endswith(".bias") and (model.peft_config["default"].bias == "all" or ".base_layer." in name):
            value.data += torch.linspace(-0.5, 0.5, value.numel())


SAVED = {"modules_to_save": ["head"]}

CASES: dict[str, Case] = {
    "dora": Case(peft.LoraConfig, {"target_modules": [*LINEAR, "conv", "table"], "r": 3, "lora_alpha": 5, "use_dora": True}),
    "dora-rslora": Case(
        peft.LoraConfig, {"target_modules": ["wide"], "r": 4, "use_dora": True, "use_rslora": True, "rank_pattern": {"block.wide": 2}}
    ),
    "adalora": Case(peft.AdaLoraConfig, {"target_modules": [*LINEAR, "conv"], "init_r": 3, "lora_alpha": 5, "total_step": 9, "tinit": 2}),
    "adalora-pruned": Case(
        peft.AdaLoraConfig,
        {"target_modules": [*LINEAR, "conv"], "init_r": 3, "total_step": 9},
        change=prune,
        differing=frozenset({"rank_pattern"}),
    ),
    "ia3": Case(peft.IA3Config, {"target_modules": [*LINEAR, "conv"], "feedforward_modules": ["narrow"]}),
    "ia3-on-one-of-two": Case(
        peft.IA3Config, {"target_modules": r"(block\.)?(wide|narrow)|conv", "feedforward_modules": r"block\.wide|conv"}
    ),
    "ln_tuning": Case(peft.LNTuningConfig, {"target_modules": ["norm", "head.1"]}),
    "loha": Case(
        peft.LoHaConfig,
        {"target_modules": [*LINEAR, "conv", "line"], "r": 2, "alpha": 3, "rank_pattern": {"narrow": 3}, "alpha_pattern": {"conv": 5}},
    ),
    "loha-effective": Case(
        peft.LoHaConfig,
        {"target_modules": ["wide", "conv", "line"], "r": 2, "use_effective_conv2d": True, "rank_dropout": 0.1, "module_dropout": 0.2},
    ),
    "lokr": Case(peft.LoKrConfig, {"target_modules": [*LINEAR, "conv", "line"], "r": 1, "alpha": 3}),
    "lokr-full": Case(peft.LoKrConfig, {"target_modules": [*LINEAR, "conv", "line"], "r": 8, "alpha": 3, "init_weights": "lycoris"}),
    "lokr-both": Case(
        peft.LoKrConfig,
        {
            "target_modules": [*LINEAR, "conv"],
            "r": 1,
            "decompose_both": True,
            "decompose_factor": 4,
            "rank_dropout": 0.1,
            "rank_dropout_scale": True,
        },
    ),
    # Not on a Conv1d: there PEFT's own Kronecker product fails.
    "lokr-effective": Case(
        peft.LoKrConfig,
        {"target_modules": ["conv"], "r": 3, "decompose_factor": 1, "use_effective_conv2d": True, "init_weights": False},
    ),
    "vera": Case(peft.VeraConfig, {"target_modules": LINEAR, "r": 4, "d_initial": 0.3, "vera_dropout": 0.1}),
    "vera-by-key": Case(peft.VeraConfig, {"target_modules": LINEAR, "r": 4, "projection_prng_key": 7, "save_projection": False}),
    "oft": Case(peft.OFTConfig, {"target_modules": [*LINEAR, "table"], "oft_block_size": 4}),
    "oft-on-conv": Case(peft.OFTConfig, {"target_modules": ["conv", "wide"], "oft_block_size": 4}, merged=True, deviation=0.1),
    "oft-exact": Case(peft.OFTConfig, {"target_modules": LINEAR, "r": 2, "oft_block_size": 0, "use_cayley_neumann": False}),
    "oft-bounded": Case(
        peft.OFTConfig,
        {"target_modules": LINEAR, "oft_block_size": 4, "coft": True, "eps": 0.2, "block_share": True, "num_cayley_neumann_terms": 6},
    ),
    "oft-adjusted": Case(peft.OFTConfig, {"target_modules": LINEAR, "oft_block_size": 9}, differing=frozenset({"oft_block_size"})),
    "boft": Case(peft.BOFTConfig, {"target_modules": [*LINEAR, "conv"], "boft_block_size": 4}),
    "boft-by-number": Case(peft.BOFTConfig, {"target_modules": LINEAR, "boft_block_size": 0, "boft_block_num": 2}),
    "hra": Case(peft.HRAConfig, {"target_modules": [*LINEAR, "conv"], "r": 3}),
    "hra-gram-schmidt": Case(peft.HRAConfig, {"target_modules": LINEAR, "r": 4, "apply_GS": True}),
    "miss": Case(peft.MissConfig, {"target_modules": LINEAR, "r": 3, "miss_dropout": 0.1}),
    "miss-bat": Case(peft.MissConfig, {"target_modules": LINEAR, "r": 4, "init_weights": "bat"}),
    "miss-mini": Case(peft.MissConfig, {"target_modules": LINEAR, "r": 4, "init_weights": "mini", "mini_r": 2}),
    "vblora": Case(peft.VBLoRAConfig, {"target_modules": LINEAR, "r": 2, "num_vectors": 6, "vector_length": 4, "topk": 3}),
    "vblora-topk": Case(
        peft.VBLoRAConfig,
        {"target_modules": LINEAR, "r": 2, "num_vectors": 300, "vector_length": 4, "topk": 2, "save_only_topk_weights": True},
    ),
    "lora-and-head": Case(peft.LoraConfig, {"target_modules": LINEAR, "r": 2, **SAVED}),
    "vera-and-head": Case(peft.VeraConfig, {"target_modules": LINEAR, "r": 4, **SAVED}),
    "ia3-and-norm": Case(peft.IA3Config, {"target_modules": LINEAR, "feedforward_modules": [], "modules_to_save": ["norm", "table"]}),
    "lora-all-biases": Case(peft.LoraConfig, {"target_modules": [*LINEAR, "conv"], "r": 2, "lora_alpha": 3, "bias": "all"}, change=biased),
    "lora-own-biases": Case(peft.LoraConfig, {"target_modules": ["narrow", "conv"], "r": 2, "bias": "lora_only"}, change=biased),
    "boft-all-biases": Case(peft.BOFTConfig, {"target_modules": [*LINEAR, "conv"], "bias": "all", **SAVED}, change=biased),
    "hra-all-biases": Case(peft.HRAConfig, {"target_modules": LINEAR, "bias": "all", "modules_to_save": ["head.2"]}, change=biased),
    "vblora-own-biases": Case(
        peft.VBLoRAConfig, {"target_modules": ["narrow"], "num_vectors": 6, "vector_length": 4, "bias": "vblora_only"}, change=biased
    ),
    "ln_tuning-and-head": Case(peft.LNTuningConfig, {"target_modules": ["norm"], "modules_to_save": ["head.0", "line"]}),
}


def peft_model(case: Case, base: nn.Module | None = None) -> peft.PeftModel:
    model = peft.get_peft_model(base or net(), case.config(**case.settings))
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if any(mark in name for mark in TRAINED) and "ranknum" not in name:
            value.data += torch.randn(value.shape, generator=generator) * case.deviation
    case.change(model)
    return model.eval()


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(ids())


def expected(model: peft.PeftModel, case: Case) -> torch.Tensor:
    if case.merged:
        model.merge_adapter()
    found = output(model)
    if case.merged:
        model.unmerge_adapter()
    return found


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (wanted - output(net())).abs().max() > 1e-2, "the adapter must do something"


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return {name: sorted(value) if isinstance(value, list) and name.endswith("modules") else value for name, value in config.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_means_the_same_in_both_directions(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    theirs = peft_model(case)
    wanted = expected(theirs, case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(net(), tmp_path / "theirs")
    assert_near(output(ours.model), wanted)

    save(ours, tmp_path / "ours", format="peft")
    again = peft.PeftModel.from_pretrained(net(), tmp_path / "ours").eval()
    assert_near(expected(again, case), wanted)
    first, second = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("theirs", "ours"))
    # With bias="all" PEFT also saves the module that a trained copy stands for, and the copy twice.
    first = {key: value for key, value in first.items() if ".original_module." not in key and ".modules_to_save." not in key}
    assert first.keys() == second.keys()
    for key in first:
        if not first[key].numel():
            continue  # AdaLoRA that left nothing: a triplet of 0 here
        assert first[key].shape == second[key].shape, key
        assert first[key].dtype == second[key].dtype, key
        torch.testing.assert_close(second[key], first[key], rtol=1e-6, atol=1e-6, msg=key)
    configs = [config_of(tmp_path / side) for side in ("theirs", "ours")]
    free = {"target_modules", "feedforward_modules", "rank_pattern", "alpha_pattern", "r", "alpha", "lora_alpha", *case.differing}
    assert {key: value for key, value in configs[0].items() if key not in free} == {
        key: value for key, value in configs[1].items() if key not in free
    }
    assert configs[0].keys() == configs[1].keys()


@pytest.mark.parametrize("name", CASES)
def test_every_method_goes_through_our_own_format_unchanged(tmp_path: Path, name: str) -> None:
    peft_model(CASES[name]).save_pretrained(tmp_path / "theirs")
    ours = load(net(), tmp_path / "theirs")
    save(ours, tmp_path / "first.safetensors")
    again = load(net(), tmp_path / "first.safetensors")
    assert again.methods("default") == ours.methods("default")
    assert torch.equal(output(again.model), output(ours.model))
    save(again, tmp_path / "second.safetensors")
    assert (tmp_path / "first.safetensors").read_bytes() == (tmp_path / "second.safetensors").read_bytes()
    for folder in ("a", "b"):
        save(again if folder == "b" else ours, tmp_path / folder, format="peft")
    weights = [(tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("a", "b")]
    if not CASES[name].settings.get("save_only_topk_weights") and CASES[name].settings.get("save_projection", True):
        assert weights[0] == weights[1]


# Configurations


@pytest.mark.parametrize("peft_type", FORMS)
def test_every_field_of_peft_is_known_with_its_default(peft_type: str) -> None:
    kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(peft_type)]
    theirs = kind(**({"total_step": 1} if peft_type == "ADALORA" else {})).to_dict()
    ours = FORMS[peft_type].defaults
    assert ours.keys() == theirs.keys()
    own = {"inference_mode": True, "peft_version": "0.21.2", "total_step": ours.get("total_step")}  # as they are saved
    assert ours == {key: own.get(key, value) for key, value in theirs.items()}


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


WRONG: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "adalora": (
        "adalora",
        {"init_r": 0, "rank_pattern": {"wide.lora_E": [1]}},
        "adapter-config",
        ["init_r = 0", "rank_pattern['wide.lora_E']"],
    ),
    "adalora-rank": ("adalora", {"init_r": 5}, "adapter-config", ["block.narrow: init_r is 5"]),
    "adalora-pattern": ("adalora-pruned", {"rank_pattern": None}, "adapter-config", ["block.narrow: init_r is 3"]),
    "ia3": ("ia3", {"feedforward_modules": 3}, "adapter-config", ["feedforward_modules = 3"]),
    "loha": ("loha", {"rank_dropout": 1, "alpha": "x"}, "adapter-config", ["rank_dropout = 1", "alpha = 'x'"]),
    "loha-rank": ("loha", {"rank_pattern": {}}, "adapter-config", ["block.narrow: r is 2"]),
    "lokr": (
        "lokr",
        {"init_weights": "other", "decompose_factor": 0},
        "adapter-config",
        ["init_weights = 'other'", "decompose_factor = 0"],
    ),
    "vera": ("vera", {"d_initial": None, "bias": "lora_only"}, "adapter-config", ["d_initial = None", "bias = 'lora_only'"]),
    "vera-projection": ("vera-by-key", {"save_projection": True}, "adapter-incomplete", ["of the projections there is: none"]),
    "oft": ("oft", {"coft": 1, "eps": "x"}, "adapter-config", ["coft = 1", "eps = 'x'"]),
    "boft": ("boft", {"boft_block_size": 8}, "adapter-config", ["boft_block_size is 8"]),
    "hra": ("hra", {"r": 2}, "adapter-config", ["block.narrow: r is 2"]),
    "miss": ("miss", {"init_weights": "bat"}, "adapter-config", ["init_weights is 'bat'"]),
    "vblora": ("vblora", {"num_vectors": 7}, "adapter-config", ["the bank has shape (6, 4)"]),
    "vblora-topk": ("vblora", {"topk": 0}, "adapter-config", ["topk = 0"]),
    "another type": ("ln_tuning", {"peft_type": "ROAD"}, "adapter-unsupported", ["'ROAD'", "ADALORA, BOFT, HRA, IA3"]),
    "a type that is written otherwise": ("ln_tuning", {"peft_type": "LNTUNING"}, "adapter-unsupported", ["'LN_TUNING'"]),
    "the type of other tensors": ("hra", {"peft_type": "MISS"}, "adapter-keys", ["holds HRA tensors"]),
    "a method that can't be": ("vblora", {"topk": 9}, "adapter-config", ["topk=9 is more than num_vectors=6"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_configuration_that_is_wrong_is_an_error_that_names_the_fields(tmp_path: Path, name: str) -> None:
    case, fields, code, what = WRONG[name]
    peft_model(CASES[case]).save_pretrained(tmp_path)
    load(net(), tmp_path)
    rewrite(tmp_path, **fields)
    model = net()
    with pytest.raises(CheckpointError) as raised:
        load(model, tmp_path)
    assert raised.value.code == code, str(raised.value)
    for text in what:
        assert text in str(raised.value)
    assert adapters_of(model) is None


def test_what_describes_the_training_is_written_again(tmp_path: Path) -> None:
    peft_model(
        Case(peft.AdaLoraConfig, {"target_modules": ["wide"], "init_r": 3, "target_r": 2, "tinit": 4, "total_step": 99})
    ).save_pretrained(tmp_path / "theirs")
    save(load(net(), tmp_path / "theirs"), tmp_path / "ours", format="peft")
    config = config_of(tmp_path / "ours")
    assert (config["target_r"], config["tinit"], config["total_step"]) == (2, 4, 99)


@pytest.mark.parametrize("missing", ["boft_s", "hada_w2_b", "lokr_w1", "lora_E", "vblora_vector_bank", "vera_B"])
def test_a_layer_without_one_of_its_tensors_is_incomplete(tmp_path: Path, missing: str) -> None:
    case = {"boft_s": "boft", "hada_w2_b": "loha", "lokr_w1": "lokr", "lora_E": "adalora", "vblora_vector_bank": "vblora", "vera_B": "vera"}
    peft_model(CASES[case[missing]]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if not key.endswith(missing)}, path)
    with pytest.raises(CheckpointError) as raised:
        load(net(), tmp_path)
    assert raised.value.code == "adapter-incomplete"


# Generations of OFT


def old_folder(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    folder.mkdir()
    save_file({f"base_model.model.{key}": value for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "OFT", "target_modules": ["wide"], "coft": False, "eps": 6e-5, "block_share": False, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def cayley(blocks: torch.Tensor) -> torch.Tensor:
    skew = (blocks - blocks.mT) / 2
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
    return torch.block_diag(*((eye - block) @ torch.linalg.inv(eye + block) for block in skew))


def with_weight(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The output of the model with another weight, computed in float64."""
    model = net().double()
    module = model.get_submodule(path)
    module.weight.data = change(module.weight.data)
    return output(model).float()


@pytest.mark.parametrize(("path", "num_blocks", "share"), [("wide", 4, False), ("wide", 4, True), ("wide", 3, False), ("conv", 2, False)])
def test_oft_up_to_0_13_rotates_the_output(tmp_path: Path, path: str, num_blocks: int, share: bool) -> None:
    """With 3 blocks of 16 outputs, 6 each, the last 2 rows and columns of the rotation are cut off."""
    num_outputs = net().get_submodule(path).weight.shape[0]
    size = -(-num_outputs // num_blocks)
    blocks = torch.randn(1 if share else num_blocks, size, size) * 0.5
    folder = old_folder(tmp_path / "a", {f"{path}.oft_r": blocks}, r=num_blocks, block_share=share)
    rotation = cayley(blocks.double().expand(num_blocks, -1, -1))[:num_outputs, :num_outputs]
    wanted = with_weight(path, lambda weight: (rotation.T @ weight.flatten(1)).reshape(weight.shape))
    ours = load(net(), folder)
    assert_near(output(ours.model), wanted)
    assert ours.methods("default")[path].name == ("dense" if num_blocks == 3 else "oft")


@pytest.mark.parametrize("path", ["wide", "conv"])
@pytest.mark.parametrize("bounded", [False, True])
def test_oft_0_14_and_0_15_rotates_the_input_and_scales(tmp_path: Path, path: str, bounded: bool) -> None:
    weight = net().get_submodule(path).weight
    num_columns = weight[0].numel()
    blocks = torch.randn(num_columns // 4, 4, 4)
    gain = 1 + 0.3 * torch.randn(weight.shape[0], 1)
    folder = old_folder(tmp_path / "a", {f"{path}.oft_r": blocks, f"{path}.oft_s": gain}, r=0, oft_block_size=4, coft=bounded, eps=0.01)
    acting = blocks.double()
    if bounded:
        limit = 0.01 * (-(-weight.shape[0] // len(blocks))) ** 2 / len(blocks) ** 0.5
        acting = torch.stack([block * min(1.0, limit / block.norm()) for block in acting])
    rotation = cayley(acting)
    wanted = with_weight(path, lambda weight: (gain * (weight.flatten(1) @ rotation.T)).reshape(weight.shape))
    assert_near(output(load(net(), folder).model), wanted)


def test_a_short_series_of_oft_before_0_18_ends_where_it_did(tmp_path: Path) -> None:
    vectors = torch.randn(2, 6) * 0.3
    fields = {"r": 0, "oft_block_size": 4, "use_cayley_neumann": True, "num_cayley_neumann_terms": 3, "peft_version": "0.17.1"}
    folder = old_folder(tmp_path / "a", {"wide.oft_R.weight": vectors, "block.wide.oft_R.weight": torch.zeros(2, 6)}, **fields)
    rows, columns = torch.triu_indices(4, 4, 1)
    skew = torch.zeros(2, 4, 4, dtype=torch.float64)
    skew[:, rows, columns] = vectors.double()
    rotation = torch.block_diag(*(torch.eye(4) + 2 * q + 2 * q @ q for q in skew - skew.mT))
    assert_near(output(load(net(), folder).model), with_weight("wide", lambda weight: weight @ rotation.T))


@pytest.mark.parametrize("version", [None, "0.17.1", "0.18.0", "0.21.2"])
def test_the_series_of_oft_before_0_18_had_its_last_term_twice(tmp_path: Path, version: str | None) -> None:
    vectors = torch.randn(2, 6) * 0.3
    named = {} if version is None else {"peft_version": version}
    fields = {"r": 0, "oft_block_size": 4, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5, **named}
    folder = old_folder(tmp_path / "a", {"wide.oft_R.weight": vectors, "block.wide.oft_R.weight": torch.zeros(2, 6)}, **fields)
    rows, columns = torch.triu_indices(4, 4, 1)
    skew = torch.zeros(2, 4, 4, dtype=torch.float64)
    skew[:, rows, columns] = vectors.double()
    skew = skew - skew.mT
    last = 1 if version in ("0.18.0", "0.21.2") else 2
    rotation = torch.block_diag(*(torch.eye(4) + 2 * q + 2 * q @ q + 2 * q @ q @ q + last * q @ q @ q @ q for q in skew))
    ours = load(net(), folder)
    assert_near(output(ours.model), with_weight("wide", lambda weight: weight @ rotation.T))
    if last == 1:
        save(ours, tmp_path / "again", format="peft")
        assert_near(output(peft.PeftModel.from_pretrained(net(), tmp_path / "again").eval()), output(ours.model))
    else:
        with pytest.raises(CheckpointError, match=r"0\.16 and 0\.17") as raised:
            save(ours, tmp_path / "again", format="peft")
        assert raised.value.code == "adapter-unsupported"


def test_the_stages_of_boft_are_those_of_the_tensors(tmp_path: Path) -> None:
    """PEFT without its CUDA extension has one stage whatever the configuration says; and a file of two stages is read as that."""
    theirs = peft_model(Case(peft.BOFTConfig, {"target_modules": ["narrow"], "boft_block_size": 4, "boft_n_butterfly_factor": 2}))
    theirs.save_pretrained(tmp_path)
    assert config_of(tmp_path)["boft_n_butterfly_factor"] == 2
    assert_near(output(load(net(), tmp_path).model), output(theirs))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.block.narrow.boft_R"
    assert tensors[key].shape == (1, 4, 4, 4)
    save_file({**tensors, key: torch.cat([tensors[key], torch.zeros_like(tensors[key])])}, path)
    ours = load(net(), tmp_path)
    assert ours.methods("default")["block.narrow"] == BOFT(block_size=4, num_factors=2)
    assert_near(output(ours.model), output(theirs))


# Weights that files hold whole


def test_a_module_trained_whole_takes_the_files_values_exactly(tmp_path: Path) -> None:
    theirs = peft_model(CASES["lora-and-head"])
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.head.0.weight"]
    ours = load(net(), tmp_path)
    layer = ours.layers["head.0"]
    new = layer.base_layer.weight + ours.tensors("default")["head.0"]["weight_difference"]
    assert (new - saved).abs().max() <= torch.finfo(torch.float32).eps * saved.abs().max()
    ours.use(None)
    assert torch.equal(output(ours.model), output(net()))


def test_modules_keep_the_names_that_they_were_saved_under(tmp_path: Path) -> None:
    peft_model(CASES["lora-and-head"]).save_pretrained(tmp_path / "theirs")
    save(load(net(), tmp_path / "theirs"), tmp_path / "ours", format="peft")
    assert config_of(tmp_path / "ours")["modules_to_save"] == ["head"]


def test_an_adapter_of_several_methods_made_here_is_written_as_modules_to_save(tmp_path: Path) -> None:
    ours = attach(net(), LoRA(rank=2), targets=["narrow"], overrides=None, also={"head": Dense(), "norm": NormTuning()})
    for value in ours.parameters().values():
        value.data += torch.randn(value.shape) * 0.1
    save(ours, tmp_path / "a", format="peft")
    assert config_of(tmp_path / "a")["modules_to_save"] == ["head.0", "head.1", "head.2", "norm"]
    assert_near(output(peft.PeftModel.from_pretrained(net(), tmp_path / "a").eval()), output(ours.model))


def test_what_a_folder_has_no_place_for_is_an_error(tmp_path: Path) -> None:
    cases: list[tuple[Adapters, str]] = [
        (attach(net(), LoRA(rank=2), targets=LINEAR, also={"conv": HRA(rank=2)}), "no place for hra"),
        (attach(net(), Dense(), targets=["head.0"]), "no type for an adapter of dense alone"),
        (attach(net(), HRA(rank=2), targets=["line"]), "line (Conv1d)"),
        (attach(net(), HRA(rank=2), targets=["wide"], overrides={"block.wide": HRA(rank=4)}), "one r for all layers"),
        (attach(net(), LoRA(rank=2), targets=["wide"], overrides={"^wide": Dense()}), "would also mean block.wide"),
        (attach(net(), IA3(), targets=["narrow"], also={"conv": BitFit()}), "no place for bitfit"),
    ]
    for adapters, what in cases:
        with pytest.raises(CheckpointError) as raised:
            save(adapters, tmp_path / "a", format="peft")
        assert raised.value.code == "adapter-unsupported"
        assert what in str(raised.value)
        assert not (tmp_path / "a").exists()


class Attention(nn.Module):
    """Two attentions and a transposed Linear, as models of vision and language have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2, batch_first=True)
        self.turned = Conv1D(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.turned(x + self.second(x, x, x, need_weights=False)[0])


def attention() -> Attention:
    torch.manual_seed(0)
    return Attention().eval()


OTHER_LAYERS: dict[str, Case] = {
    "attention": Case(peft.LoraConfig, {"target_modules": ["first", "second"], "r": 2, "rank_pattern": {"second": 3}}),
    "lora": Case(peft.LoraConfig, {"target_modules": ["turned"], "r": 2}),
    "dora": Case(peft.LoraConfig, {"target_modules": ["turned"], "r": 2, "use_dora": True}),
    "adalora": Case(peft.AdaLoraConfig, {"target_modules": ["turned"], "init_r": 2, "total_step": 1}),
    "ia3": Case(peft.IA3Config, {"target_modules": ["turned"], "feedforward_modules": []}),
    "ia3-on-input": Case(peft.IA3Config, {"target_modules": ["turned"], "feedforward_modules": ["turned"]}),
    "vera": Case(peft.VeraConfig, {"target_modules": ["turned"], "r": 4}),
    "vblora": Case(peft.VBLoRAConfig, {"target_modules": ["turned"], "num_vectors": 6, "vector_length": 4}),
    "lora-and-turned": Case(peft.LoraConfig, {"target_modules": ["first"], "modules_to_save": ["turned"]}),
    "lora-and-attention": Case(peft.LoraConfig, {"target_modules": ["turned"], "modules_to_save": ["first"]}),
    "attention-biases": Case(peft.LoraConfig, {"target_modules": ["first"], "bias": "all"}, change=biased),
    "attention-own-biases": Case(peft.LoraConfig, {"target_modules": ["first"], "bias": "lora_only"}, change=biased),
}


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_attentions_and_transposed_layers(tmp_path: Path, name: str) -> None:
    case = OTHER_LAYERS[name]
    x = torch.randn(2, 5, 8)
    theirs = peft_model(case, attention())
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = theirs(x).detach()
    assert (wanted - attention()(x)).abs().max() > 1e-2
    ours = load(attention(), tmp_path / "theirs")
    torch.testing.assert_close(ours.model(x).detach(), wanted, rtol=1e-5, atol=1e-5)
    save(ours, tmp_path / "ours", format="peft")
    again = peft.PeftModel.from_pretrained(attention(), tmp_path / "ours").eval()
    torch.testing.assert_close(again(x).detach(), wanted, rtol=1e-5, atol=1e-5)
    first, second = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("theirs", "ours"))
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(second[key], first[key], rtol=1e-6, atol=1e-6, msg=key)
    configs = [config_of(tmp_path / side) for side in ("theirs", "ours")]
    assert configs[0].get("fan_in_fan_out") == configs[1].get("fan_in_fan_out")


@pytest.mark.parametrize("method", [Dense(), BitFit(), WithBias(inner=LoRA(rank=2))], ids=lambda method: method.name)
def test_an_attention_trained_whole_or_its_biases(tmp_path: Path, method: Method) -> None:
    """PEFT never trains the bias of the input projections; it takes one from a file all the same."""
    projections = ["first", "first.out_proj"]
    ours = attach(attention(), LoRA(rank=2), targets=["turned"], also=dict.fromkeys(projections, method))
    for value in ours.parameters().values():
        value.data += torch.linspace(-0.5, 0.5, value.numel()).view_as(value)
    x = torch.randn(2, 5, 8)
    wanted = ours.model(x).detach()
    assert (wanted - attention()(x)).abs().max() > 1e-2
    save(ours, tmp_path / "a", format="peft")
    for again in (peft.PeftModel.from_pretrained(attention(), tmp_path / "a").eval(), load(attention(), tmp_path / "a").model):
        torch.testing.assert_close(again(x).detach(), wanted, rtol=1e-5, atol=1e-5)


def test_weights_of_the_base_are_not_compared_with_merged_ones(tmp_path: Path) -> None:
    peft_model(CASES["lora-and-head"]).save_pretrained(tmp_path / "a")
    ours = load(net(), tmp_path / "a")
    ours.merge()
    for action in (lambda: save(ours, tmp_path / "b", format="peft"), lambda: load(ours.model, tmp_path / "a", name="other")):
        with pytest.raises(CheckpointError) as raised:
            action()
        assert raised.value.code == "adapter-merged"
    ours.unmerge()
    save(ours, tmp_path / "b", format="peft")
