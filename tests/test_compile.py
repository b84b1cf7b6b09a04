"""``onegraph.compile``: in place, by blocks or whole, one compilation a block shape, and back."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaForCausalLM

import onegraph as og
from onegraph.compiling import Watch, compiled_of, eager, isolation, protections_for, regions_of
from onegraph.compiling.tuning import tuned_options
from onegraph.errors import CompileError, ConfigurationError


def tiny_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=8,
    )


def tiny_clip(layers: int = 4) -> CLIPTextModel:
    torch.manual_seed(0)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=100,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )


def tiny_llama(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2
        )
    )


class Chain(nn.Module):
    """Equal blocks in a row, declared as diffusers does."""

    _repeated_blocks = ("Block",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Breaking(nn.Module):
    """Breaks the graph: the negative control."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(x)


def unet_inputs(batch: int = 1, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(batch, 4, size, size, generator=generator),
        torch.tensor([7] * batch),
        torch.randn(batch, 5, 16, generator=generator),
    )


def test_regions_of_a_unet_are_transformers_and_resnets() -> None:
    names = {region.class_name for region in regions_of(tiny_unet())}
    assert names == {"Transformer2DModel", "ResnetBlock2D"}


def test_transformers_with_several_blocks_are_compiled_by_block() -> None:
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=8,
        transformer_layers_per_block=(1, 2),
    )
    assert {region.class_name for region in regions_of(unet)} == {"BasicTransformerBlock", "ResnetBlock2D"}


def test_regions_of_language_models() -> None:
    assert [region.class_name for region in regions_of(tiny_clip())] == ["CLIPEncoderLayer"] * 4
    assert [region.class_name for region in regions_of(tiny_llama())] == ["LlamaDecoderLayer"] * 3
    assert [region.path for region in regions_of(nn.Linear(2, 2))] == [""]


@pytest.mark.parametrize("num_blocks", [2, 12])
def test_equal_blocks_share_one_compilation(num_blocks: int) -> None:
    chain = Chain(num_blocks)
    og.attach(chain, og.LoRA(rank=2), targets=["linear"])
    og.compile(chain, backend="aot_eager")
    with Watch() as watch:
        chain(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert watch.graphs == 1
    assert watch.breaks == {}


def test_clip_layers_share_one_compilation() -> None:
    clip = tiny_clip(layers=4)
    og.attach(clip, og.LoRA(rank=2), targets=["q_proj", "v_proj"])
    og.compile(clip, backend="aot_eager")
    with Watch() as watch:
        clip(torch.arange(10)[None]).last_hidden_state.sum().backward()
    # The first layer's input has no gradient: one graph for it, one for all others.
    assert watch.graphs == 2


def test_llama_blocks_share_compilations_in_training() -> None:
    llama = tiny_llama(layers=5)
    adapters = og.attach(llama, og.LoRA(rank=2), targets=["q_proj", "v_proj"])
    og.compile(llama, backend="aot_eager")
    with Watch() as watch:
        llama(torch.arange(10)[None], labels=torch.arange(10)[None], use_cache=False).loss.backward()
    # as the budget says: one graph for each kind of input, the first block's and the others'
    assert watch.graphs == 2 * adapters.graphs.training


def activation_bytes(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What ``run`` returns, and the bytes it keeps for the backward pass beside the model's own parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, sum(kept.values())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_unet_equals_eager_without_a_break(regions: str, checkpointing: bool) -> None:
    unet = tiny_unet().train()
    adapters = og.attach(unet, og.LoRA(rank=2), targets=["to_q", "to_v", "proj_in", "proj_out"])
    for parameter in adapters.parameters().values():
        nn.init.normal_(parameter, std=0.1)
    inputs = unet_inputs()

    def run() -> Tensor:
        output: Tensor = unet(*inputs, return_dict=False)[0]
        return output

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output.square().mean(), list(adapters.parameters().values()))

    expected, eager_bytes = activation_bytes(unet, run)
    expected_gradients = gradients(expected)
    og.compile(unet, backend="aot_eager", regions=regions, gradient_checkpointing=checkpointing)
    with Watch() as watch:
        found, compiled_bytes = activation_bytes(unet, run)
        found_gradients = gradients(found)
    assert watch.breaks == {}
    assert watch.graphs == 1 if regions == "whole" else watch.graphs > 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, expected_gradients)
    assert (compiled_bytes < 0.6 * eager_bytes) == checkpointing


def test_checkpointing_without_compiling_saves_too() -> None:
    unet = tiny_unet().train()
    og.attach(unet, og.LoRA(rank=2), targets=["to_q"])
    inputs = unet_inputs()
    _, without = activation_bytes(unet, lambda: unet(*inputs, return_dict=False)[0])
    og.compile(unet, backend="no", gradient_checkpointing=True)
    _, recomputed = activation_bytes(unet, lambda: unet(*inputs, return_dict=False)[0])
    assert recomputed < 0.6 * without


def test_restore_makes_it_eager_again() -> None:
    chain = Chain(2)
    compiled = og.compile(chain, backend="aot_eager", gradient_checkpointing=True)
    assert compiled_of(chain) is compiled
    compiled.restore()
    assert compiled_of(chain) is None
    with Watch() as watch:
        chain(torch.randn(2, 8))
    assert watch.graphs == 0
    assert all("forward" not in vars(module) for module in chain.modules())


