"""``PeftModel``: a model with adapters, under the names and calls that PEFT's users know."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from onegraph.adapters import Adapters
from onegraph.adapters.surgery import RECORD
from onegraph.compiling.outside import between_graphs
from onegraph.peft import repositories
from onegraph.peft.card import write_card
from onegraph.peft.configs import PeftConfig, require_config
from onegraph.peft.exchange import LoadResult, put, refuse_key_mapping, save_adapters
from onegraph.peft.identity import TakenForTheirs
from onegraph.peft.injection import missing_layers
from onegraph.peft.kinds import PeftType
from onegraph.peft.mistakes import UsageError, as_value_errors
from onegraph.peft.rows import RowsOf, check_batch, row_names
from onegraph.peft.status import LayerStatus, ModelStatus, get_layer_status, get_model_status, numel
from onegraph.peft.tuner import BaseTuner
from onegraph.peft.tuners import TUNERS

_NAMES = "adapter_names"


class PeftModel(TakenForTheirs):
    """A model with adapters: ``base_model.model`` is the model, changed in place.

    ``adapters`` is our own face of the same; everything else that isn't here is the tuner's (``merge_and_unload``), or the model's.

    Args:
        model: Any model; compiled or not.
        peft_config: What its first adapter is.
        adapter_name: What that is called.
        autocast_adapter_dtype: Whether the adapters of a model in half precision are in float32.
        low_cpu_mem_usage: Without effect.
        loaded: Whether the adapter is on the model already.

    Raises:
        ConfigurationError, TargetError, AdapterError: As ``onegraph.attach``; all are ValueErrors too.
    """

    def __init__(
        self,
        model: nn.Module,
        peft_config: PeftConfig,
        adapter_name: str = "default",
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        *,
        loaded: bool = False,
    ) -> None:
        super().__init__()
        self.settle_config(peft_config)
        kind = TUNERS[peft_config.form.peft_type]
        self.base_model: BaseTuner = kind(model, peft_config, adapter_name, autocast_adapter_dtype=autocast_adapter_dtype, loaded=loaded)
        self.peft_type = PeftType(peft_config.form.peft_type)
        self.__dict__[RECORD] = self.base_model.adapters
        # transformers has renamed it; a model that has neither is prepared, as it may be checkpointed by other means.
        if getattr(model, "is_activation_checkpointing", None) is not False:
            self.prepare_model_for_gradient_checkpointing(model)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "pretraining_tp"):
            config.pretraining_tp = 1

    def settle_config(self, config: PeftConfig) -> None:
        """What a task adds to a configuration: nothing here."""

    @property
    def adapters(self) -> Adapters:
        """Our own face of the adapters."""
        return self.base_model.adapters

    @property
    def peft_config(self) -> dict[str, PeftConfig]:
        """Adapter -> its configuration."""
        return self.base_model.peft_config

    @property
    def active_adapter(self) -> str | list[str]:
        """The adapter that is active; [] when there is none."""
        return self.base_model.active_adapter

    @property
    def active_adapters(self) -> list[str]:
        """The same in a list."""
        return self.base_model.active_adapters

    @property
    def active_peft_config(self) -> PeftConfig:
        """The configuration of the active adapter.

        Raises:
            UsageError: ``peft-no-adapters`` where none is left.
        """
        if not self.active_adapters:
            raise UsageError("no adapter is active", hint="add_adapter() or load_adapter(), then set_adapter()", code="peft-no-adapters")
        return self.peft_config[str(self.active_adapter)]

    @property
    def has_active_enabled_adapter(self) -> bool:
        """Whether an adapter runs."""
        return bool(self.active_adapters) and not self.base_model._disabled

    @property
    def modules_to_save(self) -> set[str] | None:
        """The modules that are trained whole, of all adapters."""
        return {name for config in self.peft_config.values() for name in config.modules_to_save or ()} or None

    def get_base_model(self) -> nn.Module:
        """The model that was adapted, with the adapters in it."""
        return self.base_model.model

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes.

        Rows are given their adapters before anything that is compiled runs: a graph has no part in it.

        Args:
            *args: The model's.
            **kwargs: The model's, and ``adapter_names``: the adapter of each row, "__base__" for the base model.
        """
        names = kwargs.pop(_NAMES, None)
        if names is None:
            return super().__call__(*args, **kwargs)
        return _run_rows(self, names, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes: see ``__call__``."""
        if _NAMES in kwargs:
            return self(*args, **kwargs)
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model generates; ``adapter_names`` gives every row of the input its own adapter, repeated with it by beams."""
        base: Any = self.get_base_model()
        if "generation_config" in vars(self):
            base.generation_config = self.generation_config
        names = kwargs.pop(_NAMES, None)
        if names is None or self.base_model._disabled:
            return base.generate(*args, **kwargs)
        rows = row_names(names)
        check_batch(rows, args, kwargs)
        with RowsOf(self.adapters, rows):
            return base.generate(*args, **kwargs)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inside, the base model runs alone. Adapters that are merged are unmerged before."""
        before = self.base_model._disabled
        self.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            if not before:
                self.base_model.enable_adapter_layers()

    # Adapters

    def add_adapter(
        self, adapter_name: str, peft_config: PeftConfig, low_cpu_mem_usage: bool = False, autocast_adapter_dtype: bool = True
    ) -> None:
        """Add an adapter; ``set_adapter`` makes it the active one. It may have another method than those that are there."""
        require_config(peft_config)
        self.settle_config(peft_config)
        self.base_model.add(adapter_name, peft_config, autocast=autocast_adapter_dtype)

    def load_adapter(
        self,
        model_id: str | os.PathLike[str],
        adapter_name: str,
        is_trainable: bool = False,
        torch_device: str | None = None,
        autocast_adapter_dtype: bool = True,
        ephemeral_gpu_offload: bool = False,
        low_cpu_mem_usage: bool = False,
        key_mapping: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> LoadResult:
        """Add the adapter in a folder, or in a repository of the Hub; under a name that is there, it takes its place.

        Args:
            model_id: Folder or repository.
            adapter_name: What it is called.
            is_trainable: Whether it is to train; otherwise the model goes to ``eval()``.
            torch_device: Without effect, as is what follows it: adapters are where their layers are.
            autocast_adapter_dtype: See there.
            ephemeral_gpu_offload: See there.
            low_cpu_mem_usage: See there.
            key_mapping: Refused.
            **kwargs: Of the download: subfolder, revision, token and so on.

        Returns:
            The layers that the configuration names and the file has nothing for, which run as the base model.

        Raises:
            CheckpointError: It can't be read or doesn't fit; the model is as before.
        """
        refuse_key_mapping(key_mapping)
        with as_value_errors():
            folder = repositories.adapter_folder(model_id, subfolder=kwargs.get("subfolder"), **repositories.download_options(kwargs))
            config = PeftConfig.from_pretrained(str(folder))
            config.inference_mode = not is_trainable
            put(self.get_base_model(), folder, adapter_name)
        if not self.base_model._disabled and isinstance(self.active_adapter, str):
            self.adapters.use(self.active_adapter)
        self.base_model.register(adapter_name, config)
        if is_trainable:
            self.base_model.set_requires_grad(adapter_name)
        else:
            self.eval()
        return LoadResult(missing_layers(self.get_base_model(), config, self.adapters.methods(adapter_name)), [])

    def set_adapter(self, adapter_name: str, inference_mode: bool = False) -> None:
        """Make an adapter the active one, and let it train unless ``inference_mode``."""
        self.base_model.set_adapter(adapter_name, inference_mode=inference_mode)

    # Files

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: bool | str = "auto",
        is_main_process: bool = True,
        path_initial_model_for_weight_conversion: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write folders as PEFT does: weights, configuration, a model card.

        Args:
            save_directory: "default" goes there, the others into folders of their names in it.
            safe_serialization: safetensors; False pickles.
            selected_adapters: Which; None: all.
            save_embedding_layers: See ``get_peft_model_state_dict``.
            is_main_process: False writes nothing.
            path_initial_model_for_weight_conversion: Refused: no start here changes the base weights.
            **kwargs: ``state_dict``: the model's state, where it can't be read from the model.

        Raises:
            UsageError: ``peft-save``. OutputError: It can't be written.
        """
        names = list(self.peft_config) if selected_adapters is None else list(selected_adapters)
        unknown = [name for name in names if name not in self.peft_config]
        if not names or unknown or path_initial_model_for_weight_conversion is not None or Path(save_directory).is_file():
            raise UsageError(
                f"save_pretrained({str(save_directory)!r}, selected_adapters={selected_adapters}) can't be done",
                why=f"Adapters that are there: {', '.join(map(repr, self.peft_config)) or 'none'}. The place has to be a folder;"
                " nothing is converted.",
                code="peft-save",
            )
        if not is_main_process:
            return
        save_adapters(
            self,
            save_directory,
            names,
            safe=safe_serialization,
            embeddings=save_embedding_layers,
            state=kwargs.get("state_dict"),
        )
        self.create_or_update_model_card(str(save_directory))

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        model_id: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = False,
        config: PeftConfig | None = None,
        autocast_adapter_dtype: bool = True,
        ephemeral_gpu_offload: bool = False,
        low_cpu_mem_usage: bool = False,
        key_mapping: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> PeftModel:
        """A model with the adapter in a folder, or in a repository of the Hub: see ``load_adapter``.

        Args:
            model: The base model, changed in place; compiled or not.
            model_id: Folder or repository.
            adapter_name: What the adapter is called.
            is_trainable: Whether it is to train; otherwise it is frozen, and the model goes to ``eval()``.
            config: Its configuration, where it was read before.
            autocast_adapter_dtype: Without effect, as is what follows it.
            ephemeral_gpu_offload: See there.
            low_cpu_mem_usage: See there.
            key_mapping: Refused.
            **kwargs: Of the download.

        Returns:
            Of the class that the configuration's task has.

        Raises:
            CheckpointError: It can't be read or doesn't fit; the model is as before.
        """
        from onegraph.peft.tasks import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

        refuse_key_mapping(key_mapping)
        if isinstance(model, PeftModel):
            warnings.warn("This model has adapters already: load_adapter() adds another one, unload() takes them off.", stacklevel=2)
            model = model.get_base_model()
        with as_value_errors():
            folder = repositories.adapter_folder(model_id, subfolder=kwargs.get("subfolder"), **repositories.download_options(kwargs))
            own = PeftConfig.from_pretrained(str(folder)) if config is None else config
            own.inference_mode = not is_trainable
            put(model, folder, adapter_name)
        kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(own.json_fields()["task_type"]), cls)
        found = kind(model, own, adapter_name, loaded=True)
        if missing := missing_layers(model, own, found.adapters.methods(adapter_name)):
            warnings.warn(f"Found missing adapter keys while loading the checkpoint: {missing}.", stacklevel=2)
        if not is_trainable:
            found.eval()
        return found

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write README.md, or complete the one that is there."""
        write_card(self.get_base_model(), self.active_peft_config if self.active_adapters else None, Path(output_dir))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None, **kwargs: Any) -> Any:
        """Save into a repository of the Hub, which is created when it isn't there."""
        from huggingface_hub import HfApi  # nothing else here needs the Hub

        message = str(kwargs.pop("commit_message", "Upload model"))
        client = HfApi(token=token)
        url = client.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **kwargs)
            return client.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message)

    # What is there

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(numbers that train, all numbers), at the true rank of every adapter."""
        adapters, names = self.adapters, self.base_model.names()
        tensors = {name: adapters.tensors(name) for name in names.entries}
        true = {id(entry.parameter): tensors[name][entry.path][entry.key].numel() for name, own in names.entries.items() for entry in own}
        counted = [(true.get(id(parameter), numel(parameter)), parameter.requires_grad) for _, parameter in self.named_parameters()]
        return sum(number for number, trained in counted if trained), sum(number for number, _ in counted)

    def print_trainable_parameters(self) -> None:
        """Print how many numbers train."""
        trained, every = self.get_nb_trainable_parameters()
        print(f"trainable params: {trained:,d} || all params: {every:,d} || trainable%: {100 * trained / every:.4f}")

    def get_layer_status(self) -> list[LayerStatus]:
        """The state of every adapted layer."""
        return get_layer_status(self)

    def get_model_status(self) -> ModelStatus:
        """The state of the whole model."""
        return get_model_status(self)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Every Parameter under PEFT's name for it: see ``BaseTuner.named_parameters``."""
        return self.base_model.named_parameters(f"{prefix}.base_model" if prefix else "base_model", recurse, remove_duplicate)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A Parameter by a name that ``named_parameters`` has, or by ours."""
        found = dict(self.named_parameters(remove_duplicate=False)).get(target)
        return super().get_parameter(target) if found is None else found

    def prepare_model_for_gradient_checkpointing(self, model: nn.Module) -> None:
        """Let the inputs of the first block require a gradient: without one, a checkpointed block would have none to hand back."""
        quantized = any(getattr(model, name, False) for name in ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized"))
        enable = getattr(model, "enable_input_require_grads", None)
        if not quantized and callable(enable):
            enable()

    def __getattr__(self, name: str) -> Any:
        """What isn't here is the tuner's, or the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model" or name.startswith("__"):
                raise
            return getattr(self.base_model, name)


@between_graphs
def _run_rows(model: PeftModel, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if model.base_model._disabled:
        return nn.Module.__call__(model, *args, **kwargs)
    rows = row_names(names)
    check_batch(rows, args, kwargs)
    with RowsOf(model.adapters, rows):
        return nn.Module.__call__(model, *args, **kwargs)
