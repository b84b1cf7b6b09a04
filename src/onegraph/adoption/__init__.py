"""Models that PEFT, transformers or diffusers adapted, taken over: the same function, our features."""

from __future__ import annotations

from onegraph.adoption.adopt import adopt

__all__ = ["adopt"]
