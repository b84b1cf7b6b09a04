"""Generation compiled with a static cache: every row as its adapter alone, one graph for all blocks, none for another prompt or adapter."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onegraph
from onegraph import peft
from onegraph.adapters import Adapters, attach
from onegraph.compiling import Watch, eager
from onegraph.errors import AdapterError
from onegraph.methods import LoRA

transformers = pytest.importorskip("transformers")

NAMES: list[str | None] = ["french", "legal", None, "short"]
PADS = [3, 0, 2, 0]
LENGTH, NUM_NEW = 9, 4
_SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
_MORE = {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def llama(num_layers: int = 2) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=num_layers, **_SIZES, **_MORE))


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(num_hidden_layers=1, **_SIZES, **_MORE))


def gemma2() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **_SIZES, **_MORE))


def gemma3() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **_SIZES, **_MORE))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0))


def t5(num_layers: int = 2) -> nn.Module:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": num_layers, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    )


def bart(num_layers: int = 2) -> nn.Module:
    sizes = {"vocab_size": 64, "d_model": 16, "max_position_embeddings": 64}
    layers = {"encoder_layers": num_layers, "decoder_layers": num_layers, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **layers, **heads, **tokens))


TARGETS = {"gpt2": ["c_attn", "mlp.c_proj"], "t5": ["q", "v", "wo"], "bart": ["q_proj", "v_proj", "fc2"]}


@dataclass
class Subject:
    """A model with three adapters, and prompts for it."""

    model: Any
    adapters: Adapters

    @property
    def padded_left(self) -> bool:
        return not self.model.config.is_encoder_decoder

    def prompts(self, pads: list[int], length: int = LENGTH) -> dict[str, Tensor]:
        ids = torch.randint(2, 60, (len(pads), length), generator=torch.Generator().manual_seed(length))
        places = torch.arange(length)[None] >= torch.tensor(pads)[:, None]
        if not self.padded_left:
            places = places.flip(1)
        return {"input_ids": ids * places, "attention_mask": places.long()}

    def generate(self, pads: list[int] = PADS, length: int = LENGTH, **options: Any) -> Any:
        settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "cache_implementation": "static", "max_cache_len": 24}
        return self.model.generate(**self.prompts(pads, length), **{**settings, **options})

    def logits(self, **options: Any) -> Tensor:
        """What the tokens were chosen by (B, new tokens, vocabulary)."""
        found = self.generate(output_logits=True, return_dict_in_generate=True, **options)
        return torch.stack(found.logits, 1)

    def alone(self, names: list[str | None] = NAMES, pads: list[int] = PADS) -> Tensor:
        """Each row by itself: its own adapter active, its prompt without padding, nothing compiled."""
        everything = self.prompts(pads)
        rows = []
        with eager():
            for row, (name, pad) in enumerate(zip(names, pads, strict=True)):
                self.adapters.use(name)
                own = slice(pad, None) if self.padded_left else slice(0, LENGTH - pad)
                options = {"max_new_tokens": NUM_NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
                found = self.model.generate(**{key: value[row : row + 1, own] for key, value in everything.items()}, **options)
                rows.append(torch.stack(found.logits, 1))
        self.adapters.use("french")
        return torch.cat(rows)


def subject(make: Callable[[], nn.Module]) -> Subject:
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # of a size at which adapters and neighbours make a difference
        parameter.data = torch.randn_like(parameter) * 0.3 if parameter.dim() > 1 else parameter.data
    name = getattr(make.func if isinstance(make, functools.partial) else make, "__name__", "")
    targets = TARGETS.get(name, ["q_proj", "v_proj", "down_proj"])
    adapters = attach(model, LoRA(rank=4), targets=targets, name="french")
    adapters.add("legal", LoRA(rank=4))
    adapters.add("short", LoRA(rank=2))
    for name in adapters.names:
        values = {path: {k: torch.randn(t.shape) * 0.4 for k, t in layer.items()} for path, layer in adapters.tensors(name).items()}
        adapters.load_tensors(name, values)
    return Subject(model, adapters)


def warm_up(it: Subject) -> None:
    """What a program does before it serves: a batch without padding and one with it, and one with an adapter a row."""
    it.generate([0] * 4)
    it.generate(PADS)
    with it.adapters.rows(NAMES):
        it.generate(PADS)


def everything(it: Subject) -> None:
    """What costs nothing after the warm-up."""
    for name in (*it.adapters.names, None):
        it.adapters.use(name)
        it.generate()
    it.adapters.use("french")
    with it.adapters.disabled():
        it.generate()
    it.adapters.scale("french", 0.5)
    it.generate([0] * 4, 5)
    it.generate([1, 0, 4, 2], 12, max_new_tokens=9)
    with it.adapters.rows([None, "short", "legal", "legal"]):
        it.generate(length=7, do_sample=True)
    it.adapters.scale("french", 1.0)


# Decoding takes a graph for each kind of block: Gemma has two, of which one looks back over a window, here one shorter than every prompt.
@pytest.mark.parametrize(
    ("make", "regions", "kinds"),
    [(llama, "blocks", 1), (llama, "whole", 1), (qwen2, "blocks", 1), (gemma2, "blocks", 2), (gemma3, "whole", 1), (gpt2, "blocks", 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rows_are_as_alone_and_nothing_recompiles(make: Callable[[], nn.Module], regions: Any, kinds: int) -> None:
    it = subject(make)
    expected = it.alone()
    assert not torch.allclose(expected, it.alone(["french"] * 4), atol=0.05)  # the adapters differ
    onegraph.compile(it.model, backend="eager", regions=regions)
    with Watch() as watch:
        it.generate([0] * 4)
        it.generate(PADS)
        plain = watch.graphs
        with it.adapters.rows(NAMES):
            it.generate(PADS)
        rows = watch.graphs - plain
        watch.warm()
        with torch.compiler.set_stance("fail_on_recompile"):
            everything(it)
        assert watch.recompiles == []
    assert plain <= 3 * kinds  # prompts with padding and without, and decoding
    assert rows <= 2 * kinds
    with it.adapters.rows(NAMES):
        found = it.logits()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", [t5, bart])
def test_a_decoder_that_looks_at_an_encoder(make: Callable[[], nn.Module]) -> None:
    """T5: the first block, which has the position bias, is a kind of its own; so is the encoder's. BART has one kind in each."""
    it = subject(make)
    expected = it.alone()
    onegraph.compile(it.model, backend="eager")
    with Watch() as watch:
        warm_up(it)
        it.generate([0] * 4, 5)  # how long the encoder's input is turns into no part of the graph at the second length
        it.generate(PADS, 5)
        with it.adapters.rows(NAMES):
            it.generate(PADS, 5)
        watch.warm()
        with torch.compiler.set_stance("fail_on_recompile"):
            everything(it)
        assert watch.recompiles == []
    with it.adapters.rows(NAMES):
        torch.testing.assert_close(it.logits(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "layers", "graphs"), [(llama, (1, 4), 2), (t5, (2, 4), 6), (bart, (1, 3), 3)], ids=["llama", "t5", "bart"]
)
def test_more_blocks_are_no_more_graphs(make: Callable[[int], nn.Module], layers: tuple[int, int], graphs: int) -> None:
    if make is not llama and torch.__version__ < "2.12":
        pytest.skip("dynamo guards on the number that takes the encoder's keys and values")
    counts = []
    for num_layers in layers:
        torch._dynamo.reset()
        it = subject(functools.partial(make, num_layers))
        onegraph.compile(it.model, backend="eager")
        with Watch() as watch:
            it.generate(max_new_tokens=3)
            counts.append(watch.graphs)
    assert counts == [graphs, graphs]


