"""What the processes of test_several_processes run: one function a program, the same in one process and in two."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import onegraph as og

RATE = 0.05


def llama(*, tied: bool = True) -> LlamaForCausalLM:
    """Three small blocks; the same weights in every process."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied))


def adapted(seed: int = 1, method: og.LoRA | og.DoRA | None = None) -> tuple[LlamaForCausalLM, og.Adapters]:
    """The same with an adapter that is no identity."""
    model = llama()
    generator = torch.Generator().manual_seed(seed)
    adapters = og.attach(model, method or og.LoRA(rank=4), targets=["q_proj", "v_proj", "down_proj"], generator=generator)
    with torch.no_grad():
        for parameter in adapters.parameters().values():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1, generator=generator)
    return model, adapters


def rows(step: int, count: int = 4) -> Tensor:
    return torch.randint(0, 32, (count, 6), generator=torch.Generator().manual_seed(100 + step))


def mine(batch: Tensor) -> Tensor:
    """This process's part of a batch."""
    return batch if not dist.is_initialized() else batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def start() -> None:
    """Joins the other processes, if there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")


def values(adapters: og.Adapters, name: str = "default") -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in adapters.parameters(name).items()}
