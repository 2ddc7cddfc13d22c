"""Data sets of questions about images, each in its published shape with its images where they are published to lie."""

import base64
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finefit.custom.inputs import raw_image_processor
from finefit.data.fingerprint import fingerprint
from finefit.data.image_check import ImageChecker
from finefit.data.images import decode
from finefit.data.rows import BadRow, Row, item_line, key_of, read_items
from finefit.data.sources import SourceReader, open_source
from finefit.errors import DataError, FinefitError
from finefit.spec.data import Fields, Source, Where
from finefit.spec.load import parse_spec


def _picture(number: int) -> bytes:
    """Its colour tells which one it is."""
    written = io.BytesIO()
    PIL.Image.new("RGB", (4, 4), (number, number, number)).save(written, "PNG")
    return written.getvalue()


def _draw(root: Path, **numbers: int) -> None:
    for name, number in numbers.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(_picture(number))


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _open(
    base: Path,
    path: str,
    fields: dict[str, str] | None = None,
    *,
    split: str = "train",
    where: Where | None = None,
    root: str | None = None,
) -> SourceReader:
    return open_source(
        Source(path=path, fields=Fields(**fields or {}), where=where or {}, images_root=root), base, split=split
    )


def _rows(reading: SourceReader) -> list[Row]:
    rows = list(reading.rows())
    assert not [row.reason for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if isinstance(row, Row)]


def _seen(row: Row) -> list[int]:
    """The numbers of the images in the row."""
    return [decode(image).getpixel((0, 0))[0] for image in row.images]  # type: ignore[index]


def _asked(row: Row) -> tuple[str, str, list[int]]:
    return row.messages[0].content, row.answer, _seen(row)


def test_chartqa_has_its_images_in_a_folder_beside_and_val_for_a_split(tmp_path: Path) -> None:
    for split, number in (("train", 1), ("val", 2), ("test", 3)):
        _write(
            tmp_path / split / f"{split}_human.json", [{"imgname": "7.png", "query": f"Which {split}?", "label": "Tea"}]
        )
        _write(
            tmp_path / split / f"{split}_augmented.json", [{"imgname": "8.png", "query": "How much?", "label": "42.5"}]
        )
        _draw(tmp_path, **{f"{split}/png/7.png": number, f"{split}/png/8.png": 10 + number})
    for split, asked in (("train", [1, 11]), ("validation", [2, 12]), ("test", [3, 13])):
        assert sorted(number for row in _rows(_open(tmp_path, ".", split=split)) for number in _seen(row)) == asked
    (row,) = _rows(_open(tmp_path, "val/val_human.json"))
    assert _asked(row) == ("Which val?", "Tea", [2])


def test_docvqa_names_its_images_by_a_path(tmp_path: Path) -> None:
    record = {
        "questionId": 337,
        "question": "what is the date?",
        "question_types": ["handwritten"],
        "docId": 279,
        "ucsf_document_id": "xnbl0037",
        "image": "documents/xnbl0037_1.png",
        "ucsf_document_page_no": "1",
        "answers": ["1/8/93", "8 Jan 93"],
        "data_split": "val",
    }
    _write(
        tmp_path / "val_v1.0.json",
        {"dataset_name": "docvqa", "dataset_version": "0.1", "dataset_split": "val", "data": [record]},
    )
    _draw(tmp_path, **{"documents/xnbl0037_1.png": 9})
    (row,) = _rows(_open(tmp_path, "val_v1.0.json"))
    assert (*_asked(row), row.references) == ("what is the date?", "1/8/93", [9], ("1/8/93", "8 Jan 93"))


def test_infographicvqa_is_read_in_both_of_its_shapes(tmp_path: Path) -> None:
    record = {
        "questionId": 65718,
        "question": "How many?",
        "image_local_name": "20471.jpeg",
        "image_url": "https://x/1.jpg",
        "data_split": "val",
        "ocr_output_file": "20471.json",
        "answers": ["25%", "25 percent"],
        "answer_type": ["single span"],
        "evidence": ["Text"],
    }
    _write(tmp_path / "own/val.json", {"dataset_name": "infographicVQA", "data": [record]})
    _draw(tmp_path, **{"own/infographicsvqa_images/20471.jpeg": 5})
    (row,) = _rows(_open(tmp_path, "own/val.json"))
    assert (*_asked(row), row.references) == ("How many?", "25%", [5], ("25%", "25 percent"))
    hub = {
        "query": "How many?",
        "answer": "25%",
        "image": {"bytes": _picture(6), "path": "20471.jpeg"},
        "image_filename": "20471.jpeg",
    }
    pq.write_table(pa.Table.from_pylist([hub]), tmp_path / "hub.parquet")
    (row,) = _rows(_open(tmp_path, "hub.parquet"))
    assert _asked(row) == ("How many?", "25%", [6])


