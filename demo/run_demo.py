"""Trains a LoRA on the demo images under inductor, then draws the same prompts without and with it, and the loss.

Run by ``bash scripts/demo``. Arguments that are not the demo's own go to the trainer: ``bash scripts/demo --max_train_steps=50``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL.Image import Image

if TYPE_CHECKING:
    from onegraph.training.diffusion.base_model import BaseModel

DEMO = Path(__file__).resolve().parent
ROOT = DEMO.parent
MODEL = DEMO / "model" / "tiny-sd.safetensors"
IMAGES = DEMO / "images"
ACCELERATE_CONFIG = DEMO / "accelerate.yaml"

# The recipe: the one place where the demo's training is set.
RECIPE = [
    "--network_module=networks.lora",
    "--network_dim=32",
    "--network_alpha=32",
    "--network_args conv_dim=16 conv_alpha=16",
    "--network_train_unet_only",
    "--resolution=128,128",
    "--train_batch_size=8",
    "--learning_rate=1e-3",
    "--lr_scheduler=cosine",
    "--lr_warmup_steps=10",
    "--min_snr_gamma=5",
    "--max_train_steps=160",
    "--mixed_precision=no",
    "--cache_latents",
    "--seed=1",
    "--save_precision=fp16",
    "--save_model_as=safetensors",
]

SUBJECTS = {"red apple": 5, "cat face": 6, "hamburger": 7, "bear": 8}  # each with the seed it is drawn from, before and after
STYLES = {"a flat emoji of": "the training images' style", "a 3d emoji of": "the model's own style"}
SIZE = 128
NUM_SAMPLE_STEPS = 20
GUIDANCE = 4.0
LOSS_CURVE = "loss/current"

# The paragraphs of the trainer's log that tell what was compiled and how long things took.
REPORTS = ("compilation", "finished")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", help="folder for the results (default: demo-output)")
    parser.add_argument("--readme", action="store_true", help="also copy the picture to docs/images/demo.png")
    arguments, trainer_flags = parser.parse_known_args()

    missing = [path for path in (MODEL, IMAGES, ACCELERATE_CONFIG) if not path.exists()]
    if missing:
        print(f"demo: {missing[0]} isn't there.\n\nhint: it is part of the repository: git checkout -- demo", file=sys.stderr)
        return 1

    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    given = {flag.partition("=")[0] for flag in trainer_flags}
    kept = [flag.split() for flag in RECIPE if flag.split()[0].partition("=")[0] not in given]
    flags = [*itertools.chain.from_iterable(kept), *trainer_flags]
    clip_skip = next((int(flag.partition("=")[2]) for flag in flags if flag.startswith("--clip_skip=")), None)
    with ThreadPoolExecutor(1) as beside:
        before: list[Future[Drawn]] = []
        status = train(output, flags, when_it_compiles=lambda: before.append(beside.submit(draw_before, clip_skip)))
    if status != 0:
        print(f"demo: training ended with status {status}; its log is {output / 'train.log'}", file=sys.stderr)
        return status
    trained = time.monotonic()
    picture = output / "demo.png"
    draw_picture(output, picture, before[0].result(), clip_skip)
    finished = time.monotonic()
    if arguments.readme:
        target = ROOT / "docs" / "images" / "demo.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)

    print()
    for line in reports((output / "train.log").read_text(encoding="utf-8")):
        print(line)
    print()
    print(f"training took {trained - started:.0f} s with everything, the rest of the drawing {finished - trained:.0f} s")
    print(f"picture  {picture}")
    print(f"LoRA     {output / 'last.safetensors'}")
    print(f"log      {output / 'train.log'}")
    print(f"curves   {Path(sys.executable).parent / 'tensorboard'} --logdir {output / 'logs'}")
    return 0


def train(output: Path, flags: Sequence[str], *, when_it_compiles: Callable[[], object]) -> int:
    """Runs the trainer through accelerate, as a user would; what it says is shown and kept in train.log."""
    shutil.rmtree(output / "logs", ignore_errors=True)
    command = [
        shown(Path(sys.executable).parent / "accelerate"),
        "launch",
        f"--config_file={shown(ACCELERATE_CONFIG)}",
        "-m",
        "onegraph.train_network",
        f"--pretrained_model_name_or_path={shown(MODEL)}",
        f"--train_data_dir={shown(IMAGES)}",
        f"--output_dir={shown(output)}",
        f"--logging_dir={shown(output / 'logs')}",
        *flags,
    ]
    environment = dict(os.environ)
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor-cache"))
    # A second thread gains little on a model this small, and loses much where anything else runs: 1.4 against .29 seconds a step.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["HF_HUB_OFFLINE"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    print(f"demo: {' '.join(command[:5])} \\\n  " + " \\\n  ".join(command[5:]), flush=True)
    with (output / "train.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        assert process.stdout is not None
        compiles = False
        try:
            for line in process.stdout:
                if line.startswith("compil") and not compiles:
                    compiles = True
                    when_it_compiles()
                sys.stdout.write(line)
                sys.stdout.flush()
                log.write(line)
        except KeyboardInterrupt:
            # The trainer got the same signal and saves what it has.
            pass
        return process.wait()


def shown(path: Path) -> str:
    """A path as seen from the repository's folder, where the trainer is started."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def reports(log: str) -> list[str]:
    """The reports in a training log: each its first line and the indented ones below it."""
    lines: list[str] = []
    inside = False
    for line in log.splitlines():
        inside = line.startswith(REPORTS) or (inside and line.startswith("  "))
        if inside:
            lines.append(line.rstrip())
    return lines


