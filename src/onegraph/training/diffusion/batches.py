"""Batches: the order of an epoch is a pure function of the seed and the epoch's number, so any position can be resumed exactly.

A batch never mixes sizes and is never smaller than the batch size: another shape would be another compilation. What a size lacks for whole
batches is filled up with images of that size from the start of its shuffled order; `drop_last` leaves the incomplete batch out instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from onegraph.errors import ConfigurationError, DataError, OnegraphError
from onegraph.training.diffusion.buckets import Size
from onegraph.training.diffusion.captions import vary_caption
from onegraph.training.diffusion.dataset import Dataset, Example
from onegraph.training.diffusion.images import load_image
from onegraph.training.diffusion.latents import Encoding, LatentCache
from onegraph.training.epochs import Epochs
from onegraph.training.ranks import Ranks
from onegraph.training.streams import stream

Tokenize = Callable[[list[str]], Tensor]
"""Captions -> (B, chunks, 77) int64."""

_AHEAD = 2  # batches whose images are being loaded while the model works


class Batch(TypedDict):
    """What one step trains on.

    Shapes:
        latents: (B, 4, h, w) fp32, scaled; when latents are cached
        images: (B, 3, H, W) fp32 in [-1, 1]; when they aren't
        input_ids: (B, chunks, 77) int64
        loss_weights: (B,) fp32
    """

    latents: NotRequired[Tensor]
    images: NotRequired[Tensor]
    input_ids: Tensor
    loss_weights: Tensor
    captions: list[str]
    paths: list[str]


@dataclass(frozen=True)
class Slot:
    """A place in a batch: which example, and the number that its random decisions are drawn by."""

    example: int
    draw: int


class Batches(Epochs[Batch]):
    """The batches of every epoch.

    Args:
        dataset: What to show.
        batch_size: Images in every batch of a process.
        seed: Of order, captions, flips and crops.
        tokenize: Captions to token ids.
        latents: A cache filled with ``dataset.encodings(flip=flip)``; images are loaded as they are needed when omitted.
        prior_loss_weight: Loss weight of regularisation images; the others have 1.
        flip: Mirror half of the showings.
        random_crop: Crop anywhere instead of at the centre; not with cached latents.
        drop_last: Leave out incomplete batches instead of filling them up.
        num_workers: Threads that load images when there is no cache.
        ranks: The processes of the run: each gets its part of the batches that one process would have with all their images.

    Raises:
        ConfigurationError: A batch size below 1, or random crops of cached latents.
        DataError: ``no-batch``, with ``drop_last`` no size has a whole batch; ``latents-missing``, the cache isn't filled.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        tokenize: Tokenize,
        latents: LatentCache | None = None,
        prior_loss_weight: float = 1.0,
        flip: bool = False,
        random_crop: bool = False,
        drop_last: bool = False,
        num_workers: int = 2,
        ranks: Ranks | None = None,
    ) -> None:
        _require_possible(batch_size, random_crop, latents)
        super().__init__(batch_size, ranks)
        self.dataset = dataset
        self.seed = seed
        self.drop_last = drop_last
        self._tokenize = tokenize
        self._latents = latents
        self._prior_loss_weight = prior_loss_weight
        self._flip = flip
        self._random_crop = random_crop
        self._num_workers = max(1, num_workers)
        self._by_size: dict[Size, list[Slot]] = {size: [] for size in dataset.sizes if dataset.bucket_report.counts[size]}
        self._num_showings = 0
        for number, example in enumerate(dataset.examples):
            for _ in range(example.repeats):
                self._by_size[example.placement.size].append(Slot(number, self._num_showings))
                self._num_showings += 1
        self._planned: tuple[int, list[list[Slot]]] | None = None
        if len(self) == 0:
            most = max(len(slots) for slots in self._by_size.values())
            raise DataError(
                f"no size has the {self.whole_batch_size} images of a whole batch; the fullest has {most}",
                why="Incomplete batches are dropped.",
                hint=f"--train_batch_size={max(1, most // self.ranks.count)}, or fill incomplete batches up instead of dropping them",
                code="no-batch",
            )
        missing = [e.image.path for e in dataset.encodings(flip=flip) if latents is not None and e not in latents]
        if missing:
            raise DataError(
                f"{len(missing)} latents are not in the cache, the first of {missing[0]}",
                why="Batches take every latent from the cache.",
                hint="call cache.fill(dataset.encodings(flip=...)) first, with the same flip",
                code="latents-missing",
            )

    def __len__(self) -> int:
        """Batches in one epoch, the same in every epoch."""
        whole = sum(len(slots) // self.whole_batch_size for slots in self._by_size.values())
        return whole if self.drop_last else whole + sum(len(slots) % self.whole_batch_size > 0 for slots in self._by_size.values())

    @property
    def sizes(self) -> list[Size]:
        """The (width, height) of this run's batches; every one has at least one batch an epoch."""
        return [size for size, slots in self._by_size.items() if len(slots) >= self.whole_batch_size or not self.drop_last]

    @property
    def num_filled(self) -> int:
        """Places in one epoch that are filled with an image the epoch shows anyway."""
        return 0 if self.drop_last else sum(-len(slots) % self.whole_batch_size for slots in self._by_size.values())

    @property
    def num_dropped(self) -> int:
        """Showings that each epoch leaves out because they don't fill a batch."""
        return sum(len(slots) % self.whole_batch_size for slots in self._by_size.values()) if self.drop_last else 0

    def __str__(self) -> str:
        shapes = ", ".join(f"{width}x{height}" for width, height in self.sizes)
        plural = "" if len(self.sizes) == 1 else "s"
        text = f"{len(self)} batches of {self.size_text} an epoch, {len(self.sizes)} shape{plural}: {shapes}"
        if self.num_filled:
            text += f"\n{self.num_filled} places an epoch are filled with images shown twice, so that every batch has the same shape"
        if self.num_dropped:
            text += f"\n{self.num_dropped} images an epoch, others each time, are left out because they don't fill a batch"
        return text

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch (from 0), from batch ``start`` on."""
        plan = [list(self.ranks.part(slots)) for slots in self._plan(number)[start:]]
        if self._latents is not None:
            return (self._batch(number, slots, self._cached(number, slots, self._latents)) for slots in plan)
        return self._prefetched(number, plan)

    def _plan(self, epoch: int) -> list[list[Slot]]:
        """Which examples each batch of an epoch has: a pure function of the seed and the epoch."""
        if self._planned is not None and self._planned[0] == epoch:
            return self._planned[1]
        random = stream(self.seed, "order", epoch)
        batches: list[list[Slot]] = []
        extra = self._num_showings
        for size in sorted(self._by_size):
            slots = list(self._by_size[size])
            random.shuffle(slots)
            for start in range(0, len(slots), self.whole_batch_size):
                batch = slots[start : start + self.whole_batch_size]
                lacking = self.whole_batch_size - len(batch)
                if lacking and self.drop_last:
                    break
                # A repeated image gets draws of its own: its flip, crop and caption may differ from the first showing's.
                batch += [Slot(slots[number % len(slots)].example, extra + number) for number in range(lacking)]
                extra += lacking
                batches.append(batch)
        random.shuffle(batches)
        self._planned = (epoch, batches)
        return batches

    def _flipped(self, epoch: int, slot: Slot) -> bool:
        return self._flip and stream(self.seed, "flip", epoch, slot.draw).random() < 0.5

    def _cached(self, epoch: int, slots: Sequence[Slot], latents: LatentCache) -> dict[str, Tensor]:
        examples = [self.dataset.examples[slot.example] for slot in slots]
        found = [latents.get(Encoding(e.image, e.placement, self._flipped(epoch, slot))) for e, slot in zip(examples, slots, strict=True)]
        return {"latents": torch.stack(found)}

    def _load(self, epoch: int, slot: Slot) -> Tensor:
        example: Example = self.dataset.examples[slot.example]
        crop = (0.5, 0.5)
        if self._random_crop:
            random = stream(self.seed, "crop", epoch, slot.draw)
            crop = (random.random(), random.random())
        placement, flip = example.placement, self._flipped(epoch, slot)
        return load_image(example.image.path, placement.size, resized=placement.resized, crop=crop, flip=flip)

    def _prefetched(self, epoch: int, plan: Sequence[list[Slot]]) -> Iterator[Batch]:
        remaining = iter(plan)
        waiting: deque[tuple[list[Slot], list[Future[Tensor]]]] = deque()
        pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="images")
        try:
            while True:
                for slots in islice(remaining, _AHEAD + 1 - len(waiting)):
                    waiting.append((slots, [pool.submit(self._load, epoch, slot) for slot in slots]))
                if not waiting:
                    return
                slots, loading = waiting.popleft()
                yield self._batch(epoch, slots, {"images": torch.stack([image.result() for image in loading])})
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, epoch: int, slots: Sequence[Slot], tensors: dict[str, Tensor]) -> Batch:
        examples = [self.dataset.examples[slot.example] for slot in slots]
        settings = self.dataset.caption_settings
        captions = [
            vary_caption(example.caption, settings, seed=self.seed, epoch=epoch, index=slot.draw)
            for example, slot in zip(examples, slots, strict=True)
        ]
        batch = Batch(
            input_ids=self._tokenize(captions),
            loss_weights=torch.tensor([self._prior_loss_weight if example.reg else 1.0 for example in examples]),
            captions=captions,
            paths=[str(example.image.path) for example in examples],
        )
        if "latents" in tensors:
            batch["latents"] = tensors["latents"]
        else:
            batch["images"] = tensors["images"]
        return batch


def _require_possible(batch_size: int, random_crop: bool, latents: LatentCache | None) -> None:
    problems: list[OnegraphError] = []
    if batch_size < 1:
        problems.append(ConfigurationError(f"--train_batch_size={batch_size} is below 1", hint="--train_batch_size=1", code="batch-size"))
    if random_crop and latents is not None:
        problems.append(
            ConfigurationError(
                "--random_crop with --cache_latents",
                why="A cached latent was made from one crop.",
                hint="leave out one of the two",
                code="random-crop-cached",
            )
        )
    if problems:
        raise ConfigurationError.collected(problems)
