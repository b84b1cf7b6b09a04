"""LORA: LoRA, and the fields that AdaLoRA's configuration has too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag, number, patterns, probability
from onegraph.checkpoint.dialects.peft_methods.form import ContradictionError, Layered, PeftForm, Read, Written, rank_fields
from onegraph.errors import CheckpointError
from onegraph.layers import ConvLayer, Layer
from onegraph.methods import DoRA, LoRA, Method

# The variants of LoRA that are not one here.
VARIANTS: dict[str, Field] = {
    "alora_invocation_tokens": Field(None, refused="activated LoRA"),
    "arrow_config": Field(None, refused="Arrow routing"),
    "corda_config": Field(None),
    "ensure_weight_tying": Field(False, refused="tied adapters"),
    "eva_config": Field(None),
    "kasa_config": Field(None, refused="KaSA"),
    "layer_replication": Field(None, refused="replicated layers"),
    "loftq_config": Field({}),
    "lora_ga_config": Field(None),
    "megatron_config": Field(None, refused="Megatron layers"),
    "megatron_core": Field("megatron.core"),
    "monteclora_config": Field(None, refused="MonteCLoRA"),
    "qalora_group_size": Field(16),
    "target_parameters": Field(None, refused="adapters on bare parameters"),
    "trainable_token_indices": Field(None, refused="trainable tokens"),
    "use_bdlora": Field(None, refused="block-diagonal LoRA"),
    "use_qalora": Field(False, refused="QA-LoRA"),
    "velora_config": Field(None),
}

# These change the base model's weights when the adapter is created, so the saved factors mean something only on top of the changed base.
_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")

ADDED_TWICE = 2
"""The output projection of an attention: PEFT 0.21 adds its difference once itself and once by merging, so that is what it trains."""

# Configurations of a start, or of a way to train, that is not one here.
STARTS = ("corda_config", "eva_config", "loftq_config", "lora_ga_config", "velora_config")

_NAMES = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "up_bias",
    "lora_embedding_A": "down",
    "lora_embedding_B": "up",
    "lora_magnitude_vector": "magnitude",
}
_ENDINGS = {
    "linear": {"down": "lora_A.weight", "up": "lora_B.weight", "up_bias": "lora_B.bias", "magnitude": "lora_magnitude_vector"},
    "embedding": {"down": "lora_embedding_A", "up": "lora_embedding_B", "magnitude": "lora_magnitude_vector"},
}


def method_of(config: Config, path: str, *, rank: int, bias: bool) -> Method:
    """The method of one layer by a configuration.

    Args:
        config: A checked LORA configuration.
        path: The layer's module path.
        rank: Its rank.
        bias: Whether ``up`` has a bias there.
    """
    alpha, rslora, dropout = config.alpha(path, "lora_alpha"), config.flag("use_rslora"), config.number("lora_dropout")
    init = "gaussian" if config.values["init_lora_weights"] == "gaussian" else "kaiming"
    if config.flag("use_dora"):
        return DoRA(rank=rank, alpha=alpha, rslora=rslora, input_dropout=dropout, init=init)
    return LoRA(rank=rank, alpha=alpha, rslora=rslora, input_dropout=dropout, init=init, bias=bias)


def plain_alpha(method: LoRA | DoRA) -> float:
    """The alpha with which alpha / rank is this method's scale."""
    return method.scale * method.rank if method.rslora or method.alpha is None else float(method.alpha)


def _refuse(config: Config) -> Iterable[str]:
    yield from refuse_inits(config)
    if config.flag("use_dora") and config.flag("lora_bias"):
        yield "lora_bias (DoRA has no bias on lora_B)"


def refuse_inits(config: Config) -> Iterable[str]:
    """An initialisation that changed the base weights."""
    if (init := changed_base(config.values)) is not None:
        yield f"init_lora_weights = {init!r} (it changes the base weights, so the adapter alone is not the whole difference)"


def changed_base(values: Mapping[str, object]) -> str | None:
    """The start that changed the base weights, by the fields of a configuration; None for one that left them alone."""
    init = values.get("init_lora_weights")
    return init if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE) else None


def refuse_new(config: Config) -> Iterable[str]:
    """A start that needs data, or a change of the base weights."""
    init = config.values["init_lora_weights"]
    if isinstance(init, str) and init != "gaussian":
        yield f"init_lora_weights = {init!r} (true, false and 'gaussian' are there)"
    for name in STARTS:
        if config.values.get(name):
            yield name


