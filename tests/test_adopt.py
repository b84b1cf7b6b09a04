"""Models that PEFT, transformers and diffusers adapted, taken over: the same outputs, then everything that adapters here can do."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from diffusers import StableDiffusionPipeline
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch import Tensor, nn

import onegraph as og
from onegraph.adapters import Adapters
from onegraph.adoption import adopt
from onegraph.checkpoint import save_kohya
from onegraph.errors import AdapterError, CheckpointError, OnegraphError
from test_checkpoint_diffusers import adapters_for, pipeline
from test_checkpoint_kohya import run_text, run_unet, unet_adapters
from test_checkpoint_peft_methods import CASES, LINEAR, Case, Net, ids, net, peft_model
from test_peft_api import gpt2, llama

# PEFT warns of what it adjusts and of what it can't take back exactly; diffusers of names that it gave up.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]
MARKS = ("lora_", "hada_", "hra_u", "oft_R", "ia3_l", "modules_to_save", "vera_lambda")
SURE = {name: case for name, case in CASES.items() if not case.merged}


def random(model: nn.Module, seed: int = 1) -> Any:
    """The model with adapters that do something."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if any(mark in name for mark in MARKS):
            value.data += torch.randn(value.shape, generator=generator) * 0.3
    return model.eval()


def run(model: nn.Module, x: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        found = model(ids() if x is None else x)
    return getattr(found, "logits", found)


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def without_dropout(model: nn.Module) -> nn.Module:
    """As libraries that train do it: in the layers, whatever the configuration says."""
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
        for table in ("rank_dropout", "module_dropout"):
            if isinstance(values := getattr(module, table, None), dict):
                values.update(dict.fromkeys(values, 0.0))
    return model


# One adapter, every method


@pytest.mark.parametrize("case", SURE.values(), ids=SURE)
def test_same_outputs_in_evaluation_and_training(case: Case) -> None:
    model = without_dropout(peft_model(case))
    plain = model.get_base_model()
    expected, trained = run(model.eval()), run(model.train())
    adapters = adopt(model)
    assert adapters.model is plain
    assert not [module for module in plain.modules() if type(module).__module__.startswith("peft")]
    assert adapters.names == ["default"]
    assert adapters.active == "default"
    assert_same(run(plain), trained)
    assert_same(run(plain.eval()), expected)
    adapters.use(None)
    assert (run(plain) - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_merged_stays_merged_and_can_be_undone(name: str) -> None:
    model = peft_model(CASES[name])
    beside = run(model)
    model.merge_adapter()
    expected = run(model)
    adapters = adopt(model)
    assert adapters.merged == ["default"]
    assert_same(run(adapters.model), expected)
    adapters.unmerge()
    assert adapters.active == "default"
    assert_same(run(adapters.model), expected if CASES[name].merged else beside)
    if CASES[name].settings.get("bias", "none") == "none":
        assert_same(run(adapters.detach()), run(net()))


@pytest.mark.parametrize("name", ["dora", "lora-and-head", "boft", "ln_tuning", "vera"])
@pytest.mark.parametrize("merged", [False, True])
def test_disabled_stays_disabled(name: str, merged: bool) -> None:
    model = peft_model(CASES[name])
    expected = run(model)
    if merged:  # PEFT undoes it in the next call
        model.merge_adapter()
    model.base_model.disable_adapter_layers()
    adapters = adopt(model)
    assert adapters.active is None
    assert adapters.merged == []
    assert adapters.parameters("default"), "they trained before they were disabled"
    assert_same(run(adapters.model), run(net()))
    adapters.use("default")
    assert_same(run(adapters.model), expected)


def test_gradients_are_the_same() -> None:
    model = without_dropout(random(peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn", "c_fc"], r=3)))).train()
    tokens = torch.arange(12).reshape(2, 6)
    model(tokens).logits.square().mean().backward()
    expected = {
        name.removeprefix("base_model.model.").replace(f".{theirs}.default.weight", f".{ours}"): value.grad
        for theirs, ours in (("lora_A", "down"), ("lora_B", "up"))
        for name, value in model.named_parameters()
        if theirs in name
    }
    adapters = adopt(model)
    adapters.model(tokens).logits.square().mean().backward()
    assert adapters.parameters().keys() == expected.keys()
    for name, value in adapters.parameters().items():
        assert expected[name].abs().max() > 0
        assert_same(value.grad, expected[name], 1e-6)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("dora", [False, True])
def test_quantised_layers(kind: str, dora: bool) -> None:
    torch.manual_seed(0)
    weights = nn.Linear(64, 64).state_dict()
    quantised = (
        bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
        if kind == "4bit"
        else bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    )
    quantised.load_state_dict(weights)
    model = nn.Sequential(nn.Linear(64, 64), quantised.to("cpu"))
    setattr(model, f"is_loaded_in_{kind}", True)  # where PEFT looks
    adapted = random(peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "1"], r=4, use_dora=dora))).train()
    x = torch.randn(3, 64)
    expected = adapted(x).detach()
    assert_same(adopt(adapted).model(x).detach(), expected)
    if not dora:
        again = random(peft.get_peft_model(og.adapters_of(model).detach(), peft.LoraConfig(target_modules=["1"], r=4)))
        again.merge_adapter()
        with pytest.raises(AdapterError, match="quantised weight of 1"):
            adopt(again)


# Several adapters


def several() -> tuple[Any, dict[str, Tensor]]:
    """Three adapters of other ranks, alphas, layers; one of them weakened; and what each gives."""
    model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=LINEAR, r=4), adapter_name="ink")
    model.add_adapter(
        "paper", peft.LoraConfig(target_modules=[*LINEAR, "conv"], r=2, lora_alpha=7, use_rslora=True, rank_pattern={"conv": 3})
    )
    model.add_adapter("wash", peft.LoraConfig(target_modules=["table", "wide"], r=3))
    random(model)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("paper", 0.5)
    outputs = {}
    for name in ("ink", "paper", "wash"):
        model.set_adapter(name)
        outputs[name] = run(model)
    return model, outputs


