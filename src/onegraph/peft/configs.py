"""Configurations: a dataclass for each method, made from the table that reads and writes ``adapter_config.json``."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from onegraph.checkpoint import atomic_write
from onegraph.checkpoint.container import write_bytes
from onegraph.checkpoint.dialects import peft, peft_config
from onegraph.checkpoint.dialects.peft_methods import FORMS
from onegraph.checkpoint.dialects.peft_methods.fields import Config
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm
from onegraph.errors import CheckpointError, ConfigurationError
from onegraph.peft import repositories
from onegraph.peft.kinds import PeftType, TaskType
from onegraph.peft.mistakes import UsageError, as_value_errors

_SETS = ("target_modules", "exclude_modules", "feedforward_modules")
_VERSION = str(FORMS["LORA"].fields["peft_version"].default)


@dataclass
class PeftConfig:
    """What a model is adapted with. ``LoraConfig`` and the others have the fields and defaults that PEFT gives them.

    Args:
        task_type: What the model is for, a ``TaskType``.
        peft_type: The method.
        auto_mapping: The class of the base model, where no task says it.
        peft_version: The version of PEFT whose fields these are.
        base_model_name_or_path: What it was made for.
        revision: Of the base model.
        inference_mode: Whether the adapter starts frozen.

    Raises:
        UsageError: ``peft-config`` with all that contradicts itself.
    """

    task_type: str | TaskType | None = None
    peft_type: str | PeftType | None = None
    auto_mapping: dict[str, str] | None = None
    peft_version: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False

    _form: ClassVar[PeftForm | None] = None

    if TYPE_CHECKING:
        # The fields of a method are in its table.
        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __post_init__(self) -> None:
        problems = list(_contradictions(self))
        if problems:
            raise UsageError(f"{type(self).__name__}: {'; '.join(problems)}", hint="see the fields in docs/peft.md", code="peft-config")
        if self.task_type is not None:
            self.task_type = TaskType(self.task_type)
        if self._form is not None:
            self.peft_type = PeftType(self._form.peft_type)
        for name in _SETS:
            value = getattr(self, name, None)
            if isinstance(value, list | tuple):
                setattr(self, name, set(value))
        self.peft_version = self.peft_version or _VERSION
        self._further: dict[str, object] = {}
        if self._form is FORMS["ADALORA"] and self.r != self._form.fields["r"].default:
            warnings.warn("AdaLoRA has no use for r: the rank it starts from is init_r, the one it ends at target_r.", stacklevel=3)

    @property
    def is_prompt_learning(self) -> bool:
        """Never: there are no virtual tokens here."""
        return False

    @property
    def is_adaption_prompt(self) -> bool:
        """Never."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Every field."""
        return {item.name: copy.deepcopy(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def json_fields(self) -> dict[str, Any]:
        """Every field as JSON holds it, and those that were read and that nobody here knows."""
        values = {**self._further, **self.to_dict()}
        plain = {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in values.items()}
        return {name: value.value if isinstance(value, TaskType | PeftType) else value for name, value in plain.items()}

    def checked(self) -> Config:
        """The fields as the method's table reads them: every value is understood there, whether it comes from a program or a file.

        Raises:
            ConfigurationError: ``adapter-config`` with every wrong field; ``adapter-unsupported`` with all that can't be honoured.
        """
        form = self.form
        try:
            return peft_config.checked(self.json_fields(), form, Path(type(self).__name__))
        except CheckpointError as error:
            hint = error.hint if error.code == "adapter-unsupported" else "the fields and their defaults are PEFT's: see docs/peft.md"
            raise ConfigurationError(error.what, why=error.why, hint=hint, code=error.code) from error

    @property
    def form(self) -> PeftForm:
        """The table of the method.

        Raises:
            UsageError: ``peft-config`` for a configuration without a method.
        """
        if self._form is None:
            raise UsageError(
                "PeftConfig alone names no method",
                hint="LoraConfig, or another of: " + ", ".join(sorted(CONFIGS)),
                code="peft-config",
            )
        return self._form

    def save_pretrained(self, save_directory: str, *, auto_mapping_dict: dict[str, str] | None = None, **kwargs: Any) -> None:
        """Write ``adapter_config.json`` into a folder.

        Raises:
            OutputError: It can't be written.
        """
        values = self.json_fields()
        if auto_mapping_dict is not None:
            values["auto_mapping"] = auto_mapping_dict
        data = peft_config.dump_config(values)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / peft.CONFIG_NAME, lambda path: write_bytes(data, path), num_bytes=len(data))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any) -> PeftConfig:
        """The configuration in a folder, or in a repository of the Hub.

        Args:
            pretrained_model_name_or_path: Folder or repository.
            subfolder: In it.
            **kwargs: Of the download: revision, cache_dir, token, local_files_only and so on.

        Raises:
            CheckpointError: ``adapter-config``, ``adapter-unsupported``, ``peft-repository``.
        """
        with as_value_errors():
            path = repositories.config_path(pretrained_model_name_or_path, subfolder=subfolder, **repositories.download_options(kwargs))
            values = peft_config.read_config(path)
            form = peft_config.form_of(values, path)
            peft_config.refuse_misspelt(values, form, path)
            return _from_values(form.settle(values), form)

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        """The fields in a JSON file."""
        values: dict[str, Any] = json.loads(Path(path_json_file).read_text(encoding="utf-8"))
        values.pop(peft_config.RUNTIME, None)
        return values

    @classmethod
    def from_peft_type(cls, **kwargs: Any) -> PeftConfig:
        """A configuration of the method that ``peft_type`` names, else of this class."""
        return get_peft_config(kwargs) if "peft_type" in kwargs else cls(**kwargs)

    def copy(self) -> Self:
        """A configuration of its own with the same fields."""
        other = copy.copy(self)
        for name, value in {**self.to_dict(), "_further": dict(self._further)}.items():
            setattr(other, name, value)
        return other


