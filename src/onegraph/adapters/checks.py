"""What is refused before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from onegraph.adapters.plan import Plan
from onegraph.errors import AdapterError, ConfigurationError, NumericsError, OnegraphError, nearest
from onegraph.layers import Layer
from onegraph.methods import METHODS, Method, ParameterSpec

# File systems take 255 bytes, of which endings such as "-step00000100-state" need a few.
_LONGEST_NAME = 200


def check_name(name: str, taken: Collection[str]) -> None:
    """A name that can be a folder, and is free."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name in {"", ".", ".."}
        or name != name.strip()
        or set(name) & set("/\\")
        or len(name.encode(errors="replace")) > _LONGEST_NAME
    ):
        raise AdapterError(
            f"{name!r} is not a name for an adapter",
            why=f"Names become folders when adapters are saved: letters, digits, - and _ are safe, {_LONGEST_NAME} at most.",
            code="adapter-name",
        )
    if name in taken:
        raise AdapterError(
            f"there is an adapter {name!r} already",
            why="Adding another under its name would lose it.",
            hint=f"another name, or delete({name!r}) first",
            code="adapter-exists",
        )


def check_method(method: object, what: str = "") -> None:
    """It is a method: neither its name nor its class.

    Args:
        method: What was given.
        what: For which argument, where that isn't clear.
    """
    if isinstance(method, Method):
        return
    kind = next((kind for kind in METHODS.values() if method is kind or method == kind.name), None)
    names = ", ".join(kind.__name__ for kind in METHODS.values())
    raise ConfigurationError(
        f"{what and f'{what}: '}{f'a {type(method).__name__}' if isinstance(method, nn.Module) else repr(method)} is not an adapter method",
        hint=f"{kind.__name__}() is one" if kind else f"one of {names}, e.g. LoRA(rank=16, alpha=32)",
        code="not-a-method",
    )


def check_capacity(plan: Plan, capacity: int | None) -> None:
    """Every rank of the plan fits."""
    if capacity is None:
        return
    if capacity < 1:
        raise ConfigurationError(f"capacity={capacity} is not a rank", hint="a whole number, 1 or more", code="capacity")
    for entry in plan:
        if entry.rank is not None and entry.rank > capacity:
            raise AdapterError(
                f"{entry.path}: rank {entry.rank} is above the capacity of {capacity}",
                why="The capacity is the rank that all adapters are padded to; none can be larger.",
                hint=f"capacity={entry.rank} or more, or leave capacity out",
                code="rank-above-capacity",
            )


def is_finite(tensor: Tensor) -> bool:
    """True where a tensor holds no NaN and no infinity; of one without values (meta) nothing is known against it."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return True
    # The 8-bit formats have no isfinite of their own.
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def check_finite(number: float, what: str) -> None:
    """A number, no NaN, no infinity."""
    try:
        finite = math.isfinite(number)
    except (TypeError, ValueError, RuntimeError):
        raise AdapterError(f"{what} is {number!r}, which is no number", hint="a number such as 0.5", code="not-finite-value") from None
    if not finite:
        raise AdapterError(f"{what} is {number}", why="It multiplies or masks activations: it has to be finite.", code="not-finite-value")


def is_known(name: object, known: Collection[str]) -> bool:
    """Whether it is the name of an adapter; what isn't text never is."""
    return isinstance(name, str) and name in known


def first_of(names: Sequence[str]) -> str:
    """The first ten names in one line, and how many more there are."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def unknown_adapter(name: str, known: Collection[str]) -> OnegraphError:
    """The error for a name that no adapter has."""
    close = nearest(str(name), known)
    there = f"there are {', '.join(map(repr, known))}" if known else "there is none: add() one"
    return AdapterError(f"there is no adapter {name!r}", hint=f"did you mean {close[0]!r}?" if close else there, code="unknown-adapter")


def sharded_error(path: str) -> AdapterError:
    """The error for adapters whose Parameters were replaced from outside."""
    return AdapterError(
        f"the adapter's Parameters on {path!r} were replaced: fully_shard, FSDP or the like has put its own there",
        why="An adapter that is cut in pieces can be trained, but not switched, read or written like this.",
        hint="onegraph.shard(model), in place of accelerate's FSDP or fully_shard, keeps adapters whole; to save this one all the same, "
        "do it inside onegraph.gathered(model), which every process enters",
        code="adapters-sharded",
    )


def unknown_setting(method: str, setting: str, known: Collection[str]) -> OnegraphError:
    """The error for a setting that isn't there."""
    return AdapterError(
        f"{method} keeps no setting {setting!r} here",
        why="Settings that no adapter uses are not in the graph.",
        hint=f"there are {', '.join(sorted(known))}" if known else "",
        code="unknown-setting",
    )


