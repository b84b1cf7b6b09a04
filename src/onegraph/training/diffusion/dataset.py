"""The data set: images that decode, with their captions, sizes and repeats, before any model is loaded."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from onegraph.errors import DataError
from onegraph.training.diffusion.buckets import BucketReport, BucketSettings, Placement, Size, place_images
from onegraph.training.diffusion.captions import CaptionSettings, read_captions
from onegraph.training.diffusion.folders import DataWarning, FolderReport, Subset
from onegraph.training.diffusion.images import BadImage, CheckedImage, Progress, check_images, describe_notes
from onegraph.training.diffusion.latents import Encoding
from onegraph.training.diffusion.metadata import FolderFacts


@dataclass(frozen=True)
class Example:
    """One image as it is trained.

    Args:
        image: The file.
        caption: As read, before anything that varies between epochs.
        placement: Its training size.
        repeats: How often one epoch shows it; for regularisation images after balancing.
        reg: Whether it is a regularisation image.
    """

    image: CheckedImage
    caption: str
    placement: Placement
    repeats: int
    reg: bool


@dataclass(frozen=True)
class Dataset:
    """Everything that one epoch shows; prints as a report.

    Args:
        examples: Training images, then regularisation images, each in the order of their folders.
        subsets: The folders, without the bad images.
        captions: The captions of each folder.
        bad: Images left out because they can't be read.
        buckets: How sizes were chosen.
        caption_settings: How captions vary.
    """

    examples: tuple[Example, ...]
    subsets: tuple[Subset, ...]
    captions: tuple[tuple[str, ...], ...]
    bad: tuple[BadImage, ...]
    buckets: BucketSettings
    caption_settings: CaptionSettings

    @property
    def num_train_images(self) -> int:
        """Training images with their repeats, as ``ss_num_train_images`` counts."""
        return sum(len(subset.images) * subset.repeats for subset in self.subsets if not subset.reg)

    @property
    def num_reg_images(self) -> int:
        """Regularisation images with the repeats of their folders, as ``ss_num_reg_images`` counts: before balancing."""
        return sum(len(subset.images) * subset.repeats for subset in self.subsets if subset.reg)

    @cached_property
    def bucket_report(self) -> BucketReport:
        """How many showings each training size has in one epoch."""
        examples = self.examples
        return BucketReport.of([e.image for e in examples], [e.placement for e in examples], [e.repeats for e in examples])

    @property
    def sizes(self) -> list[Size]:
        """The (width, height) that batches can have: all shapes of the whole run, known before its first step."""
        return list(self.bucket_report.counts)

    @property
    def folder_facts(self) -> list[FolderFacts]:
        """The folders as a network file's metadata describes them."""
        return [
            FolderFacts(
                name=subset.folder.name,
                num_repeats=subset.repeats,
                num_images=len(subset.images),
                captions=captions,
                regularisation=subset.reg,
            )
            for subset, captions in zip(self.subsets, self.captions, strict=True)
        ]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what is shown: contents, captions, sizes and repeats. Equal data in another place has the same."""
        digest = hashlib.sha256(repr(sorted(asdict(self.caption_settings).items())).encode())
        for example in self.examples:
            digest.update(repr((example.image.content, example.caption, example.placement, example.repeats, example.reg)).encode())
        return digest.hexdigest()

    def encodings(self, *, flip: bool = False) -> list[Encoding]:
        """Every latent that training needs, mirrored ones too when images are flipped."""
        sides = (False, True) if flip else (False,)
        return [Encoding(e.image, e.placement, side) for e in self.examples if e.repeats for side in sides]

    def __str__(self) -> str:
        parts = [str(FolderReport(self.subsets))]
        reg = sum(example.repeats for example in self.examples if example.reg)
        total = f"{self.num_train_images} training images an epoch, with repeats"
        parts.append(total + (f", and {reg} regularisation images to match" if reg else ""))
        if self.buckets.enable_bucket:
            parts.append(str(self.bucket_report))
        if notes := describe_notes([example.image for example in self.examples]):
            parts.append(notes)
        if empty := sum(not caption for captions in self.captions for caption in captions):
            parts.append(f"{empty} images with an empty caption")
        if self.bad:
            parts.append(
                "\n".join([f"{len(self.bad)} bad images skipped:", *(f"  {image.path}: {image.reason}" for image in self.bad[:20])])
            )
        return "\n".join(parts)


def build_dataset(
    subsets: Sequence[Subset],
    reg_subsets: Sequence[Subset] = (),
    *,
    buckets: BucketSettings,
    captions: CaptionSettings | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Read every caption, decode every image, choose every size. Needs no model, so bad data is found before one is loaded.

    Args:
        subsets: Folders of training images.
        reg_subsets: Folders of regularisation images; one epoch shows as many of them as of training images.
        buckets: How sizes are chosen.
        captions: How captions vary.
        skip_bad: Go on without images that can't be read.
        progress: Told how many images are checked.

    Raises:
        DataError: Captions that aren't UTF-8, images that can't be read or fit no bucket, no training image left.
    """
    folders = [*subsets, *reg_subsets]
    read_captions(folders)  # before the slow part: a wrong encoding is found in a moment
    good, bad = check_images([path for folder in folders for path in folder.images], skip_bad, progress=progress)
    if bad:
        unusable = {image.path for image in bad}
        folders = [folder.without(unusable) for folder in folders]
    texts = read_captions(folders)
    num_train = sum(len(folder.images) * folder.repeats for folder in folders[: len(subsets)])
    if num_train == 0:
        raise DataError(
            "no training image is left",
            why=f"{len(bad)} bad images were skipped.",
            hint="repair the images, or leave out --skip_bad_images to see what is wrong with each",
            code="data-folder-empty",
        )
    placements = place_images(good, buckets)
    reg_repeats = iter(_balanced([folder.repeats for folder in folders[len(subsets) :] for _ in folder.images], num_train))
    remaining = iter(zip(good, placements, strict=True))
    examples: list[Example] = []
    for number, (folder, captions_of_folder) in enumerate(zip(folders, texts, strict=True)):
        reg = number >= len(subsets)
        for caption in captions_of_folder:
            image, placement = next(remaining)
            examples.append(Example(image, caption, placement, next(reg_repeats) if reg else folder.repeats, reg))
    unused = sum(example.repeats == 0 for example in examples)
    if unused:
        warnings.warn(
            f"{unused} regularisation images are not used: an epoch shows as many as training images with repeats ({num_train})",
            DataWarning,
            stacklevel=2,
        )
    return Dataset(
        tuple(examples), tuple(folders), tuple(tuple(text) for text in texts), tuple(bad), buckets, captions or CaptionSettings()
    )


def _balanced(repeats: Sequence[int], num_train: int) -> list[int]:
    """Repeats of regularisation images so that together they are as many as the training images.

    Images come in order with the repeats of their folder until there are enough; if there aren't, each gets one more in turn. The last
    image of the first round may bring a few too many, as in sd-scripts.
    """
    balanced = [0] * len(repeats)
    total = 0
    for index, times in enumerate(repeats):
        if total >= num_train:
            break
        balanced[index] = times
        total += times
    index = 0
    while repeats and total < num_train:
        balanced[index % len(repeats)] += 1
        index, total = index + 1, total + 1
    return balanced
