"""Images of items: those of the run's own rows, by digest, as they were when they were answered; exports take them
along."""

import csv
import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.artifacts.stage_records import EvalItem, ItemImage
from finefit.data.rows import BadRow, Row
from finefit.data.sources import open_source
from finefit.errors import RunError
from finefit.report.review import show_item
from finefit.review.export import export_pairs, export_verdicts
from finefit.review.items import ImageUnavailable, ReviewSet, read_image
from finefit.review.sources import RunTarget, review_set_of_runs
from finefit.review.verdicts import JournalEntry
from finefit.spec.data import Source
from tests.reviews import OPENED, in_memory, make_items, make_run, make_verdict, set_rows
from tests.vision_models import digit_image

MARKED = "look here <image>, prompt 1"


def _png(digit: int, folder: Path) -> bytes:
    path = folder / f"drawn-{digit}.png"
    digit_image(digit, size=(40, 30), seed=digit).save(path)
    return path.read_bytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def review_set(tmp_path: Path) -> ReviewSet:
    """Two items, of which the first shows a file and an image that came as bytes, the second a file; the third shows
    nothing."""
    images = tmp_path / "images"
    images.mkdir()
    one, two = _png(1, images), _png(2, images)
    kept = [
        [str(images / "drawn-1.png"), "", _sha256(one), [40, 30], [1], 9],
        ["images.zip", _sha256(two), _sha256(two), [40, 30], [1], 9],
    ]
    prompts = ["prompt 0", MARKED, "prompt 2"]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}]} for text in prompts
    ]
    rows[0]["image_refs"], rows[1]["image_refs"] = (
        kept,
        [[str(images / "drawn-2.png"), "", _sha256(two), [40, 30], [1], 9]],
    )
    run = make_run(
        tmp_path / "run-1",
        {"base": _items([one, two], [two]), "checkpoint-4": _items([one, two], [two], answer="other")},
    )
    set_rows(run, rows)
    with zipfile.ZipFile(run.stage(1, "sft").prepared("images.zip"), "w") as archive:
        archive.writestr(_sha256(two), two)
    return _stack(run.path)


def _stack(run: Path) -> ReviewSet:
    return review_set_of_runs([RunTarget.parse(f"{run}:base"), RunTarget.parse(f"{run}:checkpoint-4")])


def _items(*shown: list[bytes], answer: str = "answer") -> tuple[EvalItem, ...]:
    """With the mark that a template of some model writes in the place of an image."""
    first, second, third = make_items(3, answer)
    images = [
        tuple(ItemImage(name=f"/data/{at}.png", sha256=_sha256(content)) for content in contents)
        for at, contents in enumerate(shown)
    ]
    second = replace(second, prompt="<|user|>look here <|img|>, prompt 1<|end|>\n<|assistant|>")
    return replace(first, images=images[0]), replace(second, images=images[1]), third


def test_items_show_the_images_of_their_rows_from_files_and_from_the_runs_own_zip(review_set: ReviewSet) -> None:
    first, second, third = review_set.items
    assert [_sha256(read_image(image)) for image in first.images] == [image.sha256 for image in first.images]
    assert [image.name for image in first.images] == ["drawn-1.png", first.images[1].sha256[:12]]
    assert [image.name for image in second.images] == ["drawn-2.png"]
    assert third.images == ()


def test_a_message_with_a_place_for_an_image_is_still_known_as_it_was_asked(review_set: ReviewSet) -> None:
    assert review_set.items[1].prompt[0].text == MARKED
    assert not review_set.items[1].is_rendered


def test_an_image_that_is_gone_or_another_is_told_and_never_replaced(review_set: ReviewSet) -> None:
    one, two = review_set.items[0].images[0], review_set.items[1].images[0]
    assert one.path is not None
    assert two.path is not None
    one.path.write_bytes(two.path.read_bytes())
    with pytest.raises(ImageUnavailable, match=r"drawn-1.png has changed since it was answered"):
        read_image(one)
    one.path.unlink()
    with pytest.raises(ImageUnavailable, match=r"drawn-1.png is no longer there"):
        read_image(one)


def test_images_are_named_even_where_the_rows_of_the_run_are_others_now(review_set: ReviewSet, tmp_path: Path) -> None:
    set_rows_as_they_are = tmp_path / "run-1" / "stages" / "1-sft" / "data" / "test.jsonl"
    set_rows_as_they_are.write_text("{}\n")
    found = _stack(tmp_path / "run-1").items[0].images
    assert [image.sha256 for image in found] == [image.sha256 for image in review_set.items[0].images]
    with pytest.raises(ImageUnavailable, match=r"0.png cannot be shown: the run's rows have changed"):
        read_image(found[0])


def test_the_terminal_names_the_file(review_set: ReviewSet) -> None:
    session, _ = in_memory(replace(review_set, items=review_set.items[1:2]))
    turn, console = session.turn("ann"), Console(record=True, width=100)
    assert turn.item is not None
    show_item(turn, turn.item, [set(), set()], "", console)
    assert "drawn-2.png" in console.export_text()


def _read(path: Path) -> list[Row]:
    rows = list(open_source(Source(path=path.name), path.parent, split="train").rows())
    assert [row.reason for row in rows if isinstance(row, BadRow)] == []
    return [row for row in rows if isinstance(row, Row)]


def test_pairs_take_their_images_along_and_are_read_as_training_rows(review_set: ReviewSet, tmp_path: Path) -> None:
    entries: list[JournalEntry] = [OPENED, *(make_verdict(review_set, at + 1, at, "second") for at in range(2))]
    out = tmp_path / "out"
    out.mkdir()
    export_pairs(out / "pairs.jsonl", review_set, entries)
    lines = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    assert [len(line["images"]) for line in lines] == [2, 1]
    for line, item in zip(lines, review_set.items, strict=False):
        assert [_sha256((out / name).read_bytes()) for name in line["images"]] == [
            image.sha256 for image in item.images
        ]
    assert [len(row.images) for row in _read(out / "pairs.jsonl")] == [2, 1]


@pytest.mark.parametrize("name", ["verdicts.jsonl", "verdicts.csv"])
def test_verdicts_name_the_images_that_lie_beside_them_and_only_those_that_were_judged(
    review_set: ReviewSet, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir()
    export_verdicts(
        path, review_set, [OPENED, make_verdict(review_set, 1, 1, "tie"), make_verdict(review_set, 2, 2, "tie")]
    )
    text = path.read_text()
    rows: list[Any] = (
        list(csv.DictReader(text.splitlines()))
        if path.suffix == ".csv"
        else [json.loads(line) for line in text.splitlines()]
    )
    named = rows[0]["images"] if path.suffix == ".csv" else rows[0]["images"][0]
    assert (path.parent / named).read_bytes() == read_image(review_set.items[1].images[0])
    assert len(list((path.parent / "verdicts-images").iterdir())) == 1
    assert not rows[1].get("images")


def test_an_export_without_one_of_its_images_is_refused(review_set: ReviewSet, tmp_path: Path) -> None:
    path = review_set.items[1].images[0].path
    assert path is not None
    path.unlink()
    with pytest.raises(RunError, match=r"drawn-2.png is no longer there"):
        export_verdicts(tmp_path / "verdicts.jsonl", review_set, [OPENED, make_verdict(review_set, 1, 1, "tie")])
    assert not (tmp_path / "verdicts.jsonl").exists()
