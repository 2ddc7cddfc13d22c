"""What becomes of a run when its workers end in one way or another; the workers are played."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.checkpoint import write_checkpoint
from finefit.artifacts.records import Failure, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import EvalFailure, EvalRequest, StageResult
from finefit.errors import Diverged, FinefitError, Interrupted, RunError, UserError, WorkerDied
from finefit.run import evaluation, run_stages
from finefit.run.eval_subjects import checkpoints_of
from finefit.run.run_stages import train_run
from tests.evals import make_result

DONE = StageResult(
    step=12,
    total_steps=12,
    checkpoint="checkpoint-12",
    trainable_parameters=1,
    parameters=2,
    tokens=3,
    seconds=1.0,
    peak_bytes=1,
    failure=None,
)
Play = Callable[[str, Path], int]


def _play(monkeypatch: pytest.MonkeyPatch, play: Play) -> list[str]:
    """Returns the names of what was launched."""
    launched: list[str] = []

    def launch(module: str, argument: Path, *, log: Path, **_: Any) -> int:
        launched.append(argument.name)
        log.write_text("the end of the log\n")
        return play(module, argument)

    monkeypatch.setattr(run_stages, "launch", launch)
    monkeypatch.setattr(evaluation, "launch", launch)
    return launched


def _all_goes_well(module: str, argument: Path) -> int:
    if module == "finefit.train.worker":
        checkpoints = StageDir(argument).checkpoints
        write_checkpoint(checkpoints, 12, lambda staging: (staging / "weights").touch(), needed_bytes=0)
        (checkpoints / "final").unlink(missing_ok=True)
        (checkpoints / "final").symlink_to("checkpoint-12")
        write_record(StageDir(argument).result, DONE)
        return 0
    request = read_record(argument, EvalRequest)
    paths = StageDir(argument.parents[2]).evaluation("json_match", request.checkpoint, request.evaluation.limit)
    write_record(paths.result, make_result(request.checkpoint))
    return 0


def test_a_run_trains_then_scores_base_and_final_each_in_a_process(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = _play(monkeypatch, _all_goes_well)
    assert train_run(run).status == "finished"
    assert launched == ["1-sft", "base.request.json", "checkpoint-12.request.json"]
    assert read_record(run.run, Run).status == "finished"


def test_what_is_finished_is_not_launched_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = _play(monkeypatch, _all_goes_well)
    train_run(run)
    launched.clear()
    stage_of(run).evaluation("json_match", "base").result.unlink()
    assert train_run(run).status == "finished"
    assert launched == ["base.request.json"]


def test_a_run_is_running_while_its_worker_works(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(module: str, argument: Path) -> int:
        seen.append(read_record(run.run, Run).status)
        return _all_goes_well(module, argument)

    _play(monkeypatch, look)
    train_run(run)
    assert seen == ["running"] * 3


@pytest.mark.parametrize(
    ("kind", "raised", "exit_code", "status"),
    [
        ("ModelError", UserError, 2, "failed"),
        ("Diverged", Diverged, 1, "failed"),
        ("Interrupted", Interrupted, 3, "stopped"),
    ],
)
def test_a_reported_failure_is_raised_as_what_it_was_and_recorded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, kind: str, raised: type[FinefitError], exit_code: int, status: str
) -> None:
    failure = Failure(kind=kind, problem="the problem", remedy="the remedy", exit_code=exit_code)

    def fail(_: str, argument: Path) -> int:
        write_record(StageDir(argument).result, replace(DONE, failure=failure))
        return exit_code

    _play(monkeypatch, fail)
    with pytest.raises(raised) as caught:
        train_run(run)
    assert (type(caught.value).__name__, caught.value.problem, caught.value.remedy) == (
        kind,
        "the problem",
        "the remedy",
    )
    record = read_record(run.run, Run)
    assert (record.status, record.failure) == (status, failure)


def test_a_failure_of_the_past_is_forgotten_by_a_run_that_goes_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(monkeypatch, lambda *_: 3)
    with pytest.raises(Interrupted):
        train_run(run)
    assert read_record(run.run, Run).failure is not None
    _play(monkeypatch, _all_goes_well)
    assert train_run(run).failure is None


def _die(*_: object) -> int:
    raise WorkerDied("killed")


@pytest.mark.parametrize(
    ("play", "exit_code", "status", "words"),
    [(lambda *_: 1, 70, "failed", "the end of the log"), (_die, 3, "stopped", "killed")],  # 1: after a traceback
)
def test_a_worker_that_ends_without_a_result_is_a_fault_of_ours_unless_it_was_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, play: Play, exit_code: int, status: str, words: str
) -> None:
    _play(monkeypatch, play)
    with pytest.raises(FinefitError, match=words) as caught:
        train_run(run)
    assert (caught.value.exit_code, read_record(run.run, Run).status) == (exit_code, status)


@pytest.mark.parametrize(("code", "raised", "exit_code"), [(1, FinefitError, 70), (3, Interrupted, 3)])
def test_an_evaluation_that_leaves_no_word_is_a_fault_unless_it_was_stopped(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[FinefitError], exit_code: int
) -> None:
    _play(
        monkeypatch,
        lambda module, argument: _all_goes_well(module, argument) if module == "finefit.train.worker" else code,
    )
    with pytest.raises(raised) as caught:
        train_run(run)
    assert caught.value.exit_code == exit_code


def test_what_an_evaluation_reports_reaches_the_user_as_its_own_type(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str, argument: Path) -> int:
        if module == "finefit.train.worker":
            return _all_goes_well(module, argument)
        failure = Failure(kind="RunError", problem="the template has changed", remedy="put it back", exit_code=2)
        write_record(
            StageDir(argument.parents[2]).evaluation("json_match", "base").failure, EvalFailure(failure=failure)
        )
        return 2

    _play(monkeypatch, refuse)
    with pytest.raises(RunError, match="the template has changed"):
        train_run(run)


def test_before_the_first_checkpoint_there_is_only_the_base(run: RunDir) -> None:
    assert checkpoints_of(run, "all") == ["base"]
    with pytest.raises(RunError) as caught:
        checkpoints_of(run, "final")
    assert caught.value.remedy == "there is only base so far"
