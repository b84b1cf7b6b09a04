"""Optimizers by name: which class comes out, with which groups and arguments, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.diffusion.configuration import OptimizerSettings
from onegraph.training.diffusion.network import block_of
from onegraph.training.diffusion.parameter_groups import parameter_groups
from onegraph.training.optimizers import (
    OPTIMIZERS,
    before_saving,
    before_training,
    find_optimizer,
    make_optimizer,
    optimizer_problems,
)

# dadaptation is not among the test requirements; the paged ones need CUDA
HERE = [name for name, entry in OPTIMIZERS.items() if not entry.path.startswith("dadaptation") and not entry.needs_cuda]


def groups_of(settings: OptimizerSettings, *parameters: nn.Parameter) -> list[dict[str, Any]]:
    return [{"params": list(parameters), "lr": settings.unet_rate, "name": "unet"}]


def problems(**settings: Any) -> list[OnegraphError]:
    return list(optimizer_problems(OptimizerSettings(**settings), str))


@pytest.mark.parametrize("name", HERE)
def test_each_optimizer_goes_downhill_and_resumes(name: str) -> None:
    settings = OptimizerSettings(name=name, learning_rate=1.0 if OPTIMIZERS[name].one_rate else 1e-2)
    if name == "Adafactor":
        settings = OptimizerSettings(name=name)
    target = torch.randn(64, 128)

    def run(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int) -> None:
        before_training(optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            (weight - target).square().mean().backward()
            optimizer.step()

    weight = nn.Parameter(torch.randn(64, 128))
    start = float((weight.detach() - target).square().mean())
    optimizer = make_optimizer(settings, groups_of(settings, weight))
    run(optimizer, weight, 3)
    before_saving(optimizer)
    before_training(optimizer)
    saved_weight, saved = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    other_weight = nn.Parameter(saved_weight.clone())
    other = make_optimizer(settings, groups_of(settings, other_weight))
    other.load_state_dict(saved)
    run(optimizer, weight, 2)
    run(other, other_weight, 2)
    assert torch.equal(weight, other_weight), "a resumed optimizer goes the same way, bit for bit"
    before_saving(optimizer)
    assert float((weight.detach() - target).square().mean()) < start


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdamW", "torch.optim.adamw.AdamW"),
        ("adamw8bit", "bitsandbytes.optim.adamw.AdamW8bit"),
        ("LION", "lion_pytorch.lion_pytorch.Lion"),
        ("SGDNesterov8bit", "bitsandbytes.optim.sgd.SGD8bit"),
        ("Adafactor", "transformers.optimization.Adafactor"),
        ("Prodigy", "prodigyopt.prodigy.Prodigy"),
        ("AdamWScheduleFree", "schedulefree.adamw_schedulefree.AdamWScheduleFree"),
        ("torch.optim.RAdam", "torch.optim.radam.RAdam"),
        ("bitsandbytes.optim.LAMB8bit", "bitsandbytes.optim.lamb.LAMB8bit"),
    ],
)
def test_the_class_of_a_name(name: str, expected: str) -> None:
    settings = OptimizerSettings(name=name)
    optimizer = make_optimizer(settings, groups_of(settings, nn.Parameter(torch.zeros(2, 2))))
    assert f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" == expected


def test_the_names_of_torch_are_all_there() -> None:
    no_closure = {"LBFGS", "SparseAdam", "Optimizer"}
    torchs = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - no_closure
    assert {"Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adagrad", "AdamW"} <= torchs
    assert all(find_optimizer(name).path == f"torch.optim.{name}" for name in ("RAdam", "SGD", "NAdam"))


def test_arguments_reach_the_optimizer() -> None:
    settings = OptimizerSettings(arguments=("betas=0.5,0.6", "weight_decay=0.25", "amsgrad=True"))
    optimizer = make_optimizer(settings, groups_of(settings, nn.Parameter(torch.zeros(2))))
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    assert (optimizer.defaults["weight_decay"], optimizer.defaults["amsgrad"]) == (0.25, True)


def test_nesterov_has_momentum_unless_told_otherwise() -> None:
    plain, told = OptimizerSettings(name="SGDNesterov"), OptimizerSettings(name="SGDNesterov", arguments=("momentum=0.5",))
    made = [make_optimizer(settings, groups_of(settings, nn.Parameter(torch.zeros(2)))) for settings in (plain, told)]
    assert [(optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) for optimizer in made] == [(0.9, True), (0.5, True)]


def test_default_rates() -> None:
    assert OptimizerSettings().unet_rate == 1e-4
    assert OptimizerSettings(name="Prodigy").unet_rate == OptimizerSettings(name="DAdaptAdam").unet_rate == 1.0
    both = OptimizerSettings(learning_rate=1e-3, text_encoder_lr=1e-5)
    assert (both.unet_rate, both.text_encoder_rate) == (1e-3, 1e-5)


# Refused, each before there is a model

REFUSED = [
    pytest.param({"name": "AdmW"}, "unknown-optimizer", "AdamW", id="misspelt"),
    pytest.param({"name": "DAdaptation"}, "missing-package", "pip install dadaptation", id="package"),
    pytest.param({"name": "no_such_package.Thing"}, "missing-package", "no_such_package", id="dotted-package"),
    pytest.param({"name": "torch.optim.RAdm"}, "unknown-class", "RAdam", id="dotted-class"),
    pytest.param({"arguments": ("weight_deca=1",)}, "bad-argument", "weight_decay", id="argument-name"),
    pytest.param({"arguments": ("lr=1",)}, "bad-argument", "leave it out", id="argument-of-ours"),
    pytest.param({"arguments": ("weight_decay",)}, "bad-argument", "name=value", id="no-value"),
    pytest.param({"arguments": ("weight_decay=1 + ",)}, "bad-argument", "weight_decay=0.01", id="no-literal"),
    pytest.param({"arguments": ("eps=1", "eps=2")}, "bad-argument", "keep one", id="twice"),
    pytest.param({"name": "Prodigy", "unet_lr": 0.5, "text_encoder_lr": 1.0}, "learning-rates", "leave it out", id="one-rate"),
    pytest.param({"name": "Prodigy", "loraplus_lr_ratio": 4.0}, "learning-rates", "leave it out", id="one-rate-loraplus"),
    pytest.param({"name": "Adafactor", "unet_lr": 1e-4}, "learning-rates", "relative_step=False", id="relative-step"),
]


@pytest.mark.parametrize(("settings", "code", "hint"), REFUSED)
def test_what_is_refused(settings: dict[str, Any], code: str, hint: str) -> None:
    found = problems(**settings)
    assert {problem.code for problem in found} == {code}
    assert hint in str(found[0])
    with pytest.raises(OnegraphError):
        make_optimizer(OptimizerSettings(**settings), groups_of(OptimizerSettings(), nn.Parameter(torch.zeros(2))))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "Prodigy", "unet_lr": 1.0, "text_encoder_lr": 1.0},
        {"name": "Adafactor", "unet_lr": 1e-4, "arguments": ("relative_step=False", "scale_parameter=False")},
        {"name": "AdamW", "unet_lr": 1e-4, "loraplus_lr_ratio": 16.0},
    ],
    ids=["equal-rates", "adafactor-with-a-rate", "loraplus"],
)
def test_what_is_allowed(settings: dict[str, Any]) -> None:
    assert problems(**settings) == []


def test_all_wrong_arguments_at_once() -> None:
    assert len(problems(arguments=("weight_deca=1", "beta=2"))) == 2


def test_a_value_that_the_library_refuses() -> None:
    settings = OptimizerSettings(arguments=("betas=3,4",))
    with pytest.raises(ConfigurationError, match="betas=3,4") as raised:
        make_optimizer(settings, groups_of(settings, nn.Parameter(torch.zeros(2))))
    assert raised.value.code == "bad-argument"


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit"])
def test_paged_optimizers_need_cuda(name: str) -> None:
    settings = OptimizerSettings(name=name)
    with pytest.raises(ConfigurationError) as raised:
        make_optimizer(settings, groups_of(settings, nn.Parameter(torch.zeros(2))))
    assert raised.value.code == "optimizer-needs-cuda"
    offered = raised.value.hint.split()[1]
    assert not find_optimizer(offered).needs_cuda


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigurationError) as raised:
        make_optimizer(OptimizerSettings(), [])
    assert raised.value.code == "nothing-to-train"


# Groups


def parameters() -> dict[str, dict[str, nn.Parameter]]:
    unet = ("down_blocks.0.attentions.0.proj_in", "mid_block.attentions.0.proj_in", "up_blocks.3.attentions.2.proj_in")
    text = ("encoder.layers.0.mlp.fc1",)
    parts = {"unet": unet, "text_encoder": text}
    return {
        part: {f"{path}.{name}": nn.Parameter(torch.zeros(1)) for path in paths for name in ("down", "up")} for part, paths in parts.items()
    }


def shape(groups: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    return [(group["name"], group["lr"], len(group["params"])) for group in groups]


def test_one_group_a_part() -> None:
    groups = parameter_groups(parameters(), OptimizerSettings(learning_rate=1e-3, text_encoder_lr=1e-5), block_of=block_of)
    assert shape(groups) == [("unet", 1e-3, 6), ("text_encoder", 1e-5, 2)]


def test_loraplus_gives_the_up_matrices_more() -> None:
    settings = OptimizerSettings(learning_rate=1e-3, loraplus_lr_ratio=4.0, loraplus_text_encoder_lr_ratio=2.0)
    groups = parameter_groups(parameters(), settings, block_of=block_of)
    assert shape(groups) == [("unet", 1e-3, 3), ("unet up", 4e-3, 3), ("text_encoder", 1e-3, 1), ("text_encoder up", 2e-3, 1)]


def test_block_factors() -> None:
    settings = OptimizerSettings(learning_rate=1.0, down_lr_weight=(1.0, 0.5) + (1.0,) * 10, mid_lr_weight=0.25)
    groups = parameter_groups(parameters(), settings, block_of=block_of)
    assert shape(groups) == [("unet block 01", 0.5, 2), ("unet block 12", 0.25, 2), ("unet block 24", 1.0, 2), ("text_encoder", 1.0, 2)]


def test_no_parameter_is_lost_or_twice() -> None:
    given = parameters()
    settings = OptimizerSettings(loraplus_unet_lr_ratio=3.0, up_lr_weight=(0.5,) * 12)
    grouped = [id(parameter) for group in parameter_groups(given, settings, block_of=block_of) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for named in given.values() for parameter in named.values())


def test_factors_at_the_threshold_are_zero() -> None:
    settings = OptimizerSettings(up_lr_weight=(0.1, 0.2) + (1.0,) * 10, block_lr_zero_threshold=0.1)
    assert settings.block_lr_weights is not None
    assert settings.block_lr_weights[13:16] == (0.0, 0.2, 1.0)


def test_schedule_free_weights_are_averaged_for_saving_and_come_back() -> None:
    weight = nn.Parameter(torch.ones(4))
    settings = OptimizerSettings(name="AdamWScheduleFree", learning_rate=0.1)
    optimizer = make_optimizer(settings, groups_of(settings, weight))
    before_training(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    training = weight.detach().clone()
    before_saving(optimizer)
    assert not torch.equal(weight, training), "the saved weights are the average"
    before_training(optimizer)
    torch.testing.assert_close(weight.detach(), training)


def test_other_optimizers_have_one_form_of_the_weights() -> None:
    settings = OptimizerSettings()
    weight = nn.Parameter(torch.ones(4))
    optimizer = make_optimizer(settings, groups_of(settings, weight))
    before_saving(optimizer)
    before_training(optimizer)
    assert torch.equal(weight, torch.ones(4))
