"""What a Trainer does otherwise where its model has adapters: folders of adapters, exact resuming, compiling by blocks."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onegraph.adapters import Adapted, Adapters, adapters_of
from onegraph.compiling import Watch, eager
from onegraph.errors import CompileError, ConfigurationError
from onegraph.hf.beginning import require_data, require_training, require_whole
from onegraph.hf.compilation import compile_as_asked, compiled_only_once
from onegraph.hf.folders import can_be_written, read_folders, write_exact, write_folders

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)

_LOADED = "_hf_peft_config_loaded"
# What AdaLoRA's allocator knows, beside the optimizer's state.
_ALLOCATION = "rank_allocation.pt"


@contextlib.contextmanager
def accepted(model: Any) -> Iterator[Any]:
    """The model that Trainer's own constructor is given, inside which it takes a quantised one with adapters.

    Without PEFT, Trainer doesn't know a model that holds another one: it gets the model inside, which has the adapters.

    Raises:
        CompileError: ``trainer-wrapped``. ConfigurationError: ``trainer-adapters-inside``.
    """
    adapters = adapters_of(model) if isinstance(model, nn.Module) else None
    if adapters is None:
        if isinstance(model, nn.Module) and any(isinstance(module, Adapted) for module in model.modules()):
            raise ConfigurationError(
                f"Trainer was given a {type(model).__name__}, and the adapters are on a model inside it.",
                why="Trainer would write all weights of the base into every checkpoint.",
                hint=f"attach the adapters to the {type(model).__name__}, or give Trainer the model that has them",
                code="trainer-adapters-inside",
            )
        yield model
        return
    if "_orig_mod" in model._modules:
        raise CompileError(
            "Trainer was given a torch.compile wrapper.",
            why="It reads arguments and class off the model and finds the wrapper's: batches lose fields, checkpoints their adapters.",
            hint="Trainer(model._orig_mod, args with torch_compile=True), or onegraph.compile(model), which wraps nothing",
            code="trainer-wrapped",
        )
    base = adapters.model
    given = base if hasattr(model, "get_base_model") and not _saves_itself(model) else model
    quantised = bool(getattr(base, "is_quantized", False)) and not getattr(base, _LOADED, False)
    if quantised:
        vars(base)[_LOADED] = True
    try:
        yield given
    finally:
        if quantised:
            vars(base).pop(_LOADED, None)


def _saves_itself(model: Any) -> bool:
    """Whether Trainer sees a model that it calls ``save_pretrained`` of."""
    from transformers import PreTrainedModel
    from transformers.trainer_utils import _is_peft_model

    return isinstance(model, PreTrainedModel) or bool(_is_peft_model(model))  # type: ignore[no-untyped-call]


def take_over(trainer: Any) -> bool:
    """Put ``AdapterTrainer`` in front of the class of a trainer whose model has adapters, and settle what can't wait.

    Returns:
        Whether it was put there now.

    Raises:
        ConfigurationError: ``trainer-sharded``, ``trainer-data-parallel``, ``trainer-chunked-head``.
        CheckpointError: Adapters that can't be saved.
    """
    adapters = adapters_of(trainer.model) if isinstance(trainer.model, nn.Module) else None
    if adapters is None or isinstance(trainer, AdapterTrainer):
        return False
    _refuse(trainer, adapters)
    for layer in adapters.layers.values():
        if any(_loose(layer, name, parameter) for name, parameter in layer._parameters.items()):
            layer._apply(lambda tensor: tensor, recurse=False)
    can_be_written(adapters)
    kind: Any = type(trainer)
    trainer.__class__ = _with_adapters(kind)
    compile_as_asked(adapters.model, trainer.model, trainer.accelerator.state.dynamo_plugin)
    return True


@functools.cache
def _with_adapters(kind: Any) -> type:
    return type(kind.__name__, (AdapterTrainer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _loose(layer: Adapted, name: str, parameter: nn.Parameter | None) -> bool:
    """Whether somebody gave a Parameter other memory than its slot's, as TRL does to put adapters of a quantised model into bfloat16."""
    storages = [*layer.structures.values(), *layer.shared.values()]
    memory = [found.untyped_storage().data_ptr() for slots in storages for found in slots.block.memory.values()]
    return parameter is not None and parameter.untyped_storage().data_ptr() not in memory


