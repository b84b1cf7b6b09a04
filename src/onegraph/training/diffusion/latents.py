"""Cached latents: every image goes through the VAE once, before training."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from onegraph.checkpoint.atomic import atomic_write, make_folder
from onegraph.errors import NumericsError
from onegraph.training.diffusion.buckets import Placement
from onegraph.training.diffusion.images import CheckedImage, Progress, load_image
from onegraph.training.streams import stream_seed

FORMAT = "onegraph latents 1"
"""Part of every cache file; raise the number when images are loaded or encoded differently."""


class Posterior(Protocol):
    """The distribution of latents that a VAE gives for an image."""

    @property
    def mean(self) -> Tensor:
        """(B, 4, h, w)."""

    @property
    def std(self) -> Tensor:
        """(B, 4, h, w)."""


@dataclass(frozen=True)
class Encoding:
    """One latent to make: an image, its size and whether it is mirrored."""

    image: CheckedImage
    placement: Placement
    flip: bool = False

    @property
    def key(self) -> tuple[str, Placement, bool]:
        """What the latent depends on: equal images under two names share it."""
        return self.image.content, self.placement, self.flip


@dataclass(frozen=True)
class LatentReport:
    """Where the latents came from."""

    num_encoded: int
    num_from_disk: int
    num_remade: int
    num_bytes: int

    def __str__(self) -> str:
        text = f"{self.num_encoded + self.num_from_disk} latents, {self.num_bytes / 2**20:.1f} MiB in memory"
        if self.num_from_disk:
            text += f"; {self.num_from_disk} read from disk, {self.num_encoded} encoded"
        if self.num_remade:
            text += f"; {self.num_remade} damaged or outdated cache files made again"
        return text


def default_cache_folder(train_data_dir: Path) -> Path:
    """Where latents of a data folder are kept on disk: hidden, so the search for images never looks inside."""
    return train_data_dir / ".onegraph-latents"


class LatentCache:
    """One sampled latent an image, times the scaling factor: ``(mean + std * noise) * scaling_factor``.

    The noise depends on the seed and the image's content, never on its name, its place in the data set or the batch it is encoded in.

    Shapes:
        cache.get(...): (4, height / 8, width / 8) fp32 on the CPU

    Args:
        vae: Anything with ``encode(images).latent_dist`` that has a mean and a standard deviation; its ``parameters()`` say the device.
        scaling_factor: The VAE's own.
        dtype: The dtype to encode in; the VAE is cast to it. Its present one when omitted.
        batch_size: Images encoded at once.
        to_disk: Folder for cache files; they hold mean and standard deviation, so another seed can use them too.
        seed: The run's seed.
    """

    def __init__(
        self,
        vae: nn.Module,
        scaling_factor: float,
        dtype: torch.dtype | None = None,
        batch_size: int = 1,
        to_disk: Path | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.batch_size = max(1, batch_size)
        self.folder = to_disk
        self.seed = seed
        self._vae = vae
        first = next(vae.parameters())
        self._device, self._dtype = first.device, dtype or first.dtype
        self._latents: dict[tuple[str, Placement, bool], Tensor] = {}
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self._latents)

    def __contains__(self, encoding: object) -> bool:
        return isinstance(encoding, Encoding) and encoding.key in self._latents

    def get(self, encoding: Encoding) -> Tensor:
        """The latent of an image that `fill` was given; KeyError for another."""
        return self._latents[encoding.key]

    def fill(self, encodings: Sequence[Encoding], progress: Progress | None = None) -> LatentReport:
        """Encode what isn't cached yet.

        Args:
            encodings: What to encode; duplicates are encoded once.
            progress: Told how many latents are done.

        Raises:
            NumericsError: ``latent-not-finite``; names the images. Nothing of them is kept.
            OutputError: A cache file can't be written.
        """
        wanted = {encoding.key: encoding for encoding in encodings if encoding.key not in self._latents}
        total, done, num_from_disk, num_remade = len(wanted), 0, 0, 0
        if self.folder is not None and wanted:
            make_folder(self.folder)
            self._fingerprint = self._fingerprint or vae_fingerprint(self._vae, self._dtype)
            for key, encoding in list(wanted.items()):
                path = self._path(encoding)
                if not path.exists():
                    continue
                moments = self._read(path, encoding)
                if moments is None:
                    num_remade += 1
                    continue
                self._latents[key] = self._sample(encoding, *moments)
                del wanted[key]
                num_from_disk, done = num_from_disk + 1, done + 1
                if progress is not None:
                    progress(done, total)
        if wanted and any(parameter.dtype != self._dtype for parameter in self._vae.parameters()):
            nn.Module.to(self._vae, dtype=self._dtype)  # diffusers' own `to` warns about every cast
        for batch in _batches_of_one_size(wanted.values(), self.batch_size):
            for encoding, mean, std in self._encode(batch):
                if self.folder is not None:
                    self._write(encoding, mean, std)
                self._latents[encoding.key] = self._sample(encoding, mean, std)
            done += len(batch)
            if progress is not None:
                progress(done, total)
        num_bytes = sum(latent.numel() * latent.element_size() for latent in self._latents.values())
        return LatentReport(len(wanted), num_from_disk, num_remade, num_bytes)

    def _encode(self, batch: Sequence[Encoding]) -> Iterator[tuple[Encoding, Tensor, Tensor]]:
        pixels = torch.stack([load_image(e.image.path, e.placement.size, resized=e.placement.resized, flip=e.flip) for e in batch])
        # Not inference_mode: a tensor made there can never take part in a training step.
        with torch.no_grad():
            posterior: Posterior = self._vae.encode(pixels.to(self._device, self._dtype)).latent_dist  # type: ignore[operator, unused-ignore]
            means, stds = (moment.to("cpu", torch.float32) for moment in (posterior.mean, posterior.std))
        wrong = [e for e, mean, std in zip(batch, means, stds, strict=True) if not (_finite(mean) and _finite(std))]
        if wrong:
            raise _not_finite(wrong, self._dtype)
        yield from zip(batch, means, stds, strict=True)

    def _sample(self, encoding: Encoding, mean: Tensor, std: Tensor) -> Tensor:
        width, height = encoding.placement.size
        generator = torch.Generator().manual_seed(
            stream_seed(self.seed, "latent", encoding.image.content, width, height, int(encoding.flip))
        )
        return (mean + std * torch.randn(mean.shape, generator=generator)) * self.scaling_factor

    def _header(self, encoding: Encoding) -> dict[str, str]:
        """What a cache file was made from; it is used only if all of it is the same."""
        values = asdict(encoding.placement) | {"content": encoding.image.content, "flip": encoding.flip, "vae": self._fingerprint}
        return {"format": FORMAT, "made_from": json.dumps(values, sort_keys=True)}

    def _path(self, encoding: Encoding) -> Path:
        assert self.folder is not None
        width, height = encoding.placement.size
        made_from = hashlib.sha256(self._header(encoding)["made_from"].encode()).hexdigest()
        return (
            self.folder / f"{encoding.image.content[:16]}-{width}x{height}{'-flip' if encoding.flip else ''}-{made_from[:16]}.safetensors"
        )

    def _read(self, path: Path, encoding: Encoding) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation, or None when the file is damaged or was made from something else."""
        width, height = encoding.placement.size
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                mean, std = file.get_tensor("mean"), file.get_tensor("std")
        except (OSError, SafetensorError):
            return None
        expected = self._header(encoding) | {"checksum": _checksum(mean, std)}
        right_shape = mean.shape == std.shape and mean.dim() == 3 and width * mean.shape[1] == height * mean.shape[2]
        if header != expected or mean.dtype != torch.float32 or not right_shape or not (_finite(mean) and _finite(std)):
            return None
        return mean, std

    def _write(self, encoding: Encoding, mean: Tensor, std: Tensor) -> None:
        moments = {"mean": mean.contiguous(), "std": std.contiguous()}
        header = self._header(encoding) | {"checksum": _checksum(mean, std)}
        atomic_write(self._path(encoding), lambda temporary: save_file(moments, temporary, metadata=header))


