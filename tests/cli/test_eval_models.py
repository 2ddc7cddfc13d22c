"""`finefit eval` of what no run stands behind: a model, an adapter, answers made elsewhere. The same command again answers nothing
twice."""  # noqa: E501

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalResult
from tests.cli.conftest import STAGE, Answer, Finefit, files_with_times
from tests.conftest import write_jsonl

RUN = "runs/tiny-1"
ASKED = ("--data", "test.jsonl", "--task", "json_match", "--max-new-tokens", "8", "--json")


def _result(run: Path, checkpoint: str, task: str = "json_match") -> EvalResult:
    return read_record(StageDir(next((run / "stages").iterdir())).evaluation(task, checkpoint).result, EvalResult)


def _entry(answer: Answer) -> dict[str, Any]:
    assert answer.code == 0, answer.err
    (entry,) = answer.document
    return dict(entry)


def test_a_model_folder_answers_as_the_base_of_the_run_does_and_nothing_twice(finished: Path, finefit: Finefit) -> None:
    entry = _entry(finefit("eval", "model", *ASKED))
    assert (entry["task"], entry["checkpoint"], entry["n"]) == ("json_match", "model", 5)
    run = finished / "runs" / "eval-model-1"
    assert (read_record(RunDir(run).run, Run).kind, read_record(RunDir(run).run, Run).status) == ("eval", "finished")
    mine, theirs = _result(run, "model"), _result(finished / RUN, "base")
    assert [item.answer for item in mine.items] == [item.answer for item in theirs.items]
    assert [item.key for item in mine.items] == [item.key for item in theirs.items]

    before = files_with_times(run / "stages")
    assert _entry(finefit("eval", "model", *ASKED)) == entry
    assert _entry(finefit("eval", "runs/eval-model-1", "--json")) == entry
    assert files_with_times(run / "stages") == before
    assert not (finished / "runs" / "eval-model-2").exists()
    assert finefit("run", "runs/eval-model-1").err.startswith(
        "error: eval-model-1 holds an evaluation and nothing to train"
    )
    assert "eval-model-1 is finished" in finefit("watch", "runs/eval-model-1").out


def test_an_adapter_answers_as_the_checkpoint_that_it_is_also_where_its_base_is_named(
    finished: Path, finefit: Finefit
) -> None:
    wanted = [item.answer for item in _result(finished / RUN, "checkpoint-12").items]
    _entry(finefit("eval", f"{RUN}/{STAGE}/checkpoints/checkpoint-12", *ASKED))
    assert [item.answer for item in _result(finished / "runs" / "eval-tiny-1-checkpoint-12-1", "model").items] == wanted

    shutil.copytree(finished / RUN / STAGE / "checkpoints" / "checkpoint-12", finished / "adapter")
    (finished / "adapter" / "finefit_manifest.json").unlink()
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    (finished / "adapter" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "/nowhere/model"})
    )
    refused = finefit("eval", "adapter", *ASKED)
    assert refused.code == 2
    assert "was made for /nowhere/model, which is not there" in refused.err
    _entry(finefit("eval", "adapter", "--base", "model", *ASKED))
    assert [item.answer for item in _result(finished / "runs" / "eval-adapter-1", "model").items] == wanted


def test_answers_made_elsewhere_are_scored_beside_the_run_and_without_one(finished: Path, finefit: Finefit) -> None:
    rows = [json.loads(line)["messages"] for line in (finished / "test.jsonl").read_text().splitlines()]
    given = [{"prompt": question["content"], "answer": answer["content"]} for question, answer in reversed(rows)]
    write_jsonl(finished / "theirs.jsonl", given)
    entry = _entry(finefit("eval", RUN, "--answers", "theirs.jsonl", "--json"))
    assert entry["checkpoint"].startswith("theirs-")
    assert (entry["n"], entry["coverage"], entry["metrics"]["all_fields"]["value"]) == (5, 1.0, 1.0)
    assert [item.key for item in _result(finished / RUN, entry["checkpoint"]).items] == [
        item.key for item in _result(finished / RUN, "base").items
    ]
    alone = _entry(finefit("eval", "--answers", "theirs.jsonl", *ASKED))
    assert alone["metrics"] == entry["metrics"]

    write_jsonl(finished / "theirs.jsonl", given[1:])
    refused = finefit("eval", RUN, "--answers", "theirs.jsonl")
    assert refused.code == 2
    assert "test.jsonl:5 has no answer" in refused.err


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["model"], "a model knows neither rows nor tasks: give --data FILE and --task NAME"),
        (["model", "--data", "test.jsonl"], "give --task NAME"),
        (["nowhere", *ASKED[:-1]], "nowhere is not there"),
        (["embedded:gpt-5", *ASKED[:-1]], "there is embedded:smollm2-135m"),
        (["model", "--base", "model", *ASKED[:-1]], "--base is for adapters"),
        ([RUN, "--base", "model"], "a run knows its model"),
        ([], "there is nothing to score"),
        ([RUN, "--task", "rogue"], "there is no task rogue"),
        ([RUN, "--checkpoint", "7"], "tiny-1 has no checkpoint 7"),
        ([RUN, "--by", "blue"], "--by blue: no task here has this metric"),
        ([RUN, "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["model", "--data", "test.jsonl", "--task", "amr"], "test.jsonl:1 cannot be a reference of amr"),
    ],
)
def test_what_cannot_be_scored_is_the_users_to_mend(finefit: Finefit, asked: list[str], words: str) -> None:
    answer = finefit("eval", *asked)
    assert answer.code == 2
    assert words in answer.err


@pytest.mark.usefixtures("finished")
def test_answers_are_shown_on_request(finefit: Finefit) -> None:
    shown = finefit("eval", RUN, "--show", "2").out
    assert shown.count("reference: ") == 2
    assert "checkpoint-12" in shown
