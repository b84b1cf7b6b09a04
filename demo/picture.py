"""The demo's picture: prompts in rows, before and after, and the loss beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec
from PIL.Image import Image

INK, MUTED, LINE, BAND = "#222222", "#777777", "#2f6db5", "#a9c4e4"
COLUMN_INCHES = 1.15
CURVE_INCHES = 1.7
LABEL_INCHES = 1.5
DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Row:
    """The images of one style: the same subjects and seeds, without and with the adapter."""

    style: str
    remark: str
    before: Sequence[Image]
    after: Sequence[Image]


def draw(path: Path, rows: Sequence[Row], subjects: Sequence[str], losses: Mapping[int, float], *, title: str, footnote: str) -> None:
    """Writes the picture.

    Args:
        path: Where to; the ending decides the format.
        rows: One for each style; each takes two lines, before and after.
        subjects: Titles of the columns.
        losses: Step -> loss.
        title: One line on top.
        footnote: One line at the bottom, small.
    """
    num_lines = 2 * len(rows)
    width = LABEL_INCHES + COLUMN_INCHES * len(subjects) + 0.15
    heights = [1.0] * num_lines + [CURVE_INCHES / COLUMN_INCHES]
    figure = plt.figure(figsize=(width, COLUMN_INCHES * num_lines + CURVE_INCHES + 1.5), facecolor="white")
    figure.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=12, fontweight="bold", color=INK)
    grid = GridSpec(
        num_lines + 1,
        len(subjects),
        figure=figure,
        height_ratios=heights,
        left=LABEL_INCHES / width,
        right=1 - 0.12 / width,
        top=0.915,
        bottom=0.085,
        hspace=0.07,
        wspace=0.05,
    )
    for index, row in enumerate(rows):
        for offset, (when, images) in enumerate((("before", row.before), ("after", row.after))):
            line = 2 * index + offset
            for column, image in enumerate(images):
                axes = figure.add_subplot(grid[line, column])
                _image(axes, image)
                if line == 0:
                    axes.set_title(subjects[column], fontsize=9, color=INK)
                if column == 0:
                    _line_label(axes, when, row, first=offset == 0)
    curve = figure.add_subplot(grid[num_lines, :])
    _losses(curve, losses)
    box = curve.get_position()
    curve.set_position((box.x0, box.y0, box.width, box.height * 0.78))
    figure.text(0.02, 0.012, footnote, fontsize=7, color=MUTED, ha="left")
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)


def _image(axes: Axes, image: Image) -> None:
    axes.imshow(image, interpolation="bicubic")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#dddddd")


def _line_label(axes: Axes, when: str, row: Row, *, first: bool) -> None:
    """The words in front of a line of images; the style's own above "before"."""
    axes.text(-0.08, 0.30, when, transform=axes.transAxes, ha="right", fontsize=10, color=INK if when == "after" else MUTED)
    if first:
        axes.text(-0.08, 0.80, f'"{row.style} ..."', transform=axes.transAxes, ha="right", fontsize=8, color=INK)
        axes.text(-0.08, 0.64, row.remark, transform=axes.transAxes, ha="right", fontsize=6.5, color=MUTED)


def _losses(axes: Axes, losses: Mapping[int, float]) -> None:
    """Every step's loss, pale, and its running mean over a tenth of the run."""
    steps, values = list(losses), list(losses.values())
    window = max(1, len(values) // 10)
    means = [sum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]
    axes.plot(steps, values, color=BAND, linewidth=0.8, label="loss of each step")
    axes.plot(steps, means, color=LINE, linewidth=1.8, label=f"mean of the last {window}")
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step", fontsize=8, color=MUTED)
    axes.set_ylabel("loss", fontsize=8, color=MUTED)
    axes.tick_params(labelsize=7, colors=MUTED)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
