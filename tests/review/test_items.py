"""Review items: from runs and from files, with the images that were answered."""

import csv
import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.artifacts.stage_records import EvalItem, ItemImage
from finefit.data.rows import BadRow, Row
from finefit.data.sources import open_source
from finefit.errors import DataError, RunError
from finefit.report.review import show_item
from finefit.review.export import export_pairs, export_verdicts
from finefit.review.items import (
    ImageUnavailable,
    ReviewImage,
    ReviewSet,
    RunTarget,
    read_image,
    review_set_of_rows,
    review_set_of_runs,
)
from finefit.review.verdicts import JournalEntry
from finefit.spec.data import Source
from tests.reviews import OPENED, in_memory, make_items, make_run, make_verdict, set_rows
from tests.vision_models import digit_image


def _named(*targets: Path | str, checkpoint: str | None = None) -> list[RunTarget]:
    return [RunTarget.parse(str(target), checkpoint) for target in targets]


def test_one_run_gives_the_answers_of_its_final_checkpoint(tmp_path: Path) -> None:
    results = {
        "base": make_items(3, "base"),
        "checkpoint-4": make_items(3, "four"),
        "checkpoint-8": make_items(3, "eight"),
    }
    make_run(tmp_path / "a-1", results, final="checkpoint-8")
    review_set = review_set_of_runs(_named(tmp_path / "a-1"))
    assert review_set.models == ("a-1:checkpoint-8",)
    assert [item.answers for item in review_set.items] == [("eight 0",), ("eight 1",), ("eight 2",)]
    assert review_set.name == "json_match.a-1-checkpoint-8"


@pytest.mark.parametrize(
    ("target", "checkpoint", "answer"),
    [
        ("a-1:checkpoint-4", None, "four 0"),
        ("a-1:base", None, "base 0"),
        ("a-1", "4", "four 0"),
        ("a-1", "base", "base 0"),
        ("a-1:final", None, "eight 0"),
    ],
)
def test_a_checkpoint_can_be_named(tmp_path: Path, target: str, checkpoint: str | None, answer: str) -> None:
    results = {
        "base": make_items(3, "base"),
        "checkpoint-4": make_items(3, "four"),
        "checkpoint-8": make_items(3, "eight"),
    }
    make_run(tmp_path / "a-1", results, final="checkpoint-8")
    assert review_set_of_runs(_named(f"{tmp_path}/{target}", checkpoint=checkpoint)).items[0].answers == (answer,)


def test_a_run_that_was_never_trained_has_one_model(tmp_path: Path) -> None:
    make_run(tmp_path / "a-1", {"base": make_items(2)})
    assert review_set_of_runs(_named(tmp_path / "a-1")).models == ("a-1:base",)


def test_items_are_paired_by_what_was_asked_and_the_others_are_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "a-1", {"base": make_items(5, "a")})
    shifted = tuple(replace(item, item=at) for at, item in enumerate(reversed(make_items(5, "b", first=2))))
    make_run(tmp_path / "b-1", {"base": shifted})
    review_set = review_set_of_runs(_named(tmp_path / "a-1", tmp_path / "b-1"))
    assert [item.answers for item in review_set.items] == [("a 2", "b 2"), ("a 3", "b 3"), ("a 4", "b 4")]
    assert review_set.unpaired == 4


def test_references_say_nothing_of_the_order_of_runs(tmp_path: Path) -> None:
    """Each run's item has the reference nearest to its own answer."""
    for name, references in {"a-1": ("[9]", "[7]"), "b-1": ("[8]", "[7]")}.items():
        answered = zip(make_items(2, name), references, strict=True)
        make_run(tmp_path / name, {"base": tuple(replace(item, reference=reference) for item, reference in answered)})
    for order in (("a-1", "b-1"), ("b-1", "a-1")):
        items = review_set_of_runs(_named(*(tmp_path / name for name in order))).items
        assert [item.reference for item in items] == ["[8]\n\nor\n\n[9]", "[7]"]


