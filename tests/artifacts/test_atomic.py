"""A full disk is told by its place and bytes, whoever met it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finefit.artifacts.atomic import full_disk_named, given_back_when_full
from finefit.errors import DiskFull, WorkerDied

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


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"this system has no {FULL}")
@pytest.mark.parametrize(("around", "told"), [(5678, "around needs 5,678 bytes"), (None, "within needs 1,234 bytes")])
def test_of_several_places_the_outermost_that_knows_its_bytes_is_told(
    tmp_path: Path, around: int | None, told: str
) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    with (
        pytest.raises(DiskFull, match=told),
        full_disk_named(tmp_path / "around", around),
        full_disk_named(tmp_path / "within", 1234),
    ):
        copy_file(tmp_path)


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"this system has no {FULL}")
def test_a_place_that_knows_no_bytes_names_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    with (
        pytest.raises(
            DiskFull, match=r"the disk is full: \S+/place found no room, [\d,]+ bytes are free now\n"
        ) as caught,
        full_disk_named(tmp_path / "place"),
    ):
        copy_file(tmp_path)
    assert caught.value.remedy == "free some space, then give the same command again: it goes on where it was"


def test_a_log_that_tells_of_a_full_disk_does_not_make_another_failure_one(tmp_path: Path) -> None:
    """Logs are gone on with: their last lines may be those of the day before."""
    with pytest.raises(WorkerDied), full_disk_named(tmp_path):
        raise WorkerDied("ended by SIGSEGV. The end of run.log:\nOSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(("error", "is_kept"), [(DiskFull("no room"), False), (WorkerDied("killed"), True)])
def test_what_is_half_made_is_given_back_when_the_disk_is_full_and_not_otherwise(
    tmp_path: Path, error: Exception, *, is_kept: bool
) -> None:
    (tmp_path / "half").mkdir()
    with pytest.raises(type(error)), given_back_when_full(tmp_path / "half"):
        raise error
    assert (tmp_path / "half").exists() is is_kept
