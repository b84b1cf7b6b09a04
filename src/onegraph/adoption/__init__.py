"""Models that PEFT, transformers or diffusers adapted, taken over: the same function, our features."""

from __future__ import annotations

from onegraph.adoption.takeover import adopt

__all__ = ["adopt"]
