"""What the server of processes imports before it starts any."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import accelerate
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama

import onegraph.checkpoint
import onegraph.distributed
import onegraph.peft
import onegraph.training.diffusion.preparation
import tiny_run

__all__ = ["accelerate", "onegraph", "tiny_run", "torch", "transformers"]