def test_the_same_item_twice_is_two_review_items(tmp_path: Path) -> None:
    for name in ("a-1", "b-1"):
        items = make_items(2, name)
        make_run(tmp_path / name, {"base": (*items, replace(items[0], item=2, answer=f"{name} again"))})
    review_set = review_set_of_runs(_named(tmp_path / "a-1", tmp_path / "b-1"))
    assert [item.answers for item in review_set.items] == [
        ("a-1 0", "b-1 0"),
        ("a-1 1", "b-1 1"),
        ("a-1 again", "b-1 again"),
    ]
    assert len({item.key for item in review_set.items}) == len({item.handle for item in review_set.items}) == 3


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        make_run(tmp_path / folder / "runs" / "a-1", {"base": make_items(1, folder)})
    review_set = review_set_of_runs(_named(tmp_path / "x/runs/a-1", tmp_path / "y/runs/a-1"))
    assert review_set.models == ("x/runs/a-1:base", "y/runs/a-1:base")


def test_a_prompt_is_shown_as_messages_where_they_are_what_was_asked(tmp_path: Path) -> None:
    items = make_items(2)
    make_run(tmp_path / "a-1", {"base": (items[0], replace(items[1], prompt="<|user|>cut ... away<|end|>"))})
    first, second = review_set_of_runs(_named(tmp_path / "a-1")).items
    assert [(said.role, said.text) for said in first.prompt] == [("user", "prompt 0")]
    assert [(said.role, said.text) for said in second.prompt] == [("", "<|user|>cut ... away<|end|>")]
    assert [first.is_rendered, second.is_rendered] == [False, True]


CALL = {"name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("answer", "is_whole"),
    [({"tool_calls": [CALL]}, False), ({"reasoning": "Well."}, False), ({"tool_calls": []}, True)],
)
def test_a_item_knows_the_tools_of_its_prompt_and_what_its_reference_lacks(
    tmp_path: Path, answer: dict[str, Any], is_whole: bool
) -> None:
    run = make_run(tmp_path / "a-1", {"base": make_items(1)})
    messages = [{"role": "user", "content": "prompt 0"}, {"role": "assistant", "content": "[7]"} | answer]
    set_rows(run, [{"messages": messages, "tools": "[{}]"}])
    (item,) = review_set_of_runs(_named(tmp_path / "a-1")).items
    assert (item.tools, item.is_reference_whole, item.is_rendered) == ("[{}]", is_whole, False)


@pytest.mark.parametrize(("shown", "is_rendered"), [("<think>Hm.</think>", True), ("", False)])
def test_thoughts_in_a_prompt_count_where_the_template_has_kept_them(
    tmp_path: Path, shown: str, is_rendered: bool
) -> None:
    asked = f"<|user|>prompt 0<|assistant|>{shown}seven<|user|>Sure?<|assistant|>"
    run = make_run(tmp_path / "a-1", {"base": [replace(make_items(1)[0], prompt=asked)]})
    turns = [("user", "prompt 0", ""), ("assistant", "seven", "Hm."), ("user", "Sure?", ""), ("assistant", "[7]", "")]
    set_rows(
        run, [{"messages": [{"role": role, "content": text, "reasoning": thought} for role, text, thought in turns]}]
    )
    assert review_set_of_runs(_named(tmp_path / "a-1")).items[0].is_rendered == is_rendered


def test_rows_that_have_changed_are_not_taken_for_what_was_asked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", {"base": make_items(1)})
    path = run.stage(1, "sft").prepared("test.jsonl")
    path.write_text(path.read_text() + "\n")
    assert review_set_of_runs(_named(tmp_path / "a-1")).items[0].prompt[0].text == make_items(1)[0].prompt


