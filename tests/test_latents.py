"""Latents are encoded once, the same whatever the batch, the name or the place of an image."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from onegraph.errors import NumericsError, OutputError
from onegraph.training.diffusion.buckets import BucketSettings, place_images
from onegraph.training.diffusion.images import check_images, load_image
from onegraph.training.diffusion.latents import Encoding, LatentCache, default_cache_folder, vae_fingerprint


class TinyVAE(nn.Module):
    """One convolution to 4 means and 4 log-deviations, and a count of the images it saw."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(3, 8, 8, stride=8)
        self.seen: list[int] = []
        self.modes: set[tuple[bool, bool]] = set()
        self.poison: float | None = None

    def encode(self, images: Tensor) -> SimpleNamespace:
        assert images.dtype == self.convolution.weight.dtype
        self.seen.append(len(images))
        self.modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        mean, logarithm = self.convolution(images).chunk(2, 1)
        if self.poison is not None:
            mean = torch.where(images.mean((1, 2, 3), keepdim=True) > 0.5, self.poison, mean)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean, std=logarithm.exp()))


def write_images(folder: Path, *names: str, size: tuple[int, int] = (24, 16)) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return [folder / name for name in names]


def encodings_of(paths: list[Path], *, flips: bool = False, resolution: tuple[int, int] = (16, 16)) -> list[Encoding]:
    images, _ = check_images(paths)
    placements = place_images(images, BucketSettings(resolution=resolution))
    return [
        Encoding(image, placement, flip)
        for image, placement in zip(images, placements, strict=True)
        for flip in ((False, True) if flips else (False,))
    ]


@pytest.fixture
def encodings(tmp_path: Path) -> list[Encoding]:
    return encodings_of(write_images(tmp_path / "images", "a.png", "b.png", "c.png"), flips=True)


def test_latent_is_mean_plus_noise_times_the_scaling_factor(encodings: list[Encoding]) -> None:
    vae = TinyVAE()
    with torch.no_grad():
        posterior = vae.encode(load_image(encodings[0].image.path, (16, 16))[None]).latent_dist
    noise = []
    for scale in (1.0, 0.25):
        cache = LatentCache(vae, scale, batch_size=4, seed=3)
        cache.fill(encodings)
        latent = cache.get(encodings[0])
        assert (latent.shape, latent.dtype, latent.requires_grad) == ((4, 2, 2), torch.float32, False)
        assert not latent.is_inference()
        noise.append((latent / scale - posterior.mean[0]) / posterior.std[0])
    assert torch.allclose(noise[0], noise[1], atol=1e-5)
    assert 0.3 < noise[0].std() < 2
    assert not torch.allclose(noise[0], torch.zeros(()))


def test_noise_is_normal_over_many_images(tmp_path: Path) -> None:
    vae = TinyVAE()
    with torch.no_grad():
        vae.convolution.weight.zero_()
        vae.convolution.bias.zero_()  # mean 0, deviation 1: the latent is the noise itself
    encodings = encodings_of(write_images(tmp_path, *(f"{n}.png" for n in range(20))), resolution=(32, 32))
    cache = LatentCache(vae, 1.0, batch_size=8)
    cache.fill(encodings)
    values = torch.stack([cache.get(encoding) for encoding in encodings])
    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.1
    assert len({tuple(value.flatten().tolist()) for value in values}) == 20


def test_mirrored_image_has_a_latent_of_its_own(encodings: list[Encoding]) -> None:
    cache = LatentCache(TinyVAE(), 1.0)
    cache.fill(encodings)
    assert len(cache) == 6
    assert not torch.allclose(cache.get(encodings[0]), cache.get(encodings[1]))


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batch_size_only_changes_how_many_go_through_at_once(encodings: list[Encoding], batch_size: int) -> None:
    vae, one = TinyVAE(), LatentCache(TinyVAE(), 1.0, batch_size=1)
    cache = LatentCache(vae, 1.0, batch_size=batch_size)
    one.fill(encodings)
    cache.fill(encodings)
    assert max(vae.seen) == min(batch_size, 6)
    assert sum(vae.seen) == 6
    for encoding in encodings:
        assert torch.allclose(cache.get(encoding), one.get(encoding), atol=1e-6)


