"""Combining adapters into a new one: their weighted sum, whole or of a smaller rank, or with only a part of each."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onegraph.adapters.checks import check_finite, check_name, is_known, merged_error, unknown_adapter
from onegraph.adapters.contributions import Contribution, adapted_base, contributions, unreadable, unwritable
from onegraph.adapters.mixing import Mixing
from onegraph.errors import ConfigurationError, TargetError
from onegraph.methods import Dense, LoRA, Method

if TYPE_CHECKING:
    from onegraph.adapters.adapted import Adapted
    from onegraph.adapters.collection import Adapters

logger = logging.getLogger("onegraph")


@dataclass(frozen=True)
class CombinedLayer:
    """What became of one layer.

    Args:
        path: Where it is.
        method: What holds the combination.
        norm: Frobenius norm of the change of the weights that was wanted; None where adapters were concatenated, which loses nothing.
        error: Norm of what the new adapter lacks of it, in the dtype it is kept in.
    """

    path: str
    method: Method
    norm: float | None = None
    error: float = 0.0

    @property
    def relative_error(self) -> float:
        """Error over norm."""
        return self.error / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class Combination:
    """What ``combine`` did. Print it.

    Args:
        name: The new adapter.
        how: How it was made.
        weights: The adapters it was made from, with their weights.
        layers: Each layer.
        relative: The adapters whose change depends on the base weights: what was combined is their change of these.
    """

    name: str
    how: str
    weights: dict[str, float]
    layers: tuple[CombinedLayer, ...]
    relative: tuple[str, ...] = ()

    @property
    def relative_error(self) -> float:
        """Of all layers together; those where adapters were concatenated lose nothing and aren't counted."""
        norm = math.hypot(*(layer.norm or 0.0 for layer in self.layers))
        return math.hypot(*(layer.error for layer in self.layers)) / norm if norm else 0.0

    def __str__(self) -> str:
        total = " + ".join(f"{weight:g} {name!r}" for name, weight in self.weights.items())
        lines = [f"{self.name!r} = {total} ({self.how}): {len(self.layers)} layers, relative error {self.relative_error:.2g}"]
        if self.relative:
            names = ", ".join(map(repr, self.relative))
            lines.append(f"The change that {names} makes depends on the base weights; what was combined is the change of these.")
        width = max(len(layer.path) for layer in self.layers)
        for layer in self.layers:
            rank = getattr(layer.method, "rank", None)
            shown = layer.method.name if rank is None else f"{layer.method.name} of rank {rank}"
            lines.append(f"  {layer.path.ljust(width)}  {shown}, relative error {layer.relative_error:.2g}")
        return "\n".join(lines)


def combine(
    adapters: Adapters,
    name: str,
    weights: Mapping[str, float],
    how: str = "sum",
    *,
    rank: int | None = None,
    energy: float | None = None,
    density: float | None = None,
    majority_sign: str = "total",
    generator: torch.Generator | None = None,
    capacity: int | None = None,
) -> Combination:
    """Add an adapter that changes the weights by sum_i w_i (adapt_i(W) - W), or by a part of it. It isn't active before ``use``.

    The adapters that it is made from keep their values. Their settings count as they are now; nothing is dropped, and the new adapter
    has no dropout. Differences are computed in float64. On an error nothing has changed.

    - "sum": the sum itself. Concatenated where the methods allow it; otherwise by its singular value decomposition, with every singular
      value that isn't zero, or as a full difference where that is smaller.
    - "cat": the sum, concatenated: of the methods' own class, or an error.
    - "svd": a LoRA of the best ``rank`` values, or of as many as hold the part ``energy`` of the sum's square.
    - "magnitude": of each adapter's difference only the part ``density`` of largest magnitude, then as "svd".
    - "dare": of each a random part ``density``, divided by ``density``, then as "svd".
    - "ties": of each the largest part, as above, times its weight; then for every number the sign that prevails, and the mean of those that
      have it; then as "svd".
    - "dare_ties": a random part, then as "ties".

    Pruning goes tensor by tensor. Where no LoRA fits (norms, grouped convolutions), a full difference is kept instead.

    Args:
        name: A new name.
        weights: Adapter -> how much of it; negative ones take away.
        how: See above.
        rank: The highest rank on any layer.
        energy: In (0, 1]: the part of the squared norm to keep on every layer.
        density: In (0, 1].
        majority_sign: The sign that prevails: that of the "total" of the numbers, or the more frequent one ("frequency"; the total's
            where they are equally many).
        generator: Draws the random parts, on the CPU.
        capacity: Rank to pad to, as for ``add``.

    Raises:
        AdapterError: ``merged``, ``unknown-adapter``, ``adapter-exists``, ``adapter-name``, ``not-finite-value``, ``rank-above-capacity``;
            ``not-combinable`` with the layers.
        ConfigurationError: ``combine-weights``, ``combine-how``, ``combine-rank``, ``combine-energy``, ``combine-density``,
            ``combine-sign``, ``combine-option``.

    Source:
        TIES: Yadav et al. 2023, https://arxiv.org/abs/2306.01708, algorithm 1, with weights where the paper has one factor for all, and
        trimmed tensor by tensor rather than over the whole model. DARE: Yu et al. 2023, https://arxiv.org/abs/2311.03099, equation 1.
    """
    if adapters._merged:
        raise merged_error("adapters can't be combined", adapters._merged)
    check_name(name, adapters.names)
    chosen = _chosen(adapters, weights)
    mixing = Mixing(how=how, rank=rank, energy=energy, density=density, majority_sign=majority_sign, generator=generator)
    dtypes = {path: value.dtype for source in chosen for path, own in adapters.tensors(source).items() for value in own.values()}
    layers: list[CombinedLayer] = []
    tensors: dict[str, dict[str, Tensor]] = {}
    relative: dict[str, None] = {}
    refused: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad():
        for path, present in contributions(adapters, chosen, dtype=torch.float64):
            relative |= dict.fromkeys(each.name for each in present if not each.method.additive)
            try:
                layer, tensors[path] = _combined(path, adapters.layers[path], present, mixing, dtypes[path])
            except TargetError as error:
                refused[path] = error.what
            else:
                layers.append(layer)
    if refused:
        hint = "leave these layers out of the adapters with exclude=" + ('; how="sum" takes the most' if how != "sum" else "")
        raise unwritable(refused, f'can\'t be combined by "{how}"', hint, "not-combinable")
    layers, tensors = _alike(layers, tensors, adapters)
    _add(adapters, name, layers, tensors, capacity)
    report = Combination(name, how, chosen, tuple(layers), tuple(relative))
    logger.info("%s", report)
    return report


