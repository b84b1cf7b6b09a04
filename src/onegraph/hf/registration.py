"""How transformers' Trainer hears of adapters: one look at the model after its constructor, and one before it trains.

A trainer whose model has adapters of ours becomes a trainer of its own class with ``AdapterTrainer`` in front; all others stay what they
are. Nothing of transformers is imported for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from onegraph.adapters.arrival import when_adapted
from onegraph.hf.folders import save_as_adapters

_TRAINER = "transformers.trainer"
WITH_REFERENCE = {
    "trl.trainer.dpo_trainer": "DPOTrainer",
    "trl.trainer.kto_trainer": "KTOTrainer",
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.rloo_trainer": "RLOOTrainer",
}
"""Module of TRL -> the trainer in it, which compares the model with a reference: the model as it was."""
_MARK = "_onegraph_looks"

Prepare = Callable[[ModuleType], None]


def register() -> None:
    """Let ``transformers.Trainer``, and every class that is made from it, train models with adapters; once is enough.

    ``import onegraph.peft`` and the first use of ``onegraph.attach`` do it.
    """
    when_adapted(save_as_adapters)
    after_import(_TRAINER, _prepare_trainer)
    for name in WITH_REFERENCE:
        after_import(name, _prepare_reference)


def after_import(name: str, prepare: Prepare) -> None:
    """Hand a module over as soon as it is imported; at once if it is already."""
    module = sys.modules.get(name)
    if module is not None:
        prepare(module)
        return
    finder = next((found for found in sys.meta_path if isinstance(found, _AfterImport)), None)
    if finder is None:
        finder = _AfterImport()
        sys.meta_path.insert(0, finder)
    finder.wanted.setdefault(name, prepare)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: lets the others find a module, and is called when it has run."""

    def __init__(self) -> None:
        self.wanted: dict[str, Prepare] = {}
        self._finding: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module that somebody waits for."""
        if fullname not in self.wanted or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader, self.wanted[fullname])
        return spec

    def _follow(self, loader: Any, prepare: Prepare) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            prepare(module)

        loader.exec_module = exec_module


def _prepare_reference(module: ModuleType) -> None:
    """By the room with PEFT's face, which nobody need have imported: it takes a while."""
    importlib.import_module("onegraph.peft.trl").prepare(module)


def _prepare_trainer(module: ModuleType) -> None:
    from_here, from_there = module.Trainer.__init__, module.Trainer.train
    if hasattr(from_here, _MARK):
        return

    @functools.wraps(from_here)
    def construct(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        from onegraph.hf.trainer import accepted, take_over

        with accepted(model) as given:
            from_here(self, given, *args, **kwargs)
        take_over(self)

    @functools.wraps(from_there)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from onegraph.hf.trainer import take_over

        # A model that got its adapters after the trainer was made.
        return self.train(*args, **kwargs) if take_over(self) else from_there(self, *args, **kwargs)

    setattr(construct, _MARK, True)
    module.Trainer.__init__, module.Trainer.train = construct, train
