"""``--network_module=lycoris.kohya``: the modules, names and shapes that LyCORIS itself makes, and runs of every algorithm."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPTextModel

pytest.importorskip("lycoris")

from lycoris import kohya
from lycoris.functional import factorization, power2factorization
from lycoris.modules import get_module, make_module
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.lokr import LokrModule

from onegraph.checkpoint import load_parts, read, save_kohya
from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.methods import IA3, OFT, DoRA, LoHa, LoKr, LoRA, Method, NormTuning
from onegraph.training.diffusion.configuration import ALGORITHMS, PRESETS, NetworkSettings
from onegraph.training.diffusion.lycoris_network import ALGORITHMS as BUILDERS
from onegraph.training.diffusion.lycoris_network import PRESETS as PRESET_TABLE
from onegraph.training.diffusion.lycoris_network import butterfly_split, split, text_encoder_plan, unet_plan
from onegraph.training.diffusion.network import attach_networks
from tiny_diffusion import build, configuration
from tiny_run import Ingredients, differ, make_ingredients, metadata, train

LYCORIS = "--network_module=lycoris.kohya"


@dataclass
class Models:
    unet: nn.Module
    text_encoder: nn.Module


def models() -> Models:
    components = configuration()
    return Models(build("unet", components["unet"]), build("text_encoder", components["text_encoder"]))


def settings(**changes: Any) -> NetworkSettings:
    return NetworkSettings(module="lycoris.kohya", **changes)


@pytest.fixture
def their_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """For diffusers' UNet: 4.1.3 names the time embedding twice there, by its class, which sd-scripts' UNet hasn't, and by its path."""
    for name, preset in kohya.PRESET.items():
        classes = [kind for kind in preset["unet_target_module"] if kind != "TimestepEmbedding"]
        monkeypatch.setitem(kohya.PRESET, name, {**preset, "unet_target_module": classes})


# What is adapted


def test_the_tables_name_what_the_settings_allow() -> None:
    assert tuple(BUILDERS) == ALGORITHMS
    assert tuple(PRESET_TABLE) == PRESETS


@pytest.mark.parametrize("limit", [-1, 1, 2, 3, 4, 8, 16, 100])
def test_features_are_split_as_there(limit: int) -> None:
    for features in range(1, 400):
        assert split(features, limit) == factorization(features, limit)
        size, num = power2factorization(features, limit) if limit > 0 else (None, 0)
        if limit > 0 and features > 1:
            assert butterfly_split(features, limit) == (None if size is None else (size, num)), features


# Every algorithm with arguments that matter, as texts for both sides.
RUNS: dict[str, list[str]] = {
    "lora": ["algo=lora", "conv_dim=3", "conv_alpha=2"],
    "locon": ["algo=locon", "rs_lora=True"],
    "dora": ["algo=lora", "dora_wd=True"],
    "loha": ["algo=loha"],
    "loha-tucker": ["algo=loha", "use_tucker=True", "conv_dim=3"],
    "lokr": ["algo=lokr"],
    "lokr-factor": ["algo=lokr", "factor=4", "decompose_both=True", "preset=attn-mlp"],
    "lokr-unbalanced": ["algo=lokr", "factor=2", "unbalanced_factorization=True"],
    "lokr-full": ["algo=lokr", "full_matrix=True"],
    "lokr-tucker": ["algo=lokr", "use_tucker=True", "conv_dim=1"],
    "full": ["algo=full", "preset=unet-transformer-only"],
    "ia3": ["algo=ia3"],
    "diag-oft": ["algo=diag-oft"],
    "diag-oft-rescaled": ["algo=diag-oft", "rescaled=True"],
    "boft": ["algo=boft"],
    "boft-rescaled": ["algo=boft", "rescaled=True"],
    "norms": ["algo=lora", "train_norm=True"],
    **{preset: [f"preset={preset}"] for preset in PRESETS if preset not in ("full", "attn-only", "ia3")},
}


