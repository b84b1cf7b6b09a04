"""Paths, patterns and targets as files write them."""

from __future__ import annotations

import pytest
from torch import nn

from onegraph.checkpoint.dialects import kohya, peft
from onegraph.checkpoint.keys import file_paths, match_paths, pattern_value, patterns_of, plain_path, targets_of


@pytest.mark.parametrize(
    "path",
    [
        "_orig_mod.blocks.0.query",
        "blocks.0._orig_mod.query",
        "module._orig_mod.blocks.0.query",
        "_fsdp_wrapped_module.blocks._fsdp_wrapped_module.0._checkpoint_wrapped_module.query",
    ],
)
def test_wrapper_levels_are_stripped_anywhere(path: str) -> None:
    assert plain_path(path) == "blocks.0.query"


def test_a_name_that_only_contains_a_wrapper_stays() -> None:
    assert plain_path("submodule.modules.query_orig_mod") == "submodule.modules.query_orig_mod"


def test_paths_match_across_wrappers_on_either_side() -> None:
    assert match_paths(["_orig_mod.a.b", "c", "absent"], ["a.b", "module.c"]) == {"_orig_mod.a.b": "a.b", "c": "module.c"}


def test_an_exact_path_wins_and_an_ambiguous_one_is_left_out() -> None:
    assert match_paths(["a", "_orig_mod.a"], ["a", "module.a"]) == {"a": "a"}


def test_a_models_own_module_called_module_is_kept_and_a_wrappers_is_not() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    own, wrapped = Owner(), nn.ModuleDict({"inner": nn.DataParallel(nn.Linear(2, 2))})
    assert file_paths(own, ["module"]) == {"module": "module"}
    assert file_paths(wrapped, ["inner.module"]) == {"inner.module": "inner"}


def test_patterns_hold_the_commonest_value_and_the_exceptions() -> None:
    patterns = patterns_of({"a.q": 4, "a.k": 4, "b.q": 8})
    assert (patterns.default, patterns.exceptions) == (4, {"b.q": 8})


@pytest.mark.parametrize(
    "values",
    [
        {"q": 8, "a.q": 4, "b.q": 4},  # "q" alone would match the others too
        {"a.b": 8, "axb": 4, "c": 4},  # the dot would match the x
        {"x.q": 2, "y.x.q": 4, "z": 4, "y.z": 8},
    ],
)
def test_patterns_mean_the_same_when_paths_end_alike(values: dict[str, float]) -> None:
    patterns = patterns_of(values)
    assert {path: pattern_value(patterns.exceptions, path, patterns.default) for path in values} == values


@pytest.mark.parametrize(
    ("chosen", "everything", "targets"),
    [
        ({"a.q", "b.q"}, ["a", "a.q", "b.q", "a.k"], ["q"]),
        ({"a.q"}, ["a.q", "b.q"], ["a.q"]),
        ({"q"}, ["q", "a.q"], "q"),
        ({"q", "b.q"}, ["q", "a.q", "b.q"], r"b\.q|q"),
    ],
    ids=["last names", "whole paths", "one path that others end with", "several"],
)
def test_targets_mean_exactly_the_chosen_layers(chosen: set[str], everything: list[str], targets: object) -> None:
    assert targets_of(chosen, everything) == targets


def test_kohya_keys_of_both_text_encoder_levels_mean_the_same_layer() -> None:
    path = "encoder.layers.0.self_attn.q_proj"
    key = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    assert kohya.module_key("lora_te", path) == kohya.module_key("lora_te", f"text_model.{path}") == key
    for own in (path, f"text_model.{path}"):
        table = kohya.paths_by_key("lora_te", [own])
        assert table[key] == table[key.replace("text_model_", "")] == own


def test_a_kohya_key_that_two_modules_share_is_no_key() -> None:
    assert kohya.paths_by_key("lora_unet", ["a.b_c", "a_b.c", "d"]) == {"lora_unet_d": "d"}


@pytest.mark.parametrize("key", ["base_model.model.a.lora_A.weight", "_orig_mod.base_model.model.a.lora_A.weight"])
def test_the_peft_prefix_is_found_behind_wrappers(key: str) -> None:
    assert peft.without_prefix(key) == "a.lora_A.weight"
    assert peft.without_prefix("other.base_model.model.a") == "other.base_model.model.a"
