"""Captions: read from files, then varied from epoch to epoch without any state."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onegraph.errors import ConfigurationError, DataError, OnegraphError
from onegraph.training.diffusion.folders import Subset
from onegraph.training.diffusion.metadata import tag_frequency as count_tags
from onegraph.training.streams import stream

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class CaptionSettings:
    """How captions change from one showing of an image to the next; the names are those of the flags.

    Args:
        shuffle_caption: Shuffle the tags that aren't kept.
        keep_tokens: How many leading tags stay in place and are never dropped.
        keep_tokens_separator: Text that ends the kept part instead of a count; a second one starts a kept end.
        caption_separator: What separates tags.
        caption_dropout_rate: Probability, 0 to 1, of an empty caption.
        caption_dropout_every_n_epochs: Every n-th epoch has empty captions only; 0 for never.
        caption_tag_dropout_rate: Probability, 0 to 1, of leaving out a tag that isn't kept.
        caption_prefix: Put before every caption, with a space.
        caption_suffix: Put behind every caption, with a space.

    Raises:
        ConfigurationError: A rate outside 0..1, a negative count or an empty separator; all of them at once.
    """

    shuffle_caption: bool = False
    keep_tokens: int = 0
    keep_tokens_separator: str = ""
    caption_separator: str = ","
    caption_dropout_rate: float = 0.0
    caption_dropout_every_n_epochs: int = 0
    caption_tag_dropout_rate: float = 0.0
    caption_prefix: str = ""
    caption_suffix: str = ""

    def __post_init__(self) -> None:
        problems: list[OnegraphError] = []
        for name in ("caption_dropout_rate", "caption_tag_dropout_rate"):
            rate = getattr(self, name)
            if not 0.0 <= rate <= 1.0:
                problems.append(
                    ConfigurationError(f"--{name}={rate} is not a probability", hint=f"--{name}=0.1, or any number from 0 to 1")
                )
        for name in ("keep_tokens", "caption_dropout_every_n_epochs"):
            count = getattr(self, name)
            if count < 0:
                problems.append(ConfigurationError(f"--{name}={count} is negative", hint=f"--{name}=0 switches it off"))
        if not self.caption_separator:
            problems.append(ConfigurationError("--caption_separator is empty", hint="--caption_separator=, (the default)"))
        if problems:
            raise ConfigurationError.collected(problems)

    @property
    def varies(self) -> bool:
        """Whether a caption can differ between two showings; if not, its encoding may be cached."""
        rates = self.caption_dropout_rate > 0 or self.caption_tag_dropout_rate > 0
        return self.shuffle_caption or rates or self.caption_dropout_every_n_epochs > 0


def read_caption(path: Path) -> str:
    """The first line of a caption file, without surrounding blanks.

    Raises:
        DataError: ``caption-encoding``, not UTF-8; ``caption-unreadable``, the file can't be opened.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"caption {path} can't be read: {error.strerror or error}", hint=f"ls -la {shlex.quote(str(path))}", code="caption-unreadable"
        ) from error
    try:
        text = data.decode("utf-8-sig")
        offset = data.find(b"\0")
    except UnicodeDecodeError as error:
        text, offset = "", error.start
    if offset >= 0:
        likely = _likely_encoding(data)
        quoted, new = shlex.quote(str(path)), shlex.quote(f"{path}.new")
        raise DataError(
            f"caption {path} is not UTF-8 text: byte {data[offset]:#04x} at offset {offset}",
            why=f"Captions are read as UTF-8; this one looks like {likely}.",
            hint="it doesn't look like text: delete it, or write the caption again"
            if likely == "binary data"
            else f"iconv -f {likely} -t UTF-8 {quoted} > {new} && mv {new} {quoted}",
            code="caption-encoding",
        )
    return re.split(r"\r\n|\n|\r", text, maxsplit=1)[0].strip()