def parsed(arguments: list[str], **changes: Any) -> NetworkSettings:
    from onegraph.cli.network_arguments import read_network_arguments

    values, problems = read_network_arguments(arguments, "--network_args", "lycoris.kohya")
    assert not problems
    return settings(**{path.partition(".")[2]: value for path, value in values.items()}, **changes)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("their_presets")
def test_keys_and_shapes_are_those_of_lycoris(name: str, tmp_path: Path) -> None:
    """The file is compared with the state dict of the network that LyCORIS makes from the same arguments."""
    both = models()
    logging.disable(logging.WARNING)
    try:
        given = dict(item.split("=") for item in RUNS[name])
        network = kohya.create_network(1.0, 2, 1.0, None, both.text_encoder, both.unet, warn_on_unmatched=False, **given)
        # its loras are not its modules before apply_to()
        loras = network.text_encoder_loras + network.unet_loras
        expected = {f"{lora.lora_name}.{key}": tuple(value.shape) for lora in loras for key, value in lora.state_dict().items()}
        alphas = {f"{lora.lora_name}.alpha": float(value) for lora in loras for key, value in lora.state_dict().items() if key == "alpha"}
    finally:
        logging.disable(logging.NOTSET)
    fresh = models()
    path = tmp_path / "a.safetensors"
    save_kohya(attach_networks(fresh, parsed(RUNS[name], dim=2)), path, form="lycoris")
    # transformers 5 dropped a level that files keep
    found = {key.replace("lora_te_text_model_", "lora_te_"): value for key, value in load_file(path).items()}
    assert {key: tuple(value.shape) for key, value in found.items()} == expected
    for key, alpha in alphas.items():
        assert float(found[key]) == pytest.approx(alpha), key


def test_defaults_are_those_of_lycoris() -> None:
    """conv_dim and conv_alpha are the network's own, and all of the UNet's layers are adapted."""
    plan = unet_plan(models().unet, settings(dim=3, alpha=2.0))
    assert set(plan.values()) == {LoRA(rank=3, alpha=2.0)}
    assert {"conv_in", "conv_out", "time_embedding.linear_1", "down_blocks.0.resnets.0.conv1"} <= plan.keys()
    assert set(unet_plan(models().unet, settings(dim=3, alpha=0.0)).values()) == {LoRA(rank=3, alpha=3.0)}


def test_dora_has_two_names() -> None:
    one, other = (unet_plan(models().unet, settings(dim=2, **given)) for given in ({"algo": "dora"}, {"dora_wd": True}))
    assert one == other
    assert set(one.values()) == {DoRA(rank=2, alpha=1.0)}


def test_the_ia3_preset_scales_inputs_of_the_feed_forward_layers() -> None:
    """LyCORIS means the ends of the paths by its names."""
    plan = unet_plan(models().unet, settings(algo="ia3", preset="ia3"))
    assert {path.rpartition("attn")[2][2:] if "attn" in path else path.partition("transformer_blocks.0.")[2] for path in plan} == {
        "to_k",
        "to_v",
        "ff.net.2",
    }
    assert {path.endswith("ff.net.2"): method for path, method in plan.items()} == {
        True: IA3(on_input=True, scales_bias=False),
        False: IA3(scales_bias=False),
    }
    text = text_encoder_plan(models().text_encoder, settings(algo="ia3", preset="ia3"))
    assert {path.rpartition(".")[2] for path in text} == {"k_proj", "v_proj", "fc2"}


def test_attention_only() -> None:
    plan = unet_plan(models().unet, settings(preset="attn-only"))
    assert {path.rpartition("attn")[2][2:] for path in plan} == {"to_q", "to_k", "to_v", "to_out.0"}
    assert {path.rpartition(".")[2] for path in text_encoder_plan(models().text_encoder, settings(preset="attn-only"))} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "out_proj",
    }


