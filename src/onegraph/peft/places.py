"""PEFT's submodules: ``from onegraph.peft.utils.hotswap import hotswap_adapter`` as ``from peft.utils.hotswap import hotswap_adapter``.

PEFT's documentation imports some names from where they are defined. All of them are in ``onegraph.peft`` itself; a place looks there.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_PLACES = (
    "config functional helpers import_utils mapping mapping_func mixed_model optimizers peft_model"
    " utils utils.constants utils.hotswap utils.integrations utils.loftq_utils utils.merge_utils utils.other utils.peft_types"
    " utils.save_and_load"
    " tuners.adalora tuners.boft tuners.hra tuners.ia3 tuners.ln_tuning tuners.loha tuners.lokr tuners.lora tuners.lora.config"
    " tuners.lora.layer tuners.lora.model tuners.miss tuners.oft tuners.tuners_utils tuners.vblora tuners.vera"
).split()
_OWN = ("auto", "tuners")  # modules of ours that have a place's name


class _Place(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _looked_up(name)


def _looked_up(name: str) -> Any:
    """A name of the package, or what it says of one that it hasn't."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(sys.modules[__package__ or ""], name)


def furnish() -> None:
    """Let every submodule of PEFT be imported from."""
    package = sys.modules[__package__ or ""]
    for place in _PLACES:
        name = f"{package.__name__}.{place}"
        module = sys.modules.setdefault(name, _Place(name, "A place of PEFT's: its names are those of onegraph.peft."))
        parent, _, leaf = name.rpartition(".")
        vars(sys.modules[parent])[leaf] = module
    for own in _OWN:
        vars(sys.modules[f"{package.__name__}.{own}"])["__getattr__"] = _looked_up
