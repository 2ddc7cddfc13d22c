import os
import zipfile
from pathlib import Path

import pytest

from finefit.data import image_files
from finefit.data.cells import Fault
from finefit.data.image_files import Found, content_of, find_image, without_images
from finefit.data.rows import BadRow, Image, Message, Row


def _fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def _zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, f"zipped {name}")


def _content(root: Path, path: str) -> str:
    return content_of(Image(path=path, root=str(root))).decode()


def _fault(root: Path, path: str) -> str:
    with pytest.raises(Fault) as caught:
        content_of(Image(path=path, root=str(root)))
    return str(caught.value)


def test_an_image_lies_at_its_path_or_in_a_folder_beside_the_data(tmp_path: Path) -> None:
    _fill(tmp_path, "1.png", "png/1.png", "png/2.png", "documents/3.png", "png/deep/4.png", ".hidden/5.png")
    assert [
        _content(tmp_path, path) for path in ("1.png", "2.png", "documents/3.png", "./png/../png/2.png", "deep/4.png")
    ] == [
        "1.png",
        "png/2.png",
        "documents/3.png",
        "png/2.png",
        "png/deep/4.png",
    ]
    for path in ("5.png", "4.png", "3.gif"):
        assert _fault(tmp_path, path) == (
            f"{path} is not there: looked in {tmp_path}, and in the folders and zips in it; name another place with images_root"
        )


def test_a_name_without_an_extension_stands_for_the_image_of_that_name(tmp_path: Path) -> None:
    _fill(tmp_path, "images/000215949X.jpg", "images/2.GIF", "images/v1.5.png", "images/3.json", "images/4")
    assert [_content(tmp_path, path) for path in ("000215949X", "2", "v1.5", "4")] == [
        "images/000215949X.jpg",
        "images/2.GIF",
        "images/v1.5.png",
        "images/4",
    ]
    assert "3 is not there" in _fault(tmp_path, "3")
    _fill(tmp_path, "images/2.png")
    assert _fault(tmp_path, "2") == (
        f"2 may be {tmp_path}/images/2.png and {tmp_path}/images/2.GIF; name the one folder or zip with images_root"
    )


def test_what_lies_in_two_folders_is_not_guessed(tmp_path: Path) -> None:
    _fill(tmp_path, "train/1.png", "test/1.png")
    assert _fault(tmp_path, "1.png") == (
        f"1.png may be {tmp_path}/test/1.png and {tmp_path}/train/1.png; name the one folder or zip with images_root"
    )
    assert _content(tmp_path / "train", "1.png") == "train/1.png"


def test_zips_are_looked_into_where_no_folder_has_it(tmp_path: Path) -> None:
    _fill(tmp_path, "train_images/1.jpg")
    _zip(tmp_path / "all.zip", "train_images/1.jpg", "train_images/2.jpg", "3.jpg", "train_images/")
    assert [_content(tmp_path, path) for path in ("1.jpg", "2.jpg", "train_images/2.jpg", "3.jpg", "3")] == [
        "train_images/1.jpg",
        "zipped train_images/2.jpg",
        "zipped train_images/2.jpg",
        "zipped 3.jpg",
        "zipped 3.jpg",
    ]
    assert find_image(Image(path="2", root=str(tmp_path))) == Found(tmp_path / "all.zip", "train_images/2.jpg", 25)
    assert "2.jpg is not there" in _fault(tmp_path, "images/2.jpg")


def test_a_zip_may_be_the_root_itself(tmp_path: Path) -> None:
    _zip(tmp_path / "all.zip", "a/1.png", "b/1.png", "1.png", "a/2.png", "b/2.png")
    assert [_content(tmp_path / "all.zip", path) for path in ("1.png", "a/1.png")] == ["zipped 1.png", "zipped a/1.png"]
    assert _fault(tmp_path / "all.zip", "2.png").startswith(
        f"2.png may be a/2.png in {tmp_path}/all.zip and b/2.png in"
    )
    assert "lies outside" in _fault(tmp_path / "all.zip", "../secret.png")


@pytest.mark.parametrize(
    "path", ["../secret.png", "png/../../secret.png", "/etc/passwd", "..", ".", "png/..", "a\0.png", "//etc/passwd"]
)
def test_a_path_that_leaves_its_root_is_refused(tmp_path: Path, path: str) -> None:
    _fill(tmp_path, "secret.png", "root/png/1.png")
    assert _fault(tmp_path / "root", path).endswith(
        ("is no path", f"lies outside of {tmp_path}/root, where its images start; name another folder with images_root")
    )


