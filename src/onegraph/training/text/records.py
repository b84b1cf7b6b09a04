"""Rows of text: JSON Lines and JSON files, found, read and checked; a bad row is named by file and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onegraph.errors import ConfigurationError, DataError, OnegraphError, nearest

ENDINGS = (".jsonl", ".json")
FIELDS = ("messages", "prompt", "completion", "text", "tools")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ELSEWHERE = {
    "conversations": "conversations is ShareGPT's word: call it messages, from role, value content, human user and gpt assistant",
    "instruction": "instruction, input and output are Alpaca's words: write the first two as prompt, output as completion",
    "chosen": "chosen and rejected are rows of preferences, which TRL's DPOTrainer trains on",
}
_SHOWN = 10
_LONGEST_NAME = 255  # bytes that a file system takes
_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, '
    '{"prompt": "...", "completion": "..."} or {"text": "..."}'
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row, checked.

    Args:
        place: "data.jsonl:12".
        messages: A conversation; empty for plain text.
        num_prompt: Messages at its start that are a prompt: they have no loss.
        tools: Descriptions of tools, for the chat template.
        prompt: Plain text in front of what is learnt.
        completion: Plain text that is learnt.
    """

    place: str
    messages: Sequence[dict[str, Any]] = ()
    num_prompt: int = 0
    tools: list[Any] | None = None
    prompt: str = ""
    completion: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether it needs a chat template."""
        return bool(self.messages)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of some files, and which rows they are.

    Args:
        records: In the order of the files and lines.
        fingerprint: A digest of the files' contents.
    """

    records: Sequence[Record]
    fingerprint: str


def read_rows(sources: Sequence[str], label: str) -> Rows:
    """All rows of files and folders.

    Args:
        sources: Files that end in .jsonl or .json, or folders of them.
        label: How the setting is called in messages.

    Raises:
        DataError: ``text-file``: a file that is missing, empty or no JSON; ``text-row``: every bad row, by file and line.
    """
    records: list[Record] = []
    problems: list[OnegraphError] = []
    digest = hashlib.sha256()
    for path in find_files(sources, label):
        content = _content(path)
        digest.update(hashlib.sha256(content).digest())
        before = len(records)
        for place, row in _rows(path, content, problems):
            try:
                records.append(_record(place, row))
            except DataError as error:
                problems.append(error)
        if len(records) == before and not problems:
            raise DataError(f"{path} has no rows.", hint=f"one JSON object a line: {_FORMS}", code="text-file")
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            shown.append(DataError(f"and {len(problems) - _SHOWN} more bad rows", code="text-row"))
        raise ConfigurationError.collected(shown)
    return Rows(records=records, fingerprint=digest.hexdigest())


def find_files(sources: Sequence[str], label: str) -> list[Path]:
    """The files that sources name; a folder stands for all files in it, by name.

    Raises:
        DataError: ``text-file``.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if not source.strip() or len(path.name.encode()) > _LONGEST_NAME:
            raise DataError(f"{label}: {_short(source)!r} is no name of a file or folder.", hint="check the path", code="text-file")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
            if not inside:
                raise DataError(f"{label}: the folder {path} has no {' or '.join(ENDINGS)} file in it.", code="text-file")
            found += inside
        elif not path.exists():
            beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            near = nearest(path.name, beside)
            hint = f"did you mean {', '.join(str(path.parent / name) for name in near)}?" if near else "check the path"
            raise DataError(f"{label}: there is no {path}.", hint=hint, code="text-file")
        elif path.suffix.lower() not in ENDINGS:
            raise DataError(
                f"{label}: {path} ends in {path.suffix or 'nothing'}.",
                why=f"Files of rows are JSON Lines or JSON: {' or '.join(ENDINGS)}.",
                hint=f"one JSON object a line: {_FORMS}",
                code="text-file",
            )
        else:
            found.append(path)
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.", code="text-file") from error


def _rows(path: Path, content: bytes, problems: list[OnegraphError]) -> Iterator[tuple[str, object]]:
    """Place and value of each row; lines that are no JSON go to ``problems``."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"{path}:{content[: error.start].count(bytes([10])) + 1}"
        raise DataError(f"{place}: not UTF-8 text ({error.reason}).", hint="save the file as UTF-8", code="text-file") from error
    if path.suffix.lower() == ".json":
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}.", hint="JSON Lines files end in .jsonl", code="text-file") from error
        if not isinstance(tree, list):
            raise DataError(f"{path} holds {type(tree).__name__}, not a list of rows.", hint=f"[{_FORMS}, ...]", code="text-file")
        for number, row in enumerate(tree):
            if problem := _half_character(row, text):
                problems.append(_bad(f"{path}:[{number}]", problem))
            else:
                yield f"{path}:[{number}]", row
        return
    # not splitlines: text may hold other line ends than the file's
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(_bad(f"{path}:{number}", f"not JSON ({error}): {_short(line)}"))
            continue
        if problem := _half_character(row, line):
            problems.append(_bad(f"{path}:{number}", problem))
        else:
            yield f"{path}:{number}", row