def _chosen(adapters: Adapters, weights: Mapping[str, float]) -> dict[str, float]:
    """Name -> weight, checked."""
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigurationError(
            f"weights={weights!r} names no adapters",
            why="It says how much of which adapter.",
            hint='{"legal": 0.7, "french": 0.3}',
            code="combine-weights",
        )
    for name, weight in weights.items():
        if not is_known(name, adapters.names):
            raise unknown_adapter(name, adapters.names)
        check_finite(weight, f"the weight of {name!r}")
    return {name: float(weight) for name, weight in weights.items()}


def _combined(
    path: str, adapted: Adapted, present: Sequence[Contribution], mixing: Mixing, dtype: torch.dtype
) -> tuple[CombinedLayer, dict[str, Tensor]]:
    """The method and tensors that hold the combination on one layer.

    Raises:
        TargetError: Where none does.
    """
    joined = None if mixing.prunes else _concatenated(adapted, present)
    if mixing.how == "cat" and joined is None:
        names = ", ".join(dict.fromkeys(each.method.name for each in present))
        raise TargetError(f"adapters of {names} can't be concatenated", code="not-combinable")
    if joined is not None and not mixing.truncates:
        return CombinedLayer(path, joined[0]), joined[1]
    total = _total(adapted, present, mixing)
    low_rank, full = _low_rank(adapted, total, mixing, joined), _full(adapted, total)
    smaller = low_rank is not None and full is not None and not mixing.truncates and _numel(full[1]) < _numel(low_rank[1])
    found = full if smaller or low_rank is None else low_rank
    if found is None:
        raise TargetError(f"neither a LoRA nor a full difference can hold a change of its {', '.join(total)}", code="not-combinable")
    norm = math.hypot(*(float(value.norm()) for value in total.values()))
    return CombinedLayer(path, found[0], norm, _lost(adapted, total, *found, dtype)), found[1]


def _concatenated(adapted: Adapted, present: Sequence[Contribution]) -> tuple[Method, dict[str, Tensor]] | None:
    """The sum as one adapter of the same class, where they are all of one that can."""
    kind = type(present[0].method)
    if any(type(each.method) is not kind for each in present):
        return None
    methods, tensors, weights = zip(*((each.method, each.tensors, each.weight) for each in present))
    return kind.concatenated(methods, tensors, weights, adapted.layer)


def _total(adapted: Adapted, present: Sequence[Contribution], mixing: Mixing) -> dict[str, Tensor]:
    """Name -> the difference that is wanted, canonical, in float64; names that nothing changes are left out."""
    own = adapted.layer.base_tensors(adapted.base_layer)
    if (reason := unreadable(own, adapted.layer)) is not None:
        raise TargetError(reason, code="not-combinable")
    base = {name: value.detach().double() for name, value in own.items()}
    differences: list[dict[str, Tensor]] = []
    for each in present:
        changed = adapted_base(adapted, each, base)
        differences.append({name: value - base[name] if name in base else value for name, value in changed.items()})
    shapes = {name: value for each in differences for name, value in each.items()} or {name: base[name] for name in list(base)[:1]}
    for each in present:
        if not all(bool(value.isfinite().all()) for value in each.tensors.values()):
            raise TargetError(f"{each.name!r} has NaN or infinity in its tensors there", code="not-combinable")
    weights = [each.weight for each in present]
    return {name: mixing.mixed([each.get(name, torch.zeros_like(like)) for each in differences], weights) for name, like in shapes.items()}


