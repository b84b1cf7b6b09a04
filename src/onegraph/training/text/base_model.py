"""The language model and its tokenizer: a folder, a GGUF file, or a name on the Hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from onegraph.errors import ConfigurationError, ModelFileError, nearest
from onegraph.training.text.chat import set_template
from onegraph.training.text.configuration import ModelSettings

GGUF = ".gguf"
_WEIGHTS = {".safetensors", ".bin", ".json"}
_GLIMPSE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """What is trained on.

    Args:
        model: The language model, its weights frozen later by the adapters.
        tokenizer: Its tokenizer.
        path: Where it was read from, or its name.
        pad_id: The token that stands in padding.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str
    pad_id: int

    def fingerprint(self) -> str:
        """Which weights: of files the names, the sizes, their beginnings and ends; of the Hub the commit."""
        path = Path(self.path).expanduser()
        if path.exists():
            files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
            return hashlib.sha256("".join(f"{file.name} {_glimpse(file)}\n" for file in files).encode()).hexdigest()
        return f"{self.path}@{getattr(self.model.config, '_commit_hash', None)}"

    def require_positions(self, width: int, label: str) -> None:
        """Raises ConfigurationError, ``bad-value``, for rows that are longer than the model can count."""
        most = getattr(self.model.config, "max_position_embeddings", None)
        if isinstance(most, int) and width > most:
            raise ConfigurationError(
                f"Rows are {width} tokens wide, and {type(self.model).__name__} has {most} positions.",
                hint=f"{label} of {most} or less",
                code="bad-value",
            )


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template that was given.

    Raises:
        ModelFileError: ``language-model``.
        DataError: ``chat-template``.
    """
    name, where = _place(settings.tokenizer or settings.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
    except Exception as error:  # whatever a library raises for a folder that isn't what it should be
        raise _unreadable("tokenizer" if settings.tokenizer else "tokenizer of", settings.tokenizer or settings.path, error) from error
    if settings.chat_template:
        set_template(tokenizer, settings.chat_template)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> BaseModel:
    """The model on the CPU, its weights in ``dtype``; what it computes by itself, such as rotary frequencies, stays as it makes it.

    Raises:
        ModelFileError: ``language-model``; ``tokenizer``: it has tokens that the model has no embedding for.
    """
    name, where = _place(settings.path)
    read: Any = AutoModelForCausalLM.from_pretrained  # its annotation doesn't know that it tells what it found, too
    try:
        model, said = read(name, dtype=dtype, output_loading_info=True, **where)
    except Exception as error:  # as above
        raise _unreadable("language model", settings.path, error) from error
    if missing := sorted(map(str, said["missing_keys"])):
        raise ModelFileError(
            f"{settings.path} has no weights for {len(missing)} tensors of {type(model).__name__}:"
            f" {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}.",
            why="transformers fills such tensors with random numbers, and an adapter would be trained on those.",
            hint="a whole language model: the files are cut off, or of a model with another head",
            code="language-model",
        )
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelFileError(
            f"The tokenizer has {len(tokenizer)} tokens, and the model embeds {rows}.",
            why="They don't belong together.",
            hint="model.tokenizer: the one that the model was trained with",
            code="tokenizer",
        )
    pad = next((value for value in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(value, int)), 0)
    return BaseModel(model=model, tokenizer=tokenizer, path=settings.path, pad_id=pad)


def _place(text: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` is called with."""
    path = Path(text).expanduser()
    if path.suffix.lower() == GGUF:
        if not path.is_file():
            raise ModelFileError(f"There is no {path}.", hint=_beside(path), code="language-model")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_file():
        raise ModelFileError(
            f"{path} is a single file.", why="Only .gguf files hold a whole language model.", hint=str(path.parent), code="language-model"
        )
    if not path.exists() and (text.startswith((".", "/", "~")) or text.count("/") > 1):
        raise ModelFileError(f"There is no folder {path}.", hint=_beside(path), code="language-model")
    return str(path) if path.is_dir() else text, {}


def _glimpse(path: Path) -> str:
    """The size of a file, and a digest of its first and last MiB: reading all of a large model would take minutes."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_GLIMPSE_BYTES))
        size = file.seek(0, 2)
        file.seek(max(0, size - _GLIMPSE_BYTES))
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"


def _beside(path: Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, names)
    return f"did you mean {', '.join(str(path.parent / name) for name in near)}?" if near else "check the path"


def _unreadable(what: str, path: str, error: Exception) -> ModelFileError | ConfigurationError:
    if isinstance(error, ImportError):
        return ConfigurationError(f"{path} can't be read: a package is missing", why=_first_lines(error), code="missing-package")
    there = "" if Path(path).expanduser().exists() else f"There is no folder {path} here, and as a name on the Hub: "
    return ModelFileError(
        f"The {what} {path} can't be read.",
        why=f"{there}{_first_lines(error)}",
        hint="a folder with config.json, *.safetensors and tokenizer.json, a .gguf file, or a name on the Hugging Face Hub",
        code="language-model",
    )


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
