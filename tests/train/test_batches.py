"""Batches of a step: made here or in other processes, in their order, and by others only where that takes long."""

import operator
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from finefit.data import looking
from finefit.data.collate import Collator, worst_of
from finefit.data.examples import Example
from finefit.data.looking import OwnEye
from finefit.data.pictures import Picture
from finefit.data.store import Examples
from finefit.data.workers import Workers
from finefit.errors import WorkerDied
from finefit.spec.rows import ImageLimits
from finefit.train.batches import Call, call_for, cut, digest, made
from finefit.train.feed import Feeder
from tests.conftest import write_jsonl
from tests.data.seen import asked, draw, prepared
from tests.vision import make_vlm

TEXT = Example((5, 6, 0), (False, False, True))
SEEN = Example((5, 6, 0), (False, False, True), (Picture("a.png", "", "0" * 64, (8, 8), (1,)),))


def test_batches_come_in_their_order_wherever_they_are_made() -> None:
    with Workers(2) as workers:
        calls = [Call(operator.add, (number, 0), number % 3 > 0) for number in range(10)]
        found: list[Any] = list(made(workers, iter(calls)))
    assert found == list(range(10))


def test_only_what_takes_long_leaves_this_process() -> None:
    with Workers(1) as workers:
        whose: Any = os.getpid
        here, there = (int(pid) for pid in list[Any](made(workers, [Call(whose, (), False), Call(whose, (), True)])))
    assert here == os.getpid() != there


def test_rows_of_text_are_collated_here_and_rows_with_images_by_others() -> None:
    live: Any = SimpleNamespace(compose=None, collator=Collator(pad=0))
    assert not call_for(live, [TEXT, TEXT], [0, 1], 0).is_long
    assert call_for(live, [TEXT, SEEN], [0, 1], 0).is_long
    assert digest([call_for(live, [TEXT, TEXT], [0, 1], 0)()]) == digest([Collator(pad=0)([TEXT, TEXT])])


def test_the_worst_batch_is_decoded_by_others_too_and_is_what_it_would_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_vlm("qwen2_5_vl", tmp_path / "model")
    draw(tmp_path, "a.png", 1, size=(90, 60)), draw(tmp_path, "b.png", 2)
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png"), asked(1, "b.png", question="And which one is this?")])
    _, out = prepared(tmp_path, model, {"train": [{"path": "a.jsonl"}]})
    collator = Collator(pad=0, see=OwnEye(model, model / "config.json", ImageLimits()))
    worst = worst_of(Examples(out / "train.safetensors"))
    here = collator([worst])
    monkeypatch.setattr(looking, "decode", _never)
    with Workers(1) as workers:
        live: Any = SimpleNamespace(compose=None, collator=collator, workers=workers)
        found = cut(live, [worst] * 2, range(2), "measure", micro_batch=1)
    assert [digest([batch]) for batch in found] == [digest([here])] * 2
    assert all(
        torch.equal(batch.extra.tensors["pixel_values"], here.extra.tensors["pixel_values"])
        for batch in found
        if batch.extra and here.extra
    )


def _never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("an image was decoded in the process that trains")


def test_the_death_of_a_process_that_makes_batches_is_told_where_the_step_is_taken(tmp_path: Path) -> None:
    with Workers(1) as workers:

        def make(step: int) -> Any:
            (tmp_path / str(step)).touch()
            return list(made(workers, [Call(os._exit, (7,), True)]))

        with Feeder(make, total_steps=3) as feeder, pytest.raises(WorkerDied, match="ended with code 7") as raised:
            feeder.take(0)
    assert raised.value.__notes__ == ["while the feeder made the micro-batches of step 1"]
