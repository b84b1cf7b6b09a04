"""Prompts to ids to hidden states, against the whole text encoder and against the chunks written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tiny_diffusion as tiny
from onegraph.errors import ConfigurationError
from onegraph.training.diffusion.conditioning import encode, tokenize
from onegraph.training.diffusion.families import SD_V1, SD_V2, clip_tokenizer

BEGIN, END = 49406, 49407
CAT = [320, 1125, 539, 320, 2368]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return clip_tokenizer()


@pytest.fixture(scope="module")
def encoder() -> Any:
    return tiny.build("text_encoder", tiny.text_config(layers=3))


def test_the_shipped_tokenizer_is_clips(tokenizer: Any) -> None:
    assert tokenizer("a photo of a cat").input_ids == [BEGIN, *CAT, END]
    assert len(tokenizer) == 49408
    assert tokenizer.decode([320, 1125, 539, 320, 2368]) == "a photo of a cat"


def test_one_chunk_is_padded_with_ends_in_1x_and_with_zeros_in_2x() -> None:
    ids = tokenize(SD_V1.tokenizer(), ["a photo of a cat", ""])
    assert ids.shape == (2, 1, 77)
    assert ids.dtype == torch.int64
    assert ids[0, 0].tolist() == [BEGIN, *CAT] + [END] * 71
    assert ids[1, 0].tolist() == [BEGIN] + [END] * 76
    ids = tokenize(SD_V2.tokenizer(), ["a photo of a cat", ""])
    assert ids[0, 0].tolist() == [BEGIN, *CAT, END] + [0] * 70
    assert ids[1, 0].tolist() == [BEGIN, END] + [0] * 75


@pytest.mark.parametrize(("length", "chunks"), [(None, 1), (75, 1), (77, 1), (150, 2), (225, 3)])
@pytest.mark.parametrize("family", [SD_V1, SD_V2], ids=lambda family: family.name)
def test_long_captions_fill_chunks_of_75(family: Any, length: int | None, chunks: int) -> None:
    ids = tokenize(family.tokenizer(), "cat " * 300, length)
    assert ids.shape == (1, chunks, 77)
    for chunk in ids[0]:
        assert chunk.tolist() == [BEGIN] + [2368] * 75 + [END]


def test_a_caption_that_ends_inside_the_second_chunk() -> None:
    first, second, third = tokenize(SD_V1.tokenizer(), "cat " * 80, 225)[0].tolist()
    assert first == [BEGIN] + [2368] * 75 + [END]
    assert second == [BEGIN] + [2368] * 5 + [END] * 71
    assert third == [BEGIN] + [END] * 76
    first, second, third = tokenize(SD_V2.tokenizer(), "cat " * 80, 225)[0].tolist()
    assert first == [BEGIN] + [2368] * 75 + [END]
    assert second == [BEGIN] + [2368] * 5 + [END] + [0] * 70
    assert third == [BEGIN, END] + [0] * 75


def test_a_caption_of_exactly_75_tokens_in_2x() -> None:
    first, second = tokenize(SD_V2.tokenizer(), "cat " * 75, 150)[0].tolist()
    assert first == [BEGIN] + [2368] * 75 + [END]
    assert second == [BEGIN, END] + [0] * 75


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("clip_skip", [None, 1, 2, 3])
def test_it_is_the_hidden_state_of_the_whole_encoder(encoder: Any, tokenizer: Any, clip_skip: int | None, attention: str) -> None:
    encoder = copy.deepcopy(encoder)
    encoder.set_attn_implementation(attention)
    ids = tokenize(tokenizer, ["a photo of a cat", "cat " * 75])
    with torch.no_grad():
        whole = encoder(ids[:, 0], output_hidden_states=True)
        ours = encode(encoder, ids, clip_skip)
    wanted = encoder.final_layer_norm(whole.hidden_states[-(clip_skip or 1)])
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)
    if clip_skip in (None, 1):
        torch.testing.assert_close(ours, whole.last_hidden_state, rtol=0, atol=1e-6)
    others = [encoder.final_layer_norm(state) for state in whole.hidden_states]
    assert sum(torch.allclose(ours, other, atol=1e-4) for other in others) == 1


def test_chunks_are_encoded_apart_and_joined(encoder: Any, tokenizer: Any) -> None:
    ids = tokenize(tokenizer, ["cat " * 80, "a photo"], 150)
    with torch.no_grad():
        joined = encode(encoder, ids, 2)
        first, second = encode(encoder, ids[:, 0], 2), encode(encoder, ids[:, 1], 2)
    assert joined.shape == (2, 152, 8)
    by_hand = torch.cat([first[:, :76], second[:, 1:]], dim=1)
    torch.testing.assert_close(joined, by_hand, rtol=0, atol=1e-6)


class Doubled(nn.Module):
    """What an adapter looks like from outside: a layer that wraps a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) * self.scale


def test_wrapped_layers_take_part_and_get_gradients(encoder: Any, tokenizer: Any) -> None:
    wrapped = copy.deepcopy(encoder).requires_grad_(False)
    for layer in wrapped.encoder.layers:
        layer.self_attn.q_proj = Doubled(layer.self_attn.q_proj)
    ids = tokenize(tokenizer, "a photo of a cat")
    result = encode(wrapped, ids, 2)
    assert not torch.allclose(result, encode(encoder, ids, 2))
    result.square().mean().backward()
    gradients = [layer.self_attn.q_proj.scale.grad for layer in wrapped.encoder.layers]
    assert gradients[0] is not None
    assert gradients[0] != 0
    assert gradients[2] is None, "the layer that clip_skip=2 leaves out"


def test_it_traces_as_one_graph_and_takes_layers_compiled_in_place(encoder: Any, tokenizer: Any) -> None:
    ids = tokenize(tokenizer, ["cat " * 80], 150)
    wanted = encode(encoder, ids, 2)
    whole = torch.compile(encode, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(encoder, ids, 2), wanted)
    torch._dynamo.reset()
    compiled = copy.deepcopy(encoder)
    for layer in compiled.encoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(encode(compiled, ids, 2), wanted)


@pytest.mark.parametrize("clip_skip", [0, -1, 4])
def test_a_clip_skip_that_leaves_nothing_is_an_error(encoder: Any, tokenizer: Any, clip_skip: int) -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 3") as caught:
        encode(encoder, tokenize(tokenizer, "a"), clip_skip)
    assert caught.value.code == "clip-skip"


def test_another_token_length_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ConfigurationError, match="77, 150 or 225") as caught:
        tokenize(tokenizer, "a", 100)
    assert caught.value.code == "max-token-length"
