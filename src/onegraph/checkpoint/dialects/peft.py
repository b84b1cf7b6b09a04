"""PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT 0.21.2 writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.checkpoint.dialects.peft_methods.fields import Config
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, IncompleteError, PeftForm, Read, Rewrite
from onegraph.checkpoint.file import SHARED, Weights
from onegraph.checkpoint.keys import first_ten, plain_path
from onegraph.errors import CheckpointError, ConfigurationError
from onegraph.methods import Method

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLED_WEIGHTS_NAME = "adapter_model.bin"
PREFIX = "base_model.model."
SHARED_PREFIX = "base_model."
# Where PEFT hangs the module that it has put an adapter around.
_BELOW = ".base_layer."
# A module trained whole, where bias="all" saves its copy under the name that it has inside PEFT.
_COPY = re.compile(r"\.modules_to_save\.(?:[^.]+\.)?")


@dataclass(frozen=True)
class Parsed:
    """The tensors of a PEFT folder, sorted into adapter (shared tensors under the path "") and base model: see ``AdapterFile``."""

    weights: dict[str, Weights]
    methods: dict[str, Method]
    base_weights: dict[str, torch.Tensor]
    trained: frozenset[str]
    rewrites: dict[str, Rewrite]


def key_of(path: str, ending: str, *, target: str | None = None) -> str:
    """The key of one tensor; ``target`` is the module around the layer where PEFT targets that.

    Example:
        >>> key_of("layers.0.q_proj", "lora_A.weight")
        'base_model.model.layers.0.q_proj.lora_A.weight'
    """
    if target is not None:
        path = f"{target}{_BELOW}{path.removeprefix(f'{target}.')}"
    return f"{PREFIX}{path}.{ending}"


def looks_like(keys: Iterable[str]) -> bool:
    """True where keys begin as in a PEFT file."""
    return any(without_prefix(key) != key for key in keys)


def without_prefix(key: str) -> str:
    """A key without ``base_model.model.``, also where a wrapper stands in front of it."""
    head, found, tail = key.partition(PREFIX)
    return tail if found and not plain_path(head.rstrip(".")) else key


def parse(tensors: Mapping[str, torch.Tensor], form: PeftForm, config: Config, path: Path) -> Parsed:
    """Module path -> our tensors; and the method of each layer by the configuration.

    Raises:
        CheckpointError: ``adapter-keys`` for tensors of another method, ``adapter-incomplete``, or ``adapter-config`` where the
            configuration and the tensors contradict each other.
    """
    endings = {ending: _pattern(ending) for ending in sorted(form.endings, key=len, reverse=True)}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    targets: dict[str, str] = {}
    shared: dict[str, torch.Tensor] = {}
    base_weights: dict[str, torch.Tensor] = {}
    whole: set[str] = set()
    for key, tensor in tensors.items():
        name = without_prefix(key)
        found = next(((match["path"], ending) for ending, pattern in endings.items() if (match := pattern.match(name))), None)
        if found is not None and found[1] in form.whole:
            trained = f"{found[0]}.{form.whole[found[1]]}"
            base_weights[trained] = tensor
            whole.add(trained)
        elif found is not None:
            # The output projection of an attention hangs below the attention, which is what was targeted.
            target, below, _ = found[0].partition(_BELOW)
            layer = found[0].replace(_BELOW, ".")
            if below:
                targets[layer] = target
            layers.setdefault(layer, {})[found[1]] = tensor
        elif (own := _shared_name(key, form)) is not None:
            shared[own] = tensor
        else:
            _refuse_other_methods(key, form, path)
            if ".original_module." in name:
                continue  # what bias="all" also saves of a module that is trained whole: nothing reads it
            own_name = _COPY.sub(".", name.replace(_BELOW, "."))
            base_weights[own_name] = tensor
            if _is_saved(own_name, config):
                whole.add(own_name)
    if not layers and not (form.whole and whole):
        raise CheckpointError(
            f"{path} holds no {form.peft_type} tensors.",
            why=f"Its keys are:\n{first_ten(tensors)}",
            hint=f"The keys of a {form.peft_type} file end in {', '.join(sorted(form.endings))}.",
            code="adapter-keys",
        )
    weights: dict[str, Weights] = {}
    methods: dict[str, Method] = {}
    rewrites: dict[str, Rewrite] = {}
    incomplete, contradictions = [], []
    for layer, own_tensors in layers.items():
        read = Read(layer, own_tensors, config, shared, targets.get(layer, layer))
        if (rewrite := form.rewrite(read)) is not None:
            rewrites[layer] = rewrite
        try:
            method, found_tensors = form.read(read)
        except IncompleteError as problem:
            incomplete.append(str(problem))
            continue
        except ContradictionError as problem:
            contradictions.append(str(problem))
            continue
        except ConfigurationError as problem:  # a combination of fields that each are fine, but make no method
            contradictions.append(f"{layer}: {problem.what}")
            continue
        methods[layer] = method
        weights[layer] = {**found_tensors}
        alpha = getattr(method, "alpha", None)
        if isinstance(alpha, int | float):
            weights[layer]["alpha"] = float(alpha)
    _raise_for(incomplete, contradictions, path)
    if ours := form.read_shared(shared, config):
        weights[SHARED] = {**ours}
    return Parsed(weights, methods, base_weights, frozenset(whole), rewrites)


def _pattern(ending: str) -> re.Pattern[str]:
    """Module path and ending; the adapter's name may still stand in the key, where a state dict was saved as it was."""
    head, dot, leaf = ending.partition(".")
    own_name = r"(?:\.[^.]+)?" if dot else r"(?:\.(?!weight$|bias$)[^.]+)?"
    return re.compile(rf"^(?P<path>.+?)\.{re.escape(head)}{own_name}{re.escape(dot + leaf)}$")


