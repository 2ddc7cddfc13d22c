"""Micro-batches made ahead of the loop that takes them."""

import threading
import time

import pytest
import torch

from finefit.errors import WorkerDied
from finefit.objective.batch import Batch
from finefit.train.feed import Feeder


def _batch(step: int) -> Batch:
    ids = torch.tensor([[step, step]])
    return Batch(
        input_ids_BT=ids, positions_N=torch.tensor([0]), targets_N=torch.tensor([step]), num_supervised=1, num_tokens=2
    )


def _made(step: int) -> list[Batch]:
    return [_batch(step)]


def _steps(feeder: Feeder, *steps: int) -> list[int]:
    return [int(feeder.take(step).batches[0].targets_N) for step in steps]


def _feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feeder")]


def test_any_order_of_steps_gets_the_batches_of_each() -> None:
    order = (0, 1, 2, 4, 5, 2, 3, 9, 0, 9)
    with Feeder(_made, total_steps=10) as feeder:
        assert _steps(feeder, *order) == list(order)


def test_the_next_step_is_made_while_this_one_is_computed() -> None:
    made = [threading.Event() for _ in range(3)]

    def make(step: int) -> list[Batch]:
        made[step].set()
        return _made(step)

    with Feeder(make, total_steps=3) as feeder:
        feeder.take(0)
        assert made[1].wait(10)
        assert not made[2].is_set()


def test_nothing_is_made_beyond_the_last_step() -> None:
    asked: list[int] = []

    def make(step: int) -> list[Batch]:
        asked.append(step)
        return _made(step)

    with Feeder(make, total_steps=2) as feeder:
        _steps(feeder, 0, 1)
    assert asked == [0, 1]


def test_the_seconds_that_the_loop_waited_are_counted_and_those_it_did_not_are_not() -> None:
    def slow(step: int) -> list[Batch]:
        time.sleep(0.2)
        return _made(step)

    with Feeder(slow, total_steps=2) as feeder:
        first = feeder.take(0)
        time.sleep(0.5)
        second = feeder.take(1)
    assert first.wait_seconds >= 0.2
    assert second.wait_seconds < 0.1


def test_an_error_in_the_thread_is_raised_where_its_step_is_taken() -> None:
    def make(step: int) -> list[Batch]:
        if step == 1:
            raise OSError("the store is gone")
        return _made(step)

    with Feeder(make, total_steps=3) as feeder:
        feeder.take(0)
        with pytest.raises(OSError, match="the store is gone"):
            feeder.take(1)
        assert _steps(feeder, 2) == [2]  # a step that is left out takes nothing with it


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_no_thread_outlives_the_loop(ends: str) -> None:
    with (
        pytest.raises(KeyboardInterrupt) if ends == "badly" else torch.no_grad(),
        Feeder(_made, total_steps=100) as feeder,
    ):
        feeder.take(0)
        assert len(_feeders()) == 1
        if ends == "badly":
            raise KeyboardInterrupt
    assert _feeders() == []


def test_an_error_in_the_thread_says_which_step_it_was_making() -> None:
    def make(_: int) -> list[Batch]:
        raise OSError("the store is gone")

    with Feeder(make, total_steps=3) as feeder, pytest.raises(OSError, match="the store is gone") as raised:
        feeder.take(1)
    assert raised.value.__notes__ == ["while the feeder made the micro-batches of step 2"]


def test_a_lack_of_host_memory_is_named_with_what_is_free_and_is_resumable() -> None:
    def make(_: int) -> list[Batch]:
        raise MemoryError

    with (
        Feeder(make, total_steps=3) as feeder,
        pytest.raises(WorkerDied, match=r"micro-batches of step 1: \d+\.\d GiB are free") as raised,
    ):
        feeder.take(0)
    assert raised.value.exit_code == 3


def test_after_a_change_what_was_made_ahead_is_made_anew() -> None:
    with Feeder(_made, total_steps=10) as feeder:
        feeder.take(0)
        feeder.change(lambda step: [_batch(100 + step)])
        assert _steps(feeder, 1, 2) == [101, 102]