def test_dropouts_go_where_a_method_has_them() -> None:
    given = {"rank_dropout": 0.1, "module_dropout": 0.2}
    found = {
        type(method): method for algo in ("loha", "lokr") for method in unet_plan(models().unet, settings(algo=algo, **given)).values()
    }
    assert found.keys() == {LoHa, LoKr}
    assert {(method.rank_dropout, method.module_dropout) for method in found.values()} == {(0.1, 0.2)}  # type: ignore[attr-defined]
    lora = unet_plan(models().unet, settings(dropout=0.3, **given))["conv_in"]
    assert lora == LoRA(rank=4, alpha=1.0, dropout=0.3, rank_dropout=0.1, module_dropout=0.2)


def test_boft_says_which_rank_a_layer_needs() -> None:
    unet = nn.ModuleDict({"conv_in": nn.Conv2d(4, 320, 3), "conv_out": nn.Conv2d(4, 7, 3)})
    with pytest.raises(ConfigurationError) as raised:
        unet_plan(unet, settings(algo="boft", dim=8))
    assert raised.value.code == "block-size"
    assert "conv_in: 320 output features: the rank must be 10 or more, not 8" in str(raised.value)
    assert "conv_out: 7 output features: no rank can" in str(raised.value)
    del unet["conv_out"]
    assert list(unet_plan(unet, settings(algo="boft", dim=10))) == ["conv_in"]


def test_features_that_can_not_turn_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    unet = nn.ModuleDict({"conv_in": nn.Conv2d(4, 8, 3), "conv_out": nn.Conv2d(4, 7, 3)})
    with caplog.at_level(logging.INFO):
        plan = unet_plan(unet, settings(algo="diag-oft", dim=4))
    assert plan == {"conv_in": OFT(block_size=2, exact=True, on_output=True)}
    assert "1 modules are left out" in caplog.text


def test_a_preset_without_the_text_encoder() -> None:
    both = models()
    assert list(attach_networks(both, settings(preset="unet-only"))) == ["unet"]


# Runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Ingredients:
    return make_ingredients(tmp_path_factory.mktemp("tiny"))


def flags(tiny: Ingredients, output: Path, *arguments: str, steps: int = 2) -> list[str]:
    """The last --network_module wins."""
    given = [f"--max_train_steps={steps}", "--learning_rate=0.02", "--network_dim=2", "--dynamo_backend=no"]
    return tiny.flags(output, *given, LYCORIS, "--network_args", *arguments)


def run_unet(unet: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        sample, context = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, 8, generator=generator)
        return unet(sample, torch.tensor([7]), context).sample  # type: ignore[no-any-return]


def base(tiny: Ingredients) -> Models:
    unet = UNet2DConditionModel.from_pretrained(tiny.model / "unet").eval()
    return Models(unet, CLIPTextModel.from_pretrained(tiny.model / "text_encoder").eval())


# What LyCORIS' own loader gets wrong: it looks for a factor that splits both sides, and takes the rank from the wrong axis of a core.
BY_HAND: dict[str, dict[str, object]] = {
    "lokr-unbalanced": {"factor": 2, "unbalanced_factorization": True},
    "lokr-tucker": {"use_tucker": True},
}


def in_lycoris(path: Path, unet: nn.Module, by_hand: dict[str, object] | None) -> int:
    """Runs every module of a file in LyCORIS' own modules; how many there were."""
    state = load_file(path)
    layers = {f"lora_unet_{name.replace('.', '_')}": module for name, module in unet.named_modules()}
    keys = sorted({key.partition(".")[0] for key in state if key.startswith("lora_unet_")})
    for key in keys:
        kind, values = get_module(state, key)
        own = {name.partition(".")[2]: value for name, value in state.items() if name.startswith(f"{key}.")}
        if kind is IA3Module:  # its own loader passes one argument too many
            module = IA3Module(key, layers[key], 1.0, train_on_input=bool(own["on_input"]))
            module.load_state_dict(own)
        elif by_hand is not None:
            rank = own["lokr_w2_b"].shape[0] if "lokr_w2_b" in own else 1000
            module = LokrModule(key, layers[key], 1.0, rank, float(own["alpha"]), **by_hand)
            module.load_state_dict(own)
        else:
            module = make_module(kind, values, key, layers[key])
        layers[key].forward = module.eval().forward
    return len(keys)


