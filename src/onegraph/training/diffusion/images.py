"""Images: every file is decoded once before training, then loaded as the model needs it."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from onegraph.errors import DataError

_SHOWN = 20
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}
_CONTENTS = (
    (b"\x89PNG", "a PNG file"),
    (b"\xff\xd8\xff", "a JPEG file"),
    (b"RIFF", "a RIFF file (webp, wav or avi)"),
    (b"BM", "a BMP file"),
    (b"GIF8", "a GIF file"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"version https://git-lfs", "a Git LFS pointer: the image itself was not downloaded ('git lfs pull')"),
    (b"\xff\x0a", "a JPEG XL file"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL file"),
)

Progress = Callable[[int, int], None]
"""Called with how many are done and how many there are."""


@dataclass(frozen=True)
class CheckedImage:
    """A file that decodes.

    Args:
        path: The file.
        width: In pixels, after turning as EXIF says.
        height: In pixels, after turning as EXIF says.
        content: sha256 of the file's bytes: the image's identity wherever the file lies.
        notes: What is unusual but handled, such as transparency.
    """

    path: Path
    width: int
    height: int
    content: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadImage:
    """A file that can't be used, and why."""

    path: Path
    reason: str


def check_images(
    paths: Sequence[Path], skip_bad: bool = False, *, progress: Progress | None = None
) -> tuple[list[CheckedImage], list[BadImage]]:
    """Read and decode every file, so that a bad one is found now and not in the middle of training.

    Args:
        paths: Image files.
        skip_bad: Return the bad ones instead of raising, as long as one image is left.
        progress: Told how many files are done.

    Raises:
        DataError: ``image-unreadable``; names all bad images (the first 20) with the reason of each.
    """
    good: list[CheckedImage] = []
    bad: list[BadImage] = []
    with warnings.catch_warnings():
        # Pillow only warns between one and two times its limit; here that is a reason. Other remarks on broken metadata are noise.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for number, result in enumerate(pool.map(_check_image, paths), 1):
                if isinstance(result, BadImage):
                    bad.append(result)
                else:
                    good.append(result)
                if progress is not None:
                    progress(number, len(paths))
    if bad and (not skip_bad or not good):
        listed = [f"  {image.path}: {image.reason}" for image in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            listed.append(f"  ... and {len(bad) - _SHOWN} more")
        raise DataError(
            f"{len(bad)} of {len(paths)} images can't be used:",
            why="\n".join(listed),
            hint="replace or delete them, or add --skip_bad_images to train without them" if good else "no image is left to train on",
            code="image-unreadable",
        )
    return good, bad


def describe_notes(images: Sequence[CheckedImage]) -> str:
    """One line for each unusual kind of image with how many there are; empty when there is nothing unusual."""
    counts = Counter(note for image in images for note in image.notes)
    examples = {note: image.path.name for image in reversed(images) for note in image.notes}
    return "\n".join(f"{count} {'image' if count == 1 else 'images'} {note}, e.g. {examples[note]}" for note, count in counts.most_common())


def load_image(
    path: Path,
    size: tuple[int, int],
    *,
    resized: tuple[int, int] | None = None,
    crop: tuple[float, float] = (0.5, 0.5),
    flip: bool = False,
) -> Tensor:
    """An image as the VAE takes it: resized to cover ``size``, then cropped.

    Shapes:
        returns: (3, height, width) fp32 in [-1, 1]

    Args:
        path: An image that passed `check_images`.
        size: Width and height in pixels.
        resized: Width and height before cropping; the smallest that covers ``size`` when omitted.
        crop: Where the crop lies: (0, 0) is top left, (0.5, 0.5) the centre.
        flip: Mirror left to right, after cropping.

    Raises:
        DataError: ``image-unreadable``; the file changed since it was checked, or ``resized`` doesn't cover ``size``.
    """
    try:
        with Image.open(path) as file:
            image = to_rgb(file)
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        raise DataError(
            f"{path} can't be read any more: {error}", why="It could be when training began.", code="image-unreadable"
        ) from error
    width, height = size
    if resized is None:
        resized = cover(image.size, size)
    if resized[0] < width or resized[1] < height:
        raise DataError(f"{path}: {resized[0]}x{resized[1]} doesn't cover {width}x{height}", code="image-unreadable")
    if image.size != resized:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    left, top = int((resized[0] - width) * crop[0]), int((resized[1] - height) * crop[1])
    image = image.crop((left, top, left + width, top + height))
    if flip:
        image = ImageOps.mirror(image)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32))
    return (pixels / 127.5 - 1.0).permute(2, 0, 1).contiguous()


