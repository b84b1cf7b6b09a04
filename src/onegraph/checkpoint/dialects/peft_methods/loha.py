"""LOHA: the elementwise product of two low-rank matrices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from onegraph.checkpoint.dialects.peft_methods.fields import Config, Field, count, fields, flag, number, patterns, probability
from onegraph.checkpoint.dialects.peft_methods.form import Layered, PeftForm, Read, Written, rank_fields
from onegraph.methods import LoHa, LoKr, Method

_NAMES = {
    "hada_w1_a": "first_up",
    "hada_w1_b": "first_down",
    "hada_w2_a": "second_up",
    "hada_w2_b": "second_down",
    "hada_t1": "first_core",
    "hada_t2": "second_core",
}
_FACTORS = ("first_up", "first_down", "second_up", "second_down")


def _read(layer: Read) -> tuple[Method, dict[str, Tensor]]:
    tensors = with_upright(layer.named(_NAMES, needed=_FACTORS))
    method = _method(layer.config, layer.path)
    layer.rank_is(method.rank, tensors["first_down"].shape[0], "hada_w1_b", tensors["first_down"].shape)
    return method, tensors


def _method(config: Config, path: str) -> LoHa:
    return LoHa(
        rank=config.rank(path),
        alpha=config.alpha(path),
        rank_dropout=config.number("rank_dropout"),
        module_dropout=config.number("module_dropout"),
        effective_conv=config.flag("use_effective_conv2d"),
        init="zero" if config.flag("init_weights") else "random",
    )


def with_upright(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Beside a core, ``up`` is stored as (R, O), and here as (O, R); the inverse is the same."""
    cores = {name.partition("_")[0] for name in tensors if name.endswith("_core")}
    return {name: tensor.t().contiguous() if name in {f"{pair}_up" for pair in cores} else tensor for name, tensor in tensors.items()}


def with_square_cores(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The core of a Conv1d is stored as one of a Conv2d with a kernel of (k, 1)."""
    return {name: tensor.unsqueeze(-1) if name.endswith("_core") and tensor.dim() == 3 else tensor for name, tensor in tensors.items()}


def _write(written: Layered) -> dict[str, Tensor]:
    theirs = {ours: name for name, ours in _NAMES.items()}
    return {theirs[name]: tensor for name, tensor in with_square_cores(with_upright(written.tensors)).items()}


def lycoris_config(methods: Mapping[str, LoHa] | Mapping[str, LoKr], adapter: Written) -> dict[str, object]:
    """The fields that LOHA and LOKR have in common."""
    every: list[LoHa | LoKr] = [*methods.values()]
    adapter.same(
        rank_dropout=(method.rank_dropout for method in every),
        module_dropout=(method.module_dropout for method in every),
        use_effective_conv2d=(method.effective_conv for method in every),
        init_weights=(method.init for method in every),
    )
    alphas = {path: float(method.rank if method.alpha is None else method.alpha) for path, method in methods.items()}
    return {
        **rank_fields({path: method.rank for path, method in methods.items()}, alphas),
        "rank_dropout": every[0].rank_dropout,
        "module_dropout": every[0].module_dropout,
        "use_effective_conv2d": every[0].effective_conv,
        "init_weights": every[0].init != "random",
    }


def _config(adapter: Written) -> dict[str, object]:
    return lycoris_config(adapter.only(LoHa), adapter)


LYCORIS_FIELDS: dict[str, Field] = {
    "alpha": Field(8, number),
    "alpha_pattern": Field({}, patterns(number)),
    "init_weights": Field(True, flag),
    "module_dropout": Field(0.0, probability),
    "r": Field(8, count),
    "rank_dropout": Field(0.0, probability),
    "rank_pattern": Field({}, patterns(count)),
    "use_effective_conv2d": Field(False, flag),
}

FORM = PeftForm(
    peft_type="LOHA",
    methods=(LoHa,),
    fields=fields(LYCORIS_FIELDS),
    endings=frozenset(_NAMES),
    takes=frozenset({"Linear", "Conv1d", "Conv2d"}),
    read=_read,
    create=lambda config, path, layer: _method(config, path),
    write=_write,
    config=_config,
)