TRAINED = {name: arguments for name, arguments in RUNS.items() if arguments[0].startswith("algo=")}


@pytest.mark.parametrize("name", [*TRAINED, "ia3-preset"])
def test_a_run_of_every_algorithm(name: str, tiny: Ingredients, tmp_path: Path) -> None:
    arguments = TRAINED.get(name, ["algo=ia3", "preset=ia3"])
    assert train([*flags(tiny, tmp_path, *arguments), "--save_every_n_steps=1"]) == 0
    path = tmp_path / "last.safetensors"
    assert differ(tmp_path / "at-step00000001.safetensors", path), "the second step changed something"
    strings = metadata(path)
    assert strings["ss_network_module"] == "lycoris.kohya"
    assert f'"algo": "{arguments[0].partition("=")[2]}"' in strings["ss_network_args"]
    ours, theirs = base(tiny), base(tiny)
    untouched = run_unet(ours.unet)
    parts = load_parts({"unet": ours.unet, "text_encoder": ours.text_encoder}, path)
    assert in_lycoris(path, theirs.unet, BY_HAND.get(name)) == len(parts["unet"].layers)
    torch.testing.assert_close(run_unet(ours.unet), run_unet(theirs.unet), rtol=1e-4, atol=1e-5)
    assert (run_unet(ours.unet) - untouched).abs().max() > 1e-4


def test_a_run_goes_on_from_its_file(tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["algo=lokr", "factor=2"]
    assert train(flags(tiny, tmp_path / "a", *arguments)) == 0
    start = tmp_path / "a" / "last.safetensors"
    assert train([*flags(tiny, tmp_path / "b", *arguments, steps=1), f"--network_weights={start}"]) == 0
    assert train([*flags(tiny, tmp_path / "c", *arguments, steps=1), f"--network_weights={start}", "--dim_from_weights"]) == 0
    first, again = (load_file(tmp_path / run / "last.safetensors") for run in "bc")
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert differ(start, tmp_path / "b" / "last.safetensors")
    capsys.readouterr()
    assert train([*flags(tiny, tmp_path / "d", "algo=loha", steps=1), f"--network_weights={start}"]) != 0
    assert "lokr in the file, loha here" in capsys.readouterr().err
    assert train([*flags(tiny, tmp_path / "e", "algo=lokr", "factor=-1", steps=1), f"--network_weights={start}"]) != 0
    assert "--dim_from_weights" in capsys.readouterr().err


def test_networks_lora_writes_what_it_did(tiny: Ingredients, tmp_path: Path) -> None:
    """LoRA of LyCORIS on the same modules is the same run, tensor by tensor; only the file says another module."""
    common = ["--max_train_steps=2", "--network_dim=2", "--dynamo_backend=no"]
    assert train(tiny.flags(tmp_path / "a", *common)) == 0
    assert train(tiny.flags(tmp_path / "b", *common, LYCORIS, "--network_args", "preset=attn-mlp")) == 0
    first, second = (load_file(tmp_path / run / "last.safetensors") for run in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert metadata(tmp_path / "a" / "last.safetensors")["ss_network_module"] == "networks.lora"
    assert read(tmp_path / "a" / "last.safetensors").format == "kohya"


def test_one_unknown_argument_stops_a_run(tiny: Ingredients, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(flags(tiny, tmp_path, "algo=lohaa")) != 0
    assert "did you mean loha?" in capsys.readouterr().err


def test_norms_beside_lora() -> None:
    plan = unet_plan(models().unet, settings(train_norm=True))
    norms = {path for path, method in plan.items() if method == NormTuning()}
    assert any(path.endswith("transformer_blocks.0.norm1") for path in norms)
    assert any(path.endswith("resnets.0.norm1") for path in norms)
    assert "conv_norm_out" not in plan


def test_what_the_plan_refuses_is_a_configuration_error() -> None:
    found: dict[str, Method] = unet_plan(models().unet, settings(algo="boft", dim=2))
    assert found
    with pytest.raises(OnegraphError):
        unet_plan(models().unet, settings(algo="boft", dim=1))
