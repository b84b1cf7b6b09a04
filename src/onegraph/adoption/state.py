"""Which of PEFT's adapters run: the same question asked of every layer, and one answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from onegraph.adoption.reading import adapters_on
from onegraph.adoption.refusals import few, undecided
from onegraph.adoption.sites import Site
from onegraph.methods import Method


@dataclass(frozen=True)
class State:
    """What PEFT's layers do now.

    Args:
        active: The adapters that run, in the order in which they are added up.
        merged: Those that are written into the weights.
        disabled: Whether the base model alone runs.
    """

    active: tuple[str, ...]
    merged: tuple[str, ...]
    disabled: bool


def state_of(sites: Sequence[Site]) -> State:
    """The state of all layers together.

    Raises:
        AdapterError: ``adopt-state`` where they differ.
    """
    own: list[tuple[str, set[str], list[str], list[str] | None]] = []
    disabled: dict[bool, str] = {}
    named: list[list[str]] = []
    for site in sites:
        for layer in site.theirs:
            present = adapters_on(site)
            named.append(_named(layer))
            own.append((site.path, present, [name for name in named[-1] if name in present], _merged(layer, present)))
            disabled.setdefault(bool(getattr(layer, "disable_adapters", False)), site.path)
    if len(disabled) > 1:
        raise undecided(
            f"PEFT's layer at {disabled[True]} is disabled, the one at {disabled[False]} isn't",
            hint="enable or disable all of them: peft_model.base_model.enable_adapter_layers()",
        )
    # A layer knows the order also of those that it has nothing of.
    running = {name for _, _, names, _ in own for name in names}
    active = tuple(dict.fromkeys(name for names in sorted(named, key=len, reverse=True) for name in names if name in running))
    merged = tuple(dict.fromkeys(name for _, _, _, names in own for name in names or ()))
    for what, names, lists in (
        ("active", active, [(path, present, now) for path, present, now, _ in own]),
        ("merged", merged, [(path, present, now) for path, present, _, now in own if now is not None]),
    ):
        differing = [path for path, present, now in lists if set(now) != present & set(names)]
        if differing:
            raise undecided(
                f"{' and '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} {what} on some of their layers only,"
                f" not on {few(differing)}",
                why="Here an adapter is on or off as a whole.",
                hint="peft_model.set_adapter(name)" if what == "active" else "peft_model.unmerge_adapter()",
            )
    found = State(active, merged, True in disabled)
    if found.merged and not found.disabled:
        beside = [path for path, present, now, written in own if written == [] and now and present]
        _check_beside(found, beside, sites)
    return found


def _named(layer: nn.Module) -> list[str]:
    """The adapters that are active by what the layer says, whether it has anything of them or not; one name or a list of them."""
    named: Any = getattr(layer, "active_adapters", [])
    return [named] if isinstance(named, str) else list(named)


def _merged(layer: nn.Module, present: Collection[str]) -> list[str] | None:
    """None for modules that are trained whole: they are never merged."""
    if "modules_to_save" in layer._modules:
        return None
    return [name for name in getattr(layer, "merged_adapters", []) if name in present]


def _check_beside(state: State, beside: Sequence[str], sites: Sequence[Site]) -> None:
    """PEFT goes on to run what is active where nothing is merged: on other layers, and in modules trained whole, which it never merges."""
    copies = {name: site.path for site in sites if site.wrapper is not None for name in adapters_on(site)}
    differing = [copies[name] for name in sorted((set(state.active) ^ set(state.merged)) & copies.keys())]
    if beside or differing:
        raise undecided(
            f"{few([repr(name) for name in state.merged])} merged, and {few([repr(name) for name in state.active])} active, as on"
            f" {[*beside, *differing][0]}",
            why="Here what is merged runs alone.",
            hint="peft_model.unmerge_adapter()",
        )


def check_sums(state: State, methods: Mapping[str, Mapping[str, Method]]) -> None:
    """What PEFT does with several adapters at once is their sum only where the change of each depends on nothing else.

    Args:
        state: Of the layers.
        methods: Adapter -> module path -> method.

    Raises:
        AdapterError: ``adopt-state`` with the layers.
    """
    for what, names in (("active", state.active), ("merged", state.merged)):
        if state.disabled or len(names) < 2:
            continue
        paths = dict.fromkeys(path for name in names for path in methods[name])
        for path in paths:
            there = [(name, methods[name][path]) for name in names if path in methods[name]]
            if len(there) > 1 and not all(method.additive for _, method in there):
                first = next(method for _, method in there if not method.additive)
                raise undecided(
                    f"{' and '.join(repr(name) for name, _ in there)} are {what} at once on {path}, with {first.name}",
                    why="PEFT applies one to the result of the other, which is no sum of the two.",
                    hint="activate one: peft_model.set_adapter(name)" if what == "active" else "peft_model.unmerge_adapter()",
                )
