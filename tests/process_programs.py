"""What the processes of test_several_processes run: one function a program, the same in one process and in two."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import onegraph as og
from onegraph.compiling import Watch, eager
from onegraph.errors import OnegraphError

RATE = 0.05
NUM_STEPS = 3


def llama() -> LlamaForCausalLM:
    """Two small blocks in float64, where sums in another order agree to many digits; the same weights in every process."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)).double()


def adapted(seed: int = 1, model: LlamaForCausalLM | None = None, name: str = "default") -> tuple[LlamaForCausalLM, og.Adapters]:
    """The same with an adapter that is no identity, drawn by its own seed."""
    model = llama() if model is None else model
    generator = torch.Generator().manual_seed(seed)
    adapters = og.attach(model, og.LoRA(rank=4), targets=["q_proj", "v_proj", "down_proj"], name=name, dtype=None, generator=generator)
    with torch.no_grad():
        for parameter in adapters.parameters(name).values():
            parameter.normal_(0, 0.1, generator=generator)
    return model, adapters


def rows(step: int, count: int = 4) -> Tensor:
    return torch.randint(0, 32, (count, 6), generator=torch.Generator().manual_seed(100 + step))


def mine(batch: Any) -> Any:
    """This process's part of a batch."""
    if not dist.is_initialized():
        return batch
    size = len(batch) // dist.get_world_size()
    return batch[dist.get_rank() * size :][:size]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def start() -> bool:
    """Joins the other processes; False when there are none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    dist.init_process_group("gloo")
    return True


def values(adapters: og.Adapters, name: str = "default") -> dict[str, Tensor]:
    return {f"{path}.{key}": value.detach().clone() for path, tensors in adapters.tensors(name).items() for key, value in tensors.items()}


def train(model: nn.Module, adapters: og.Adapters, name: str = "default", first: int = 0) -> dict[str, Tensor]:
    """A plain loop with two batches a step, clipped."""
    optimizer = torch.optim.AdamW(adapters.parameters(name).values(), lr=RATE)
    for step in range(first, first + NUM_STEPS):
        for half in range(2):
            (loss_of(model, mine(rows(2 * step + half))) / 2).backward()
        torch.nn.utils.clip_grad_norm_(adapters.parameters(name).values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return values(adapters, name)


def code_of(call: Callable[[], object]) -> str:
    """The code of the error that a call raises."""
    try:
        call()
    except OnegraphError as error:
        return error.code
    return "no error"


def plain_loop(way: str, order: str, folder: str) -> dict[str, Any]:
    """A loop without accelerate: trained, switched, rows, saved, loaded."""
    several = start()
    rank = dist.get_rank() if several else 0
    model, adapters = adapted(seed=1 + rank if way != "nothing" else 1)  # replicate and shard take the first process's values
    adapted(seed=5 + rank if way != "nothing" else 5, model=model, name="second")
    adapters.use("default")
    watch = Watch().start()
    if order == "compile first":
        og.compile(model, backend="aot_eager")
    if several and way == "replicate":
        og.replicate(model)
    elif several and way == "shard":
        og.shard(model)
    if order == "compile last":
        og.compile(model, backend="eager")
    found: dict[str, Any] = {"default": train(model, adapters)}
    warm = watch.graphs
    adapters.use("second")
    found["second"] = train(model, adapters, "second", first=7)
    found["graphs"], found["breaks"], found["after switching"] = watch.graphs, len(watch.breaks), watch.graphs - warm
    optimizer = torch.optim.SGD([*adapters.parameters("default").values(), *adapters.parameters("second").values()], lr=1.0)
    with eager(), adapters.rows(mine(["default", "default", "second", None])):  # the processes run different adapters
        loss_of(model, mine(rows(50))).backward()
    optimizer.step()
    found["rows"] = values(adapters), values(adapters, "second")
    path = Path(folder) / f"{way}.safetensors"
    if rank == 0:
        adapters.save(path, name="second")
    if several:
        dist.barrier()
        found["whole"] = not any(isinstance(parameter, DTensor) for parameter in adapters.parameters().values())
        found["sharded"] = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
        found["weights"] = len(list(llama().parameters()))
    # an adapter whose PEFT file holds weights of the base too
    also = {"lm_head": og.Dense(), "norm": og.NormTuning()}
    adapters.add("beside", og.LoRA(rank=2), targets=["q_proj", "embed_tokens"], also=also)
    drawn = torch.Generator().manual_seed(9)
    tensors = adapters.tensors("beside").items()
    adapters.load_tensors("beside", {p: {k: v.clone().normal_(0, 0.1, generator=drawn) for k, v in own.items()} for p, own in tensors})
    with og.gathered(model):
        if rank == 0:
            adapters.save(path.with_suffix(""), name="beside", format="peft")
    if several:
        dist.barrier()
    found["pieces"] = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    adapters.delete("beside")
    og.load(model, path, name="loaded")
    adapters.use("loaded")
    found["loaded"] = values(adapters, "loaded")
    with eager(), torch.no_grad(), adapters.disabled():
        found["base"] = model(input_ids=rows(60), use_cache=False).logits
    if several and way != "nothing":
        found["twice"] = code_of(lambda: og.replicate(model)), code_of(lambda: og.shard(model))
    if several and way == "shard":
        found["merge"] = code_of(lambda: adapters.merge())
    return found


def accelerated(way: str, folder: str) -> dict[str, Any]:
    """A loop with accelerate: DDP; a model sharded by onegraph; accelerate's FSDP2, which shards the adapters too."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if way == "fsdp" and accelerator.num_processes > 1:
        # accelerate switches FSDP on beside GPUs only; what it does then needs none
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
    plain, adapters = adapted(seed=1)
    og.compile(plain, backend="aot_eager")
    if way == "shard" and accelerator.num_processes > 1:
        og.shard(plain)
    count = 4 // accelerator.num_processes
    loader = DataLoader(TensorDataset(torch.cat([rows(number) for number in range(2 * NUM_STEPS)])), batch_size=count)
    optimizer = torch.optim.AdamW(adapters.parameters().values(), lr=RATE)
    watch = Watch().start()
    if way == "shard":
        model, (optimizer, loader) = plain, accelerator.prepare(optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    found: dict[str, Any] = {"wrapper": type(model).__name__, "graphs": watch.graphs, "breaks": len(watch.breaks)}
    assert og.adapters_of(model) is adapters
    path = Path(folder) / f"{way}.safetensors"
    if way == "fsdp" and accelerator.num_processes > 1:
        found["refused"] = [code_of(lambda: adapters.save(path)), code_of(lambda: adapters.use(None)), code_of(adapters.parameters)]
        with og.gathered(model):
            found["default"] = values(adapters)
            if accelerator.is_main_process:
                adapters.save(path)
                adapters.load_tensors("default", {p: {k: v * 0 for k, v in own.items()} for p, own in adapters.tensors("default").items()})
        accelerator.wait_for_everyone()
        with eager(), torch.no_grad():
            found["base"] = model(input_ids=rows(60), use_cache=False).logits  # what was loaded inside is what runs
        with og.gathered(model):
            found["loaded"] = values(adapters)
        return found
    if accelerator.is_main_process:
        adapters.save(path)
    found["default"] = values(adapters)
    with eager(), torch.no_grad(), adapters.disabled():
        found["base"] = model(input_ids=rows(60), use_cache=False).logits
    return found


def peft_names(folder: str) -> dict[str, Any]:
    """A program written for PEFT, with accelerate."""
    from onegraph.peft import LoraConfig, PeftModel, get_peft_model

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    count = 4 // accelerator.num_processes
    loader = DataLoader(TensorDataset(torch.cat([rows(number) for number in range(NUM_STEPS)])), batch_size=count)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=RATE)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(prepared)
    inner.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    again = PeftModel.from_pretrained(llama(), folder)
    with torch.no_grad():
        return {"wrapper": type(prepared).__name__, "trained": loss_of(inner, rows(60)), "saved": loss_of(again, rows(60))}


