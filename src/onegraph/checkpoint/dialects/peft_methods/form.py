"""What a file says about one PEFT method, as a table: fields, tensors, and the way between theirs and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, one_of
from onegraph.checkpoint.keys import patterns_of
from onegraph.errors import CheckpointError
from onegraph.layers import ConvLayer, Layer, LinearLayer, NormLayer
from onegraph.layers.attention import AttentionLayer, ReadLinearLayer
from onegraph.methods import Method

M = TypeVar("M", bound=Method)

Rewrite = Callable[[Tensor], Tensor]
"""From a layer's canonical weight to the one it has with an adapter."""


class IncompleteError(Exception):
    """A layer of a file lacks a tensor; the text says what it has."""


class ContradictionError(Exception):
    """A layer of a file doesn't fit its configuration; the text says in what."""


@dataclass(frozen=True)
class Read:
    """One layer as a file holds it.

    Args:
        path: Its module path.
        tensors: The end of a key ("lora_A.weight") -> tensor.
        config: The configuration.
        shared: The same for tensors that belong to no layer ("vera_A").
        target: The module that PEFT targeted: the layer, or the attention whose output projection it is.
    """

    path: str
    tensors: Mapping[str, Tensor]
    config: Config
    shared: Mapping[str, Tensor]
    target: str

    def named(self, names: Mapping[str, str], *, needed: Iterable[str] = ()) -> dict[str, Tensor]:
        """The tensors under our names.

        Args:
            names: Theirs -> ours.
            needed: Those of ours that have to be there.

        Raises:
            IncompleteError: One that is needed isn't there.
        """
        found = {names[key]: value for key, value in self.tensors.items() if key in names}
        if not found.keys() >= set(needed):
            raise IncompleteError(f"{self.path} has only: {', '.join(sorted(found)) or ', '.join(sorted(self.tensors))}")
        return found

    def rank_is(self, rank: int, found: int, what: str, shape: Sequence[int]) -> None:
        """Compare the rank of the configuration with that of a tensor.

        Raises:
            ContradictionError: They differ.
        """
        if rank != found:
            raise ContradictionError(f"{self.path}: r is {rank} in the configuration, {what} has shape {tuple(shape)}")


@dataclass(frozen=True)
class Written:
    """An adapter about to be written: what its layers have in common, and what each has of its own.

    Args:
        methods: Module path -> method, all of one form.
        layers: Module path -> layer.
        targets: ``target_modules`` of the configuration.
        kept: The fields that a loaded configuration had beyond the adapter itself, and those that were given.
    """

    methods: Mapping[str, Method]
    layers: Mapping[str, Layer]
    targets: list[str] | str
    kept: Mapping[str, object]

    def only(self, kind: type[M]) -> dict[str, M]:
        """The methods, which all are of one class.

        Raises:
            CheckpointError: ``adapter-unsupported`` where they aren't.
        """
        found = {path: method for path, method in self.methods.items() if type(method) is kind}
        if len(found) < len(self.methods):
            names = sorted({method.name for method in self.methods.values()})
            raise CheckpointError(
                f"A PEFT folder holds one method; the layers of this adapter use {', '.join(names)}.",
                hint="Save it with format='native'.",
                code="adapter-unsupported",
            )
        return found

    def same(self, **values: Iterable[object]) -> None:
        """Check that a value which PEFT's configuration has once is the same on all layers.

        Args:
            values: Their field -> the value on each layer.

        Raises:
            CheckpointError: ``adapter-unsupported`` with the fields that differ.
        """
        differing = [name for name, own in values.items() if len(set(own)) > 1]
        if differing:
            raise CheckpointError(
                f"A PEFT configuration has one {' and one '.join(differing)} for all layers; the layers of this adapter differ.",
                hint="Save it with format='native'.",
                code="adapter-unsupported",
            )


