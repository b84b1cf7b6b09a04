"""Reading captions and varying them from epoch to epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from onegraph.errors import ConfigurationError, DataError
from onegraph.training.diffusion.captions import CaptionSettings, read_caption, read_captions, tag_frequency, vary_caption
from onegraph.training.diffusion.folders import Subset, find_subsets

TAGS = "red, round, apple, leaf, shadow, white background"


def vary(settings: CaptionSettings, *, caption: str = TAGS, seed: int = 1, epoch: int = 0, index: int = 0) -> str:
    return vary_caption(caption, settings, seed=seed, epoch=epoch, index=index)


def subset_of(folder: Path, *captions: bytes | None) -> Subset:
    inner = folder / "3_some words"
    inner.mkdir(parents=True)
    for number, data in enumerate(captions):
        (inner / f"{number}.png").write_bytes(b"x")
        if data is not None:
            (inner / f"{number}.caption").write_bytes(data)
    (subset,) = find_subsets(folder)
    return subset


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a cat\n", "a cat"),
        (b"\xef\xbb\xbfa cat", "a cat"),
        (b"  a cat \r\nsecond line", "a cat"),
        (b"a cat\rold mac", "a cat"),
        ("ein Kätzchen, 猫".encode(), "ein Kätzchen, 猫"),
        ("one\u2028still one".encode(), "one\u2028still one"),
        (b"", ""),
    ],
    ids=["plain", "byte-order-mark", "first-line", "carriage-return", "unicode", "line-separator", "empty"],
)
def test_first_line_of_utf8(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "a.caption"
    path.write_bytes(data)
    assert read_caption(path) == expected


@pytest.mark.parametrize(
    ("data", "offset", "likely"),
    [
        ("a café".encode("cp1252"), 5, "CP1252"),
        ("a cat".encode("utf-16"), 0, "UTF-16"),
        ("a cat".encode("utf-16-le"), 1, "UTF-16LE"),
        ("a cat".encode("utf-16-be"), 0, "UTF-16BE"),
        ("かわいい猫、笑顔".encode("shift_jis"), 0, "SHIFT_JIS"),
        ("고양이 그림".encode("euc-kr"), 0, "EUC-KR"),
        ("cat 一只红色的猫".encode("gb18030"), 8, "GB18030"),
    ],
    ids=["latin", "utf-16", "utf-16-little", "utf-16-big", "japanese", "korean", "chinese"],
)
def test_other_encodings_are_named_with_the_offset_and_the_command(tmp_path: Path, data: bytes, offset: int, likely: str) -> None:
    path = tmp_path / "my file.caption"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_caption(path)
    error = caught.value
    assert error.code == "caption-encoding"
    assert str(path) in error.what
    assert f"offset {offset}" in error.what
    assert likely in error.why
    assert error.hint.startswith(f"iconv -f {likely} -t UTF-8 '{path}'")


def test_binary_data_isnt_sent_through_iconv(tmp_path: Path) -> None:
    path = tmp_path / "a.caption"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x01\xff")
    with pytest.raises(DataError) as caught:
        read_caption(path)
    assert "binary data" in caught.value.why
    assert "iconv" not in caught.value.hint


def test_missing_captions_are_the_folders_words(tmp_path: Path) -> None:
    assert read_captions([subset_of(tmp_path, b"a cat", None)]) == [["a cat", "some words"]]


def test_all_wrong_files_are_in_one_error(tmp_path: Path) -> None:
    subset = subset_of(tmp_path, *([b"\xe9"] * 23), b"fine")
    with pytest.raises(DataError) as caught:
        read_captions([subset])
    text = str(caught.value)
    assert "23 captions" in text
    assert "/19.caption" in text
    assert "/20.caption" not in text
    assert "and 3 more" in text


def test_defaults_change_nothing() -> None:
    settings = CaptionSettings()
    assert not settings.varies
    assert vary(settings, caption="a,  b ,c") == "a,  b ,c"


def test_prefix_and_suffix() -> None:
    assert vary(CaptionSettings(caption_prefix="my", caption_suffix="photo"), caption="cat") == "my cat photo"
    assert vary(CaptionSettings(caption_prefix="my"), caption="") == "my"


def test_shuffling_keeps_the_tags_and_the_first_ones_in_place() -> None:
    settings = CaptionSettings(shuffle_caption=True, keep_tokens=2)
    seen = {vary(settings, epoch=epoch) for epoch in range(30)}
    assert len(seen) > 10
    for caption in seen:
        assert caption.startswith("red, round, ")
        assert sorted(caption.split(", ")) == sorted(TAGS.split(", "))


def test_separator_keeps_the_start_and_the_end() -> None:
    settings = CaptionSettings(shuffle_caption=True, keep_tokens_separator="|||", keep_tokens=9)
    seen = {vary(settings, caption="x, y ||| a, b, c, d ||| z", index=index) for index in range(30)}
    assert len(seen) > 10
    assert all(caption.startswith("x, y, ") and caption.endswith(", z") for caption in seen)


def test_separator_never_reaches_the_model_even_without_shuffling() -> None:
    assert vary(CaptionSettings(keep_tokens_separator="|||"), caption="x ||| a, b") == "x, a, b"


def test_dropout_rate_is_met_and_draws_are_independent_of_it() -> None:
    shuffled = CaptionSettings(shuffle_caption=True)
    dropping = CaptionSettings(shuffle_caption=True, caption_dropout_rate=0.25)
    captions = [vary(dropping, epoch=epoch, index=index) for epoch in range(20) for index in range(100)]
    assert 0.22 < captions.count("") / len(captions) < 0.28
    for index in range(50):
        assert vary(dropping, index=index) in ("", vary(shuffled, index=index))


def test_tag_dropout_spares_the_kept_ones() -> None:
    settings = CaptionSettings(caption_tag_dropout_rate=0.5, keep_tokens=1)
    counts = Counter(tag for index in range(1000) for tag in vary(settings, index=index).split(", "))
    assert counts["red"] == 1000
    for tag in TAGS.split(", ")[1:]:
        assert 430 < counts[tag] < 570


def test_every_second_epoch_is_without_captions() -> None:
    settings = CaptionSettings(caption_dropout_every_n_epochs=2)
    assert [vary(settings, caption="cat", epoch=epoch) for epoch in range(4)] == ["cat", "", "cat", ""]


def test_a_showing_is_a_function_of_seed_epoch_and_index() -> None:
    settings = CaptionSettings(shuffle_caption=True, caption_dropout_rate=0.1, caption_tag_dropout_rate=0.2)
    assert settings.varies
    grid = [(seed, epoch, index) for seed in (1, 2) for epoch in range(3) for index in range(5)]
    first = {key: vary(settings, seed=key[0], epoch=key[1], index=key[2]) for key in grid}
    for key in reversed(grid):
        assert vary(settings, seed=key[0], epoch=key[1], index=key[2]) == first[key]
    for axis in range(3):
        other = {tuple(value if position != axis else 0 for position, value in enumerate(key)) for key in grid}
        assert len(set(first.values())) > len(other), f"axis {axis} changes nothing"


def test_all_wrong_settings_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        CaptionSettings(caption_dropout_rate=1.5, keep_tokens=-1, caption_separator="")
    text = str(caught.value)
    assert all(name in text for name in ("caption_dropout_rate=1.5", "keep_tokens=-1", "caption_separator"))


def test_tag_frequency_counts_images_not_repeats(tmp_path: Path) -> None:
    subset = subset_of(tmp_path, b"Cat, red", b"cat, , blue", None)
    expected = {"3_some words": {"cat": 2, "red": 1, "blue": 1, "some words": 1}}
    assert tag_frequency([subset]) == expected
    assert tag_frequency([subset], [["x"]]) == {"3_some words": {"x": 1}}
