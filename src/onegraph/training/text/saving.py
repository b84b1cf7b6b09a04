"""What a run writes: folders with an adapter in PEFT's format and in ours, and which older ones go."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from onegraph.adapters import Adapters
from onegraph.checkpoint import save
from onegraph.checkpoint.atomic import check_name, check_writable
from onegraph.checkpoint.save_peft import peft_contents
from onegraph.errors import CheckpointError, OutputError
from onegraph.training.state import RECORD as STATE_RECORD
from onegraph.training.state import write_folder
from onegraph.training.text.configuration import SavingSettings, TextConfiguration

When = Literal["step", "epoch"]
DTYPES: Mapping[str, torch.dtype] = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NATIVE_NAME = "onegraph.safetensors"
RECORD_NAME = "training.json"


class SavePlan:
    """The names and the timing of a run's folders.

    ``NAME`` at the end, ``NAME-best`` at the lowest held-out loss, ``NAME-step00000100`` after a step, ``NAME-000001`` after an epoch;
    states the same with ``-state``.

    Args:
        settings: The saving branch of the configuration.
    """

    def __init__(self, settings: SavingSettings) -> None:
        self.settings = settings
        self.folder = Path(settings.output_dir)
        self.final = self.folder / settings.output_name
        self.best = self.folder / f"{settings.output_name}-best"

    def adapter(self, when: When, number: int) -> Path:
        """The folder after optimiser step or epoch ``number`` (from 1)."""
        return self.folder / f"{self.settings.output_name}-{f'step{number:08d}' if when == 'step' else f'{number:06d}'}"

    def state(self, adapter: Path) -> Path:
        """The state beside an adapter's folder."""
        return adapter.with_name(f"{adapter.name}-state")

    def due(self, when: When, number: int) -> bool:
        """True when a folder is to be written after optimiser step or epoch ``number``."""
        every = self._every(when)
        return every is not None and number % every == 0

    def outdated(self, when: When, number: int) -> list[Path]:
        """Folders that may go once those of ``number`` are written; found by arithmetic, never by a search."""
        every, keep = self._every(when), self.settings.keep_last
        if every is None or keep is None:
            return []
        old = [self.adapter(when, past) for past in range(every, number - every * keep + 1, every)]
        return [path for adapter in old for path in (adapter, self.state(adapter)) if path.exists()]

    def check_places(self) -> None:
        """Raises OutputError now if a name of this run can't be written later: too long, or something else there."""
        check_name(self.state(self.adapter("step", 0)))
        check_writable(self.folder / "onegraph-probe")
        for adapter in (self.final, self.best, self.adapter("step", 0)):
            for folder in (adapter, self.state(adapter)):
                if folder.exists() and not folder.is_dir():
                    raise OutputError(
                        f"{folder} is a file, and a folder of this run goes there.",
                        hint="move it away, or choose another output_name",
                        code="is-a-file",
                    )
                self._require_ours(folder, RECORD_NAME if folder == adapter else STATE_RECORD)

    @staticmethod
    def _require_ours(folder: Path, record: str) -> None:
        """A folder is replaced whole: one with anything else in it has to stay."""
        try:
            ours = not folder.is_dir() or (folder / record).is_file() or not any(folder.iterdir())
        except OSError as error:
            raise OutputError(
                f"The folder {folder} can't be read: {error.strerror or error}.",
                why="This run would replace it, and what is in it can't be told.",
                hint="another output_name, or a folder of your own",
                code="not-writable",
            ) from error
        if not ours:
            raise OutputError(
                f"{folder} is there already, and no run wrote it: it has no {record}.",
                why="This run would replace the folder with all that is in it. Nothing was changed.",
                hint="another output_name, or move that folder away",
                code="folder-taken",
            )

    def _every(self, when: When) -> int | None:
        return self.settings.save_every_n_steps if when == "step" else self.settings.save_every_n_epochs


@dataclasses.dataclass(kw_only=True)
class AdapterWriter:
    """Writes the adapter as it is into a folder, whole or not at all.

    Args:
        adapters: The model's.
        configuration: Recorded beside the weights.
        seed: Recorded too.
        base: What PEFT calls ``base_model_name_or_path``.
    """

    adapters: Adapters
    configuration: TextConfiguration
    seed: int
    base: str
    peft_refusal: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        try:
            peft_contents(self.adapters, "default", self._fields)
        except CheckpointError as error:
            self.peft_refusal = error.what

    @property
    def _fields(self) -> dict[str, object]:
        return {"task_type": "CAUSAL_LM", "base_model_name_or_path": self.base, "inference_mode": True}

    def write(
        self, folder: Path, *, step: int, epoch: int, evaluations: Sequence[tuple[int, float]], ranks: Mapping[str, int] | None = None
    ) -> None:
        """Writes ``adapter_model.safetensors`` with its configuration, ``onegraph.safetensors``, and ``training.json``.

        Raises:
            OutputError: Nothing is left under that name but what was there before.
            NumericsError: Weights that are not finite.
        """
        dtype = DTYPES[self.configuration.saving.save_precision or "float"]
        record: dict[str, Any] = {
            "configuration": dataclasses.asdict(self.configuration),
            "seed": self.seed,
            "step": step,
            "epoch": epoch,
            "held_out_loss": [list(pair) for pair in evaluations],
        }
        if ranks is not None:
            record["ranks"] = dict(ranks)

        def fill(place: Path) -> None:
            if not self.peft_refusal:
                save(self.adapters, place, name="default", format="peft", dtype=dtype, metadata=self._fields)
            save(self.adapters, place / NATIVE_NAME, name="default", format="native", dtype=dtype)
            (place / RECORD_NAME).write_text(json.dumps(record, indent=2), encoding="utf-8")

        write_folder(folder, fill, what="adapter", code="output")
