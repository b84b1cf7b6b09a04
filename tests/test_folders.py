"""Finding the ``N_words`` folders of a data folder."""

from __future__ import annotations

import errno
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from onegraph.errors import ConfigurationError, DataError
from onegraph.training.diffusion.folders import DataWarning, FolderReport, find_subsets


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def refused(folder: Path | str, **options: object) -> DataError:
    with pytest.raises(DataError) as caught:
        find_subsets(folder, **options)  # type: ignore[arg-type]
    return caught.value


def test_number_is_repeats_and_words_are_the_fallback_caption(tmp_path: Path) -> None:
    touch(tmp_path / "10_my cat" / "a.png", tmp_path / "10_my cat" / "a.caption", tmp_path / "10_my cat" / "b.jpg")
    touch(tmp_path / "2_a_dog" / "c.webp")
    few, many = find_subsets(tmp_path)
    assert (few.repeats, few.words, few.num_captions) == (2, "a_dog", 0)
    assert (many.repeats, many.words, many.num_captions) == (10, "my cat", 1)
    assert many.caption_files == (tmp_path / "10_my cat" / "a.caption", None)
    assert not many.reg
    assert find_subsets(tmp_path, reg=True)[0].reg


def test_image_extensions_in_either_case_and_nothing_else(tmp_path: Path) -> None:
    names = ["a.png", "b.JPG", "c.jpeg", "d.WebP", "e.bmp"]
    others = ["f.txt", "g.gif", "h.npz", "._a.png", ".DS_Store", ".hidden.png", "png"]
    touch(*(tmp_path / "1_x" / name for name in names + others))
    (tmp_path / "1_x" / "folder.png").mkdir()
    assert [path.name for path in find_subsets(tmp_path)[0].images] == names


def test_order_is_natural_and_independent_of_creation(tmp_path: Path) -> None:
    names = ["img10.png", "img2.png", "Img1.png", "b.png", "img02.png"]
    touch(*(tmp_path / "1_x" / name for name in names))
    expected = ["b.png", "Img1.png", "img02.png", "img2.png", "img10.png"]
    assert [path.name for path in find_subsets(tmp_path)[0].images] == expected


def test_folders_without_a_number_are_named_in_one_warning(tmp_path: Path) -> None:
    touch(tmp_path / "1_x" / "a.png", tmp_path / "backup" / "b.png", tmp_path / "-3_y" / "c.png", tmp_path / "loose.png")
    (tmp_path / "5_empty").mkdir()
    (tmp_path / ".cache").mkdir()
    with pytest.warns(DataWarning) as caught:
        subsets = find_subsets(tmp_path)
    assert [subset.folder.name for subset in subsets] == ["1_x"]
    (message,) = [str(warning.message) for warning in caught]
    for name in ("backup", "-3_y", "5_empty", "loose.png"):
        assert name in message
    assert ".cache" not in message


def test_a_clean_folder_gives_no_warning(tmp_path: Path) -> None:
    touch(tmp_path / "1_x" / "a.png", tmp_path / "1_x" / "a.caption")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_subsets(tmp_path)


def test_missing_folder_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my images").mkdir()
    error = refused(tmp_path / "my image")
    assert error.code == "data-folder-missing"
    assert "my images" in error.hint


def test_missing_parent_is_told(tmp_path: Path) -> None:
    assert "does not exist either" in refused(tmp_path / "no" / "where").why


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path / "data.zip")
    error = refused(tmp_path / "data.zip")
    assert error.code == "data-folder-missing"
    assert "is a file" in error.what


def test_empty_folder(tmp_path: Path) -> None:
    error = refused(tmp_path)
    assert error.code == "data-folder-empty"
    assert "10_my cat" in error.hint


def test_no_image_in_any_folder_mentions_deeper_ones(tmp_path: Path) -> None:
    touch(tmp_path / "1_x" / "notes.txt", tmp_path / "2_y" / "inner" / "a.png")
    error = refused(tmp_path)
    assert error.code == "data-folder-empty"
    assert "one folder deeper, inside '2_y'" in error.why


@pytest.mark.parametrize("inside", [False, True], ids=["absolute", "current-folder"])
def test_leaf_folder_gets_the_parents_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    leaf = tmp_path / "my data" / "10_cat"
    touch(leaf / "a.png")
    if inside:
        monkeypatch.chdir(leaf)
    error = refused("." if inside else leaf)
    assert error.code == "data-folder-leaf"
    assert error.hint == f"--train_data_dir='{tmp_path}/my data'"