def _refuse(trainer: Any, adapters: Adapters) -> None:
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigurationError(
            "Trainer shards this model over processes, and its adapters can't be put together from Trainer's shards.",
            hint="accelerate launch without FSDP and DeepSpeed; adapters are small, and the base is frozen",
            code="trainer-sharded",
        )
    if trainer.args.n_gpu > 1:
        raise ConfigurationError(
            f"Trainer would copy this model to {trainer.args.n_gpu} devices in every step.",
            why="It does so with nn.DataParallel when it isn't launched as several processes; adapters are views of one block of memory.",
            hint="accelerate launch --num_processes N, or one device: CUDA_VISIBLE_DEVICES=0",
            code="trainer-data-parallel",
        )
    getter = getattr(adapters.model, "get_output_embeddings", None)
    head = getter() if callable(getter) and getattr(trainer.args, "loss_type", None) == "chunked_nll" else None
    if isinstance(head, Adapted):
        raise ConfigurationError(
            "loss_type='chunked_nll' passes an adapter on the output head by.",
            why="TRL then multiplies with the head's own weight: the adapter would neither act nor train.",
            hint="SFTConfig(loss_type='nll'), or an adapter without the head",
            code="trainer-chunked-head",
        )


class AdapterTrainer(_Trainer):
    """In front of the class of a trainer; ``take_over`` puts it there."""

    @property
    def _adapters(self) -> Adapters:
        found = None if self.model is None else adapters_of(self.model)
        assert found is not None, "the adapters were taken off while Trainer has the model"
        return found

    @property
    def _tuner(self) -> Any:
        """What holds the adapters of a model of ``onegraph.peft``."""
        return vars(self.model).get("_modules", {}).get("base_model")

    # Models

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The next model, compiled as the first one was."""
        model: nn.Module = super().call_model_init(trial)
        adapters = adapters_of(model)
        if adapters is not None:
            require_training(adapters, model)
            compile_as_asked(adapters.model, model, self.accelerator.state.dynamo_plugin)
        return model

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with compiled_only_once(self.accelerator.state.dynamo_plugin):
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, with the model as it is compiled for training."""
        with compiled_only_once(self.accelerator.state.dynamo_plugin):
            return super().evaluation_loop(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, where something trains; graph breaks are told."""
        model: nn.Module | None = self.model
        if vars(self).get("model_init") is None and model is not None:  # else the model that trains is yet to be made
            require_training(self._adapters, model)
        require_data(self.train_dataset)
        with Watch() as watch:
            result = super().train(*args, **kwargs)
        if watch.breaks:
            logger.warning("compiled with graph breaks: %s", "; ".join(watch.breaks))
        if watch.graphs:
            logger.info("compiled: %d graphs, %.1f s", watch.graphs, watch.compile_seconds)
        return result

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's own, where Parameters have other names than the modules that they are in."""
        names = set(super().get_decay_parameter_names(model))
        decayed = {id(parameter) for name, parameter in nn.Module.named_parameters(model) if name in names}
        return [name for name, parameter in model.named_parameters() if id(parameter) in decayed]

    # Folders

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if _saves_itself(self.model):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
            write_folders(self._adapters, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_exact(self._adapters, output_dir)
            state = getattr(self._tuner, "allocation_state", lambda: None)()
            if state is not None:
                torch.save(state, Path(output_dir) / _ALLOCATION)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        require_whole(Path(resume_from_checkpoint), self.args.process_index, self.args.world_size)
        read_folders(self._adapters, resume_from_checkpoint)
        place = Path(resume_from_checkpoint) / _ALLOCATION
        if place.is_file() and hasattr(self._tuner, "load_allocation_state"):
            self._tuner.load_allocation_state(torch.load(place, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        logger.info("the best adapters are those of %s (%s)", self.state.best_model_checkpoint, self.state.best_metric)
        read_folders(self._adapters, self.state.best_model_checkpoint)

    # Evaluation

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own; it generates uncompiled, as every length of the text so far would be a graph."""
        generates = getattr(self.args, "predict_with_generate", False) and "transformers.trainer_seq2seq" in sys.modules
        with eager() if generates else contextlib.nullcontext():
            return super().prediction_step(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """What TRL's trainers call for the answers that they weigh, uncompiled for the same reason."""
        with eager():
            return super()._generate(*args, **kwargs)  # type: ignore[misc]
