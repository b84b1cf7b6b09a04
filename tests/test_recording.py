"""Hidden states and attentions of transformers models, compiled: recorded as in eager, and later calls go on compiled."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import onegraph
from onegraph.compiling import Watch
from onegraph.compiling.recording import _say_once
from onegraph.methods import LoRA

transformers = pytest.importorskip("transformers")

IDS = torch.arange(2, 12).view(2, 5)


def llama(attention: str = "sdpa") -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation=attention)).eval()
    onegraph.attach(model, LoRA(rank=2), targets=["q_proj"])
    return model


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [tensor for each in value for tensor in tensors(each)] if value is not None else []


def run(model: nn.Module, **options: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(input_ids=IDS, use_cache=False, **options))


def hooks_of(model: nn.Module) -> list[Any]:
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


@pytest.mark.parametrize("regions", ["blocks", "whole"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_is_recorded_is_what_eager_records(attention: str, regions: Literal["blocks", "whole"]) -> None:
    calls: list[dict[str, Any]] = [{}, {"output_hidden_states": True}, {}, {"output_hidden_states": [-2]}]
    if attention == "eager":
        calls += [{"output_attentions": True}, {"output_attentions": True, "output_hidden_states": True}, {}]
    plain, model = llama(attention), llama(attention)
    compiled = onegraph.compile(model, backend="aot_eager", regions=regions)
    with Watch() as watch:
        for options in calls:
            torch.testing.assert_close(run(model, **options), run(plain, **options), rtol=1e-4, atol=1e-4)
        assert watch.graphs
        watch.warm()
        with torch.compiler.set_stance("fail_on_recompile"):
            for options in calls:
                run(model, **options)
        assert watch.recompiles == []
    compiled.restore()
    assert not any("onegraph" in repr(hook) for hook in hooks_of(model))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_call_that_runs_uncompiled_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_once.cache_clear()
    model = llama("eager")
    onegraph.compile(model, backend="eager")
    run(model, output_hidden_states=True)
    assert caplog.messages == []
    for _ in range(2):
        run(model, output_attentions=True)
    said = "LlamaDecoderLayer runs uncompiled where transformers records what is inside of it (attentions)"
    assert [message for message in caplog.messages if "uncompiled" in message] == [said]


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_recorded_before_it_was_compiled(regions: Literal["blocks", "whole"]) -> None:
    model = llama()
    expected = run(model, output_hidden_states=True)
    onegraph.compile(model, backend="eager", regions=regions)
    torch.testing.assert_close(run(model, output_hidden_states=True), expected)
    torch.testing.assert_close(run(model), expected[:1])


def test_hidden_states_are_compiled_and_have_gradients() -> None:
    plain, model = llama(), llama()
    onegraph.compile(model, backend="aot_eager")
    gradients = []
    with Watch() as watch:
        for each in (plain, model):
            each(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states[1].square().sum().backward()
            gradients.append([value.grad for value in onegraph.adapters_of(each).parameters().values()])
        assert watch.graphs
    torch.testing.assert_close(gradients[1], gradients[0])
    assert any(gradient is not None and gradient.any() for gradient in gradients[0])


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="dynamo reads the variable since 2.14")
def test_without_it_a_block_with_such_hooks_can_not_be_compiled() -> None:
    """The control: blocks compiled as torch does it."""
    model: Any = llama()
    run(model, output_hidden_states=True)
    for block in model.model.layers:
        block.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ContextVar"):
        run(model)