def test_flat_folder_of_images_is_told_to_move_them(tmp_path: Path) -> None:
    touch(tmp_path / "cats" / "a.png")
    error = refused(tmp_path / "cats", reg=True)
    assert error.code == "data-folder-leaf"
    assert "10_cats" in error.hint
    assert "--reg_data_dir" in error.what


def test_a_parent_whose_own_name_has_a_number_is_a_parent(tmp_path: Path) -> None:
    touch(tmp_path / "10_all" / "1_x" / "a.png")
    assert len(find_subsets(tmp_path / "10_all")) == 1


def test_only_unnumbered_folders(tmp_path: Path) -> None:
    touch(tmp_path / "cats" / "a.png")
    error = refused(tmp_path)
    assert error.code == "data-folder-names"
    assert "'cats'" in error.what
    assert "10_cats" in error.hint


def test_zero_repeats(tmp_path: Path) -> None:
    touch(tmp_path / "0_x" / "a.png", tmp_path / "1_y" / "b.png")
    error = refused(tmp_path)
    assert error.code == "data-folder-repeats"
    assert "1_x" in error.hint


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "1_x" / "a.png")
    listed = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "1_x":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    error = refused(tmp_path)
    assert error.code == "data-folder-unreadable"
    assert "1_x can't be read: Permission denied" in error.what


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")], ids="-".join)
def test_unicode_names_match_in_any_normal_form(tmp_path: Path, forms: tuple[Literal["NFC", "NFD"], Literal["NFC", "NFD"]]) -> None:
    folder = tmp_path / "3_日本 café"
    touch(folder / unicodedata.normalize(forms[0], "é.png"), folder / unicodedata.normalize(forms[1], "é.caption"))
    (subset,) = find_subsets(tmp_path)
    assert subset.words == "日本 café"
    assert subset.num_captions == 1


def test_links_to_images_and_folders_are_followed_and_dangling_ones_kept(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere" / "a.png")
    data = tmp_path / "data"
    data.mkdir()
    (data / "2_linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "b.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "elsewhere" / "gone.png").symlink_to(tmp_path / "nothing.png")
    (subset,) = find_subsets(data)
    assert [path.name for path in subset.images] == ["a.png", "b.png", "gone.png"]


def test_captions_under_another_extension_are_pointed_out(tmp_path: Path) -> None:
    touch(tmp_path / "1_x" / "a.png", tmp_path / "1_x" / "a.txt")
    with pytest.warns(DataWarning, match=r"--caption_extension=\.txt"):
        find_subsets(tmp_path)
    assert find_subsets(tmp_path, caption_extension="txt")[0].num_captions == 1


@pytest.mark.parametrize("extension", ["", "a/b"], ids=["empty", "path"])
def test_caption_extension_must_be_one(tmp_path: Path, extension: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_subsets(tmp_path, caption_extension=extension)
    assert caught.value.code == "caption-extension"


def test_report_counts_captions(tmp_path: Path) -> None:
    touch(*(tmp_path / "4_x y" / name for name in ("a.png", "b.png", "c.png", "a.caption")))
    lines = str(FolderReport(tuple(find_subsets(tmp_path)))).splitlines()
    assert lines[0].split() == ["folder", "repeats", "images", "captions", "missing"]
    assert lines[1].split() == ["4_x", "y", "4", "3", "1", "2"]
    assert "trained with 'x y'" in lines[2]


def test_without_leaves_out_images_and_their_captions(tmp_path: Path) -> None:
    touch(*(tmp_path / "1_x" / name for name in ("a.png", "b.png", "b.caption")))
    (subset,) = find_subsets(tmp_path)
    rest = subset.without({tmp_path / "1_x" / "a.png"})
    assert [path.name for path in rest.images] == ["b.png"]
    assert rest.num_captions == 1


def test_a_date_in_front_of_a_folders_name_is_no_number_of_repeats(tmp_path: Path) -> None:
    touch(tmp_path / "20240131_trip" / "a.png", tmp_path / "1_cat" / "b.png")
    error = refused(tmp_path)
    assert error.code == "data-folder-repeats"
    assert "20,240,131" in error.what
    assert "1_20240131_trip" in error.hint
