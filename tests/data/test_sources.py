import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from finefit.data.rows import BadRow, Row
from finefit.data.sources import SourceReader, open_source
from finefit.errors import DataError
from finefit.spec.data import Fields, Source

GOOD = '{"prompt": "2+2", "completion": "4"}'


def _open(
    folder: Path, files: dict[str, str | bytes | list[Any]], path: str = "rows.jsonl", **fields: str
) -> SourceReader:
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = (
                "".join(json.dumps(value) + "\n" for value in content) if name.endswith("l") else json.dumps(content)
            )
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_source(Source(path=path, fields=Fields(**fields)), folder, split="train")


def _rows(reading: SourceReader) -> list[Row]:
    rows = list(reading.rows())
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if isinstance(row, Row)]


def _error(
    folder: Path, files: dict[str, str | bytes | list[Any]], path: str = "rows.jsonl", **fields: str
) -> DataError:
    with pytest.raises(DataError) as caught:
        _open(folder, files, path, **fields)
    assert caught.value.remedy
    return caught.value


def test_every_record_comes_out_as_a_row_or_with_its_reason(tmp_path: Path) -> None:
    lines = [GOOD, "{}", "[1]", "{", '{"prompt": "x", "completion": ""}', GOOD, '{"messages": ' + "[" * 100_000]
    rows = list(_open(tmp_path, {"rows.jsonl": "\n".join(lines)}).rows())
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [isinstance(row, Row) for row in rows] == [True, False, False, False, False, True, False]


def test_a_source_of_bad_lines_alone_is_an_error_that_shows_the_first(tmp_path: Path) -> None:
    assert _error(tmp_path, {"rows.jsonl": "{\n{"}).problem.startswith(
        "rows.jsonl holds no record that can be read; the first: rows.jsonl:1 "
    )


def test_the_files_of_a_folder_may_have_shapes_of_one_kind(tmp_path: Path) -> None:
    first, second = (
        [{"query": "a", "label": "b"}],
        [{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}],
    )
    reading = _open(tmp_path, {"all/a.jsonl": first, "all/b.jsonl": second, "all/c.jsonl": "{"}, "all")
    assert [shape.name for shape in reading.shapes[:2]] == ["question and answer", "chat messages"]
    assert [(row.place, isinstance(row, Row)) for row in reading.rows()] == [
        ("all/a.jsonl:1", True),
        ("all/b.jsonl:1", True),
        ("all/c.jsonl:1", False),
    ]


def test_files_of_different_kinds_are_refused(tmp_path: Path) -> None:
    error = _error(
        tmp_path, {"all/a.jsonl": [{"text": "x"}], "all/b.jsonl": [{"prompt": "x", "completion": "y"}]}, "all"
    )
    assert error.problem == "all mixes kinds of rows: all/a.jsonl holds plain text, all/b.jsonl prompt and completion"


@pytest.mark.parametrize(
    ("unit", "texts"), [("line", ["a", "b", "c"]), ("paragraph", ["a\nb", "c"]), ("document", ["a\nb\n\nc\n"])]
)
def test_the_user_says_what_a_record_of_a_text_file_is(tmp_path: Path, unit: str, texts: list[str]) -> None:
    rows = _rows(_open(tmp_path, {"book.txt": "a\nb\n\nc\n"}, "book.txt", text=unit))
    assert [row.text.strip() for row in rows] == [text.strip() for text in texts]


def test_a_column_may_be_called_line(tmp_path: Path) -> None:
    (row,) = _rows(_open(tmp_path, {"rows.jsonl": [{"line": "x", "act": "I"}]}, text="line"))
    assert row.text == "x"


QUESTIONS = [
    {"question_id": 1, "image_id": 7, "question": "Colour?"},
    {"question_id": 2, "image_id": 7, "question": "Size?"},
]
ANSWERS = [
    {"question_id": 2, "image_id": 7, "answers": ["big"]},
    {"question_id": 1, "image_id": 7, "answers": ["red", "red", "blue"]},
]


def test_another_file_is_joined_by_the_id_that_both_have(tmp_path: Path) -> None:
    reading = _open(
        tmp_path, {"questions.json": QUESTIONS, "answers.json": ANSWERS}, "questions.json", join="answers.json"
    )
    assert [(row.number, row.answer, row.references) for row in _rows(reading)] == [
        (1, "red", ("red", "blue")),
        (2, "big", ("big",)),
    ]


def test_a_record_without_its_one_partner_is_told(tmp_path: Path) -> None:
    questions = [
        *QUESTIONS,
        {"question_id": 3, "question": "?"},
        {"question": "?"},
        {"question_id": 4, "image_id": 8, "question": "?"},
    ]
    answers = [*ANSWERS, ANSWERS[0], {"question_id": 4, "image_id": 9, "answers": ["no"]}]
    good, *bad = _open(
        tmp_path, {"questions.json": questions, "answers.json": answers}, "questions.json", join="answers.json"
    ).rows()
    assert isinstance(good, Row)
    assert [row.reason for row in bad if isinstance(row, BadRow)] == [
        "has the question_id 2, which occurs more than once in answers.json",
        "has the question_id 3, which answers.json lacks",
        "has no question_id to join answers.json by",
        "has a different image_id than its partner in answers.json: 9",
    ]


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([{"answers": ["red"]}], "no id column is in both: question_id, question; answers"),
        ([{"question_id": 1, "answers": ["red"]}, {"answers": ["big"]}], "record 2 of answers.json has no question_id"),
    ],
)
def test_a_file_that_cannot_be_joined_is_an_error(tmp_path: Path, answers: list[Any], problem: str) -> None:
    questions: list[Any] = [{"question_id": 1, "question": "?"}]
    files: dict[str, str | bytes | list[Any]] = {"questions.json": questions, "answers.json": answers}
    assert problem in _error(tmp_path, files, "questions.json", join="answers.json").problem


