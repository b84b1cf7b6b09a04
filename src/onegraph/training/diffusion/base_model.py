"""Loading the base model: one original file or a diffusers folder, offline, strictly, with what is wrong named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from onegraph.errors import ModelFileError, nearest
from onegraph.training.diffusion import families
from onegraph.training.diffusion.families import WANTED, Components, Family, PredictionType
from onegraph.training.diffusion.hub import download, is_hub_name
from onegraph.training.diffusion.model_files import Weights, as_parameter, component_weights, file_sha256, legacy_hash, open_weights
from onegraph.training.diffusion.original_keys import OPENCLIP_PREFIX, PREFIXES, Converted, Part, from_folder, text_prefix, to_diffusers

CONFIG_KEY = "onegraph.config"
PARTS: tuple[Part, ...] = ("unet", "vae", "text_encoder")
TITLES: dict[Part, str] = {"unet": "UNet", "vae": "VAE", "text_encoder": "text encoder"}
ROOTS: dict[Part, str] = {"unet": PREFIXES["unet"], "vae": PREFIXES["vae"], "text_encoder": "cond_stage_model."}
FOLDER_STEMS: dict[Part, str] = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
# Lie beside a VAE's weights in the files its own training wrote.
BESIDE_VAE = ("loss.", "model_ema.", "logvar", "discriminator.")
SHOWN = 3
ASSUMED_EPSILON = "2.x files don't say what they predict; epsilon is assumed. A 768-v model needs --v_parameterization."


@dataclass(frozen=True)
class BaseModel:
    """A Stable Diffusion base, frozen and in evaluation mode.

    ``family.name`` is the ``ss_base_model_version``; ``scaling_factor`` multiplies the VAE's latents; ``path`` is the file or folder it
    came from; ``notes`` are sentences for the user, such as what was skipped in a pickle.
    """

    unet: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    family: Family
    prediction_type: PredictionType
    scheduler_config: dict[str, Any]
    scaling_factor: float
    name: str
    path: Path
    notes: tuple[str, ...] = ()
    configuration: Components = field(default_factory=dict)

    def model_hash(self) -> str | None:
        """The ``ss_sd_model_hash`` of a single file: 8 hex digits; None for a folder."""
        return self._hashes[0]

    def new_model_hash(self) -> str | None:
        """The ``ss_new_sd_model_hash`` of a single file: sha256 of all of it; None for a folder."""
        return self._hashes[1]

    @cached_property
    def _hashes(self) -> tuple[str | None, str | None]:
        return (legacy_hash(self.path), file_sha256(self.path)) if self.path.is_file() else (None, None)


def load_base_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    vae: str | Path | None = None,
    v2: bool | None = None,
    v_parameterization: bool | None = None,
    model_config: str | Path | None = None,
) -> BaseModel:
    """A base model from a ``.safetensors`` or ``.ckpt`` file with original keys, a diffusers folder, or a hub name.

    Args:
        name_or_path: File, folder, or ``owner/model``; only the last may use the network, and asks it once.
        dtype: Of all weights; None means float32.
        vae: Another VAE: a file, or a diffusers folder.
        v2: True: it must be Stable Diffusion 2.x. None or False: whatever it is.
        v_parameterization: Whether the UNet predicts v; None: as the files say.
        model_config: A JSON file with ``unet``, ``vae``, ``text_encoder``, ``scheduler``, or a diffusers folder, for a file of unusual
            sizes. Without it: the file's own metadata, a JSON beside it with the same stem, the shipped configurations.

    Raises:
        ModelFileError: Codes ``not-found``, ``not-a-model``, ``not-supported``, ``model-incomplete``, ``model-shapes``, ``model-config``,
            ``model-family``, those of ``open_weights`` and those of ``hub.download``.
    """
    path = _locate(str(name_or_path))
    dtype = torch.float32 if dtype is None else dtype
    load = _load_folder if path.is_dir() else _load_file
    modules, configuration, notes = load(path, dtype, None if vae is None else Path(vae), model_config)
    is_v2 = families.is_v2_configuration(configuration)
    if v2 and not is_v2:
        raise ModelFileError(
            f"{name_or_path} is Stable Diffusion 1.x, not 2.x",
            why="--v2 says it must be 2.x, and its text encoder is CLIP's with 1.x's layout.",
            hint="Leave --v2 out: the family is found from the file.",
            code="model-family",
        )
    scheduler = dict(configuration["scheduler"])
    prediction = cast(PredictionType, scheduler.get("prediction_type", "epsilon"))
    if v_parameterization is not None:
        prediction = "v_prediction" if v_parameterization else "epsilon"
        notes = [note for note in notes if note != ASSUMED_EPSILON]
    scheduler["prediction_type"] = prediction
    family = families.family_of(is_v2=is_v2, prediction_type=prediction)
    for module in modules.values():
        module.requires_grad_(False).eval()
    autoencoder = cast(AutoencoderKL, modules["vae"])
    return BaseModel(
        unet=cast(UNet2DConditionModel, modules["unet"]),
        vae=autoencoder,
        text_encoder=cast(CLIPTextModel, modules["text_encoder"]),
        tokenizer=_tokenizer(path, family),
        family=family,
        prediction_type=prediction,
        scheduler_config=scheduler,
        scaling_factor=float(cast(Any, autoencoder).config.scaling_factor),
        name=path.name if path.exists() and not is_hub_name(str(name_or_path)) else str(name_or_path),
        path=path,
        notes=tuple(notes),
        configuration=configuration,
    )


Loaded = tuple[dict[Part, nn.Module], Components, list[str]]


def _locate(name: str) -> Path:
    """The file or folder meant by ``name``."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if is_hub_name(name) and not path.parent.exists():
        return download(name)
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    if is_hub_name(name) and not near:
        return download(name)
    raise ModelFileError(
        f"{path} does not exist",
        why="" if beside else f"The folder {path.parent} does not exist or is empty.",
        hint=f"Did you mean {', '.join(str(path.parent / entry) for entry in near)}?" if near else f"Check the path. {WANTED}",
        code="not-found",
    )


