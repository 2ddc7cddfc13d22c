"""What an evaluation asks, what is asked anew, where scores are filed, and who is told of them; the processes are
played."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.checkpoint import write_checkpoint
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import DatasetScores, EvalRequest, Score, Stage
from finefit.errors import Interrupted, RunError, SpecError
from finefit.run import evaluation
from finefit.run.eval_args import EvalArgs, named_evaluations
from finefit.run.eval_rows import EvalRows
from finefit.run.evaluation import (
    BatchLimits,
    evaluate,
    evaluate_after_training,
    evaluate_all,
    evaluations_of,
    label_apart,
    note_scores,
    open_evaluation,
    request_of,
    track_scores,
)
from finefit.spec.schema import Evaluation, Tracker
from finefit.spec.served import Judge
from finefit.spec.tasks import CustomTask, LmEval, Rouge
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


def _write_weights(text: str, staging: Path) -> None:
    (staging / "weights").write_text(text)


@pytest.fixture
def trained(run: RunDir) -> RunDir:
    folder = stage_of(run).checkpoints
    for step in (9, 12):
        fill = partial(_write_weights, f"after step {step}")
        write_checkpoint(folder, step, fill, needed_bytes=0)
    (folder / "final").symlink_to("checkpoint-12")
    return run


def _ask(run: RunDir, checkpoint: str = "base", **settings: Any) -> EvalRequest:
    (declared,) = evaluations_of(run)
    return request_of(run, checkpoint, declared.model_copy(update=settings))


def _score(run: RunDir, request: EvalRequest) -> None:
    evaluate(run, request, lock=0, tick=lambda: None)


def _score_all(target: RunDir | None = None, **asked: Any) -> RunDir:
    """As `finefit eval` does."""
    work = open_evaluation(EvalArgs(target=None if target is None else str(target.path), **asked))
    evaluate_all(work, tick=lambda: None, say=lambda _: None)
    return work.run


def _end(run: RunDir) -> None:
    evaluate_after_training(run, lock=0, tick=lambda: None, say=lambda _: None)


def _limits_of_two(_: object, __: object, asked: tuple[Evaluation, ...], *___: object) -> dict[str, EvalBatchLimit]:
    return {asked[0].label: EvalBatchLimit(rows=2, tokens=99)}


def _stage(run: RunDir, **changes: Any) -> None:
    where = stage_of(run)
    write_record(where.stage, replace(read_record(where.stage, Stage), **changes))


def test_a_run_plans_the_batch_limits_of_its_evaluations_and_uses_them_at_its_end(
    trained: RunDir, launched: Launched
) -> None:
    stage = read_record(stage_of(trained).stage, Stage)
    assert stage.eval_limits["json_match"].rows == 16
    _end(trained)
    assert [(request.checkpoint, request.batch_limit) for request in launched] == [
        ("base", stage.eval_limits["json_match"]),
        ("checkpoint-12", stage.eval_limits["json_match"]),
    ]


def test_every_checkpoint_is_scored_where_the_spec_asks_for_all(trained: RunDir, launched: Launched) -> None:
    every = Evaluation.model_validate({"task": "json_match", "checkpoints": "all", "base": False, "max_new_tokens": 8})
    _stage(trained, evaluate=(every,))
    _end(trained)
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
    monkeypatch.setattr(evaluation, "eval_limits_here", _limits_of_two)
    _score_all(trained)
    paths = stage_of(trained).evaluation("json_match", "checkpoint-12")
    paths.items.write_text("{}\n")
    before = (paths.result.read_bytes(), paths.request.read_bytes())
    for _ in range(2):
        _score_all(trained, limit=1, max_new_tokens=5)
    assert (paths.result.read_bytes(), paths.request.read_bytes(), paths.items.read_text()) == (*before, "{}\n")
    first, second = launched  # the trial once
    assert (first.evaluation.label, second.evaluation.limit, second.evaluation.max_new_tokens) == ("json_match", 1, 5)
    assert re.fullmatch(r"json_match-with-[0-9a-f]{8}", second.evaluation.label)


def test_settings_of_a_task_that_no_spec_names_are_apart_from_those_that_are_scored(
    run: RunDir, launched: Launched
) -> None:
    def asked(task: str) -> EvalRequest:
        (request,) = open_evaluation(EvalArgs(target=str(run.path), checkpoint="base", tasks=(task,))).requests
        return request

    _score(run, asked("rouge"))
    other = asked("{kind: rouge, stemmer: false}").evaluation.label
    assert other.startswith("rouge-with-")
    assert {asked(task).evaluation.label for task in ("rouge", "{task: rouge, limit: 3, batch: 2}")} == {"rouge"}
    longer = f"{{task: {{kind: rouge, stemmer: false}}, name: {other}, max_new_tokens: 3}}"
    again = asked(longer).evaluation.label
    _score(run, asked("{kind: rouge, stemmer: false}"))
    assert (again, len(launched)) == (other, 2)
    third = asked(longer).evaluation.label
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
    monkeypatch.setattr(evaluation, "eval_limits_here", _limits_of_two)
    _score_all(trained, data="other rows.jsonl", checkpoint="all")
    assert [request.checkpoint for request in launched] == ["base", "checkpoint-9", "checkpoint-12"]
    (label,) = {request.evaluation.label for request in launched}
    assert label.startswith("json_match-on-other-rows-")
    subject, stage = launched[0].subject, read_record(stage_of(trained).stage, Stage)
    assert subject.template_sha256 == stage.template_sha256
    assert subject.items_sha256 != stage.prepared["test.jsonl"]
    assert len(stage_of(trained).prepared(subject.items).read_text().splitlines()) == 3
    assert not stage_of(trained).evaluation("json_match", "base").result.exists()


def test_another_device_leaves_the_scores_of_the_runs_own_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="--device cuda is requested, but torch"):
        open_evaluation(EvalArgs(target=str(run.path), device="cuda", checkpoint="base"))
    monkeypatch.setattr(evaluation, "precision_on", lambda _: "bf16")
    for device, label in (("cuda", "json_match-on-cuda"), ("cpu", "json_match")):
        (asked,) = open_evaluation(EvalArgs(target=str(run.path), device=device, checkpoint="base")).requests  # type: ignore[arg-type]
        assert (asked.evaluation.label, asked.subject.device) == (label, device)
        assert asked.subject.precision == ("bf16" if device == "cuda" else "fp32")


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


@pytest.fixture
def answers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", make_rows(3, seed=9))
    answers = tmp_path / "checkpoint-500.jsonl"
    write_jsonl(answers, [{"id": at, "answer": "{}"} for at in range(1, 4)])
    return {"data": "rows.jsonl", "tasks": ("json_match",), "answers": answers, "runs": tmp_path / "runs"}


def test_a_run_of_answers_shows_its_scores_and_asks_nobody_for_others(
    answers_alone: dict[str, Any], launched: Launched
) -> None:
    """Their file may be called as a checkpoint is."""
    run = _score_all(**answers_alone)
    assert launched[0].checkpoint.startswith("checkpoint-500-")
    assert json.loads(stage_of(run).evals.read_text())["step"] == 0
    assert read_record(run.run, Run).status == "finished"
    _score_all(run)
    with pytest.raises(RunError, match=r"checkpoint-500-.* holds answers from elsewhere") as caught:
        _score_all(run, tasks=("rouge",))
    assert (caught.value.remedy, len(launched)) == ("give --answers FILE again", 1)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(ValueError("odd"), "failed", "FinefitError"), (KeyboardInterrupt(), "stopped", "Interrupted")],
)
def test_a_run_that_only_evaluates_is_not_left_running_by_any_error(
    answers_alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str, kind: str
) -> None:
    def launch(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(evaluation, "launch", launch)
    with pytest.raises(type(error)):
        _score_all(**answers_alone)
    (run,) = answers_alone["runs"].iterdir()
    record = read_record(RunDir(run).run, Run)
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
        _end(trained)
    assert told == [["base"]]
    stage_of(trained).evals.unlink()  # as a kill between record and line leaves it
    monkeypatch.setattr(evaluation, "launch", play)
    for _ in range(2):
        _end(trained)
    assert (told, len(launched)) == ([["base"], ["base", "checkpoint-12"]], 2)


def _told(run: RunDir, say: Callable[[str], None], checkpoint: str = "checkpoint-12") -> None:
    items = tuple(make_item(at, all_fields=1.0) for at in range(9))
    with track_scores(stage_of(run), say):
        note_scores(stage_of(run), make_result(checkpoint, items))


def test_scores_by_data_set_are_noted_with_their_intervals_under_names_that_trackers_take(run: RunDir) -> None:
    part = DatasetScores(n=3, coverage=1.0, metrics={"all_fields": Score(value=0.25, low=0.125, high=0.5)})
    note_scores(stage_of(run), make_result("checkpoint-12", by_dataset={"scans (2)": part}))
    (line,) = read_lines(stage_of(run).evals)
    assert [line[f"json_match/scans-2-/all_fields{end}"] for end in ("", "_low", "_high")] == [0.25, 0.125, 0.5]


def test_scores_and_a_few_answers_reach_the_trackers_of_the_run_and_one_that_fails_is_told(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen"))
    _stage(run, trackers=(Tracker(kind="trackio"),))
    said: list[str] = []
    _told(run, said.append)
    _told(run, said.append, "checkpoint-24")
    lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert (len(lines), said) == (2, [])  # each once
    step, sent = lines[0]
    assert (step, sent["json_match/all_fields"], sent["json_match/all_fields_low"]) == (12, 0.5, 0.1)
    assert sent["json_match/coverage"] == 1.0
    samples = [value for name, value in sent.items() if "/sample-" in name]
    assert (len(samples), samples[1]) == (3, "prompt 3\n\nanswer: [3]\n\nreference: [7]")
    (tmp_path / "trackio.py").write_text(f"{FAKE}    raise ValueError('no')\n")
    _told(run, said.append, "checkpoint-36")
    (line,) = said
    assert line.startswith("trackio did not receive all scores: ValueError: no")
    assert json.loads(stage_of(run).evals.read_text().splitlines()[-1])["json_match/all_fields"] == 0.5


# tasks as a command line names them


def test_a_label_of_the_spec_means_what_the_spec_says_and_another_name_the_task_with_its_defaults() -> None:
    declared = Evaluation.model_validate({"task": "json_match", "max_new_tokens": 8})
    mine, other = named_evaluations(["json_match", "exact_match"], [declared])
    assert (mine.max_new_tokens, other.label, other.max_new_tokens) == (8, "exact_match", 256)


def test_a_mapping_is_a_task_or_a_whole_evaluation() -> None:
    task, whole = named_evaluations(
        ["{kind: rouge, stemmer: false}", "{name: mine, task: {kind: lm_eval, tasks: [arc_easy]}, limit: 5}"]
    )
    assert isinstance(task.task, Rouge)
    assert not task.task.stemmer
    assert isinstance(whole.task, LmEval)
    assert (whole.label, whole.limit, whole.task.tasks) == ("mine", 5, ("arc_easy",))


def test_paths_in_a_file_start_where_it_lies_and_a_python_file_is_a_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text("- {task: {kind: python, path: mine.py}}\n- exact_match\n")
    own, exact, judge = named_evaluations([str(tmp_path / "tasks.yaml"), str(tmp_path / "judge.py")])
    assert isinstance(own.task, CustomTask)
    assert isinstance(judge.task, CustomTask)
    assert (own.task.path, own.label, exact.label) == (str(tmp_path / "mine.py"), "mine", "exact_match")
    assert judge.task.path == str(tmp_path / "judge.py")


@pytest.mark.parametrize(
    ("asked", "problem", "remedy"),
    [
        (["rogue"], "there is no task rogue", "exact_match, json_match, relaxed_accuracy"),
        (["{kind: rouge, stemer: false}"], "task.rouge.stemer", "docs/spec.md"),
        (["{kind: rouge"], "--task {kind: rouge", "quote it"),
        (["tasks/v1.2.py"], "'v1.2' is not a name; give name: with letters, digits, `_` and `-`", "docs/spec.md"),
        (["{name: v1.2, task: rouge}"], '"v1.2" is not a name; use letters, digits, `_` and `-`', "docs/spec.md"),
        (["nowhere.yaml"], "there is no such file", "json_match"),
        (["rouge", "{kind: rouge, stemmer: false}"], "two tasks are called rouge", "a name each"),
    ],
)
def test_what_is_no_task_is_refused_with_what_there_is(asked: list[str], problem: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        named_evaluations(asked)
    assert problem.replace("task.rouge.stemer", "stemer") in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("content", [b"kind: caf\xe9", b"[" * 100_000, b"#" * (2 << 20)])
def test_a_file_of_tasks_that_cannot_be_one_is_a_mistake_of_the_user(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(SpecError, match=r"x\.yaml"):
        named_evaluations([str(tmp_path / "x.yaml")])
