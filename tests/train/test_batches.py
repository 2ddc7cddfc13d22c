"""Batches of a step: made here or in other processes, in their order, and by others only where that takes long."""

import operator
import os
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from finefit.data import image_check
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator, largest_row
from finefit.data.examples import Example, Examples
from finefit.data.image_check import ModelProcessor
from finefit.data.rows import ImageRef
from finefit.errors import WorkerDied
from finefit.objective.batch import Batch
from finefit.spec.data import ImageLimits
from finefit.train.batches import BatchCall, BatchLoader, batch_call, batches_digest, cut_batches, prefetched
from tests.conftest import write_jsonl
from tests.data.image_rows import asked, draw, prepared
from tests.vision_models import make_vlm

TEXT = Example((5, 6, 0), (False, False, True))
SEEN = Example((5, 6, 0), (False, False, True), (ImageRef("a.png", "", "0" * 64, (8, 8), (1,)),))


def test_batches_come_in_their_order_wherever_they_are_made() -> None:
    with BatchWorkers(2) as workers:
        calls = [BatchCall(partial(operator.add, number, 0), number % 3 > 0) for number in range(10)]
        found: list[Any] = list(prefetched(workers, iter(calls)))
    assert found == list(range(10))


def test_only_what_takes_long_leaves_this_process() -> None:
    with BatchWorkers(1) as workers:
        whose: Any = os.getpid
        here, there = (
            int(pid) for pid in list[Any](prefetched(workers, [BatchCall(whose, False), BatchCall(whose, True)]))
        )
    assert here == os.getpid() != there


def test_rows_of_text_are_collated_here_and_rows_with_images_by_others() -> None:
    ctx: Any = SimpleNamespace(compose=None, collator=Collator(pad=0))
    call = batch_call(ctx, [TEXT, TEXT], [0, 1], 0)
    assert not call.is_long
    assert batch_call(ctx, [TEXT, SEEN], [0, 1], 0).is_long
    assert batches_digest([call.make()]) == batches_digest([Collator(pad=0)([TEXT, TEXT])])


def test_the_worst_batch_is_decoded_by_others_too_and_is_what_it_would_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_vlm("qwen2_5_vl", tmp_path / "model")
    draw(tmp_path, "a.png", 1, size=(90, 60)), draw(tmp_path, "b.png", 2)
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png"), asked(1, "b.png", question="And which one is this?")])
    _, out = prepared(tmp_path, model, {"train": [{"path": "a.jsonl"}]})
    collator = Collator(pad=0, processor_factory=ModelProcessor(model, model / "config.json", ImageLimits()))
    worst = largest_row(Examples(out / "train.safetensors"))
    here = collator([worst])
    monkeypatch.setattr(image_check, "decode", _never)
    with BatchWorkers(1) as workers:
        ctx: Any = SimpleNamespace(compose=None, collator=collator, workers=workers)
        found = cut_batches(ctx, [worst] * 2, range(2), "measure", micro_batch=1)
    assert [batches_digest([batch]) for batch in found] == [batches_digest([here])] * 2
    assert all(
        torch.equal(batch.extra.tensors["pixel_values"], here.extra.tensors["pixel_values"])
        for batch in found
        if batch.extra and here.extra
    )


def _never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("an image was decoded in the process that trains")


def test_the_death_of_a_process_that_makes_batches_is_told_where_the_step_is_taken(tmp_path: Path) -> None:
    with BatchWorkers(1) as workers:

        def make(step: int) -> Any:
            (tmp_path / str(step)).touch()
            return list(prefetched(workers, [BatchCall(partial(os._exit, 7), True)]))

        with BatchLoader(make, total_steps=3) as loader, pytest.raises(WorkerDied, match="ended with code 7") as raised:
            loader.take(0)
    assert raised.value.__notes__ == ["while the batch loader made the micro-batches of step 1"]


# Micro-batches made ahead of the loop that takes them.


def _batch(step: int) -> Batch:
    ids = torch.tensor([[step, step]])
    return Batch(
        input_ids_BT=ids, positions_N=torch.tensor([0]), targets_N=torch.tensor([step]), num_supervised=1, num_tokens=2
    )


def _made(step: int) -> list[Batch]:
    return [_batch(step)]


def _steps(loader: BatchLoader, *steps: int) -> list[int]:
    return [int(loader.take(step)[0][0].targets_N) for step in steps]


def _loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch-loader")]


def test_any_order_of_steps_gets_the_batches_of_each() -> None:
    order = (0, 1, 2, 4, 5, 2, 3, 9, 0, 9)
    with BatchLoader(_made, total_steps=10) as loader:
        assert _steps(loader, *order) == list(order)


def test_the_next_step_is_made_while_this_one_is_computed() -> None:
    made = [threading.Event() for _ in range(3)]

    def make(step: int) -> list[Batch]:
        made[step].set()
        return _made(step)

    with BatchLoader(make, total_steps=3) as loader:
        loader.take(0)
        assert made[1].wait(10)
        assert not made[2].is_set()


def test_nothing_is_made_beyond_the_last_step() -> None:
    asked: list[int] = []

    def make(step: int) -> list[Batch]:
        asked.append(step)
        return _made(step)

    with BatchLoader(make, total_steps=2) as loader:
        _steps(loader, 0, 1)
    assert asked == [0, 1]


def test_the_seconds_that_the_loop_waited_are_counted_and_those_it_did_not_are_not() -> None:
    def slow(step: int) -> list[Batch]:
        time.sleep(0.2)
        return _made(step)

    with BatchLoader(slow, total_steps=2) as loader:
        _, first = loader.take(0)
        time.sleep(0.5)
        _, second = loader.take(1)
    assert first >= 0.2
    assert second < 0.1


def test_an_error_in_the_thread_is_raised_where_its_step_is_taken() -> None:
    def make(step: int) -> list[Batch]:
        if step == 1:
            raise OSError("the store is gone")
        return _made(step)

    with BatchLoader(make, total_steps=3) as loader:
        loader.take(0)
        with pytest.raises(OSError, match="the store is gone"):
            loader.take(1)
        assert _steps(loader, 2) == [2]  # a step that is left out takes nothing with it


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_no_thread_outlives_the_loop(ends: str) -> None:
    with (
        pytest.raises(KeyboardInterrupt) if ends == "badly" else torch.no_grad(),
        BatchLoader(_made, total_steps=100) as loader,
    ):
        loader.take(0)
        assert len(_loader_threads()) == 1
        if ends == "badly":
            raise KeyboardInterrupt
    assert _loader_threads() == []


def test_an_error_in_the_thread_says_which_step_it_was_making() -> None:
    def make(_: int) -> list[Batch]:
        raise OSError("the store is gone")

    with BatchLoader(make, total_steps=3) as loader, pytest.raises(OSError, match="the store is gone") as raised:
        loader.take(1)
    assert raised.value.__notes__ == ["while the batch loader made the micro-batches of step 2"]


def test_a_lack_of_host_memory_is_named_with_what_is_free_and_is_resumable() -> None:
    def make(_: int) -> list[Batch]:
        raise MemoryError

    with (
        BatchLoader(make, total_steps=3) as loader,
        pytest.raises(WorkerDied, match=r"micro-batches of step 1: \d+\.\d GiB are free") as raised,
    ):
        loader.take(0)
    assert raised.value.exit_code == 3


def test_after_a_change_what_was_made_ahead_is_made_anew() -> None:
    with BatchLoader(_made, total_steps=10) as loader:
        loader.take(0)
        loader.change(lambda step: [_batch(100 + step)])
        assert _steps(loader, 1, 2) == [101, 102]