def _low_rank(
    adapted: Adapted, total: Mapping[str, Tensor], mixing: Mixing, joined: tuple[Method, dict[str, Tensor]] | None
) -> tuple[Method, dict[str, Tensor]] | None:
    """A LoRA for the difference, None where the layer takes none: W = U S V^T, up = U sqrt(S), down = sqrt(S) V^T."""
    layer = adapted.layer
    if layer.groups > 1 or LoRA(rank=1).check(layer) is not None or not total.keys() <= {"weight", "bias"}:
        return None
    if "weight" in total:
        if joined is not None and isinstance(joined[0], LoRA):
            left, values, right = _decomposed_product(joined[1]["up"].flatten(1), joined[1]["down"].flatten(1))
        else:
            left, values, right = torch.linalg.svd(total["weight"].flatten(1), full_matrices=False)
        rank = mixing.num_kept(values)
        root = values[:rank].sqrt()
        up, down = left[:, :rank] * root, right[:rank] * root.unsqueeze(1)
    else:
        rank, device = 1, total["bias"].device
        up, down = (torch.zeros(math.prod(shape), 1, device=device) for shape in (layer.up_shape(1), layer.down_shape(1)))
    tensors = {"down": down.reshape(layer.down_shape(rank)), "up": up.reshape(layer.up_shape(rank))}
    if "bias" in total:
        tensors["up_bias"] = total["bias"]
    return LoRA(rank=rank, bias="bias" in total), tensors


def _decomposed_product(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of up @ down: that of a matrix as small as the rank, turned."""
    if up.shape[1] >= min(up.shape[0], down.shape[1]):
        left, values, right = torch.linalg.svd(up @ down, full_matrices=False)
        return left, values, right
    (up_turn, up_core), (down_turn, down_core) = torch.linalg.qr(up), torch.linalg.qr(down.t())
    left, values, right = torch.linalg.svd(up_core @ down_core.t(), full_matrices=False)
    return up_turn @ left, values, right @ down_turn.t()


def _full(adapted: Adapted, total: Mapping[str, Tensor]) -> tuple[Method, dict[str, Tensor]] | None:
    """A full difference, None where the layer takes none."""
    layer = adapted.layer
    if Dense().check(layer) is not None or not total.keys() <= layer.tensor_shapes().keys():
        return None
    device = next(iter(total.values())).device
    zeros = {name: torch.zeros(shape, device=device) for name, shape in layer.tensor_shapes().items()}
    return Dense(), {f"{name}_difference": total.get(name, zero) for name, zero in zeros.items()}


def _numel(tensors: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in tensors.values())


def _lost(adapted: Adapted, total: Mapping[str, Tensor], method: Method, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """The norm of what an adapter lacks of a difference, its tensors rounded to the dtype they are kept in."""
    layer, like = adapted.layer, next(iter(total.values()))
    p = {name: value.to(dtype).to(like) for name, value in tensors.items()}
    p |= {setting: torch.tensor(value).to(like) for setting, value in method.settings(layer).items()}
    zeros = {name: torch.zeros(shape, dtype=like.dtype, device=like.device) for name, shape in layer.tensor_shapes().items()}
    found = method.adapt_tensors(zeros, p, layer)
    return math.hypot(*(float((found[name] - total[name] if name in total else found[name]).norm()) for name in found))


def _alike(
    layers: Sequence[CombinedLayer], tensors: Mapping[str, dict[str, Tensor]], adapters: Adapters
) -> tuple[list[CombinedLayer], dict[str, dict[str, Tensor]]]:
    """All LoRAs with a bias where one has it: layers of one structure share a graph."""
    if not any(isinstance(layer.method, LoRA) and layer.method.bias for layer in layers):
        return list(layers), dict(tensors)
    found, filled = list(layers), dict(tensors)
    for number, layer in enumerate(layers):
        if isinstance(layer.method, LoRA) and not layer.method.bias:
            found[number] = replace(layer, method=replace(layer.method, bias=True))
            filled[layer.path] = {**tensors[layer.path], "up_bias": torch.zeros(adapters.layers[layer.path].layer.out_features)}
    return found, filled


def _add(
    adapters: Adapters, name: str, layers: Sequence[CombinedLayer], tensors: Mapping[str, dict[str, Tensor]], capacity: int | None
) -> None:
    """Add the adapter with these tensors, or leave everything as it was."""
    methods = {layer.path: layer.method for layer in layers}

    def targets(path: str, module: nn.Module) -> bool:
        return path in methods

    overrides = {f"^{re.escape(path)}": method for path, method in methods.items()}
    # What it starts from is overwritten: drawn from a generator of its own, so that nobody else's numbers change.
    adapters.add(name, layers[0].method, targets=targets, overrides=overrides, capacity=capacity, generator=torch.Generator())
    try:
        adapters.load_tensors(name, tensors)
    except BaseException:
        adapters.delete(name)
        raise