def test_several_adapters_keep_names_strengths_and_the_active_one() -> None:
    model, outputs = several()
    model.set_adapter("paper")
    adapters = adopt(model)
    assert adapters.names == ["ink", "paper", "wash"]
    assert adapters.active == "paper"
    for name, expected in outputs.items():
        adapters.use(name)
        assert_same(run(adapters.model), expected)
    assert {type(method).__name__ for method in adapters.methods("paper").values()} == {"LoRA"}
    adapters.scale("paper", 1.0)
    adapters.use("paper")
    assert (run(adapters.model) - outputs["paper"]).abs().max() > 1e-2, "it was taken over at half its strength"


def test_several_at_once_become_their_sum() -> None:
    model, outputs = several()
    model.base_model.set_adapter(["paper", "ink"])
    expected = run(model)
    adapters = adopt(model)
    assert adapters.names == ["ink", "paper", "wash", "paper+ink"]
    assert adapters.active == "paper+ink"
    assert_same(run(adapters.model), expected)
    assert all((expected - alone).abs().max() > 1e-2 for alone in outputs.values())
    for name, alone in outputs.items():
        adapters.use(name)
        assert_same(run(adapters.model), alone)


def test_several_merged_and_active() -> None:
    model, outputs = several()
    model.base_model.set_adapter(["ink", "wash"])
    model.merge_adapter(["ink", "wash"])
    expected = run(model)
    adapters = adopt(model)
    assert sorted(adapters.merged) == ["ink", "wash"]
    assert_same(run(adapters.model), expected)
    adapters.unmerge()
    assert adapters.active == "ink+wash"
    assert_same(run(adapters.model), expected)
    adapters.use("paper")
    assert_same(run(adapters.model), outputs["paper"])


