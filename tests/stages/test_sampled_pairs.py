"""The best answer against the worst: by seed and row alone, and the same after a kill."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import WiredModel
from finefit.data.render import Renderer
from finefit.errors import DataError, Resumable, SpecError
from finefit.evaluate.batches import Answer, answers
from finefit.plan.client import eval_limits_here
from finefit.run.cache_inputs import tree_digest
from finefit.spec.models import FolderModel
from finefit.stages import sampled_pairs
from tests.conftest import make_model_folder, write_jsonl
from tests.made_pairs import from_a_run, made, records

torch.set_num_threads(1)


SCORER = """
METRICS = {"vowels": "mean"}

def extract(answer):
    return answer

def score(found, reference):
    return {"vowels": sum(letter in "aeiou" for letter in found) / 50}
"""


def sampling(train: Sequence[dict[str, Any]] = ({"path": "train.jsonl"},), **method: Any) -> dict[str, Any]:
    return {
        "method": {
            "kind": "sampled",
            "model": {"kind": "folder", "path": "model"},
            "task": {"kind": "python", "path": "task.py"},
        }
        | {"samples": 3, "max_new_tokens": 24, "temperature": 1.0}
        | method,
        "train": train,
    }


def wired(folder: Path) -> dict[str, WiredModel]:
    return {"method.model": WiredModel(model=FolderModel(kind="folder", path=str(folder / "model")))}


def sampled(folder: Path, *, seed: int = 1, out: str = "out", **asked: Any) -> tuple[dict[str, Any], Path]:
    return made(folder, sampling(**asked), out=out, seed=seed, models=wired(folder))


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
    other = {
        pair["prompt"][0]["content"]: pair["chosen"]
        for pair in records(sampled(talker, out="other", seed=2)[1] / "train.jsonl")
    }
    assert other != {asked: pair["chosen"] for asked, pair in first.items()}


def test_answers_of_a_stage_that_was_killed_are_not_asked_for_again(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(
        model: torch.nn.Module, renderer: Renderer, prompts: Sequence[Sequence[int]], **how: Any
    ) -> Iterator[tuple[int, Answer]]:
        asked.append(len(prompts))
        return answers(model, renderer, prompts, **how)

    def narrow(*given: Any) -> dict[str, EvalBatchLimit]:
        return {label: replace(limit, rows=4) for label, limit in eval_limits_here(*given).items()}

    monkeypatch.setattr(sampled_pairs, "eval_limits_here", narrow)
    monkeypatch.setattr(sampled_pairs, "answers", counted)
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


def test_rows_that_stood_alone_beside_a_long_one_stand_alone_when_it_is_answered(talker: Path) -> None:
    """A dynamic rope stretches once a row is longer than the model's own length."""
    config = talker / "model/config.json"
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64, "rope_parameters": rope})
    )
    long = {"prompt": "say " + "very " * 14 + "much", "answer": "a e"}
    write_jsonl(talker / "train.jsonl", [long, *({"prompt": f"say {at}", "answer": "a e"} for at in range(3))])
    _, whole = sampled(talker, out="whole", max_new_tokens=8)
    batches = (talker / "whole/answers.jsonl").read_bytes().splitlines(keepends=True)
    assert [len(json.loads(batch)["answers"]) for batch in batches] == [1] * 12
    (talker / "killed").mkdir()
    (talker / "killed/answers.jsonl").write_bytes(b"".join(batches[:3]))
    _, out = sampled(talker, out="killed", max_new_tokens=8)
    assert (talker / "killed/answers.jsonl").read_bytes() == b"".join(batches)
    assert tree_digest(out) == tree_digest(whole)


def test_where_the_run_lies_makes_no_difference_to_what_was_sampled(talker: Path) -> None:
    _, here = sampled(talker, out="here")
    assert tree_digest(from_a_run(talker, sampling(), out="there", models=wired(talker))) == tree_digest(here)


def test_answers_that_were_made_by_something_else_are_asked_for_again(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = sampled(talker, out="first")
    monkeypatch.setattr(sampled_pairs, "made_with", lambda: {"torch": "another"})
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

    monkeypatch.setattr(sampled_pairs, "load_for_answers", full)
    with pytest.raises(Resumable, match="does not fit in the memory that is free: CUDA out of memory"):
        sampled(talker)


def test_answers_that_differ_by_less_than_the_margin_are_no_pair(talker: Path) -> None:
    with pytest.raises(
        DataError, match="no pair could be made for train of 6 rows: 6 has scores that do not differ enough"
    ):
        sampled(talker, margin=1.0)


@pytest.mark.parametrize(
    "task", ["hallucination", "perplexity", "truthfulqa", {"kind": "lm_eval", "tasks": ["arc_easy"]}]
)
def test_a_task_that_scores_no_answer_is_refused(talker: Path, task: object) -> None:
    with pytest.raises(SpecError, match=r"method\.task \w+ does not score"):
        sampled(talker, task=task)