def test_ids_that_could_both_join_are_an_error(tmp_path: Path) -> None:
    both = [{"id": 1, "doc_id": 2, "question": "?", "answer": "!"}]
    assert _error(tmp_path, {"a.json": both, "b.json": both}, "a.json", join="b.json").problem == (
        "b.json cannot be joined: id, doc_id are all ids that both have"
    )


def test_rows_are_streamed_not_held(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x" * 2500, "completion": "y" * 2500})
    reading = _open(tmp_path, {"rows.jsonl": f"{line}\n" * 4000})
    tracemalloc.start()
    num_rows = sum(1 for _ in reading.rows())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_rows == 4000
    assert peak_bytes < 4 << 20  # of a file of 20 MB


SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SEEDS = "seed_shapes"
REAL: list[tuple[str, dict[str, str], str, int, int]] = [
    ("amr_qald9/qald-9-amr-train.txt", {}, "AMR", 408, 408),
    ("amr_qald9/qald-9-amr-test.txt", {}, "AMR", 150, 150),
    ("chartqa/val", {}, "question and answer", 22, 22),
    ("truthfulqa/TruthfulQA.csv", {}, "TruthfulQA", 790, 790),
    ("pubmedqa/ori_pqal_300.json", {}, "question and answer", 300, 300),
    ("llamafactory/alpaca_en_demo.json", {}, "Alpaca", 999, 999),
    ("llamafactory/dpo_en_demo.json", {}, "preference pairs", 300, 300),
    ("llamafactory/identity.json", {}, "Alpaca", 91, 91),
    ("llamafactory/c4_demo.jsonl", {}, "plain text", 300, 300),
    ("qmsum/val_small.jsonl", {}, "QMSum", 10, 70),
    ("qmsum/test_small.jsonl", {}, "QMSum", 8, 57),
    ("qmsum/longbench_form.jsonl", {}, "question and answer", 24, 24),
    ("legal_long_document/uber_v_heller.txt", {"text": "document"}, "plain text", 1, 1),
    (f"{SEEDS}/TextVQA_0.5.1_val.json", {}, "question and answer", 1, 1),
    (f"{SEEDS}/chartqa_val_human.json", {}, "question and answer", 2, 2),
    (f"{SEEDS}/docvqa_val_v1.0.json", {}, "question and answer", 1, 1),
    (f"{SEEDS}/infographicsVQA_val_v1.0_withQT.json", {}, "question and answer", 1, 1),
    (f"{SEEDS}/infovqa_vidore_train_row.json", {}, "question and answer", 1, 1),
    (f"{SEEDS}/medhal_preprocessed.csv", {"prompt": "full_text", "answer": "label"}, "question and answer", 2, 2),
    (f"{SEEDS}/ocrvqa_dataset.json", {}, "several questions", 1, 4),
    (f"{SEEDS}/phase1_sft.csv", {"prompt": "clinical_note", "answer": "model_summary"}, "question and answer", 2, 2),
    (f"{SEEDS}/phase2_dpo.jsonl", {}, "preference pairs", 3, 3),
    (f"{SEEDS}/vlsp_test.txt", {"text": "line"}, "plain text", 3, 3),
    (f"{SEEDS}/vlsp_test_ground_truth.txt", {}, "AMR", 3, 3),
    (f"{SEEDS}/vlsp_train.txt", {}, "AMR", 7, 7),
    (f"{SEEDS}/vqav2_questions.json", {"join": f"{SEEDS}/vqav2_annotations.json"}, "question and answer", 1, 1),
]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real data is not beside the repository")
@pytest.mark.parametrize(("path", "fields", "name", "num_records", "num_rows"), REAL)
def test_real_files_read_whole(path: str, fields: dict[str, str], name: str, num_records: int, num_rows: int) -> None:
    reading = open_source(
        Source(path=path, fields=Fields(**fields)), SHARED, split="train" if "chartqa/" not in path else "validation"
    )
    rows = _rows(reading)
    assert (reading.shapes[0].name, len({(row.source, row.number) for row in rows}), len(rows)) == (
        name,
        num_records,
        num_rows,
    )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real data is not beside the repository")
def test_rows_of_real_files_hold_what_their_records_say() -> None:
    def first(path: str, split: str = "train", **fields: str) -> Row:
        return _rows(open_source(Source(path=path, fields=Fields(**fields)), SHARED, split=split))[0]

    record = next(iter(json.loads((SHARED / "pubmedqa/ori_pqal_300.json").read_text()).values()))
    row = first("pubmedqa/ori_pqal_300.json")
    assert row.messages[0].content == "\n\n".join([*record["CONTEXTS"], record["QUESTION"]])
    assert row.answer == record["LONG_ANSWER"]
    assert all(row.images for row in _rows(open_source(Source(path="chartqa/val"), SHARED, split="validation")))
    assert first(f"{SEEDS}/docvqa_val_v1.0.json").references == ("A-113", "a-113")
    assert first(f"{SEEDS}/infovqa_vidore_train_row.json").images[0].path == "10001.jpeg"
    assert first(f"{SEEDS}/vqav2_questions.json", join=f"{SEEDS}/vqav2_annotations.json").references == (
        "red",
        "maroon",
        "dark red",
    )
    truthful = first("truthfulqa/TruthfulQA.csv")
    assert truthful.answer in truthful.references
    assert len(truthful.wrong) == 7
