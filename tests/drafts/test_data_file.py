"""What `finefit init` recognises in real files: shape, rows, lengths, splits, overlap, and a metric for the answers."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from finefit.drafts.data_file import look_at
from finefit.errors import DataError
from finefit.spec.data import Fields
from tests.conftest import make_rows, write_jsonl


def _asked(count: int, answer: str, *, first: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"question {number}", "answer": answer} for number in range(first, first + count)]


@pytest.mark.parametrize(
    ("answer", "task"),
    [
        ('{"sum": 3}', "json_match"),
        ("Berlin", "exact_match"),
        ("a sentence of some nine words that says it", "chrf"),
        ("many words " * 40, "rouge"),
    ],
)
def test_the_task_follows_from_the_answers(tmp_path: Path, answer: str, task: str) -> None:
    write_jsonl(tmp_path / "rows.jsonl", _asked(5, answer))
    found = look_at("rows.jsonl", tmp_path)
    assert (found.shape, found.rows, found.task) == ("question and answer", 5, task)


def test_pairs_are_scored_by_the_likelier_answer(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": f"why {n}?", "chosen": "so", "rejected": "no"} for n in range(4)])
    found = look_at("pairs.jsonl", tmp_path)
    assert (found.kind, found.task) == ("pair", "hallucination")


def test_of_judged_answers_only_the_good_ones_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"why {n}?", "completion": "so", "label": n % 2 == 0} for n in range(10)]
    write_jsonl(tmp_path / "judged.jsonl", rows)
    found = look_at("judged.jsonl", tmp_path)
    assert (found.rows, found.where) == (5, {"label": "true"})


def test_test_and_validation_rows_beside_it_are_found_and_compared(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "my_train.jsonl", _asked(20, "yes"))
    write_jsonl(tmp_path / "my_test.jsonl", _asked(5, "yes", first=18))
    write_jsonl(tmp_path / "my_val.jsonl", _asked(4, "yes", first=30))
    found = look_at("my_train.jsonl", tmp_path)
    assert (found.test, found.test_rows, found.validation) == ("my_test.jsonl", 5, "my_val.jsonl")
    assert found.shared == 2


def test_validation_rows_alone_are_scored(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", _asked(20, "yes"))
    write_jsonl(tmp_path / "dev.jsonl", _asked(4, "yes", first=30))
    found = look_at("train.jsonl", tmp_path)
    assert (found.test, found.validation) == ("dev.jsonl", None)


def test_a_folder_has_the_splits_that_its_files_name(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows" / "train.jsonl", _asked(20, "yes"))
    write_jsonl(tmp_path / "rows" / "test.jsonl", _asked(6, "yes", first=50))
    found = look_at("rows", tmp_path)
    assert (found.rows, found.test, found.test_rows, found.shared) == (20, "rows", 6, 0)


def test_a_folder_without_splits_is_all_training(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows" / "a.jsonl", _asked(20, "yes"))
    found = look_at("rows", tmp_path)
    assert (found.rows, found.test, found.validation) == (20, None, None)


def test_a_repeated_prompt_is_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [*_asked(10, "yes"), *_asked(3, "no")])
    assert look_at("rows.jsonl", tmp_path).repeated == 3


def test_a_text_file_is_one_document_unless_fields_say_otherwise(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one line\nanother\n\na second paragraph\n")
    assert look_at("notes.txt", tmp_path).rows == 1
    assert look_at("notes.txt", tmp_path, Fields(text="paragraph")).rows == 2
    assert look_at("notes.txt", tmp_path, Fields(text="line")).rows == 3


def test_fields_name_columns_that_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "tickets.csv").write_text("ticket,team\nbroken screen,hardware\nwrong bill,billing\n")
    with pytest.raises(DataError, match=re.escape("ticket, team")) as refused:
        look_at("tickets.csv", tmp_path)
    assert "--fields" in refused.value.remedy
    found = look_at("tickets.csv", tmp_path, Fields(prompt="ticket", answer="team"))
    assert (found.rows, found.task) == (2, "exact_match")


def test_a_character_of_three_bytes_is_a_token(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "今" * 300, "answer": "好" * 60}] * 2)
    assert look_at("rows.jsonl", tmp_path).tokens(1.0) >= 360


def test_some_bad_rows_are_counted(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in make_rows(20))
    (tmp_path / "rows.jsonl").write_text(text + '{"messages": [{"ro')
    found = look_at("rows.jsonl", tmp_path)
    assert (found.rows, found.num_bad) == (20, 1)
    assert found.bad[0].startswith("rows.jsonl:21 ")


def _good(count: int = 20) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in make_rows(count)).encode()


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "nothing": ("rows.jsonl", b"", "no rows"),
    "not UTF-8": ("rows.jsonl", _good() + b'{"messages": "\xe9"}\n', "not UTF-8: byte "),
    "no text at all": ("rows.jsonl", bytes(range(128, 256)) * 20, "not UTF-8: byte 0"),
    "a column missing": ("rows.csv", b"question\nwhy?\nhow?\n", "not recognised; their columns are question"),
    "answers all empty": ("rows.csv", b"question,answer\nwhy?,\nhow?,\n", "rows.csv"),
    "half of the rows broken": ("rows.jsonl", _good(4) + b"{bad\n" * 4, "4 of the 8 rows of rows.jsonl"),
    "cut-off gzip": ("rows.jsonl.gz", gzip.compress(_good(200))[:-40], "not a whole gzip file"),
    "an unknown kind": ("rows.bin", b"\0\1\2", "no known extension"),
    "a config": ("rows.yaml", b"stage: sft\n", "not a file of rows"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_with_what_is_wrong_and_what_to_do(tmp_path: Path, fault: str) -> None:
    name, content, problem = BROKEN[fault]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(problem)) as refused:
        look_at(name, tmp_path)
    assert refused.value.remedy


def test_a_broken_test_file_beside_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(_good())
    (tmp_path / "test.jsonl").write_text("{bad\n")
    with pytest.raises(DataError, match=re.escape("test.jsonl")):
        look_at("train.jsonl", tmp_path)


def test_a_mistyped_name_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(_good())
    with pytest.raises(DataError, match=re.escape("trian.jsonl does not exist")) as refused:
        look_at("trian.jsonl", tmp_path)
    assert "train.jsonl" in refused.value.remedy


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match="without files"):
        look_at("rows", tmp_path)