def test_adapters_of_two_methods_on_the_same_layers() -> None:
    model = peft.PeftMixedModel(net(), peft.LoraConfig(target_modules=LINEAR, r=4), adapter_name="ink")
    model.add_adapter("paper", peft.LoHaConfig(target_modules=["wide", "conv"], r=2))
    random(model)
    outputs = {}
    for name in ("ink", "paper"):
        model.set_adapter(name)
        outputs[name] = run(model)
    model.set_adapter(["ink", "paper"])
    expected = run(model)
    adapters = adopt(model)
    assert adapters.active == "ink+paper"
    assert_same(run(adapters.model), expected)
    for name, alone in outputs.items():
        adapters.use(name)
        assert_same(run(adapters.model), alone)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", ["vera", "vblora"])
def test_adapters_of_other_layers_with_tensors_in_common(kind: str, merged: bool) -> None:
    def config(targets: list[str], rank: int) -> peft.PeftConfig:
        if kind == "vera":
            return peft.VeraConfig(target_modules=targets, r=rank)
        return peft.VBLoRAConfig(target_modules=targets, r=rank, num_vectors=6, vector_length=4)

    model = peft.get_peft_model(net(), config(["narrow", "wide"], 4), adapter_name="ink")
    model.add_adapter("paper", config(["wide"], 4 if kind == "vera" else 2))  # PEFT has projections of one rank
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if "vera_lambda" in name or "vblora" in name:
            value.data += torch.randn(value.shape, generator=generator) * 0.3
    outputs = {}
    for name in ("ink", "paper"):
        model.set_adapter(name)
        outputs[name] = run(model.eval())
    assert (outputs["ink"] - outputs["paper"]).abs().max() > 1e-2
    if merged:
        model.merge_adapter(["paper"])
        assert_same(run(model), outputs["paper"])
    adapters = adopt(model)
    assert adapters.merged == (["paper"] if merged else [])
    assert_same(run(adapters.model), outputs["paper"])
    if merged:
        adapters.unmerge()
    adapters.use("ink")
    assert_same(run(adapters.model), outputs["ink"])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("merged", [False, True])
def test_attention_with_the_projection_that_peft_adds_twice(merged: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    model = peft.get_peft_model(Attending().eval(), peft.LoraConfig(target_modules=["attention"], r=4, lora_dropout=0.5))
    random(model).train()  # PEFT has a dropout there, and never calls it
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    if merged:
        model.merge_adapter()
    expected = run(model, x)
    adapters = adopt(model)
    assert list(adapters.layers) == ["attention", "attention.out_proj"]
    assert adapters.merged == (["default"] if merged else [])
    assert_same(run(adapters.model, x), expected)


def test_an_encoder_whose_fused_kernel_passes_peft_by(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2).eval()
    plain = run(encoder, x)
    model = random(peft.get_peft_model(encoder, peft.LoraConfig(target_modules=["self_attn", "linear1"], r=2)))
    assert_same(run(model, x), plain)
    expected = run(model.train(), x)
    assert (expected - plain).abs().max() > 0.1
    model.eval()
    adapters = adopt(model)
    assert_same(run(adapters.model, x), expected)
    assert "act in inference now" in caplog.text


def test_ranks_padded_for_hotswapping() -> None:
    model, outputs = several()
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    model.set_adapter("paper")
    assert_same(run(model), outputs["paper"], 1e-6)
    adapters = adopt(model)
    assert_same(run(adapters.model), outputs["paper"])
    adapters.use("ink")
    assert_same(run(adapters.model), outputs["ink"])


def test_adalora_whose_allocator_masks_triplets() -> None:
    model = peft_model(CASES["adalora"])
    kept = {"wide": [True, False, True], "block.narrow": [True, True, False], "block.wide": [False, True, True], "conv": [True] * 3}
    pattern = {f"base_model.model.{path}.lora_E.default": own for path, own in kept.items()}
    model.peft_config["default"].rank_pattern = pattern
    model.base_model.rankallocator.mask_using_rank_pattern(model, pattern)
    expected = run(model)
    assert_same(run(adopt(model).model), expected)


# What trains, and in which precision


def test_dropouts_are_those_of_the_layers() -> None:
    model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=LINEAR, r=2, lora_dropout=0.25))
    model.base_model.model.wide.lora_dropout["default"].p = 0.5
    adapters = adopt(model)
    assert adapters.settings_of("default", "input_dropout") == {"wide": 0.5, "block.narrow": 0.25, "block.wide": 0.25}