def get_peft_config(config_dict: Mapping[str, Any]) -> PeftConfig:
    """The configuration of the method that ``peft_type`` names.

    Raises:
        UsageError: ``peft-config`` for a method that isn't there.
    """
    name = config_dict.get("peft_type")
    name = name.value if isinstance(name, PeftType) else name
    if name not in CONFIGS:
        raise UsageError(f"peft_type={name!r} is none of: {', '.join(sorted(CONFIGS))}", code="peft-config")
    return CONFIGS[name](**config_dict)


def _from_values(values: Mapping[str, Any], form: PeftForm) -> PeftConfig:
    known = {item.name for item in dataclasses.fields(CONFIGS[form.peft_type])}
    further = {name: value for name, value in values.items() if name not in known and name != peft_config.RUNTIME}
    # A file may leave out what was always the same when it was written.
    config = CONFIGS[form.peft_type](**{name: value for name, value in values.items() if name in known})
    if further:
        warnings.warn(
            f"Unexpected fields {sorted(further)} in a {form.peft_type} configuration: kept when it is saved, but not used.", stacklevel=4
        )
    config._further = further
    return config


def _contradictions(config: PeftConfig) -> Iterable[str]:
    """What PEFT refuses when a configuration is made."""
    if config.task_type is not None and config.task_type not in [task.value for task in TaskType]:
        yield f"task_type={config.task_type!r} is none of: {', '.join(task.value for task in TaskType)}"
    targets = getattr(config, "target_modules", None)
    if getattr(config, "layers_pattern", None) and config.layers_to_transform is None:
        yield "layers_pattern means nothing without layers_to_transform"
    if isinstance(targets, str) and getattr(config, "layers_to_transform", None) is not None:
        yield "layers_to_transform can't be used with target_modules as a regular expression"
    kind = config._form.peft_type if config._form is not None else ""
    inner = getattr(config, "feedforward_modules", None)
    if isinstance(targets, list | set) and isinstance(inner, list | set) and not set(inner) <= set(targets):
        yield "feedforward_modules has to be a subset of target_modules"
    for blocks, size, of in (("r", "oft_block_size", "OFT"), ("boft_block_num", "boft_block_size", "BOFT")):
        if kind == of and bool(getattr(config, blocks)) == bool(getattr(config, size)):
            yield f"exactly one of {blocks} and {size} has to be above 0"
    if kind == "ADALORA":
        if not config.total_step or config.total_step <= 0:
            yield "total_step, the number of training steps, has to be above 0"
        elif config.tinit >= config.total_step - config.tfinal:
            yield "tinit and tfinal leave none of total_step to allocate ranks in"


def _config_class(name: str, peft_type: str) -> type[PeftConfig]:
    form = FORMS[peft_type]
    common = {item.name for item in dataclasses.fields(PeftConfig)}
    own = [(own_name, Any, _default(value.default)) for own_name, value in form.fields.items() if own_name not in common]
    return dataclasses.make_dataclass(
        name,
        own,
        bases=(PeftConfig,),
        kw_only=True,
        namespace={"_form": form, "__doc__": f"{peft_type}: fields and defaults are those of PEFT {_VERSION}.", "__module__": __name__},
    )


def _default(value: object) -> Any:
    return field(default_factory=lambda: copy.copy(value)) if isinstance(value, dict | list) else field(default=value)


LoraConfig = _config_class("LoraConfig", "LORA")
AdaLoraConfig = _config_class("AdaLoraConfig", "ADALORA")
IA3Config = _config_class("IA3Config", "IA3")
LNTuningConfig = _config_class("LNTuningConfig", "LN_TUNING")
LoHaConfig = _config_class("LoHaConfig", "LOHA")
LoKrConfig = _config_class("LoKrConfig", "LOKR")
VeraConfig = _config_class("VeraConfig", "VERA")
VBLoRAConfig = _config_class("VBLoRAConfig", "VBLORA")
OFTConfig = _config_class("OFTConfig", "OFT")
BOFTConfig = _config_class("BOFTConfig", "BOFT")
HRAConfig = _config_class("HRAConfig", "HRA")
MissConfig = _config_class("MissConfig", "MISS")

CONFIGS: dict[str, type[PeftConfig]] = {
    "LORA": LoraConfig,
    "ADALORA": AdaLoraConfig,
    "IA3": IA3Config,
    "LN_TUNING": LNTuningConfig,
    "LOHA": LoHaConfig,
    "LOKR": LoKrConfig,
    "VERA": VeraConfig,
    "VBLORA": VBLoRAConfig,
    "OFT": OFTConfig,
    "BOFT": BOFTConfig,
    "HRA": HRAConfig,
    "MISS": MissConfig,
}
"""``peft_type`` -> the class of its configuration."""


def require_config(config: object) -> None:
    """It is a configuration: no name, no dictionary, no class.

    Raises:
        UsageError: ``peft-config``.
    """
    if not isinstance(config, PeftConfig):
        raise UsageError(
            f"a {type(config).__name__} was given for a configuration",
            hint="LoraConfig(...), or get_peft_config(fields) where they are in a dictionary with peft_type",
            code="peft-config",
        )
