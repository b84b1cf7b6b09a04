"""Prompts to token ids, and token ids to what the UNet reads.

Shapes: B prompt, N chunk, T = 77 token of a chunk, C channel of the text encoder; L = 75 N + 2 tokens joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from onegraph.errors import ConfigurationError

CHUNK = 75
TOKENS = CHUNK + 2
# What people write for the length, and the chunks it means: 75 tokens of text each, begin and end around them.
CHUNKS = {75: 1, 77: 1, 150: 2, 225: 3}


def num_chunks(max_token_length: int | None) -> int:
    """How many chunks of 75 a ``max_token_length`` means.

    Args:
        max_token_length: 75 or 77 (the same), 150, 225; None for 77.

    Raises:
        ConfigurationError: ``max-token-length``.
    """
    if max_token_length is None:
        return 1
    if max_token_length not in CHUNKS:
        raise ConfigurationError(
            f"max_token_length is {max_token_length}",
            why="Prompts are cut into chunks of 75 tokens.",
            hint="Use 77, 150 or 225.",
            code="max-token-length",
        )
    return CHUNKS[max_token_length]


def tokenize(tokenizer: CLIPTokenizer, captions: str | Sequence[str], max_token_length: int | None = 77) -> Tensor:
    """Token ids in chunks; a longer caption is cut.

    Each chunk is begin, 75 tokens, end. Where the family pads with the end token (1.x), the padding is all ends; where it pads with
    another (2.x), one end closes the text, also in a chunk that the text fills, and a chunk without text begins with an end.

    Shapes: returns (B, N, 77) int64.

    Args:
        tokenizer: The base model's.
        captions: One or several.
        max_token_length: 77, 150 or 225; None for 77.

    Raises:
        ConfigurationError: ``max-token-length``.
    """
    chunks = num_chunks(max_token_length)
    length = chunks * CHUNK + 2
    captions = [captions] if isinstance(captions, str) else list(captions)
    rows = tokenizer(captions, padding="max_length", truncation=True, max_length=length).input_ids
    ids_BL = torch.tensor(rows, dtype=torch.int64).reshape(len(captions), length)
    body_BNL = ids_BL[:, 1:-1].reshape(len(captions), chunks, CHUNK)
    begin = ids_BL[:, :1, None].expand(-1, chunks, 1)
    last = ids_BL[:, -1:, None].expand(-1, chunks, 1)
    ids_BNT = torch.cat([begin, body_BNL, last], dim=2)
    pad, end = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    if pad != end:
        full = (ids_BNT[:, :, -2] != end) & (ids_BNT[:, :, -2] != pad)
        ids_BNT[:, :, -1] = torch.where(full, end, ids_BNT[:, :, -1])
        ids_BNT[:, :, 1] = torch.where(ids_BNT[:, :, 1] == pad, end, ids_BNT[:, :, 1])
    return ids_BNT


def check_clip_skip(text_encoder: CLIPTextModel, clip_skip: int | None) -> int:
    """How many of the encoder's layers run.

    Args:
        text_encoder: The base model's.
        clip_skip: 1 or None: all of them; 2: all but the last; and so on.

    Raises:
        ConfigurationError: ``clip-skip``, when no layer would be left.
    """
    layers = int(text_encoder.config.num_hidden_layers)
    skip = 1 if clip_skip is None else clip_skip
    if not 1 <= skip <= layers:
        raise ConfigurationError(
            f"clip_skip is {clip_skip}",
            why=f"The text encoder has {layers} layers; clip_skip counts from the last one, which is 1.",
            hint=f"Use a number from 1 to {layers}; 2 is usual for models trained with it.",
            code="clip-skip",
        )
    return layers - (skip - 1)


def encode(text_encoder: CLIPTextModel, input_ids: Tensor, clip_skip: int | None = None) -> Tensor:
    """``hidden_states[-clip_skip]`` followed by the final norm, chunks joined: what cross attention reads.

    The layers behind the wanted one are not run. Plain modules in a plain loop: it traces as one graph; layers may be compiled in place.

    Shapes: ``input_ids`` (B, N, 77) or (B, 77) int64; returns (B, 75 N + 2, C), C and dtype the text encoder's.

    Args:
        text_encoder: CLIP's text model, with or without adapters.
        input_ids: From ``tokenize``.
        clip_skip: 1 or None for the last layer's output, 2 for the one before.

    Raises:
        ConfigurationError: ``clip-skip``.
    """
    count = check_clip_skip(text_encoder, clip_skip)
    num_prompts, tokens = input_ids.shape[0], input_ids.shape[-1]
    hidden_BTC = text_encoder.embeddings(input_ids=input_ids.reshape(-1, tokens))
    mask = _causal_mask(hidden_BTC) if text_encoder.config._attn_implementation == "eager" else None
    for layer in text_encoder.encoder.layers[:count]:
        hidden_BTC = layer(hidden_BTC, mask, is_causal=True)
    hidden_BTC = text_encoder.final_layer_norm(hidden_BTC)
    return join_chunks(hidden_BTC.reshape(num_prompts, -1, tokens, hidden_BTC.shape[-1]))


def join_chunks(hidden_BNTC: Tensor) -> Tensor:
    """Begin of the first chunk, the 75 of each, end of the last.

    Shapes: (B, N, T, C) -> (B, N (T - 2) + 2, C).
    """
    if hidden_BNTC.shape[1] == 1:
        return hidden_BNTC[:, 0]
    body = hidden_BNTC[:, :, 1:-1].flatten(1, 2)
    return torch.cat([hidden_BNTC[:, 0, :1], body, hidden_BNTC[:, -1, -1:]], dim=1)


def _causal_mask(hidden: Tensor) -> Tensor:
    """Added to the scores by the attention that takes no ``is_causal``."""
    tokens = hidden.shape[1]
    return torch.full((tokens, tokens), torch.finfo(hidden.dtype).min, dtype=hidden.dtype, device=hidden.device).triu(1)[None, None]
