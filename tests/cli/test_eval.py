"""`finefit eval`: checkpoints of a run scored on all held-out items; nothing is answered twice."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from finefit.artifacts.records import read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import EvalFailure, EvalResult
from finefit.data.rows import Row
from finefit.evaluate import worker
from finefit.evaluate.generate import AnswerModel, ItemReply, generate
from finefit.tasks import Task
from tests.cli.conftest import STAGE, Answer, Finefit, files_with_times
from tests.conftest import write_jsonl

RUN = "runs/tiny-1"


def _evals(folder: Path) -> Path:
    return folder / RUN / STAGE / "evals" / "json_match"


def _scored(answer: Answer) -> list[tuple[str, int]]:
    assert answer.code == 0, answer.err
    return [(e["checkpoint"], e["n"]) for e in answer.document]


@pytest.mark.usefixtures("finished")
def test_the_document_has_task_checkpoint_n_coverage_and_metrics_with_intervals(finefit: Finefit) -> None:
    (entry,) = finefit("eval", RUN, "--json").document
    assert entry.keys() == {
        "task",
        "checkpoint",
        "n",
        "available",
        "coverage",
        "metrics",
        "by_dataset",
        "best",
        "validation_loss",
        "warnings",
    }
    assert (entry["task"], entry["checkpoint"], entry["n"]) == ("json_match", "checkpoint-12", 5)
    assert entry["metrics"].keys() == {"all_fields", "fields"}
    for score in entry["metrics"].values():
        assert score.keys() == {"value", "low", "high"}
        assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1


@pytest.mark.parametrize(
    ("asked", "scored"),
    [("base", "base"), ("final", "checkpoint-12"), ("12", "checkpoint-12"), ("checkpoint-12", "checkpoint-12")],
)
def test_what_is_scored_already_is_not_scored_again(finished: Path, finefit: Finefit, asked: str, scored: str) -> None:
    before = files_with_times(_evals(finished))
    assert _scored(finefit("eval", RUN, "--checkpoint", asked, "--json")) == [(scored, 5)]
    assert files_with_times(_evals(finished)) == before


def test_all_is_the_base_and_every_checkpoint_that_is_kept(finished: Path, finefit: Finefit) -> None:
    answer = finefit("eval", RUN, "--checkpoint", "all", "--json")
    assert _scored(answer) == [("base", 5), ("checkpoint-9", 5), ("checkpoint-12", 5)]
    assert "evaluating checkpoint-9 on json_match" in answer.err
    assert "step 12/12" not in answer.err
    best = (finished / RUN / STAGE / "checkpoints" / "best").resolve().name
    assert _scored(finefit("eval", RUN, "--checkpoint", "best", "--json")) == [(best, 5)]
    shown = finefit("eval", RUN, "--checkpoint", "all").out
    assert [name for name in ("base", "checkpoint-9", "checkpoint-12") if name in shown] == [
        "base",
        "checkpoint-9",
        "checkpoint-12",
    ]


def test_a_sample_takes_the_answers_that_are_there_and_leaves_them_there(finished: Path, finefit: Finefit) -> None:
    items = StageDir(finished / RUN / STAGE).evaluation("json_match", "base").items
    before = items.read_bytes()
    assert _scored(finefit("eval", RUN, "--checkpoint", "base", "--limit", "2", "--json")) == [("base", 2)]
    assert items.read_bytes() == before


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each item that a model is asked for; evaluations run in this process."""
    path = tmp_path / "generated"

    def counting(speaker: AnswerModel, task: Task, rows: Mapping[int, Row]) -> Iterator[ItemReply]:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{task.name} {at}\n" for at in rows)
        yield from generate(speaker, task, rows)

    def evaluate_here(_module: str, request: Path, **_: object) -> int:
        job = worker.read_job(request.resolve())
        write_record(job.paths.result, worker.evaluate(job))
        return 0

    path.touch()
    monkeypatch.setattr("finefit.evaluate.worker.generate", counting)
    monkeypatch.setattr("finefit.run.evaluation.launch", evaluate_here)
    return path


def test_another_task_scores_the_answers_that_were_generated_for_the_first(
    finished: Path, finefit: Finefit, generated: Path
) -> None:
    where = StageDir(finished / RUN / STAGE)
    first = read_record(where.evaluation("json_match", "base").result, EvalResult)
    for task in ("chrf", "exact_match"):
        assert _scored(finefit("eval", RUN, "--checkpoint", "base", "--task", task, "--max-new-tokens", "8", "--json"))
        found = read_record(where.evaluation(task, "base").result, EvalResult)
        assert [(item.answer, item.prompt, item.new_tokens, item.is_cut) for item in found.items] == [
            (item.answer, item.prompt, item.new_tokens, item.is_cut) for item in first.items
        ]
        assert {item.taken_from for item in found.items} == {"json_match"}
        assert found.peak_bytes is None  # no model was loaded
    assert generated.read_text() == ""


