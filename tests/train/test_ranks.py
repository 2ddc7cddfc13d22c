"""Ranks over gloo, in processes of their own: what one says all hear, and whoever is lost is named."""

import os
import signal
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from finefit.artifacts.processes import RankEnv
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from finefit.errors import RunError, WorkerDied
from finefit.train.context import StopRequest
from finefit.train.ranks import (
    ONE_RANK,
    ManyRanks,
    RankInfo,
    describe_rank,
    joined,
    open_store,
    rendezvous,
    require_same_setup,
)
from finefit.train.saver import agreed_checkpoint
from tests.faults import Reference, run_to_end
from tests.ranks import Beside, Ended, as_ranks

LONG, SHORT = timedelta(minutes=2), timedelta(seconds=3)
"""Of what must happen however loaded the machine is, and of what must not."""


def values(ended: list[Ended]) -> list[Any]:
    assert [(e.error, e.trace) for e in ended] == [(None, "")] * len(ended)
    return [e.value for e in ended]


def test_one_rank_is_told_by_itself() -> None:
    told = (ONE_RANK.any(True), ONE_RANK.any(False), ONE_RANK.gather("x"), ONE_RANK.is_first)
    assert told == (True, False, ["x"], True)


def test_what_any_rank_claims_every_rank_hears_and_what_all_have_comes_by_rank() -> None:
    def act(place: RankEnv) -> Any:
        stop = StopRequest()
        with joined(place, open_store(place, timeout=LONG), device="cpu") as ranks:
            heard = [ranks.any(place.rank == 1), ranks.any(False), stop.agreed(ranks)]
            ranks.barrier()
            if place.rank == 1:
                stop.reason = "SIGTERM"
            heard.append(stop.agreed(ranks))
            return ranks.rank, ranks.size, ranks.is_first, heard, list(ranks.gather({"rank": place.rank}))

    told = [True, False, None, "SIGTERM"], [{"rank": 0}, {"rank": 1}]
    assert values(as_ranks(2, act)) == [(0, 2, True, *told), (1, 2, False, *told)]


@pytest.mark.parametrize("ask", ["any", "gather", "barrier"])
def test_the_death_of_a_rank_is_an_error_of_the_others_at_once(ask: str) -> None:
    def act(place: RankEnv) -> None:
        with joined(place, open_store(place, timeout=LONG), device="cpu") as ranks:
            if place.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            {"any": lambda: ranks.any(True), "gather": lambda: ranks.gather(1), "barrier": ranks.barrier}[ask]()

    first, second = as_ranks(2, act)
    assert second.code == -signal.SIGKILL
    assert isinstance(first.error, WorkerDied), first.trace
    assert first.error.problem.startswith("rank 0 lost the others while ")
    assert first.seconds < 30


def test_a_barrier_names_the_rank_that_does_not_come() -> None:
    def act(place: RankEnv) -> None:
        store = open_store(place, timeout=LONG)
        with joined(place, store, device="cpu"):
            if place.rank == 1:
                store.wait(["named"])
            assert dist.group.WORLD is not None
            try:
                ManyRanks(dist.group.WORLD, timeout=SHORT).barrier()
            finally:
                store.set("named", "")

    first, _ = as_ranks(2, act)
    assert isinstance(first.error, WorkerDied), first.trace
    assert "1" in first.error.problem.split("while waiting for the others: ")[1]


def test_an_error_that_is_nobodys_absence_stays_what_it_is() -> None:
    def act(place: RankEnv) -> None:
        store = open_store(place, timeout=LONG)
        with joined(place, store, device="cpu") as ranks:
            try:
                ranks.gather(lambda: None)  # cannot be sent
            finally:  # no rank leaves while the other still joins: that would be an absence
                store.set(f"failed/{place.rank}", "")
                store.wait(["failed/0", "failed/1"])

    assert all("PicklingError" in e.trace or "AttributeError" in e.trace for e in as_ranks(2, act))


def test_a_rank_that_does_not_find_the_first_says_where_it_looked() -> None:
    def act(place: RankEnv) -> None:
        open_store(place, timeout=timedelta(seconds=2))

    _, second = as_ranks(2, act, absent=(0,))
    assert isinstance(second.error, WorkerDied), second.trace
    assert "rank 1 did not find rank 0 at 127.0.0.1:" in second.error.problem
    assert "within 2 s" in second.error.problem


def test_a_port_that_is_taken_is_named_by_the_rank_that_needs_it() -> None:
    def act(place: RankEnv) -> None:
        with socket.socket() as taken:
            taken.bind(("", place.port))
            taken.listen()
            open_store(place, timeout=SHORT)

    (first,) = as_ranks(1, act)
    assert isinstance(first.error, WorkerDied), first.trace
    assert "rank 0 cannot listen on port" in first.error.problem


# The ranks meet: whoever is missing, and whoever is unlike the others, is named with what it has and where it is.

GIB = 2**30
ROWS = "train.safetensors"
INFOS = [
    RankInfo(
        rank=rank,
        host=f"node-{rank}",
        pid=100 + rank,
        device="cuda:0 H200",
        threads=4,
        free_bytes=80 * GIB,
        versions={"torch": "2.13.0", "finefit": "1"},
        stage_sha256="5" * 64,
        prepared={ROWS: "a" * 64},
    )
    for rank in range(3)
]


