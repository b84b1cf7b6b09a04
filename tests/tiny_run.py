"""A training run in miniature: a random model of a few thousand weights, six images of 64 pixels, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, safe_open

from onegraph.train_network import main
from tiny_diffusion import build, configuration


@dataclass(frozen=True)
class Ingredients:
    """A base model as a diffusers folder, and a folder of captioned images."""

    model: Path
    images: Path

    def flags(self, output: Path, *more: str, size: int = 64, seed: int = 3, images: Path | None = None, cached: bool = True) -> list[str]:
        """The flags of a run."""
        flags = [
            f"--pretrained_model_name_or_path={self.model}",
            f"--train_data_dir={self.images if images is None else images}",
            f"--output_dir={output}",
            f"--resolution={size},{size}",
            "--network_module=networks.lora",
            f"--seed={seed}",
        ]
        return [*flags, *(["--cache_latents"] if cached else []), *more]


def make_ingredients(folder: Path, *, num_images: int = 6) -> Ingredients:
    """Writes both."""
    model = folder / "model"
    components = configuration()
    for part in ("unet", "vae", "text_encoder"):
        module = build(part, components[part])
        module.save_pretrained(model / part)  # type: ignore[operator]
    (model / "scheduler").mkdir()
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps(components["scheduler"]))
    images = folder / "images"
    make_images(images / "1_thing", num_images)
    return Ingredients(model=model, images=images)


def make_images(folder: Path, count: int, *, size: tuple[int, int] = (64, 64), seed: int = 0) -> None:
    """Noise with captions of three tags."""
    folder.mkdir(parents=True)
    random = numpy.random.default_rng(seed)
    for number in range(count):
        Image.fromarray(random.integers(0, 255, (size[1], size[0], 3), dtype=numpy.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.caption").write_text(f"red {number}, blue, green {number}")


def train(arguments: Sequence[str]) -> int:
    """The command, in this process."""
    return main(list(arguments))


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a network file."""
    return load_file(path)


def metadata(path: Path) -> dict[str, str]:
    """The strings in its header."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def assert_same_weights(left: Path, right: Path) -> None:
    """Bit for bit."""
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def differ(left: Path, right: Path) -> bool:
    """Whether any weight differs: what shows that a comparison can fail."""
    first, second = weights(left), weights(right)
    return any(not torch.equal(first[name], second[name]) for name in first)
