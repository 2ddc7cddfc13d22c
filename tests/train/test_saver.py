"""F6: a damaged checkpoint is passed over before a weight is loaded, and the run says so; a foreign one is refused."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.checkpoint import list_checkpoints, problems, step_of
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import Stage, StageResult
from finefit.errors import DiskFull, Resumable
from finefit.run.launch import launch_ranks
from finefit.spec.schema import Ddp, DeepSpeed, Engine, Fsdp2, Single
from finefit.train import worker
from finefit.train.saver import first_acts
from tests.conftest import make_model_folder, make_project
from tests.faults import (
    FULL,
    PAGE,
    TRAINING,
    Job,
    Reference,
    at_operation,
    at_step,
    failure_of,
    fill_disk,
    finish,
    hidden,
    make_job,
    outcome,
    run_to_end,
    send_self,
    small_disk,
    start,
    words,
)
from tests.ranks import Beside
from tests.slow_cases import slow_but

REFUSED = 2


@pytest.fixture(scope="module")
def stopped(lora: Reference) -> StageDir:
    """Killed in step 11: checkpoint-6 and checkpoint-9 are there."""
    where = lora.job.fresh()
    assert finish(start(where, lambda: at_step(11, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    assert [c.name for c in list_checkpoints(where.checkpoints)] == ["checkpoint-6", "checkpoint-9"]
    return where


def flip(path: Path, at: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda c: flip(c / "adapter_model.safetensors", -100),
    "a bit of the optimizer": lambda c: flip(c / "finefit_optimizer.safetensors", -100),
    "a bit of the manifest": lambda c: flip(c / "finefit_manifest.json", 5),
    "a truncated file": lambda c: os.truncate(c / "finefit_optimizer.safetensors", 20_000),
    "an emptied file": lambda c: os.truncate(c / "finefit_state.json", 0),
    "a deleted file": lambda c: (c / "finefit_rng.safetensors").unlink(),
    "a deleted manifest": lambda c: (c / "finefit_manifest.json").unlink(),
    "swapped files": lambda c: swap(c / "adapter_config.json", c / "tokenizer_config.json"),
    "a file of another checkpoint": lambda c: shutil.copy(
        c.parent / "checkpoint-6" / "finefit_optimizer.safetensors", c
    ),
    "an added file": lambda c: (c / "model.safetensors").write_bytes(b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_falls_back_to_the_checkpoint_before_and_says_so(lora: Reference, stopped: StageDir, damage: str) -> None:
    where = lora.job.copy(stopped.run)
    DAMAGE[damage](where.checkpoints / "checkpoint-9")
    assert finish(start(where)) == 0
    (note,) = [line["note"] for line in read_lines(where.metrics) if line.get("event") == "rejected"]
    assert note.startswith("checkpoint-9 is skipped: ")
    assert note in words(where)
    assert [line["step"] for line in read_lines(where.metrics) if line.get("event") == "resumed"] == [6]
    assert outcome(where) == lora.outcome


def test_swapped_checkpoints_are_refused(lora: Reference, stopped: StageDir) -> None:
    """Each verifies in itself; what it says of itself does not fit its name."""
    where = lora.job.copy(stopped.run)
    one, other = list_checkpoints(where.checkpoints)
    one.rename(where.checkpoints / "aside")
    other.rename(one)
    (where.checkpoints / "aside").rename(other)
    assert finish(start(where)) == REFUSED
    assert "step: the checkpoint has 6, this stage 9" in words(where)


def test_damage_is_found_before_a_weight_is_loaded(lora: Reference, stopped: StageDir) -> None:
    """With every checkpoint damaged the run ends before it would load the model."""
    where = lora.job.copy(stopped.run)
    for checkpoint in list_checkpoints(where.checkpoints):
        flip(checkpoint / "adapter_model.safetensors", -1)

    def loads(*_: object, **__: object) -> None:
        os._exit(99)

    assert finish(start(where, lambda: setattr(worker, "load_base", loads))) == REFUSED
    failure = failure_of(where)
    assert "checkpoint-6 is skipped: adapter_model.safetensors has changed" in failure.problem
    assert "checkpoint-9 is skipped: adapter_model.safetensors has changed" in failure.problem
    assert "remove the damaged checkpoints" in failure.remedy


def test_a_run_whose_checkpoints_were_removed_starts_over_bit_identical(lora: Reference, stopped: StageDir) -> None:
    where = lora.job.copy(stopped.run)
    shutil.rmtree(where.checkpoints)
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_checkpoint_of_another_model_is_refused_by_both_names(
    lora: Reference, stopped: StageDir, tmp_path: Path
) -> None:
    foreign = make_job(tmp_path / "other", model_seed=1).fresh()
    assert finish(start(foreign, lambda: at_step(13, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    where = lora.job.copy(stopped.run)
    shutil.copytree(foreign.checkpoints / "checkpoint-12", where.checkpoints / "checkpoint-12")
    assert problems(where.checkpoints / "checkpoint-12") == []
    assert finish(start(where)) == REFUSED
    ours, theirs = (read_record(w.stage, Stage).model_fingerprint[:12] for w in (where, foreign))
    assert ours != theirs
    failure = failure_of(where)
    assert f"the checkpoint has model ({theirs}), this stage model ({ours})" in failure.problem
    assert failure.remedy == "remove it from this run's checkpoints folder"
    shutil.rmtree(where.checkpoints / "checkpoint-12")
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_project_that_was_moved_goes_on_bit_identical(lora: Reference, stopped: StageDir, tmp_path: Path) -> None:
    project = lora.job.pristine.parent.parent
    shutil.copytree(project / "model", tmp_path / "elsewhere" / "deep" / "model")
    moved = tmp_path / "elsewhere" / "deep" / "runs" / "tiny-1"
    shutil.copytree(stopped.run, moved, symlinks=True)
    where = StageDir(moved / "stages" / "1-sft")
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_copy_that_followed_the_links_goes_on_bit_identical(lora: Reference, stopped: StageDir) -> None:
    where = lora.job.copy(stopped.run)
    shutil.rmtree(where.run)
    shutil.copytree(stopped.run, where.run)
    assert (where.checkpoints / "best").is_dir()
    assert not (where.checkpoints / "best").is_symlink()
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


# F4, whole runs: the disk fills up before a save, within one, and between two. The message names place and bytes; with
# room the run goes on.

STOPPED = 3
DISK_BYTES = 8 << 20
FULL_DISK_FULL = re.compile(r"the disk is full: (\S+) needs ([\d,]+) bytes, ([\d,]+) are free")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as place:
        yield place


@pytest.fixture
def job(disk: Path) -> Job:
    return make_job(disk / "project")


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
    found = FULL_DISK_FULL.search(failure_of(where).problem)
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
    """The same run meets a full disk at one page after the other: first, middle and last byte of each file are among
    them."""
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
    files = [__file__, str(Path(__file__).parent.parent / "artifacts")]
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-k", "disk", *files]
    inside = subprocess.run([unshare, "-rm", *pytest_here], capture_output=True, text=True, check=False)
    assert inside.returncode == 0, inside.stdout
    assert " 1 skipped" in inside.stdout  # this one


# Checkpoints of several ranks: written by the first, whole, by the bare model's names; taken up by any number of ranks
# under any engine.

WORKER = "finefit.train.worker"


def sure(spec: str) -> str:
    """Without chance, with levers that every engine has, and with all its checkpoints."""
    levers = "levers: {micro_batch: 2, kernels: torch, keep_attention: false}"
    return (
        spec.replace("dropout: 0.1", "dropout: 0.0")
        .replace("keep: 2", "keep: 9")
        .replace("levers: {micro_batch: 2}", levers)
    )


TWO = "engine: {kind: ddp, devices: 2}\n"
ENGINES: dict[str, Engine] = {
    "ddp": Ddp(kind="ddp", devices=2),
    "fsdp2": Fsdp2(kind="fsdp2", devices=2),
    "zero2": DeepSpeed(kind="deepspeed", devices=2, stage=2),
    "zero3": DeepSpeed(kind="deepspeed", devices=2, stage=3),
}


def without_dropout(folder: Path, *, spec: str) -> Path:
    path = make_project(folder, spec=spec)
    shutil.rmtree(folder / "model")
    make_model_folder(folder / "model", dropout=0.0)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, StageDir]]:
    """A run of one process for each tuning, with all its checkpoints."""
    found = {}
    for tuning, spec in (("lora", sure(TRAINING)), ("full", sure(FULL))):
        job = make_job(tmp_path_factory.mktemp(tuning), spec=spec, project=without_dropout)
        found[tuning] = (job, run_to_end(job))
    return found


def run_ranks(where: StageDir, tick: Callable[[], None] = lambda: None) -> int:
    lock = os.open(RunDir(where.run).lock, os.O_RDWR | os.O_CREAT)
    try:
        return launch_ranks(WORKER, where, devices=2, lock=lock, tick=tick)
    finally:
        os.close(lock)


def under(where: StageDir, engine: Engine, *, after: int) -> None:
    """The run goes back to a checkpoint and on with another engine."""
    for checkpoint in list_checkpoints(where.checkpoints):
        if step_of(checkpoint) > after:
            shutil.rmtree(checkpoint)
    for alias in ("final", "best"):
        (where.checkpoints / alias).unlink(missing_ok=True)
    where.result.unlink(missing_ok=True)
    write_record(where.stage, replace(read_record(where.stage, Stage), engine=engine))


def tensors(where: StageDir, step: int) -> dict[str, Tensor]:
    """But the random numbers."""
    folder = where.checkpoints / f"checkpoint-{step}"
    assert problems(folder) == []
    files = (f for f in sorted(folder.glob("*.safetensors")) if f.name != "finefit_rng.safetensors")
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    worst = max(((found[name] - wanted[name]).abs().max().item(), name) for name in wanted)
    assert worst[0] < 1e-5, f"{worst[1]} differs by {worst[0]}"


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("kind", slow_but(["zero3"], ENGINES.keys()))
def test_ranks_go_on_from_a_single_process_and_it_goes_on_from_them(
    kind: str, tuning: str, alone: dict[str, tuple[Job, StageDir]]
) -> None:
    """Weights and optimizer state are taken up whole, so the numbers differ by the order of sums alone; names and files
    are the same."""
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra finefit[deepspeed] is not installed")
    job, reference = alone[tuning]
    where = job.copy(reference.run)
    under(where, ENGINES[kind], after=12)
    assert run_ranks(where) == 0, words(where)
    assert_close(tensors(where, 15), tensors(reference, 15))
    assert_close(tensors(where, 18), tensors(reference, 18))
    random = load_file(where.checkpoints / "final" / "finefit_rng.safetensors")
    assert sorted(random) == ["rank0/cpu", "rank1/cpu"]
    assert not torch.equal(random["rank0/cpu"], random["rank1/cpu"])
    assert [line["batch"] for line in read_steps(where.metrics)][:12] == [
        line["batch"] for line in read_steps(reference.metrics)
    ][:12]
    wanted = [line["loss"] for line in read_steps(reference.metrics)]
    assert [line["loss"] for line in read_steps(where.metrics)] == pytest.approx(wanted, rel=1e-4)
    assert (where.path / "deepspeed.json").exists() == kind.startswith("zero")
    result = read_record(where.result, StageResult)
    assert (result.parameters, result.trainable_parameters) == _sizes(reference)

    under(where, Single(kind="single"), after=15)
    assert finish(start(where)) == 0, words(where)
    assert_close(tensors(where, 18), tensors(reference, 18))


def _sizes(where: StageDir) -> tuple[int, int]:
    result = read_record(where.result, StageResult)
    return result.parameters, result.trainable_parameters


def test_two_ranks_that_were_stopped_end_bit_for_bit_as_if_they_had_not_been(tmp_path: Path) -> None:
    """With dropout, so that each rank's random numbers have to be its own again."""
    job = make_job(tmp_path, spec=TRAINING + TWO)
    whole, stopped = job.fresh(), job.fresh()
    assert run_ranks(whole) == 0, words(whole)

    sent: list[int] = []

    def stop_at_seven() -> None:
        if not sent and stopped.metrics.exists() and any(line["step"] >= 7 for line in read_steps(stopped.metrics)):
            sent.append(7)
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_ranks(stopped, stop_at_seven) == Resumable.exit_code, words(stopped)
    assert sent
    assert 7 <= read_steps(stopped.metrics)[-1]["step"] < 18
    assert run_ranks(stopped) == 0, words(stopped)
    assert outcome(stopped) == outcome(whole)


def test_ranks_end_with_the_first_one_where_it_cannot_save() -> None:
    told = Failure.of(DiskFull("no room for checkpoint-3", "make some"))
    with pytest.raises(Resumable, match=r"the first rank could not save: no room for checkpoint-3"):
        first_acts(Beside(told, rank=1), lambda: pytest.fail("only the first rank writes"))
    first_acts(Beside(None, rank=1), lambda: pytest.fail("only the first rank writes"))
