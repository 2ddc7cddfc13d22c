"""A full disk is told by its place and bytes, whoever met it."""

import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from finefit.artifacts.atomic import (
    Journal,
    publish,
    read_lines,
    read_steps,
    release_on_disk_full,
    remove_folder,
    replace_folder,
    report_disk_full,
    staged_file,
    staged_folder,
    sweep,
    write_text,
)
from finefit.errors import DiskFull, WorkerDied
from tests.faults import PAGE, fill_disk, small_disk

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
    with pytest.raises(DiskFull, match="place needs 1,234 bytes"), report_disk_full(tmp_path / "place", 1234):
        writer(source)


def test_another_failure_of_a_copy_stays_what_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(shutil.Error), report_disk_full(tmp_path / "place", 1234):
        shutil.copytree(source, tmp_path / "copy")


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"this system has no {FULL}")
@pytest.mark.parametrize(("around", "told"), [(5678, "around needs 5,678 bytes"), (None, "within needs 1,234 bytes")])
def test_of_several_places_the_outermost_that_knows_its_bytes_is_told(
    tmp_path: Path, around: int | None, told: str
) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    with (
        pytest.raises(DiskFull, match=told),
        report_disk_full(tmp_path / "around", around),
        report_disk_full(tmp_path / "within", 1234),
    ):
        copy_file(tmp_path)


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"this system has no {FULL}")
def test_a_place_that_knows_no_bytes_names_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    with (
        pytest.raises(
            DiskFull, match=r"the disk is full: \S+/place could not be written, [\d,]+ bytes are free now\n"
        ) as caught,
        report_disk_full(tmp_path / "place"),
    ):
        copy_file(tmp_path)
    assert caught.value.remedy == "free some space, then give the same command again: it resumes where it stopped"


def test_a_log_that_tells_of_a_full_disk_does_not_make_another_failure_one(tmp_path: Path) -> None:
    """Logs are gone on with: their last lines may be those of the day before."""
    with pytest.raises(WorkerDied), report_disk_full(tmp_path):
        raise WorkerDied("ended by SIGSEGV. The end of run.log:\nOSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(("error", "is_kept"), [(DiskFull("no room"), False), (WorkerDied("killed"), True)])
def test_what_is_half_made_is_given_back_when_the_disk_is_full_and_not_otherwise(
    tmp_path: Path, error: Exception, *, is_kept: bool
) -> None:
    (tmp_path / "half").mkdir()
    with pytest.raises(type(error)), release_on_disk_full(tmp_path / "half"):
        raise error
    assert (tmp_path / "half").exists() is is_kept


# A kill can tear the last line of a journal and nothing else.


def test_a_journal_torn_at_any_byte_keeps_its_other_lines(tmp_path: Path) -> None:
    """Also within a character of several bytes."""
    path = tmp_path / "metrics.jsonl"
    with Journal(path) as journal:
        journal.write(step=1, loss=0.5)
        journal.write(event="rejected", note="größer als 日本")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [line["step"] for line in read_lines(path) if "step" in line] == [1]
        with Journal(path) as journal:
            journal.write(step=2, loss=0.25)
        lines = list(read_lines(path))
        assert (lines[0]["step"], lines[-1]["step"]) == (1, 2)
        assert len(lines) == (3 if cut == len(whole) - 1 else 2)


def test_a_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.5}')
    with Journal(path) as journal:
        journal.write(step=2, loss=0.25)
    assert [line["step"] for line in read_steps(path)] == [1, 2]


def test_losses_survive_the_journal_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [0.1 + 0.2, math.pi, 5e-324, 1.7976931348623157e308]
    with Journal(path) as journal:
        for step, loss in enumerate(losses):
            journal.write(step=step, loss=loss)
    assert [line["loss"] for line in read_steps(path)] == losses


@pytest.mark.parametrize("event", ["resumed", "rolled_back"])
def test_steps_beyond_the_checkpoint_that_a_run_returned_to_are_superseded(tmp_path: Path, event: str) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3, 4):
            journal.write(step=step, loss=float(step))
        journal.write(event=event, step=2)
        journal.write(step=3, loss=30.0)
    assert [(line["step"], line["loss"]) for line in read_steps(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_run_that_starts_over_supersedes_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.write(step=step, loss=1.0)
        journal.write(event="started", step=0)
        journal.write(step=1, loss=2.0)
        journal.write(event="not_finite", step=2, found="loss nan")
    assert [(line["step"], line["loss"]) for line in read_steps(path)] == [(1, 2.0)]


def test_a_missing_journal_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "metrics.jsonl")) == []
    assert read_steps(tmp_path / "metrics.jsonl") == []


def write_until_full(journal: Journal) -> None:
    for step in range(2, PAGE):
        journal.write(step=step, loss=1.0)


def test_a_journal_on_a_full_disk_names_place_and_bytes_and_goes_on_with_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 * PAGE) as disk:
        path = disk / "metrics.jsonl"
        with Journal(path) as journal:
            journal.write(step=1, loss=1.0)
            fill_disk(disk, leave_pages=0)
            with pytest.raises(DiskFull, match=rf"{path} needs [\d,]+ bytes, 0 are free"):
                write_until_full(journal)
        assert path.stat().st_size % PAGE == 0
        (disk / "filler").unlink()
        before = len(read_steps(path))
        with Journal(path) as journal:
            journal.write(step=PAGE, loss=1.0)
        assert len(read_steps(path)) == before + 1


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def interrupted(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), staged_file(path) as temporary:
        interrupted(temporary)
    assert path.read_text() == "old"
    with staged_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "new")]


def test_of_two_threads_that_write_one_file_at_once_each_writes_it_whole(tmp_path: Path) -> None:
    path, both = tmp_path / "file", Barrier(2)

    def write(text: str) -> None:
        with staged_file(path, durable=False) as temporary:
            temporary.write_text(text)
            both.wait(timeout=20)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ["one", "other"]))
    assert path.read_text() in ("one", "other")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_staged_folder_is_hidden_until_it_is_published_and_gone_if_it_is_not(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with staged_folder(runs, "run") as staging:
        (staging / "file").touch()
        assert staging.name.startswith(".staging-run-")
        publish(staging, runs / "run-1")
    assert [path.name for path in runs.iterdir()] == ["run-1"]
    assert (runs / "run-1").stat().st_mode & 0o777 == 0o755
    with pytest.raises(KeyboardInterrupt), staged_folder(runs, "run"):
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="not empty"), staged_folder(runs, "run") as staging:
        publish(staging, runs / "run-1")
    assert [path.name for path in runs.iterdir()] == ["run-1"]


def test_a_folder_is_replaced_and_removed_without_a_trace(tmp_path: Path) -> None:
    for number in range(2):
        with staged_folder(tmp_path, "x", unique=False) as staging:
            (staging / str(number)).touch()
            replace_folder(staging, tmp_path / "x")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["x", "x/1"]
    for _ in range(2):
        remove_folder(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    for name in (".staging-a-1", ".removing-b-2", "c", ".earlier-d"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file.12.tmp").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".earlier-d", "c"]
