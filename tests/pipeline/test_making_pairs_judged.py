"""What people have judged becomes pairs as it was judged, or is named with a reason."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from finefit.artifacts.rundir import RunDir
from finefit.errors import DataError, RunError
from finefit.pipeline.stage_keys import tree_digest
from finefit.review.runs import Named, stack_of_runs
from finefit.review.session import journal_of, open_session
from tests.conftest import write_jsonl
from tests.made_pairs import from_a_run, made, read_back, records
from tests.reviews import make_items, make_run, set_rows


def judge(folder: Path, runs: Sequence[RunDir], presses: Sequence[str], *, name: str = "review") -> None:
    """In the order in which the sheets come; `1` and `2` are the first and the second model, wherever they stand."""
    stack = stack_of_runs([Named(run=run, checkpoint=None) for run in runs], name=name)
    with open_session(stack, folder, seed=5) as session:
        for press in presses:
            face = session.turn("ann").face
            assert face is not None
            if press in ("1", "2") and len(runs) == 2:
                wanted = ("left", "right")[int(press) - 1]
                press = "1" if face.answers[0].startswith(wanted) else "2"
            session.judge("ann", face.handle, press)  # type: ignore[arg-type]


def two_runs(folder: Path, count: int = 6) -> tuple[RunDir, RunDir]:
    return tuple(  # type: ignore[return-value]
        make_run(folder / "runs" / f"{side}-1", {"checkpoint-3": make_items(count, side)}, final="checkpoint-3")
        for side in ("left", "right")
    )


def test_what_people_preferred_becomes_pairs_and_the_rest_is_told(tmp_path: Path) -> None:
    left, right = two_runs(tmp_path)
    judge(left.path, (left, right), ["1", "2", "tie", "2"])
    summary, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})
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


def calling(city: str, **more: Any) -> list[dict[str, Any]]:
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
    return [{"role": "assistant", "content": "", "tool_calls": [called], **more}]


def saying(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text, **more}]


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (calling("Rome"), saying("No idea."), "has an answer with tool calls or reasoning"),
        (saying("Sunny."), calling("Rome"), "has an answer with tool calls or reasoning"),
        (calling("Rome"), calling("Paris"), "has an answer with tool calls or reasoning"),
        (
            calling("Rome", content="Let me see."),
            calling("Paris", content="Let me see."),
            "has an answer with tool calls or reasoning",
        ),
        (
            saying("Sunny.", reasoning_content="Rome, so it is."),
            saying("Rainy."),
            "has an answer with tool calls or reasoning",
        ),
        (
            [*calling("Rome"), {"role": "tool", "content": "sun"}, *saying("Sunny.")],
            saying("Rainy."),
            "has sides of several messages",
        ),
        (
            saying("Sunny."),
            [*calling("Rome"), {"role": "tool", "content": "sun"}, *saying("Rainy.")],
            "has sides of several messages",
        ),
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
    with pytest.raises(DataError, match=r"a\.jsonl:1 is no judged pair"):
        made(tmp_path, {"method": {"kind": "verdicts", "of": ["a.jsonl"]}})
    with pytest.raises(RunError, match="gone is neither a run directory nor a file"):
        made(tmp_path, {"method": {"kind": "verdicts", "of": ["gone"]}}, out="again")


def test_the_journal_is_only_read(tmp_path: Path) -> None:
    left, right = two_runs(tmp_path)
    judge(left.path, (left, right), ["1"])
    before = journal_of(left.path, "review").read_bytes()
    made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})
    assert journal_of(left.path, "review").read_bytes() == before


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
    assert reason.startswith("shows images")
    assert [
        row["place"] for row in json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]
    ] == ["pairs.jsonl:2"]
