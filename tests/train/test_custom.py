"""A model of the user's own trained as any other: a killed run ends bit-identical, two ranks are one, and what is
frozen has not moved."""

import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.processes import RankEnv
from finefit.artifacts.records import read_record
from finefit.artifacts.stage_records import StageResult
from finefit.data.batch_workers import BatchWorkers
from finefit.train.worker import work
from tests.custom_models import CODE, make_custom_project
from tests.faults import (
    Job,
    at_step,
    failure_of,
    finish,
    make_job,
    nothing,
    outcome,
    run_to_end,
    send_self,
    start,
    words,
)
from tests.ranks import as_ranks

FIXED = {"micro_batch": 2, "recompute": "none"}
TUNINGS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.1},
    "full": {"kind": "full"},
    "subset": {"kind": "subset", "trainable": ["blocks.*.out", "head"]},
}


def batches_made_here() -> None:
    """Without the processes that take seconds to start; one tuning has them."""

    def submit(_: BatchWorkers, call: Callable[..., Any], *args: object) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(call(*args))
        return made

    setattr(BatchWorkers, "submit", submit)  # noqa: B010


def job_of(folder: Path, **changes: Any) -> Job:
    def project(place: Path, *, spec: str) -> Path:  # noqa: ARG001
        return make_custom_project(
            place, **({"evaluate": None, "levers": FIXED, "schedule": {"epochs": 1, "warmup": 0.1}} | changes)
        )

    return make_job(folder, project=project)


@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNINGS)
def test_a_killed_run_ends_bit_identical_and_the_frozen_part_has_not_moved(tuning: str, tmp_path: Path) -> None:
    job, prepare = job_of(tmp_path, tuning=TUNINGS[tuning]), nothing if tuning == "lora" else batches_made_here
    whole, where = job.fresh(), job.fresh()
    assert finish(start(whole, prepare)) == 0, words(whole)
    losses = [loss for _, loss, *_ in outcome(whole).steps]
    assert losses[-1] < losses[0]

    def kill() -> None:
        prepare()
        at_step(5, lambda: send_self(signal.SIGKILL))

    assert finish(start(where, kill)) == -signal.SIGKILL
    assert finish(start(where, prepare)) == 0, words(where)
    assert outcome(where) == outcome(whole)
    assert read_record(where.result, StageResult).frozen_unchanged is (None if tuning == "full" else True)


def test_two_ranks_train_what_one_does_whatever_the_micro_batch(tmp_path: Path) -> None:
    tuning = {"kind": "lora", "rank": 4, "alpha": 8}
    alone = job_of(tmp_path / "one", tuning=tuning).fresh()
    assert finish(start(alone, batches_made_here)) == 0, words(alone)
    levers = {"micro_batch": 1, "recompute": "all"}
    several = job_of(tmp_path / "two", tuning=tuning, engine={"kind": "ddp", "devices": 2}, levers=levers).fresh()

    def act(place: RankEnv) -> int:
        torch.set_num_threads(1)
        batches_made_here()
        return work(several, place)

    ended = as_ranks(2, act, deadline_seconds=300)
    assert [(one.value, one.trace) for one in ended] == [(0, "")] * 2, words(several)
    ours, theirs = list(read_steps(alone.metrics)), list(read_steps(several.metrics))
    assert [line["rows"] for line in ours] == [line["rows"] for line in theirs] == [4, 4, 4, 4, 4, 2]
    for one, two in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    mine, other = (load_file(where.checkpoints / "final" / "adapter_model.safetensors") for where in (alone, several))
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-5)
    for rank in (0, 1):
        audited = [line for line in read_lines(several.metrics_of(rank)) if line.get("event") == "audited"]
        assert [line["reached"] - line["tensors"] for line in audited] == [0, 0]


def test_a_loss_that_is_a_mean_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    where = job_of(tmp_path, code=CODE.replace('reduction="sum")', 'reduction="mean")')).fresh()
    assert finish(start(where, batches_made_here)) == 2, words(where)
    failure = failure_of(where)
    assert "never a mean" in failure.problem
    assert not list(read_steps(where.metrics))


def test_a_step_that_runs_out_of_memory_is_tried_with_fewer_rows_and_then_with_layers_computed_again(
    tmp_path: Path,
) -> None:
    """As long as more than one row is there, or layers are kept, memory is short; a rehearsal does not know that."""
    short = (
        "        is_large = len(inputs['ids']) > 1 or not hasattr(self.blocks[0].forward, 'func')\n"
        "        if self.training and is_large and not hasattr(inputs['ids'], 'fake_mode'):\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory')\n"
    )
    place = "    def loss(self, inputs):\n"
    job = job_of(
        tmp_path,
        code=CODE.replace(place, place + "        self.short(inputs)\n").replace(
            place, "    def short(self, inputs):\n" + short + "\n" + place
        ),
    )
    where = run_to_end(job, batches_made_here)
    corrected = [line["levers"] for line in read_lines(where.path / "lever_changes.jsonl")]
    assert [(levers["micro_batch"], levers["recompute"]) for levers in corrected] == [(1, 0), (1, 2)]
