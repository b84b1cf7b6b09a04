"""IA3: a gain a feature, of the output or, in the layers named as feed-forward ones, of the input."""

from __future__ import annotations

import re

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, fields, flag, names
from onegraph.checkpoint.dialects.peft_methods.form import Layered, PeftForm, Read, Written
from onegraph.errors import CheckpointError
from onegraph.methods import IA3, Method

_NAMES = {"ia3_l": "gain"}


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = layer.named(_NAMES, needed=_NAMES.values())
    return _method(layer.config, layer.path), {"gain": tensors["gain"].reshape(-1)}


def _method(config: Config, path: str) -> IA3:
    return IA3(on_input=config.matches("feedforward_modules", path))


def _write(written: Layered) -> dict[str, Tensor]:
    gain, layer, method = written.tensors["gain"], written.layer, written.method
    assert isinstance(method, IA3)
    if layer.kernel_size:
        return {"ia3_l": gain.reshape(1, -1, *(1 for _ in layer.kernel_size))}
    return {"ia3_l": gain.reshape(1, -1) if method.on_input else gain.reshape(-1, 1)}


def _config(adapter: Written) -> dict[str, object]:
    methods = adapter.only(IA3)
    if any(not method.scales_bias for method in methods.values()):
        raise CheckpointError(
            "This IA3 adapter leaves the biases of its layers as they are; PEFT's scales them too.",
            hint="Save it with format='lycoris' or format='native'.",
            code="adapter-unsupported",
        )
    on_input = {path for path, method in methods.items() if method.on_input}
    return {"feedforward_modules": _feedforward(on_input, set(methods), adapter.targets)}


def _feedforward(chosen: set[str], everything: set[str], targets: list[str] | str) -> list[str] | str:
    """Names of targets that mean exactly these layers, as PEFT compares endings; else one regular expression."""
    if not chosen:
        return []
    entries = [entry for entry in targets if any(path.endswith(entry) for path in chosen)] if isinstance(targets, list) else []
    matched = {path for path in everything if any(path.endswith(entry) for entry in entries)}
    return entries if matched == chosen else "|".join(re.escape(path) for path in sorted(chosen))


FORM = PeftForm(
    peft_type="IA3",
    methods=(IA3,),
    fields=fields({"feedforward_modules": Field(None, names), "init_ia3_weights": Field(True, flag, kept=True)}, layers=False, fan_in=True),
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear", "Conv1D", "Conv2d", "Conv3d"}),
    read=_read,
    create=lambda config, path, layer: _method(config, path),
    write=_write,
    config=_config,
)