def test_what_was_frozen_stays_frozen(tmp_path: Path) -> None:
    random(peft.get_peft_model(net(), peft.LoraConfig(target_modules=LINEAR, r=2))).save_pretrained(tmp_path)
    assert adopt(peft.PeftModel.from_pretrained(net(), tmp_path)).parameters() == {}
    assert len(adopt(peft.PeftModel.from_pretrained(net(), tmp_path), trainable=True).parameters()) == 6
    assert len(adopt(peft.PeftModel.from_pretrained(net(), tmp_path, is_trainable=True)).parameters()) == 6
    assert adopt(peft.PeftModel.from_pretrained(net(), tmp_path, is_trainable=True), trainable=False).parameters() == {}


def test_parameters_of_the_base_that_train_go_on_training() -> None:
    model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=LINEAR, r=2))
    model.base_model.model.norm.weight.requires_grad_(True)
    adapters = adopt(model)
    own = {name for name, value in adapters.model.named_parameters() if value.requires_grad}
    assert own == {"norm.weight", *adapters.parameters()}


def test_trained_biases_become_a_part_of_the_adapter() -> None:
    model = peft_model(CASES["lora-all-biases"])
    expected = run(model)
    adapters = adopt(model)
    assert_same(run(adapters.model), expected)
    trained = adapters.parameters()
    assert {"wide.bias_change", "norm.bias_difference", "head.0.bias_difference"} <= trained.keys()
    assert all(name in trained for name, value in adapters.model.named_parameters() if value.requires_grad)
    run_grad = adapters.model(ids()).square().mean()
    run_grad.backward()
    assert trained["wide.bias_change"].grad.abs().max() > 0


@pytest.mark.parametrize(
    ("base", "cast", "expected"), [("bfloat16", True, "float32"), ("bfloat16", False, "bfloat16"), ("float64", True, "float64")]
)
def test_numbers_keep_their_precision(base: str, cast: bool, expected: str) -> None:
    model = net().to(getattr(torch, base))
    model = random(peft.get_peft_model(model, peft.LoraConfig(target_modules=LINEAR, r=2), autocast_adapter_dtype=cast))
    numbers = {name: value.detach().clone() for name, value in model.named_parameters() if "lora_A" in name}
    output = run(model)
    adapters = adopt(model)
    assert {value.dtype for value in adapters.parameters().values()} == {getattr(torch, expected)}
    assert torch.equal(adapters.parameters()["wide.down"], numbers["base_model.model.wide.lora_A.default.weight"])
    assert_same(run(adapters.model), output, 1e-12 if base == "float64" else 2e-2)


# Afterwards


def test_one_graph_for_all_that_was_adopted() -> None:
    model, _ = several()
    model.base_model.set_adapter(["ink", "paper"])
    adapters = adopt(model)
    expected = {}
    for name in (*adapters.names, None):
        adapters.use(name)
        expected[name] = run(adapters.model)
    adapters.use("ink")
    og.compile(adapters.model, backend="aot_eager", regions="whole", fullgraph=True)
    run(adapters.model)
    with torch.compiler.set_stance("fail_on_recompile"):
        for name, output in expected.items():
            adapters.use(name)
            assert_same(run(adapters.model), output)
        with adapters.disabled():
            assert_same(run(adapters.model), expected[None])


def test_peft_itself_compiles_again_for_another_adapter() -> None:
    """What the test above would not fail by itself to see."""
    model, _ = several()
    compiled = torch.compile(model.get_base_model(), backend="eager", fullgraph=True)
    model.set_adapter("ink")
    run(compiled)
    model.set_adapter("paper")
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompil"):
        run(compiled)