def _is_saved(name: str, config: Config) -> bool:
    """Whether a weight belongs to ``modules_to_save``, whose entries name a module or one around it by how its path ends."""
    saved = config.values["modules_to_save"]
    entries = [saved] if isinstance(saved, str) else list(saved) if isinstance(saved, list | tuple) else []
    parts = name.split(".")[:-1]
    around = [".".join(parts[: number + 1]) for number in range(len(parts))]
    return any(path.endswith(str(entry)) for path in around for entry in entries)


def _shared_name(key: str, form: PeftForm) -> str | None:
    head, found, name = key.partition(SHARED_PREFIX)
    own = name.split(".")[0] if found and not plain_path(head.rstrip(".")) else ""
    return own if own in form.shared else None


def _refuse_other_methods(key: str, form: PeftForm, path: Path) -> None:
    """Raise for a key that ends as those of another method, or almost as those of this one."""
    name, parts = without_prefix(key), set(key.split("."))
    exact = [other for other in FORMS.values() if any(_pattern(ending).match(name) for ending in other.endings)]
    near = [other for other in (form, *FORMS.values()) if parts & {ending.partition(".")[0] for ending in other.endings | other.shared}]
    if other := next(iter(exact + near), None):
        what = f"a key that no {form.peft_type} file has" if other is form else f"{other.peft_type} tensors"
        raise CheckpointError(
            f"{path} holds {what}: {key}.",
            why=f"{CONFIG_NAME} says that it is of peft_type {form.peft_type}.",
            hint=f"Use the {CONFIG_NAME} that was saved with these weights.",
            code="adapter-keys",
        )


def _raise_for(incomplete: list[str], contradictions: list[str], path: Path) -> None:
    if incomplete:
        raise CheckpointError(
            f"{len(incomplete)} layers of {path} are incomplete.",
            why=f"They lack a tensor:\n{first_ten(incomplete)}",
            hint="The file is damaged; download it or train it again.",
            code="adapter-incomplete",
        )
    if contradictions:
        raise CheckpointError(
            f"{len(contradictions)} layers of {path} don't fit its {CONFIG_NAME}.",
            why=first_ten(contradictions),
            hint=f"Use the {CONFIG_NAME} that was saved with these weights.",
            code="adapter-config",
        )