def test_compiling_again_replaces() -> None:
    chain = Chain(2)
    og.compile(chain, backend="eager")
    og.compile(chain, backend="aot_eager", regions="whole")
    with Watch() as watch:
        chain(torch.randn(2, 8))
    assert watch.graphs == 1


def test_eager_runs_without_compiling_and_keeps_what_is_compiled() -> None:
    chain = Chain(3)
    og.compile(chain, backend="aot_eager")
    chain(torch.randn(2, 8))
    with Watch() as watch:
        with eager():
            chain(torch.randn(5, 8))
        chain(torch.randn(2, 8))
    assert watch.graphs == 0


def test_keys_stay_clean_and_model_can_be_copied_and_pickled() -> None:
    chain = Chain(2)
    og.attach(chain, og.LoRA(rank=2), targets=["linear"])
    before = set(chain.state_dict())
    og.compile(chain, backend="aot_eager")
    chain(torch.randn(2, 8))
    assert set(chain.state_dict()) == before
    assert not any("_orig_mod" in key for key in chain.state_dict())
    twin = copy.deepcopy(chain)
    x = torch.randn(2, 8)
    torch.testing.assert_close(twin(x), chain(x))
    assert compiled_of(twin) is None
    torch.testing.assert_close(pickle.loads(pickle.dumps(chain))(x), chain(x))


def test_attaching_after_compiling_works() -> None:
    chain = Chain(2)
    og.compile(chain, backend="aot_eager")
    chain(torch.randn(2, 8))
    adapters = og.attach(chain, og.LoRA(rank=2), targets=["linear"])
    for parameter in adapters.parameters().values():
        nn.init.normal_(parameter)
    x = torch.randn(2, 8)
    found = chain(x)
    with eager():
        torch.testing.assert_close(found, chain(x))


def test_graph_break_is_an_error_by_default_and_counted_otherwise() -> None:
    model = Breaking()
    og.compile(model, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.randn(2, 8))
    og.compile(model, backend="eager", fullgraph=False)
    with Watch() as watch:
        model(torch.randn(2, 8))
    assert len(watch.breaks) == 1


def test_watch_names_the_cause_of_a_recompile() -> None:
    model = Block()
    og.compile(model, backend="eager", dynamic=False)
    with Watch() as watch:
        model(torch.randn(2, 8))
        watch.warm()
        model(torch.randn(2, 8))
        assert watch.recompiles == []
        model(torch.randn(3, 8))
        assert len(watch.recompiles) == 1
    assert "size mismatch" in str(watch.recompiles[0])


class Wider(nn.Linear):
    """One of a class of which each has another shape."""


def widths(first: int) -> nn.Module:
    return nn.Sequential(*(Wider(number, number + 1) for number in range(first, first + 12)))


@pytest.mark.parametrize("older", [False, True])
def test_a_class_has_room_for_all_its_shapes_whatever_others_have(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = older or "recompile_limit" not in inspect.signature(torch.compile).parameters
    if older:  # as before torch 2.13, whose torch.compile has no arguments for it
        monkeypatch.setattr(isolation.inspect, "signature", lambda function: inspect.Signature())
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=20):
        for first in (4, 40):
            model = widths(first)
            run, further = isolation.isolated(_call)
            compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=False, **further)
            with Watch() as watch:
                for layer in model:
                    assert torch.equal(compiled(layer, torch.ones(2, layer.in_features)), layer(torch.ones(2, layer.in_features)))
            assert watch.graphs == 12
            assert torch._dynamo.config.recompile_limit == (128 if raised else 8)
    with torch._dynamo.config.patch(recompile_limit=8):  # without: the ninth shape is over the limit
        plain = torch.compile(_call, backend="eager", fullgraph=True, dynamic=False)
        for layer in widths(80)[:8]:
            plain(layer, torch.ones(2, layer.in_features))
        with pytest.raises(Exception, match="fullgraph"):
            plain(Wider(99, 2), torch.ones(2, 99))


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def test_wrapper_is_refused() -> None:
    with pytest.raises(CompileError, match="wrapper already"):
        og.compile(torch.compile(nn.Linear(2, 2)), backend="eager")


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="backed"):
        og.compile(nn.Linear(2, 2), backed="eager")


def test_protection_is_set_for_inductor_only_and_where_needed() -> None:
    assert protections_for("eager") == ()
    needed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 14)
    assert ("scatter-order-zero-gradients" in {protection.name for protection in protections_for("inductor")}) is needed
    compiled = og.compile(nn.Linear(2, 2), backend="inductor")
    assert ("scatter-order-zero-gradients" in compiled.protections) is needed
    assert og.compile(nn.Linear(2, 2), backend="inductor", protect=False).protections == ()


def test_what_inductor_is_told_depends_on_the_device() -> None:
    """Convolutions keep their layout on a CPU; what is on another device is inductor's to lay out."""
    on_cpu = tuned_options("inductor", nn.Conv2d(2, 2, 3))
    assert on_cpu["layout_optimization"] is False
    elsewhere = tuned_options("inductor", nn.Conv2d(2, 2, 3, device="meta"))
    assert "layout_optimization" not in elsewhere
    assert elsewhere.keys() == {"custom_partitioner_fn"}
    assert tuned_options("aot_eager", nn.Conv2d(2, 2, 3)) == {}
