"""Invented preparations: each finding comes and goes with the values that it is about."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.artifacts.forecasts import Lengths
from finefit.artifacts.records import Finding
from finefit.artifacts.stage_records import Preparation, RowProblem, SourceLedger
from finefit.data.rows import Message, Row
from finefit.preflight.data import (
    CHECKS,
    check_data,
    few_rows_are_lost,
    find_leaks,
    long_references,
    placeholders_are_filled_in,
    preparation_is_reported,
    recordings_are_not_asked_about,
    rows_can_be_used,
    rows_fit_the_budget,
    something_is_learnt,
    splits_are_disjoint,
    texts_hold_no_control_tokens,
    train_has_no_duplicates,
)
from finefit.spec.data import Source
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.tasks import CustomTask
from tests.conftest import write_jsonl

DATA: dict[str, Any] = {"train": ({"path": "train.jsonl"},), "validation": {"path": "validation.jsonl"}}
SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "folder", "path": "model"},
    "tuning": {"kind": "lora"},
    "data": DATA,
    "optimizer": {"lr": 1e-4},
    "global_batch": 10,
}
TRAIN = SourceLedger(
    split="train",
    source="train.jsonl",
    shape="chat messages",
    mapping={"messages": "messages"},
    records=100,
    read=100,
    used=100,
    cut=0,
    cut_tokens=0,
    dropped={},
    examples=100,
    repeated=0,
    tokens=5_000,
    supervised_tokens=1_000,
)
VALIDATION = replace(TRAIN, split="validation", source="validation.jsonl", read=20, used=20, examples=20)
LENGTHS = Lengths(num_rows=100, longest=90, mean=50.0, supervised=20, mean_supervised=10.0, source="counted")
SOUND = Preparation(
    sources=(VALIDATION, TRAIN),
    problems=(),
    notes=(),
    lengths=LENGTHS,
    template_sha256="",
    largest_token=259,
    pad_is_end=False,
    files={},
)
Kind = Literal["unusable", "too long", "special token", "placeholder", "medium", "overlap", "duplicate"]


def asking(**data: Any) -> Spec:
    return Spec.model_validate({**SPEC, "data": {**DATA, **data}})


def with_fault(kind: Kind, *, split: str = "train", count: int = 1, remedy: str = "") -> Preparation:
    lines = tuple(f"{split}.jsonl:{number} is at fault" for number in range(1, min(count, 10) + 1))
    return replace(SOUND, problems=(RowProblem(kind=kind, split=split, count=count, lines=lines, remedy=remedy),))


def with_train(**changes: Any) -> Preparation:
    return replace(SOUND, sources=(VALIDATION, replace(TRAIN, **changes)))


def only(check: Callable[[Preparation, Spec], Iterator[Finding]], found: Preparation, spec: Spec) -> Finding:
    (finding,) = check(found, spec)
    return finding


def test_sound_data_has_no_findings() -> None:
    assert check_data(SOUND, asking(), embeddings=260) == ()


# rows


@pytest.mark.parametrize("bad_rows", ["error", "drop"])
def test_a_row_that_cannot_be_used_is_named_and_stops_the_run_unless_it_is_dropped_on_request(bad_rows: str) -> None:
    finding = only(rows_can_be_used, with_fault("unusable", remedy="fix it"), asking(bad_rows=bad_rows))
    told = {
        "error": ("error", "fix it, or set data.bad_rows: drop to drop and count them"),
        "drop": ("warning", "fix it"),
    }
    assert (finding.level, finding.remedy) == told[bad_rows]
    assert finding.problem == "1 train row cannot be used:\n  train.jsonl:1 is at fault"


@pytest.mark.parametrize(
    ("remedy", "told"),
    [
        ("", "set data.bad_rows: drop to drop and count them"),
        ("fix it\nmend that", "fix it\nmend that\nor set data.bad_rows: drop to drop and count them"),
    ],
)
def test_rows_can_be_left_out_whatever_is_wrong_with_them(remedy: str, told: str) -> None:
    assert only(rows_can_be_used, with_fault("unusable", remedy=remedy), asking()).remedy == told


def test_of_many_faults_the_first_are_named_and_the_rest_counted() -> None:
    lines = only(rows_can_be_used, with_fault("unusable", count=1234), asking()).problem.splitlines()
    assert lines[0] == "1,234 train rows cannot be used:"
    assert (len(lines), lines[-1]) == (12, "  and 1,224 more")


@pytest.mark.parametrize(("too_long", "level"), [("error", "error"), ("drop", "warning"), ("cut_prompt", "warning")])
def test_a_row_beyond_the_budget_stops_the_run_unless_something_is_to_happen_to_it(too_long: str, level: str) -> None:
    finding = only(rows_fit_the_budget, with_fault("too long", split="validation", count=3), asking(too_long=too_long))
    assert finding.level == level
    assert finding.problem.startswith("3 validation rows longer than data.max_tokens 2,048:\n  validation.jsonl:1 ")
    ways = {"error": "cut_prompt or drop", "drop": "cut_prompt", "cut_prompt": "drop"}
    assert f"data.too_long: {ways[too_long]};" in finding.remedy


@pytest.mark.parametrize(("dropped", "fires"), [({"too long": 10}, False), ({"too long": 7, "unusable": 4}, True)])
def test_more_dropped_rows_than_allowed_stop_the_run(dropped: dict[str, int], fires: bool) -> None:
    spec, found = (
        asking(too_long="drop", bad_rows="drop"),
        with_train(used=100 - sum(dropped.values()), dropped=dropped),
    )
    findings = list(few_rows_are_lost(found, spec))
    assert [f.level for f in findings] == ["error"] * fires
    if fires:
        assert findings[0].problem == "train.jsonl: 11 of 100 train rows are dropped (11%), data.drop_at_most is 0.1"


@pytest.mark.parametrize("reason", ["left out by limit", "left out by weight"])
def test_rows_that_the_spec_leaves_out_are_no_loss(reason: str) -> None:
    assert list(few_rows_are_lost(with_train(used=1, dropped={reason: 99}), asking())) == []


def test_rows_that_stop_the_run_themselves_are_not_told_a_second_time() -> None:
    found = with_train(used=40, dropped={"too long": 30, "unusable": 30})
    assert list(few_rows_are_lost(found, asking())) == []
    assert len(list(few_rows_are_lost(found, asking(bad_rows="drop")))) == 1
    assert len(list(few_rows_are_lost(found, asking(too_long="cut_prompt")))) == 1


@pytest.mark.parametrize(("cut", "fires"), [(50, False), (51, True)])
def test_more_cut_prompts_than_allowed_stop_the_run(cut: int, fires: bool) -> None:
    findings = list(few_rows_are_lost(with_train(cut=cut, cut_tokens=9), asking(too_long="cut_prompt")))
    assert [f.level for f in findings] == ["error"] * fires


@given(read=st.integers(1, 10_000), data=st.data())
def test_the_share_that_a_finding_names_is_enough(read: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(read // 10 + 1, read))
    found = with_train(read=read, used=read - lost, dropped={"too long": lost})
    key, value = only(few_rows_are_lost, found, asking(too_long="drop")).remedy.split("--set ")[1].split("=")
    assert key == "data.drop_at_most"
    assert list(few_rows_are_lost(found, asking(too_long="drop", drop_at_most=float(value)))) == []


# what is learnt


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_without_a_row_stops_the_run(split: str) -> None:
    sources = tuple(replace(s, used=0, dropped={"too long": s.read}) if s.split == split else s for s in SOUND.sources)
    found = replace(SOUND, sources=sources, lengths=None if split == "train" else LENGTHS)
    finding, read = only(something_is_learnt, found, asking()), sum(s.read for s in sources if s.split == split)
    assert (finding.level, finding.problem) == (
        "error",
        f"none of the {read} {split} rows is left: {read} too long",
    )


def test_a_source_that_gives_nothing_to_a_share_is_no_fault() -> None:
    """Of two training sources a small share may fall into one."""
    held = replace(VALIDATION, source="train.jsonl", records=0)
    found = replace(
        SOUND, sources=(held, replace(held, source="more.jsonl", read=0, used=0, tokens=0, supervised_tokens=0), TRAIN)
    )
    assert check_data(found, asking(validation={"share": 0.1}), embeddings=None) == ()


def test_a_source_of_which_nothing_is_supervised_stops_the_run() -> None:
    finding = only(something_is_learnt, with_train(supervised_tokens=0), asking())
    assert finding.level == "error"
    assert finding.problem.startswith("train.jsonl: none of its 5,000 tokens is supervised")


def test_test_rows_need_no_supervised_tokens() -> None:
    test = replace(TRAIN, split="test", source="test.jsonl", supervised_tokens=0)
    assert check_data(replace(SOUND, sources=(test, TRAIN)), asking(), embeddings=None) == ()


@pytest.mark.parametrize(("rows", "fires"), [(10, False), (9, True)])
def test_fewer_rows_than_a_step_takes_are_a_warning(rows: int, fires: bool) -> None:
    findings = list(something_is_learnt(replace(SOUND, lengths=replace(LENGTHS, num_rows=rows)), asking()))
    assert [f.level for f in findings] == ["warning"] * fires
    if fires:
        assert findings[0].remedy.startswith("--set global_batch=2")


# overlap


@pytest.mark.parametrize(("overlap", "level"), [("error", "error"), ("warn", "warning"), ("drop", "error")])
def test_a_shared_row_stops_the_run_unless_something_else_is_asked(overlap: str, level: str) -> None:
    finding = only(splits_are_disjoint, with_fault("overlap", split="test", count=2), asking(overlap=overlap))
    assert finding.level == level
    assert finding.problem.startswith(
        "test shares 2 rows with the rows on which the model is trained or selected:\n  test.jsonl:1 "
    )
    assert "data.overlap: drop" in finding.remedy


@pytest.mark.parametrize(("split", "level"), [("validation", "warning"), ("test", "error")])
def test_a_share_of_train_that_is_nearly_train_is_nobodys_mistake(split: str, level: str) -> None:
    assert (
        only(splits_are_disjoint, with_fault("overlap", split=split), asking(validation={"share": 0.1})).level == level
    )


def test_repeated_rows_are_a_warning() -> None:
    finding = only(train_has_no_duplicates, with_fault("duplicate", count=5), asking())
    assert (finding.level, finding.problem.splitlines()[0]) == ("warning", "train repeats 5 of its rows:")


# tokens


def test_text_that_is_read_as_control_tokens_is_a_warning() -> None:
    finding = only(texts_hold_no_control_tokens, with_fault("special token"), asking())
    assert (finding.level, finding.problem.splitlines()[0]) == (
        "warning",
        "the tokenizer reads text of 1 train row as control tokens:",
    )


def test_placeholders_that_nobody_filled_in_are_a_warning() -> None:
    finding = only(placeholders_are_filled_in, with_fault("placeholder", count=2), asking())
    assert (finding.level, finding.problem.splitlines()[0]) == (
        "warning",
        "2 train rows contain literal placeholders, which are trained and scored as they are:",
    )


def test_rows_that_mark_a_recording_are_counted_in_a_warning() -> None:
    finding = only(recordings_are_not_asked_about, with_fault("medium", count=2), asking())
    assert finding.level == "warning"
    assert "2 train rows" in finding.problem


def test_what_is_said_of_the_template_is_a_note() -> None:
    finding = only(preparation_is_reported, replace(SOUND, notes=("it differs",)), asking())
    assert (finding.level, finding.problem) == ("note", "it differs")


def test_padding_that_ends_an_answer_is_a_note() -> None:
    assert only(preparation_is_reported, replace(SOUND, pad_is_end=True), asking()).level == "note"


@pytest.mark.parametrize(("embeddings", "fires"), [(260, False), (259, True), (None, False)])
def test_a_token_without_an_embedding_stops_the_run(embeddings: int | None, fires: bool) -> None:
    findings = check_data(SOUND, asking(), embeddings=embeddings)
    assert [f.level for f in findings] == ["error"] * fires
    if fires:
        assert "the rows contain token 259, but the model has embeddings for 259" in findings[0].problem


def _items(*answers: str, references: tuple[str, ...] = ()) -> list[Row]:
    return [
        Row(
            source="t.jsonl",
            number=at,
            messages=(Message("user", "q"), Message("assistant", answer)),
            references=references,
        )
        for at, answer in enumerate(answers, start=1)
    ]


@pytest.mark.parametrize("task", ["exact_match", "relaxed_accuracy", "anls", "vqa_accuracy"])
def test_long_references_of_a_metric_of_short_answers_are_a_warning(task: str) -> None:
    (found,) = long_references([Evaluation.model_validate({"task": task})], _items("x" * 121, "y" * 200, "short"))
    assert (found.level, "2 of 3 references" in found.problem) == ("warning", True)


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("exact_match", _items("x" * 120, "y" * 200)),
        ("exact_match", _items("x" * 200, references=("42",))),
        ("json_match", _items("x" * 200)),
        ("rouge", _items("x" * 200)),
    ],
    ids=["half are short", "a reference is short", "JSON", "of texts"],
)
def test_no_word_is_lost_on_references_that_can_be_met(task: str, rows: list[Row]) -> None:
    assert list(long_references([Evaluation.model_validate({"task": task})], rows)) == []


def test_every_fault_is_one_checks_own() -> None:
    kinds: tuple[Kind, ...] = ("unusable", "too long", "special token", "placeholder", "medium", "overlap", "duplicate")
    for kind in kinds:
        assert [len(list(check(with_fault(kind), asking()))) for check in CHECKS].count(1) == 1


def test_errors_come_first() -> None:
    found = replace(
        with_fault("unusable"), notes=("it differs",), pad_is_end=True, lengths=replace(LENGTHS, num_rows=1)
    )
    assert [f.level for f in check_data(found, asking(), embeddings=1)] == [
        "error",
        "error",
        "warning",
        "note",
        "note",
    ]


# Rows that are trained on are found among those that are asked, whatever becomes of them later.

FORM = """\
def build(prompt, answer):
    return prompt.split("|")[1], answer
