"""Every row that was read is in a pair or named with a reason, splits stay apart, and what comes out is what objective dpo reads."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from finefit.artifacts.forecasts import Room
from finefit.artifacts.pipelines import Order, WiredModel
from finefit.artifacts.rundir import RunDir
from finefit.data.read import open_source
from finefit.data.render import Renderer
from finefit.data.rows import BadRow, Row
from finefit.errors import DataError, Resumable, RunError, SpecError
from finefit.evaluate.answers import Answer, answers
from finefit.pipeline.making import pairs_sampled
from finefit.pipeline.making.make_pairs import lines, make
from finefit.pipeline.stage_keys import tree_digest
from finefit.review.runs import Named, stack_of_runs
from finefit.review.session import journal_of, open_session
from finefit.spec.load import parse_any
from finefit.spec.models import FolderModel
from finefit.spec.rows import Source
from finefit.spec.stages import MakePairs
from tests.conftest import make_model_folder, write_jsonl
from tests.data.falsify.corpus import make_rows
from tests.reviews import make_items, make_run

torch.set_num_threads(1)


def grounded(count: int, *, seed: int) -> list[dict[str, Any]]:
    return [{"prompt": row.prompt[0].content, "answer": row.answer} for row in make_rows(count, seed=seed)]


def order_of(folder: Path, stage: dict[str, Any], *, seed: int = 1, **more: Any) -> Order:
    spec = MakePairs.model_validate_json(json.dumps({"kind": "make_pairs", **stage}))
    return Order(name="pairs", pipeline="p", seed=seed, device="cpu", precision="fp32", base=str(folder), stage=spec, **more)


def made(folder: Path, stage: dict[str, Any], *, out: str = "out", **more: Any) -> tuple[dict[str, Any], Path]:
    place = folder / out / "output"
    place.mkdir(parents=True)
    return make(order_of(folder, stage, **more), place), place


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_back(path: Path) -> list[Row]:
    rows = list(open_source(Source(path=path.name), path.parent, split="train").rows())
    assert not any(isinstance(row, BadRow) for row in rows)
    return [row for row in rows if isinstance(row, Row)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 60, "validation": 32, "test": 40}.items()):
        write_jsonl(tmp_path / f"{split}.jsonl", grounded(count, seed=seed))
    return tmp_path


JOINED = {"prompt": "{question}", "answer": "answer"}


@pytest.mark.parametrize("join", ["answers.jsonl", "/answers.jsonl"])
def test_what_is_joined_is_found_wherever_the_rows_lie(tmp_path: Path, join: str) -> None:
    """Rows that another stage has made have an absolute path; what the spec joins to them is relative to the spec file."""
    there, rows = tmp_path / "elsewhere", grounded(40, seed=3)
    there.mkdir()
    write_jsonl(there / "questions.jsonl", [{"question_id": at, "question": row["prompt"]} for at, row in enumerate(rows)])
    write_jsonl(tmp_path / "answers.jsonl", [{"question_id": at, "answer": row["answer"]} for at, row in enumerate(rows)])
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
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "test.jsonl", "train.jsonl", "validation.jsonl"]
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
    texts = [(made(rows, ALL, out=f"out{at}", seed=seed)[1] / "train.jsonl").read_bytes() for at, seed in enumerate((1, 1, 2))]
    assert texts[0] == texts[1] != texts[2]


def test_where_the_rows_lie_makes_no_difference(rows: Path) -> None:
    """What another stage has made is named by where it lies now."""
    found = [made(rows, {"train": [{"path": path}]}, out=f"at{at}")[1] for at, path in enumerate(("train.jsonl", str(rows / "train.jsonl")))]
    assert [(found[0] / name).read_bytes() for name in ("train.jsonl", "report.json")] == [
        (found[1] / name).read_bytes() for name in ("train.jsonl", "report.json")
    ]


def test_rows_that_cannot_be_used_are_counted_and_named(rows: Path) -> None:
    odd = [*grounded(33, seed=0)[:33], grounded(1, seed=0)[0], {"prompt": "Why?", "answer": ""}, {"prompt": "What of it?", "answer": "Hm."}]
    write_jsonl(rows / "train.jsonl", odd)
    summary, out = made(rows, {"train": [{"path": "train.jsonl"}], "method": {"kind": "rules", "shares": {"fabrication": 0}}})
    told = summary["splits"]["train"]
    assert told["used"] + sum(told["unused"].values()) == told["read"] == 36
    assert told["unused"]["says the same as another row"] == 1
    named = {row["place"]: row["reason"] for row in json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]}
    assert len(named) == sum(told["unused"].values())
    assert named["train.jsonl:34"] == "says the same as train.jsonl:1"
    assert "no rule can change" in named["train.jsonl:36"]
    assert "fabrication" not in told["rules"]
    assert any("rows are in no pair" in line for line in lines(summary))


def test_a_limit_leaves_rows_out_by_name(rows: Path) -> None:
    summary, out = made(rows, {"train": [{"path": "train.jsonl", "limit": 35}]})
    told = summary["splits"]["train"]
    assert (told["read"], told["used"], told["unused"]) == (60, 35, {"left out by limit": 25})
    assert len(json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]) == 25


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


def test_few_pairs_are_told_with_a_warning(rows: Path) -> None:
    summary, _ = made(rows, {"train": [{"path": "train.jsonl", "limit": 10}]})
    assert any(line.startswith("warning: train: 10 pairs are too few") for line in lines(summary))


def test_a_prompt_in_two_splits_is_refused_with_both_places(rows: Path) -> None:
    both = grounded(3, seed=0)[2]
    write_jsonl(rows / "test.jsonl", [*grounded(30, seed=2), both | {"prompt": both["prompt"].upper()}])
    with pytest.raises(DataError, match=r"test\.jsonl:31 \(test\) asks what train\.jsonl:3 \(train\) asks"):
        made(rows, ALL)


def test_a_split_of_which_no_pair_can_be_made_is_refused(rows: Path) -> None:
    write_jsonl(rows / "test.jsonl", [{"prompt": f"Say {at}", "answer": "hm"} for at in range(5)])
    with pytest.raises(DataError, match=r"no pair could be made for test of 5 rows: 5 has an answer that no rule can change"):
        made(rows, ALL | {"method": {"kind": "rules", "shares": {"fabrication": 0}}})


def test_a_weight_above_one_is_refused(rows: Path) -> None:
    with pytest.raises(SpecError, match="a pair is made once"):
        made(rows, {"train": [{"path": "train.jsonl", "weight": 2.0}]})


SPEC = "name: x\nstages: {{pairs: {{kind: make_pairs{}}}}}\n"


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("", "rows with right answers are needed"),
        (", train: [{path: a.jsonl}], method: {kind: verdicts, of: [runs/a-1]}", "verdicts are about answers that are there already"),
    ],
)
def test_rows_are_named_where_they_are_needed_and_nowhere_else(stage: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_any(SPEC.format(stage), where="spec.yaml")


# by verdicts


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
        make_run(folder / "runs" / f"{side}-1", {"checkpoint-3": make_items(count, side)}, final="checkpoint-3") for side in ("left", "right")
    )


def test_what_people_preferred_becomes_pairs_and_the_rest_is_told(tmp_path: Path) -> None:
    left, right = two_runs(tmp_path)
    judge(left.path, (left, right), ["1", "2", "tie", "2"])
    summary, out = made(tmp_path, {"method": {"kind": "verdicts", "of": ["runs/left-1"]}})
    pairs = read_back(out / "train.jsonl")
    sides = sorted((pair.answer.split()[0], pair.rejected[0].content.split()[0]) for pair in pairs)
    assert sides == [("left", "right"), ("right", "left"), ("right", "left")]
    assert all(pair.answer.split()[1] == pair.rejected[0].content.split()[1] == pair.prompt[0].content.split()[1] for pair in pairs)
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
    assert [row["place"] for row in json.loads((out / "report.json").read_text())["splits"]["train"]["unused_rows"]] == ["pairs.jsonl:2"]


# sampled


SCORER = """
METRICS = {"vowels": "mean"}

