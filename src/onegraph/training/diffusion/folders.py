"""Finding the training images: a parent folder that holds ``N_words`` folders."""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onegraph.errors import ConfigurationError, DataError, nearest

IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_MOST_SHOWINGS = 10_000_000
_NUMBERED = re.compile(r"([0-9]+)(?:_(.*))?", re.DOTALL)


class DataWarning(UserWarning):
    """Something about the training data that is legal but rarely meant."""


@dataclass(frozen=True)
class Subset:
    """The images of one ``N_words`` folder, in natural order.

    Args:
        folder: The folder itself.
        repeats: How often one epoch shows each image.
        words: The rest of the folder's name: the caption of images that have none.
        images: Image files.
        caption_files: The caption file of each image, None where there is none.
        reg: Whether these are regularisation images.
    """

    folder: Path
    repeats: int
    words: str
    images: tuple[Path, ...]
    caption_files: tuple[Path | None, ...]
    reg: bool = False

    @property
    def num_captions(self) -> int:
        """How many images have a caption file."""
        return sum(path is not None for path in self.caption_files)

    def without(self, unusable: Collection[Path]) -> Subset:
        """The same folder without some images."""
        kept = [index for index, path in enumerate(self.images) if path not in unusable]
        images = tuple(self.images[index] for index in kept)
        return replace(self, images=images, caption_files=tuple(self.caption_files[index] for index in kept))