def test_only_items_that_nobody_has_answered_alike_are_generated(
    finished: Path, finefit: Finefit, generated: Path
) -> None:
    where = StageDir(finished / RUN / STAGE)
    items = where.evaluation("json_match", "base").items
    items.write_text("".join(items.read_text().splitlines(keepends=True)[:2]))
    answered = {item["item"] for item in map(json.loads, items.read_text().splitlines())}
    finefit("eval", RUN, "--checkpoint", "base", "--task", "chrf", "--max-new-tokens", "8")
    assert generated.read_text().split("\n")[:-1] == [f"chrf {at}" for at in range(5) if at not in answered]
    taken = {
        item.item for item in read_record(where.evaluation("chrf", "base").result, EvalResult).items if item.taken_from
    }
    assert taken == answered
    generated.write_text("")
    finefit("eval", RUN, "--checkpoint", "base", "--task", "exact_match", "--max-new-tokens", "7")
    assert len(generated.read_text().splitlines()) == 5  # other decoding, other answers


def test_a_metric_of_short_answers_warns_of_long_references(finished: Path, finefit: Finefit) -> None:
    long = [{"prompt": f"{at} + 1?", "completion": f"{'We count. ' * 15}#### {at + 1}"} for at in range(3)]
    write_jsonl(finished / "long.jsonl", long)
    answer = finefit("eval", RUN, "--data", "long.jsonl", "--task", "exact_match", "--max-new-tokens", "4")
    warning = next(line for line in answer.out.splitlines() if line.startswith("warning: exact_match"))
    assert "3 of 3 references have more than 120 characters" in warning
    assert "rouge or chrf" in warning
    other = finefit("eval", RUN, "--data", "long.jsonl", "--task", "rouge", "--max-new-tokens", "4")
    assert "warning: rouge" not in other.out


def test_a_killed_evaluation_goes_on_at_its_next_item(finished: Path, finefit: Finefit) -> None:
    where = StageDir(finished / RUN / STAGE)
    items = where.evaluation("json_match", "base").items
    whole = items.read_text().splitlines(keepends=True)
    items.write_text("".join(whole[:2]).replace('"answer": "', '"answer": "MARK') + whole[2][:40])
    where.evaluation("json_match", "base").result.unlink()

    assert _scored(finefit("eval", RUN, "--checkpoint", "base", "--json")) == [("base", 5)]
    kept = json.loads(where.evaluation("json_match", "base").result.read_text())["items"]
    assert [item["item"] for item in kept] == [0, 1, 2, 3, 4]
    marked = {json.loads(line)["item"] for line in whole[:2]}
    assert {item["item"] for item in kept if item["answer"].startswith("MARK")} == marked
    assert len(items.read_text().splitlines()) == 6  # two, the torn one closed, three


@pytest.mark.slow
def test_answers_end_with_the_launcher_that_asked_for_them(finished: Path) -> None:
    """The end of standard input stands for a launcher that was killed."""
    paths = StageDir(finished / RUN / STAGE).evaluation("json_match", "base")
    paths.result.unlink()
    paths.items.unlink()
    worker = subprocess.Popen(
        [sys.executable, "-m", "finefit.evaluate.worker", paths.request], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker.communicate()  # closes its standard input at once
    assert worker.returncode == 3
    assert not paths.result.exists()
    assert read_record(paths.failure, EvalFailure).failure.kind == "Interrupted"


def test_another_checkpoint_of_the_same_name_is_scored_anew(finished: Path, finefit: Finefit) -> None:
    paths = StageDir(finished / RUN / STAGE).evaluation("json_match", "checkpoint-12")
    old = json.loads(paths.request.read_text())
    paths.request.write_text(json.dumps(old | {"subject": old["subject"] | {"manifest_sha256": "0" * 64}}))
    before = paths.result.stat().st_mtime_ns
    assert _scored(finefit("eval", RUN, "--checkpoint", "final", "--json")) == [("checkpoint-12", 5)]
    assert paths.result.stat().st_mtime_ns > before


def test_test_rows_that_have_changed_are_refused(finished: Path, finefit: Finefit) -> None:
    where = StageDir(finished / RUN / STAGE)
    where.evaluation("json_match", "base").set_aside()
    with where.prepared("test.jsonl").open("a") as file:
        file.write("\n")
    answer = finefit("eval", RUN, "--checkpoint", "base")
    assert answer.code == 2
    assert "test.jsonl are missing or have changed" in answer.err


def test_a_run_without_test_rows_cannot_be_scored(finished: Path, finefit: Finefit) -> None:
    stage = StageDir(finished / RUN / STAGE).stage
    record = json.loads(stage.read_text())
    del record["prepared"]["test.jsonl"]
    stage.write_text(json.dumps(record))
    answer = finefit("eval", RUN)
    assert answer.code == 2
    assert "tiny-1 has no test rows to answer" in answer.err


def test_a_damaged_checkpoint_is_the_users_to_mend_and_named(finished: Path, finefit: Finefit) -> None:
    adapter = finished / RUN / STAGE / "checkpoints" / "checkpoint-9" / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1] + b"x")
    answer = finefit("eval", RUN, "--checkpoint", "9")
    assert answer.code == 2
    assert "checkpoint-9 does not verify: adapter_model.safetensors has changed since it was written" in answer.err
