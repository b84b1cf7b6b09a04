"""The features of the matrix, and whether they are asked of training, of inference, or of neither in particular."""

from __future__ import annotations

_BOTH = ("train", "infer")

FEATURES: dict[str, tuple[str, ...]] = {
    "definition": ("",),
    "whole": _BOTH,
    "blocks": _BOTH,
    "before attaching": _BOTH,
    "use": _BOTH,
    "disabled": _BOTH,
    "scale": _BOTH,
    "add and delete": _BOTH,
    "load: another rank": _BOTH,
    "load: fewer layers": _BOTH,
    "load: more layers": _BOTH,
    "load: another alpha": _BOTH,
    "rows": _BOTH,
    "merge": ("infer",),
    "combine": ("infer",),
    "dense alongside": _BOTH,
    "dropout": ("train",),
    "gradient checkpointing": ("train",),
    "to(dtype)": _BOTH,
    "copies": ("",),
    "state dict": ("",),
    "file": ("",),
    "to PEFT": ("",),
    "from PEFT": ("",),
    "bf16 base": _BOTH,
}