@dataclass(frozen=True)
class FolderReport:
    """What was found; prints as a small table."""

    subsets: tuple[Subset, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("folder", "repeats", "images", "captions", "missing")]
        for subset in self.subsets:
            missing = len(subset.images) - subset.num_captions
            counts = (subset.repeats, len(subset.images), subset.num_captions, missing)
            rows.append((f"{subset.folder.name}{' (regularisation)' if subset.reg else ''}", *(str(count) for count in counts)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for name, *numbers in rows:
            cells = [name.ljust(widths[0]), *(number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))]
            lines.append("  ".join(cells))
        for subset in self.subsets:
            if subset.num_captions < len(subset.images):
                lines.append(f"{subset.folder.name}: images without a caption file are trained with {subset.words!r}")
        return "\n".join(lines)


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """A sorting key that puts ``2.png`` before ``10.png`` and doesn't depend on the file system's order or on upper case."""
    parts = re.split(r"([0-9]+)", unicodedata.normalize("NFC", name).casefold())
    return tuple((0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in parts), name


def find_subsets(train_data_dir: str | Path, *, caption_extension: str = ".caption", reg: bool = False) -> list[Subset]:
    """The ``N_words`` folders of a data folder: N repeats, the words as the caption of images without one.

    Folders with another name, folders without an image and images beside the folders are left out with one warning that names them.
    Hidden files and folders are never looked at.

    Args:
        train_data_dir: The parent of the ``N_words`` folders.
        caption_extension: A caption is the file with the image's stem and this extension.
        reg: Whether this is the folder of the regularisation images.

    Raises:
        DataError: ``data-folder-missing``, ``data-folder-unreadable``, ``data-folder-empty``, ``data-folder-leaf``,
            ``data-folder-names`` or ``data-folder-repeats``.
        ConfigurationError: The caption extension is empty or holds a folder separator.
    """
    extension = _checked_extension(caption_extension)
    flag = "--reg_data_dir" if reg else "--train_data_dir"
    root = Path(train_data_dir).expanduser()
    _require_folder(root, flag)
    folders, loose = _listed(root, flag)
    numbered: list[tuple[Path, int, str]] = []
    others: list[Path] = []
    for folder in folders:
        match = _NUMBERED.fullmatch(folder.name)
        if match is None:
            others.append(folder)
        else:
            numbered.append((folder, int(match[1]), match[2] or ""))
    unrepeated = [folder for folder, repeats, _ in numbered if repeats == 0]
    if unrepeated:
        raise DataError(
            f"{flag}: {_names(unrepeated)} in {root} would be repeated 0 times",
            why="The number in front of a folder's name says how often one epoch shows each of its images.",
            hint=f"rename it, for instance to {'1_' + unrepeated[0].name.partition('_')[2]!r}, or move it out of {root}",
            code="data-folder-repeats",
        )
    subsets: list[Subset] = []
    empty: list[Path] = []
    for folder, repeats, words in numbered:
        subset = _read_subset(folder, repeats, words, extension, reg, flag)
        if subset.images:
            subsets.append(subset)
        else:
            empty.append(folder)
    if not subsets:
        raise _nothing_found(root, flag, empty, others, loose)
    _require_an_epoch_that_ends(subsets, flag)
    _require_readable_words(subsets, flag)
    _warn_about_left_out(root, flag, empty, others, loose)
    _warn_about_other_extension(subsets, extension)
    return subsets


def _require_an_epoch_that_ends(subsets: Sequence[Subset], flag: str) -> None:
    """A folder named by a date, ``20240131_trip``, would be shown 20 million times an epoch."""
    total = sum(subset.repeats * len(subset.images) for subset in subsets)
    if total > _MOST_SHOWINGS:
        largest = max(subsets, key=lambda subset: subset.repeats)
        raise DataError(
            f"{flag}: an epoch would show {total:,} images; {largest.folder.name!r} repeats each of its own {largest.repeats:,} times",
            why="The number in front of a folder's name says how often one epoch shows each of its images.",
            hint=f"rename it, for instance to {'1_' + largest.folder.name!r}",
            code="data-folder-repeats",
        )


def _require_readable_words(subsets: Sequence[Subset], flag: str) -> None:
    """A name that is no UTF-8, as old archives unpack to, can't be a caption."""
    for subset in subsets:
        if subset.num_captions < len(subset.images) and not subset.words.isascii():
            try:
                subset.words.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{flag}: the name of the folder {subset.folder.name!r} is no UTF-8, and images in it have no caption of their own",
                    why="The words in a folder's name are the caption of images without one.",
                    hint="rename the folder, or give every image in it a caption",
                    code="data-folder-names",
                ) from error


def _checked_extension(extension: str) -> str:
    if not extension or "/" in extension or os.sep in extension:
        raise ConfigurationError(
            f"--caption_extension={extension!r} is not a file extension",
            hint="--caption_extension=.caption (the default) or --caption_extension=.txt",
            code="caption-extension",
        )
    return extension if extension.startswith(".") else f".{extension}"


def _require_folder(root: Path, flag: str) -> None:
    if root.is_dir():
        return
    if root.exists():
        raise DataError(
            f"{flag}: {root} is a file, not a folder",
            why="It has to be the folder that holds folders named N_words, for instance '10_my cat'.",
            hint=f"{flag}={shlex.quote(str(root.parent))} if the N_words folders are there; unpack archives first",
            code="data-folder-missing",
        )
    parent = root.parent
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    close = [shlex.quote(str(parent / name)) for name in nearest(root.name, siblings)]
    where = f"{parent} exists" if parent.is_dir() else f"{parent} does not exist either"
    raise DataError(
        f"{flag}: {root} does not exist",
        why=f"{where}; the current folder is {Path.cwd()}.",
        hint=f"{flag}={' or '.join(close)}" if close else f"give {flag} the folder that holds the N_words folders",
        code="data-folder-missing",
    )


def _listed(folder: Path, flag: str) -> tuple[list[Path], list[Path]]:
    """The visible folders and images directly inside, in natural order."""
    try:
        entries = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: natural_key(path.name))
        folders = [path for path in entries if path.is_dir()]
        images = [path for path in entries if _is_image(path)]
    except OSError as error:
        raise DataError(
            f"{flag}: {folder} can't be read: {error.strerror or error}",
            hint=f"ls -la {shlex.quote(str(folder))}",
            code="data-folder-unreadable",
        ) from error
    return folders, images


def _is_image(path: Path) -> bool:
    # A dangling link counts as an image: the image check names it, whereas dropping it here would lose it without a word.
    return path.suffix.lower() in IMAGE_EXTENSIONS and (path.is_file() or (path.is_symlink() and not path.exists()))