def test_latent_depends_on_content_and_seed_and_not_on_name_or_order(tmp_path: Path, encodings: list[Encoding]) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in (encoding.image.path for encoding in encodings):
        (moved / f"z{path.name}").write_bytes(path.read_bytes())
    others = encodings_of(sorted(moved.iterdir(), reverse=True), flips=True)
    first, second, third = LatentCache(TinyVAE(), 1.0, seed=1), LatentCache(TinyVAE(), 1.0, seed=1), LatentCache(TinyVAE(), 1.0, seed=2)
    first.fill(encodings)
    second.fill(others)
    third.fill(encodings)
    for encoding in encodings:
        assert torch.equal(second.get(encoding), first.get(encoding))
        assert not torch.equal(third.get(encoding), first.get(encoding))
    assert {encoding.key for encoding in others} == {encoding.key for encoding in encodings}


def test_equal_images_are_encoded_once(encodings: list[Encoding]) -> None:
    vae = TinyVAE()
    cache = LatentCache(vae, 1.0)
    assert cache.fill(encodings * 3).num_encoded == 6
    assert cache.fill(encodings).num_encoded == 0
    assert sum(vae.seen) == 6


def test_sizes_are_never_mixed(tmp_path: Path) -> None:
    images, _ = check_images(write_images(tmp_path, "a.png", "b.png") + write_images(tmp_path / "w", "c.png", "d.png", size=(64, 16)))
    settings = BucketSettings(resolution=(32, 32), enable_bucket=True, min_bucket_reso=8, max_bucket_reso=64, bucket_reso_steps=8)
    placements = place_images(images, settings)
    cache = LatentCache(TinyVAE(), 1.0, batch_size=8)
    cache.fill([Encoding(image, placement) for image, placement in zip(images, placements, strict=True)])
    for image, placement in zip(images, placements, strict=True):
        width, height = placement.size
        assert cache.get(Encoding(image, placement)).shape == (4, height // 8, width // 8)
    assert len({placement.size for placement in placements}) == 2


def test_progress_and_report(encodings: list[Encoding]) -> None:
    told: list[tuple[int, int]] = []
    report = LatentCache(TinyVAE(), 1.0, batch_size=4).fill(encodings, progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 6), (6, 6)]
    assert (report.num_encoded, report.num_bytes) == (6, 6 * 4 * 2 * 2 * 4)


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [(torch.float32, "--vae=FILE"), (torch.bfloat16, "--no_half_vae")],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_latent_that_is_not_finite_names_the_file(tmp_path: Path, poison: float, dtype: torch.dtype, hint: str) -> None:
    paths = write_images(tmp_path, "dark.png", "light.png")
    Image.new("RGB", (16, 16), "white").save(paths[1])
    vae = TinyVAE()
    vae.poison = poison
    folder = tmp_path / "cache"
    cache = LatentCache(vae, 1.0, dtype, batch_size=2, to_disk=folder)
    with pytest.raises(NumericsError) as caught:
        cache.fill(encodings_of(paths))
    error = caught.value
    assert error.code == "latent-not-finite"
    assert "light.png at 16x16" in error.what
    assert "dark.png" not in error.what
    assert hint in error.hint
    assert ("--no_half_vae" in error.hint) == (dtype != torch.float32)
    assert list(folder.iterdir()) == []


def test_vae_runs_in_the_dtype_asked_for_and_latents_are_float32(encodings: list[Encoding]) -> None:
    half, full = LatentCache(TinyVAE(), 1.0, torch.bfloat16), LatentCache(TinyVAE(), 1.0)
    half.fill(encodings)
    full.fill(encodings)
    assert half.get(encodings[0]).dtype == torch.float32
    difference = (half.get(encodings[0]) - full.get(encodings[0])).abs().max()
    assert 0 < difference < 0.1


def test_vae_runs_without_gradients_and_not_in_inference_mode(encodings: list[Encoding]) -> None:
    vae = TinyVAE()
    LatentCache(vae, 1.0).fill(encodings)
    assert vae.modes == {(False, False)}


def disk_pair(folder: Path, encodings: list[Encoding], **options: object) -> tuple[TinyVAE, LatentCache]:
    vae = TinyVAE()
    return vae, LatentCache(vae, 0.5, batch_size=4, to_disk=folder, **options)  # type: ignore[arg-type]


def test_latents_from_disk_are_bit_equal_and_the_vae_does_not_run(tmp_path: Path, encodings: list[Encoding]) -> None:
    folder = default_cache_folder(tmp_path)
    _, first = disk_pair(folder, encodings)
    assert first.fill(encodings).num_encoded == 6
    vae, second = disk_pair(folder, encodings)
    told: list[int] = []
    report = second.fill(encodings, progress=lambda done, total: told.append(done))
    assert (report.num_encoded, report.num_from_disk, report.num_remade, vae.seen) == (0, 6, 0, [])
    assert told == [1, 2, 3, 4, 5, 6]
    for encoding in encodings:
        assert torch.equal(second.get(encoding), first.get(encoding))