def vae_fingerprint(vae: nn.Module, dtype: torch.dtype) -> str:
    """A hash of the weights and of the dtype they run in: what a latent depends on besides the image."""
    digest = hashlib.sha256(str(dtype).encode())
    for name, tensor in sorted(vae.state_dict().items()):
        values = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _batches_of_one_size(encodings: Iterable[Encoding], batch_size: int) -> Iterator[list[Encoding]]:
    groups: defaultdict[tuple[int, int], list[Encoding]] = defaultdict(list)
    for encoding in encodings:
        groups[encoding.placement.size].append(encoding)
    for size in sorted(groups):
        for start in range(0, len(groups[size]), batch_size):
            yield groups[size][start : start + batch_size]


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _checksum(mean: Tensor, std: Tensor) -> str:
    return hashlib.sha256(mean.contiguous().numpy().tobytes() + std.contiguous().numpy().tobytes()).hexdigest()


def _not_finite(wrong: Sequence[Encoding], dtype: torch.dtype) -> NumericsError:
    listed = "\n".join(f"  {e.image.path} at {e.placement.size[0]}x{e.placement.size[1]}{', mirrored' if e.flip else ''}" for e in wrong)
    if dtype == torch.float32:
        why, hint = "The VAE ran in float32, so its weights are damaged or don't fit.", "another VAE with --vae=FILE"
    else:
        why = f"The VAE ran in {str(dtype).removeprefix('torch.')}, whose range or precision some VAEs leave."
        hint = "--no_half_vae runs the VAE in float32; if that doesn't help, another VAE with --vae=FILE"
    return NumericsError(f"the VAE makes NaN or infinity from:\n{listed}", why=why, hint=hint, code="latent-not-finite")