def read_captions(subsets: Sequence[Subset]) -> list[list[str]]:
    """The caption of every image of every folder: its file's first line, or the folder's words where there is no file.

    Raises:
        DataError: As `read_caption`; when several files are wrong, one error that names the first 20.
    """
    problems: list[DataError] = []
    captions: list[list[str]] = []
    for subset in subsets:
        captions.append([])
        for path in subset.caption_files:
            try:
                captions[-1].append(subset.words if path is None else read_caption(path))
            except DataError as error:
                problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise DataError(
            f"{len(problems)} captions can't be read:",
            why="\n".join([f"  {problem.what}. {problem.why}" for problem in problems[:_SHOWN]] + more),
            hint=f"for the first: {problems[0].hint}",
            code=problems[0].code,
        )
    return captions


def vary_caption(caption: str, settings: CaptionSettings, *, seed: int, epoch: int, index: int) -> str:
    """The caption as one epoch shows it: a pure function of its arguments, so a resumed run repeats it.

    Args:
        caption: As read from its file.
        settings: What may change.
        seed: The run's seed.
        epoch: From 0; with ``caption_dropout_every_n_epochs`` = 2 the second, fourth ... epoch (1, 3 ...) is without captions.
        index: The showing's number in the epoch before shuffling, so that the repeats of an image differ.
    """
    every = settings.caption_dropout_every_n_epochs
    if every > 0 and (epoch + 1) % every == 0:
        return ""
    random = stream(seed, "caption", epoch, index)
    # Always drawn, so that switching dropout on doesn't change how the tags of the remaining captions are shuffled.
    if random.random() < settings.caption_dropout_rate:
        return ""
    text = " ".join(part for part in (settings.caption_prefix, caption, settings.caption_suffix) if part)
    separator, between = settings.caption_separator, f"{settings.caption_separator.strip() or settings.caption_separator} "
    marker = settings.keep_tokens_separator
    marked = bool(marker) and marker in text
    if not marked and not settings.shuffle_caption and settings.caption_tag_dropout_rate == 0:
        return text
    tail: list[str] = []
    if marked:
        start, _, rest = text.partition(marker)
        middle, _, end = rest.partition(marker)
        head, tags, tail = _tags(start, separator), _tags(middle, separator), _tags(end, separator)
    else:
        every_tag = _tags(text, separator)
        head, tags = every_tag[: settings.keep_tokens], every_tag[settings.keep_tokens :]
    if settings.shuffle_caption:
        random.shuffle(tags)
    if settings.caption_tag_dropout_rate > 0:
        tags = [tag for tag in tags if random.random() >= settings.caption_tag_dropout_rate]
    return between.join([*head, *tags, *tail])


def tag_frequency(subsets: Sequence[Subset], captions: Sequence[Sequence[str]] | None = None) -> dict[str, dict[str, int]]:
    """How often each tag occurs in each folder, for the ``ss_tag_frequency`` metadata; repeats don't count.

    Args:
        subsets: Training folders, and regularisation folders if there are any.
        captions: As `read_captions` returned them; read when omitted.
    """
    if captions is None:
        captions = read_captions(subsets)
    texts: dict[str, list[str]] = {}
    for subset, found in zip(subsets, captions, strict=True):
        texts.setdefault(subset.folder.name, []).extend(found)
    return {name: count_tags(found) for name, found in texts.items()}


def _tags(text: str, separator: str) -> list[str]:
    return [tag.strip() for tag in text.split(separator) if tag.strip()]


def _likely_encoding(data: bytes) -> str:
    """A guess by byte patterns: enough to put the right name into an iconv command."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    if b"\0" in data:
        odd, even = data[1::2].count(0), data[0::2].count(0)
        if min(odd, even) == 0 and max(odd, even) * 4 >= len(data):
            return "UTF-16LE" if odd else "UTF-16BE"
        return "binary data"
    if any(byte < 0x20 and byte not in b"\t\n\v\f\r\x1b" for byte in data):
        return "binary data"
    runs = re.findall(rb"[\x80-\xff]+", data)
    if all(len(run) == 1 for run in runs):
        return "CP1252"  # single accented letters between ASCII ones
    for encoding, script in (("SHIFT_JIS", r"[\u3041-\u30ff]"), ("EUC-KR", r"[\uac00-\ud7a3]{2}"), ("GB18030", r"[\u4e00-\u9fff]{2}")):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if re.search(script, text) and not re.search(r"[\uff61-\uff9f]", text):
            return encoding
    return "CP1251" if all(byte >= 0xC0 or byte in b"\xa8\xb8" for run in runs for byte in run) else "CP1252"
