"""Images ahead of their batch: each decoded once, as many as may wait, none kept that nobody wants; and none of them missing before anything is
asked."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finefit.artifacts.forecasts import Room
from finefit.data.eyes.eye import Shown
from finefit.data.pictures import Picture
from finefit.data.rows import Message, Row
from finefit.errors import DataError
from finefit.evaluate.batches import in_batches
from finefit.evaluate.gallery import Gallery, require_pictures
from tests.evaluate.conftest import never
from tests.vision import digit_image


def _picture(number: int, num_values: int = 10) -> Picture:
    return Picture(f"{number}.png", "", str(number), (8, 8), (1,), num_values)


class Later:
    """In the place of processes: what was submitted, in order; each is there when it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, call: Callable[..., Any], see: object, picture: Picture) -> "Future[Any]":  # noqa: ARG002
        self.asked.append(picture.sha256)
        future: Future[Any] = Future()
        future.set_result(Shown(picture.grid, {"pixel_values": np.array([int(picture.sha256)])}))
        return future


def _gallery(later: Later, **more: Any) -> Gallery:
    return Gallery(lambda: None, later, **more)


def test_all_that_is_shown_now_and_as_much_as_may_wait_is_decoded_in_order() -> None:
    later = Later()
    _gallery(later, most_ahead=25).ahead([_picture(1, 100), _picture(2, 100)], [_picture(3), _picture(4), _picture(5)])
    assert later.asked == ["1", "2", "3", "4"]


def test_a_picture_that_several_rows_ask_about_is_decoded_once_while_it_is_wanted() -> None:
    later = Later()
    gallery = _gallery(later)
    gallery.ahead([_picture(1), _picture(1)], [_picture(2), _picture(1)])
    gallery.ahead([_picture(2)], [_picture(1)])
    assert [int(gallery.show(_picture(number)).pixels["pixel_values"][0]) for number in (2, 1, 2)] == [2, 1, 2]
    assert later.asked == ["1", "2"]


def test_what_nobody_waits_for_is_let_go_and_decoded_anew_when_it_is_asked_for() -> None:
    later = Later()
    gallery = _gallery(later)
    gallery.ahead([_picture(1)], [])
    gallery.ahead([_picture(2)], [])
    gallery.show(_picture(1))
    assert later.asked == ["1", "2", "1"]


def test_what_stands_behind_a_batch_is_told_before_it_is_computed() -> None:
    told: list[tuple[list[int], list[int]]] = []
    computed: list[int] = []

    def compute(chosen: list[int]) -> list[int]:
        assert len(told) == len(computed) + 1
        computed.append(len(chosen))
        return chosen

    def ahead(now: Sequence[int], then: Sequence[int]) -> None:
        told.append((list(now), list(then)))

    list(in_batches([5, 9, 7], Room(rows=2, tokens=100), compute, warn=never, ahead=ahead))
    assert told == [([1, 2], [0]), ([0], [])]


def _row(folder: Path, number: int) -> Row:
    path = folder / f"{number}.png"
    digit_image(number, size=(32, 32), seed=number).save(path)
    picture = Picture(str(path), "", hashlib.sha256(path.read_bytes()).hexdigest(), (32, 32), (1,), 1)
    messages = (Message("user", "Which?"), Message("assistant", str(number)))
    return Row(source="test.jsonl", number=number, messages=messages, pictures=(picture,))


def test_images_that_are_gone_or_others_now_are_told_all_at_once_by_file_and_row(tmp_path: Path) -> None:
    rows = [_row(tmp_path, number) for number in range(1, 10)]
    require_pictures(rows)
    (tmp_path / "2.png").unlink()
    (tmp_path / "3.png").write_bytes((tmp_path / "4.png").read_bytes())
    with pytest.raises(DataError) as caught:
        require_pictures(rows)
    lines = caught.value.problem.splitlines()
    assert lines[0].startswith("test.jsonl:2: its image ")
    assert "2.png" in lines[0]
    assert lines[1] == f"test.jsonl:3: its image {tmp_path / '3.png'} has changed since its rows were prepared"
    assert len(lines) == 2
    for number in range(4, 10):
        (tmp_path / f"{number}.png").unlink()
    with pytest.raises(DataError, match="and 3 more"):
        require_pictures(rows)
