"""F4, whole runs: the disk fills up before a save, within one, and between two. The message names place and bytes; with room the run goes on."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from finefit.artifacts.checkpoint import list_checkpoints, problems
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import StageResult
from tests.faults import (
    PAGE,
    Job,
    Reference,
    at_operation,
    at_step,
    fill_disk,
    finish,
    hidden,
    make_job,
    outcome,
    small_disk,
    start,
    words,
)

STOPPED = 3
DISK_BYTES = 8 << 20
FULL = re.compile(r"the disk is full: (\S+) needs ([\d,]+) bytes, ([\d,]+) are free")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as place:
        yield place


@pytest.fixture
def job(disk: Path) -> Job:
    return make_job(disk / "project")


def failure_of(where: StageDir) -> Failure:
    failure = read_record(where.result, StageResult).failure
    assert failure is not None
    return failure


def assert_goes_on(where: StageDir, disk: Path, lora: Reference) -> None:
    assert all(problems(checkpoint) == [] for checkpoint in list_checkpoints(where.checkpoints))
    assert hidden(where) == []
    (disk / "filler").unlink()
    assert finish(start(where)) == 0, words(where)
    assert outcome(where) == lora.outcome


def test_a_save_without_room_is_not_begun(job: Job, disk: Path, lora: Reference) -> None:
    """The real check beforehand."""
    where = job.fresh()
    assert finish(start(where, lambda: at_step(4, lambda: fill_disk(disk, leave_pages=100)))) == STOPPED
    found = FULL.search(failure_of(where).problem)
    assert found is not None
    path, needed, free = found[1], *(int(n.replace(",", "")) for n in found.groups()[1:])
    assert path == str(where.checkpoints / "checkpoint-6")
    assert free <= 100 * PAGE < needed
    assert [c.name for c in list_checkpoints(where.checkpoints)] == ["checkpoint-3"]
    assert "free some space" in failure_of(where).remedy
    assert_goes_on(where, disk, lora)


def test_a_disk_that_fills_up_at_any_page_of_a_save_damages_nothing(
    job: Job, disk: Path, lora: Reference, count: Callable[[str], None]
) -> None:
    """The same run meets a full disk at one page after the other: first, middle and last byte of each file are among them."""
    where = job.fresh()
    checkpoint = where.checkpoints / "checkpoint-6"
    pages = 0
    while True:
        fill = partial(fill_disk, disk, leave_pages=pages)
        code = finish(
            start(where, partial(at_operation, where.checkpoints, "os.mkdir", r"\.staging-checkpoint-6", fill))
        )
        if checkpoint.exists():
            break
        assert code == STOPPED
        told = re.findall(rf"the disk is full: {checkpoint} needs ([\d,]+) bytes, ([\d,]+) are free", words(where))
        needed, free = (int(number.replace(",", "")) for number in told[-1])
        assert (len(told), free <= pages * PAGE < needed) == (pages + 1, True)
        assert [c.name for c in list_checkpoints(where.checkpoints)] == ["checkpoint-3"]
        assert problems(where.checkpoints / "checkpoint-3") == []
        assert hidden(where) == []
        (disk / "filler").unlink()
        pages += 1
    files = list(checkpoint.iterdir())
    assert pages >= sum(-(-file.stat().st_size // PAGE) for file in files)  # the log on the same disk grows too
    assert_goes_on(where, disk, lora)
    count(f"F4  disk full at each of the {pages} pages of the {len(files)} files of a save, then bit-identical")


@pytest.mark.parametrize("step", [1, 5])
def test_a_disk_that_fills_up_between_saves_stops_the_run_resumably(
    job: Job, disk: Path, lora: Reference, step: int
) -> None:
    """Not even a line of the journal has room, nor the result."""
    where = job.fresh()

    def no_room() -> None:
        used = where.metrics.stat().st_size % PAGE
        with where.metrics.open("ab") as journal:
            journal.write(b" " * (PAGE - used - 1) + b"\n")
        fill_disk(disk, leave_pages=0)

    assert finish(start(where, lambda: at_step(step, no_room))) == STOPPED
    assert re.search(r"metrics\.jsonl needs [\d,]+ bytes, 0 are free", words(where))
    assert "Traceback" not in words(where)
    assert_goes_on(where, disk, lora)


def test_a_name_that_finds_no_room_stops_the_run_resumably(job: Job, disk: Path, lora: Reference) -> None:
    """The checkpoint is whole; only `best` is not set yet."""
    where = job.fresh()
    (disk / "filler").touch()

    def no_more_names() -> None:
        limit_names(disk, os.statvfs(disk).f_files - os.statvfs(disk).f_ffree)

    assert (
        finish(start(where, lambda: at_operation(where.checkpoints, "os.symlink", r"\.best\..*", no_more_names)))
        == STOPPED
    )
    assert f"{where.checkpoints / 'best'} needs " in words(where)
    limit_names(disk, 100_000)
    assert_goes_on(where, disk, lora)


def limit_names(disk: Path, num_inodes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,nr_inodes={num_inodes}", str(disk)], check=True)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root has run the tests above; others run them in a namespace of their own"
)
def test_the_disk_faults_hold_without_root() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets users make no mount namespace, so no small disk can be had without root")
    pytest_here = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "disk",
        __file__,
        str(Path(__file__).parent.parent / "artifacts"),
    ]
    inside = subprocess.run([unshare, "-rm", *pytest_here], capture_output=True, text=True, check=False)
    assert inside.returncode == 0, inside.stdout
    assert " 1 skipped" in inside.stdout  # this one