@pytest.fixture
def stage(lora: Reference) -> Stage:
    found = read_record(lora.job.fresh().stage, Stage)
    return replace(found, prepared={ROWS: "a" * 64}, predicted_bytes=60 * GIB)


def refused(stage: Stage, at: int, **odd: Any) -> str:
    """What is said of three ranks, one of which is unlike the others."""
    with pytest.raises(RunError) as caught:
        require_same_setup([*INFOS[:at], replace(INFOS[at], **odd), *INFOS[at + 1 :]], stage)
    return caught.value.problem


def test_ranks_that_are_alike_are_let_in(stage: Stage) -> None:
    assert require_same_setup(INFOS, stage) == []


OLD, MORE = {"torch": "2.12.1", "finefit": "1"}, {"torch": "2.13.0", "finefit": "1", "deepspeed": "0.19"}
PREPARED = "the run was prepared with aaaaaaaaaaaa"


@pytest.mark.parametrize(
    ("at", "odd", "words"),
    [
        (1, {"versions": OLD}, "has torch 2.12.1, the others 2.13.0"),
        (0, {"versions": OLD}, "has torch 2.12.1, the others 2.13.0"),
        (2, {"versions": MORE}, "has deepspeed 0.19, the others none"),
        (2, {"stage_sha256": "6" * 64}, "has stage.json 666666666666, the others 555555555555"),
        (1, {"prepared": {ROWS: "b" * 64}}, f"sees data/{ROWS} as bbbbbbbbbbbb, {PREPARED}"),
        (1, {"prepared": {ROWS: "missing"}}, f"sees data/{ROWS} as missing, {PREPARED}"),
    ],
)
def test_an_odd_rank_is_named_with_its_host_and_both_values(stage: Stage, at: int, odd: Any, words: str) -> None:
    assert refused(stage, at, **odd).splitlines()[1:] == [f"  rank {at} (process 10{at} on node-{at}) {words}"]


def test_a_card_that_somebody_else_uses_is_named_and_refused_where_the_stage_cannot_fit(stage: Stage) -> None:
    problem, used = refused(stage, 1, free_bytes=50 * GIB), replace(INFOS[1], free_bytes=50 * GIB)
    who = f"rank 1 (process 101 on node-1) has {50 * GIB:,} bytes free on cuda:0 H200, another {80 * GIB:,}"
    assert f"{who}; {60 * GIB:,} are needed" in problem
    assert require_same_setup([INFOS[0], used, INFOS[2]], replace(stage, predicted_bytes=40 * GIB)) == [who]


def test_a_rank_that_does_not_come_is_named_by_all_who_did(lora: Reference) -> None:
    where = lora.job.fresh().path

    def act(place: RankEnv) -> None:
        stage, store = read_record(StageDir(where).stage, Stage), open_store(place, timeout=LONG)
        info = describe_rank(StageDir(where), stage, place)
        store.set(f"ready/{place.rank}", "")
        store.wait(["ready/0", "ready/1"])
        try:
            rendezvous(info, store, size=3, timeout=SHORT)
        finally:
            store.set(f"named/{place.rank}", "")
            if place.rank == 0:  # it holds the store, so it ends last
                store.wait(["named/1"])

    first, second, _ = as_ranks(3, act, absent=(2,))
    for ended in (first, second):
        assert isinstance(ended.error, WorkerDied), ended.trace
        assert "rank 2 of 3 did not reach the rendezvous within 3 s" in ended.error.problem
        assert "logs/rank-2.log" in ended.error.remedy


def test_ranks_that_meet_see_the_same_run_and_each_other(lora: Reference) -> None:
    where = lora.job.fresh().path

    def act(place: RankEnv) -> list[RankInfo]:
        stage, store = read_record(StageDir(where).stage, Stage), open_store(place, timeout=LONG)
        infos = rendezvous(describe_rank(StageDir(where), stage, place), store, size=2)
        assert require_same_setup(infos, stage) == []
        if place.rank:
            store.set("done", "1")
        else:  # it holds the store, so it ends last
            store.wait(["done"])
        return infos

    first, second = as_ranks(2, act)
    assert first.trace == second.trace == ""
    assert first.value == second.value
    assert [info.rank for info in first.value] == [0, 1]
    assert first.value[0].prepared == read_record(StageDir(where).stage, Stage).prepared
    assert len({info.pid for info in first.value}) == 2


def test_what_a_rank_does_not_see_is_missing_in_its_words(lora: Reference, tmp_path: Path) -> None:
    where = lora.job.fresh()
    stage = read_record(where.stage, Stage)
    where.prepared("train.safetensors").rename(tmp_path / "gone")
    place = RankEnv(rank=0, size=1, local_rank=0, local_size=1, address="localhost", port=1)
    assert describe_rank(where, stage, place).prepared["train.safetensors"] == "missing"


# All ranks go on from one checkpoint, or none does.


def test_ranks_that_find_different_checkpoints_are_named_before_a_weight_is_loaded(lora: Reference) -> None:
    where = run_to_end(lora.job, lambda: None)
    stage = read_record(where.stage, Stage)
    found, _ = agreed_checkpoint(where, stage, ONE_RANK)
    assert found is not None
    assert agreed_checkpoint(where, stage, Beside(found.name))[0] == found
    for other in ("checkpoint-3", None):
        with pytest.raises(RunError, match=f"rank 0: {found.name}; rank 1: {other or 'none'}"):
            agreed_checkpoint(where, stage, Beside(other))