def _read_subset(folder: Path, repeats: int, words: str, extension: str, reg: bool, flag: str) -> Subset:
    _, images = _listed(folder, flag)
    # Names are compared in one Unicode normal form: macOS writes decomposed names, and archives carry them elsewhere.
    captions = {
        unicodedata.normalize("NFC", path.name): path for path in folder.iterdir() if path.name.endswith(extension) and path.is_file()
    }
    found = tuple(captions.get(unicodedata.normalize("NFC", path.stem + extension)) for path in images)
    return Subset(folder, repeats, words, tuple(images), found, reg)


def _names(paths: Sequence[Path], limit: int = 10) -> str:
    shown = ", ".join(repr(path.name) for path in paths[:limit])
    return shown if len(paths) <= limit else f"{shown} and {len(paths) - limit} more"


def _nothing_found(root: Path, flag: str, empty: list[Path], others: list[Path], loose: list[Path]) -> DataError:
    own = _NUMBERED.fullmatch(root.resolve().name)
    if loose:
        if own is not None:
            parent = root.parent if root.name not in ("", "..") else root.resolve().parent
            hint = f"{flag}={shlex.quote(str(parent))}"
        else:
            inner = root / f"10_{root.resolve().name}"
            hint = f"mkdir {shlex.quote(str(inner))}, move the images and captions into it, and keep {flag}={shlex.quote(str(root))}"
        return DataError(
            f"{flag}: {root} holds {len(loose)} images itself ({_names(loose, 3)}) instead of N_words folders",
            why="It has to be the parent of folders named N_words: N says how often an epoch shows each image, the words are the caption "
            "of images without one.",
            hint=hint,
            code="data-folder-leaf",
        )
    if empty:
        nested = [
            folder for folder in empty if any(_is_image(path) for child in folder.iterdir() if child.is_dir() for path in child.iterdir())
        ]
        why = f"Looked for {', '.join(IMAGE_EXTENSIONS)} (upper case too) directly inside each."
        if nested:
            why += f" There are images one folder deeper, inside {_names(nested)}: those aren't read."
        return DataError(
            f"{flag}: no image in any folder of {root}: {_names(empty)}",
            why=why,
            hint=f"put images into {shlex.quote(str(empty[0]))}",
            code="data-folder-empty",
        )
    if others:
        return DataError(
            f"{flag}: no folder in {root} is named N_words; there are {_names(others)}",
            why="N says how often an epoch shows each image, the words are the caption of images without one.",
            hint=f"mv {shlex.quote(str(others[0]))} {shlex.quote(str(root / ('10_' + others[0].name)))}",
            code="data-folder-names",
        )
    return DataError(
        f"{flag}: {root} is empty",
        why="It has to hold folders named N_words, for instance '10_my cat', with the images inside.",
        hint=f"mkdir {shlex.quote(str(root / '10_my cat'))} and put the images there",
        code="data-folder-empty",
    )


def _warn_about_left_out(root: Path, flag: str, empty: list[Path], others: list[Path], loose: list[Path]) -> None:
    left_out: list[str] = []
    if others:
        left_out.append(f"folders whose name doesn't start with a number of repeats: {_names(others)}")
    if empty:
        left_out.append(f"folders without an image: {_names(empty)}")
    if loose:
        left_out.append(f"{len(loose)} images beside the folders: {_names(loose, 3)}")
    if left_out:
        warnings.warn(f"{flag}: not trained on, in {root}: {'; '.join(left_out)}", DataWarning, stacklevel=3)


def _warn_about_other_extension(subsets: Iterable[Subset], extension: str) -> None:
    """Captions under another extension are the commonest reason for training on the folder's words only."""
    for subset in subsets:
        if subset.num_captions:
            continue
        stems = {path.stem for path in subset.images}
        texts = Counter(
            path.suffix for path in subset.folder.iterdir() if path.suffix in (".txt", ".caption", ".tags") and path.stem in stems
        )
        for suffix, count in texts.most_common(1):
            warnings.warn(
                f"{subset.folder}: no {extension} file, but {count} {suffix} files with the images' names; "
                f"--caption_extension={suffix} would use them as captions. Now every image is trained with {subset.words!r}",
                DataWarning,
                stacklevel=3,
            )
