"""F22: kill -9 of a pipeline, in and between its stages. What was finished is not repeated, what was half done is made
again, and the end is that of a run that nobody killed."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from finefit.artifacts.records import PipelineState, Run, read_record
from finefit.artifacts.rundir import RunDir
from finefit.errors import DiskFull, WorkerDied
from finefit.facts.files import free_bytes
from finefit.run.cache_inputs import tree_digest
from finefit.run.launch import launch
from finefit.run.staleness import decide_all, is_finished, open_stages
from tests.conftest import make_model_folder, write_jsonl
from tests.faults import PAGE, die_at_operation, fill_disk, record_operations, small_disk
from tests.pipelines import Heard, calls, carry_out, make_scripts, open_pipeline
from tests.train.test_saver import limit_names

KILLS = int(os.environ.get("FINEFIT_STAGE_KILLS", "4"))
RUN = "runs/chain-1"
NAMES = ("first", "second")


def _prepared(folder: Path) -> RunDir:
    """Two scripts, nothing of them run yet."""
    spec = make_scripts(folder)
    text = spec.read_text(encoding="utf-8").split("  third:")[0]
    spec.write_text(text, encoding="utf-8")
    return open_pipeline(spec)


def _die_once_at_the_second(folder: Path) -> None:
    last_words = """
import os
died = Path(__file__).parent / "died"
if "two" in words and not died.exists():
    died.touch()
    os.kill(os.getpid(), 9)
"""
    script = folder / "add.py"
    script.write_text(script.read_text() + last_words)


def _mortal(folder: Path) -> RunDir:
    """Finished; the second stage dies when it is made again."""
    run = _prepared(folder)
    _die_once_at_the_second(folder)
    (folder / "died").touch()
    assert carry_out(run).status == "finished"
    (folder / "died").unlink()
    calls(folder)
    return run


def _recorded(folder: Path, trace: Path) -> None:
    record_operations(folder / RUN, trace)
    carry_out(RunDir(folder / RUN))


def _killed(folder: Path, number: int) -> None:
    die_at_operation(folder / RUN, number)
    carry_out(RunDir(folder / RUN))


def _exit_code(target: object, *arguments: object) -> int | None:
    """Of a process of its own, forked from one that has loaded all that it needs."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)  # type: ignore[arg-type]
    process.start()
    process.join(120)
    return process.exitcode


def _outputs(run: RunDir) -> dict[str, str]:
    return {name: tree_digest(run.stage(number, name).output) for number, name in enumerate(NAMES, 1)}


def test_a_pipeline_that_is_killed_anywhere_ends_as_one_that_nobody_killed(tmp_path: Path) -> None:
    run = _prepared(tmp_path / "pristine")
    shutil.copytree(tmp_path / "pristine", tmp_path / "whole")
    trace = tmp_path / "operations.txt"
    assert _exit_code(_recorded, tmp_path / "whole", trace) == 0
    operations = trace.read_text().splitlines()
    expected = _outputs(RunDir(tmp_path / "whole" / RUN))
    shown = next(at for at, line in enumerate(operations) if line.startswith("os.rename\tstages/.unfinished-1-first"))
    points = {shown, shown + 1, *random.Random(22).sample(range(len(operations)), KILLS)}
    for number in sorted(points):
        folder = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "pristine", folder)
        assert _exit_code(_killed, folder, number) == -signal.SIGKILL, operations[number]
        run = RunDir(folder / RUN)
        made = [(name, run.stage(at, name), run.unfinished(at, name)) for at, name in enumerate(NAMES, 1)]
        done = {name for name, shown_at, hidden in made if shown_at.done.exists() or hidden.done.exists()}
        assert all(
            run.stage(at, name).done.exists() for at, name in enumerate(NAMES, 1) if run.stage(at, name).path.exists()
        ), operations[number]
        calls(folder)
        assert carry_out(run).status == "finished"
        assert set(calls(folder)) == set(NAMES) - done, operations[number]
        assert _outputs(run) == expected
        assert is_finished(run)
        assert not [path.name for path in (run.path / "stages").iterdir() if path.name.startswith(".")]


SAMPLED = """\
name: chain
device: cpu
stages:
  first:
    kind: make_pairs
    method: {kind: sampled, model: {kind: folder, path: model}, task: {kind: python, path: task.py}, samples: 3, max_new_tokens: 24, temperature: 1.0}
    train: [{path: train.jsonl}]
"""  # noqa: E501
DIES_ONCE = """
import os
from pathlib import Path

METRICS = {"vowels": "mean"}

def extract(answer):
    return answer

def score(found, reference):
    died = Path(__file__).parent / "died"
    if found != reference and not died.exists():  # of answers: references are looked at before any is asked for
        died.touch()
        os.kill(os.getpid(), 9)
    return {"vowels": sum(letter in "aeiou" for letter in found) / 50}
"""


