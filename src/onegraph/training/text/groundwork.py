"""What needs no model: output folder, state to resume, method, rows, tokens. All of it is checked before the model is loaded."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from onegraph.checkpoint.atomic import check_writable, make_folder
from onegraph.errors import DataError
from onegraph.training.allocation import check_allocation
from onegraph.training.launch import Launch
from onegraph.training.resuming import resumed
from onegraph.training.settings import branches
from onegraph.training.state import Freedom, SavedState
from onegraph.training.streams import stream
from onegraph.training.text.attaching import method_of
from onegraph.training.text.base_model import load_tokenizer
from onegraph.training.text.configuration import TextConfiguration
from onegraph.training.text.encoding import Encoded, encode
from onegraph.training.text.records import Rows, read_rows, split_off
from onegraph.training.text.saving import SavePlan

Say = Callable[[str], None]

FREEDOM = Freedom(
    branches=frozenset({"saving", "logging", "compile"}),
    settings=frozenset({"run.resume", "run.seed", "model.path", "model.tokenizer", "model.chat_template", "data.train", "data.validation"}),
    length=frozenset({"run.max_train_steps", "run.max_train_epochs"}),
)


@dataclass(frozen=True, kw_only=True)
class Groundwork:
    """Everything that is known before the model is loaded.

    Args:
        launch: Device, precision, compile settings.
        seed: Given, resumed, or drawn.
        saved: The state to go on from.
        tokenizer: With its chat template.
        train: What is learnt.
        held_out: What is evaluated on.
        fingerprints: Which rows, as tokens.
        started_at: Seconds since 1970.
    """

    launch: Launch[TextConfiguration]
    seed: int
    saved: SavedState[TextConfiguration] | None
    tokenizer: PreTrainedTokenizerBase
    train: Encoded
    held_out: Encoded | None
    fingerprints: dict[str, str]
    started_at: float

    @property
    def configuration(self) -> TextConfiguration:
        """The settings, effective."""
        return self.launch.configuration


def lay_groundwork(launch: Launch[TextConfiguration], say: Say) -> Groundwork:
    """Checks everything that needs no model.

    Raises:
        OutputError: The output or log folder, or a folder in it that the run will write, can't be written.
        CheckpointError, ConfigurationError: The state can't be resumed with these settings; the method is none.
        DataError: Rows that can't be used.
        ModelFileError: The tokenizer can't be read.
    """
    seed = launch.ranks.of_first(random.SystemRandom().randrange(2**32))
    with launch.ranks.together():
        return _lay(launch, say, seed)


def _lay(launch: Launch[TextConfiguration], say: Say, drawn_seed: int) -> Groundwork:
    configuration = launch.configuration
    check_allocation(configuration.allocation, method_of(configuration.method, launch.label), configuration.run.max_train_steps)
    if launch.ranks.first:
        for folder in filter(None, (configuration.saving.output_dir, configuration.logging.logging_dir)):
            make_folder(Path(folder))
            check_writable(Path(folder) / "onegraph-probe")
        SavePlan(configuration.saving).check_places()
    saved = resumed(configuration, FREEDOM, say)
    seed = configuration.run.seed
    if seed is None:
        seed = saved.seed if saved is not None else drawn_seed
    data = configuration.data
    rows = read_rows(data.train, launch.label("data.train"))
    records, held_out = rows.records, read_rows(data.validation, launch.label("data.validation")).records if data.validation else []
    if data.validation_share:
        records, held_out = split_off(rows.records, _drawn(rows, data.validation_share, seed))
    tokenizer = load_tokenizer(configuration.model)
    train = encode(records, tokenizer, data)
    say(f"rows: {train}")
    held_out_tokens = encode(held_out, tokenizer, data) if held_out else None
    if held_out_tokens is not None:
        say(f"held out: {held_out_tokens}")
    fingerprints = {"data set": _digest(train), "held-out data": _digest(held_out_tokens) if held_out_tokens is not None else ""}
    return Groundwork(
        launch=launch,
        seed=seed,
        saved=saved,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out_tokens,
        fingerprints=fingerprints,
        started_at=time.time(),
    )


def settings_record(ground: Groundwork) -> dict[str, object]:
    """Every setting by its path, for the curves."""
    return dict(branches(ground.configuration)) | {"run.seed": ground.seed}


def _drawn(rows: Rows, share: float, seed: int) -> list[int]:
    """Which rows are held out: at least one, and not all."""
    count = max(1, round(share * len(rows.records)))
    if count >= len(rows.records):
        raise DataError(
            f"validation_share={share} of {len(rows.records)} rows leaves nothing to learn.",
            hint="more rows, or a smaller share",
            code="nothing-to-learn",
        )
    return stream(seed, "held out").sample(range(len(rows.records)), count)


def _digest(encoded: Encoded) -> str:
    """Which tokens with which losses: what a resumed run must see again."""
    digest = hashlib.sha256()
    for document in encoded.documents:
        digest.update(len(document).to_bytes(8, "little") + document.ids.tobytes() + document.trained.tobytes())
    return digest.hexdigest()
