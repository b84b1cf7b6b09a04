"""Adapter methods: pure math, one file a method. A new method is a file and a line in this table."""

from __future__ import annotations

from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.lora import LoRA

__all__ = ["METHODS", "LoRA", "Method", "ParameterSpec"]

METHODS: dict[str, type[Method]] = {method.name: method for method in (LoRA,)}
