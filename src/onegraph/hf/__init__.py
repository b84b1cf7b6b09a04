"""transformers' Trainer with adapters, unchanged in the programs that call it."""

from onegraph.hf.registration import register

__all__ = ["register"]