def test_files_on_disk_serve_every_seed(tmp_path: Path, encodings: list[Encoding]) -> None:
    disk_pair(tmp_path / "cache", encodings)[1].fill(encodings)
    vae, other = disk_pair(tmp_path / "cache", encodings, seed=9)
    memory = LatentCache(TinyVAE(), 0.5, batch_size=4, seed=9)
    other.fill(encodings)
    memory.fill(encodings)
    assert vae.seen == []
    assert all(torch.equal(other.get(encoding), memory.get(encoding)) for encoding in encodings)


def cut(data: bytes) -> bytes:
    return data[:-10]


def flipped_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def emptied(data: bytes) -> bytes:
    return b""


def rubbish(data: bytes) -> bytes:
    return hashlib.sha256(data).digest() * 20


@pytest.mark.parametrize("damage", [cut, flipped_bit, emptied, rubbish], ids=lambda damage: damage.__name__)
def test_damaged_file_is_made_again(tmp_path: Path, encodings: list[Encoding], damage: object) -> None:
    folder = tmp_path / "cache"
    _, first = disk_pair(folder, encodings)
    first.fill(encodings)
    path = sorted(folder.iterdir())[2]
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    vae, second = disk_pair(folder, encodings)
    report = second.fill(encodings)
    assert (report.num_from_disk, report.num_encoded, report.num_remade) == (5, 1, 1)
    assert sum(vae.seen) == 1
    assert all(torch.allclose(second.get(encoding), first.get(encoding), atol=1e-6) for encoding in encodings)
    _, third = disk_pair(folder, encodings)
    assert third.fill(encodings).num_from_disk == 6


def test_file_of_another_image_under_this_name_is_not_used(tmp_path: Path, encodings: list[Encoding]) -> None:
    folder = tmp_path / "cache"
    disk_pair(folder, encodings)[1].fill(encodings)
    one, two = sorted(folder.iterdir())[:2]
    one.write_bytes(two.read_bytes())
    assert disk_pair(folder, encodings)[1].fill(encodings).num_remade == 1


def test_another_vae_dtype_or_size_never_reads_old_files(tmp_path: Path, encodings: list[Encoding]) -> None:
    folder = tmp_path / "cache"
    disk_pair(folder, encodings)[1].fill(encodings)
    caches = [
        (LatentCache(TinyVAE(seed=1), 1.0, to_disk=folder), encodings),
        (LatentCache(TinyVAE(), 1.0, torch.bfloat16, to_disk=folder), encodings),
        (LatentCache(TinyVAE(), 1.0, to_disk=folder), encodings_of(sorted({e.image.path for e in encodings}), resolution=(24, 16))),
    ]
    for cache, wanted in caches:
        report = cache.fill(wanted)
        assert (report.num_from_disk, report.num_encoded) == (0, len(wanted))


def test_fingerprint_is_of_the_weights(encodings: list[Encoding]) -> None:
    assert vae_fingerprint(TinyVAE(), torch.float32) == vae_fingerprint(TinyVAE(), torch.float32)
    changed = TinyVAE()
    with torch.no_grad():
        changed.convolution.bias[3] += 1e-3
    assert vae_fingerprint(changed, torch.float32) != vae_fingerprint(TinyVAE(), torch.float32)
    assert vae_fingerprint(TinyVAE(), torch.bfloat16) != vae_fingerprint(TinyVAE(), torch.float32)


def test_cache_folder_that_cannot_be_made(tmp_path: Path, encodings: list[Encoding]) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OutputError):
        LatentCache(TinyVAE(), 1.0, to_disk=tmp_path / "file" / "cache").fill(encodings)


def test_real_autoencoder_from_diffusers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, while it is imported
        from diffusers import AutoencoderKL
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        latent_channels=4,
        layers_per_block=1,
    ).eval()
    (encoding,) = encodings_of(write_images(tmp_path, "a.png"), resolution=(32, 64))
    cache = LatentCache(vae, 0.18215)
    cache.fill([encoding])
    assert cache.get(encoding).shape == (4, 8, 4)
    assert torch.isfinite(cache.get(encoding)).all()