def test_without_it_every_block_and_every_length_is_a_graph() -> None:
    """The control: blocks compiled as torch does it."""
    it = subject(llama)
    for block in it.model.model.layers:
        block.compile(backend="eager")
    with Watch() as watch:
        it.generate()
        assert watch.graphs == 4
        watch.warm()
        it.generate(length=12)
        assert watch.recompiles
    with pytest.raises(RuntimeError, match="recompile"), torch.compiler.set_stance("fail_on_recompile"):
        it.generate([0] * 4, 5)


def test_under_aot_eager_tokens_are_those_of_eager() -> None:
    it = subject(llama)
    plain, expected = it.generate(), it.alone()
    sampled = {"do_sample": True, "temperature": 1.5}
    torch.manual_seed(3)
    drawn = it.generate(**sampled)
    onegraph.compile(it.model, backend="aot_eager")
    assert torch.equal(it.generate(), plain)
    torch.manual_seed(3)
    assert torch.equal(it.generate(**sampled), drawn)
    assert not torch.equal(drawn, plain)
    with it.adapters.rows(NAMES):
        torch.testing.assert_close(it.logits(), expected, rtol=1e-4, atol=1e-4)


def test_another_number_of_rows_costs_one_more_of_each() -> None:
    it = subject(lambda: llama(1))
    onegraph.compile(it.model, backend="eager")
    it.generate()
    with Watch() as watch:
        it.generate([2, 0])
        assert watch.graphs == 2
        watch.warm()
        with torch.compiler.set_stance("fail_on_recompile"):
            it.generate([2, 0, 0])
            it.generate(PADS * 2)


# Rows that are repeated


