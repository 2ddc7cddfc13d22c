"""Checkpoints of several ranks: written by the first, whole, by the bare model's names; taken up by any number of ranks under any engine."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finefit.artifacts.checkpoint import list_checkpoints, problems, step_of
from finefit.artifacts.journal import read_steps
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.trainings import Stage, StageResult
from finefit.errors import DiskFull, Resumable
from finefit.pipeline.launch import launch_ranks
from finefit.spec.schema import DeepSpeed, Engine, FullyShard, Parallel, Single
from finefit.train.saver import _first_acts
from tests.conftest import make_model_folder, make_project
from tests.faults import FULL, TRAINING, Job, finish, make_job, outcome, start, words

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
    "ddp": Parallel(kind="ddp", devices=2),
    "fsdp2": FullyShard(kind="fsdp2", devices=2),
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
        where = job.fresh()
        assert finish(start(where)) == 0, words(where)
        found[tuning] = (job, where)
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
@pytest.mark.parametrize("kind", ENGINES)
def test_ranks_go_on_from_a_single_process_and_it_goes_on_from_them(
    kind: str, tuning: str, alone: dict[str, tuple[Job, StageDir]]
) -> None:
    """Weights and optimizer state are taken up whole, so the numbers differ by the order of sums alone; names and files are the same."""
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


class _Others:
    """The second of two ranks, told what the first has to say."""

    rank, size, is_first = 1, 2, False

    def __init__(self, first: Failure | None) -> None:
        self._first = first

    def any(self, claim: bool) -> bool:
        return claim

    def gather(self, value: object) -> list[object]:
        return [self._first, value]

    def barrier(self) -> None:
        return


def test_ranks_end_with_the_first_one_where_it_cannot_save() -> None:
    told = Failure.of(DiskFull("no room for checkpoint-3", "make some"))
    with pytest.raises(Resumable, match=r"the first rank could not save: no room for checkpoint-3"):
        _first_acts(_Others(told), lambda: pytest.fail("only the first rank writes"))
    _first_acts(_Others(None), lambda: pytest.fail("only the first rank writes"))