"""
TRAIN_ROWS, TEST = Source(path="train.jsonl"), Source(path="test.jsonl")


def leaks_found(
    base: Path,
    train: list[dict[str, Any]],
    test: list[dict[str, Any]],
    sources: tuple[Source, ...] = (TRAIN_ROWS,),
    **more: Any,
) -> list[str]:
    write_jsonl(base / "train.jsonl", train)
    write_jsonl(base / "test.jsonl", test)
    return [f"{one.row} is {one.other}: {one.how}" for one in find_leaks(sources, TEST, base=base, seed=0, **more)]


def _asked(prompt: str) -> dict[str, str]:
    return {"prompt": prompt, "answer": "four"}


def test_a_row_that_no_budget_holds_is_compared_too(tmp_path: Path) -> None:
    long = _asked(" ".join(f"word{at}" for at in range(5000)))
    rows = [_asked(f"what is {at}?") for at in range(4)]
    assert leaks_found(tmp_path, [*rows, long], [_asked("how much?"), long]) == [
        "train.jsonl:5 is test.jsonl:2: the same row"
    ]


def test_each_question_is_told_once_and_by_the_first_row_that_holds_it(tmp_path: Path) -> None:
    rows = [_asked("What is 2?"), _asked("what is 2"), _asked("what is 3?")]
    assert leaks_found(tmp_path, rows, [_asked("what is 2?"), _asked("what is 5?")]) == [
        "train.jsonl:1 is test.jsonl:1: the same but for case and punctuation"
    ]


def test_rows_that_a_limit_leaves_out_are_trained_on_by_nobody(tmp_path: Path) -> None:
    rows = [_asked(f"what is {at}?") for at in range(40)]
    limited = (Source(path="train.jsonl", limit=10),)
    assert len(leaks_found(tmp_path, rows, rows)) == 40
    assert len(leaks_found(tmp_path, rows, rows, limited)) == 10


def test_rows_are_compared_as_they_are_built(tmp_path: Path) -> None:
    (tmp_path / "form.py").write_text(FORM, encoding="utf-8")
    train, test = [_asked("17|what is 2?")], [_asked("18|what is 2?")]
    assert leaks_found(tmp_path, train, test) == []
    form = CustomTask(kind="python", path="form.py")
    assert leaks_found(tmp_path, train, test, form=form) == ["train.jsonl:1 is test.jsonl:1: the same row"]
