"""Putting an adapter on a model by a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from onegraph.adapters import Adapters, adapters_of, attach
from onegraph.checkpoint.load import commonest, exact_overrides
from onegraph.errors import OnegraphError
from onegraph.methods import BitFit, Method
from onegraph.methods.inits import kaiming, normal
from onegraph.peft.configs import PeftConfig
from onegraph.peft.rows import refuse_base_name
from onegraph.peft.targets import choose

_Draw = Callable[[Tensor], Tensor]


def _kaiming(tensor: Tensor) -> Tensor:
    return kaiming(tuple(tensor.shape), None)


def _normal(deviation: float, mean: float = 0.0) -> _Draw:
    return lambda tensor: mean + deviation * normal(tuple(tensor.shape), None)


# With init_weights=False adapters start as anything but the identity: what is drawn, and from which distribution, as PEFT has it.
_RANDOM: dict[str, dict[str, _Draw]] = {
    "LORA": {"down": _kaiming, "up": _kaiming},
    "ADALORA": {"down": _normal(1.0), "up": _normal(1.0), "singular": _normal(1.0)},
    "IA3": {"gain": _normal(1.0)},
    "OFT": {"rotation": _normal(0.1)},
    "BOFT": {"rotation": _normal(0.1), "gain": _normal(0.1, 1.0)},
    "HRA": {"vectors": _kaiming},
    "MISS": {"block": _kaiming},
    "VERA": {"gain_up": torch.ones_like},
}
_FLAGS = ("init_lora_weights", "init_ia3_weights", "init_weights")


def inject(
    model: nn.Module, config: PeftConfig, name: str, *, autocast: bool = True, only: Collection[str] | None = None
) -> tuple[Adapters, tuple[str, ...]]:
    """Add an adapter to a model, in place. The first one is active at once. On an error the model is unchanged.

    Args:
        model: Any model, adapted already or not.
        config: What it gets.
        name: What the adapter is called.
        autocast: Whether the adapter of a model in half precision is in float32.
        only: These paths instead of those that the configuration names.

    Returns:
        The model's adapters, and the paths that the configuration's own method is on.

    Raises:
        ConfigurationError, TargetError, AdapterError: See ``choose`` and ``attach``.
    """
    refuse_base_name(name)
    chosen = choose(config, model, only=only)
    adapters = add_exactly(model, chosen.methods, name, dtype=_dtype(model) if autocast else None)
    _start_at_random(adapters, config, name, chosen.adapted)
    return adapters, chosen.adapted


def add_exactly(model: nn.Module, methods: Mapping[str, Method], name: str, *, dtype: torch.dtype | None) -> Adapters:
    """Attach or add an adapter that has these methods on these paths."""
    common = commonest(methods)
    overrides = exact_overrides(methods, common)

    def chosen(path: str, module: nn.Module) -> bool:
        return path in methods

    adapters = adapters_of(model)
    if adapters is None:
        return attach(model, common, targets=chosen, overrides=overrides, name=name, dtype=dtype)
    adapters.add(name, common, targets=chosen, overrides=overrides)
    return adapters


def _dtype(model: nn.Module) -> torch.dtype:
    """float32, or what the layers have where that is more precise."""
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return torch.float64 if next(floating, None) == torch.float64 else torch.float32


def _start_at_random(adapters: Adapters, config: PeftConfig, name: str, paths: Collection[str]) -> None:
    kind = config.form.peft_type
    draws = _RANDOM.get(kind, {})
    if not draws or all(getattr(config, flag, True) is not False for flag in _FLAGS):
        return
    tensors = adapters.tensors(name)
    drawn = {path: {key: draws[key](value) for key, value in tensors[path].items() if key in draws} for path in paths}
    adapters.load_tensors(name, drawn, partial=True)


def missing_layers(model: nn.Module, config: PeftConfig, present: Collection[str]) -> list[str]:
    """The layers that a configuration names and a loaded adapter has nothing for, as PEFT's users call them."""
    if config.target_modules is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            methods = choose(config.copy(), model).methods
        except OnegraphError:  # the file decides: a configuration that means nothing on this model is no mistake
            return []
    # A bias that wasn't trained may not be in a file; a layer, or a module that is trained whole, is.
    wanted = [path for path, method in methods.items() if not isinstance(method, BitFit)]
    return [f"base_model.model.{path}" for path in wanted if path not in present]