def _create(config: Config, path: str, layer: Layer) -> Method:
    return method_of(config, path, rank=config.rank(path), bias=config.flag("lora_bias"))


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    config, path = layer.config, layer.path
    dora = config.flag("use_dora")
    tensors = layer.named(_NAMES, needed=("down", "up", "magnitude") if dora else ("down", "up"))
    rank, asked = config.rank(layer.target), config.flag("lora_bias")
    down = tensors["down"]
    layer.rank_is(rank, down.shape[0] if down.dim() > 1 else -1, "lora_A", down.shape)
    if ("up_bias" in tensors) != asked:
        raise ContradictionError(f"{path}: lora_bias is {str(asked).lower()}, but it has {'no' if asked else 'a'} bias on lora_B")
    if "magnitude" in tensors:
        if not dora:
            raise ContradictionError(f"{path}: use_dora is false, but it has a lora_magnitude_vector")
        tensors["magnitude"] = tensors["magnitude"].reshape(-1)
    method = method_of(config, layer.target, rank=rank, bias=asked)
    if layer.target != path and isinstance(method, LoRA):
        method = dataclasses.replace(method, alpha=ADDED_TWICE * method.scale * rank, rslora=False)
    return method, tensors


def _write(written: Layered) -> dict[str, Tensor]:
    endings = _ENDINGS["embedding" if written.layer.kind == "embedding" else "linear"]
    found = written.named(endings)
    if "lora_magnitude_vector" in found and isinstance(written.layer, ConvLayer):
        found["lora_magnitude_vector"] = found["lora_magnitude_vector"].reshape(1, -1, *(1 for _ in written.layer.kernel_size))
    return found


def _config(adapter: Written) -> dict[str, object]:
    dora = any(isinstance(method, DoRA) for method in adapter.methods.values())
    loras: Mapping[str, LoRA | DoRA] = adapter.only(DoRA) if dora else adapter.only(LoRA)
    adapter.same(
        lora_bias=(getattr(method, "bias", False) for method in loras.values()),
        lora_dropout=(method.input_dropout for method in loras.values()),
    )
    first = next(iter(loras.values()))
    bias = isinstance(first, LoRA) and first.bias
    biased = [path for path, layer in adapter.layers.items() if layer.kind == "embedding"] if bias else []
    if biased:
        raise CheckpointError(
            "PEFT has no bias on the adapter of an embedding.",
            why="These layers have one:\n" + "\n".join(f"  {path}" for path in sorted(biased)),
            hint="Save it with format='native'.",
            code="adapter-unsupported",
        )
    return {
        **rank_and_alpha(loras),
        "lora_dropout": first.input_dropout,
        "init_lora_weights": "gaussian" if first.init == "gaussian" else True,
        "lora_bias": bias,
        "use_dora": dora,
    }


def rank_and_alpha(loras: Mapping[str, LoRA | DoRA]) -> dict[str, object]:
    """``r``, ``lora_alpha``, their patterns and ``use_rslora``: one flag for all layers, so where they differ all are written without."""
    mixed = len({method.rslora for method in loras.values()}) > 1
    alphas = {path: plain_alpha(method) if mixed or method.alpha is None else float(method.alpha) for path, method in loras.items()}
    rslora = not mixed and next(iter(loras.values())).rslora
    return {**rank_fields({path: method.rank for path, method in loras.items()}, alphas, alpha="lora_alpha"), "use_rslora": rslora}


def _any_init(name: str, value: object) -> Iterator[str]:
    if value is not None and not isinstance(value, bool | str):
        yield f"{name} = {value!r}: true, false or a name was expected"


FIELDS: dict[str, Field] = {
    "alpha_pattern": Field({}, patterns(number)),
    "init_lora_weights": Field(True, _any_init),
    "lora_alpha": Field(8, number),
    "lora_bias": Field(False, flag),
    "lora_dropout": Field(0.0, probability),
    "r": Field(8, count),
    "rank_pattern": Field({}, patterns(count)),
    "use_dora": Field(False, flag),
    "use_rslora": Field(False, flag),
    **VARIANTS,
}

FORM = PeftForm(
    peft_type="LORA",
    methods=(LoRA, DoRA),
    fields=fields(FIELDS, fan_in=True),
    bias="lora_only",
    endings=frozenset(_NAMES),
    read=_read,
    create=_create,
    write=_write,
    config=_config,
    refuse=_refuse,
    refuse_new=refuse_new,
    takes=frozenset({"Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d", "Embedding", "MultiheadAttention"}),
)