TEXTVQA = {
    "question": "what brand?",
    "image_id": "0054c91397f2fe05",
    "image_classes": ["Cup"],
    "flickr_original_url": "https://x/o.jpg",
    "flickr_300k_url": "https://x/z.jpg",
    "image_width": 4,
    "image_height": 4,
    "question_id": 1,
    "set_name": "train",
    "answers": ["nous les gosses"] * 6 + ["dakota"] * 3 + ["unanswerable"],
}


def test_textvqa_names_its_images_by_an_id_and_keeps_ten_answers(tmp_path: Path) -> None:
    _write(tmp_path / "TextVQA_0.5.1_train.json", {"dataset_type": "train", "data": [TEXTVQA]})
    _draw(tmp_path, **{"train_images/0054c91397f2fe05.jpg": 7})
    reading = _open(tmp_path, "TextVQA_0.5.1_train.json")
    (row,) = _rows(reading)
    assert (*_asked(row), row.votes) == ("what brand?", "nous les gosses", [7], (6, 3, 1))
    assert reading.shapes[0].mapping["images"] == "{image_id}.jpg"


def test_images_may_stay_in_the_zip_that_was_downloaded(tmp_path: Path) -> None:
    _write(tmp_path / "train.json", {"data": [TEXTVQA]})
    with zipfile.ZipFile(tmp_path / "train_val_images.zip", "w") as archive:
        archive.writestr("train_images/0054c91397f2fe05.jpg", _picture(8))
    assert _seen(*_rows(_open(tmp_path, "train.json"))) == [8]


OCRVQA = {
    "0000000001": {
        "imageURL": "http://x/a.jpg",
        "split": 1,
        "title": "T",
        "questions": ["Who?", "What?"],
        "answers": ["I", "A book"],
    },
    "000215949X": {"imageURL": "http://x/b.gif", "split": 2, "title": "U", "questions": ["Who?"], "answers": ["You"]},
    "0000000003": {"imageURL": "http://x/c.jpg", "split": 3, "title": "V", "questions": ["Who?"], "answers": ["They"]},
}


def test_ocrvqa_asks_many_questions_of_an_image_and_numbers_its_splits(tmp_path: Path) -> None:
    _write(tmp_path / "dataset.json", OCRVQA)
    _draw(tmp_path, **{"images/0000000001.jpg": 1, "images/000215949X.gif": 2, "images/0000000003.jpg": 3})
    found = {
        split: [(row.place, *_asked(row)) for row in _rows(_open(tmp_path, "dataset.json", split=split))]
        for split in ("validation", "test")
    }
    assert found == {
        "validation": [("record 2 of dataset.json (1)", "Who?", "You", [2])],
        "test": [("record 3 of dataset.json (1)", "Who?", "They", [3])],
    }
    train = _open(tmp_path, "dataset.json")
    assert [_asked(row) for row in _rows(train)] == [("Who?", "I", [1]), ("What?", "A book", [1])]
    assert (train.shapes[0].mapping["only"], train.shapes[0].mapping["images"]) == ("split = 1", "{id}")


def test_another_split_may_be_asked_for_and_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    _write(tmp_path / "dataset.json", {name: record for name, record in OCRVQA.items() if record["split"] != 3})
    assert [row.answer for row in _rows(_open(tmp_path, "dataset.json", split="test", where={"split": 2}))] == ["You"]
    assert [row.answer for row in _rows(_open(tmp_path, "dataset.json", split="test", where={"split": (1, 2)}))] == [
        "I",
        "A book",
        "You",
    ]
    with pytest.raises(DataError, match=r"dataset\.json has no record with split = 3"):
        _open(tmp_path, "dataset.json", split="test")
    with pytest.raises(DataError, match=r"dataset\.json has no record with split = 4"):
        _open(tmp_path, "dataset.json", where={"split": 4})


