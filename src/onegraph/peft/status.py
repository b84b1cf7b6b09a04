"""The state of adapted layers, and of a whole model, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from onegraph.adapters import Adapters
from onegraph.adapters.freezing import registered
from onegraph.adapters.walk import places, plain_class, unwrapped
from onegraph.checkpoint.base_weights import without_bias
from onegraph.checkpoint.dialects.peft_methods.form import class_of
from onegraph.layers import Layer
from onegraph.methods import Method
from onegraph.peft.exchange import adapters_and_configs, tuner_of
from onegraph.peft.names import MODEL, form_for

Irregular = Literal["irregular"]
_WHOLE = "ModulesToSaveWrapper"


@dataclass
class LayerStatus:
    """One adapted layer.

    Args:
        name: Its path, from the tuner on.
        module_type: Method and kind of layer, as in "lora.Linear".
        enabled: Whether adapters are switched on.
        active_adapters: The one that is active, in a list.
        merged_adapters: Those that are in its weight.
        requires_grad: Adapter -> whether it trains here.
        available_adapters: Those that are on this layer.
        devices: Adapter -> kinds of devices that it is on.
        quantization_backend: What its weight is quantised by, None where it isn't.
    """

    name: str
    module_type: str
    enabled: bool
    active_adapters: list[str]
    merged_adapters: list[str]
    requires_grad: dict[str, bool | Irregular]
    available_adapters: list[str]
    devices: dict[str, list[str]]
    quantization_backend: str | None


@dataclass
class ModelStatus:
    """A model with adapters; a value that layers disagree on is "irregular".

    Args:
        base_model_type: The model's class.
        adapter_model_type: The tuner's class; "None" where adapters were injected.
        peft_types: Adapter -> method.
        trainable_params: Numbers that train.
        total_params: All numbers.
        num_adapter_layers: Adapted layers.
        enabled: Whether adapters are switched on.
        active_adapters: The one that is active, in a list.
        merged_adapters: Those that are in the weights.
        requires_grad: Adapter -> whether it trains.
        available_adapters: All.
        devices: Adapter -> kinds of devices that it is on.
        quantization_backend: What weights are quantised by.
    """

    base_model_type: str
    adapter_model_type: str
    peft_types: dict[str, str]
    trainable_params: int
    total_params: int
    num_adapter_layers: int
    enabled: bool | Irregular
    active_adapters: list[str] | Irregular
    merged_adapters: list[str] | Irregular
    requires_grad: dict[str, bool | Irregular]
    available_adapters: list[str]
    devices: dict[str, list[str]]
    quantization_backend: str | None


def get_layer_status(model: nn.Module) -> list[LayerStatus]:
    """The state of every adapted layer.

    Args:
        model: A ``PeftModel``, or a model that adapters were injected into.

    Raises:
        UsageError: ``peft-no-adapters``.
    """
    adapters, _ = adapters_and_configs(model)
    tuner = tuner_of(model)
    parameters = {name: registered(adapters, name) for name in adapters.names}
    methods = {name: adapters.methods(name) for name in adapters.names}
    active = [adapters.active] if adapters.active is not None else []
    enabled = adapters.active is not None or bool(adapters.merged)
    if tuner is not None:
        active, enabled = tuner.active_adapters, not tuner._disabled
    found = []
    order = {place.path: number for number, place in enumerate(places(adapters.model))}
    for path, layer in sorted(adapters.layers.items(), key=lambda item: order.get(item[0], len(order))):
        there = [name for name in adapters.names if path in methods[name]]
        if not there:
            continue
        own = {name: list(parameters[name].get(path, {}).values()) for name in there}
        kind = _type(methods[there[0]][path], layer.layer)
        found.append(
            LayerStatus(
                name=path if tuner is None else f"{MODEL}{path}",
                module_type=kind,
                enabled=enabled,
                active_adapters=[name for name in active if name in there or kind != _WHOLE],
                merged_adapters=[name for name in adapters.merged if name in there],
                requires_grad={name: _agreed([parameter.requires_grad for parameter in values]) for name, values in own.items()},
                available_adapters=sorted(there),
                devices={name: sorted({parameter.device.type for parameter in values}) for name, values in own.items()},
                quantization_backend=_quantization(layer.base_layer),
            )
        )
    return found


def get_model_status(model: nn.Module) -> ModelStatus:
    """The state of a whole model; ``requires_grad`` and the rest as its layers have it.

    Raises:
        UsageError: ``peft-no-adapters``.
    """
    layers = get_layer_status(model)
    adapters, configs = adapters_and_configs(model)
    tuner: Any = tuner_of(model)
    whole: Any = unwrapped(model)
    names = sorted(adapters.names)
    flags = {name: [layer.requires_grad[name] for layer in layers if name in layer.requires_grad] for name in names}
    devices = {name: sorted({kind for layer in layers for kind in layer.devices.get(name, [])}) for name in names}
    return ModelStatus(
        base_model_type=plain_class(adapters.model).__name__,
        adapter_model_type="None" if tuner is None else type(tuner).__name__,
        peft_types={} if tuner is None else {name: str(config.form.peft_type) for name, config in configs.items()},
        trainable_params=_numbers(whole)[0],
        total_params=_numbers(whole)[1],
        num_adapter_layers=len(layers),
        enabled=layers[0].enabled if layers else True,
        active_adapters=next((layer.active_adapters for layer in layers if layer.module_type != _WHOLE), []),
        merged_adapters=_merged(layers, adapters),
        requires_grad={name: _agreed(values) for name, values in flags.items()},
        available_adapters=names,
        devices=devices,
        quantization_backend=_backend({layer.quantization_backend for layer in layers}),
    )


def _numbers(model: Any) -> tuple[int, int]:
    counted = getattr(model, "get_nb_trainable_parameters", None)
    if callable(counted):
        found: tuple[int, int] = counted()
        return found
    parameters = list(model.parameters())
    return sum(each.numel() for each in parameters if each.requires_grad), sum(each.numel() for each in parameters)


def _merged(layers: list[LayerStatus], adapters: Adapters) -> list[str] | Irregular:
    merged = set(adapters.merged)
    partly = any((set(layer.available_adapters) - set(layer.merged_adapters)) & merged for layer in layers)
    return "irregular" if partly else sorted(merged)


def _agreed(values: list[Any]) -> bool | Irregular:
    if all(value is True for value in values):
        return True
    return False if all(value is False for value in values) else "irregular"


def _backend(found: set[str | None]) -> str | None:
    return found.pop() if len(found) == 1 else "irregular"


def _type(method: Method, layer: Layer) -> str:
    form = form_for(method)
    if form is None:
        return _WHOLE if method.name == "dense" else method.name
    kind = "LNTuningLayer" if form.whole else class_of(layer)
    method = without_bias(method)
    return f"{'lora' if method.name == 'dora' else form.peft_type.lower()}.{kind}"


def _quantization(module: nn.Module) -> str | None:
    weight = module._parameters.get("weight")
    known = {"Params4bit": "bnb 4bit", "Int8Params": "bnb 8bit", "AffineQuantizedTensor": "torchao", "Int8Tensor": "torchao"}
    return known.get(type(weight).__name__) or known.get(type(getattr(weight, "data", None)).__name__)


def numel(parameter: nn.Parameter) -> int:
    """How many numbers there are: two in a byte of a 4-bit weight."""
    if type(parameter).__name__ == "Params4bit":
        return parameter.numel() * 2 * parameter.element_size()
    return parameter.numel()
