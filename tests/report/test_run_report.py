"""What a run is going to do and what came of it, in words and as a document."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import EvalResult, Score, StageResult
from finefit.cli.console import open_console
from finefit.report.layout import clock
from finefit.report.plan import plan_view
from finefit.report.run import eval_memory_lines, evals_of, result_lines, run_document, show_change, show_end
from tests.evals import make_item, make_request, make_result
from tests.report.conftest import note

RESULT = StageResult(
    step=12,
    total_steps=12,
    checkpoint="checkpoint-12",
    trainable_parameters=2048,
    parameters=10912,
    tokens=2906,
    seconds=3725.0,
    peak_bytes=2**30,
    predicted_bytes=3 * 2**29,
)


def _evaluated(run: RunDir, checkpoint: str, value: float, *, task: str = "json_match", items: int = 5) -> EvalResult:
    entries = tuple(replace(make_item(at, all_fields=value), answer=f"{checkpoint} [{at}]") for at in range(items))
    score = {"all_fields": Score(value=value, low=0.0, high=1.0)}
    result = make_result(checkpoint, entries, task=task, coverage=0.8, metrics=score)
    paths = stage_of(run).evaluation(task, checkpoint)
    paths.folder.mkdir(parents=True, exist_ok=True)
    write_record(paths.request, make_request(checkpoint, task=task))
    write_record(paths.result, result)
    return result


def _shown(renderable: RenderableType, width: int = 200) -> str:
    shown = io.StringIO()
    Console(file=shown, width=width).print(renderable)
    return shown.getvalue()


def test_a_run_shows_what_differs_from_the_defaults_and_names_the_record_of_the_rest() -> None:
    values = {
        "seed": Resolved(value=7, source="spec"),
        "data.train": Resolved(value=[{"path": "a.jsonl", "fields": {}, "weight": 1.0, "limit": 9}], source="spec"),
        "levers.micro_batch": Resolved(value=2, source="--set"),
        "levers.recompute": Resolved(value=0, source="searched: no layer needs it"),
        "levers.packing": Resolved(value=True, source="no padding"),
        "engine.kind": Resolved(value="single", source="one device"),
        "threads": Resolved(value=2, source="torch's own choice"),
        "optimizer.clip": Resolved(value=1.0, source="default"),
        "schedule.steps": Resolved(value=None, source="default"),
    }
    shown = _shown(plan_view(Plan(stages={"sft": values}), Path("runs/a-1/plan.json")))
    assert shown.splitlines()[1].split() == ["levers.micro_batch", "2", "--set"]
    assert shown.splitlines()[2].split() == ["levers.packing", "true", "no", "padding"]
    assert shown.splitlines()[3:] == [
        'from the spec: seed 7, data.train [{"path": "a.jsonl", "limit": 9}]',
        "Other settings have their defaults; runs/a-1/plan.json lists every value with its source.",
    ]


def test_brackets_and_colons_are_shown_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    open_console().print("rows[bold]:key:.jsonl")
    assert capsys.readouterr().out == "rows[bold]:key:.jsonl\n"


def test_with_json_everything_else_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    open_console(as_json=True).print("a line")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a line\n")


def test_a_result_in_words() -> None:
    assert result_lines(RESULT) == [
        "trained 2,048 of 10,912 parameters (18.77%)",
        "12 steps, 2,906 tokens; 1:02:05 since its last start; peak memory 1.00 GiB, planned for 1.50 GiB",
    ]


def test_a_result_of_an_earlier_version_has_no_prediction() -> None:
    assert result_lines(replace(RESULT, predicted_bytes=None))[1].endswith("; peak memory 1.00 GiB")


def test_the_end_of_a_run_shows_the_memory_of_the_evaluation_that_took_most(run: RunDir) -> None:
    for checkpoint, peak in (("base", 2**29), ("checkpoint-12", 2**30)):
        result = replace(_evaluated(run, checkpoint, 0.5), peak_bytes=peak, predicted_bytes=3 * 2**29)
        write_record(stage_of(run).evaluation("json_match", checkpoint).result, result)
    expected = "evaluation: peak memory 1.00 GiB, planned for 1.50 GiB"
    assert eval_memory_lines(evals_of(stage_of(run))) == [expected]


def test_evaluations_are_ordered_by_task_base_first_then_by_step(run: RunDir) -> None:
    for checkpoint in ("checkpoint-12", "checkpoint-9", "base"):
        _evaluated(run, checkpoint, 0.5)
    _evaluated(run, "checkpoint-3", 0.5, task="exact_match")
    found = evals_of(stage_of(run))
    assert [(r.task, r.checkpoint) for r in found] == [
        ("exact_match", "checkpoint-3"),
        ("json_match", "base"),
        ("json_match", "checkpoint-9"),
        ("json_match", "checkpoint-12"),
    ]


def test_the_document_of_a_run_that_has_not_begun_has_no_result(run: RunDir) -> None:
    document = run_document(run)
    assert (document["status"], document["result"], document["evaluations"]) == ("prepared", None, [])
    assert document["plan"]["sft"]["total_steps"] == {"value": 12, "source": "2 epochs x 6 steps"}
    assert {entry["split"]: entry["read"] for entry in document["ledger"]} == {"train": 22, "validation": 4, "test": 5}


def test_the_document_of_a_finished_run_has_result_and_scores(run: RunDir) -> None:
    write_record(stage_of(run).result, RESULT)
    write_record(run.run, replace(read_record(run.run, Run), status="finished"))
    _evaluated(run, "base", 0.4)
    document = run_document(run)
    assert (document["status"], document["result"]["tokens"]) == ("finished", 2906)
    (scored,) = document["evaluations"]
    assert (scored["task"], scored["checkpoint"], scored["n"], scored["coverage"]) == ("json_match", "base", 5, 0.8)
    assert scored["metrics"] == {"all_fields": {"value": 0.4, "low": 0.0, "high": 1.0}}


def test_what_another_version_has_recorded_is_not_shown(run: RunDir) -> None:
    _evaluated(run, "base", 0.4)
    _evaluated(run, "checkpoint-9", 0.4)
    old = stage_of(run).evaluation("json_match", "base").result
    old.write_text(old.read_text().replace('"version": 3', '"version": 1'))
    assert [result.checkpoint for result in evals_of(stage_of(run))] == ["checkpoint-9"]


def test_the_last_validation_stands_in_the_document_and_at_the_end(run: RunDir) -> None:
    assert run_document(run)["validation"] is None
    write_record(stage_of(run).result, RESULT)
    note(run, event="validated", step=6, validation_loss=0.75, accuracy=0.5, margin=0.1)
    note(run, event="validated", step=12, validation_loss=0.5, accuracy=0.75, margin=0.2)
    assert run_document(run)["validation"] == {"step": 12, "validation_loss": 0.5, "accuracy": 0.75, "margin": 0.2}
    shown = io.StringIO()
    show_end(run, Console(file=shown, width=200))
    assert "validation loss 0.5000, accuracy 75.0%, margin 0.2000 at step 12" in shown.getvalue()


def test_the_end_of_a_run_names_the_folder_of_the_model(run: RunDir) -> None:
    write_record(stage_of(run).result, RESULT)
    shown = io.StringIO()
    show_end(run, Console(file=shown, width=40))
    places = f"run      {run.path}\nmodel    {stage_of(run).checkpoints / 'final'}\n"
    assert shown.getvalue().partition(places)[2].strip().startswith("an adapter of model: load it with peft")


def test_a_demo_compares_base_and_final_on_three_messages_whatever_else_was_scored(run: RunDir) -> None:
    write_record(stage_of(run).result, RESULT)
    for checkpoint, value in (("base", 0.0), ("checkpoint-9", 0.5), ("checkpoint-12", 1.0)):
        _evaluated(run, checkpoint, value)
    _evaluated(run, "base", 0.5, task="exact_match")
    shown = io.StringIO()
    show_change(run, Console(file=shown, width=200, markup=False, highlight=False))
    text = shown.getvalue()
    assert "checkpoint-9" not in text
    assert text.count("reference: [7]") == 3
    assert [line for line in text.splitlines() if line.strip().startswith("add ")] == [
        line for line in text.splitlines() if " and " in line
    ][:3]
    for at in range(3):
        (line,) = [line for line in text.splitlines() if f"base [{at}]" in line]
        assert f"checkpoint-12 [{at}]" in line
    chat, export = f"next     finefit chat {run.path}", f"         finefit export {run.path} --to merged,gguf:q8_0"
    assert f"{chat}\n{export}\n" in text


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_time_as_people_read_it(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
