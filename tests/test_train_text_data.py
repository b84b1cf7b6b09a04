"""Rows, conversations, tokens, batches: what is read, what has a loss, what shares a row."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import onegraph
from onegraph.compiling import Watch
from onegraph.errors import ConfigurationError, DataError, ModelFileError
from onegraph.training.text.batches import IGNORED, Batch, Batches
from onegraph.training.text.configuration import DataSettings
from onegraph.training.text.encoding import Document, Encoded, encode
from onegraph.training.text.layout import choose_widths, pack
from onegraph.training.text.recipe import Recipe, require_looking_back, require_separate_documents
from onegraph.training.text.records import read_rows
from tiny_text import CHATML, chat, tiny_llama, tokenizer_of_bytes, write_rows

# Rows


def encoded(tmp_path: Path, *rows: object, template: str | None = CHATML, tokenizer: Any = None, **settings: Any) -> Encoded:
    found = read_rows([str(write_rows(tmp_path / "rows.jsonl", rows))], "data.train")
    return encode(found.records, tokenizer or tokenizer_of_bytes(template), DataSettings(**settings))


def test_rows_come_from_files_and_folders_in_order(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write_rows(tmp_path / "more" / "b.jsonl", [{"text": "three"}])
    (tmp_path / "more" / "a.json").write_text(json.dumps([{"text": "two"}]))
    first = write_rows(tmp_path / "first.jsonl", [{"text": "one\u2028still one"}])  # a line end to str.splitlines, none to JSON Lines
    records = read_rows([str(first), str(tmp_path / "more")], "data.train").records
    assert [record.completion for record in records] == ["one\u2028still one", "two", "three"]
    assert [Path(record.place).name for record in records] == ["first.jsonl:1", "a.json:[0]", "b.jsonl:1"]


BAD_ROWS: list[tuple[object, str]] = [
    (["a"], "a row is a JSON object"),
    ({"txt": "a"}, "is 'txt' meant to be 'text'?"),
    ({"conversations": []}, "call it messages, from role, value content"),
    ({"prompt": "a"}, "without 'completion'"),
    ({"prompt": "a", "completion": ""}, "nothing to learn"),
    ({"text": 3}, "text is 3"),
    ({"messages": []}, "not a list of messages"),
    ({"messages": [{"content": "a"}]}, "messages[0] has no role"),
    ({"messages": [{"role": "asistant", "content": "a"}]}, "did you mean 'assistant'?"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content is"),
    ({"text": "a\ud800b"}, "'\\ud800' is half a character"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, words: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "good"}, row])
    with pytest.raises(DataError) as caught:
        read_rows([str(path)], "data.train")
    assert caught.value.code == "text-row"
    assert f"{path}:2: " in str(caught.value)
    assert words in str(caught.value)


def test_all_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n\nnot json\n' + '{"x": 1}\n' * 20)
    with pytest.raises(ConfigurationError) as caught:
        read_rows([str(path)], "data.train")
    text = str(caught.value)
    assert f"{path}:2: not JSON" in text
    assert f"{path}:4: not JSON" in text
    assert f"{path}:5: none of the known fields" in text
    assert "and 12 more bad rows" in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", b"", "no rows"),
        ("rows.json", b"{}", "not a list of rows"),
        ("rows.json", b"[" * 10**5, "not JSON: maximum recursion"),
        ("rows.txt", b"{}", "ends in .txt"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "rows.jsonl:2: not UTF-8"),
        ("row.jsonl", b"", "did you mean"),
        ("x" * 250 + ".jsonl", b"", "is no name of a file"),
        ("", b"", "'' is no name of a file"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    if 0 < len(name) < 255:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows([str(tmp_path / ("rows.jsonl" if name == "row.jsonl" else name)) if name else ""], "data.train")
    assert caught.value.code == "text-file"
    assert words in str(caught.value)


# What has a loss


def learnt(document: Document, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The runs of tokens with a loss, as text."""
    runs = itertools.groupby(range(len(document)), key=lambda place: bool(document.trained[place]))
    return [tokenizer.decode(document.ids[list(places)]) for trained, places in runs if trained]


