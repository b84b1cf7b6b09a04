"""Stable Diffusion 1.x and 2.x: names, shipped configurations, the tokenizer, and how a file of another kind is told apart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast

from transformers import CLIPTokenizer

from onegraph.training.diffusion.original_keys import BARE_CLIP_PREFIX, OPENCLIP_PREFIX, PREFIXES

PredictionType = Literal["epsilon", "v_prediction"]
Components = dict[str, dict[str, Any]]

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
CONFIGURED = ("unet", "vae", "text_encoder", "scheduler")


@dataclass(frozen=True)
class Family:
    """One line of models: what its files call it and how its prompts are padded.

    ``name`` is the ``ss_base_model_version`` of network files, ``pad`` the token behind the end of a prompt.
    """

    name: str
    title: str
    prediction_type: PredictionType
    pad: str
    resolution: int

    @property
    def is_v2(self) -> bool:
        """Whether this is Stable Diffusion 2.x."""
        return self.name.startswith("sd_v2")

    def configuration(self) -> Components:
        """The shipped configurations: ``unet``, ``vae``, ``text_encoder``, ``scheduler``; a fresh copy."""
        text = files(__package__).joinpath("configs", f"{self.name}.json").read_text("utf-8")
        configuration: Components = json.loads(text)
        return configuration

    def tokenizer(self) -> CLIPTokenizer:
        """CLIP's tokenizer out of the package, padding as this family does."""
        return clip_tokenizer(self.pad)


SD_V1 = Family("sd_v1", "Stable Diffusion 1.x", "epsilon", END, 512)
SD_V2 = Family("sd_v2", "Stable Diffusion 2.x base", "epsilon", "!", 512)
SD_V2_V = Family("sd_v2_v", "Stable Diffusion 2.x 768-v", "v_prediction", "!", 768)
FAMILIES: dict[str, Family] = {family.name: family for family in (SD_V1, SD_V2, SD_V2_V)}


def family_of(*, is_v2: bool, prediction_type: PredictionType) -> Family:
    """The family by its text encoder and by what its UNet predicts; a v-predicting 1.x model is still ``sd_v1``."""
    if not is_v2:
        return SD_V1
    return SD_V2_V if prediction_type == "v_prediction" else SD_V2


def is_v2_configuration(components: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether diffusers configurations describe Stable Diffusion 2.x: OpenCLIP's activation, or linear projections in the UNet."""
    text, unet = components["text_encoder"], components["unet"]
    return text.get("hidden_act", "quick_gelu") == "gelu" or bool(unet.get("use_linear_projection", False))


def clip_tokenizer(pad: str = END) -> CLIPTokenizer:
    """CLIP's byte-pair tokenizer, 49,408 entries, built from the merges that ship with the package."""
    vocabulary, merges = _clip_vocabulary()
    # transformers annotates the merges as strings and hands them on to `tokenizers`, which takes pairs.
    return CLIPTokenizer(vocab=dict(vocabulary), merges=cast(Any, list(merges)), pad_token=pad, model_max_length=77)


@cache
def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: 256 bytes, the same at the end of a word, one entry a merge, the two special tokens."""
    packed = files(__package__).joinpath("configs", "clip_tokenizer", "merges.txt.gz").read_bytes()
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in gzip.decompress(packed).decode("utf-8").splitlines())]
    # Bytes that print stand for themselves and come first; the others take letters from U+0100 on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printing]
    letters = [chr(byte) for byte in printing] + [chr(256 + number) for number in range(len(hidden))]
    entries = [*letters, *(f"{letter}</w>" for letter in letters), *(left + right for left, right in merges), BEGIN, END]
    return {entry: number for number, entry in enumerate(entries)}, merges


@dataclass(frozen=True)
class Kind:
    """What the keys of a file say it is: a noun phrase, and what to do with it here."""

    what: str
    hint: str


WANTED = "Pass a Stable Diffusion 1.x or 2.x model: one .safetensors or .ckpt file, or a diffusers folder."
LATER = f"onegraph.train_network trains Stable Diffusion 1.x and 2.x; this family is not supported yet. {WANTED}"

# First match wins: (marks anywhere in a key, what such a file is, what to do).
MARKS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("lora_down", "lora_up", "lora_A.", "lora_B.", "hada_w1", "lokr_w", "oft_blocks", ".lora.down", "lora_linear_layer"),
        "a LoRA network file",
        f"It goes on top of a base model. {WANTED}",
    ),
    (("conditioner.embedders.",), "a Stable Diffusion XL model", LATER),
    (("joint_blocks.",), "a Stable Diffusion 3 model", LATER),
    (("double_blocks.", "double_stream_blocks.", "single_transformer_blocks."), "a Flux model", LATER),
    (("control_model.", "input_hint_block.", "controlnet_cond_embedding."), "a ControlNet", f"It goes on top of a base model. {WANTED}"),
    (("motion_modules.",), "an AnimateDiff motion module", f"It goes on top of a base model. {WANTED}"),
    (("emb_params", "string_to_param"), "a textual inversion embedding", f"It goes on top of a base model. {WANTED}"),
    (("linear1.weight", "linear2.weight"), "a hypernetwork", f"It goes on top of a base model. {WANTED}"),
)
# A file with only one model in it, named as diffusers or the original does.
PARTS: tuple[tuple[str, str], ...] = (
    ("down_blocks.0.attentions.0.transformer_blocks", "a UNet alone"),
    ("down_blocks.0.resnets.0.time_emb_proj", "a UNet alone"),
    ("text_model.encoder.layers", "a CLIP model alone"),
    ("encoder.layers.0.self_attn", "a text encoder alone"),
    ("encoder.down", "a VAE alone"),
    ("model.embed_tokens", "a language model"),
)


def kind_of(keys: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> Kind | None:
    """What a file is that is not a Stable Diffusion 1.x or 2.x text-to-image model; None when it may be one.

    Args:
        keys: The names of the file's tensors.
        shapes: Their shapes; the UNet's first layer tells inpainting models and the like apart.
    """
    first = shapes.get(PREFIXES["unet"] + "input_blocks.0.0.weight")
    if first is not None and not any(mark in key for key in keys for mark in ("conditioner.embedders.", "control_model.")):
        channels = first[1] if len(first) > 1 else 0
        special = {9: "an inpainting model", 8: "an instruction or image-variation model", 7: "an upscaler", 5: "a depth model"}
        if channels != 4:
            what = special.get(channels, "a model")
            return Kind(f"{what}: its UNet takes {channels} channels, not 4", f"Training it needs other inputs. {WANTED}")
        return None
    for marks, what, hint in MARKS:
        if any(mark in key for key in keys for mark in marks):
            return Kind(what, hint)
    if any(key.startswith((*PREFIXES.values(), OPENCLIP_PREFIX, BARE_CLIP_PREFIX)) for key in keys):
        return None
    for mark, what in PARTS:
        if any(mark in key for key in keys):
            return Kind(what, f"A VAE goes to --vae; a UNet or text encoder belongs into its diffusers folder. {WANTED}")
    return Kind("a file of tensors that no Stable Diffusion model has", WANTED)
