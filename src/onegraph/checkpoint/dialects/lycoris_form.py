"""How LyCORIS files hold one method, as a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onegraph.methods import Method

Writer = Callable[..., dict[str, Tensor]]
"""From a method, our tensors and the layer to the end of each key and its tensor."""


class IncompleteError(Exception):
    """A module lacks a tensor; the text goes behind its name."""


class ShapeError(Exception):
    """The tensors of a module don't belong together; the text says in what."""


class UnsupportedError(Exception):
    """What can't be held here or there; the text names it."""


@dataclass(frozen=True)
class Read:
    """One module as a file holds it.

    Args:
        tensors: The end of a key ("hada_w1_a") -> tensor.
        alpha: Its alpha, None where it has none.
    """

    tensors: Mapping[str, Tensor]
    alpha: float | None


@dataclass(frozen=True)
class Form:
    """How one method is written.

    Args:
        name: What messages call it.
        algorithm: LyCORIS' name, as in "algo=loha".
        methods: Our methods that are written this way.
        keys: The ends of the keys that are its own.
        needed: Of each of these, one has to be there.
        read: From a module to its method and our tensors; None where it changes nothing.
        write: And back.
        decomposes: Whether it may have a magnitude beside it.
    """

    name: str
    algorithm: str
    methods: tuple[type[Method], ...]
    keys: Set[str]
    needed: tuple[tuple[str, ...], ...]
    read: Callable[[Read], tuple[Method, dict[str, Tensor]] | None]
    write: Callable[[Any, Mapping[str, Tensor], Any], dict[str, Tensor]]
    decomposes: bool = False
