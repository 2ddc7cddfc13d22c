"""Where a run stands is read from its journals, as they grow."""

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from finefit.artifacts.atomic import Journal
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.errors import RunError
from finefit.report.live import JournalTail, RunFollower, RunView, describe_evaluating
from tests.memory import peak_of
from tests.report.conftest import answer, ask, note, step


def _training(follower: RunFollower) -> str:
    found = follower.training()
    assert found is not None
    return found.words


def _evaluating(run: RunDir) -> str:
    found = describe_evaluating(run.stages()[0])
    assert found is not None
    return found.words


def test_before_the_first_step_nothing_is_claimed(run: RunDir) -> None:
    assert _training(RunFollower(run)) == "step 0/12  loading the model"


def test_a_reference_in_the_making_is_shown_until_the_first_step(run: RunDir) -> None:
    follower = RunFollower(run)
    note(run, event="reference", done=300, total=1000)
    assert follower.news() == []
    assert _training(follower) == "step 0/12  reference of 300/1,000 pairs"
    step(run, 1, 5.25)
    follower.news()
    assert "reference" not in _training(follower)


def test_a_step_shows_loss_speed_memory_time_left_and_what_is_saved(run: RunDir) -> None:
    follower = RunFollower(run)
    step(run, 1, 5.25)
    step(run, 2, 5.125)
    note(run, event="saved", step=2, checkpoint="checkpoint-2")
    with Journal(stage_of(run).memory) as memory:
        memory.write(instant="step", step=2, resident_bytes=2**30, peak_bytes=2**31)
    assert follower.news() == []
    assert _training(follower) == "step 2/12  loss 5.1250  200 tok/s  1.00 GiB  ETA 0:05  saved checkpoint-2"


def test_an_event_is_reported_once(run: RunDir) -> None:
    follower = RunFollower(run)
    note(run, event="spike", step=4, found=9.5, usual=1.25)
    (words,) = follower.news()
    assert "step 4" in words
    assert "9.5000" in words
    assert follower.news() == []


@pytest.mark.parametrize(
    "line",
    [
        {"event": "audited", "step": 1, "tensors": 9, "reached": 9, "waiting": ["layers.{0..3}.lora_A"]},
        {"event": "measured", "step": 1, "measured_bytes": 10 << 30, "predicted_bytes": 10 << 30, "error": 0.0},
        {"event": "environment", "variables": {}, "threads": 2, "ranks": []},
    ],
)
def test_what_is_as_it_should_be_is_no_news(run: RunDir, line: dict[str, object]) -> None:
    follower = RunFollower(run)
    note(run, **line)
    assert follower.news() == []


@pytest.mark.parametrize("event", ["audited", "oom_recovered", "loss_scale"])
def test_a_step_that_is_still_in_hand_is_not_shown_as_done(run: RunDir, event: str) -> None:
    follower = RunFollower(run)
    step(run, 3)
    note(run, event=event, step=4, before={}, after={}, scale=2.0)
    follower.news()
    assert _training(follower).startswith("step 3/12")


def test_what_happened_before_the_first_look_is_known_and_no_news(run: RunDir) -> None:
    step(run, 1)
    note(run, event="validated", step=1, validation_loss=5.5)
    follower = RunFollower(run)
    assert follower.news() == []
    assert _training(follower).startswith("step 1/12")


def test_a_step_that_was_not_applied_has_no_loss(run: RunDir) -> None:
    follower = RunFollower(run)
    step(run, 1)
    note(run, event="not_finite", step=2, found="loss inf")
    follower.news()
    assert "loss -" in _training(follower)


def test_a_resumed_run_stands_where_its_checkpoint_stands(run: RunDir) -> None:
    for number in range(1, 6):
        step(run, number)
    note(run, event="resumed", step=3, checkpoint="checkpoint-3")
    now = _training(RunFollower(run))
    assert now.startswith("step 3/12")
    assert now.endswith("saved checkpoint-3")


def test_a_run_that_starts_over_has_nothing_saved(run: RunDir) -> None:
    step(run, 1)
    note(run, event="saved", step=1, checkpoint="checkpoint-1")
    note(run, event="started", step=0)
    assert _training(RunFollower(run)).startswith("step 0/12  loss -")
    assert _training(RunFollower(run)).endswith("nothing saved yet")


def test_an_evaluation_in_hand_counts_its_answers(run: RunDir) -> None:
    step(run, 12)
    ask(run, "base")
    answer(run, "base", 2)
    assert _evaluating(run) == "evaluating base on json_match: 2/5 answers"


def test_a_sample_of_answers_that_are_there_is_never_more_than_whole(run: RunDir) -> None:
    answer(run, "base", 5)
    ask(run, "base", limit=3)
    assert _evaluating(run) == "evaluating base on json_match: 3/3 answers"


def test_of_a_run_that_only_evaluates_no_training_is_told(run: RunDir) -> None:
    stage_of(run).stage.unlink()
    assert RunFollower(run).training() is None


