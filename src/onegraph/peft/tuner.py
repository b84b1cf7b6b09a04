"""What stands between a ``PeftModel`` and the model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from onegraph.adapters import Adapters, adapters_of
from onegraph.adapters.freezing import train_only
from onegraph.adapters.walk import places
from onegraph.errors import AdapterError
from onegraph.methods import Dense
from onegraph.peft.configs import PeftConfig
from onegraph.peft.injection import inject
from onegraph.peft.mistakes import UsageError, as_value_errors
from onegraph.peft.names import Names, paths_in
from onegraph.peft.state import load_named, rename_state

CONFIGS_OF_MODEL = "peft_config"


class BaseTuner(nn.Module):
    """A model with adapters: ``model``, and for each adapter its configuration. The model is changed in place.

    Args:
        model: Any model.
        peft_config: The first adapter's configuration, or name -> configuration.
        adapter_name: What the first one is called.
        low_cpu_mem_usage: Without effect: adapters are made on the device of their layers.
        state_dict: Its keys say which layers are adapted, in place of ``target_modules``.
        autocast_adapter_dtype: Whether the adapters of a model in half precision are in float32.
        loaded: Whether the adapters are on the model already.
    """

    prefix = ""

    def __init__(
        self,
        model: nn.Module,
        peft_config: PeftConfig | dict[str, PeftConfig],
        adapter_name: str,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
        autocast_adapter_dtype: bool = True,
        loaded: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._active: str | list[str] = []
        self._trained: tuple[str, ...] = ()
        self._disabled = False
        configs = {adapter_name: peft_config} if isinstance(peft_config, PeftConfig) else dict(peft_config)
        self.peft_config: dict[str, PeftConfig] = dict(getattr(model, CONFIGS_OF_MODEL, None) or {})
        for name, config in configs.items():
            if loaded:
                self.register(name, config)
            else:
                self.add(name, config, autocast=autocast_adapter_dtype, only=None if state_dict is None else paths_in(state_dict, config))
        self.set_adapter(adapter_name, inference_mode=configs[adapter_name].inference_mode)
        vars(model)[CONFIGS_OF_MODEL] = self.peft_config

    @property
    def adapters(self) -> Adapters:
        """Our own face of the same adapters."""
        found = adapters_of(self.model)
        if found is None:
            raise AdapterError("the adapters were unloaded", hint="get_peft_model() makes new ones", code="detached")
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes."""
        return self.model(*args, **kwargs)

    # Adapters

    @property
    def active_adapters(self) -> list[str]:
        """The one that is active, in a list."""
        return [self._active] if isinstance(self._active, str) else []

    @property
    def active_adapter(self) -> str | list[str]:
        """The adapter that is active, also while it is switched off; [] when there is none."""
        return self._active

    @property
    def targeted_module_names(self) -> list[str]:
        """The adapted layers, as paths in the base model; without the modules that are trained whole beside them."""
        methods = [self.adapters.methods(name) for name in self.adapters.names]
        adapted = {path for own in methods for path, method in own.items() if method.name != Dense.name}
        return [place.path for place in places(self.model) if place.path in adapted]

    def add(self, name: str, config: PeftConfig, *, autocast: bool = True, only: Collection[str] | None = None) -> None:
        """Add an adapter; it is frozen, and not active."""
        with as_value_errors():
            inject(self.model, config, name, autocast=autocast, only=only)
        self.register(name, config)

    def register(self, name: str, config: PeftConfig) -> None:
        """Take in an adapter that was added to the model."""
        self.peft_config[name] = config
        self._settle()

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Make an adapter the active one and let it train, unless ``inference_mode``; all others are frozen.

        Raises:
            UsageError: ``peft-several`` for more than one.
        """
        names = list(adapter_name) if isinstance(adapter_name, list | tuple) else [adapter_name]
        if len(names) != 1:
            raise UsageError(
                f"set_adapter({adapter_name!r}): one adapter is active at a time",
                why="A layer runs one slot; adapters that are to act together are one adapter.",
                hint='add_weighted_adapter(adapters, weights, name, combination_type="cat") is their sum; adapter_names= gives every'
                " row its own",
                code="peft-several",
            )
        with as_value_errors():
            self.adapters.methods(names[0])
        if self.adapters.merged:
            warnings.warn("An adapter is set while others are merged into the weights: they are unmerged first.", stacklevel=2)
            self.adapters.unmerge()
        self._active = names[0]
        self._trained = () if inference_mode else (names[0],)
        if not self._disabled:
            self.adapters.use(names[0])
        self._settle()

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Let adapters train, or freeze them."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        with as_value_errors():
            for name in names:
                self.adapters.methods(name)
        self._trained = tuple({*self._trained, *names} if requires_grad else {*self._trained} - {*names})
        self._settle()

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter; the next one that is left becomes active where it was."""
        with as_value_errors():
            self.adapters.delete(adapter_name)
        self.peft_config.pop(adapter_name, None)
        if self._active == adapter_name:
            left = list(self.peft_config)
            if left:
                warnings.warn(f"Adapter {adapter_name} was active and is deleted: {left[0]} is active now.", stacklevel=2)
                self.set_adapter(left[0])
            else:
                self._active = []

    def disable_adapter_layers(self) -> None:
        """Let the base model run alone."""
        if self.adapters.merged:
            self.adapters.unmerge()
        self.adapters.use(None)
        self._disabled = True

    def enable_adapter_layers(self) -> None:
        """Let the active adapter run again."""
        self._disabled = False
        self.adapters.use(self._active if isinstance(self._active, str) else None)

    def _settle(self) -> None:
        """Freeze what isn't to train: also what was made anew when storage grew."""
        train_only(self.adapters, self._trained)

    # Merging

    def merge_adapter(self, adapter_names: list[str] | str | None = None, safe_merge: bool = False) -> None:
        """Write adapters (the active one by default) into the weights, beside those that are there already."""
        named = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        wanted = self.active_adapters if named is None else list(named)
        before = self.adapters.merged
        if already := [name for name in wanted if name in before]:
            warnings.warn(f"Already merged: {', '.join(already)}. Nothing is done for them.", stacklevel=2)
        names = [*before, *(name for name in wanted if name not in before)]
        if names == before:
            return
        with as_value_errors():
            for name in names:
                self.adapters.methods(name)
            if before:
                self.adapters.unmerge()
            self.adapters.merge(names, safe=safe_merge)

    def unmerge_adapter(self) -> None:
        """Take all that was merged out of the weights again: the very same weights as before."""
        if not self.adapters.merged:
            warnings.warn("Already unmerged: nothing is done.", stacklevel=2)
            return
        self.adapters.unmerge()

    def merge_and_unload(self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None) -> nn.Module:
        """The plain model with the adapters (the active one by default) in its weights."""
        with as_value_errors():
            if self.adapters.merged and adapter_names is not None:
                self.adapters.unmerge()
            names = None if self.adapters.merged else (adapter_names or self.active_adapters)
            model = self.adapters.merge_and_unload(names, safe=safe_merge)
        vars(model).pop(CONFIGS_OF_MODEL, None)
        return model

    def unload(self) -> nn.Module:
        """The plain model as it was; the adapters are gone."""
        if self.adapters.merged:
            self.adapters.unmerge()
        model = self.adapters.detach()
        vars(model).pop(CONFIGS_OF_MODEL, None)
        return model

    # Names

    def names(self) -> Names:
        """What everything is called, for PEFT's users."""
        return Names(self.adapters, self.peft_config)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Every Parameter under PEFT's name for it, those of inactive adapters too: they don't require a gradient."""
        if not recurse:
            return
        if adapters_of(self.model) is None:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        start = f"{prefix}." if prefix else ""
        names, seen = self.names(), set[int]()
        everything = [(name, tensor) for _, name, tensor in names.walk(self.model)]
        everything += [(entry.name, entry.parameter) for entry in names.shared()]
        for name, tensor in everything:
            if isinstance(tensor, nn.Parameter) and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield f"{start}{name}", tensor

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Everything under PEFT's name for it, all adapters included. Modules that are trained whole are there as differences."""
        if args:
            kwargs |= dict(zip(("destination", "prefix", "keep_vars"), args))
        found = super().state_dict(**kwargs)
        if adapters_of(self.model) is not None:
            rename_state(found, kwargs.get("prefix", ""), self.adapters, self.names(), self.model, keep=kwargs.get("keep_vars", False))
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if adapters_of(self.model) is not None:
            missing: list[str] = rest[2]
            missing += load_named(state_dict, prefix, self.adapters, self.names(), self.model)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if adapters_of(self.model) is not None:
            self._settle()

    def __getattr__(self, name: str) -> Any:
        """What isn't here is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or name.startswith("__"):
                raise
            return getattr(self.model, name)
