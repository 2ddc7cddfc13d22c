"""F6: a damaged checkpoint is passed over before a weight is loaded, and the run says so; a foreign one is refused."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from finefit.artifacts.checkpoint import list_checkpoints, problems
from finefit.artifacts.journal import read_lines
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Stage, StageResult
from finefit.train import worker
from tests.faults import Reference, at_step, finish, make_job, outcome, send_self, start, words

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
    assert note.startswith("checkpoint-9 is passed over: ")
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
    failure = read_record(where.result, StageResult).failure
    assert failure is not None
    assert "checkpoint-6 is passed over: adapter_model.safetensors has changed" in failure.problem
    assert "checkpoint-9 is passed over: adapter_model.safetensors has changed" in failure.problem
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
    failure = read_record(where.result, StageResult).failure
    assert failure is not None
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
