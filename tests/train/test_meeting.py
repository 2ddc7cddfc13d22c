"""The ranks meet: whoever is missing, and whoever is unlike the others, is named with what it has and where it is."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from finefit.artifacts.launcher import Place
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Stage
from finefit.errors import RunError, WorkerDied
from finefit.train.meeting import Visitor, introduce, meet, require_alike
from finefit.train.ranks import open_store
from tests.faults import Reference
from tests.ranks import as_ranks

GIB = 2**30
SHORT = timedelta(seconds=3)
VISITORS = [
    Visitor(
        rank=rank,
        host=f"node-{rank}",
        pid=100 + rank,
        device="cuda:0 H200",
        threads=4,
        free_bytes=80 * GIB,
        versions={"torch": "2.13.0", "finefit": "1"},
        stage_sha256="5" * 64,
        prepared={"train.safetensors": "a" * 64},
    )
    for rank in range(3)
]


@pytest.fixture
def stage(lora: Reference) -> Stage:
    found = read_record(lora.job.fresh().stage, Stage)
    return replace(found, prepared={"train.safetensors": "a" * 64}, foretold_bytes=60 * GIB)


def refused(visitors: list[Visitor], stage: Stage) -> str:
    with pytest.raises(RunError) as caught:
        require_alike(visitors, stage)
    return caught.value.problem


def test_ranks_that_are_alike_are_let_in(stage: Stage) -> None:
    assert require_alike(VISITORS, stage) == []


def test_an_odd_version_is_named_with_rank_host_and_both_values(stage: Stage) -> None:
    odd = replace(VISITORS[1], versions={"torch": "2.12.1", "finefit": "1"})
    problem = refused([VISITORS[0], odd, VISITORS[2]], stage)
    assert problem.splitlines()[1:] == ["  rank 1 (process 101 on node-1) has torch 2.12.1, the others 2.13.0"]


def test_a_first_rank_can_be_the_odd_one(stage: Stage) -> None:
    odd = replace(VISITORS[0], versions={"torch": "2.12.1", "finefit": "1"})
    assert "rank 0 (process 100 on node-0) has torch 2.12.1" in refused([odd, *VISITORS[1:]], stage)


def test_a_package_that_only_one_rank_has_is_named(stage: Stage) -> None:
    odd = replace(VISITORS[2], versions=VISITORS[2].versions | {"deepspeed": "0.19"})
    assert "rank 2 (process 102 on node-2) has deepspeed 0.19, the others none" in refused([*VISITORS[:2], odd], stage)


def test_another_stage_record_is_another_run(stage: Stage) -> None:
    odd = replace(VISITORS[2], stage_sha256="6" * 64)
    assert "rank 2 (process 102 on node-2) has stage.json 666666666666, the others 555555555555" in refused(
        [*VISITORS[:2], odd], stage
    )


@pytest.mark.parametrize(("seen", "words"), [("b" * 64, "bbbbbbbbbbbb"), ("missing", "missing")])
def test_data_that_one_rank_sees_otherwise_is_named(stage: Stage, seen: str, words: str) -> None:
    odd = replace(VISITORS[1], prepared={"train.safetensors": seen})
    problem = refused([VISITORS[0], odd, VISITORS[2]], stage)
    assert (
        f"rank 1 (process 101 on node-1) sees data/train.safetensors as {words}, the run was prepared with aaaaaaaaaaaa"
        in problem
    )


def test_a_card_that_somebody_else_uses_is_named_and_refused_where_the_stage_cannot_fit(stage: Stage) -> None:
    used = [VISITORS[0], replace(VISITORS[1], free_bytes=50 * GIB), VISITORS[2]]
    assert (
        f"rank 1 (process 101 on node-1) has {50 * GIB:,} bytes free on cuda:0 H200, another {80 * GIB:,}; {60 * GIB:,} are needed"
        in refused(used, stage)
    )
    (remark,) = require_alike(used, replace(stage, foretold_bytes=40 * GIB))
    assert remark.startswith("rank 1 (process 101 on node-1) has")


def test_a_rank_that_does_not_come_is_named_by_all_who_did(lora: Reference) -> None:
    where = lora.job.fresh().path

    def act(place: Place) -> None:
        stage = read_record(StageDir(where).stage, Stage)
        meet(introduce(StageDir(where), stage, place), open_store(place, patience=SHORT), size=3, patience=SHORT)
        time.sleep(1)  # the first holds the store for the others

    def stay(place: Place) -> None:
        try:
            act(place)
        except WorkerDied:
            time.sleep(1)
            raise

    first, second, _ = as_ranks(3, stay, absent=(2,))
    for ended in (first, second):
        assert isinstance(ended.error, WorkerDied), ended.trace
        assert "rank 2 of 3 did not come to the meeting within 3 s" in ended.error.problem
        assert "logs/rank-2.log" in ended.error.remedy


def test_ranks_that_meet_see_the_same_run_and_each_other(lora: Reference) -> None:
    where = lora.job.fresh().path

    def act(place: Place) -> list[Visitor]:
        stage, store = read_record(StageDir(where).stage, Stage), open_store(place, patience=SHORT)
        visitors = meet(introduce(StageDir(where), stage, place), store, size=2)
        assert require_alike(visitors, stage) == []
        store.set(f"done/{place.rank}", "1")
        store.wait(["done/0", "done/1"])
        return visitors

    first, second = as_ranks(2, act)
    assert first.trace == second.trace == ""
    assert first.value == second.value
    assert [visitor.rank for visitor in first.value] == [0, 1]
    assert first.value[0].prepared == read_record(StageDir(where).stage, Stage).prepared
    assert len({visitor.pid for visitor in first.value}) == 2


def test_what_a_rank_does_not_see_is_missing_in_its_words(lora: Reference, tmp_path: Path) -> None:
    where = lora.job.fresh()
    stage = read_record(where.stage, Stage)
    where.prepared("train.safetensors").rename(tmp_path / "gone")
    place = Place(rank=0, size=1, local_rank=0, local_size=1, address="localhost", port=1)
    assert introduce(where, stage, place).prepared["train.safetensors"] == "missing"