def test_an_evaluation_with_a_result_is_over(run: RunDir) -> None:
    ask(run, "base")
    stage_of(run).evaluation("json_match", "base").result.write_text("{}")
    assert describe_evaluating(run.stages()[0]) is None


def test_an_evaluation_that_was_stopped_does_not_hide_the_training_that_goes_on(run: RunDir) -> None:
    request = ask(run, "base")
    os.utime(request, ns=(0, 0))
    step(run, 1)
    assert describe_evaluating(run.stages()[0]) is None


def test_a_line_that_is_still_being_written_waits_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JournalTail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert list(tail.lines()) == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\n{"torn\n{"step": 3}\n')
    assert list(tail.lines()) == [{"step": 2}, {"step": 3}]


# A run as it goes on: plain lines without a terminal, one renewed line with one, and always lines in the log.


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


def _plain(shown: io.StringIO) -> Console:
    return Console(file=shown, width=40)


def _logged(run: RunDir) -> list[str]:
    lines = run.log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ", line) for line in lines)
    return [line.split(" ", 1)[1] for line in lines]


def test_without_a_terminal_lines_are_plain_whole_and_the_same_in_the_log(run: RunDir, shown: io.StringIO) -> None:
    with RunView(run, _plain(shown), log=run.log) as view:
        view.tick()
        step(run, 1)
        note(run, event="validated", step=1, validation_loss=5.5)
        view.tick()
        view.tick()
    lines = shown.getvalue().splitlines()
    assert lines == [
        "step 0/12  loading the model",
        "step 1: validation loss 5.5000",
        "step 1/12  loss 5.0000  200 tok/s  ETA 0:06  nothing saved yet",
    ]
    assert _logged(run) == lines


def test_progress_is_told_from_time_to_time_and_not_at_every_tick(
    run: RunDir, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("finefit.report.live.time.monotonic", lambda: now)
    view = RunView(run, _plain(shown))
    view.tick()
    for number in range(1, 13):
        step(run, number)
        now += 4.0
        view.tick()
    assert [line.split()[1] for line in shown.getvalue().splitlines()] == ["0/12", "3/12", "6/12", "9/12", "12/12"]


def test_news_are_not_told_again_by_the_view_of_a_resumed_run(run: RunDir, shown: io.StringIO) -> None:
    with RunView(run, _plain(shown), log=run.log) as view:
        note(run, event="validated", step=3, validation_loss=5.5)
        view.tick()
    with RunView(run, _plain(shown), log=run.log) as view:
        note(run, event="resumed", step=3, checkpoint="checkpoint-3")
        view.tick()
    assert shown.getvalue().count("validation loss") == 1
    assert shown.getvalue().count("resumed from checkpoint-3") == 1


def test_each_phase_begins_with_a_line_and_training_ends_with_one(run: RunDir, shown: io.StringIO) -> None:
    with RunView(run, _plain(shown)) as view:
        view.tick()
        step(run, 12)
        for checkpoint in ("base", "checkpoint-12"):
            ask(run, checkpoint)
            view.tick()
            answer(run, checkpoint, 5)
            view.tick()
            stage_of(run).evaluation("json_match", checkpoint).result.write_text("{}")
            view.tick()
    words = [line.split("  ")[0] for line in shown.getvalue().splitlines()]
    assert words == [
        "step 0/12",
        "step 12/12",
        "evaluating base on json_match: 0/5 answers",
        "evaluating checkpoint-12 on json_match: 0/5 answers",
    ]


def test_a_verb_that_only_evaluates_shows_no_steps(run: RunDir, shown: io.StringIO) -> None:
    step(run, 12)
    with RunView(run, _plain(shown), evaluates=True) as view:
        view.tick()
        ask(run, "base")
        view.tick()
    assert shown.getvalue() == "evaluating base on json_match: 0/5 answers\n"


def test_a_terminal_gets_a_bar_and_the_log_the_lines(run: RunDir, shown: io.StringIO) -> None:
    console = Console(file=shown, width=120, force_terminal=True)
    with RunView(run, console, log=run.log) as view:
        step(run, 6)
        view.tick()
    assert "━" in shown.getvalue()
    assert _logged(run) == ["step 6/12  loss 5.0000  200 tok/s  ETA 0:03  nothing saved yet"]


def test_a_journal_of_any_size_is_followed_and_counted_a_line_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    os.truncate(path, 1 << 40)
    lines = JournalTail(path).lines()
    assert next(lines) == {"step": 1}
    with pytest.raises(RunError, match="line 2 of"):
        next(lines)
    with path.open("wb") as file:
        file.writelines(b'{"x": 1}\n' * (1 << 20) for _ in range(30))
    setup = "from finefit.artifacts.reading import num_lines; from finefit.report.live import JournalTail"
    assert peak_of("assert num_lines(Path(sys.argv[1])) == 30 << 20", path, setup=setup) < 20 << 20
    os.truncate(path, 9 << 18)
    code = "assert sum(1 for _ in JournalTail(Path(sys.argv[1])).lines()) == 1 << 18"
    assert peak_of(code, path, setup=setup) < 20 << 20