def trainer(way: str, folder: str) -> dict[str, Any]:
    """Trainer of transformers, compiled: trained, and then resumed from the checkpoint of its second step."""
    from transformers import Trainer, TrainingArguments

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    lengths = [4 + 5 * number % 7 for number in range(16)]
    data = [{"input_ids": rows(number)[0].repeat(2)[:length]} for number, length in enumerate(lengths)]

    def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        # padded to one width: fewer graphs to compile, and still other numbers of tokens in each process
        labels = torch.stack([nn.functional.pad(row["input_ids"], (0, 10 - len(row["input_ids"])), value=-100) for row in batch])
        return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}

    def made() -> Any:
        if way == "peft":
            from onegraph.peft import LoraConfig, get_peft_model

            torch.manual_seed(int(os.environ.get("RANK", "0")))  # the first process's values count
            config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
            return get_peft_model(llama(), config, autocast_adapter_dtype=False)
        return adapted()[0]

    def run(resumed: str | None = None) -> Any:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=2 if several else 4,
            per_device_eval_batch_size=2 if several else 4,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=RATE,
            max_grad_norm=0.5,
            logging_steps=1,
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            torch_compile=True,
            torch_compile_backend="aot_eager" if way == "attached" else "eager",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        )
        made_by_us = Trainer(made(), settings, train_dataset=data, eval_dataset=data[:8], data_collator=padded)
        made_by_us.train(resume_from_checkpoint=resumed)
        return made_by_us

    written: list[str] = []
    replace = os.replace
    os.replace = lambda source, target: (written.append(Path(target).name), replace(source, target))[1]  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()), Watch() as watch:
        whole = run()
    found: dict[str, Any] = {
        "wrapper": type(whole.model_wrapped).__name__,
        "default": values(og.adapters_of(whole.model)),
        "losses": [entry[key] for entry in whole.state.log_history for key in ("loss", "eval_loss") if key in entry],
        "graphs": watch.graphs,
        "breaks": len(watch.breaks),
        "files": sorted(path.name for path in (Path(folder) / "checkpoint-2").glob("*")),
        "written": written,
    }
    if several:
        dist.barrier()
        with contextlib.redirect_stdout(io.StringIO()):
            found["resumed"] = values(og.adapters_of(run(str(Path(folder) / "checkpoint-2")).model))
    return found