def test_rows_merging_combining_and_files(tmp_path: Path) -> None:
    model, outputs = several()
    adapters = adopt(model)
    with adapters.rows(["ink", "paper"]):
        assert_same(run(adapters.model), torch.stack([outputs["ink"][0], outputs["paper"][1]]))
    adapters.merge("ink")
    assert_same(run(adapters.model), outputs["ink"])
    adapters.unmerge()
    adapters.save(tmp_path / "wash", "wash", "peft")
    assert_same(run(peft.PeftModel.from_pretrained(net(), tmp_path / "wash")), outputs["wash"])
    adapters.save(tmp_path / "wash.safetensors", "wash")
    assert_same(run(og.load(net(), tmp_path / "wash.safetensors").model), outputs["wash"])
    adapters.detach()
    assert_same(run(adapters.model), run(net()))


def test_a_saved_folder_keeps_what_peft_said_of_it(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, revision="main"))
    adopt(model).save(tmp_path, format="peft")
    config = peft.PeftConfig.from_pretrained(tmp_path)
    assert (config.task_type, config.revision, config.r) == ("CAUSAL_LM", "main", 2)


def test_the_wrapper_is_empty_and_says_so(tmp_path: Path) -> None:
    model, _ = several()
    adopt(model)
    uses: list[Callable[[], object]] = [
        lambda: model(ids()),
        lambda: model.set_adapter("ink"),
        lambda: model.disable_adapter().__enter__(),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.merge_and_unload(),
        lambda: adopt(model),
    ]
    for use in uses:
        with pytest.raises(AdapterError) as caught:
            use()
        assert caught.value.code == "adopted"
    assert not hasattr(model, "config")
    assert not list(tmp_path.iterdir())
    assert "Emptied" in repr(model)


def test_ours_already_is_left_alone() -> None:
    model = net()
    adapters = og.attach(model, og.LoRA(rank=2), targets=LINEAR)
    assert adopt(model) is adapters
    assert adopt(torch.nn.Sequential(model)) is adapters


