"""One layer of transformers' cache of keys and values, looking like the cache of the whole model.

Nothing here compares or looks up a layer's number: a compiled block that passes its own number is then no other graph than its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

_KNOWN = (Cache, DynamicCache, StaticCache)


class OneLayer(Cache):
    """A cache as a single block sees it: what it reads and writes is its own layer.

    Args:
        whole: The cache of the model.
        index: The block's layer.
    """

    def __init__(self, whole: Cache, index: int) -> None:
        self.__dict__.update(vars(whole))
        self._own: Any = whole.layers[index]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values into the layer; returns all that it holds."""
        found: tuple[Tensor, Tensor] = self._own.update(key_states, value_states, *args, **kwargs)
        return found

    def get_seq_length(self, *layer_idx: int) -> Any:
        """How many positions the layer holds; without a number, what the cache of the model says."""
        # Asking for the length leaves the number unread, asking whether there is one doesn't.
        return self._own.get_seq_length() if len(layer_idx) else super().get_seq_length()


class _Layers:
    """A list of layers in which every number means the same one."""

    def __init__(self, own: Any, length: int) -> None:
        self._own = own
        self._length = length

    def __getitem__(self, index: int) -> Any:
        return self._own

    def __len__(self) -> int:
        return self._length


class _Updated:
    """Whether the layer holds the encoder's keys and values, under every number."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def get(self, index: int, default: bool | None = None) -> bool:
        return self.value

    def __getitem__(self, index: int) -> bool:
        return self.value

    def __setitem__(self, index: int, value: bool) -> None:
        self.value = value


class OneLayerOfBoth(EncoderDecoderCache):
    """The cache of a decoder that looks at an encoder, as a single block sees it.

    Args:
        whole: The cache of the model.
        index: The block's layer.
    """

    def __init__(self, whole: EncoderDecoderCache, index: int) -> None:
        cross, updated = OneLayer(whole.cross_attention_cache, index), _Updated(bool(whole.is_updated.get(index)))
        layers = _Layers(whole.cross_attention_cache.layers[index], len(whole.cross_attention_cache.layers))
        cross.__dict__.update(layers=layers)
        self.__dict__.update(vars(whole))
        self.__dict__.update(
            self_attention_cache=OneLayer(whole.self_attention_cache, index), cross_attention_cache=cross, is_updated=updated
        )

    def get_seq_length(self, *layer_idx: int) -> Any:
        """How many positions the layer of the decoder holds; without a number, what the cache of the model says."""
        return self.self_attention_cache.get_seq_length(*layer_idx)


def layer_of(whole: Cache, index: int) -> tuple[Cache, Callable[[], None]]:
    """A block's own layer of a cache, and what to do when the block has run; the cache itself where it is of an unknown kind."""
    if type(whole) is EncoderDecoderCache:
        if all(_divisible(each, index) for each in (whole.self_attention_cache, whole.cross_attention_cache)):
            both = OneLayerOfBoth(whole, index)
            updated: Any = both.is_updated

            def note() -> None:
                whole.is_updated[index] = updated.value

            return both, note
    elif _divisible(whole, index):
        return OneLayer(whole, index), _nothing
    return whole, _nothing


def _divisible(whole: Any, index: int) -> bool:
    """Whether a cache is of a kind that is known, and has its layers where the block runs."""
    if type(whole) not in _KNOWN or whole.offloading:
        return False
    if whole.layer_class_to_replicate is not None:
        while len(whole.layers) <= index:
            whole.layers.append(whole.layer_class_to_replicate())
    return index < len(whole.layers)


def _nothing() -> None:
    """Nothing is to be done."""