def different_adapters() -> list[str]:
    """Each process makes another adapter."""
    start()
    model = llama()
    og.attach(model, og.LoRA(rank=4 + dist.get_rank()), targets=["q_proj"])
    refused = [code_of(lambda: og.replicate(model)), code_of(lambda: og.shard(model))]

    model = llama()
    adapters = og.attach(model, og.LoRA(rank=4), targets=["q_proj"])
    og.replicate(model)
    for seed in (dist.get_rank(), 7):  # drawn apart, then with one seed
        torch.manual_seed(seed)
        adapters.add("late", og.LoRA(rank=4))
        refused.append(code_of(lambda: model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()))
        adapters.delete("late")
    return refused


def diffusion(flags: list[str], stop_after: int = 0) -> tuple[int, str, str]:
    """The command that trains Stable Diffusion; its exit status, what it printed, its errors."""
    from onegraph.train_network import main

    return _told(lambda: main(flags), stop_after)


def language(flags: list[str], stop_after: int = 0) -> tuple[int, str, str]:
    """The command that trains language models, likewise."""
    from onegraph.cli.train import train_text

    return _told(lambda: train_text(flags), stop_after)


def _told(command: Callable[[], int], stop_after: int) -> tuple[int, str, str]:
    """Status, output and errors; the second process is sent a signal after so many steps."""
    from onegraph.training.loop import AnyLoop

    report = AnyLoop._report

    def stop(loop: Any, *args: Any) -> None:
        report(loop, *args)
        if loop.training.position.step == stop_after and loop.training.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    AnyLoop._report = stop  # type: ignore[method-assign]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = command()
    return status, output.getvalue(), errors.getvalue()


def broken(flags: list[str], where: str) -> tuple[int, str, str]:
    """A run in which something goes wrong in the second process alone: the model can't be read, or a loss is NaN."""
    from onegraph.errors import ModelFileError
    from onegraph.training.diffusion import preparation
    from onegraph.training.diffusion.recipe import Recipe

    if os.environ["RANK"] == "1" and where == "model":

        def load(*args: Any, **options: Any) -> Any:
            raise ModelFileError("this machine hasn't got the model", code="model-not-found")

        preparation.load_base_model = load
    elif os.environ["RANK"] == "1":
        loss = Recipe.loss
        Recipe.loss = lambda *args, **options: loss(*args, **options) * float("nan")  # type: ignore[method-assign]
    return diffusion(flags)
