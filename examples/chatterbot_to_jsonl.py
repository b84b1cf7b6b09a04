"""The English part of the chatterbot corpus as rows of conversations, for ``onegraph train text``.

    python examples/chatterbot_to_jsonl.py chatterbot        writes chatterbot/train.jsonl and chatterbot/validation.jsonl

The corpus is the package ``chatterbot-corpus``: YAML files of short conversations, by subject. Every tenth conversation is held out; a
question that is there with several answers stays on one side.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import zlib
from pathlib import Path

import yaml

HELD_OUT = 10


def conversations() -> list[list[str]]:
    """Every conversation of the English corpus with at least a question and an answer."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        raise SystemExit("the corpus is not installed: pip install chatterbot-corpus")
    found = []
    for file in sorted((Path(spec.origin).parent / "data" / "english").glob("*.yml")):
        for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            texts = [" ".join(str(turn).split()) for turn in turns]
            if len(texts) > 1 and all(texts):
                found.append(texts[: len(texts) // 2 * 2])  # an answer is the last word
    return found


def main() -> None:
    """Writes both files."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "chatterbot")
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: (folder / f"{name}.jsonl").open("w", encoding="utf-8") for name in ("train", "validation")}
    counts = dict.fromkeys(files, 0)
    for texts in conversations():
        roles = ("user", "assistant") * (len(texts) // 2)
        row = {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}
        name = "validation" if zlib.crc32(texts[0].lower().encode()) % HELD_OUT == 0 else "train"
        files[name].write(json.dumps(row, ensure_ascii=False) + "\n")
        counts[name] += 1
    for name, file in files.items():
        file.close()
        print(f"{file.name}: {counts[name]} conversations")


if __name__ == "__main__":
    main()
