"""What a compiled region keeps for its backward pass: nothing that one fused loop can compute again.

An adapter's factor needs the layer's input for its gradient. Where that is a norm or an activation, torch's partitioner keeps it, as
large as an activation, because a matrix product reads it in the backward pass; computing it again from what is kept anyway costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch._functorch.config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

OPTION = "custom_partitioner_fn"


class LeanPartitioner(CustomPartitionerFn):
    """torch's own partitioner, allowed to compute again what a product in the backward pass reads."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **arguments: Any) -> tuple[GraphModule, GraphModule]:
        """Forward and backward graph of a joint one."""
        with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
            return min_cut_rematerialization_partition(gm, joint_inputs, **arguments)

    def uuid(self) -> Any:
        """Part of the cache key."""
        return "onegraph-lean-partition-1"