def _half_character(row: object, text: str) -> str | None:
    """What is wrong with a row that holds one half of a surrogate pair: no text, and no tokenizer takes it."""
    if "\\u" not in text:  # only an escape can say one
        return None
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"{error.object[error.start]!a} is half a character: the other half of the pair is missing"
    return None


def _record(place: str, row: object) -> Record:
    """A row, checked."""
    if not isinstance(row, dict):
        raise _bad(place, f"a row is a JSON object, and this is {_short(json.dumps(row))}")
    if "messages" in row:
        tools = row.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise _bad(place, f"tools is {_short(json.dumps(tools))}, not a list")
        return Record(place=place, messages=_messages(place, "messages", row["messages"]), tools=tools)
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            first, second = _messages(place, "prompt", prompt), _messages(place, "completion", completion)
            return Record(place=place, messages=[*first, *second], num_prompt=len(first), tools=row.get("tools"))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise _bad(place, "prompt and completion are two texts, or two lists of messages")
        if not completion:
            raise _bad(place, "completion is empty: there is nothing to learn")
        return Record(place=place, prompt=prompt, completion=completion)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise _bad(place, f"text is {_short(json.dumps(row['text']))}, not a text with something in it")
        return Record(place=place, completion=row["text"])
    missing = [name for name in ("prompt", "completion") if (name in row) != ("prompt" in row and "completion" in row)]
    if missing:
        raise _bad(place, f"it has {missing[0]!r} without {'completion' if missing[0] == 'prompt' else 'prompt'!r}")
    elsewhere = next((meaning for name, meaning in _ELSEWHERE.items() if name in row), None)
    near = {name: match[0] for name in row if (match := nearest(str(name), FIELDS))}
    guess = f"; {elsewhere}" if elsewhere else "".join(f"; is {name!r} meant to be {match!r}?" for name, match in near.items())
    raise _bad(place, f"none of the known fields; it has {', '.join(map(repr, row)) or 'no field'}{guess}")


def _messages(place: str, name: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _bad(place, f"{name} is {_short(json.dumps(value))}, not a list of messages")
    for number, message in enumerate(value):
        at = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise _bad(place, f"{at} is {_short(json.dumps(message))}, not a message with a role and a content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            known = ", ".join(map(repr, message)) or "no field"
            raise _bad(place, f"{at} has no role; it has {known}")
        if role not in _ROLES:
            near = nearest(role, _ROLES) or [{"human": "user", "gpt": "assistant", "bot": "assistant"}.get(role, "user")]
            raise _bad(place, f"{at} has the role {role!r}; did you mean {near[0]!r}?")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _bad(place, f"{at}.content is {_short(json.dumps(content))}, not a text")
    return value


def _bad(place: str, what: str) -> DataError:
    return DataError(f"{place}: {what}", hint=f"a row is {_FORMS}", code="text-row")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def split_off(records: Sequence[Record], chosen: Iterable[int]) -> tuple[list[Record], list[Record]]:
    """The records that are not chosen, and those that are, each in their order."""
    wanted = set(chosen)
    kept = [record for number, record in enumerate(records) if number not in wanted]
    return kept, [record for number, record in enumerate(records) if number in wanted]
