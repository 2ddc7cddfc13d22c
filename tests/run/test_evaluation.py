"""What an evaluation asks, what is asked anew, where scores are filed, and who is told of them; the processes are
played."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.checkpoint import MANIFEST
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import DatasetScores, EvalRequest, Score, Stage
from finefit.errors import Interrupted, RunError, SpecError
from finefit.run import evaluation
from finefit.run.eval_args import EvalArgs, evaluations_of, open_evaluation
from finefit.run.eval_rows import EvalRows
from finefit.run.evaluation import (
    BatchLimits,
    evaluate,
    evaluate_after_training,
    evaluate_all,
    label_apart,
    note_scores,
    request_of,
    track_scores,
)
from finefit.spec.schema import Evaluation, Tracker
from finefit.spec.tasks import Judge
from tests.conftest import make_rows, write_jsonl
from tests.evals import make_item, make_result

Launched = list[EvalRequest]
FAKE = """
import json, os
def init(**_): pass
def finish(): pass
def log(metrics, step):
    with open(os.environ["FAKE_SEEN"], "a") as seen:
        seen.write(json.dumps([step, metrics]) + "\\n")
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Every request, answered at once."""
    found: Launched = []

    def launch(_: str, argument: Path, *, log: Path, **__: Any) -> int:
        log.touch()
        request = read_record(argument, EvalRequest)
        found.append(request)
        paths = StageDir(argument.parents[2]).evaluation(
            request.evaluation.label, request.checkpoint, request.evaluation.limit
        )
        write_record(
            paths.result,
            make_result(request.checkpoint, (make_item(0, all_fields=1.0),), task=request.evaluation.label),
        )
        return 0

    monkeypatch.setattr(evaluation, "launch", launch)
    return found


@pytest.fixture
def trained(run: RunDir) -> RunDir:
    folder = stage_of(run).checkpoints
    for step in (9, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / MANIFEST).write_text(json.dumps({"step": step}))
    (folder / "final").symlink_to("checkpoint-12")
    return run


def _ask(run: RunDir, checkpoint: str = "base", **settings: Any) -> EvalRequest:
    (declared,) = evaluations_of(run)
    return request_of(run, checkpoint, declared.model_copy(update=settings))


def _score(run: RunDir, request: EvalRequest) -> None:
    evaluate(run, request, lock=0, tick=lambda: None)


def _stage(run: RunDir, **changes: Any) -> None:
    where = stage_of(run)
    write_record(where.stage, replace(read_record(where.stage, Stage), **changes))


def test_a_run_plans_the_batch_limits_of_its_evaluations_and_uses_them_at_its_end(
    trained: RunDir, launched: Launched
) -> None:
    stage = read_record(stage_of(trained).stage, Stage)
    assert stage.eval_limits["json_match"].rows == 16
    evaluate_after_training(trained, lock=0, tick=lambda: None, say=lambda _: None)
    assert [(request.checkpoint, request.batch_limit) for request in launched] == [
        ("base", stage.eval_limits["json_match"]),
        ("checkpoint-12", stage.eval_limits["json_match"]),
    ]


def test_every_checkpoint_is_scored_where_the_spec_asks_for_all(trained: RunDir, launched: Launched) -> None:
    every = Evaluation.model_validate({"task": "json_match", "checkpoints": "all", "base": False, "max_new_tokens": 8})
    _stage(trained, evaluate=(every,))
    evaluate_after_training(trained, lock=0, tick=lambda: None, say=lambda _: None)
    assert [request.checkpoint for request in launched] == ["checkpoint-9", "checkpoint-12"]


def test_another_length_of_answers_needs_another_batch_limit(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def limits_here(
        _: object, __: object, evaluations: tuple[Evaluation, ...], prompt_tokens: int, _grids: object
    ) -> dict[str, EvalBatchLimit]:
        asked.append(prompt_tokens)
        return {evaluations[0].label: EvalBatchLimit(rows=3, tokens=9)}

    monkeypatch.setattr(evaluation, "eval_limits_here", limits_here)
    eval_limits = BatchLimits(run=run, rows=EvalRows(sha256="", prompt_tokens=77))
    assert eval_limits.find(_ask(run)).rows == 16
    assert (
        eval_limits.find(_ask(run, max_new_tokens=9)).rows,
        eval_limits.find(_ask(run, max_new_tokens=9, limit=2)).rows,
        asked,
    ) == (3, 3, [77])


@pytest.mark.parametrize("broken", ["request", "result"])
def test_a_record_of_another_version_is_scored_anew(run: RunDir, launched: Launched, broken: str) -> None:
    _score(run, _ask(run))
    paths = stage_of(run).evaluation("json_match", "base")
    path = getattr(paths, broken)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
    _score(run, _ask(run))
    assert len(launched) == 2


def test_what_other_packages_answered_is_asked_anew(
    run: RunDir, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    _score(run, _ask(run))
    assert launched[0].made_with.keys() == {"finefit", "torch", "transformers", "peft"}
    monkeypatch.setattr(evaluation, "made_with", lambda: launched[0].made_with | {"transformers": "9.9"})
    _score(run, _ask(run))
    _score(run, _ask(run))
    assert [request.made_with["transformers"] == "9.9" for request in launched] == [False, True]


def test_a_short_trial_leaves_the_full_record_alone(
    trained: RunDir, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluation, "eval_limits_here", lambda _, __, asked, *___: {asked[0].label: EvalBatchLimit(rows=2, tokens=99)}
    )
    evaluate_all(open_evaluation(EvalArgs(target=str(trained.path))), tick=lambda: None, say=lambda _: None)
    paths = stage_of(trained).evaluation("json_match", "checkpoint-12")
    paths.items.write_text("{}\n")
    before = (paths.result.read_bytes(), paths.request.read_bytes())
    trial = EvalArgs(target=str(trained.path), limit=1, max_new_tokens=5)
    for _ in range(2):
        evaluate_all(open_evaluation(trial), tick=lambda: None, say=lambda _: None)
    assert (paths.result.read_bytes(), paths.request.read_bytes(), paths.items.read_text()) == (*before, "{}\n")
    first, second = launched  # the trial once
    assert (first.evaluation.label, second.evaluation.limit, second.evaluation.max_new_tokens) == ("json_match", 1, 5)
    assert re.fullmatch(r"json_match-with-[0-9a-f]{8}", second.evaluation.label)


def test_settings_of_a_task_that_no_spec_names_are_apart_from_those_that_are_scored(
    run: RunDir, launched: Launched
) -> None:
    def label(task: str) -> str:
        (request,) = open_evaluation(EvalArgs(target=str(run.path), checkpoint="base", tasks=(task,))).requests
        return request.evaluation.label

    _score(run, open_evaluation(EvalArgs(target=str(run.path), checkpoint="base", tasks=("rouge",))).requests[0])
    other = label("{kind: rouge, stemmer: false}")
    assert (label("rouge"), label("{task: rouge, limit: 3, batch: 2}"), other.startswith("rouge-with-")) == (
        "rouge",
        "rouge",
        True,
    )
    again = label(f"{{task: {{kind: rouge, stemmer: false}}, name: {other}, max_new_tokens: 3}}")
    _score(
        run,
        open_evaluation(
            EvalArgs(target=str(run.path), checkpoint="base", tasks=("{kind: rouge, stemmer: false}",))
        ).requests[0],
    )
    assert (again, len(launched)) == (other, 2)
    third = label(f"{{task: {{kind: rouge, stemmer: false}}, name: {other}, max_new_tokens: 3}}")
    assert (third.count("-with-"), third != other) == (1, True)


def test_what_was_asked_otherwise_is_kept_until_all_items_are_scored_anew(
    run: RunDir, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    _score(run, _ask(run))
    paths, play = stage_of(run).evaluation("json_match", "base"), vars(evaluation)["launch"]
    paths.items.write_text("{}\n")
    old = paths.result.read_bytes()

    def kept() -> list[str]:
        return sorted(path.name for path in paths.earlier.rglob("*.json*"))

    monkeypatch.setattr(evaluation, "launch", lambda *_, **__: 3)
    with pytest.raises(Interrupted):
        _score(run, _ask(run, max_new_tokens=9))
    assert kept() == ["base.items.jsonl", "base.json", "base.request.json"]
    assert next(paths.earlier.rglob("base.json")).read_bytes() == old
    assert (paths.items.exists(), paths.result.exists()) == (False, False)
    monkeypatch.setattr(evaluation, "launch", play)
    _score(run, _ask(run, max_new_tokens=9, limit=1))
    assert "base.json" in kept()
    _score(run, _ask(run, max_new_tokens=9))
    assert (kept(), paths.earlier.exists(), len(launched)) == ([], False, 3)


def test_another_judge_is_asked_about_the_answers_that_are_there(run: RunDir, launched: Launched) -> None:
    _score(run, _ask(run))
    paths = stage_of(run).evaluation("json_match", "base")
    paths.items.write_text("{}\n")
    judge = Judge(url="http://localhost:1/v1", model="judge")
    for _ in range(2):
        _score(run, _ask(run, judge=judge))
    assert (len(launched), launched[1].evaluation.judge, paths.items.read_text()) == (2, judge, "{}\n")


def test_a_task_file_is_copied_beside_the_request_and_another_content_is_asked_anew(
    run: RunDir, launched: Launched
) -> None:
    own = Evaluation.model_validate({"task": {"kind": "python", "path": str(run.path / "mine.py")}})
    for content, times in (("A = 1\n", 1), ("A = 1\n", 1), ("A = 2\n", 2)):
        (run.path / "mine.py").write_text(content)
        _score(run, request_of(run, "base", own))
        assert len(launched) == times
    copied = stage_of(run).evaluation("mine", "base").folder / "task.py"
    assert (copied.read_text(), launched[1].evaluation.label) == ("A = 2\n", "mine")
    assert launched[0].task_sha256 != launched[1].task_sha256


def test_other_rows_are_filed_apart_and_asked_with_the_template_of_the_run(
    trained: RunDir, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "other rows.jsonl", make_rows(3, seed=9))
    work = open_evaluation(EvalArgs(target=str(trained.path), data="other rows.jsonl", checkpoint="all"))
    monkeypatch.setattr(
        evaluation, "eval_limits_here", lambda _, __, asked, *___: {asked[0].label: EvalBatchLimit(rows=2, tokens=99)}
    )
    evaluate_all(work, tick=lambda: None, say=lambda _: None)
    assert [request.checkpoint for request in launched] == ["base", "checkpoint-9", "checkpoint-12"]
    (label,) = {request.evaluation.label for request in launched}
    assert label.startswith("json_match-on-other-rows-")
    subject, stage = launched[0].subject, read_record(stage_of(trained).stage, Stage)
    assert (subject.template_sha256, subject.items_sha256 != stage.prepared["test.jsonl"]) == (
        stage.template_sha256,
        True,
    )
    assert len(stage_of(trained).prepared(subject.items).read_text().splitlines()) == 3
    assert not stage_of(trained).evaluation("json_match", "base").result.exists()


def test_another_device_leaves_the_scores_of_the_runs_own_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "precision_on", lambda _: "bf16")
    (request,) = open_evaluation(EvalArgs(target=str(run.path), device="cuda", checkpoint="base")).requests
    assert (request.evaluation.label, request.subject.device, request.subject.precision) == (
        "json_match-on-cuda",
        "cuda",
        "bf16",
    )
    (same,) = open_evaluation(EvalArgs(target=str(run.path), device="cpu", checkpoint="base")).requests
    assert same.evaluation.label == "json_match"


def test_a_card_that_is_not_there_is_refused(run: RunDir) -> None:
    with pytest.raises(SpecError, match="--device cuda is asked for, but torch"):
        open_evaluation(EvalArgs(target=str(run.path), device="cuda", checkpoint="base"))


def test_a_label_keeps_what_sets_it_apart_however_long_it_is(run: RunDir) -> None:
    request = replace(_ask(run), evaluation=Evaluation.model_validate({"task": "rouge", "name": "n" * 64}))
    rows = EvalRows(sha256="", suffix="rows-0123abcd", prompt_tokens=1)
    (found,) = label_apart(run, [request], rows)
    label = found.evaluation.label
    assert (len(label), label.endswith("-on-rows-0123abcd")) == (64, True)
    assert Evaluation.model_validate({"task": "rouge", "name": label}).label == label


def test_a_run_without_test_rows_says_how_to_name_some(run: RunDir) -> None:
    stage = read_record(stage_of(run).stage, Stage)
    _stage(run, prepared={name: digest for name, digest in stage.prepared.items() if name != "test.jsonl"})
    with pytest.raises(RunError, match="has no test rows to answer for json_match") as caught:
        evaluations_of(run)
    assert "--data FILE" in caught.value.remedy


def test_tasks_that_bring_their_own_items_are_refused_with_other_rows(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "other.jsonl", make_rows(3, seed=9))
    harness = "{kind: lm_eval, tasks: [arc_easy]}"
    with pytest.raises(RunError, match="lm_eval brings its own items") as caught:
        open_evaluation(
            EvalArgs(target=str(run.path), data="other.jsonl", checkpoint="base", tasks=("json_match", harness))
        )
    assert caught.value.remedy.startswith("leave --data out")
    both = (
        Evaluation.model_validate({"task": "json_match"}),
        Evaluation.model_validate({"task": {"kind": "lm_eval", "tasks": ["arc_easy"]}}),
    )
    _stage(run, evaluate=both)
    (request,) = open_evaluation(EvalArgs(target=str(run.path), data="other.jsonl", checkpoint="base")).requests
    assert request.evaluation.label.startswith("json_match-on-other-")
    _stage(run, evaluate=both[1:])
    with pytest.raises(RunError, match="lm_eval brings its own items"):
        open_evaluation(EvalArgs(target=str(run.path), data="other.jsonl", checkpoint="base"))


def _answers_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> EvalArgs:
    monkeypatch.chdir(folder)
    rows = make_rows(3, seed=9)
    write_jsonl(folder / "rows.jsonl", rows)
    write_jsonl(folder / "checkpoint-500.jsonl", [{"id": at, "answer": "{}"} for at in range(1, 4)])
    return EvalArgs(
        target=None,
        data="rows.jsonl",
        tasks=("json_match",),
        answers=folder / "checkpoint-500.jsonl",
        runs=folder / "runs",
    )


def test_answers_made_elsewhere_may_be_called_as_a_checkpoint_is(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = open_evaluation(_answers_alone(tmp_path, monkeypatch))
    evaluate_all(work, tick=lambda: None, say=lambda _: None)
    assert launched[0].checkpoint.startswith("checkpoint-500-")
    assert json.loads(stage_of(work.run).evals.read_text())["step"] == 0
    assert read_record(work.run.run, Run).status == "finished"


def test_a_run_of_answers_shows_its_scores_and_asks_nobody_for_others(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_evaluation(wish := _answers_alone(tmp_path, monkeypatch)).run
    evaluate_all(open_evaluation(wish), tick=lambda: None, say=lambda _: None)
    evaluate_all(open_evaluation(EvalArgs(target=str(run.path))), tick=lambda: None, say=lambda _: None)
    with pytest.raises(RunError, match=r"checkpoint-500-.* holds answers made elsewhere") as caught:
        evaluate_all(
            open_evaluation(EvalArgs(target=str(run.path), tasks=("rouge",))), tick=lambda: None, say=lambda _: None
        )
    assert (caught.value.remedy, len(launched)) == ("give --answers FILE again", 1)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(ValueError("odd"), "failed", "FinefitError"), (KeyboardInterrupt(), "stopped", "Interrupted")],
)
def test_a_run_that_only_evaluates_is_not_left_running_by_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str, kind: str
) -> None:
    def launch(*_: Any, **__: Any) -> int:
        raise error

    work = open_evaluation(_answers_alone(tmp_path, monkeypatch))
    monkeypatch.setattr(evaluation, "launch", launch)
    with pytest.raises(type(error)):
        evaluate_all(work, tick=lambda: None, say=lambda _: None)
    record = read_record(work.run.run, Run)
    assert record.failure is not None
    assert (record.status, record.failure.kind) == (status, kind)


def test_scores_are_noted_when_a_later_checkpoint_fails_and_told_then(
    trained: RunDir, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []

    class Heard:
        def __init__(self, *_: object, lines: Path, offset: int) -> None:
            told.append([json.loads(line)["checkpoint"] for line in lines.read_bytes()[offset:].splitlines()])

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    play = vars(evaluation)["launch"]
    monkeypatch.setattr(evaluation, "Tracking", Heard)
    monkeypatch.setattr(
        evaluation,
        "launch",
        lambda module, path, **more: 3 if path.name.startswith("checkpoint") else play(module, path, **more),
    )
    _stage(trained, trackers=(Tracker(kind="trackio"),))
    with pytest.raises(Interrupted):
        evaluate_after_training(trained, lock=0, tick=lambda: None, say=lambda _: None)
    assert told == [["base"]]
    stage_of(trained).evals.unlink()  # as a kill between record and line leaves it
    monkeypatch.setattr(evaluation, "launch", play)
    for _ in range(2):
        evaluate_after_training(trained, lock=0, tick=lambda: None, say=lambda _: None)
    assert (told, len(launched)) == ([["base"], ["base", "checkpoint-12"]], 2)


def _told(run: RunDir, say: Callable[[str], None]) -> None:
    items = tuple(make_item(at, all_fields=1.0) for at in range(9))
    with track_scores(stage_of(run), say):
        note_scores(stage_of(run), make_result("checkpoint-12", items))


def test_scores_by_data_set_are_noted_with_their_intervals_under_names_that_trackers_take(run: RunDir) -> None:
    part = DatasetScores(n=3, coverage=1.0, metrics={"all_fields": Score(value=0.25, low=0.125, high=0.5)})
    note_scores(stage_of(run), make_result("checkpoint-12", by_dataset={"scans (2)": part}))
    (line,) = read_lines(stage_of(run).evals)
    assert [line[f"json_match/scans-2-/all_fields{end}"] for end in ("", "_low", "_high")] == [0.25, 0.125, 0.5]


def test_scores_and_a_few_answers_reach_the_trackers_of_the_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen"))
    _stage(run, trackers=(Tracker(kind="trackio"),))
    said: list[str] = []
    _told(run, said.append)
    _told(run, said.append)
    lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert (len(lines), said) == (2, [])  # each once
    step, sent = lines[0]
    assert (step, sent["json_match/all_fields"], sent["json_match/all_fields_low"], sent["json_match/coverage"]) == (
        12,
        0.5,
        0.1,
        1.0,
    )
    samples = [value for name, value in sent.items() if "/sample-" in name]
    assert (len(samples), samples[1]) == (3, "prompt 3\n\nanswer: [3]\n\nreference: [7]")


def test_a_tracker_that_fails_is_told_and_the_scores_are_whole(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text(
        "def init(**_): pass\ndef finish(): pass\ndef log(metrics, step): raise ValueError('no')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _stage(run, trackers=(Tracker(kind="trackio"),))
    said: list[str] = []
    _told(run, said.append)
    (line,) = said
    assert line.startswith("trackio did not get all scores: ValueError: no")
    assert json.loads(stage_of(run).evals.read_text())["json_match/all_fields"] == 0.5


def test_the_real_tensorboard_reads_scores_and_answers(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _stage(run, trackers=(Tracker(kind="tensorboard"),))
    said: list[str] = []
    _told(run, said.append)
    assert said == []
    events = EventAccumulator(str(stage_of(run).path / "tensorboard"))
    events.Reload()
    (score,) = events.Tensors("json_match/all_fields")
    assert (score.step, float(score.tensor_proto.float_val[0])) == (12, 0.5)
    texts = {
        name: events.Tensors(name)[0].tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
        if "sample" in name
    }
    assert len(texts) == 3
    assert any("answer: [3]" in text for text in texts.values())
