"""Adapters in several processes: their gradients averaged, the frozen weights sharded, their files whole."""

from __future__ import annotations

from onegraph.distributed.gathering import gathered
from onegraph.distributed.gradients import average_gradients
from onegraph.distributed.replicating import replicate
from onegraph.distributed.sharding import shard

__all__ = ["average_gradients", "gathered", "replicate", "shard"]
