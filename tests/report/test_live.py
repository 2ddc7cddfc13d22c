"""A run as it goes on: plain lines without a terminal, one renewed line with one, and always lines in the log."""

import io
import re

import pytest
from rich.console import Console

from finefit.artifacts.rundir import RunDir
from finefit.pipeline.create import stage_of
from finefit.report.live import RunView
from tests.report.conftest import answer, ask, note, step


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
