"""``--network_args``: name=value items of sd-scripts' ``networks.lora``, each to its setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onegraph.cli.flag import KINDS
from onegraph.errors import ConfigurationError, OnegraphError, nearest

NETWORK_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "conv_dim": ("int", "network.conv_dim"),
    "conv_alpha": ("alpha", "network.conv_alpha"),
    "rank_dropout": ("float", "network.rank_dropout"),
    "module_dropout": ("float", "network.module_dropout"),
    "block_dims": ("ints", "network.block_dims"),
    "block_alphas": ("floats", "network.block_alphas"),
    "conv_block_dims": ("ints", "network.conv_block_dims"),
    "conv_block_alphas": ("floats", "network.conv_block_alphas"),
    "down_lr_weight": ("floats", "optimizer.down_lr_weight"),
    "mid_lr_weight": ("float", "optimizer.mid_lr_weight"),
    "up_lr_weight": ("floats", "optimizer.up_lr_weight"),
    "block_lr_zero_threshold": ("float", "optimizer.block_lr_zero_threshold"),
    "loraplus_lr_ratio": ("float", "optimizer.loraplus_lr_ratio"),
    "loraplus_unet_lr_ratio": ("float", "optimizer.loraplus_unet_lr_ratio"),
    "loraplus_text_encoder_lr_ratio": ("float", "optimizer.loraplus_text_encoder_lr_ratio"),
}
"""Name -> kind of value and the setting it sets."""

_ELSEWHERE = {
    "dropout": "use --network_dropout",
    "algo": "LyCORIS methods are not supported yet: leave it out",
    "preset": "LyCORIS presets are not supported yet: leave it out",
    "dim": "use --network_dim",
    "alpha": "use --network_alpha",
}


def read_network_arguments(items: Sequence[str], label: str) -> tuple[dict[str, object], list[OnegraphError]]:
    """Settings by their path, and everything that is wrong with the items.

    Args:
        items: "conv_dim=4", "block_dims=2,4,...".
        label: How the flag is called in the messages.
    """
    values: dict[str, object] = {}
    problems: list[OnegraphError] = []
    for item in items:
        name, separator, text = (part.strip() for part in item.partition("="))
        if not separator:
            hint = f'write {label} "conv_dim=4" "conv_alpha=1"'
            problems.append(ConfigurationError(f"{label}: {item!r} is not name=value", hint=hint, code="bad-argument"))
        elif name not in NETWORK_ARGUMENTS:
            near = nearest(name, NETWORK_ARGUMENTS)
            hint = _ELSEWHERE.get(name) or (f"did you mean {near[0]}?" if near else f"known: {', '.join(NETWORK_ARGUMENTS)}")
            problems.append(ConfigurationError(f"{label}: {name!r} is no argument of networks.lora", hint=hint, code="bad-argument"))
        else:
            kind, target = NETWORK_ARGUMENTS[name]
            if target in values:
                what = f"{label}: {name} is given twice"
                problems.append(ConfigurationError(what, hint="keep one of them", code="bad-argument"))
            try:
                values[target] = _read(kind, text)
            except (ValueError, OverflowError):
                expected = {"ints": "whole numbers separated by commas", "floats": "numbers separated by commas"}.get(kind) or KINDS[kind][
                    1
                ]
                what = f"{label}: {name} is {text!r}, which is not {expected}"
                problems.append(ConfigurationError(what, hint=f'for example "{name}={_EXAMPLES.get(kind, "1")}"', code="bad-argument"))
    return values, problems


_EXAMPLES = {"int": "4", "ints": "4,4,8", "floats": "1,1,0.5"}


def _read(kind: str, text: str) -> object:
    """One value; lists are separated by commas and may stand in brackets."""
    if kind in ("ints", "floats"):
        read: Callable[[str], object] = KINDS["int" if kind == "ints" else "float"][0]
        return tuple(read(part) for part in text.strip("[]()").split(",") if part.strip())
    return KINDS[kind][0](text)