def test_a_whole_path_below_the_root_is_taken(tmp_path: Path) -> None:
    _fill(tmp_path, "png/1.png", "secret.png")
    assert _content(tmp_path, f"{tmp_path}/png/1.png") == "png/1.png"
    assert "lies outside" in _fault(tmp_path / "png", f"{tmp_path}/secret.png")
    assert "lies outside" in _fault(tmp_path / "png", f"{tmp_path}/png/../secret.png")


def test_links_of_the_user_are_followed(tmp_path: Path) -> None:
    _fill(tmp_path, "disk/1.png", "data/rows.json")
    (tmp_path / "data/images").symlink_to(tmp_path / "disk")
    assert _content(tmp_path / "data", "1.png") == "disk/1.png"


@pytest.mark.parametrize("path", ["x" * 5000, "\ud800.png", "a/b/c" * 100])
def test_a_name_that_no_file_can_have_is_not_there(tmp_path: Path, path: str) -> None:
    assert "is not there" in _fault(tmp_path, path)


def test_a_folder_is_no_image_and_a_root_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "1.png").mkdir()
    assert "1.png is not there" in _fault(tmp_path, "1.png")
    assert (
        _fault(tmp_path / "gone", "1.png")
        == f"{tmp_path}/gone, where its images start, cannot be read: No such file or directory"
    )


def test_files_that_come_later_are_found(tmp_path: Path) -> None:
    _fill(tmp_path, "rows.json")
    assert "is not there" in _fault(tmp_path, "1.png")
    os.utime(tmp_path, ns=(0, 0))
    _fill(tmp_path, "png/1.png")
    assert _content(tmp_path, "1.png") == "png/1.png"
    _zip(tmp_path / "a.zip", "2.png")
    assert _content(tmp_path, "2.png") == "zipped 2.png"
    _zip(tmp_path / "a.zip", "3.png")
    os.utime(tmp_path / "a.zip", ns=(1, 1))
    assert _content(tmp_path, "3.png") == "zipped 3.png"


def test_a_broken_zip_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK no zip")
    assert _fault(tmp_path, "1.png") == f"{tmp_path}/a.zip is no zip that can be read: File is not a zip file"
    _zip(tmp_path / "b.zip", *(f"{n}.png" for n in range(50)))
    whole = bytearray((tmp_path / "b.zip").read_bytes())
    at = whole.index(b"zipped") if b"zipped" in whole else 40
    whole[at : at + 8] = b"\xff" * 8
    (tmp_path / "a.zip").write_bytes(whole)
    (tmp_path / "b.zip").unlink()
    assert _fault(tmp_path, "0.png").startswith(f"0.png cannot be read from {tmp_path}/a.zip: ")


def test_an_encrypted_image_is_told(tmp_path: Path) -> None:
    _zip(tmp_path / "a.zip", "1.png")
    whole = bytearray((tmp_path / "a.zip").read_bytes())
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(whole)
    assert _fault(tmp_path, "1.png") == f"1.png in {tmp_path}/a.zip is encrypted"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_BYTES", 100)
    _zip(tmp_path / "a.zip", "zipped.png" + "x" * 100)
    (tmp_path / "1.png").write_bytes(b"x" * 101)
    (tmp_path / "2.png").write_bytes(b"x" * 100)
    assert _fault(tmp_path, "1.png") == "1.png has 101 bytes, and at most 100 are read"
    assert "has 117 bytes" in _fault(tmp_path, "zipped.png" + "x" * 100)
    assert _content(tmp_path, "2.png") == "x" * 100


def test_bytes_need_no_file(tmp_path: Path) -> None:
    assert content_of(Image(data=b"abc", root=str(tmp_path / "gone"))) == b"abc"


def test_a_row_without_one_of_its_images_is_a_bad_row_with_its_place(tmp_path: Path) -> None:
    _fill(tmp_path, "1.png")
    here, gone = Image(path="1.png", root=str(tmp_path)), Image(path="2.png", root=str(tmp_path))
    row = Row(
        source="val.json",
        number=7,
        messages=(Message("user", "q"), Message("assistant", "a")),
        images=(here, Image(data=b"x")),
    )
    assert without_images(row) is None
    missing = without_images(Row(source="val.json", number=7, messages=row.messages, images=(here, gone)))
    assert isinstance(missing, BadRow)
    assert (missing.place, missing.reason.split(":")[0]) == ("val.json:7", "2.png is not there")
