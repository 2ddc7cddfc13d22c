"""Ranks that another program has started: what they make of the spec, how the first invites the others, and torchrun
and accelerate themselves."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from finefit.artifacts.processes import RankEnv
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import RunError, SpecError, WorkerDied
from finefit.run import external_launch
from finefit.run.external_launch import Rendezvous, await_run, engine_overrides, require_ranks
from finefit.spec.schema import AutoEngine, Ddp, DeepSpeed, Engine, Fsdp2, Single
from finefit.train.ranks import open_store
from tests.ranks import Ended, as_ranks

SHORT = timedelta(seconds=3)


def place(*, size: int, local_size: int) -> RankEnv:
    return RankEnv(rank=0, size=size, local_rank=0, local_size=local_size, address="localhost", port=1)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (Single(kind="single"), ("engine.kind=ddp", "engine.devices=2")),
        (AutoEngine(kind="auto"), ("engine.kind=auto", "engine.devices=2")),
        (AutoEngine(kind="auto", devices=2), ()),
        (Ddp(kind="ddp", devices=2), ()),
        (DeepSpeed(kind="deepspeed", devices=2), ()),
    ],
)
def test_an_engine_of_one_process_becomes_one_of_the_ranks_that_are_there(
    engine: Engine, expected: tuple[str, ...]
) -> None:
    assert engine_overrides(engine, place(size=2, local_size=2)) == expected
    assert engine_overrides(engine, place(size=6, local_size=2)) == expected  # devices are those of one node


def test_one_rank_leaves_an_engine_of_one_process_as_it_is() -> None:
    assert engine_overrides(Single(kind="single"), place(size=1, local_size=1)) == ()
    assert engine_overrides(AutoEngine(kind="auto"), place(size=1, local_size=1)) == ()


@pytest.mark.parametrize(
    "engine", [AutoEngine(kind="auto", devices=4), Ddp(kind="ddp", devices=4), Fsdp2(kind="fsdp2", devices=4)]
)
def test_another_number_of_ranks_than_the_spec_names_is_refused_with_both(engine: Engine) -> None:
    with pytest.raises(SpecError) as caught:
        engine_overrides(engine, place(size=6, local_size=3))
    assert caught.value.problem == "engine.devices is 4, but 3 ranks were started on each of 2 nodes (WORLD_SIZE=6)"
    with pytest.raises(SpecError, match=r"engine\.devices is 4, but 1 rank was started \(WORLD_SIZE=1\)"):
        engine_overrides(engine, place(size=1, local_size=1))


def test_a_run_goes_on_only_with_as_many_ranks_as_it_was_planned_for(run: RunDir) -> None:
    stage = replace(read_record(stage_of(run).stage, Stage), engine=Ddp(kind="ddp", devices=4), num_ranks=8)
    require_ranks(stage, place(size=8, local_size=4))
    require_ranks(replace(stage, num_ranks=None), place(size=4, local_size=4))  # planned by an earlier version
    with pytest.raises(RunError) as caught:
        require_ranks(stage, place(size=4, local_size=4))
    assert caught.value.problem == "this run was planned for 8 ranks, but 4 were started (WORLD_SIZE=4)"
    assert caught.value.remedy.startswith("start 4 on each of 2 nodes")


def announced(act: Any) -> list[Ended]:
    """The first rank runs `act` in its rendezvous; the other returns what it received. The first keeps the store until
    then."""

    def rank(here: RankEnv) -> Any:
        store = open_store(here, timeout=SHORT)
        if here.rank == 1:
            try:
                return await_run(store, here, timeout=SHORT)
            finally:
                store.set("heard", "1")
        try:
            with Rendezvous(store=store) as rendezvous:
                act(rendezvous)
        finally:
            store.wait(["heard"], timedelta(seconds=30))
        return None

    return as_ranks(2, rank)


def test_the_others_are_told_where_to_work(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    _, second = announced(lambda rendezvous: rendezvous.announce(RunDir(tmp_path)))
    assert second.value == RunDir(tmp_path.resolve()), second.trace


@pytest.mark.parametrize(
    ("error", "problem", "code"),
    [
        (SpecError("a misspelt key", "spell it"), "a misspelt key", 2),
        (ZeroDivisionError("oh"), "ZeroDivisionError: oh", 70),
    ],
)
def test_the_others_are_told_why_the_first_failed(error: Exception, problem: str, code: int) -> None:
    def fail(_: Rendezvous) -> None:
        raise error

    first, second = announced(fail)
    assert isinstance(first.error, type(error)) or type(error).__name__ in first.trace
    assert (second.value.problem, second.value.exit_code) == (problem, code)


def test_where_nothing_is_to_be_done_the_others_go() -> None:
    _, second = announced(lambda _: None)
    assert second.value is None, second.trace


def test_a_long_preparation_is_waited_for_as_long_as_it_lives(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")

    def rank(here: RankEnv) -> Any:
        external_launch._PULSE_SECONDS = 0.5
        store = open_store(here, timeout=SHORT)
        if here.rank == 1:
            word = await_run(store, here, timeout=SHORT)
            store.set("heard", "1")
            return isinstance(word, RunDir)
        with Rendezvous(store=store) as rendezvous:
            time.sleep(5)  # longer than the other's patience
            rendezvous.announce(RunDir(tmp_path))
        store.wait(["heard"], timedelta(seconds=30))
        return True

    assert [ended.value for ended in as_ranks(2, rank)] == [True, True]


def test_a_first_rank_that_falls_silent_is_named() -> None:
    _, second = announced(lambda _: time.sleep(5))  # no pulse within 3 s: it beats every 5
    assert isinstance(second.error, WorkerDied), second.trace
    assert "rank 0, which prepares the run, was silent for 3 s" in second.error.problem


def test_a_node_that_does_not_see_the_run_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_launch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(external_launch, "_VISIBLE", timedelta(seconds=0.1))
    store = HashStore()
    with Rendezvous(store=store) as rendezvous:
        rendezvous.announce(RunDir(tmp_path / "elsewhere"))
    with pytest.raises(RunError) as caught:
        await_run(store, place(size=2, local_size=1))
    assert f"rank 0 on {os.uname().nodename} does not see {tmp_path / 'elsewhere'}" in caught.value.problem
    assert "--runs" in caught.value.remedy
