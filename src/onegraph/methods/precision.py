"""Small matrices in their own precision, whatever autocast says."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast is off inside: small matrices that every row is multiplied with are computed in their own precision.

    Where it is off anyway nothing is entered: torch 2.13 keeps no traced graph that has autocast in it, and a warm start would trace again.
    A compiled graph notices whether autocast is on.
    """
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
