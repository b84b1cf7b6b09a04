"""What an adapter file holds, whatever program wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from onegraph.checkpoint.keys import first_ten
from onegraph.errors import CheckpointError
from onegraph.methods import Method

# Parameter name -> tensor, and "alpha" -> number where the file has one.
Weights = dict[str, torch.Tensor | float]

SHARED = ""
"""The module path under which the tensors stand that all layers of an adapter have in common."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as it was read, not matched with any model yet.

    Args:
        path: The file or folder.
        format: ``native``, ``peft``, ``kohya``, ``lycoris`` or ``diffusers``.
        metadata: The strings in the safetensors header.
        parts: Part (``""`` where there is only one; ``lora_unet``, ``lora_te``; ``unet``, ``text_encoder``) -> module path, or the key
            that stands for it in the file -> parameter -> tensor, and ``"alpha"`` -> number. Under the path ``""``: shared tensors.
        methods: Part -> the same module keys -> the method with that layer's rank and alpha.
        config: ``adapter_config.json``, or the record of a native file; ``{}`` for formats without one.
        base_weights: Weights of the base model that the file carries too, by their name in the model: modules and biases trained
            whole, targeted embeddings.
        trained: Those of them that the adapter trains even where they are still the model's own.
        rewrites: Module path -> from its canonical weight to the one with the adapter, for layers that can't take its method.
        optional: Parameters that the file leaves out where they change nothing.
    """

    path: Path
    format: str
    metadata: dict[str, str]
    parts: dict[str, dict[str, Weights]]
    methods: dict[str, dict[str, Method]]
    config: dict[str, object] = field(default_factory=dict)
    base_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    rewrites: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    def __str__(self) -> str:
        layers = ", ".join(f"{part or 'model'}: {len(layers)} layers" for part, layers in self.methods.items())
        return f"{self.path} ({self.format}; {layers})"


def tensors_of(weights: Mapping[str, torch.Tensor | float]) -> dict[str, torch.Tensor]:
    """Only the tensors of one layer's weights."""
    return {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def complete(parts: Mapping[str, dict[str, Weights]], path: Path) -> None:
    """Fill in alpha with the rank where a file has none, and refuse modules whose two factors don't belong together.

    Raises:
        CheckpointError: ``adapter-incomplete`` for a module without one of its factors, ``adapter-shape`` where they share no rank.
    """
    halves = []
    for modules in parts.values():
        for module, weights in modules.items():
            down, up = weights.get("down"), weights.get("up")
            if not isinstance(down, torch.Tensor) or not isinstance(up, torch.Tensor):
                halves.append(f"{module} has only: {', '.join(sorted(weights))}")
                continue
            if down.dim() < 2 or up.dim() < 2 or 0 in (*down.shape, *up.shape) or down.shape[0] % up.shape[1]:
                raise CheckpointError(
                    f"{module} in {path}: down {tuple(down.shape)} and up {tuple(up.shape)} don't share a rank.",
                    why="The rank is the first dimension of down and the second of up (a share of it where a convolution has groups).",
                    hint="The file is damaged; download it or train it again.",
                    code="adapter-shape",
                )
            weights.setdefault("alpha", float(down.shape[0]))
    if halves:
        raise CheckpointError(
            f"{len(halves)} modules of {path} are incomplete.",
            why=f"Each needs a down and an up tensor:\n{first_ten(halves)}",
            hint="The file is damaged; download it or train it again.",
            code="adapter-incomplete",
        )
