"""Training sizes: one for all, or buckets of nearest aspect."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from onegraph.errors import ConfigurationError, DataError
from onegraph.training.diffusion.buckets import BucketReport, BucketSettings, parse_resolution, place_images
from onegraph.training.diffusion.images import CheckedImage


def image(width: int, height: int) -> CheckedImage:
    return CheckedImage(Path(f"{width}x{height}.png"), width, height, "")


def buckets(resolution: tuple[int, int] = (512, 512), **options: object) -> BucketSettings:
    return BucketSettings(resolution=resolution, enable_bucket=True, **options)  # type: ignore[arg-type]


def refused(**options: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        BucketSettings(**options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("512", (512, 512)),
        ("512,768", (512, 768)),
        (" 512 , 768 ", (512, 768)),
        ("512x768", (512, 768)),
        (64, (64, 64)),
        ((64, 8), (64, 8)),
    ],
    ids=str,
)
def test_resolution_is_width_and_height(value: str | int | tuple[int, int], expected: tuple[int, int]) -> None:
    assert parse_resolution(value) == expected


@pytest.mark.parametrize("value", ["", "big", "512,", "512,512,512", "-512", "512.5", "5 12", (), (1, 2, 3)], ids=str)
def test_what_is_no_resolution(value: str | tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_resolution(value)
    assert caught.value.code == "resolution"
    assert "--resolution=512,768" in caught.value.hint


@pytest.mark.parametrize(
    ("value", "valid"),
    [("500", ["496,496", "504,504"]), ("512,770", ["512,768", "512,776"]), ("4", ["8,8"]), ("0", ["8,8"])],
    ids=["square", "one-side", "tiny", "zero"],
)
def test_resolution_not_divisible_by_8_names_the_nearest(value: str, valid: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_resolution(value)
    assert caught.value.hint == " or ".join(f"--resolution={near}" for near in valid)


def test_without_buckets_there_is_one_size() -> None:
    settings = BucketSettings(resolution=(128, 64))
    assert settings.sizes() == [(128, 64)]
    placement = settings.place(300, 300)
    assert (placement.size, placement.resized) == ((128, 64), (128, 128))
    assert settings.place(10, 10).resized == (128, 128)


def test_predefined_buckets_of_512() -> None:
    # Worked out by hand: for each width in steps of 64 the tallest height in steps of 64 with at most 512 * 512 pixels; both ways round.
    tall = [(256, 832), (256, 896), (256, 960), (256, 1024), (320, 704), (320, 768), (384, 640), (448, 576)]
    assert buckets().sizes() == sorted([*tall, (512, 512), *((height, width) for width, height in tall)])


@pytest.mark.parametrize(
    ("resolution", "options"),
    [((512, 512), {}), ((768, 512), {}), ((512, 512), {"bucket_reso_steps": 8}), ((128, 128), {"min_bucket_reso": 64}), ((520, 520), {})],
    ids=["square", "wide", "fine", "small", "odd"],
)
def test_predefined_buckets_keep_the_rule(resolution: tuple[int, int], options: dict[str, int]) -> None:
    settings = buckets(resolution, **options)
    sizes = settings.sizes()
    steps = settings.bucket_reso_steps
    assert len(sizes) == len(set(sizes)) > 1
    for width, height in sizes:
        assert width % steps == height % steps == 0
        assert width * height <= resolution[0] * resolution[1]
        assert settings.min_bucket_reso <= min(width, height)
        assert max(width, height) <= settings.max_bucket_reso
        assert (height, width) in sizes
        # No bucket could be one step taller: the rule is about the largest area, not any area.
        if height < settings.max_bucket_reso and (width, height + steps) not in sizes:
            assert width * (height + steps) > resolution[0] * resolution[1]


def test_image_goes_to_the_nearest_aspect_and_is_covered() -> None:
    settings = buckets()
    sizes = settings.sizes()
    draw = random.Random(0)
    for _ in range(300):
        width, height = draw.randint(50, 3000), draw.randint(50, 3000)
        placement = settings.place(width, height)
        nearest = min(abs(w / h - width / height) for w, h in sizes)
        assert abs(placement.size[0] / placement.size[1] - width / height) == nearest
        assert placement.resized[0] >= placement.size[0]
        assert placement.resized[1] >= placement.size[1]
        # It fits one side exactly, so no more than needed is cut away.
        assert placement.resized[0] == placement.size[0] or placement.resized[1] == placement.size[1]


def test_image_of_a_buckets_size_stays_as_it_is() -> None:
    settings = buckets(bucket_reso_steps=64, min_bucket_reso=128)
    for size in settings.sizes():
        assert settings.place(*size).size == size
        assert settings.place(*size).resized == size


def test_no_upscale_crops_small_images_to_whole_steps() -> None:
    placement = buckets(bucket_no_upscale=True).place(300, 210)
    assert (placement.resized, placement.size) == ((300, 210), (256, 192))


def test_no_upscale_never_enlarges_and_keeps_the_area() -> None:
    settings = buckets(bucket_no_upscale=True)
    draw = random.Random(1)
    for _ in range(300):
        width, height = draw.randint(100, 2000), draw.randint(100, 2000)
        placement = settings.place(width, height)
        assert placement.resized[0] <= width + 1
        assert placement.resized[1] <= height + 1
        assert placement.size[0] <= placement.resized[0]
        assert placement.size[1] <= placement.resized[1]
        assert placement.size[0] % 64 == placement.size[1] % 64 == 0
        aspect = placement.resized[0] / placement.resized[1] / (width / height)
        assert 0.98 < aspect < 1.02


def test_no_upscale_names_every_image_that_is_too_small() -> None:
    images = [image(300, 300), image(60, 300), image(300, 20)]
    with pytest.raises(DataError) as caught:
        place_images(images, buckets(bucket_no_upscale=True))
    error = caught.value
    assert error.code == "image-too-small"
    assert "2 images" in error.what
    assert "60x300.png" in error.why
    assert "300x20.png" in error.why
    assert "300x300" not in error.why
    assert len(place_images(images, buckets())) == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bucket_reso_steps": 12}, "--bucket_reso_steps=16"),
        ({"bucket_reso_steps": 0}, "--bucket_reso_steps=8"),
        ({"min_bucket_reso": 300}, "--min_bucket_reso=256"),
        ({"max_bucket_reso": 1000}, "--max_bucket_reso=1024"),
        ({"resolution": (128, 128)}, "--min_bucket_reso=64"),
        ({"resolution": (2048, 2048)}, "--max_bucket_reso=2048"),
        ({"resolution": (500, 512)}, "--resolution=496,512 or --resolution=504,512"),
    ],
    ids=["steps", "no-steps", "minimum", "maximum", "resolution-below", "resolution-above", "resolution"],
)
def test_settings_that_cannot_be_honoured_name_what_can(options: dict[str, int], expected: str) -> None:
    all_options = {"resolution": (512, 512), "enable_bucket": True} | options
    assert expected in refused(**all_options)
    # The suggestion itself is accepted.
    for suggestion in expected.split(" or "):
        name, value = suggestion.removeprefix("--").split("=")
        numbers = parse_resolution(value) if name == "resolution" else int(value)
        extra = {"max_bucket_reso": 2048} if options.get("resolution") == (2048, 2048) else {}
        assert BucketSettings(**(all_options | extra | {name: numbers})).sizes()  # type: ignore[arg-type]


def test_all_problems_at_once() -> None:
    text = refused(resolution=(100, 512), enable_bucket=True, bucket_reso_steps=10)
    assert "--resolution=100" in text
    assert "--bucket_reso_steps=10" in text


def test_bucket_settings_do_not_matter_without_buckets() -> None:
    assert BucketSettings(resolution=(64, 64), min_bucket_reso=300, bucket_reso_steps=7).sizes() == [(64, 64)]


def test_report_and_metadata_count_repeats() -> None:
    settings = buckets()
    images = [image(500, 500), image(400, 400), image(1000, 250), image(3, 3)]
    report = BucketReport.of(images, place_images(images, settings), [3, 1, 5, 0])
    assert report.counts == {(512, 512): 4, (1024, 256): 5}
    assert report.metadata()["buckets"] == {
        "0": {"resolution": [512, 512], "count": 4},
        "1": {"resolution": [1024, 256], "count": 5},
    }
    assert report.mean_aspect_error == 0
    assert [line.split() for line in str(report).splitlines()[:3]] == [["size", "images"], ["512x512", "4"], ["1024x256", "5"]]