def _load_file(path: Path, dtype: torch.dtype, vae: Path | None, model_config: str | Path | None) -> Loaded:
    weights = open_weights(path)
    kind = families.kind_of(weights, weights.shapes)
    if kind is not None:
        supported_later = kind.hint == families.LATER or "takes" in kind.what
        code = "not-supported" if supported_later else "not-a-model"
        raise ModelFileError(f"{path} is {kind.what}", hint=kind.hint, code=code, why="Its tensors' names and shapes say so.")
    wanted = [part for part in PARTS if part != "vae" or vae is None]
    missing = [part for part in wanted if not any(key.startswith(ROOTS[part]) for key in weights)]
    if missing:
        raise _incomplete(path, [f"{TITLES[part]} ({ROOTS[part]}*)" for part in missing], "vae" in missing)
    configuration, source, notes = _configuration(path, weights, model_config)
    modules: dict[Part, nn.Module] = {}
    for part in PARTS:
        if part == "vae" and vae is not None:
            modules[part], configuration["vae"] = _load_vae(vae, configuration["vae"], dtype)
        else:
            modules[part] = _filled(part, configuration[part], to_diffusers(part, configuration[part], weights), dtype, path, source)
    if weights.skipped:
        notes.append(
            f"{path.name}: skipped {len(weights.skipped)} objects beside the weights, none run: {', '.join(weights.skipped[:SHOWN])}."
        )
    return modules, configuration, notes


def _load_folder(path: Path, dtype: torch.dtype, vae: Path | None, model_config: str | Path | None) -> Loaded:
    if (path / "text_encoder_2").is_dir() or (path / "transformer").is_dir():
        what = "a Stable Diffusion XL model" if (path / "unet").is_dir() else "a diffusion transformer (Stable Diffusion 3, Flux)"
        raise ModelFileError(f"{path} is {what}", hint=families.LATER, code="not-supported")
    configuration = _folder_configuration(path if model_config is None else Path(model_config), need_vae=vae is None)
    channels = configuration["unet"].get("in_channels", 4)
    if channels != 4:
        raise ModelFileError(
            f"{path}: its UNet takes {channels} channels, not 4",
            why="It is an inpainting, editing, depth or upscaling model, and training it needs other inputs.",
            hint=WANTED,
            code="not-supported",
        )
    modules: dict[Part, nn.Module] = {}
    for part in PARTS:
        if part == "vae" and vae is not None:
            modules[part], configuration["vae"] = _load_vae(vae, configuration.get("vae", families.SD_V1.configuration()["vae"]), dtype)
        else:
            modules[part] = _filled(part, configuration[part], _component(path, part), dtype, path / part, "config.json beside it")
    return modules, configuration, []


