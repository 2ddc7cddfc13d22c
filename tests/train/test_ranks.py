"""Ranks over gloo, in processes of their own: what one says all hear, and whoever is lost is named."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest

from finefit.artifacts.launcher import Place
from finefit.errors import WorkerDied
from finefit.train.ranks import ONE_RANK, joined, open_store
from finefit.train.stopping import StopRequest
from tests.ranks import Ended, as_ranks

SHORT = timedelta(seconds=3)


def values(ended: list[Ended]) -> list[Any]:
    assert [(e.error, e.trace) for e in ended] == [(None, "")] * len(ended)
    return [e.value for e in ended]


def test_one_rank_is_told_by_itself() -> None:
    assert (ONE_RANK.any(True), ONE_RANK.any(False), ONE_RANK.gather("x"), ONE_RANK.is_first) == (
        True,
        False,
        ["x"],
        True,
    )


def test_what_any_rank_claims_every_rank_hears_and_what_all_have_comes_by_rank() -> None:
    def act(place: Place) -> Any:
        with joined(place, open_store(place, patience=SHORT), device="cpu") as ranks:
            heard = [ranks.any(place.rank == 1), ranks.any(False)]
            ranks.barrier()
            return (
                ranks.rank,
                ranks.size,
                ranks.is_first,
                heard,
                list(ranks.gather({"rank": place.rank, "pid_is_own": True})),
            )

    told = [{"rank": 0, "pid_is_own": True}, {"rank": 1, "pid_is_own": True}]
    assert values(as_ranks(2, act)) == [(0, 2, True, [True, False], told), (1, 2, False, [True, False], told)]


@pytest.mark.parametrize("ask", ["any", "gather", "barrier"])
def test_the_death_of_a_rank_is_an_error_of_the_others_at_once(ask: str) -> None:
    def act(place: Place) -> None:
        with joined(place, open_store(place, patience=SHORT), device="cpu") as ranks:
            if place.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            {"any": lambda: ranks.any(True), "gather": lambda: ranks.gather(1), "barrier": ranks.barrier}[ask]()

    first, second = as_ranks(2, act)
    assert second.code == -signal.SIGKILL
    assert isinstance(first.error, WorkerDied), first.trace
    assert first.error.problem.startswith("rank 0 lost the others while ")
    assert first.seconds < 15


def test_a_barrier_names_the_rank_that_does_not_come() -> None:
    def act(place: Place) -> None:
        with joined(place, open_store(place, patience=SHORT), device="cpu", patience=SHORT) as ranks:
            if place.rank == 1:
                time.sleep(8)
            ranks.barrier()

    first, _ = as_ranks(2, act)
    assert isinstance(first.error, WorkerDied), first.trace
    assert "1" in first.error.problem.split("while waiting for the others: ")[1]


def test_an_error_that_is_nobodys_absence_stays_what_it_is() -> None:
    def act(place: Place) -> None:
        with joined(place, open_store(place, patience=SHORT), device="cpu") as ranks:
            ranks.gather(lambda: None)  # cannot be sent

    assert all("PicklingError" in e.trace or "AttributeError" in e.trace for e in as_ranks(2, act))


def test_a_rank_that_does_not_find_the_first_says_where_it_looked() -> None:
    def act(place: Place) -> None:
        open_store(place, patience=timedelta(seconds=2))

    _, second = as_ranks(2, act, absent=(0,))
    assert isinstance(second.error, WorkerDied), second.trace
    assert "rank 1 did not find rank 0 at 127.0.0.1:" in second.error.problem
    assert "within 2 s" in second.error.problem


def test_a_port_that_is_taken_is_named_by_the_rank_that_needs_it() -> None:
    def act(place: Place) -> None:
        import socket

        with socket.socket() as taken:
            taken.bind(("", place.port))
            taken.listen()
            open_store(place, patience=SHORT)

    (first,) = as_ranks(1, act)
    assert isinstance(first.error, WorkerDied), first.trace
    assert "rank 0 cannot listen on port" in first.error.problem


def test_a_stop_that_one_rank_was_asked_for_is_agreed_on_by_all() -> None:
    def act(place: Place) -> Any:
        stop = StopRequest()
        with joined(place, open_store(place, patience=SHORT), device="cpu") as ranks:
            before = stop.agreed(ranks)
            if place.rank == 1:
                stop.reason = "SIGTERM"
            return before, stop.agreed(ranks)

    assert values(as_ranks(2, act)) == [(None, "SIGTERM")] * 2
