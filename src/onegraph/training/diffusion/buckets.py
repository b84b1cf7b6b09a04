"""Sizes: one resolution for all images, or buckets of nearly the same area and different aspect.

Sizes are (width, height) in pixels everywhere here, as in the flags; tensors are (height, width).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onegraph.errors import ConfigurationError, DataError, OnegraphError
from onegraph.training.diffusion.images import CheckedImage, cover

Size = tuple[int, int]
LATENT_FACTOR = 8  # pixels of a side that the VAE makes one latent of
_SHOWN = 20


@dataclass(frozen=True, order=True)
class Placement:
    """How an image becomes a training size: resized, then cropped."""

    size: Size
    resized: Size


def parse_resolution(value: str | int | Sequence[int], *, flag: str = "--resolution") -> Size:
    """Width and height from ``512``, ``512,768`` or ``512x768``.

    Raises:
        ConfigurationError: ``resolution``; not one or two whole numbers, or not divisible by 8.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:[,xX×]\s*([0-9]+)\s*)?", value)
        numbers = [int(number) for number in match.groups() if number] if match else []
    else:
        numbers = [value] if isinstance(value, int) else list(value)
    if len(numbers) not in (1, 2):
        raise ConfigurationError(
            f"{flag}={value} is not a resolution",
            why="It is one side of a square, or width and height, in pixels.",
            hint=f"{flag}=512 or {flag}=512,768",
            code="resolution",
        )
    width, height = numbers[0], numbers[-1]
    if width <= 0 or height <= 0 or width % LATENT_FACTOR or height % LATENT_FACTOR:
        down = ",".join(str(max(LATENT_FACTOR, side // LATENT_FACTOR * LATENT_FACTOR)) for side in (width, height))
        up = ",".join(str(max(LATENT_FACTOR, -(-side // LATENT_FACTOR) * LATENT_FACTOR)) for side in (width, height))
        raise ConfigurationError(
            f"{flag}={width},{height}: both sides must be divisible by {LATENT_FACTOR}",
            why=f"The VAE makes one latent of {LATENT_FACTOR}x{LATENT_FACTOR} pixels.",
            hint=f"{flag}={down}" if down == up else f"{flag}={down} or {flag}={up}",
            code="resolution",
        )
    return width, height


@dataclass(frozen=True, kw_only=True)
class BucketSettings:
    """Which training sizes there are; the names are those of the flags.

    Args:
        resolution: Width and height: the one size, or the largest area of a bucket.
        enable_bucket: Several sizes, each image in the one of nearest aspect.
        min_bucket_reso: Shortest side of a bucket, in pixels.
        max_bucket_reso: Longest side of a bucket, in pixels.
        bucket_reso_steps: Sides of buckets are multiples of this many pixels.
        bucket_no_upscale: Images smaller than the resolution keep their size and are only cropped to whole steps;
            then the shortest and longest side don't apply.

    Raises:
        ConfigurationError: All settings that can't be honoured, at once.
    """

    resolution: Size
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False

    def __post_init__(self) -> None:
        problems: list[OnegraphError] = []
        try:
            parse_resolution(self.resolution)
        except ConfigurationError as error:
            problems.append(error)
        if self.enable_bucket:
            problems.extend(self._bucket_problems())
        if problems:
            raise ConfigurationError.collected(problems)

    def _bucket_problems(self) -> Iterable[OnegraphError]:
        steps, lowest, highest = self.bucket_reso_steps, self.min_bucket_reso, self.max_bucket_reso
        width, height = self.resolution
        if steps <= 0 or steps % LATENT_FACTOR:
            near = max(LATENT_FACTOR, round(steps / LATENT_FACTOR) * LATENT_FACTOR)
            yield ConfigurationError(
                f"--bucket_reso_steps={steps} must be divisible by {LATENT_FACTOR}",
                why=f"The VAE makes one latent of {LATENT_FACTOR}x{LATENT_FACTOR} pixels.",
                hint=f"--bucket_reso_steps={near}; 64 is usual",
                code="bucket-steps",
            )
            return
        if self.bucket_no_upscale:
            return
        for name, side, near in (
            ("min_bucket_reso", lowest, max(steps, lowest // steps * steps)),
            ("max_bucket_reso", highest, -(-highest // steps) * steps),
        ):
            if side <= 0 or side % steps:
                hint = f"--{name}={max(steps, near)}"
                yield ConfigurationError(f"--{name}={side} is no multiple of --bucket_reso_steps={steps}", hint=hint, code="bucket-range")
        if lowest > min(width, height) or highest < max(width, height):
            fits = (
                max(steps, min(lowest, min(width, height) // 2 // steps * steps)),
                max(highest, -(-max(width, height) // steps) * steps),
            )
            yield ConfigurationError(
                f"--resolution={width},{height} lies outside of the buckets' sides, {lowest} to {highest} pixels",
                why="--min_bucket_reso must be at most the shorter side, --max_bucket_reso at least the longer one.",
                hint=f"--min_bucket_reso={fits[0]} --max_bucket_reso={fits[1]}, or --bucket_no_upscale, or no --enable_bucket",
                code="bucket-range",
            )

    def sizes(self) -> list[Size]:
        """The sizes that images can get, sorted; with ``bucket_no_upscale`` the images decide and this is empty."""
        if not self.enable_bucket:
            return [self.resolution]
        if self.bucket_no_upscale:
            return []
        area, steps = self.resolution[0] * self.resolution[1], self.bucket_reso_steps
        square = math.isqrt(area) // steps * steps
        found = {(square, square)}
        for width in range(self.min_bucket_reso, self.max_bucket_reso + 1, steps):
            height = min(self.max_bucket_reso, area // width // steps * steps)
            if height >= self.min_bucket_reso:
                found |= {(width, height), (height, width)}
        return sorted(found)

    def place(self, width: int, height: int) -> Placement:
        """The size that an image of this width and height is trained in.

        Raises:
            DataError: ``image-too-small``; without enlarging, not even one step fits into the image.
        """
        if self.enable_bucket and self.bucket_no_upscale:
            return self._place_without_enlarging(width, height)
        sizes = self.sizes()
        aspect = width / height
        best = min(sizes, key=lambda size: abs(size[0] / size[1] - aspect))
        return Placement(best, cover((width, height), best))

    def _place_without_enlarging(self, width: int, height: int) -> Placement:
        area, steps = self.resolution[0] * self.resolution[1], self.bucket_reso_steps
        resized = (width, height)
        if width * height > area:
            aspect = width / height
            # Round either side down to whole steps and let the other follow; keep the one that changes the aspect less.
            by_width = _whole_steps(math.sqrt(area * aspect), steps)
            by_height = _whole_steps(math.sqrt(area / aspect), steps)
            following_height, following_width = _whole_steps(by_width / aspect, steps), _whole_steps(by_height * aspect, steps)
            width_error = abs(by_width / following_height - aspect) if following_height else math.inf
            height_error = abs(following_width / by_height - aspect) if by_height else math.inf
            if width_error < height_error:
                resized = (by_width, int(by_width / aspect + 0.5))
            else:
                resized = (int(by_height * aspect + 0.5), by_height)
        size = (resized[0] // steps * steps, resized[1] // steps * steps)
        if 0 in size:
            raise DataError(
                f"{width}x{height} pixels leave no bucket of whole {steps}-pixel steps",
                why="--bucket_no_upscale forbids to enlarge the image.",
                hint=f"a larger or less narrow image, smaller --bucket_reso_steps (now {steps}), or no --bucket_no_upscale",
                code="image-too-small",
            )
        return Placement(size, resized)


def place_images(images: Sequence[CheckedImage], settings: BucketSettings) -> list[Placement]:
    """The placement of every image.

    Raises:
        DataError: ``image-too-small``; names all images (the first 20) that fit no bucket.
    """
    placements: list[Placement] = []
    problems: list[tuple[CheckedImage, DataError]] = []
    for image in images:
        try:
            placements.append(settings.place(image.width, image.height))
        except DataError as error:
            problems.append((image, error))
    if problems:
        listed = [f"  {image.path}: {image.width}x{image.height}" for image, _ in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            listed.append(f"  ... and {len(problems) - _SHOWN} more")
        first = problems[0][1]
        raise DataError(f"{len(problems)} images fit no bucket:", why="\n".join([*listed, first.why]), hint=first.hint, code=first.code)
    return placements


@dataclass(frozen=True)
class BucketReport:
    """How many images, repeats counted, each size has; prints as a small table.

    Args:
        counts: Size -> images with repeats; only sizes that are used.
        mean_aspect_error: Mean difference of width/height between an image and its bucket.
    """

    counts: dict[Size, int]
    mean_aspect_error: float

    @classmethod
    def of(cls, images: Sequence[CheckedImage], placements: Sequence[Placement], repeats: Sequence[int]) -> BucketReport:
        """Count images under their sizes."""
        counts: Counter[Size] = Counter()
        error = 0.0
        for image, placement, times in zip(images, placements, repeats, strict=True):
            counts[placement.size] += times
            error += times * abs(placement.size[0] / placement.size[1] - image.width / image.height)
        total = counts.total()
        return cls({size: counts[size] for size in sorted(counts)}, error / total if total else 0.0)

    def __str__(self) -> str:
        rows = [("size", "images"), *((f"{width}x{height}", str(count)) for (width, height), count in self.counts.items())]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{size.rjust(widths[0])}  {count.rjust(widths[1])}" for size, count in rows]
        return "\n".join([*lines, f"mean aspect error {self.mean_aspect_error:.4f}"])

    def metadata(self) -> dict[str, object]:
        """The value of ``ss_bucket_info``, before JSON."""
        rows = {str(number): {"resolution": list(size), "count": count} for number, (size, count) in enumerate(self.counts.items())}
        return {"buckets": rows, "mean_img_ar_error": self.mean_aspect_error}


def _whole_steps(side: float, steps: int) -> int:
    return int(side + 0.5) // steps * steps