def _load_vae(path: Path, configuration: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Another VAE, from a file with or without the original prefix, or from a diffusers folder."""
    if not path.exists():
        raise ModelFileError(f"the VAE {path} does not exist", hint="Check --vae: a file or a diffusers folder.", code="not-found")
    if path.is_dir():
        path = path / "vae" if (path / "vae").is_dir() else path
        configuration = _json(path / "config.json")
        return _filled(
            "vae", configuration, _component(path.parent, "vae", folder=path), dtype, path, "config.json beside it"
        ), configuration
    weights = open_weights(path)
    for text, _ in _own_configurations(path, weights):
        configuration = text.get("vae", text)
    original = any(key.removeprefix(PREFIXES["vae"]).startswith("decoder.mid.") for key in weights)
    converted = to_diffusers("vae", configuration, weights) if original else from_folder("vae", weights)
    return _filled("vae", configuration, converted, dtype, path, "the base model's VAE configuration"), configuration


def _component(path: Path, part: Part, *, folder: Path | None = None) -> Converted:
    """The tensors of one model of a diffusers folder."""
    folder = path / part if folder is None else folder
    tensors: dict[str, Tensor] = {}
    for file in component_weights(folder, FOLDER_STEMS[part]):
        tensors.update(open_weights(file))
    if not tensors:
        raise _incomplete(path, [f"{TITLES[part]} ({folder}/{FOLDER_STEMS[part]}.safetensors)"], part == "vae")
    return from_folder(part, tensors)


def _configuration(path: Path, weights: Weights, model_config: str | Path | None) -> tuple[Components, str, list[str]]:
    """A single file's configuration, where it came from, and what to tell the user about it."""
    if model_config is not None:
        given = Path(model_config)
        return (_folder_configuration(given) if given.is_dir() else _checked(_json(given), given)), str(given), []
    for found, source in _own_configurations(path, weights):
        return _checked(found, source), str(source), []
    family = families.SD_V2 if text_prefix(weights) == OPENCLIP_PREFIX else families.SD_V1
    written = weights.metadata.get("modelspec.prediction_type", "")
    notes = []
    if family.is_v2 and written.startswith("v"):
        family = families.SD_V2_V
    elif family.is_v2 and not written:
        notes.append(ASSUMED_EPSILON)
    return family.configuration(), f"the shipped configuration of {family.title}", notes


def _own_configurations(path: Path, weights: Weights) -> list[tuple[dict[str, Any], Path | str]]:
    """The configurations that come with a file: in its metadata, then beside it; other programs' JSON files are passed over."""
    found: list[tuple[dict[str, Any], Path | str]] = []
    if CONFIG_KEY in weights.metadata:
        source = f"the metadata of {path}"
        try:
            found.append((json.loads(weights.metadata[CONFIG_KEY]), source))
        except ValueError as error:
            raise ModelFileError(
                f"{source} is no JSON under {CONFIG_KEY}: {error}", hint="Pass a configuration.", code="model-config"
            ) from error
    beside = path.with_suffix(".json")
    if not found and beside.is_file():
        content = _json(beside)
        if any(part in content for part in PARTS) or content.get("_class_name") == "AutoencoderKL":
            found.append((content, beside))
    return found


def _checked(configuration: Any, source: Path | str) -> Components:
    """A configuration with everything in it, or an error that lists what it lacks."""
    lacking = [name for name in families.CONFIGURED if not isinstance(configuration, dict) or not isinstance(configuration.get(name), dict)]
    if lacking:
        raise ModelFileError(
            f"the configuration in {source} lacks {', '.join(lacking)}",
            why="A single file needs the configurations of all four, as diffusers writes them to config.json and scheduler_config.json.",
            hint=f"Start from a shipped one: onegraph/training/diffusion/configs/{families.SD_V1.name}.json",
            code="model-config",
        )
    return cast(Components, configuration)


def _folder_configuration(path: Path, *, need_vae: bool = True) -> Components:
    """The configurations of a diffusers folder."""
    parts = [part for part in PARTS if (path / part / "config.json").is_file()]
    lacking = [part for part in PARTS if part not in parts and (part != "vae" or need_vae)]
    if lacking:
        files = sorted(entry.name for entry in path.glob("*") if entry.suffix in (".safetensors", ".ckpt"))
        if files and not parts:
            raise ModelFileError(
                f"{path} is a folder with model files in it, not a diffusers model",
                hint=f"Pass one of the files: {', '.join(str(path / file) for file in files[:SHOWN])}",
                code="not-a-model",
            )
        raise _incomplete(path, [f"{part}/config.json" for part in lacking], lacking == ["vae"])
    configuration: Components = {part: _json(path / part / "config.json") for part in parts}
    scheduler = path / "scheduler" / "scheduler_config.json"
    configuration["scheduler"] = _json(scheduler) if scheduler.is_file() else families.SD_V1.configuration()["scheduler"]
    return configuration


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} does not exist", hint="Check the path of the configuration.", code="not-found") from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} is no JSON configuration: {error}", hint="Pass a JSON file.", code="model-config") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds a {type(content).__name__}, not a JSON object", hint="Pass a JSON file.", code="model-config")
    return content


