"""What needs no model: output folder, state to resume, sample prompts, captions, images. All of it is checked before one is loaded."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onegraph.checkpoint.atomic import check_writable, make_folder
from onegraph.errors import DataError
from onegraph.training.diffusion.buckets import BucketSettings
from onegraph.training.diffusion.captions import CaptionSettings
from onegraph.training.diffusion.configuration import TrainingConfiguration
from onegraph.training.diffusion.dataset import Dataset, build_dataset
from onegraph.training.diffusion.folders import find_subsets
from onegraph.training.diffusion.resuming import FREEDOM
from onegraph.training.diffusion.sample_prompts import read_sample_prompts
from onegraph.training.diffusion.sampling import SamplePrompt
from onegraph.training.diffusion.saving import SavePlan
from onegraph.training.launch import Launch
from onegraph.training.resuming import resumed
from onegraph.training.state import SavedState

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Groundwork:
    """Everything that is known before the base model is loaded.

    Args:
        launch: Device, precision, compile settings.
        configuration: The settings, effective.
        seed: Given, resumed, or drawn.
        saved: The state to go on from.
        dataset: The images.
        prompts: For sample images.
        started_at: Seconds since 1970.
    """

    launch: Launch[TrainingConfiguration]
    configuration: TrainingConfiguration
    seed: int
    saved: SavedState[TrainingConfiguration] | None
    dataset: Dataset
    prompts: Sequence[SamplePrompt]
    started_at: float


def lay_groundwork(launch: Launch[TrainingConfiguration], say: Say) -> Groundwork:
    """Checks everything that needs no model: output folder, state, prompts, captions, images.

    Raises:
        OutputError: The output or log folder, or a file in it that the run will write, can't be written.
        CheckpointError, ConfigurationError: The state can't be resumed with these settings.
        DataError: Images or captions that can't be used.
    """
    with launch.ranks.together():
        ground = _lay(launch, say)
    return replace(ground, seed=launch.ranks.of_first(ground.seed))


def _lay(launch: Launch[TrainingConfiguration], say: Say) -> Groundwork:
    configuration = launch.configuration
    for note in configuration.notes:
        say(f"note: {note}")
    if launch.ranks.first:
        _check_places(configuration)
    saved = resumed(configuration, FREEDOM, say)
    prompts = read_sample_prompts(configuration.sampling.prompts) if configuration.sampling.prompts else []
    dataset = _find_images(configuration)
    say(str(dataset))
    seed = configuration.run.seed
    if seed is None:
        seed = saved.seed if saved is not None else random.SystemRandom().randrange(2**32)
    return Groundwork(
        launch=launch,
        configuration=configuration,
        seed=seed,
        saved=saved,
        dataset=dataset,
        prompts=prompts,
        started_at=time.time(),
    )


def _check_places(configuration: TrainingConfiguration) -> None:
    """Makes the folders, and finds out whether every file of the run can be written there."""
    for folder in filter(None, (configuration.saving.output_dir, configuration.logging.logging_dir)):
        make_folder(Path(folder))
        check_writable(Path(folder) / "onegraph-probe")
    SavePlan(configuration.saving, num_epochs=1).check_places()
    if configuration.sampling.prompts:
        make_folder(Path(configuration.saving.output_dir) / "sample")


def _find_images(configuration: TrainingConfiguration) -> Dataset:
    data = configuration.data
    if data.train_data_dir is None:
        raise DataError(
            "--train_data_dir is missing.", hint="--train_data_dir=DATA, the parent of the N_words folders", code="data-folder-missing"
        )
    reg = find_subsets(data.reg_data_dir, caption_extension=data.caption_extension, reg=True) if data.reg_data_dir else []
    return build_dataset(
        find_subsets(data.train_data_dir, caption_extension=data.caption_extension),
        reg,
        buckets=BucketSettings(
            resolution=data.resolution,
            enable_bucket=data.enable_bucket,
            min_bucket_reso=data.min_bucket_reso,
            max_bucket_reso=data.max_bucket_reso,
            bucket_reso_steps=data.bucket_reso_steps,
            bucket_no_upscale=data.bucket_no_upscale,
        ),
        captions=CaptionSettings(
            shuffle_caption=data.shuffle_caption,
            keep_tokens=data.keep_tokens,
            keep_tokens_separator=data.keep_tokens_separator or "",
            caption_separator=data.caption_separator,
            caption_dropout_rate=data.caption_dropout_rate,
            caption_dropout_every_n_epochs=data.caption_dropout_every_n_epochs,
            caption_tag_dropout_rate=data.caption_tag_dropout_rate,
            caption_prefix=data.caption_prefix,
            caption_suffix=data.caption_suffix,
        ),
        skip_bad=data.skip_bad_images,
    )
