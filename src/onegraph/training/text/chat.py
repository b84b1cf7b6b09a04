"""Conversations as text: the tokenizer's chat template, and which characters of it the assistant said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from onegraph.errors import DataError
from onegraph.training.text.records import Record

Span = tuple[int, int]
"""From a character to one past the last."""


def set_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Gives a tokenizer the chat template of a file.

    Raises:
        DataError: ``chat-template``.
    """
    try:
        template = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The chat template {path} can't be read: {error}", code="chat-template") from error
    tokenizer.chat_template = template


def require_template(tokenizer: PreTrainedTokenizerBase, record: Record) -> None:
    """Raises DataError, ``chat-template``, when conversations can't be written out."""
    if not tokenizer.chat_template:
        raise DataError(
            f"{record.place} is a conversation, and the tokenizer has no chat template.",
            why="A base model was not trained on conversations: there is no one way to write them out.",
            hint="model.chat_template=FILE (--chat-template), a model that is tuned for chat, or rows with prompt and completion",
            code="chat-template",
        )


def render(tokenizer: PreTrainedTokenizerBase, record: Record, messages: Sequence[dict[str, Any]], *, answer_next: bool = False) -> str:
    """Messages as the template writes them.

    Args:
        tokenizer: Whose template it is.
        record: Where they are from; for its tools, and for errors.
        messages: All of its messages, or the first few.
        answer_next: End with what stands in front of an answer.

    Raises:
        DataError: ``chat-template``: the template refuses them.
    """
    try:
        text = tokenizer.apply_chat_template(list(messages), tools=record.tools, tokenize=False, add_generation_prompt=answer_next)
    except Exception as error:  # a template is a program: whatever it may raise
        raise DataError(
            f"{record.place}: the chat template refuses this conversation: {error}",
            hint="most templates want user and assistant in turn, and a system message only at the start",
            code="chat-template",
        ) from error
    assert isinstance(text, str)
    return text


def answers(tokenizer: PreTrainedTokenizerBase, record: Record, *, last_only: bool) -> tuple[str, list[Span]]:
    """The conversation as text, and the spans of it that the assistant wrote, each with the mark that ends the turn.

    A span begins where the template would have begun the answer had it been asked for one, and ends where the next turn begins, without
    the white space between the two.

    Raises:
        DataError: ``chat-template``: no assistant message, or a template that writes earlier turns another way than the last.
    """
    messages = record.messages
    text = render(tokenizer, record, messages)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= record.num_prompt]
    if not numbers:
        raise DataError(
            f"{record.place}: the conversation has no message of the assistant{' behind its prompt' if record.num_prompt else ''}.",
            why="With train_on=answers only those are learnt.",
            hint='train_on = "all" learns everything',
            code="text-row",
        )
    if marked := _marked(tokenizer, record):
        text, spans = marked
        spans = spans[-len(numbers) :]
    else:
        spans = [_span(tokenizer, record, text, number) for number in (numbers[-1:] if last_only else numbers)]
    return text, spans[-1:] if last_only else spans


def _marked(tokenizer: PreTrainedTokenizerBase, record: Record) -> tuple[str, list[Span]] | None:
    """What a template with ``{% generation %}`` blocks says itself; None for one without."""
    template = tokenizer.get_chat_template(tools=record.tools)
    if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return None
    # its annotation knows only the call that tells no spans
    rendered: Any = render_jinja_template
    texts, spans = rendered(
        conversations=[list(record.messages)],
        tools=record.tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def _span(tokenizer: PreTrainedTokenizerBase, record: Record, text: str, number: int) -> Span:
    content = str(record.messages[number].get("content") or "").strip()
    before = render(tokenizer, record, record.messages[:number], answer_next=True) if number else text[: max(0, text.find(content))]
    start = len(before)
    if not text.startswith(before):
        # the prompt for an answer may hold more than an answer in the history has, such as an empty thought
        start = len(_shared_start(text, before))
    after = render(tokenizer, record, record.messages[: number + 1])
    if text.startswith(after):
        end = len(after)
    else:
        found = text.find(content, start)
        if not content or found < 0:
            raise DataError(
                f"{record.place}: the chat template writes message {number} another way once others follow.",
                why="So it can't be told which tokens are this answer.",
                hint='train_on = "last_answer" learns the last one only; "all" learns everything',
                code="chat-template",
            )
        end = _through_mark(tokenizer, text, found + len(content))
    segment = text[start:end]
    return start, start + len(segment.rstrip()) if segment.strip() else end


def _through_mark(tokenizer: PreTrainedTokenizerBase, text: str, end: int) -> int:
    """Past the special token that stands right behind ``end``, if one does."""
    marks = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
    return next((end + len(mark) for mark in marks if mark and text.startswith(mark, end)), end)


def _shared_start(left: str, right: str) -> str:
    size = next((place for place, (one, other) in enumerate(zip(left, right)) if one != other), min(len(left), len(right)))
    return left[:size]