def test_a_record_that_tells_no_split_is_a_bad_one(tmp_path: Path) -> None:
    without = {name: value for name, value in OCRVQA["000215949X"].items() if name != "split"}
    _write(tmp_path / "dataset.json", OCRVQA | {"000215949X": without})
    bad = [row for row in _open(tmp_path, "dataset.json").rows() if isinstance(row, BadRow)]
    assert [(row.place, row.reason) for row in bad] == [
        ("record 2 of dataset.json", "has no split, by which rows are selected")
    ]


def _vqav2(tmp_path: Path, *, subtype: str = "val2014", **annotation: Any) -> SourceReader:
    question = {"image_id": 262148, "question": "What colour?", "question_id": 262148000}
    answers = [
        {"answer": answer, "answer_confidence": "yes", "answer_id": at}
        for at, answer in enumerate(["red"] * 8 + ["maroon", "dark red"])
    ]
    partner = {
        "question_type": "what",
        "multiple_choice_answer": "red",
        "answers": answers,
        "image_id": 262148,
        "answer_type": "other",
    }
    about = {"info": {"year": 2017}, "license": {"url": "x"}, "data_type": "mscoco"}
    _write(
        tmp_path / "questions.json",
        about | {"task_type": "Open-Ended", "data_subtype": "val2014", "questions": [question]},
    )
    record = partner | {"question_id": 262148000} | annotation
    _write(tmp_path / "annotations.json", about | {"data_subtype": subtype, "annotations": [record]})
    return _open(tmp_path, "questions.json", {"join": "annotations.json"})


def test_vqav2_is_joined_from_questions_and_annotations_on_images_of_coco(tmp_path: Path) -> None:
    _draw(tmp_path, **{"val2014/COCO_val2014_000000262148.jpg": 4})
    (row,) = _rows(_vqav2(tmp_path))
    assert (*_asked(row), row.references, row.votes) == (
        "What colour?",
        "red",
        [4],
        ("red", "maroon", "dark red"),
        (8, 1, 1),
    )


def test_annotations_of_another_subset_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has a different data_subtype than its partner in .*: .train2014"):
        _vqav2(tmp_path, subtype="train2014")


CHARTQA = {"imgname": "1.png", "query": "q", "label": "a"}


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        *((CHARTQA, {name: None}, f"has no {name}") for name in CHARTQA),
        (TEXTVQA, {"image_id": None}, "has no image_id"),
        (TEXTVQA, {"answers": []}, "answers is an empty list, so there is no answer"),
        (TEXTVQA, {"question": ""}, "question is empty"),
    ],
)
def test_what_a_record_lacks_is_told_and_never_made_up(
    tmp_path: Path, good: dict[str, Any], bad: dict[str, Any], reason: str
) -> None:
    _write(tmp_path / "a.json", [good, good | bad])
    first, second = _open(tmp_path, "a.json").rows()
    assert isinstance(first, Row)
    assert second == BadRow("a.json", 2, reason)


def test_the_root_of_images_may_be_named(tmp_path: Path) -> None:
    _write(tmp_path / "rows/val.json", [{"imgname": "7.png", "query": "q", "label": "a"}])
    _draw(tmp_path, **{"rows/7.png": 1, "pictures/png/7.png": 2})
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("png/7.png", _picture(3))
    assert [_seen(*_rows(_open(tmp_path, "rows/val.json", root=root))) for root in (None, "pictures", "all.zip")] == [
        [1],
        [2],
        [3],
    ]
    with pytest.raises(DataError, match="images_root gone is neither a folder nor a zip"):
        _open(tmp_path, "rows/val.json", root="gone")