def extract(answer):
    return answer

def score(found, reference):
    return {"vowels": sum(letter in "aeiou" for letter in found) / 50}
"""


def sampled(
    folder: Path, *, seed: int = 1, out: str = "out", train: Sequence[dict[str, Any]] = ({"path": "train.jsonl"},), **method: Any
) -> tuple[dict[str, Any], Path]:
    stage = {
        "method": {"kind": "sampled", "model": {"kind": "folder", "path": "model"}, "task": {"kind": "python", "path": "task.py"}}
        | {"samples": 3, "max_new_tokens": 24, "temperature": 1.0}
        | method,
        "train": train,
    }
    wired = {"method.model": WiredModel(model=FolderModel(kind="folder", path=str(folder / "model")))}
    return made(folder, stage, out=out, seed=seed, models=wired)


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model", seed=3)
    (tmp_path / "task.py").write_text(SCORER)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"say {at}", "answer": "a e"} for at in range(6)])
    return tmp_path


def vowels(text: str) -> int:
    return sum(letter in "aeiou" for letter in text)


def test_the_best_sampled_answer_is_preferred_to_the_worst(talker: Path) -> None:
    summary, out = sampled(talker)
    pairs = records(out / "train.jsonl")
    assert pairs
    assert all(vowels(pair["chosen"]) > vowels(pair["rejected"]) for pair in pairs)
    assert all(pair["scores"]["chosen"] > pair["scores"]["rejected"] for pair in pairs)
    told = summary["splits"]["train"]
    assert told["used"] + sum(told["unused"].values()) == told["read"] == 6
    assert summary["loaded_bytes"] > 50 * 2**20


def test_sampled_pairs_hang_on_the_seed_and_not_on_the_other_rows(talker: Path) -> None:
    first = {pair["prompt"][0]["content"]: pair for pair in records(sampled(talker)[1] / "train.jsonl")}
    rows = records(talker / "train.jsonl")
    write_jsonl(talker / "train.jsonl", rows[3:])
    fewer = {pair["prompt"][0]["content"]: pair for pair in records(sampled(talker, out="fewer")[1] / "train.jsonl")}
    scores = {asked: pair["scores"] for asked, pair in first.items()}
    assert fewer
    assert {asked: pair["scores"] for asked, pair in fewer.items()} == {asked: scores[asked] for asked in fewer}
    write_jsonl(talker / "train.jsonl", rows)
    other = {pair["prompt"][0]["content"]: pair["chosen"] for pair in records(sampled(talker, out="other", seed=2)[1] / "train.jsonl")}
    assert other != {asked: pair["chosen"] for asked, pair in first.items()}


def test_answers_of_a_stage_that_was_killed_are_not_asked_for_again(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(model: torch.nn.Module, renderer: Renderer, prompts: Sequence[Sequence[int]], **how: Any) -> Iterator[tuple[int, Answer]]:
        asked.append(len(prompts))
        return answers(model, renderer, prompts, **how)

    def narrow(*given: Any, **more: Any) -> Room:
        return replace(room(*given, **more), rows=4)

    room = pairs_sampled._room
    monkeypatch.setattr(pairs_sampled, "_room", narrow)
    monkeypatch.setattr(pairs_sampled, "answers", counted)
    _, whole = sampled(talker, out="whole")
    batches = (talker / "whole/answers.jsonl").read_bytes().splitlines(keepends=True)
    assert [len(json.loads(batch)["answers"]) for batch in batches] == [4, 4, 4, 4, 2]
    (talker / "killed").mkdir()
    torn = batches[2][:-9]
    (talker / "killed/answers.jsonl").write_bytes(b"".join([*batches[:2], torn]))
    _, out = sampled(talker, out="killed")
    assert asked == [18, 10]
    assert (talker / "killed/answers.jsonl").read_bytes() == b"".join([*batches[:2], torn, b"\n", *batches[2:]])
    assert tree_digest(out) == tree_digest(whole)


def test_answers_that_were_made_by_something_else_are_asked_for_again(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = sampled(talker, out="first")
    monkeypatch.setattr(pairs_sampled, "made_with", lambda: {"torch": "another"})
    (talker / "second").mkdir()
    shutil.copy(talker / "first/answers.jsonl", talker / "second/answers.jsonl")
    _, again = sampled(talker, out="second")
    before, after = (records(talker / name / "answers.jsonl") for name in ("first", "second"))
    assert [line["answers"] for line in after] == [line["answers"] for line in before] * 2
    assert tree_digest(again) == tree_digest(out)


def test_answers_that_are_judged_wrong_are_nothing_to_be_near_to(talker: Path) -> None:
    rows = [{"prompt": f"say {at}", "completion": "a e", "label": at > 1} for at in range(6)]
    write_jsonl(talker / "train.jsonl", rows)
    told = sampled(talker)[0]["splits"]["train"]
    assert told["unused"]["has an answer that is judged wrong"] == 2
    assert told["used"] + sum(told["unused"].values()) == told["read"] == 6


def test_rows_of_two_files_that_are_called_alike_are_two_rows(talker: Path) -> None:
    """As stages call what they leave."""
    sources = []
    for name in ("one", "two"):
        (talker / name).mkdir()
        write_jsonl(talker / name / "rows.jsonl", [{"prompt": f"say {name}", "answer": "a e"}])
        sources.append({"path": str(talker / name / "rows.jsonl")})
    _, out = sampled(talker, train=sources)
    assert sorted(pair["prompt"][0]["content"] for pair in records(out / "train.jsonl")) == ["say one", "say two"]


def test_a_model_that_does_not_fit_now_may_fit_later(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pairs_sampled, "load_for_answers", full)
    with pytest.raises(Resumable, match="does not fit in the memory that is free: CUDA out of memory"):
        sampled(talker)


def test_answers_that_differ_by_less_than_the_margin_are_no_pair(talker: Path) -> None:
    with pytest.raises(DataError, match="no pair could be made for train of 6 rows: 6 has scores that do not differ enough"):
        sampled(talker, margin=1.0)


@pytest.mark.parametrize("task", ["hallucination", "perplexity", "truthfulqa", {"kind": "lm_eval", "tasks": ["arc_easy"]}])
def test_a_task_that_scores_no_answer_is_refused(talker: Path, task: object) -> None:
    with pytest.raises(SpecError, match=r"method\.task \w+ does not say of a written answer alone how good it is"):
        sampled(talker, task=task)
