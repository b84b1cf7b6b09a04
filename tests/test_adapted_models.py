"""Models of diffusers and transformers with adapters in them: eager, and in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from onegraph.adapters import Targets, attach
from onegraph.methods import LoRA

SD_TARGETS = ["proj_in", "proj_out", "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@dataclass(frozen=True)
class ModelCase:
    """A tiny model with random weights, an input, and how its output is read."""

    build: Callable[[], nn.Module]
    call: Callable[[nn.Module], Tensor]
    targets: Targets
    num_layers: int


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def clip() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, eos_token_id=31)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
    )


def call_unet(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    sample, context = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 8, generator=generator)
    return model(sample, torch.tensor([3, 700]), context, return_dict=False)[0]


def call_clip(model: nn.Module) -> Tensor:
    return model(torch.tensor([[1, 5, 9, 31], [1, 2, 31, 31]]), return_dict=False)[0]


def call_llama(model: nn.Module) -> Tensor:
    return model(torch.tensor([[1, 5, 9, 31], [1, 2, 31, 31]])).logits


MODELS = {
    "unet": ModelCase(unet, call_unet, SD_TARGETS, 48),
    "unet-with-resnets": ModelCase(unet, call_unet, [*SD_TARGETS, "conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv"], 79),
    "clip": ModelCase(clip, call_clip, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "token_embedding"], 13),
    "llama": ModelCase(llama, call_llama, "all-linear", 14),
    "llama-with-embedding": ModelCase(llama, call_llama, ["q_proj", "embed_tokens", "lm_head"], 4),
}

every_model = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())


def adapted(case: ModelCase) -> tuple[Any, nn.Module, nn.Module]:
    base = case.build().eval()
    model = copy.deepcopy(base)
    adapters = attach(model, LoRA(rank=4), targets=case.targets)
    for value in adapters.parameters().values():
        value.data.normal_(std=0.2)
    return adapters, model, base


@every_model
def test_equals_the_model_with_new_weights(case: ModelCase) -> None:
    adapters, model, base = adapted(case)
    assert len(adapters.layers) == case.num_layers
    weights = {
        f"{path}.weight": layer.stored(
            method.adapt(
                layer.canonical(adapters.layers[path].weight), {**adapters.tensors("default")[path], "scale": torch.tensor(1.0)}, layer
            )
        )
        for path, method in adapters.methods("default").items()
        for layer in [adapters.layers[path].layer]
    }

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = base

        def forward(self) -> Tensor:
            return case.call(self.model)

    expected = functional_call(Caller(), {f"model.{name}": value for name, value in weights.items()}, ())
    torch.testing.assert_close(case.call(model), expected, rtol=1e-3, atol=1e-4)
    plain = case.call(base)
    assert not torch.allclose(plain, expected, rtol=1e-2, atol=1e-2)
    with adapters.disabled():
        assert torch.equal(case.call(model), plain)


@every_model
def test_one_full_graph(case: ModelCase) -> None:
    adapters, model, _ = adapted(case)
    model.train()
    adapters.add("other", LoRA(rank=2, init="gaussian"))
    expected = case.call(model)
    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(len(module.graph.nodes))
        return module

    model.compile(backend=count, fullgraph=True)
    torch.testing.assert_close(case.call(model), expected)
    case.call(model).sum().backward()
    assert all(value.grad is not None for value in adapters.parameters().values())
    with torch.compiler.set_stance("fail_on_recompile"):
        adapters.use("other")
        case.call(model).sum().backward()
        with adapters.disabled():
            case.call(model)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_model
def test_half_precision_base(case: ModelCase, dtype: torch.dtype) -> None:
    base = case.build().eval()
    exact = copy.deepcopy(base)
    model = base.to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        plain = case.call(model)
    adapters = attach(model, LoRA(rank=4), targets=case.targets)
    assert {value.dtype for value in adapters.parameters().values()} == {torch.float32}
    with torch.autocast("cpu", dtype=dtype):
        output = case.call(model)
        assert torch.equal(output, plain)
        assert output.dtype == plain.dtype
        output.float().square().mean().backward()
    assert {value.grad.dtype for value in adapters.parameters().values()} == {torch.float32}
    torch.testing.assert_close(output.float(), case.call(exact), rtol=0.1, atol=0.1)


def test_gradient_checkpointing() -> None:
    found = {}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        adapters, model, _ = adapted(MODELS["unet"])
        model.train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        call_unet(model).square().mean().backward()
        found[checkpointing] = {name: value.grad for name, value in adapters.parameters().items()}
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient)


def test_tied_embeddings_stay_tied() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    adapters = attach(model, LoRA(rank=2), targets=["embed_tokens", "q_proj"])
    model.tie_weights()
    assert model.lm_head.weight is adapters.layers["model.embed_tokens"].base_layer.weight
    assert model.get_input_embeddings() is adapters.layers["model.embed_tokens"]


def test_stable_diffusion_1_has_192_layers() -> None:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    adapters = attach(model, LoRA(rank=4, alpha=1), targets=SD_TARGETS)
    assert len(adapters.layers) == 192
    assert len(str(adapters.plan).splitlines()) < 20
