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

from onegraph import load, save
from onegraph.adapters import Adapters, adapters_of
from onegraph.checkpoint import read
from onegraph.errors import CheckpointError

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
    "lokr-effective": Case(
        peft.LoKrConfig, {"target_modules": ["conv", "line"], "r": 1, "use_effective_conv2d": True, "init_weights": False}
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
    "vblora-own-biases": Case(
        peft.VBLoRAConfig, {"target_modules": ["narrow"], "num_vectors": 6, "vector_length": 4, "bias": "vblora_only"}, change=biased
    ),
    "ln_tuning-and-head": Case(peft.LNTuningConfig, {"target_modules": ["norm"], "modules_to_save": ["head.0", "line"]}),
}


def peft_model(case: Case) -> peft.PeftModel:
    model = peft.get_peft_model(net(), case.config(**case.settings))
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if any(mark in name for mark in TRAINED) and "ranknum" not in name:
            value.data += torch.randn(value.shape, generator=generator) * case.deviation
    case.change(model)
    return model.eval()


def output(model: nn.Module) -> torch.Tensor:
    return model(ids()).detach()  # without gradients PEFT's LoKr fails inside torch.kron


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