def tokenizer_with_merges() -> PreTrainedTokenizerFast:
    """Tokens of several letters, so that a boundary could fall inside one."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    raw.train_from_iterator(["hello there, how are you? assistant\nfine thanks user\nhello hello there there"] * 4, trainer)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=CHATML)


@pytest.mark.parametrize("merges", [False, True])
def test_only_the_assistant_has_a_loss_in_every_turn(tmp_path: Path, merges: bool) -> None:
    tokenizer = tokenizer_with_merges() if merges else tokenizer_of_bytes()
    row = chat("hello there", "hello, fine thanks ü", "how are you?", "fine  ")
    (document,) = encoded(tmp_path, row, tokenizer=tokenizer).documents
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert tokenizer.decode(document.ids) == text
    assert learnt(document, tokenizer) == ["hello, fine thanks ü<|im_end|>", "fine  <|im_end|>"]
    if merges:
        assert len(document) < len(text.encode()) / 1.5  # tokens of several letters were there
    (last,) = encoded(tmp_path, row, tokenizer=tokenizer, train_on="last_answer").documents
    assert learnt(last, tokenizer) == ["fine  <|im_end|>"]
    (everything,) = encoded(tmp_path, row, tokenizer=tokenizer, train_on="all").documents
    assert everything.trained.sum() == len(document) - 1  # but the first, which nothing predicts


def test_the_prompt_of_a_row_of_messages_has_no_loss(tmp_path: Path) -> None:
    turns = chat("a", "one", "b", "two")["messages"]
    (document,) = encoded(tmp_path, {"prompt": turns[:3], "completion": turns[3:]}).documents
    assert learnt(document, tokenizer_of_bytes()) == ["two<|im_end|>"]


MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
# Thoughts of earlier answers are taken out, as some models have it: a prefix of the conversation is no prefix of its text.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CUTTING = (
    "{% for m in messages %}({{ m['role'] }}){{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [(MARKED, ["one<|im_end|>", "two<|im_end|>"]), (FORGETFUL, ["one<|im_end|>", "<think></think>two<|im_end|>"])],
)
def test_templates_of_other_kinds(tmp_path: Path, template: str, expected: list[str]) -> None:
    (document,) = encoded(tmp_path, chat("a", "one", "b", "two"), template=template).documents
    assert learnt(document, tokenizer_of_bytes()) == expected


def test_a_template_that_rewrites_an_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="another way once others follow") as caught:
        encoded(tmp_path, chat("a", "one", "b", "two"), template=CUTTING)
    assert caught.value.code == "chat-template"
    (document,) = encoded(tmp_path, chat("a", "one", "b", "two"), template=CUTTING, train_on="last_answer").documents
    assert learnt(document, tokenizer_of_bytes()) == ["two"]


def test_a_conversation_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1 is a conversation, and the tokenizer has no chat template") as caught:
        encoded(tmp_path, chat("a", "b"), template=None)
    assert caught.value.code == "chat-template"
    assert encoded(tmp_path, {"text": "no template is needed"}, template=None).documents


def test_a_template_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template refuses this conversation: users only") as caught:
        encoded(tmp_path, chat("a", "b"), template="{{ raise_exception('users only') }}")
    assert caught.value.code == "chat-template"
    with pytest.raises(DataError, match="refuses this conversation: division by zero"):
        encoded(tmp_path, chat("a", "b"), template="{{ 1 / 0 }}")


def test_nothing_of_the_assistant(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no message of the assistant"):
        encoded(tmp_path, chat("a"))


def test_prompts_and_plain_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of_bytes(None)
    first, second = encoded(tmp_path, {"prompt": "2 + 2 =", "completion": " 4"}, {"text": "all of it"}, template=None).documents
    assert learnt(first, tokenizer) == [" 4<|im_end|>"]
    assert learnt(second, tokenizer) == ["ll of it<|im_end|>"]


def test_long_rows(tmp_path: Path) -> None:
    rows = [{"text": "abcdefghij"}, {"text": "xy"}]  # 11 and 3 tokens
    cut = encoded(tmp_path, *rows, max_length=4)
    assert [len(document) for document in cut.documents] == [4, 3]
    assert cut.num_long == 1
    assert [len(document) for document in encoded(tmp_path, *rows, max_length=4, long="drop").documents] == [3]
    split = encoded(tmp_path, *rows, max_length=4, long="split").documents
    assert [len(document) for document in split] == [4, 4, 3, 3]
    assert not any(document.trained[0] for document in split)
    with pytest.raises(DataError) as caught:
        encoded(tmp_path, {"prompt": "abcdef", "completion": "g"}, max_length=4)
    assert caught.value.code == "nothing-to-learn"


# Layout


def documents(*lengths: int) -> list[Document]:
    generator = numpy.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        trained = numpy.ones(length, dtype=bool)
        trained[: 1 + length // 3] = False
        found.append(Document(ids=generator.integers(0, 256, length), trained=trained, place=f"row {number}"))
    return found


def test_packed_rows_hold_each_document_once_and_nearly_fill() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 60) for _ in range(300)]
    rows = pack(lengths, 63)
    assert sorted(number for row in rows for number in row) == list(range(300))
    assert all(sum(lengths[number] for number in row) <= 63 for row in rows)
    assert len(rows) <= sum(lengths) / 63 * 1.05 + 1


def test_a_large_limit_makes_no_wider_rows() -> None:
    assert choose_widths([3, 5, 8, 30, 31], 2, 10**6) == choose_widths([3, 5, 8, 30, 31], 2, 64) == [8, 32]
    assert choose_widths([3], 1, 10**20) == [8]


@pytest.mark.parametrize("num_widths", [1, 2, 3])
def test_no_other_widths_make_less_padding(num_widths: int) -> None:
    chance = random.Random(num_widths)
    for _ in range(20):
        lengths = [chance.randint(1, 64) for _ in range(30)]
        top = -(-max(lengths) // 8) * 8

        def cost(widths: Sequence[int], lengths: list[int] = lengths) -> int:
            return sum(min(width for width in widths if width >= length) for length in lengths)

        others = itertools.chain.from_iterable(itertools.combinations(range(8, top, 8), count) for count in range(num_widths))
        found = choose_widths(lengths, num_widths, 64)
        assert len(found) <= num_widths
        assert cost(found) == min(cost([*some, top]) for some in others)


def batches(lengths: Sequence[int], *, packing: bool = False, seed: int | None = 0, batch_size: int = 4, max_length: int = 32) -> Batches:
    return Batches(documents(*lengths), batch_size=batch_size, max_length=max_length, packing=packing, num_widths=2, pad_id=0, seed=seed)


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_shows_every_document_once_in_few_shapes(packing: bool) -> None:
    made = batches([3, 5, 30, 7, 8, 2, 29, 4, 4], packing=packing)
    epoch = list(made.epoch(0))
    assert len(epoch) == len(made)
    assert sorted(place for batch in epoch for place in batch["places"]) == sorted(f"row {number}" for number in range(9))
    assert len({batch["input_ids"].shape for batch in epoch}) == len(made.widths) <= 2
    assert sum(batch["num_trained"] for batch in epoch) == sum(int(document.trained.sum()) for document in made.documents)
    for batch in epoch:
        labels = batch["labels"]
        assert batch["num_trained"] == int((labels != IGNORED).sum())
        assert bool((labels[labels != IGNORED] == batch["input_ids"][labels != IGNORED]).all())


def test_the_order_is_the_seeds_and_the_epochs_and_can_be_entered_anywhere() -> None:
    made = batches([3, 5, 30, 7, 8, 2, 29, 4, 4] * 3)
    first = [batch["places"] for batch in made.epoch(0)]
    assert first == [batch["places"] for batch in batches([3, 5, 30, 7, 8, 2, 29, 4, 4] * 3).epoch(0)]
    assert first != [batch["places"] for batch in made.epoch(1)]
    assert [batch["places"] for batch in made.epoch(0, 2)] == first[2:]
    stream = made.forever(0, len(made) - 1)
    assert [next(stream)[:2] for _ in range(3)] == [(0, len(made) - 1), (1, 0), (1, 1)]


# The loss


def test_padding_changes_nothing_and_every_token_counts_the_same() -> None:
    model = tiny_llama().eval()
    recipe = Recipe(model=model, device=torch.device("cpu"))
    lengths = [5, 9, 30]
    made = Batches(documents(*lengths), batch_size=4, max_length=32, packing=False, num_widths=1, pad_id=7, seed=None)
    (batch,) = made.epoch(0)
    with torch.no_grad():
        together = recipe.loss(batch)
        alone = []
        for document in documents(*lengths):
            ids = torch.from_numpy(document.ids)[None]
            losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            alone.append(losses[torch.from_numpy(document.trained[1:])])
    torch.testing.assert_close(together, torch.cat(alone).mean())
    assert not torch.isclose(together, torch.stack([losses.mean() for losses in alone]).mean())  # rows don't count the same, tokens do


def test_accumulated_batches_are_one_large_batch() -> None:
    model = tiny_llama()
    recipe = Recipe(model=model, device=torch.device("cpu"))
    large = next(Batches(documents(5, 9, 30, 12), batch_size=4, max_length=32, packing=False, num_widths=1, pad_id=0, seed=None).epoch(0))
    recipe.loss(large).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    halves = [
        Batch(
            input_ids=large["input_ids"][part],
            labels=large["labels"][part],
            num_trained=int((large["labels"][part] != IGNORED).sum()),
            places=(),
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    for half in halves:
        recipe.loss(half, large["num_trained"]).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, expected)
    model.zero_grad()
    for half in halves:
        (recipe.loss(half) / 2).backward()  # the mean of means is something else
    assert not all(
        torch.allclose(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected) if parameter.grad is not None
    )


# Packing


def windowed() -> PreTrainedModel:
    """Attention that looks back 6 tokens at most."""
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=259,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=6,
        )
    )


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=16, n_layer=2, n_head=2, n_positions=32))


@pytest.mark.parametrize("make", [tiny_llama, windowed, gpt2])
def test_packed_documents_are_as_if_each_were_alone(make: Any) -> None:
    model = make().eval()
    recipe = Recipe(model=model, device=torch.device("cpu"))
    made = batches([5, 9, 12, 3, 20, 7], packing=True, seed=None, batch_size=2)
    onegraph.compile(model, backend="aot_eager")
    with torch.no_grad(), Watch() as watch:
        for batch in made.epoch(0):
            logits = recipe.logits(batch)
            wrong = recipe.logits(Batch(**{**batch, "position_ids": torch.arange(32).expand(2, 32)}))  # type: ignore[typeddict-item]
            for line, row in enumerate(_rows_of(made, batch)):
                end = 0
                for number in row:
                    document = made.documents[number]
                    start, end = end, end + len(document)
                    with onegraph.compiling.eager():
                        alone = model(torch.from_numpy(document.ids)[None]).logits[0]
                    torch.testing.assert_close(logits[line, start:end], alone, rtol=1e-4, atol=1e-5)
                    if start:  # without positions that begin again, the second document sees the first
                        assert not torch.allclose(wrong[line, start:end], alone, rtol=1e-2, atol=1e-3)
    assert watch.graphs >= 1
    assert not watch.breaks
    require_separate_documents(recipe, 256)


def _rows_of(made: Batches, batch: Batch) -> list[tuple[int, ...]]:
    numbers = [int(place.removeprefix("row ")) for place in batch["places"]]
    rows = [row.documents for row in made._rows]
    return [row for row in rows if set(row) <= set(numbers)]


def test_a_model_that_looks_ahead_is_refused() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for decoder in (True, False):
        recipe = Recipe(model=BertLMHeadModel(BertConfig(**sizes, is_decoder=decoder)), device=torch.device("cpu"))
        if decoder:
            require_looking_back(recipe, 259)
            continue
        with pytest.raises(ModelFileError, match="sees the token that it is to predict") as caught:
            require_looking_back(recipe, 259)
        assert caught.value.code == "looks-ahead"


def test_a_model_that_mixes_documents_is_refused() -> None:
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=259, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ModelFileError) as caught:
        require_separate_documents(Recipe(model=bloom, device=torch.device("cpu")), 256)
    assert caught.value.code == "packing-leaks"