def test_peft_is_not_needed() -> None:
    program = (
        "import sys; sys.modules['peft'] = None\n"
        "import torch, onegraph\n"
        "try: onegraph.adopt(torch.nn.Linear(2, 2))\n"
        "except onegraph.errors.AdapterError as error: print(error.code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "adopt-nothing"


# transformers and diffusers


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_transformers_own_adapters(saved: list[str] | None, tmp_path: Path) -> None:
    model: Any = llama()
    tokens = torch.arange(12).reshape(2, 6)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, modules_to_save=saved), "ink")
    if saved is None:
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "up_proj", "embed_tokens"], r=2), "paper")
    random(model)
    model.set_adapter("ink")
    expected = run(model, tokens)
    adapters = adopt(model)
    assert adapters.model is model
    assert adapters.active == "ink"
    assert_same(run(model, tokens), expected)
    assert not model._hf_peft_config_loaded
    assert not hasattr(model, "peft_config")
    adapters.save(tmp_path, "ink", "peft")
    assert_same(run(peft.PeftModel.from_pretrained(llama(), tmp_path), tokens), expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    save_kohya(adapters_for({}), folder / "ink.safetensors")
    save_kohya({"unet": unet_adapters()}, folder / "paper.safetensors")
    return folder


def loaded(folder: Path, *names: str) -> Any:
    pipe: Any = pipeline()
    for name in names:
        pipe.load_lora_weights(str(folder), weight_name=f"{name}.safetensors", adapter_name=name)
    return pipe


def both(pipe: StableDiffusionPipeline) -> tuple[Tensor, Tensor]:
    return run_unet(pipe.unet), run_text(pipe.text_encoder)


def assert_both_same(pipe: StableDiffusionPipeline, expected: tuple[Tensor, Tensor]) -> None:
    for found, before in zip(both(pipe), expected):
        assert_same(found, before)


def test_a_pipeline_with_a_mixture(written: Path) -> None:
    pipe = loaded(written, "ink", "paper")
    pipe.set_adapters("ink", 0.7)
    alone = both(pipe)
    pipe.set_adapters(["ink", "paper"], adapter_weights=[0.7, 0.3])
    expected = both(pipe)
    adopted = adopt(pipe)
    assert adopted.keys() == {"unet", "text_encoder"}
    assert adopted["unet"].model is pipe.unet
    assert adopted["unet"].active == "ink+paper"
    assert adopted["text_encoder"].names == ["ink"]
    assert_both_same(pipe, expected)
    again = adopt(pipe)
    assert all(again[name] is adapters for name, adapters in adopted.items())
    for adapters in adopted.values():
        adapters.use("ink")
    assert_both_same(pipe, alone)


@pytest.mark.parametrize("state", ["by block", "fused", "off"])
def test_a_pipeline_in_any_state(written: Path, state: str) -> None:
    pipe = loaded(written, "ink")
    if state == "by block":
        pipe.set_adapters("ink", {"text_encoder": 0.5, "unet": {"down": 0.9, "mid": 0.2}})
    elif state == "fused":
        pipe.fuse_lora(lora_scale=0.6)
    else:
        pipe.disable_lora()
    expected = both(pipe)
    adopted = adopt(pipe)
    assert [adapters.merged for adapters in adopted.values()] == [["ink"] if state == "fused" else []] * 2
    assert [adapters.active for adapters in adopted.values()] == [None if state != "by block" else "ink"] * 2
    assert_both_same(pipe, expected)


def test_a_pipeline_is_adopted_whole_or_not_at_all(written: Path) -> None:
    pipe = loaded(written, "ink")
    pipe.unet.add_adapter(peft.FourierFTConfig(target_modules=["to_q"], n_frequency=4), "bad")
    before, expected = Snapshot(pipe.text_encoder, run_text), both(pipe)
    with pytest.raises(AdapterError, match=r"unet: it can't be adopted: adapter 'bad' is of PEFT's type FOURIERFT, as on .*to_q") as caught:
        adopt(pipe)
    assert caught.value.code == "adopt-unsupported"
    before.assert_unchanged()
    assert all(torch.equal(found, old) for found, old in zip(both(pipe), expected))
    with pytest.raises(AdapterError, match="text_encoder, unet, vae have no layer") as caught:
        adopt(pipeline())
    assert caught.value.code == "adopt-nothing"


# What can't be taken over


class Snapshot:
    """A model as it is: modules, parameters, what trains, outputs."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Tensor] = run) -> None:
        self.model, self.call = model, call
        call(model)  # PEFT's attention has other Parameters after each call
        self.modules = self._modules()
        self.parameters = {name: (value.detach().clone(), value.requires_grad) for name, value in model.named_parameters()}
        self.notes = self._notes()
        self.output = call(model)

    def _modules(self) -> dict[str, int]:
        return {name: id(module) for name, module in self.model.named_modules(remove_duplicate=False)}

    def _notes(self) -> list[str]:
        return [key for module in self.model.modules() for key in vars(module) if "peft" in key or "onegraph" in key]

    def assert_unchanged(self) -> None:
        assert self._modules() == self.modules
        assert self._notes() == self.notes
        now = dict(self.model.named_parameters())
        assert now.keys() == self.parameters.keys()
        for name, (value, trains) in self.parameters.items():
            assert torch.equal(now[name], value), name
            assert now[name].requires_grad == trains, name
        assert torch.equal(self.call(self.model), self.output)


def lora(**options: Any) -> Any:
    return random(peft.get_peft_model(net(), peft.LoraConfig(**{"target_modules": LINEAR, "r": 2, **options})))


class Doubled(Net):
    """A layer that hangs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.another = self.wide


class Running(nn.Module):
    """A head with numbers that no adapter can change."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(torch.nn.functional.one_hot(x % 4, 4).float().flatten(0, 1)))


def hooked() -> Any:
    model = lora()
    model.base_model.model.wide.register_forward_hook(lambda *values: None)
    return model


def running() -> Any:
    model = peft.get_peft_model(Running(), peft.LoraConfig(target_modules=["wide"], r=2, modules_to_save=["head"]))
    model.train()
    run(model)
    return model.eval()


def orphaned() -> Any:
    model, _ = several()
    model.set_adapter("ink")
    del model.peft_config["wash"]
    return model


def placed_inside() -> Any:
    return nn.Sequential(peft.inject_adapter_in_model(peft.LoraConfig(target_modules=LINEAR, r=2), net()))


def tokens() -> Any:
    model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=LINEAR, r=2, trainable_token_indices={"table": [1, 2]}))
    return random(model)


def adapted_twice() -> Any:
    model = lora().get_base_model()
    og.attach(model, og.LoRA(rank=2), targets=["conv"])
    return model


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "another method": (
        lambda: peft.get_peft_model(net(), peft.RandLoraConfig(target_modules=LINEAR, r=2)),
        "adapter 'default' is of PEFT's type RANDLORA, as on wide",
    ),
    "a variant": (lambda: lora(alora_invocation_tokens=[3]), "adapter 'default' on wide is a ALoraLinearVariant"),
    "bare parameters": (lambda: lora(target_parameters=["wide.weight"], target_modules=["narrow"]), "target_parameters|ParamWrapper"),
    "single rows": (tokens, "table is in a TrainableTokensWrapper"),
    "hooks": (hooked, "PEFT's layers at wide have hooks"),
    "a module used twice": (
        lambda: random(peft.get_peft_model(Doubled().eval(), peft.LoraConfig(target_modules=["wide"], r=2))),
        "wide and another are the same module",
    ),
    "running statistics": (running, "changes 3 weights of the base model"),
    "no configuration": (orphaned, "adapter 'wash' is on .* and has no configuration"),
    "a part of the model": (placed_inside, "no configuration of them"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_place_is_refused_and_the_model_unchanged(name: str) -> None:
    make, message = UNSUPPORTED[name]
    model = make()
    before = Snapshot(model)
    with pytest.raises(AdapterError, match=message) as caught:
        adopt(model)
    assert caught.value.code == "adopt-unsupported"
    assert caught.value.hint
    before.assert_unchanged()


# Starts that changed the base weights


def started(init: Any, **options: Any) -> Any:
    """LoRA after a start that needs no data, or whose data were made before."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return random(peft.get_peft_model(net(), peft.LoraConfig(target_modules=LINEAR, r=2, init_lora_weights=init, **options)))


def as_if(init: str) -> Any:
    """What a start that runs on a GPU alone leaves: other base weights, and its name in the configuration."""
    model = started(True)
    with torch.no_grad():
        model.get_submodule("base_model.model.wide.base_layer").weight.mul_(0.9)
    model.peft_config["default"].init_lora_weights = init
    return model


STARTED: dict[str, tuple[Callable[[], Any], bool]] = {
    "pissa": (lambda: started("pissa"), True),
    "pissa-dora": (lambda: started("pissa", use_dora=True), True),
    "olora": (lambda: started("olora"), True),
    "loftq": (lambda: as_if("loftq"), True),
    "corda": (lambda: as_if("corda"), True),
    "eva": (lambda: started("eva"), False),
    "orthogonal": (lambda: started("orthogonal"), False),
}


@pytest.mark.parametrize("name", STARTED)
def test_an_adapter_stays_beside_the_weights_that_its_start_changed(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, changes = STARTED[name]
    model = make()
    expected = run(model)
    with model.disable_adapter():
        base = run(model)
    assert bool((base - run(net())).abs().max() > 1e-4) == changes
    adapters = adopt(model)
    assert_same(run(adapters.model), expected)
    told = [record.message for record in caplog.records if "changed the base weights" in record.message]
    assert len(told) == changes
    adapters.save(tmp_path / "native.safetensors")
    adapters.save(tmp_path / "peft", format="peft")
    with adapters.disabled():
        assert_same(run(adapters.model), base)
    # beside the weights that were changed
    plain = adapters.detach()
    again = og.load(plain, tmp_path / "native.safetensors", name="again")
    assert_same(run(again.model), expected)
    assert ("beside others" in caplog.text) == changes
    again.save(tmp_path / "twice", format="peft")
    for place in ("peft", "twice"):
        written = json.loads((tmp_path / place / "adapter_config.json").read_text())
        assert written["init_lora_weights"] == (name.partition("-")[0] if changes else True)
    # beside the original ones: PEFT does the start again; ours says that it can't
    if changes:
        with pytest.raises(CheckpointError, match="changes the base weights"):
            og.load(net(), tmp_path / "peft", name="default")
    if name in ("pissa", "olora", "eva", "orthogonal"):
        assert_same(run(peft.PeftModel.from_pretrained(net(), tmp_path / "peft").eval()), expected, 1e-4)


def test_prompts_and_other_things_are_refused() -> None:
    prompts = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    for given, code in ((prompts, "adopt-unsupported"), (net(), "adopt-nothing"), (3, "not-a-model"), (adapted_twice(), "adopt-both")):
        with pytest.raises(OnegraphError) as caught:
            adopt(given)  # type: ignore[call-overload]
        assert caught.value.code == code


def two(config: type[peft.PeftConfig], **options: Any) -> Any:
    model = peft.get_peft_model(net(), config(target_modules=LINEAR, **options), adapter_name="ink")
    model.add_adapter("paper", config(target_modules=LINEAR, **options))
    random(model).base_model.set_adapter(["ink", "paper"])
    return model


def partly(change: Callable[[Any], object]) -> Any:
    model, _ = several()
    model.set_adapter("ink")
    change(model.base_model.model.wide)
    return model


def merged_beside_another() -> Any:
    model, _ = several()
    model.set_adapter("wash")
    model.merge_adapter(["ink"])
    return model


def merged_into_a_tied_head() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    model = random(peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["lm_head"], r=2)))
    model.merge_adapter()
    return model


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "two DoRA": (lambda: two(peft.LoraConfig, r=2, use_dora=True), "'ink' and 'paper' are active at once on wide, with dora"),
    "two IA3": (lambda: two(peft.IA3Config, feedforward_modules=[]), "active at once on wide, with ia3"),
    "disabled in part": (lambda: partly(lambda layer: layer.enable_adapters(False)), "at wide is disabled"),
    "active in part": (lambda: partly(lambda layer: layer.set_adapter("wash")), "active on some of their layers only"),
    "merged in part": (lambda: partly(lambda layer: layer.merge()), "'ink' is merged on some of their layers only, not on block.narrow"),
    "a strength that is no number": (lambda: partly(lambda layer: layer.set_scale("wash", float("nan"))), "scale of 'wash' on wide is nan"),
    "merged beside another one": (merged_beside_another, "'ink' merged, and 'wash' active, as on table"),
    "merged into a shared weight": (merged_into_a_tied_head, "merged into the weight of lm_head, which another layer shares"),
    "an unsure convolution": (lambda: peft_model(CASES["oft-on-conv"]), "an OFT on the convolution conv with a kernel of 3x3"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_none_here_is_refused_and_the_model_unchanged(name: str) -> None:
    make, message = STATES[name]
    model = make()
    before = Snapshot(model)
    with pytest.raises(AdapterError, match=message) as caught:
        adopt(model)
    assert caught.value.code == ("not-finite-value" if "number" in name else "adopt-state")
    before.assert_unchanged()


@pytest.fixture
def late_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something goes wrong when all is done."""

    def fail(adapters: Adapters, *rest: Any) -> None:
        assert run(adapters.model).isfinite().all()
        raise MemoryError

    monkeypatch.setattr("onegraph.adoption.takeover.set_trained", fail)


@pytest.mark.parametrize("name", ["dora", "ia3", "oft", "boft", "hra", "ln_tuning", "lora-and-head", "lora-all-biases", "miss-bat", "vera"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_failure_at_the_end_leaves_the_model_bit_for_bit(name: str, merged: bool, late_failure: None) -> None:
    model = peft_model(CASES[name])
    beside = run(model)
    if merged:
        model.merge_adapter()
    before = Snapshot(model)
    with pytest.raises(MemoryError):
        adopt(model)
    before.assert_unchanged()
    if merged:
        model.unmerge_adapter()
        assert_same(run(model), beside)


def test_a_copy_of_a_model_that_was_adopted_is_independent() -> None:
    model, outputs = several()
    adapters = adopt(model)
    other = copy.deepcopy(adapters.model)
    adapters.use("ink")
    og.adapters_of(other).use("wash")
    assert_same(run(other), outputs["wash"])
    assert_same(run(adapters.model), outputs["ink"])