def cover(image_size: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of the image's aspect that covers ``size``; (width, height) in pixels, rounded."""
    scale = max(size[0] / image_size[0], size[1] / image_size[1])
    return max(size[0], int(image_size[0] * scale + 0.5)), max(size[1], int(image_size[1] * scale + 0.5))


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB as people see the image: turned as EXIF says, on white where transparent, the first frame of an animation.

    Pillow's own ``convert("RGB")`` drops the alpha channel and shows the colours hidden under it, mostly black, and clips 16-bit greys.
    """
    image.seek(0)
    if image.mode.startswith("I"):
        # 16-bit greys, which Pillow also hands out as 32-bit ones.
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) / 257.0 + 0.5).astype(np.uint8)).convert("RGB")
    image = ImageOps.exif_transpose(image)
    if _transparent(image):
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    return image.convert("RGB")


def _transparent(image: Image.Image) -> bool:
    return "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info


def _check_image(path: Path) -> CheckedImage | BadImage:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return BadImage(path, "a link to a file that doesn't exist" if path.is_symlink() else "the file doesn't exist")
    except OSError as error:
        return BadImage(path, f"can't be read: {error.strerror or error}")
    if not data:
        return BadImage(path, "empty: 0 bytes")
    try:
        with Image.open(io.BytesIO(data)) as image:
            notes = _notes(path, image)
            if image.mode == "F":
                return BadImage(path, "floating-point pixels, whose range is unknown")
            image.load()
            width, height = to_rgb(image).size
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        limit = Image.MAX_IMAGE_PIXELS or 0
        return BadImage(
            path, f"more than {limit / 1e6:.0f} million pixels, the guard against files that unpack to fill the memory; shrink it"
        )
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        return BadImage(path, _reason(path, data, error))
    return CheckedImage(path, width, height, hashlib.sha256(data).hexdigest(), notes)


def _reason(path: Path, data: bytes, error: Exception) -> str:
    content = _content(data)
    expected = {"PNG": "a PNG file", "JPEG": "a JPEG file", "WEBP": "a RIFF file (webp, wav or avi)", "BMP": "a BMP file"}
    if content is not None and content != expected[_FORMATS[path.suffix.lower()]]:
        return f"not an image of its extension but {content}"
    if content is None:
        return "not an image: its first bytes are those of no known format"
    message = str(error) or type(error).__name__
    # The stream's address in Pillow's message says nothing about the file.
    message = "the header can't be read" if "BytesIO" in message else message
    return f"truncated or damaged: {message} ({len(data)} bytes)"


def _content(data: bytes) -> str | None:
    """What the first bytes say the file is."""
    for magic, name in _CONTENTS:
        if data.startswith(magic):
            return name
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page, probably the error page of a download"
    if start.startswith((b"<svg", b"<?xml")):
        return "an SVG or XML file"
    if data[4:8] == b"ftyp":
        return f"a {data[8:12].decode('ascii', 'replace').strip()} file (video, HEIC or AVIF)"
    if all(byte >= 0x20 or byte in b"\t\r\n" for byte in data[:512]):
        return "a text file"
    return None


def _notes(path: Path, image: Image.Image) -> tuple[str, ...]:
    notes: list[str] = []
    expected = _FORMATS.get(path.suffix.lower())
    if image.format != expected and image.format != "MPO":  # MPO: a JPEG with more pictures behind it, as cameras write
        notes.append(f"with {path.suffix} in the name and {image.format} inside (read as what it is)")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        notes.append("animated (first frame used)")
    if _transparent(image):
        notes.append("with transparency (put on white)")
    if image.mode == "CMYK":
        notes.append("in CMYK (converted to RGB)")
    if image.mode.startswith("I"):
        notes.append("with 16 bits a pixel (reduced to 8)")
    if image.getexif().get(0x0112, 1) != 1:
        notes.append("turned as their EXIF data says")
    return tuple(notes)
