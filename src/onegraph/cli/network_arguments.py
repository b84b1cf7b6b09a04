"""``--network_args``: name=value items of sd-scripts' ``networks.lora`` and of ``lycoris.kohya``, each to its setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onegraph.cli.flag import KINDS
from onegraph.errors import ConfigurationError, OnegraphError, nearest

_BOTH: Mapping[str, tuple[str, str]] = {
    "conv_dim": ("int", "network.conv_dim"),
    "conv_alpha": ("alpha", "network.conv_alpha"),
    "rank_dropout": ("float", "network.rank_dropout"),
    "module_dropout": ("float", "network.module_dropout"),
    "loraplus_lr_ratio": ("float", "optimizer.loraplus_lr_ratio"),
    "loraplus_unet_lr_ratio": ("float", "optimizer.loraplus_unet_lr_ratio"),
    "loraplus_text_encoder_lr_ratio": ("float", "optimizer.loraplus_text_encoder_lr_ratio"),
}

NETWORK_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    **_BOTH,
    "block_dims": ("ints", "network.block_dims"),
    "block_alphas": ("floats", "network.block_alphas"),
    "conv_block_dims": ("ints", "network.conv_block_dims"),
    "conv_block_alphas": ("floats", "network.conv_block_alphas"),
    "down_lr_weight": ("floats", "optimizer.down_lr_weight"),
    "mid_lr_weight": ("float", "optimizer.mid_lr_weight"),
    "up_lr_weight": ("floats", "optimizer.up_lr_weight"),
    "block_lr_zero_threshold": ("float", "optimizer.block_lr_zero_threshold"),
}
"""Of networks.lora: name -> kind of value and the setting it sets."""

LYCORIS_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "algo": ("text", "network.algo"),
    "preset": ("text", "network.preset"),
    **_BOTH,
    "dropout": ("float", "network.dropout"),
    "dora_wd": ("truth", "network.dora_wd"),
    "rs_lora": ("truth", "network.rs_lora"),
    "use_tucker": ("truth", "network.use_tucker"),
    "use_cp": ("truth", "network.use_tucker"),
    "use_conv_cp": ("truth", "network.use_tucker"),
    "factor": ("int", "network.factor"),
    "decompose_both": ("truth", "network.decompose_both"),
    "full_matrix": ("truth", "network.full_matrix"),
    "unbalanced_factorization": ("truth", "network.unbalanced_factorization"),
    "rescaled": ("truth", "network.rescaled"),
    "train_norm": ("truth", "network.train_norm"),
}
"""Of lycoris.kohya; use_cp and use_conv_cp are older names of use_tucker."""

_TABLES = {"networks.lora": NETWORK_ARGUMENTS, "lycoris.kohya": LYCORIS_ARGUMENTS}

_OF_LYCORIS = dict.fromkeys(LYCORIS_ARGUMENTS.keys() - NETWORK_ARGUMENTS.keys(), "it belongs to LyCORIS: --network_module=lycoris.kohya")
_OF_LORA = dict.fromkeys(NETWORK_ARGUMENTS.keys() - LYCORIS_ARGUMENTS.keys(), "it belongs to --network_module=networks.lora")
_FLAGS = {"dim": "use --network_dim", "alpha": "use --network_alpha"}
_ELSEWHERE = {
    "networks.lora": {**_OF_LYCORIS, **_FLAGS, "dropout": "use --network_dropout"},
    "lycoris.kohya": {**_OF_LORA, **_FLAGS},
}

# Argument of LyCORIS -> the value with which it asks for nothing, why another one can't be honoured, and what to do instead.
_REFUSED = {
    "use_scalar": ("false", "It trains a factor of the whole difference, which no method here has.", "leave it out"),
    "constraint": ("0", "It bounds the rotations of all blocks together, which isn't computed in training here.", "leave it out"),
    "constrain": ("0", "It bounds the rotations of all blocks together, which isn't computed in training here.", "leave it out"),
    "block_size": (  # of every other method it follows from the rank
        "4",
        "It is the block size of DyLoRA, which isn't trained here.",
        "OFT and BOFT have it from --network_dim",
    ),
    "wd_on_output": ("true", "The magnitude is that of output features here, as in the paper.", "leave it out"),
    "bypass_mode": ("false", "How a difference is computed is decided here by the shapes of each layer.", "leave it out"),
    "disable_conv_cp": ("true", "It is an older name.", "use use_tucker=True"),
    "train_t5xxl": ("false", "Stable Diffusion 1.x and 2.x have no T5.", "leave it out"),
    "train_llm_adapter": ("false", "Stable Diffusion 1.x and 2.x have no such module.", "leave it out"),
    "warn_on_unmatched": ("true", "Nothing is left out without a word here.", "leave it out"),
}

_OTHER_ALGORITHMS = {
    "dylora": "DyLoRA's ranks of changing size",
    "glora": "GLoRA's factors of the weight itself",
    "tlora": "T-LoRA's masks that follow the timestep",
}


def read_network_arguments(items: Sequence[str], label: str, module: str) -> tuple[dict[str, object], list[OnegraphError]]:
    """Settings by their path, and everything that is wrong with the items.

    Args:
        items: "conv_dim=4", "block_dims=2,4,...".
        label: How the flag is called in the messages.
        module: Whose arguments they are: "networks.lora", "lycoris.kohya".
    """
    table = _TABLES.get(module)
    if table is None:
        return {}, []  # the module itself is refused
    values: dict[str, object] = {}
    problems: list[OnegraphError] = []
    for item in items:
        name, separator, text = (part.strip() for part in item.partition("="))
        if not separator:
            hint = f'write {label} "conv_dim=4" "conv_alpha=1"'
            problems.append(ConfigurationError(f"{label}: {item!r} is not name=value", hint=hint, code="bad-argument"))
        elif module == "lycoris.kohya" and name in _REFUSED:
            problems += _refused(name, text, label)
        elif name not in table:
            near = nearest(name, table)
            hint = _ELSEWHERE[module].get(name) or (f"did you mean {near[0]}?" if near else f"known: {', '.join(table)}")
            problems.append(ConfigurationError(f"{label}: {name!r} is no argument of {module}", hint=hint, code="bad-argument"))
        elif name == "algo" and text.lower() in _OTHER_ALGORITHMS:
            what, why = f"{label}: algo={text} is not supported", f"It needs {_OTHER_ALGORITHMS[text.lower()]}, which no method here has."
            problems.append(ConfigurationError(what, why=why, hint="algo=lora and algo=lokr come near it", code="bad-argument"))
        else:
            kind, target = table[name]
            if target in values:
                what = f"{label}: {name} is given twice"
                problems.append(ConfigurationError(what, hint="keep one of them", code="bad-argument"))
            try:
                values[target] = _read(kind, text.lower() if name == "algo" else text)
            except (ValueError, OverflowError):
                expected = _EXPECTED.get(kind) or KINDS[kind][1]
                what = f"{label}: {name} is {text!r}, which is not {expected}"
                problems.append(ConfigurationError(what, hint=f'for example "{name}={_EXAMPLES.get(kind, "1")}"', code="bad-argument"))
    return values, problems


_EXPECTED = {"ints": "whole numbers separated by commas", "floats": "numbers separated by commas"}
_EXAMPLES = {"int": "4", "ints": "4,4,8", "floats": "1,1,0.5", "truth": "True"}


def _refused(name: str, text: str, label: str) -> list[OnegraphError]:
    """An argument that is known and can't be honoured, unless it asks for nothing."""
    inert, why, hint = _REFUSED[name]
    kind = "truth" if inert in ("true", "false") else "float"
    try:
        if _read(kind, text) == _read(kind, inert):
            return []
    except (ValueError, OverflowError):
        pass
    return [ConfigurationError(f"{label}: {name}={text} is not supported", why=why, hint=hint, code="bad-argument")]


def _read(kind: str, text: str) -> object:
    """One value; lists are separated by commas and may stand in brackets."""
    if kind in ("ints", "floats"):
        read: Callable[[str], object] = KINDS["int" if kind == "ints" else "float"][0]
        return tuple(read(part) for part in text.strip("[]()").split(",") if part.strip())
    return KINDS[kind][0](text)
