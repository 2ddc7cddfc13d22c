"""A disk that a stage fills: told with its place and bytes, the half-made output given back, and with room the same call goes on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from finefit.artifacts.pipelines import PipelineState
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir
from finefit.errors import DiskFull, WorkerDied
from finefit.facts.files import free_bytes
from finefit.pipeline.launch import launch
from finefit.pipeline.stage_run import ask, open_or_create
from finefit.pipeline.staged import carry_out
from finefit.spec.load import load_any
from finefit.spec.stages import Pipeline
from tests.conftest import write_jsonl
from tests.faults import PAGE, fill_disk, small_disk
from tests.pipeline.test_staged import Heard
from tests.train.test_disk_full import limit_names

DISK_BYTES = 4 << 20
ROOM_PAGES = 120
REMEDY = "free some space, then give the same command again: it goes on where it was"
SCRIPT = """\
name: filled
device: cpu
stages:
  big: {kind: python, script: big.py, arguments: ["{output}/big.bin"], outputs: [big.bin]}
"""
PAIRS = """\
name: filled
device: cpu
stages:
  big: {kind: make_pairs, train: [{path: train.jsonl}]}
"""
WRITES_TOO_MUCH = f"open(sys.argv[1], 'wb').write(bytes({2 * ROOM_PAGES * PAGE}))"
SAYS_TOO_MUCH = (
    f"print('x' * {ROOM_PAGES * PAGE // 2}, flush=True); open(sys.argv[1], 'wb').write(bytes({ROOM_PAGES * PAGE // 3}))"
)
DIES_WHEN_FULL = f"""\
from pathlib import Path
died = Path(__file__).parent / "died"
if died.exists():
    Path(sys.argv[1]).write_bytes(b"small")
else:
    died.touch()
    with open(sys.argv[1], "wb", buffering=0) as file:
        try:
            while file.write(bytes({PAGE})):
                pass
        finally:
            os.kill(os.getpid(), 9)
"""
FILLS_ANOTHER_FOLDER = f"""\
from pathlib import Path
if not (Path(__file__).parent / "room").exists():
    Path("../made.json").unlink()
    with open("../../../../../filler", "wb", buffering=0) as file:
        while file.write(bytes({PAGE})):
            pass
Path(sys.argv[1]).write_bytes(b"small")
"""


@pytest.fixture(autouse=True)
def _no_inhibitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.pipeline.awake._command", lambda: None)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as place:
        yield place


def _open(disk: Path, text: str) -> RunDir:
    """On the small disk; what it stands on lies elsewhere."""
    spec = disk.parent / "spec.yaml"
    spec.write_text(text, encoding="utf-8")
    pipeline = load_any(spec)
    assert isinstance(pipeline, Pipeline)
    return open_or_create(ask(pipeline, spec.parent, spec_text=text, overrides=()), runs=disk / "runs", new=False)


def _scripted(disk: Path, script: str) -> RunDir:
    (disk.parent / "big.py").write_text(f"import os, sys\n{script}\n", encoding="utf-8")
    return _open(disk, SCRIPT)


def _assert_stopped_with_room(run: RunDir) -> None:
    """Nothing half made is left, so the records say what has happened."""
    assert not run.making(1, "big").output.exists()
    record = read_record(run.run, Run)
    assert (record.status, record.failure and record.failure.kind) == ("stopped", "DiskFull")
    assert [state.status for state in read_record(run.state, PipelineState).stages] == ["stopped"]


def _assert_goes_on(run: RunDir, disk: Path) -> None:
    (disk / "filler").unlink()
    assert carry_out(run, Heard()).status == "finished"
    assert not run.making(1, "big").path.exists()


def test_a_script_that_fills_the_disk_is_stopped_resumably(disk: Path) -> None:
    run = _scripted(disk, WRITES_TOO_MUCH)
    fill_disk(disk, leave_pages=ROOM_PAGES)
    place = run.making(1, "big").output
    with pytest.raises(
        DiskFull, match=rf"stage big: the disk is full: {place} found no room, [1-9][\d,]* bytes are free now"
    ) as caught:
        carry_out(run, Heard())
    assert caught.value.remedy == f"{REMEDY}\nits log is {run.path}/logs/big.log"
    _assert_stopped_with_room(run)
    _assert_goes_on(run, disk)


def test_a_disk_that_is_full_when_a_stage_is_put_in_order_is_told_too(disk: Path) -> None:
    """The script has ended well; the copy of its log finds no room."""
    run = _scripted(disk, SAYS_TOO_MUCH)
    fill_disk(disk, leave_pages=ROOM_PAGES)
    with pytest.raises(
        DiskFull, match=rf"stage big: the disk is full: {run.stage(1, 'big').path} found no room"
    ) as caught:
        carry_out(run, Heard())
    assert caught.value.remedy == REMEDY
    _assert_stopped_with_room(run)
    _assert_goes_on(run, disk)


def test_a_file_that_finds_no_room_is_told_with_its_bytes(disk: Path) -> None:
    rows = [
        {"prompt": f"Is {at} + {at} more than {at}?", "answer": f"Yes, {at} + {at} is {2 * at}." + " It is more." * 40}
        for at in range(1, 1201)
    ]
    write_jsonl(disk.parent / "train.jsonl", rows)
    run = _open(disk, PAIRS)
    fill_disk(disk, leave_pages=ROOM_PAGES)
    place = run.making(1, "big").output / "train.jsonl"
    with pytest.raises(
        DiskFull, match=rf"stage big: the disk is full: {place} needs [1-9][\d,]* bytes, [\d,]+ are free"
    ):
        carry_out(run, Heard())
    _assert_stopped_with_room(run)
    _assert_goes_on(run, disk)


def test_what_a_killed_stage_has_filled_the_disk_with_is_cleared_before_anything_is_written(disk: Path) -> None:
    """Not even its death found room in the records, and it is told all the same."""
    run = _scripted(disk, DIES_WHEN_FULL)
    with pytest.raises(WorkerDied, match="stage big: the worker was ended by SIGKILL"):
        carry_out(run, Heard())
    assert free_bytes(disk) == 0
    assert read_record(run.run, Run).status == "running"
    assert carry_out(run, Heard()).status == "finished"
    assert (run.stage(1, "big").output / "big.bin").read_bytes() == b"small"


def test_a_stage_that_finds_no_room_even_for_its_record_is_stopped_resumably(disk: Path) -> None:
    """What fills the disk lies elsewhere on it, so nothing can be given back."""
    run = _scripted(disk, FILLS_ANOTHER_FOLDER)
    with pytest.raises(
        DiskFull, match=f"stage big: the disk is full: {run.making(1, 'big').path} found no room, 0 bytes are free now"
    ):
        carry_out(run, Heard())
    (disk.parent / "room").touch()
    _assert_goes_on(run, disk)


def test_a_log_that_finds_no_room_is_told_by_its_place(disk: Path) -> None:
    log = disk / "run.log"
    with (disk / "run.lock").open("w") as lock:
        limit_names(disk, os.statvfs(disk).f_files - os.statvfs(disk).f_ffree)
        with pytest.raises(DiskFull, match=f"the disk is full: {log} found no room"):
            launch("nothing", disk, log=log, lock=lock.fileno(), tick=lambda: None)