@dataclass(frozen=True)
class Layered:
    """One layer of an adapter about to be written.

    Args:
        method: Its method.
        tensors: Our parameter -> tensor.
        layer: What is adapted.
        config: The configuration that is written.
    """

    method: Method
    tensors: Mapping[str, Tensor]
    layer: Layer
    config: Mapping[str, object]

    def named(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """The tensors under their names: ours -> theirs."""
        return {names[name]: tensor for name, tensor in self.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class PeftForm:
    """How PEFT writes one method.

    Args:
        peft_type: What ``adapter_config.json`` calls it.
        methods: Our methods that are written this way.
        fields: Every field of the configuration.
        endings: How the keys of its tensors end, the adapter's name left out.
        bias: How the field ``bias`` names the adapted layers, as in "lora_only"; None for a method without the field.
        shared: How the keys of tensors end that belong to no layer.
        whole: Endings of tensors that are the layer's own ones, trained whole -> their names in the layer.
        rewrite: From a layer of a file to its new weight, for layers that can't take the method that it was read as.
        read: From a layer of a file to its method and our tensors; raises IncompleteError or ContradictionError.
        create: From a configuration, a module path and the layer there to the method of a new adapter.
        takes: The classes of layers that PEFT has the method for.
        write: From one layer, and the configuration that is written, to the end of each key and its tensor.
        config: The fields that follow from an adapter.
        read_shared: From their shared tensors to ours.
        write_shared: And back; the configuration decides whether they are written at all.
        refuse: What a configuration asks for that can't be honoured, beyond what ``fields`` says.
        refuse_new: What it asks for that can't be honoured where the adapter is new, and matters no more in a file.
        settle: Which fields an older version called otherwise: from the fields as they stand in the file to today's.
    """

    peft_type: str
    methods: tuple[type[Method], ...]
    fields: Mapping[str, Field]
    endings: frozenset[str]
    read: Callable[[Read], tuple[Method, dict[str, Tensor]]]
    create: Callable[[Config, str, Layer], Method]
    takes: frozenset[str]
    write: Callable[[Layered], dict[str, Tensor]]
    config: Callable[[Written], dict[str, object]]
    bias: str | None = None
    shared: frozenset[str] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)
    rewrite: Callable[[Read], Rewrite | None] = field(default=lambda layer: None)
    read_shared: Callable[[Mapping[str, Tensor], Config], dict[str, Tensor]] = field(default=lambda tensors, config: {})
    write_shared: Callable[[Mapping[str, Tensor], Mapping[str, object]], dict[str, Tensor]] = field(default=lambda tensors, config: {})
    refuse: Callable[[Config], Iterable[str]] = field(default=lambda config: ())
    refuse_new: Callable[[Config], Iterable[str]] = field(default=lambda config: ())
    settle: Callable[[Mapping[str, object]], Mapping[str, object]] = field(default=lambda values: values)

    def __post_init__(self) -> None:
        if self.bias is not None:
            object.__setattr__(self, "fields", {**self.fields, "bias": Field("none", one_of("none", "all", self.bias))})

    @property
    def defaults(self) -> dict[str, object]:
        """The configuration where nothing was asked for."""
        return {**{name: own.default for name, own in self.fields.items()}, "peft_type": self.peft_type}


def class_of(layer: Layer) -> str:
    """What PEFT's messages call a layer."""
    if isinstance(layer, AttentionLayer | ReadLinearLayer):
        return "MultiheadAttention"
    if isinstance(layer, LinearLayer):
        return "Conv1D" if layer.transposed else "Linear"
    if isinstance(layer, ConvLayer):
        return f"Conv{len(layer.kernel_size)}d"
    return "norm" if isinstance(layer, NormLayer) else layer.kind.capitalize()


def rank_fields(ranks: Mapping[str, int], alphas: Mapping[str, float], *, alpha: str = "alpha") -> dict[str, object]:
    """``r``, ``rank_pattern``, alpha and ``alpha_pattern`` for the rank and alpha of each path."""
    rank, strength = patterns_of(ranks), patterns_of(alphas)
    return {
        "r": int(rank.default),
        "rank_pattern": {path: int(value) for path, value in rank.exceptions.items()},
        alpha: whole(strength.default),
        "alpha_pattern": {path: whole(value) for path, value in strength.exceptions.items()},
    }


def whole(value: float) -> int | float:
    """16 for 16.0: PEFT's alpha is an integer wherever it can be."""
    return int(value) if float(value).is_integer() else value