@dataclass(frozen=True)
class Drawn:
    """The base model, and what it drew."""

    base: BaseModel
    images: list[Image]


def draw(base: BaseModel, clip_skip: int | None) -> list[Image]:
    """Every subject in every style, always from the same seeds."""
    from onegraph.training.diffusion.sampling import SamplePrompt, sample

    prompts = [SamplePrompt(prompt=f"{style} {subject}", seed=seed) for style in STYLES for subject, seed in SUBJECTS.items()]
    return sample(base, prompts, width=SIZE, height=SIZE, steps=NUM_SAMPLE_STEPS, guidance=GUIDANCE, clip_skip=clip_skip)


def draw_before(clip_skip: int | None) -> Drawn:
    """What the base model draws; done on the other core while the trainer compiles."""
    import torch

    from onegraph.training.diffusion.base_model import load_base_model

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels that nothing here needs
    torch.set_num_threads(1)
    base = load_base_model(MODEL)
    return Drawn(base, draw(base, clip_skip))


def draw_picture(output: Path, picture: Path, before: Drawn, clip_skip: int | None) -> None:
    """Draws the same with the new LoRA, and writes the picture."""
    import picture as layout
    from onegraph.checkpoint import load_parts, read

    network = output / "last.safetensors"
    print(f"demo: drawing {len(before.images)} prompts with {network.name}", flush=True)
    load_parts({"unet": before.base.unet, "text_encoder": before.base.text_encoder}, network)
    after = draw(before.base, clip_skip)
    columns = len(SUBJECTS)
    rows = [
        layout.Row(style, remark, before.images[start : start + columns], after[start : start + columns])
        for start, (style, remark) in zip(range(0, len(after), columns), STYLES.items(), strict=True)
    ]
    trained = read(network).metadata
    log = (output / "train.log").read_text(encoding="utf-8")
    backend = next(line.split()[1] for line in reports(log) if line.startswith("  backend"))
    layout.draw(
        picture,
        rows,
        list(SUBJECTS),
        read_losses(output / "logs"),
        title=f"A LoRA after {trained['ss_steps']} steps, " + ("not compiled" if backend == "no" else f"compiled by {backend}"),
        footnote=(
            f"rank {trained['ss_network_dim']}, learning rate {trained['ss_learning_rate']}, batches of {trained['ss_total_batch_size']}, "
            f"{SIZE} x {SIZE} pixels.\nBefore and after: the same seeds, {NUM_SAMPLE_STEPS} DDIM steps, guidance {GUIDANCE:g}."
        ),
    )


def read_losses(folder: Path) -> dict[int, float]:
    """Step -> loss, from the TensorBoard files of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses: dict[int, float] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        if LOSS_CURVE in events.Tags()["scalars"]:
            losses.update({event.step: event.value for event in events.Scalars(LOSS_CURVE)})
    if not losses:
        raise SystemExit(f"demo: no curve {LOSS_CURVE!r} in the TensorBoard files in {folder}")
    return dict(sorted(losses.items()))


if __name__ == "__main__":
    sys.exit(main())
