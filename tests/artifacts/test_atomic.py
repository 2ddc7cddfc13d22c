"""A full disk is told by its place and bytes, whoever met it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finefit.artifacts.atomic import full_disk_named
from finefit.errors import DiskFull

FULL = "/dev/full"


def copy_file(folder: Path) -> None:
    shutil.copyfile(folder / "file", FULL)


def copy_tree(folder: Path) -> None:
    """shutil gathers the errors of all files into one, without the number of any."""
    shutil.copytree(folder, folder.with_name("copy"), copy_function=lambda source, _: shutil.copyfile(source, FULL))


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"this system has no {FULL}")
@pytest.mark.parametrize("writer", [copy_file, copy_tree])
def test_a_full_disk_is_known_from_every_writer(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("text", encoding="utf-8")
    with pytest.raises(DiskFull, match="place needs 1,234 bytes"), full_disk_named(tmp_path / "place", 1234):
        writer(source)


def test_another_failure_of_a_copy_stays_what_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(shutil.Error), full_disk_named(tmp_path / "place", 1234):
        shutil.copytree(source, tmp_path / "copy")
