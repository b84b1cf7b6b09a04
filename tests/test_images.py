"""Images are checked before training and loaded the way the VAE takes them."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from onegraph.errors import DataError
from onegraph.training.diffusion.images import CheckedImage, check_images, describe_notes, load_image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def halves(width: int = 40, height: int = 20) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def noise(width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def checked(path: Path) -> CheckedImage:
    (good,), bad = check_images([path])
    assert not bad
    return good


def colour(path: Path, x: int = 0, y: int = 0, size: tuple[int, int] = (8, 8)) -> tuple[int, ...]:
    pixel = load_image(path, size)[:, y, x]
    return tuple(round(value) for value in ((pixel + 1) * 127.5).tolist())


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb_png(side: int) -> bytes:
    """A small valid PNG file that claims side x side pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


BAD = {
    "truncated-png": ("a.png", encoded(noise(), "PNG")[:2000], "truncated or damaged"),
    "truncated-jpeg": ("a.jpg", encoded(noise(), "JPEG")[:1500], "truncated or damaged"),
    "truncated-webp": ("a.webp", encoded(noise(), "WEBP")[:1500], "truncated or damaged"),
    "truncated-bmp": ("a.bmp", encoded(noise(), "BMP")[:1500], "truncated or damaged"),
    "header-only": ("a.png", encoded(noise(), "PNG")[:12], "truncated or damaged: the header can't be read"),
    "empty": ("a.png", b"", "0 bytes"),
    "html": ("a.jpg", b"\n<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "text": ("a.png", b"just words", "a text file"),
    "git-lfs": ("a.png", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "zip": ("a.png", b"PK\x03\x04" + bytes(40), "a zip archive"),
    "video": ("a.png", b"\x00\x00\x00\x20ftypisom" + bytes(40), "isom file"),
    "broken-jpeg-called-png": ("a.png", encoded(noise(), "JPEG")[:300], "a JPEG file"),
    "garbage": ("a.bmp", bytes(range(3, 255)), "no known format"),
    "bomb-warned": ("a.png", bomb_png(10_000), "million pixels"),
    "bomb-refused": ("a.png", bomb_png(60_000), "million pixels"),
}


@pytest.mark.parametrize(("name", "data", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_file_is_named_with_its_reason(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    good = written(tmp_path, "good.png", encoded(halves(), "PNG"))
    path = written(tmp_path, name, data)
    images, bad = check_images([good, path], skip_bad=True)
    assert [image.path for image in images] == [good]
    assert [image.path for image in bad] == [path]
    assert reason in bad[0].reason


def test_missing_file_dangling_link_and_folder(tmp_path: Path) -> None:
    good = written(tmp_path, "good.png", encoded(halves(), "PNG"))
    (tmp_path / "link.png").symlink_to(tmp_path / "nothing.png")
    (tmp_path / "folder.png").mkdir()
    _, bad = check_images([tmp_path / name for name in ("gone.png", "link.png", "folder.png")] + [good], skip_bad=True)
    assert ["doesn't exist" in bad[0].reason, "a link" in bad[1].reason, "can't be read" in bad[2].reason] == [True] * 3


def test_all_bad_images_are_in_one_error(tmp_path: Path) -> None:
    good = written(tmp_path, "good.png", encoded(halves(), "PNG"))
    bad = [written(tmp_path, f"{number:02}.png", b"") for number in range(23)]
    with pytest.raises(DataError) as caught:
        check_images([good, *bad])
    error = caught.value
    assert error.code == "image-unreadable"
    assert "23 of 24 images" in error.what
    assert "--skip_bad_images" in error.hint
    assert "19.png" in error.why
    assert "20.png" not in error.why
    assert "and 3 more" in error.why


def test_skipping_needs_one_image_left(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        check_images([written(tmp_path, "a.png", b"")], skip_bad=True)
    assert "no image is left" in caught.value.hint


def test_order_content_and_progress(tmp_path: Path) -> None:
    paths = [written(tmp_path, f"{side}.png", encoded(halves(side, 8), "PNG")) for side in (30, 10, 20, 10)]
    paths.append(written(tmp_path, "copy.png", paths[0].read_bytes()))
    told: list[tuple[int, int]] = []
    good, _ = check_images(paths, progress=lambda done, total: told.append((done, total)))
    assert [(image.path, image.width) for image in good] == list(zip(paths, (30, 10, 20, 10, 30), strict=True))
    assert good[0].content == good[4].content != good[1].content
    assert told == [(number, 5) for number in range(1, 6)]


def test_jpeg_called_png_is_read_and_noted(tmp_path: Path) -> None:
    path = written(tmp_path, "a.png", encoded(Image.new("RGB", (16, 16), GREEN), "JPEG", quality=100))
    assert "JPEG inside" in checked(path).notes[0]
    red, green, blue = colour(path)
    assert green > 250
    assert max(red, blue) < 5


def test_plain_image_has_no_note(tmp_path: Path) -> None:
    image = checked(written(tmp_path, "a.jpg", encoded(halves(), "JPEG")))
    assert (image.width, image.height, image.notes) == (40, 20, ())


def test_transparency_is_put_on_white_not_on_hidden_colours(tmp_path: Path) -> None:
    hidden = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    path = written(tmp_path, "a.png", encoded(hidden, "PNG"))
    assert hidden.convert("RGB").getpixel((0, 0)) == (0, 0, 0)  # what Pillow alone would show
    assert colour(path) == (255, 255, 255)
    assert "transparency" in checked(path).notes[0]
    half = written(tmp_path, "b.webp", encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "WEBP", lossless=True))
    assert colour(half) == (127, 127, 127)


def test_transparent_palette_colour_is_white(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    path = written(tmp_path, "a.png", encoded(image, "PNG"))
    assert colour(path) == RED
    path = written(tmp_path, "b.png", encoded(image, "PNG", transparency=1))
    assert colour(path) == (255, 255, 255)


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [("L", 100, (100, 100, 100)), ("LA", (100, 255), (100, 100, 100)), ("1", 1, (255, 255, 255)), ("I;16", 0x8080, (128, 128, 128))],
    ids=["grey", "grey-alpha", "one-bit", "sixteen-bit"],
)
def test_png_modes_become_rgb(tmp_path: Path, mode: str, value: int, expected: tuple[int, int, int]) -> None:
    path = written(tmp_path, "a.png", encoded(Image.new(mode, (8, 8), value), "PNG"))
    assert colour(path) == expected
    assert ("16 bits" in "".join(checked(path).notes)) == (mode == "I;16")


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jpg", encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100))
    red, green, blue = colour(path)
    assert red > 250
    assert max(green, blue) < 6
    assert "CMYK" in checked(path).notes[0]


def test_animation_is_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour_) for colour_ in (RED, BLUE)]
    path = written(tmp_path, "a.webp", encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))
    assert colour(path) == RED
    assert "animated" in checked(path).notes[0]


def test_exif_rotation_turns_the_image_and_its_size(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn 90 degrees clockwise to show: the left half becomes the top
    path = written(tmp_path, "a.jpg", encoded(halves(40, 20), "JPEG", exif=exif, quality=100))
    image = checked(path)
    assert (image.width, image.height) == (20, 40)
    assert "EXIF" in image.notes[0]
    top, bottom = colour(path, 8, 2, (16, 32)), colour(path, 8, 29, (16, 32))
    assert top[0] > 240
    assert bottom[2] > 240


def test_notes_are_counted(tmp_path: Path) -> None:
    paths = [written(tmp_path, f"{n}.png", encoded(Image.new("RGBA", (8, 8)), "PNG")) for n in range(3)]
    assert describe_notes(check_images(paths)[0]) == "3 images with transparency (put on white), e.g. 0.png"
    assert describe_notes([]) == ""


def test_pixels_are_channels_first_in_minus_one_to_one(tmp_path: Path) -> None:
    path = written(tmp_path, "a.png", encoded(halves(16, 8), "PNG"))
    pixels = load_image(path, (16, 8))
    assert (pixels.shape, pixels.dtype) == ((3, 8, 16), torch.float32)
    assert pixels[:, 0, 0].tolist() == [1, -1, -1]
    assert pixels[:, 7, 15].tolist() == [-1, -1, 1]


def test_cover_and_centre_crop(tmp_path: Path) -> None:
    image = Image.new("RGB", (80, 20), RED)
    image.paste(GREEN, (30, 0, 50, 20))  # exactly the central square
    pixels = load_image(written(tmp_path, "a.png", encoded(image, "PNG")), (20, 20))
    assert torch.equal(pixels, torch.tensor([-1.0, 1.0, -1.0])[:, None, None].expand(3, 20, 20))


def test_crop_position_and_flip(tmp_path: Path) -> None:
    path = written(tmp_path, "a.png", encoded(halves(40, 20), "PNG"))
    left = load_image(path, (20, 20), crop=(0.0, 0.5))
    right = load_image(path, (20, 20), crop=(1.0, 0.5))
    assert left[:, 0, 0].tolist() == left[:, 0, 19].tolist() == [1, -1, -1]
    assert right[:, 0, 0].tolist() == right[:, 0, 19].tolist() == [-1, -1, 1]
    whole = load_image(path, (40, 20))
    assert torch.equal(load_image(path, (40, 20), flip=True), whole.flip(-1))
    assert not torch.equal(whole.flip(-1), whole)


def test_shrinking_averages_instead_of_skipping_pixels(tmp_path: Path) -> None:
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    pixels = load_image(written(tmp_path, "a.png", encoded(Image.fromarray(board), "PNG")), (16, 16))
    assert pixels.abs().max() < 0.1


def test_given_resized_size_is_used_and_must_cover(tmp_path: Path) -> None:
    path = written(tmp_path, "a.png", encoded(halves(40, 20), "PNG"))
    cropped = load_image(path, (16, 16), resized=(40, 20))
    assert cropped[:, 0, 0].tolist() == [1, -1, -1]
    assert cropped[:, 0, 15].tolist() == [-1, -1, 1]
    with pytest.raises(DataError):
        load_image(path, (16, 16), resized=(16, 8))


def test_image_that_vanishes_after_the_check(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_image(tmp_path / "gone.png", (8, 8))
    assert "gone.png" in caught.value.what