@pytest.mark.slow
def test_what_a_model_has_answered_before_its_stage_was_killed_is_not_asked_for_again(tmp_path: Path) -> None:
    """The task's own script kills it when the first answer is scored: all have been given then. One of them is put in
    another's place, which a model that is asked again would not say."""
    make_model_folder(tmp_path / "model", seed=3)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"say {at}", "answer": "a e"} for at in range(6)])
    (tmp_path / "task.py").write_text(DIES_ONCE)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SAMPLED)
    run = open_pipeline(spec)
    with pytest.raises(WorkerDied, match="stage first: the worker was ended by SIGKILL"):
        carry_out(run)
    journal = run.unfinished(1, "first").answers
    batch = json.loads(journal.read_text(encoding="utf-8").splitlines()[0])
    batch["answers"][0][1] = ours = "aeiou" * 9
    journal.write_text(json.dumps(batch) + "\n", encoding="utf-8")
    (choice,) = decide_all(open_stages(run))
    assert choice.reason == "begun and not finished: it resumes"
    assert carry_out(run).status == "finished"
    pairs = run.stage(1, "first").output / "train.jsonl"
    assert ours in pairs.read_text(encoding="utf-8")
    assert carry_out(run, forced=["first"]).status == "finished"
    assert ours not in pairs.read_text(encoding="utf-8")


def test_a_stage_that_was_whole_and_not_shown_yet_is_not_made_again(tmp_path: Path) -> None:
    run = _prepared(tmp_path / "project")
    assert carry_out(run).status == "finished"
    expected = _outputs(run)
    run.stage(1, "first").path.rename(run.unfinished(1, "first").path)
    calls(tmp_path / "project")
    assert decide_all(open_stages(run))[0].reason == "begun and not finished: it resumes"
    assert carry_out(run).status == "finished"
    assert calls(tmp_path / "project") == []
    assert _outputs(run) == expected


def test_a_command_that_asks_for_stages_anew_goes_on_when_it_was_killed_and_is_given_again(tmp_path: Path) -> None:
    run = _mortal(tmp_path / "project")
    with pytest.raises(WorkerDied):
        carry_out(run, forced=NAMES)
    assert calls(tmp_path / "project") == ["first", "second"]
    assert carry_out(run, forced=NAMES).status == "finished"
    assert calls(tmp_path / "project") == ["second"]
    assert carry_out(run, forced=NAMES).status == "finished"  # another command, since that one has come to its end
    assert calls(tmp_path / "project") == ["first", "second"]


def test_a_command_that_asks_for_other_stages_is_another_command(tmp_path: Path) -> None:
    run = _mortal(tmp_path / "project")
    with pytest.raises(WorkerDied):
        carry_out(run, forced=NAMES)
    calls(tmp_path / "project")
    assert carry_out(run, forced=["first"]).status == "finished"
    assert calls(tmp_path / "project") == ["first"]
    assert not [path.name for path in (run.path / "stages").iterdir() if path.name.startswith(".")]


def test_the_death_of_a_stages_process_is_told_and_the_same_call_goes_on(tmp_path: Path) -> None:
    run = _prepared(tmp_path / "project")
    _die_once_at_the_second(tmp_path / "project")
    with pytest.raises(WorkerDied, match="stage second: the worker was ended by SIGKILL"):
        carry_out(run)
    assert read_record(run.run, Run).status == "stopped"
    assert [state.status for state in read_record(run.state, PipelineState).stages] == ["done", "stopped"]
    calls(tmp_path / "project")
    heard = Heard()
    assert carry_out(run, heard).status == "finished"
    assert calls(tmp_path / "project") == heard.begun == ["second"]
    assert heard.ended == [("first", "done"), ("second", "run")]


# A disk that a stage fills: told with its place and bytes, the half-made output given back, and with room the same
# call goes on.

DISK_BYTES = 4 << 20
ROOM_PAGES = 120
REMEDY = "free some space, then give the same command again: it resumes where it stopped"
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
    Path("../outcome.json").unlink()
    with open("../../../../../filler", "wb", buffering=0) as file:
        while file.write(bytes({PAGE})):
            pass
Path(sys.argv[1]).write_bytes(b"small")
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as place:
        yield place


def _open(disk: Path, text: str) -> RunDir:
    """On the small disk; what it stands on lies elsewhere."""
    spec = disk.parent / "spec.yaml"
    spec.write_text(text, encoding="utf-8")
    return open_pipeline(spec, runs=disk / "runs")