def check_tensors(
    name: str,
    expected: Mapping[str, tuple[Method, Mapping[str, ParameterSpec]]],
    tensors: object,
    *,
    partial: bool,
) -> None:
    """Every tensor belongs to the adapter, has its shape and is finite, and, unless ``partial``, none is missing."""
    if not isinstance(tensors, Mapping) or not all(isinstance(given, Mapping) for given in tensors.values()):
        what = f"the tensors of adapter {name!r} are {type(tensors).__name__}"
        hint = '{"path of a layer": {"up": tensor, "down": tensor}, ...}, as tensors() gives them'
        raise AdapterError(what, why="They belong to layers, and have names there.", hint=hint, code="tensor-unknown")
    problems: list[AdapterError] = []
    for path in tensors:
        if path not in expected:
            close = nearest(path, expected)
            hint = f"did you mean {close[0]}?" if close else ""
            problems.append(AdapterError(f"adapter {name!r} is not on {path!r}", hint=hint, code="tensor-unknown"))
    for path, (method, specs) in expected.items():
        given = tensors.get(path, {})
        for key, value in given.items():
            if key not in specs:
                hint = f"it has {', '.join(specs)}"
                problems.append(AdapterError(f"{path}: {method.name} has no tensor {key!r}", hint=hint, code="tensor-unknown"))
            elif not isinstance(value, Tensor):
                problems.append(AdapterError(f"{path}.{key} is {type(value).__name__}, no tensor", code="tensor-unknown"))
            elif tuple(value.shape) != specs[key].shape:
                what = f"{path}.{key} has shape {tuple(value.shape)}, not {specs[key].shape}"
                problems.append(AdapterError(what, why=f"That is the shape of {method} on this layer.", code="tensor-shape"))
        missing = [key for key in specs if key not in given]
        if missing and not partial:
            problems.append(AdapterError(f"{path}: no tensor for {', '.join(missing)}", code="tensor-missing"))
    if not problems:
        broken = [f"{path}.{key}" for path, given in tensors.items() for key, value in given.items() if not is_finite(value)]
        if broken:
            raise NumericsError(
                f"tensors for adapter {name!r} hold NaN or infinity: {first_of(broken)}",
                why="Every output of those layers would be NaN. Nothing has changed.",
                hint="the run that made them diverged; take an earlier one",
                code="not-finite",
            )
        return
    first = problems[0]
    more = [f"- {problem.what}" for problem in problems[:5]] + ([f"- and {len(problems) - 5} more"] if len(problems) > 5 else [])
    raise AdapterError(
        first.what if len(problems) == 1 else f"{len(problems)} tensors don't fit adapter {name!r}:\n" + "\n".join(more),
        why=first.why,
        hint=first.hint,
        code=first.code,
    )


def check_rows(names: Sequence[str | None], known: Collection[str]) -> None:
    """At least one row, and every name is an adapter's."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ConfigurationError(
            f"rows({names!r}) names no rows",
            why="It takes the adapter of every row of the batch, in order.",
            hint='rows(["legal", None, "french"]) for a batch of three',
            code="rows",
        )
    for name in names:
        if name is not None and not is_known(name, known):
            raise unknown_adapter(name, known)


def merged_error(what: str, merged: Collection[str]) -> OnegraphError:
    """The error for what can't be done while weights hold an adapter."""
    return AdapterError(
        f"{what} while {', '.join(map(repr, merged))} {'is' if len(merged) == 1 else 'are'} merged into the weights",
        why="The adapter would act on top of itself.",
        hint="unmerge() first",
        code="merged",
    )


def no_rows_error(path: str) -> OnegraphError:
    """The error for rows on a layer that is never called, and whose owner isn't adapted."""
    owner = path.rpartition(".")[0]
    return AdapterError(
        f"{path} can't have an adapter for every row",
        why="It is never called: nn.MultiheadAttention reads its weight, and it can only run the rows where it is adapted itself.",
        hint=f"adapt {owner!r} too, or prepare it: reserve(method=LoRA(), targets=[{owner!r}]); or leave {path!r} out with exclude=",
        code="rows-unsupported",
    )


def unhonoured_dropout(method: Method, layer: Layer) -> str | None:
    """Why a layer that only runs by its weight can't take a method with these dropouts; None when it can."""
    dropouts = sorted(name for name in method.settings(layer).keys() & method.random_settings if method.settings(layer)[name])
    if not layer.by_weight or not dropouts or not method.beside(layer):
        return None
    return f"it has no activations of its own to drop: {', '.join(dropouts)} can't act there"