def _incomplete(path: Path, missing: Sequence[str], vae: bool) -> ModelFileError:
    return ModelFileError(
        f"{path} lacks the {', the '.join(missing)}",
        why="Training needs a UNet, a VAE and a text encoder.",
        hint=f"Pass the missing VAE with --vae. {WANTED}" if vae else WANTED,
        code="model-incomplete",
    )


def _tokenizer(path: Path, family: Family) -> CLIPTokenizer:
    """The folder's own tokenizer, else the one in the package."""
    folder = path / "tokenizer"
    if path.is_dir() and folder.is_dir():
        return cast(CLIPTokenizer, CLIPTokenizer.from_pretrained(str(folder), local_files_only=True))
    return family.tokenizer()


def _built(part: Part, configuration: Mapping[str, Any]) -> nn.Module:
    """The module without storage for its parameters."""
    with init_empty_weights(include_buffers=False):
        if part == "text_encoder":
            return CLIPTextModel(CLIPTextConfig.from_dict(dict(configuration)))
        kind: Any = UNet2DConditionModel if part == "unet" else AutoencoderKL
        return cast(nn.Module, kind.from_config(dict(configuration)))


def _filled(part: Part, configuration: Mapping[str, Any], converted: Converted, dtype: torch.dtype, path: Path, source: str) -> nn.Module:
    """The module with every tensor from the file, or an error that names the first that don't fit."""
    try:
        module = _built(part, configuration)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ModelFileError(
            f"{path}: no {TITLES[part]} can be built from {source}: {error}", hint="Check the configuration.", code="model-config"
        ) from error
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    leftover = [key for key in converted.leftover if part != "vae" or not key.startswith(BESIDE_VAE)]
    shapes = [
        f"{converted.origin[name]} is {tuple(tensor.shape)}, the model wants {expected[name]}"
        for name, tensor in converted.tensors.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    floating = {name for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    shapes += [
        f"{converted.origin[name]} holds {str(tensor.dtype).removeprefix('torch.')}, the model wants numbers with a fraction"
        for name, tensor in converted.tensors.items()
        if name in floating and not tensor.is_floating_point()
    ]
    unplaced = [f"{key} has no place in the model" for key in (*_unexpected(converted, expected), *leftover)]
    missing = [f"{name} is missing" for name in expected if name not in converted.tensors]
    problems = [*shapes, *unplaced, *missing]
    if problems:
        shown = [*shapes[:SHOWN], *unplaced[:SHOWN], *missing[:SHOWN]]
        more = f"\n  and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
        raise ModelFileError(
            f"{path}: the {TITLES[part]} does not fit {source}:\n  " + "\n  ".join(shown) + more,
            why="The file's tensors and the configuration describe different models.",
            hint="For a model of unusual sizes put its configuration beside it (same name, .json: unet, vae, text_encoder, scheduler), "
            "or pass its diffusers folder.",
            code="model-shapes",
        )
    module.load_state_dict({name: as_parameter(tensor, dtype) for name, tensor in converted.tensors.items()}, strict=True, assign=True)
    return module


def _unexpected(converted: Converted, expected: Mapping[str, object]) -> list[str]:
    """The file's keys whose names the model doesn't have."""
    return [converted.origin[name] for name in converted.tensors if name not in expected]