@pytest.mark.parametrize(
    ("results", "targets", "more", "message"),
    [
        ({"a-1": {"base": make_items(1)}}, ["a-1", "a-1"], {}, "both sides are a-1:base"),
        (
            {"a-1": {"base": make_items(1)}, "b-1": {"base": make_items(1, first=1)}},
            ["a-1", "b-1"],
            {},
            "have no item of json_match in common",
        ),
        (
            {"a-1": {"base": make_items(1)}},
            ["a-1:checkpoint-3"],
            {},
            "has no result of json_match for checkpoint-3; .* base",
        ),
        ({"a-1": {"base": make_items(1)}}, ["a-1"], {"task": "rouge"}, "has no result of rouge"),
        ({"a-1": {}, "b-1": {"base": make_items(1)}}, ["a-1", "b-1"], {}, "a-1 has none; .*b-1 has json_match"),
        ({"a-1": {"base": [replace(make_items(1)[0], answer="")]}}, ["a-1"], {}, "task json_match"),
    ],
)
def test_what_cannot_be_judged_is_told(
    tmp_path: Path, results: dict[str, Any], targets: list[str], more: dict[str, Any], message: str
) -> None:
    for name, by_checkpoint in results.items():
        make_run(tmp_path / name, by_checkpoint)
    with pytest.raises(RunError, match=message):
        review_set_of_runs(_named(*(f"{tmp_path}/{target}" for target in targets)), **more)


def _rows(*rows: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"made.csv:{at + 2}", row) for at, row in enumerate(rows)]


def test_rows_of_a_file_are_a_review_set_of_one_model_or_of_two() -> None:
    one = review_set_of_rows(
        _rows({"prompt": "q", "answer": "a", "reference": "r", "source": "doc 7", "id": "x"}),
        file="made.csv",
        name="made",
    )
    assert one.models == ("made.csv:answer",)
    assert (one.items[0].key, one.items[0].place, one.items[0].reference) == ("x", "doc 7", "r")
    two = review_set_of_rows(_rows({"prompt": "q", "answer_a": "a", "answer_b": None}), file="made.csv", name="made")
    assert two.items[0].answers == ("a", "")
    assert two.items[0].reference is None


def test_an_id_of_the_users_own_is_not_what_the_page_calls_the_item() -> None:
    review_set = review_set_of_rows(
        _rows({"prompt": "q", "answer": "a", "id": "base-model-17"}), file="made.csv", name="made"
    )
    assert "base" not in review_set.items[0].handle


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([{"prompt": "q", "text": "a"}], "no column answer; its columns are prompt, text"),
        ([{"prompt": "q", "answer": "a"}, {"prompt": " ", "answer": "a"}], "made.csv:3 has no prompt"),
        ([{"prompt": "q", "answer": "a"}, {"prompt": "p"}], "made.csv:3 has no answer"),
        ([{"prompt": 7, "answer": "a"}], "neither text nor messages"),
        ([{"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "b"}], "made.csv:3 is the same item as made.csv:2"),
    ],
)
def test_rows_that_cannot_be_judged_are_named(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        review_set_of_rows(_rows(*rows), file="made.csv", name="made")


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


@pytest.mark.parametrize("damage", ["a cut zip", "another compression", "a pipe", "a huge file"])
def test_an_image_that_cannot_be_read_is_told(tmp_path: Path, damage: str) -> None:
    path, member = tmp_path / "images.zip", "a.png"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, bytes(range(256)) * 20)
    content = bytearray(path.read_bytes())
    match damage:
        case "a cut zip":
            content[60:90] = bytes(30)
            path.write_bytes(content)
        case "another compression":
            path.write_bytes(content.replace(b"\x08\x00", b"\x63\x00"))
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
        case _:
            os.truncate(path, 1 << 40)
            member = ""
    with pytest.raises(ImageUnavailable, match=r"a\.png"):
        read_image(ReviewImage(name="a.png", sha256="0", path=path, member=member))
