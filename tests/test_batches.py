"""Batches of one shape, the same whenever and wherever an epoch is begun."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from onegraph.errors import ConfigurationError, DataError
from onegraph.training.diffusion.batches import Batch, Batches
from onegraph.training.diffusion.buckets import BucketSettings
from onegraph.training.diffusion.captions import CaptionSettings
from onegraph.training.diffusion.dataset import Dataset, build_dataset
from onegraph.training.diffusion.folders import DataWarning, find_subsets
from onegraph.training.diffusion.images import load_image
from onegraph.training.diffusion.latents import LatentCache

BUCKETS = BucketSettings(resolution=(32, 32), enable_bucket=True, min_bucket_reso=16, max_bucket_reso=64, bucket_reso_steps=16)
SHUFFLED = CaptionSettings(shuffle_caption=True, caption_dropout_rate=0.1)


class TinyVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 8, stride=8)

    def encode(self, images: Tensor) -> SimpleNamespace:
        mean, logarithm = self.convolution(images).chunk(2, 1)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean, std=logarithm.exp()))


def tokenize(captions: list[str]) -> Tensor:
    rows = [(list(caption.encode()) + [0] * 77)[:77] for caption in captions]
    return torch.tensor(rows, dtype=torch.int64)[:, None, :]


def write_folders(parent: Path, folders: Mapping[str, list[tuple[int, int]]]) -> Path:
    """Folders of images of the given sizes, each image in a colour of its own."""
    draw = random.Random(str(sorted(folders)))
    for name, sizes in folders.items():
        (parent / name).mkdir(parents=True)
        for number, size in enumerate(sizes):
            Image.new("RGB", size, tuple(draw.randrange(256) for _ in range(3))).save(parent / name / f"{number}.png")
            (parent / name / f"{number}.caption").write_text(f"{name}, {number}, some, more, tags")
    return parent


def dataset_of(parent: Path, folders: Mapping[str, list[tuple[int, int]]], **options: object) -> Dataset:
    subsets = find_subsets(write_folders(parent, folders))
    return build_dataset(subsets, **({"buckets": BUCKETS, "captions": SHUFFLED} | options))  # type: ignore[arg-type]


def batches_of(dataset: Dataset, *, cached: bool = False, **options: object) -> Batches:
    settings = {"batch_size": 4, "seed": 7, "tokenize": tokenize} | options
    if cached:
        cache = LatentCache(TinyVAE(), 0.5, batch_size=3, seed=7)
        cache.fill(dataset.encodings(flip=bool(options.get("flip"))))
        settings["latents"] = cache
    return Batches(dataset, **settings)  # type: ignore[arg-type]


def same(left: Batch, right: Batch) -> bool:
    """Equal keys, lists and bits."""
    if left.keys() != right.keys() or left["captions"] != right["captions"] or left["paths"] != right["paths"]:
        return False
    return all(torch.equal(value, right[key]) for key, value in left.items() if isinstance(value, Tensor))  # type: ignore[literal-required]


MIXED = {"3_cat": [(32, 32)] * 3 + [(64, 16)] * 2, "1_dog": [(16, 64), (40, 40)]}


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return dataset_of(tmp_path / "data", MIXED)


@pytest.mark.parametrize("cached", [True, False], ids=["latents", "images"])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 7])
def test_every_batch_has_the_batch_size_and_one_size(dataset: Dataset, batch_size: int, cached: bool) -> None:
    batches = batches_of(dataset, cached=cached, batch_size=batch_size)
    key, channels, factor = ("latents", 4, 8) if cached else ("images", 3, 1)
    shapes = set()
    epoch = list(batches.epoch(0))
    assert len(epoch) == len(batches)
    for batch in epoch:
        values: Tensor = batch[key]  # type: ignore[literal-required]
        assert values.shape[:2] == (batch_size, channels)
        assert values.dtype == torch.float32
        assert batch["input_ids"].shape == (batch_size, 1, 77)
        assert batch["loss_weights"].tolist() == [1.0] * batch_size
        assert len(batch["captions"]) == len(batch["paths"]) == batch_size
        assert ("images" in batch) != ("latents" in batch)
        shapes.add((values.shape[3] * factor, values.shape[2] * factor))
    assert shapes == set(batches.sizes) == {(32, 32), (64, 16), (16, 64)}


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7])
def test_an_epoch_shows_each_image_as_often_as_it_repeats_and_only_fillers_more(dataset: Dataset, batch_size: int) -> None:
    batches = batches_of(dataset, batch_size=batch_size)
    expected = Counter({str(example.image.path): example.repeats for example in dataset.examples})
    for epoch in range(3):
        shown = Counter(path for batch in batches.epoch(epoch) for path in batch["paths"])
        assert not expected - shown, "an image is missing"
        assert (shown - expected).total() == batches.num_filled
        assert shown.total() == len(batches) * batch_size
    assert dataset.num_train_images == 17
    # 3 x 3 + 1 squares, 3 x 2 wide ones, 1 tall one
    assert batches.num_filled == sum(-count % batch_size for count in (10, 6, 1))


def test_fillers_come_from_the_start_of_the_shuffled_order_and_draw_anew(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, {"1_x": [(32, 32)] * 3}, captions=CaptionSettings(shuffle_caption=True))
    batches = batches_of(dataset, batch_size=8)
    (batch,) = batches.epoch(0)
    assert batch["paths"] == (batch["paths"][:3] * 3)[:8]
    assert len(set(batch["captions"])) > 6  # as many as there would be if all fillers drew alike


def test_drop_last_leaves_out_others_each_epoch(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, {"1_x": [(32, 32)] * 7})
    batches = batches_of(dataset, batch_size=4, drop_last=True)
    assert (len(batches), batches.num_filled, batches.num_dropped) == (1, 0, 3)
    shown = [{path for batch in batches.epoch(epoch) for path in batch["paths"]} for epoch in range(8)]
    assert all(len(paths) == 4 for paths in shown)
    assert len(set().union(*shown)) == 7
    assert "3 images an epoch" in str(batches)


def test_drop_last_without_a_whole_batch(dataset: Dataset) -> None:
    with pytest.raises(DataError) as caught:
        batches_of(dataset, batch_size=11, drop_last=True)
    assert caught.value.code == "no-batch"
    assert "--train_batch_size=10" in caught.value.hint
    assert batches_of(dataset, batch_size=10, drop_last=True).sizes == [(32, 32)]


@pytest.mark.parametrize("cached", [True, False], ids=["latents", "images"])
def test_any_position_can_be_resumed_bit_for_bit(dataset: Dataset, cached: bool) -> None:
    options = {"flip": True, "batch_size": 2, "random_crop": not cached}
    whole = list(islice(batches_of(dataset, cached=cached, **options).forever(), 25))
    count = len(batches_of(dataset, cached=cached, **options))
    assert [(epoch, number) for epoch, number, _ in whole] == [(step // count, step % count) for step in range(25)]
    for start in (0, 1, 5, count - 1, count, 2 * count + 3):
        fresh = batches_of(dataset, cached=cached, **options)
        resumed = islice(fresh.forever(start // count, start % count), 25 - start)
        for (epoch, number, batch), (its_epoch, its_number, its_batch) in zip(whole[start:], resumed, strict=True):
            assert (epoch, number) == (its_epoch, its_number)
            assert same(batch, its_batch)
    assert not same(whole[0][2], whole[1][2])  # the comparison can fail


def test_epochs_and_seeds_differ(dataset: Dataset) -> None:
    def order(seed: int, epoch: int) -> list[str]:
        return [path for batch in batches_of(dataset, seed=seed).epoch(epoch) for path in batch["paths"]]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(1, 1) != order(2, 0)


def test_sizes_come_in_any_order(dataset: Dataset) -> None:
    batches = batches_of(dataset, batch_size=1)
    orders = {tuple(tuple(batch["images"].shape) for batch in batches.epoch(epoch)) for epoch in range(5)}
    assert len(orders) == 5
    assert all(list(order) != sorted(order) for order in orders)


def test_number_of_workers_changes_nothing(dataset: Dataset) -> None:
    one = list(batches_of(dataset, num_workers=1, flip=True, random_crop=True).epoch(3))
    many = list(batches_of(dataset, num_workers=8, flip=True, random_crop=True).epoch(3))
    assert all(same(left, right) for left, right in zip(one, many, strict=True))


def test_leaving_an_epoch_early_ends_its_threads(dataset: Dataset) -> None:
    before = threading.active_count()
    epoch = batches_of(dataset, batch_size=1, num_workers=4).epoch(0)
    next(epoch)
    assert threading.active_count() > before
    epoch.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_image_that_vanishes_during_training_is_named(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, {"1_x": [(32, 32)] * 3})
    dataset.examples[1].image.path.unlink()
    with pytest.raises(DataError) as caught:
        list(batches_of(dataset, batch_size=1).epoch(0))
    assert "1.png" in caught.value.what


def test_uncached_images_are_those_of_load_image(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, {"1_x": [(50, 30)] * 3})
    for batch in batches_of(dataset, batch_size=3).epoch(0):
        for path, image in zip(batch["paths"], batch["images"], strict=True):
            (example,) = [e for e in dataset.examples if str(e.image.path) == path]
            assert torch.equal(image, load_image(Path(path), example.placement.size))


def test_flip_mirrors_about_half_in_images_and_latents_alike(tmp_path: Path) -> None:
    parent = tmp_path / "data" / "40_x"
    parent.mkdir(parents=True)
    image = Image.new("RGB", (32, 32), "black")
    image.paste((255, 255, 255), (0, 0, 16, 32))
    image.save(parent / "a.png")
    dataset = build_dataset(find_subsets(tmp_path / "data"), buckets=BUCKETS)
    batches, cached = batches_of(dataset, flip=True), batches_of(dataset, flip=True, cached=True)
    images = torch.cat([batch["images"] for batch in batches.epoch(0)])
    mirrored = images[:, 0, 0, 0] < 0
    assert 10 <= int(mirrored.sum()) <= 30
    latents = torch.cat([batch["latents"] for batch in cached.epoch(0)])
    kinds = [{tuple(latent.flatten().tolist()) for latent in latents[mirrored == flag]} for flag in (False, True)]
    assert len(kinds[0]) == len(kinds[1]) == 1
    assert kinds[0] != kinds[1]
    assert batches_of(dataset).dataset.encodings() != dataset.encodings(flip=True)
    still = torch.cat([batch["images"] for batch in batches_of(dataset).epoch(0)])
    assert not (still[:, 0, 0, 0] < 0).any()


def test_random_crop_moves_and_stays_a_crop(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, {"30_x": [(100, 32)]}, buckets=BucketSettings(resolution=(32, 32)))
    ramp = Image.linear_gradient("L").transpose(Image.Transpose.ROTATE_90).resize((100, 32))
    ramp.convert("RGB").save(dataset.examples[0].image.path)
    images = torch.cat([batch["images"] for batch in batches_of(dataset, random_crop=True).epoch(0)])
    assert len({round(float(value), 3) for value in images[:, 0, 0, 0]}) > 10
    centred = torch.cat([batch["images"] for batch in batches_of(dataset).epoch(0)])
    assert len({round(float(value), 3) for value in centred[:, 0, 0, 0]}) == 1


def reg_counts(tmp_path: Path, train: Mapping[str, list[tuple[int, int]]], reg: Mapping[str, list[tuple[int, int]]]) -> list[int]:
    train_subsets = find_subsets(write_folders(tmp_path / "train", train))
    reg_subsets = find_subsets(write_folders(tmp_path / "reg", reg), reg=True)
    dataset = build_dataset(train_subsets, reg_subsets, buckets=BUCKETS)
    return [example.repeats for example in dataset.examples if example.reg]


@pytest.mark.parametrize(
    ("reg", "expected"),
    [
        ({"1_r": 3}, [4, 3, 3]),
        ({"2_r": 3}, [4, 3, 3]),
        ({"1_r": 2, "3_s": 2}, [2, 2, 3, 3]),
        ({"4_r": 2, "5_s": 1}, [4, 4, 5]),
        ({"10_r": 1}, [10]),
    ],
    ids=["one-repeat", "two-repeats", "two-folders", "last-one-overshoots", "exact"],
)
def test_regularisation_images_are_cycled_until_they_match(tmp_path: Path, reg: dict[str, int], expected: list[int]) -> None:
    assert reg_counts(tmp_path, {"5_x": [(32, 32)] * 2}, {name: [(32, 32)] * count for name, count in reg.items()}) == expected


def test_too_many_regularisation_images_are_told(tmp_path: Path) -> None:
    with pytest.warns(DataWarning, match="2 regularisation images are not used"):
        assert reg_counts(tmp_path, {"1_x": [(32, 32)] * 2}, {"1_r": [(32, 32)] * 4}) == [1, 1, 0, 0]


def test_prior_loss_weight_goes_to_regularisation_images_only(tmp_path: Path) -> None:
    train = find_subsets(write_folders(tmp_path / "train", {"2_x": [(32, 32)] * 3}))
    reg = find_subsets(write_folders(tmp_path / "reg", {"1_r": [(32, 32)] * 2}), reg=True)
    dataset = build_dataset(train, reg, buckets=BUCKETS)
    assert (dataset.num_train_images, dataset.num_reg_images) == (6, 2)
    seen: Counter[tuple[bool, float]] = Counter()
    for batch in batches_of(dataset, prior_loss_weight=0.25, batch_size=3).epoch(0):
        seen.update(("/reg/" in path, weight) for path, weight in zip(batch["paths"], batch["loss_weights"].tolist(), strict=True))
    assert seen == {(False, 1.0): 6, (True, 0.25): 6}


def test_captions_reach_the_tokenizer_as_they_are_returned(dataset: Dataset) -> None:
    for batch in batches_of(dataset).epoch(0):
        assert torch.equal(batch["input_ids"], tokenize(batch["captions"]))
    texts = {caption for epoch in range(4) for batch in batches_of(dataset).epoch(epoch) for caption in batch["captions"]}
    assert "" in texts
    assert len(texts) > 20


def test_epoch_arithmetic(tmp_path: Path) -> None:
    batches = batches_of(dataset_of(tmp_path, {"10_x": [(32, 32)]}), batch_size=1)
    assert len(batches) == 10
    assert [batches.steps_per_epoch(accumulation) for accumulation in (1, 2, 3, 10, 11)] == [10, 5, 4, 1, 1]
    assert [batches.num_epochs(steps, 3) for steps in (1, 4, 5, 1600)] == [1, 1, 2, 400]


@pytest.mark.parametrize(
    ("options", "code"),
    [({"batch_size": 0}, "batch-size"), ({"random_crop": True, "cached": True}, "random-crop-cached")],
    ids=["batch-size", "random-crop-cached"],
)
def test_settings_that_cannot_be_honoured(dataset: Dataset, options: dict[str, object], code: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        batches_of(dataset, **options)  # type: ignore[arg-type]
    assert caught.value.code == code


def test_cache_without_the_mirrored_latents_is_refused(dataset: Dataset) -> None:
    cache = LatentCache(TinyVAE(), 1.0)
    cache.fill(dataset.encodings())
    with pytest.raises(DataError) as caught:
        Batches(dataset, batch_size=1, seed=1, tokenize=tokenize, latents=cache, flip=True)
    assert caught.value.code == "latents-missing"


def test_bad_images_are_skipped_counted_and_reported(tmp_path: Path) -> None:
    write_folders(tmp_path, {"2_x": [(32, 32)] * 3})
    (tmp_path / "2_x" / "1.png").write_bytes(b"<html>")
    subsets = find_subsets(tmp_path)
    with pytest.raises(DataError) as caught:
        build_dataset(subsets, buckets=BUCKETS)
    assert caught.value.code == "image-unreadable"
    dataset = build_dataset(subsets, buckets=BUCKETS, skip_bad=True)
    assert [example.caption[:6] for example in dataset.examples] == ["2_x, 0", "2_x, 2"]
    assert dataset.num_train_images == 4
    assert "1 bad images skipped" in str(dataset)
    assert "1.png" in str(dataset)


def test_only_regularisation_images_left(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", {"1_x": [(32, 32)]})
    (tmp_path / "train" / "1_x" / "0.png").write_bytes(b"")
    reg = find_subsets(write_folders(tmp_path / "reg", {"1_r": [(32, 32)]}), reg=True)
    with pytest.raises(DataError) as caught:
        build_dataset(find_subsets(tmp_path / "train"), reg, buckets=BUCKETS, skip_bad=True)
    assert "no training image is left" in caught.value.what


def test_fingerprint_tells_changed_data_from_moved_data(tmp_path: Path) -> None:
    folders = {"2_x": [(32, 32)] * 2}
    first = dataset_of(tmp_path / "a", folders)
    moved = dataset_of(tmp_path / "b", folders)
    assert first.fingerprint == moved.fingerprint
    (tmp_path / "b" / "2_x").rename(tmp_path / "b" / "3_x")
    assert build_dataset(find_subsets(tmp_path / "b"), buckets=BUCKETS, captions=SHUFFLED).fingerprint != first.fingerprint
    (tmp_path / "b" / "3_x").rename(tmp_path / "b" / "2_x")
    assert build_dataset(find_subsets(tmp_path / "b"), buckets=BUCKETS, captions=SHUFFLED).fingerprint == first.fingerprint
    (tmp_path / "b" / "2_x" / "1.caption").write_text("another")
    assert build_dataset(find_subsets(tmp_path / "b"), buckets=BUCKETS, captions=SHUFFLED).fingerprint != first.fingerprint
    assert build_dataset(find_subsets(tmp_path / "a"), buckets=BUCKETS).fingerprint != first.fingerprint


def test_images_of_the_demo_are_a_data_folder() -> None:
    dataset = build_dataset(find_subsets(Path(__file__).parent.parent / "demo" / "images"), buckets=BucketSettings(resolution=(128, 128)))
    assert len(dataset.examples) > 50
    assert all(example.caption.startswith("a flat emoji of ") for example in dataset.examples)
    batch = next(batches_of(dataset).epoch(0))
    assert batch["images"].shape == (4, 3, 128, 128)
    assert batch["images"].mean() > 0  # drawn on white


def test_report_and_facts_for_the_metadata(dataset: Dataset) -> None:
    text = str(dataset)
    assert "17 training images an epoch" in text
    assert "64x16" in text
    facts = {fact.name: (fact.num_repeats, fact.num_images, fact.regularisation) for fact in dataset.folder_facts}
    assert facts == {"1_dog": (1, 2, False), "3_cat": (3, 5, False)}
    assert dataset.folder_facts[0].captions[0] == "1_dog, 0, some, more, tags"
    assert dataset.bucket_report.counts == {(16, 64): 1, (32, 32): 10, (64, 16): 6}
