"""Adapter methods: pure math, one file a method. A new method is a file and a line in this table."""

from __future__ import annotations

from onegraph.methods.adalora import AdaLoRA
from onegraph.methods.base import Method, ParameterSpec
from onegraph.methods.dora import DoRA
from onegraph.methods.lora import LoRA
from onegraph.methods.vblora import VBLoRA
from onegraph.methods.vera import VeRA

__all__ = ["METHODS", "AdaLoRA", "DoRA", "LoRA", "Method", "ParameterSpec", "VBLoRA", "VeRA"]

METHODS: dict[str, type[Method]] = {method.name: method for method in (LoRA, DoRA, AdaLoRA, VeRA, VBLoRA)}