@pytest.mark.parametrize("make", [llama, t5, bart], ids=["llama", "t5", "bart"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "top_k": 1, "num_return_sequences": 2}],
    ids=["beams", "beams returned", "sequences"],
)
def test_beams_and_sequences_have_the_adapter_of_their_row(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    it = subject(make)
    expected = []
    for row, name in enumerate(NAMES):
        it.adapters.use(name)
        expected.append(it.generate(**options).unflatten(0, (4, -1))[row])
    it.adapters.use("french")
    wrong = it.generate(**options)
    with it.adapters.rows(NAMES):
        found = it.generate(**options)
        again = it.generate(**options)
        once = it.generate()
    assert torch.equal(found, torch.cat(expected))
    assert not torch.equal(found, wrong)
    assert torch.equal(again, found)
    assert once.shape[0] == 4  # the rows are as they were
    assert "generate" not in vars(it.model)


def test_beams_by_pefts_names_compiled() -> None:
    it = subject(lambda: llama(1))
    model = peft.get_peft_model(llama(2).eval(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"), "one")
    model.add_adapter("two", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name in ("one", "two"):
        model.adapters.load_tensors(
            name, {path: {k: torch.randn(t.shape) for k, t in layer.items()} for path, layer in model.adapters.tensors(name).items()}
        )
    options = {**it.prompts([2, 0]), "max_new_tokens": 4, "num_beams": 2, "cache_implementation": "static"}
    expected = []
    for row, name in enumerate(("one", "two")):
        model.set_adapter(name)
        expected.append(model.generate(**options)[row])
    onegraph.compile(model.get_base_model(), backend="eager")
    with Watch() as watch:
        found = model.generate(**options, adapter_names=["one", "two"])
        assert watch.graphs == 2
    assert torch.equal(found, torch.stack(expected))


def test_rows_inside_rows_are_repeated_once() -> None:
    it = subject(lambda: llama(1))
    with it.adapters.rows(["french", "legal"]):
        outer = it.generate([0, 0], num_beams=2)
        with it.adapters.rows(["legal"] * 2):
            assert not torch.equal(it.generate([0, 0], num_beams=2), outer)
        assert torch.equal(it.generate([0, 0], num_beams=2), outer)
        with it.adapters.disabled():
            it.generate([0, 0], num_beams=2)
        with it.adapters.rows(["french", "french", "legal", "legal"]):  # one for every beam, as its caller likes
            assert torch.equal(it.generate([0, 0], num_beams=2), outer)


@pytest.mark.parametrize("backend", ["no", "eager"])
def test_another_number_of_prompts_is_found_before_the_model_runs(backend: str) -> None:
    it = subject(lambda: llama(1))
    onegraph.compile(it.model, backend=backend)
    with pytest.raises(AdapterError) as raised, Watch() as watch, it.adapters.rows(["french", "legal", None]):
        it.generate([0, 0], num_beams=2)
    assert raised.value.code == "row-count"
    assert "3 rows were named, but generate() got 2" in str(raised.value)
    assert watch.graphs == 0
    assert it.generate([0, 0]).shape == (2, LENGTH + NUM_NEW)


# transformers' own compiling


@pytest.fixture
def asked() -> Any:
    """Transformers is asked to compile on every device, as it does by itself on a GPU."""
    settings = transformers.CompileConfig(backend="eager", mode=None)
    settings._compile_all_devices = True
    return settings


def test_transformers_compiles_no_second_time(asked: Any) -> None:
    it = subject(llama)
    expected = it.generate()
    compiled = onegraph.compile(it.model, backend="eager")
    with Watch() as watch:
        assert torch.equal(it.generate(compile_config=asked), expected)
        assert all("_run" in found.function for found in watch.compilations)
    assert "_compiled_call" not in vars(it.model)
    other = copy.deepcopy(it.model)
    pickle.loads(pickle.dumps(it.model))
    compiled.restore()
    with Watch() as watch:
        for model in (it.model, other):
            again = Subject(model, it.adapters)
            assert torch.equal(again.generate(compile_config=asked), expected)
            assert "_compiled_call" in vars(model)  # the control: now it is transformers' own
    assert watch.graphs


def test_a_cache_that_grows_is_compiled_too() -> None:
    it = subject(llama)
    options = {"cache_implementation": None, "max_cache_len": None}
    expected = it.generate(**options, max_new_tokens=6)
    onegraph.compile(it.model, backend="eager")
    with Watch() as watch:
        assert torch.equal(it.generate(**options, max_new_tokens=6), expected)
        assert watch.graphs <= 4
        watch.warm()
        with torch.compiler.set_stance("fail_on_recompile"):
            it.generate(**options, max_new_tokens=9)