def test_where_compares_as_it_is_written_whatever_the_format(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,split,ok\nq,one,1,true\nq,two,2,false\n")
    assert [row.answer for row in _rows(_open(tmp_path, "a.csv", where={"split": 2}))] == ["two"]
    assert [row.answer for row in _rows(_open(tmp_path, "a.csv", where={"ok": True, "split": "1"}))] == ["one"]


def test_only_the_images_may_be_declared_and_the_rest_is_recognised(tmp_path: Path) -> None:
    record = {"question": "q", "answers": ["a"], "picture": 12, "image_id": 3}
    _write(tmp_path / "a.json", [record, record | {"picture": None}, record | {"system": "Be brief."}])
    _draw(tmp_path, **{"pictures/p_0012.png": 9})
    reading = _open(tmp_path, "a.json", {"images": "p_{picture:04}.png"})
    good, bad, other = reading.rows()
    assert isinstance(good, Row)
    assert isinstance(other, Row)
    assert isinstance(bad, BadRow)
    assert (_asked(good), bad.reason) == (("q", "a", [9]), "has no picture")
    assert (other.messages[0].content, _seen(other)) == ("Be brief.", [9])
    assert reading.shapes[0].mapping["images"] == "p_{picture:04}.png"


def test_plain_text_has_nothing_beside_it(tmp_path: Path) -> None:
    _write(tmp_path / "a.json", [{"text": "Once.", "pic": "a.png"}])
    with pytest.raises(DataError, match=r"a\.json holds plain text, which has no images"):
        _open(tmp_path, "a.json", {"images": "pic"})


def test_images_in_messages_are_found_too(tmp_path: Path) -> None:
    inline = "data:image/png;base64," + base64.b64encode(_picture(2)).decode()
    content = [
        {"type": "image", "image": "1.png"},
        {"type": "image_url", "image_url": {"url": inline}},
        {"type": "text", "text": "Which is darker?"},
    ]
    _write(
        tmp_path / "a.json",
        [{"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "the first"}]}],
    )
    _draw(tmp_path, **{"images/1.png": 1})
    (row,) = _rows(_open(tmp_path, "a.json"))
    assert _asked(row) == ("<image><image>Which is darker?", "the first", [1, 2])


def test_the_same_question_about_one_image_of_a_shared_root_is_the_same_row(tmp_path: Path) -> None:
    for name in ("train/a.json", "test/a.json"):
        _write(tmp_path / name, [{"imgname": "1.png", "query": "What is shown?", "label": "Tea"}])
    own = [_rows(_open(tmp_path, name))[0] for name in ("train/a.json", "test/a.json")]
    shared = [_rows(_open(tmp_path, name, root="."))[0] for name in ("train/a.json", "test/a.json")]
    assert fingerprint(own[0]).exact != fingerprint(own[1]).exact
    assert fingerprint(shared[0]).exact == fingerprint(shared[1]).exact


def test_a_row_is_the_same_wherever_its_data_lies(tmp_path: Path) -> None:
    found: list[Row] = []
    for place in ("here", "there"):
        _write(tmp_path / place / "rows/a.json", [{"imgname": "1.png", "query": "What is shown?", "label": "Tea"}])
        found += [_rows(_open(tmp_path / place, "rows/a.json", root=root))[0] for root in (None, "rows")]
    assert len({fingerprint(row).exact for row in found}) == 1


def test_items_that_differ_by_their_image_alone_are_two_items(tmp_path: Path) -> None:
    _write(
        tmp_path / "a.json",
        [{"imgname": name, "query": "What colour?", "label": "red"} for name in ("1.png", "2.png", "3.png")],
    )
    _draw(tmp_path, **{"1.png": 1, "2.png": 2, "3.png": 1})
    found = _rows(_open(tmp_path, "a.json"))
    rows = [replace(row, image_refs=ImageChecker(raw_image_processor())(row)) for row in found]
    (tmp_path / "test.jsonl").write_text("".join(map(item_line, rows)))
    first, second, third = keys = [key_of(row) for row in rows]
    assert first == third != second  # by content, whatever it is called
    assert [key_of(item) for item in read_items(tmp_path / "test.jsonl")] == keys
    assert key_of(replace(rows[0], images=(), image_refs=())) not in keys
    with pytest.raises(FinefitError, match=r"record 1 of a\.json has images that have not been checked yet"):
        key_of(found[0])


def test_a_spec_may_say_where_and_images_root() -> None:
    text = "name: a\nmodel: {kind: embedded, name: smollm2-135m}\ntuning: {kind: lora}\noptimizer: {lr: 1e-4}\n"
    data = (
        "data: {train: [{path: a.json, where: {split: [1, 2]}, images_root: pictures}], validation: {path: b.json, "
        "where: {ok: true}}}\n"
    )
    spec = parse_spec(text + data, where="spec.yaml")
    assert (dict(spec.data.train[0].where), spec.data.train[0].images_root) == ({"split": (1, 2)}, "pictures")
    assert dict(spec.data.sources()["validation"][0].where) == {"ok": True}