def _scripted(disk: Path, script: str) -> RunDir:
    assert os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize == DISK_BYTES  # these scripts fill it
    (disk.parent / "big.py").write_text(f"import os, sys\n{script}\n", encoding="utf-8")
    run = _open(disk, SCRIPT)
    assert run.path.is_relative_to(disk)
    return run


def _assert_stopped_with_room(run: RunDir) -> None:
    """Nothing half made is left, so the records say what has happened."""
    assert not run.unfinished(1, "big").output.exists()
    record = read_record(run.run, Run)
    assert (record.status, record.failure and record.failure.kind) == ("stopped", "DiskFull")
    assert [state.status for state in read_record(run.state, PipelineState).stages] == ["stopped"]


def _assert_goes_on(run: RunDir, disk: Path) -> None:
    (disk / "filler").unlink()
    assert carry_out(run).status == "finished"
    assert not run.unfinished(1, "big").path.exists()


def test_a_script_that_fills_the_disk_is_stopped_resumably(disk: Path) -> None:
    run = _scripted(disk, WRITES_TOO_MUCH)
    fill_disk(disk, leave_pages=ROOM_PAGES)
    place = run.unfinished(1, "big").output
    with pytest.raises(
        DiskFull, match=rf"stage big: the disk is full: {place} could not be written, [1-9][\d,]* bytes are free now"
    ) as caught:
        carry_out(run)
    assert caught.value.remedy == f"{REMEDY}\nits log is {run.path}/logs/big.log"
    _assert_stopped_with_room(run)
    _assert_goes_on(run, disk)


def test_a_disk_that_is_full_when_a_stage_is_put_in_order_is_told_too(disk: Path) -> None:
    """The script has ended well; the copy of its log finds no room."""
    run = _scripted(disk, SAYS_TOO_MUCH)
    fill_disk(disk, leave_pages=ROOM_PAGES)
    with pytest.raises(
        DiskFull, match=rf"stage big: the disk is full: {run.stage(1, 'big').path} could not be written"
    ) as caught:
        carry_out(run)
    assert caught.value.remedy == REMEDY
    _assert_stopped_with_room(run)
    _assert_goes_on(run, disk)


@pytest.mark.slow
def test_a_file_that_finds_no_room_is_told_with_its_bytes(disk: Path) -> None:
    rows = [
        {"prompt": f"Is {at} + {at} more than {at}?", "answer": f"Yes, {at} + {at} is {2 * at}." + " It is more." * 40}
        for at in range(1, 1201)
    ]
    write_jsonl(disk.parent / "train.jsonl", rows)
    run = _open(disk, PAIRS)
    fill_disk(disk, leave_pages=ROOM_PAGES)
    place = run.unfinished(1, "big").output / "train.jsonl"
    with pytest.raises(
        DiskFull, match=rf"stage big: the disk is full: {place} needs [1-9][\d,]* bytes, [\d,]+ are free"
    ):
        carry_out(run)
    _assert_stopped_with_room(run)
    _assert_goes_on(run, disk)


def test_what_a_killed_stage_has_filled_the_disk_with_is_cleared_before_anything_is_written(disk: Path) -> None:
    """Not even its death found room in the records, and it is told all the same."""
    run = _scripted(disk, DIES_WHEN_FULL)
    with pytest.raises(WorkerDied, match="stage big: the worker was ended by SIGKILL"):
        carry_out(run)
    assert free_bytes(disk) == 0
    assert read_record(run.run, Run).status == "running"
    assert carry_out(run).status == "finished"
    assert (run.stage(1, "big").output / "big.bin").read_bytes() == b"small"


def test_a_stage_that_finds_no_room_even_for_its_record_is_stopped_resumably(disk: Path) -> None:
    """What fills the disk lies elsewhere on it, so nothing can be given back."""
    run = _scripted(disk, FILLS_ANOTHER_FOLDER)
    with pytest.raises(
        DiskFull,
        match=f"stage big: the disk is full: {run.unfinished(1, 'big').path} could not be written, 0 bytes are free",
    ):
        carry_out(run)
    (disk.parent / "room").touch()
    _assert_goes_on(run, disk)


def test_a_log_that_finds_no_room_is_told_by_its_place(disk: Path) -> None:
    log = disk / "run.log"
    with (disk / "run.lock").open("w") as lock:
        limit_names(disk, os.statvfs(disk).f_files - os.statvfs(disk).f_ffree)
        with pytest.raises(DiskFull, match=f"the disk is full: {log} could not be written"):
            launch("nothing", disk, log=log, lock=lock.fileno(), tick=lambda: None)
