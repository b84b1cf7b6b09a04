"""onegraph: parameter-efficient fine-tuning made for torch.compile. Every adapter, one compiled graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onegraph import cache as cache
    from onegraph import doctor as doctor
    from onegraph import errors as errors
    from onegraph import explain as explain
    from onegraph.adapters import Adapters as Adapters
    from onegraph.adapters import adapters_of as adapters_of
    from onegraph.adapters import attach as attach
    from onegraph.adoption import adopt as adopt
    from onegraph.checking import check as check
    from onegraph.checkpoint.load import load as load
    from onegraph.checkpoint.save import save as save
    from onegraph.compiling import compile as compile
    from onegraph.distributed import average_gradients as average_gradients
    from onegraph.distributed import gathered as gathered
    from onegraph.distributed import replicate as replicate
    from onegraph.distributed import shard as shard
    from onegraph.methods import BOFT as BOFT
    from onegraph.methods import HRA as HRA
    from onegraph.methods import IA3 as IA3
    from onegraph.methods import OFT as OFT
    from onegraph.methods import AdaLoRA as AdaLoRA
    from onegraph.methods import BitFit as BitFit
    from onegraph.methods import Dense as Dense
    from onegraph.methods import DoRA as DoRA
    from onegraph.methods import LoHa as LoHa
    from onegraph.methods import LoKr as LoKr
    from onegraph.methods import LoRA as LoRA
    from onegraph.methods import MiSS as MiSS
    from onegraph.methods import NormTuning as NormTuning
    from onegraph.methods import RankAllocator as RankAllocator
    from onegraph.methods import VBLoRA as VBLoRA
    from onegraph.methods import VeRA as VeRA
    from onegraph.methods import WithBias as WithBias
    from onegraph.methods import orthogonality as orthogonality
    from onegraph.methods import rank_masks as rank_masks

__version__ = "0.1.0"

# Where each public name lives. It is imported at its first use: "import onegraph" alone doesn't wait for torch.
_PUBLIC = {
    "AdaLoRA": "onegraph.methods",
    "Adapters": "onegraph.adapters",
    "BOFT": "onegraph.methods",
    "BitFit": "onegraph.methods",
    "Dense": "onegraph.methods",
    "DoRA": "onegraph.methods",
    "HRA": "onegraph.methods",
    "IA3": "onegraph.methods",
    "LoHa": "onegraph.methods",
    "LoKr": "onegraph.methods",
    "LoRA": "onegraph.methods",
    "MiSS": "onegraph.methods",
    "NormTuning": "onegraph.methods",
    "OFT": "onegraph.methods",
    "RankAllocator": "onegraph.methods",
    "VBLoRA": "onegraph.methods",
    "VeRA": "onegraph.methods",
    "WithBias": "onegraph.methods",
    "adapters_of": "onegraph.adapters",
    "adopt": "onegraph.adoption",
    "attach": "onegraph.adapters",
    "average_gradients": "onegraph.distributed",
    "check": "onegraph.checking",
    "compile": "onegraph.compiling",
    "gathered": "onegraph.distributed",
    "load": "onegraph.checkpoint",
    "orthogonality": "onegraph.methods",
    "rank_masks": "onegraph.methods",
    "replicate": "onegraph.distributed",
    "save": "onegraph.checkpoint",
    "shard": "onegraph.distributed",
}
# What puts adapters on a model.
_ADAPTING = ("adopt", "attach", "load")
_ROOMS = ("cache", "doctor", "errors", "explain")

__all__ = [
    "BOFT",
    "HRA",
    "IA3",
    "OFT",
    "AdaLoRA",
    "Adapters",
    "BitFit",
    "Dense",
    "DoRA",
    "LoHa",
    "LoKr",
    "LoRA",
    "MiSS",
    "NormTuning",
    "RankAllocator",
    "VBLoRA",
    "VeRA",
    "WithBias",
    "adapters_of",
    "adopt",
    "attach",
    "average_gradients",
    "cache",
    "check",
    "compile",
    "doctor",
    "errors",
    "explain",
    "gathered",
    "load",
    "orthogonality",
    "rank_masks",
    "replicate",
    "save",
    "shard",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name in _ROOMS:
        return importlib.import_module(f"onegraph.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'onegraph' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    if _PUBLIC[name] == "onegraph.adapters":
        importlib.import_module("onegraph.checkpoint")  # registers what Adapters.save and Adapters.load call
    if name in _ADAPTING:
        importlib.import_module("onegraph.hf").register()  # transformers' Trainer, where there is one
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted({*globals(), *__all__})
