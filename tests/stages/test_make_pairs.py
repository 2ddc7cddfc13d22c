"""Every row that was read is in a pair or named with a reason, splits stay apart, and what comes out is what objective
dpo reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from finefit.artifacts.rundir import RunDir
from finefit.errors import DataError, RunError, SpecError
from finefit.report.stage_summary import summary_lines
from finefit.review.items import RunTarget, review_set_of_runs
from finefit.review.session import journal_of, open_session
from finefit.run.cache_inputs import tree_digest
from finefit.spec.load import parse_any
from tests.conftest import write_jsonl
from tests.made_pairs import from_a_run, grounded, made, read_back, records
from tests.reviews import make_items, make_run, set_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 60, "validation": 32, "test": 40}.items()):
        write_jsonl(tmp_path / f"{split}.jsonl", grounded(count, seed=seed))
    return tmp_path


JOINED = {"prompt": "{question}", "answer": "answer"}


@pytest.mark.parametrize("join", ["answers.jsonl", "/answers.jsonl"])
def test_what_is_joined_is_found_wherever_the_rows_lie(tmp_path: Path, join: str) -> None:
    """Rows that another stage has made have an absolute path; what the spec joins to them is relative to the spec
    file."""
    there, rows = tmp_path / "elsewhere", grounded(40, seed=3)
    there.mkdir()
    write_jsonl(
        there / "questions.jsonl", [{"question_id": at, "question": row["prompt"]} for at, row in enumerate(rows)]
    )
    write_jsonl(
        tmp_path / "answers.jsonl", [{"question_id": at, "answer": row["answer"]} for at, row in enumerate(rows)]
    )
    path = str(tmp_path / "answers.jsonl") if join.startswith("/") else join
    source = {"path": str(there / "questions.jsonl"), "fields": JOINED | {"join": path}}
    summary, _ = made(tmp_path, {"train": [source]})
    assert summary["splits"]["train"]["used"] > 0


def test_only_the_records_that_a_source_asks_for_become_pairs(tmp_path: Path) -> None:
    rows = [row | {"kind": "wanted" if at < 15 else "other"} for at, row in enumerate(grounded(40, seed=3))]
    write_jsonl(tmp_path / "train.jsonl", rows)
    _, out = made(tmp_path, {"train": [{"path": "train.jsonl", "where": {"kind": "wanted"}}]})
    found = {row.prompt[-1].content for row in read_back(out / "train.jsonl")}
    assert found
    assert found <= {row["prompt"] for row in rows[:15]}


ALL = {"train": [{"path": "train.jsonl"}], "validation": {"path": "validation.jsonl"}, "test": {"path": "test.jsonl"}}


# by rules


def test_each_split_becomes_a_file_of_pairs_that_dpo_reads(rows: Path) -> None:
    summary, out = made(rows, ALL)
    assert sorted(path.name for path in out.iterdir()) == [
        "report.json",
        "test.jsonl",
        "train.jsonl",
        "validation.jsonl",
    ]
    for split, count in {"train": 60, "validation": 32, "test": 40}.items():
        pairs, asked = read_back(out / f"{split}.jsonl"), records(rows / f"{split}.jsonl")
        assert {row.kind for row in pairs} == {"pair"}
        answers = {row["prompt"]: row["answer"] for row in asked}
        assert all(answers[row.prompt[-1].content] == row.answer != row.rejected[0].content for row in pairs)
        told = summary["splits"][split]
        assert (told["read"], told["pairs"]) == (count, len(pairs))
        assert told["used"] + sum(told["unused"].values()) == count
        assert sum(rule["made"] for rule in told["rules"].values()) == len(pairs)
        assert max(told["length_auc"].values()) <= 0.6


def test_the_same_seed_makes_the_same_bytes_and_another_seed_does_not(rows: Path) -> None:
    texts = [
        (made(rows, ALL, out=f"out{at}", seed=seed)[1] / "train.jsonl").read_bytes()
        for at, seed in enumerate((1, 1, 2))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_where_the_rows_lie_makes_no_difference(rows: Path) -> None:
    """What another stage has made is named by where it lies now."""
    found = [
        made(rows, {"train": [{"path": path}]}, out=f"at{at}")[1]
        for at, path in enumerate(("train.jsonl", str(rows / "train.jsonl")))
    ]
    assert [(found[0] / name).read_bytes() for name in ("train.jsonl", "report.json")] == [
        (found[1] / name).read_bytes() for name in ("train.jsonl", "report.json")
    ]


def test_where_the_run_lies_makes_no_difference(rows: Path) -> None:
    """Nor to what is told of rows that are in no pair."""
    (rows / "mine.yaml").write_text("kinds: {drug: {words: [aspirin, metformin]}}\n")
    asked = [{"question_id": at, "question": row["prompt"]} for at, row in enumerate(grounded(40, seed=3))]
    write_jsonl(rows / "asked.jsonl", [*asked, {"question_id": 99, "question": "Why?"}, asked[0] | {"question_id": 98}])
    answers = [{"question_id": at, "answer": row["answer"]} for at, row in enumerate(grounded(40, seed=3))]
    write_jsonl(rows / "answers.jsonl", [*answers, answers[0] | {"question_id": 98}])
    source = {"path": "asked.jsonl", "fields": JOINED | {"join": "answers.jsonl"}}
    stage: dict[str, Any] = {"train": [source], "method": {"kind": "rules", "words": "mine.yaml"}}
    _, here = made(rows, stage, out="here")
    assert tree_digest(from_a_run(rows, stage, out="there")) == tree_digest(here)
    assert {pair["row"].split(":")[0] for pair in records(here / "train.jsonl")} == {"asked.jsonl"}


@pytest.mark.parametrize("path", ["shards", "shards/*/*.jsonl"])
def test_files_of_one_folder_are_told_apart_by_their_paths_within_it(rows: Path, path: str) -> None:
    for at, name in enumerate(("one", "two")):
        (rows / "shards" / name).mkdir(parents=True)
        write_jsonl(rows / "shards" / name / "rows.jsonl", grounded(40, seed=at))
    out = from_a_run(rows, {"train": [{"path": path}]}, out="there")
    assert {pair["row"].split(":")[0] for pair in records(out / "train.jsonl")} == {"one/rows.jsonl", "two/rows.jsonl"}


def test_rows_that_cannot_be_used_are_counted_and_named(rows: Path) -> None:
    odd = [
        *grounded(33, seed=0)[:33],
        grounded(1, seed=0)[0],
        {"prompt": "Why?", "answer": ""},
        {"prompt": "What of it?", "answer": "Hm."},
    ]
    write_jsonl(rows / "train.jsonl", odd)
    summary, out = made(
        rows, {"train": [{"path": "train.jsonl"}], "method": {"kind": "rules", "shares": {"fabrication": 0}}}
    )
    told = summary["splits"]["train"]
    assert told["used"] + sum(told["unused"].values()) == told["read"] == 36
    assert told["unused"]["says the same as another row"] == 1
    named = {
        row["place"]: row["reason"]
        for row in json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]
    }
    assert len(named) == sum(told["unused"].values())
    assert named["train.jsonl:34"] == "says the same as train.jsonl:1"
    assert "no rule can change" in named["train.jsonl:36"]
    assert "fabrication" not in told["rules"]
    assert any("rows are in no pair" in line for line in summary_lines("make_pairs", summary))


def test_a_limit_leaves_rows_out_by_name_and_few_pairs_are_told_with_a_warning(rows: Path) -> None:
    summary, out = made(rows, {"train": [{"path": "train.jsonl", "limit": 10}]})
    told = summary["splits"]["train"]
    assert (told["read"], told["used"], told["unused"]) == (60, 10, {"left out by limit": 50})
    assert len(json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]) == 50
    assert any(line.startswith("warning: train: 10 pairs are too few") for line in summary_lines("make_pairs", summary))


def test_several_pairs_of_a_row_are_by_different_rules(rows: Path) -> None:
    _, out = made(rows, {"train": [{"path": "train.jsonl"}], "method": {"kind": "rules", "per_row": 2}})
    by_row: dict[str, list[str]] = {}
    for pair in records(out / "train.jsonl"):
        by_row.setdefault(pair["row"], []).append(pair["rule"])
    assert max(len(rules) for rules in by_row.values()) == 2
    assert all(len(set(rules)) == len(rules) for rules in by_row.values())


def test_word_lists_of_the_users_own_take_the_place_of_ours(rows: Path) -> None:
    """Lists without a kind of term leave nothing to swap but acronyms and names."""
    (rows / "mine.yaml").write_text("kinds: {drug: {words: [aspirin, metformin]}}\n")
    method = {"kind": "rules", "words": "mine.yaml", "shares": {"number": 0, "negation": 0, "fabrication": 0}}
    _, out = made(rows, {"train": [{"path": "train.jsonl"}], "method": method})
    swapped = {pair["change"]["before"].lower() for pair in records(out / "train.jsonl")}
    assert swapped <= {"aspirin", "metformin", "cbt", "hbo", "mri", "pcr", "norway"}


def test_a_prompt_in_two_splits_is_refused_with_both_places(rows: Path) -> None:
    both = grounded(3, seed=0)[2]
    write_jsonl(rows / "test.jsonl", [*grounded(30, seed=2), both | {"prompt": both["prompt"].upper()}])
    with pytest.raises(DataError, match=r"test\.jsonl:31 \(test\) has the prompt of train\.jsonl:3 \(train\)"):
        made(rows, ALL)


def test_a_split_of_which_no_pair_can_be_made_is_refused(rows: Path) -> None:
    write_jsonl(rows / "test.jsonl", [{"prompt": f"Say {at}", "answer": "hm"} for at in range(5)])
    with pytest.raises(
        DataError, match=r"no pair could be made for test of 5 rows: 5 has an answer that no rule can change"
    ):
        made(rows, ALL | {"method": {"kind": "rules", "shares": {"fabrication": 0}}})


SPEC = "name: x\nstages: {{pairs: {{kind: make_pairs{}}}}}\n"


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("", "rows with right answers are needed"),
        (
            ", train: [{path: a.jsonl}], method: {kind: verdicts, of: [runs/a-1]}",
            "verdicts judge existing answers",
        ),
    ],
)
def test_rows_are_named_where_they_are_needed_and_nowhere_else(stage: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_any(SPEC.format(stage), where="spec.yaml")


# What people have judged becomes pairs as it was judged, or is named with a reason.


def judge(folder: Path, runs: Sequence[RunDir], presses: Sequence[str], *, name: str = "review") -> None:
    """In the order in which the items come; `1` and `2` are the first and the second model, wherever they stand."""
    review_set = review_set_of_runs([RunTarget(run=run, checkpoint=None) for run in runs], name=name)
    with open_session(review_set, folder, seed=5) as session:
        for press in presses:
            item = session.turn("ann").item
            assert item is not None
            if press in ("1", "2") and len(runs) == 2:
                wanted = ("left", "right")[int(press) - 1]
                press = "1" if item.answers[0].startswith(wanted) else "2"
            session.judge("ann", item.handle, press)  # type: ignore[arg-type]


def two_runs(folder: Path, count: int = 6) -> tuple[RunDir, RunDir]:
    return tuple(  # type: ignore[return-value]
        make_run(folder / "runs" / f"{side}-1", {"checkpoint-3": make_items(count, side)}, final="checkpoint-3")
        for side in ("left", "right")
    )


def test_what_people_preferred_becomes_pairs_and_the_rest_is_told(tmp_path: Path) -> None:
    left, right = two_runs(tmp_path)
    judge(left.path, (left, right), ["1", "2", "tie", "2"])
    before = journal_of(left.path, "review").read_bytes()
    summary, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})
    assert journal_of(left.path, "review").read_bytes() == before
    pairs = read_back(out / "train.jsonl")
    sides = sorted((pair.answer.split()[0], pair.rejected[0].content.split()[0]) for pair in pairs)
    assert sides == [("left", "right"), ("right", "left"), ("right", "left")]
    assert all(
        pair.answer.split()[1] == pair.rejected[0].content.split()[1] == pair.prompt[0].content.split()[1]
        for pair in pairs
    )
    assert summary["splits"]["train"]["unused"] == {"not judged": 2, "tie": 1}
    assert summary["splits"]["train"]["read"] == 6


def test_a_bad_answer_of_one_model_loses_to_its_reference(tmp_path: Path) -> None:
    left, _ = two_runs(tmp_path)
    judge(left.path, (left,), ["2", "1"])
    _, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})
    (pair,) = read_back(out / "train.jsonl")
    assert pair.rejected[0].content.startswith("left")
    assert not pair.answer.startswith("left")


def test_exported_pairs_count_once_and_contradicted_ones_not_at_all(tmp_path: Path) -> None:
    one, other, third = ({"prompt": f"q{at}", "chosen": f"good {at}", "rejected": f"bad {at}"} for at in range(3))
    turned = {"prompt": "q2", "chosen": "bad 2", "rejected": "good 2"}
    write_jsonl(tmp_path / "a.jsonl", [one, other, third])
    write_jsonl(tmp_path / "b.jsonl", [one, turned])
    summary, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["a.jsonl", "b.jsonl"]}})
    assert [pair.answer for pair in read_back(out / "train.jsonl")] == ["good 0", "good 1"]
    told = summary["splits"]["train"]
    assert told["unused"] == {"is judged the other way in another review": 2, "is judged the same in another review": 1}
    assert told["read"] == 5


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALLS = "has an answer with tool calls or reasoning"


def calling(city: str, **more: Any) -> list[dict[str, Any]]:
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
    return [{"role": "assistant", "content": "", "tool_calls": [called], **more}]


def saying(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text, **more}]


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (calling("Rome"), saying("No idea."), CALLS),
        (saying("Sunny."), calling("Rome"), CALLS),
        (calling("Rome", content="Let me see."), calling("Paris", content="Let me see."), CALLS),
        (saying("Sunny.", reasoning_content="Rome, so it is."), saying("Rainy."), CALLS),
        ([*calling("Rome"), *saying("Sunny.")], saying("Rainy."), "has sides of several messages"),
        (saying("Sunny."), [*calling("Rome"), *saying("Rainy.")], "has sides of several messages"),
        (saying(" "), saying("Rainy."), "has an empty answer"),
        (saying("Sunny."), saying(""), "has an empty answer"),
    ],
)
def test_a_side_that_is_more_or_less_than_a_text_is_in_no_pair(
    tmp_path: Path, chosen: object, rejected: object, reason: str
) -> None:
    asked = [{"role": "user", "content": "What is the weather in Rome?"}]
    other = {"prompt": [{"role": "user", "content": "Is it so?"}], "chosen": saying("yes"), "rejected": saying("no")}
    write_jsonl(
        tmp_path / "pairs.jsonl", [other, {"prompt": asked, "chosen": chosen, "rejected": rejected, "tools": TOOLS}]
    )
    _, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["pairs.jsonl"]}})
    assert [pair["chosen"] for pair in records(out / "train.jsonl")] == ["yes"]
    (unused,) = json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]
    assert unused["place"] == "pairs.jsonl:2"
    assert unused["reason"].startswith(reason)


def test_a_prompt_keeps_the_tools_that_it_was_judged_with(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, count=2)
    for run in runs:
        asked = [{"messages": [{"role": "user", "content": f"prompt {at}"}, *saying("[7]")]} for at in range(2)]
        set_rows(run, [asked[0] | {"tools": json.dumps(TOOLS)}, asked[1]])
    judge(runs[0].path, runs, ["1", "1"])
    _, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})
    assert {row.prompt[0].content: json.loads(row.tools or "[]") for row in read_back(out / "train.jsonl")} == {
        "prompt 0": TOOLS,
        "prompt 1": [],
    }


def test_where_the_run_lies_makes_no_difference_to_what_was_judged(tmp_path: Path) -> None:
    left, right = two_runs(tmp_path)
    judge(left.path, (left, right), ["1", "2"])
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "good", "rejected": "bad"}])
    stage = {"method": {"kind": "verdicts", "of": ["runs/left-1", "pairs.jsonl"]}}
    _, here = made(tmp_path, stage, out="here")
    assert tree_digest(from_a_run(tmp_path, stage, out="there")) == tree_digest(here)
    assert {pair["row"] for pair in records(here / "train.jsonl")} == {"left-1/reviews/review.jsonl", "pairs.jsonl:1"}


def test_a_run_that_nobody_has_judged_is_refused(tmp_path: Path) -> None:
    two_runs(tmp_path)
    with pytest.raises(RunError, match="runs/left-1 has no reviews"):
        made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})


def test_a_review_whose_other_run_is_gone_is_refused_with_a_way_out(tmp_path: Path) -> None:
    left, right = two_runs(tmp_path)
    judge(left.path, (left, right), ["1"])
    right.path.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"judges right-1:checkpoint-3, which is not beside left-1(.|\n)*--export-pairs"):
        made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})


def test_a_file_of_other_rows_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "a"}])
    with pytest.raises(DataError, match=r"a\.jsonl:1 is not a judged pair"):
        made(tmp_path, {"method": {"kind": "verdicts", "of": ["a.jsonl"]}})
    with pytest.raises(RunError, match="gone is neither a run directory nor a file"):
        made(tmp_path, {"method": {"kind": "verdicts", "of": ["gone"]}}, out="again")


def test_exported_pairs_keep_their_tools_and_those_about_images_are_named(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    sides = {"chosen": "yes", "rejected": "no"}
    rows: list[dict[str, Any]] = [
        {"prompt": "Is it so?", "images": [], "tools": tools, **sides},
        {"prompt": "Is it red?", "images": ["a.png"], **sides},
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    summary, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["pairs.jsonl"]}})
    (pair,) = records(out / "train.jsonl")
    assert pair["tools"] == tools
    (reason,) = summary["splits"]["train"]["unused"]
    assert reason.startswith("has images")
    assert [
        row["place"] for row in json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]
    ] == ["pairs.jsonl:2"]
