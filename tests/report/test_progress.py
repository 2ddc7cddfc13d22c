"""Where a run stands is read from its journals, as they grow."""

import os
from pathlib import Path

import pytest

from finefit.artifacts.journal import Journal
from finefit.artifacts.rundir import RunDir
from finefit.pipeline.create import stage_of
from finefit.report.progress import Follower, Tail, Training
from tests.report.conftest import answer, ask, note, step


def _training(follower: Follower) -> Training:
    found = follower.training()
    assert found is not None
    return found


def test_before_the_first_step_nothing_is_claimed(run: RunDir) -> None:
    assert str(Follower(run).training()) == "step 0/12  loading the model"


def test_a_reference_in_the_making_is_shown_until_the_first_step(run: RunDir) -> None:
    follower = Follower(run)
    note(run, event="reference", done=300, total=1000)
    assert follower.news() == []
    assert str(follower.training()) == "step 0/12  reference of 300/1,000 pairs"
    step(run, 1, 5.25)
    follower.news()
    assert "reference" not in str(follower.training())


def test_a_step_shows_loss_speed_memory_time_left_and_what_is_saved(run: RunDir) -> None:
    follower = Follower(run)
    step(run, 1, 5.25)
    step(run, 2, 5.125)
    note(run, event="saved", step=2, checkpoint="checkpoint-2")
    with Journal(stage_of(run).memory) as memory:
        memory.write(instant="step", step=2, resident_bytes=2**30, peak_bytes=2**31)
    assert follower.news() == []
    assert str(follower.training()) == "step 2/12  loss 5.1250  200 tok/s  1.00 GiB  ETA 0:05  saved checkpoint-2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"event": "resumed", "step": 3, "checkpoint": "checkpoint-3"}, "resumed from checkpoint-3"),
        ({"event": "rejected", "note": "checkpoint-6 is passed over: damaged"}, "checkpoint-6 is passed over: damaged"),
        ({"event": "not_finite", "step": 4, "found": "loss nan"}, "step 4 was not applied: loss nan"),
        ({"event": "rolled_back", "step": 3}, "rolled back to step 3"),
        ({"event": "left_out", "step": 4}, "step 4 is left out: it was not finite before"),
        ({"event": "validated", "step": 3, "validation_loss": 5.5}, "step 3: validation loss 5.5000"),
        (
            {"event": "validated", "step": 3, "validation_loss": 1.5, "perplexity": 4.4817},
            "step 3: validation loss 1.5000, perplexity 4.482",
        ),
        (
            {
                "event": "validated",
                "step": 3,
                "validation_loss": 0.5,
                "rewards_chosen": 0.2,
                "accuracy": 0.75,
                "margin": 1.25,
            },
            "step 3: validation loss 0.5000, accuracy 75.0%, margin 1.2500",
        ),
        (
            {"event": "validation_not_finite", "step": 3, "found": "nan"},
            "step 3: validation loss nan, so this step cannot be the best",
        ),
        (
            {
                "event": "rescued",
                "step": 4,
                "before": {"micro_batch": 4, "offload": False},
                "after": {"micro_batch": 2, "offload": False},
                "found": "CUDA",
            },
            "step 4 ran out of memory; the same rows again with micro_batch 4 -> 2",
        ),
        (
            {
                "event": "validation_rescued",
                "step": 4,
                "before": {"micro_batch": 1, "loss_chunk": None},
                "after": {"micro_batch": 1, "loss_chunk": 1024},
                "found": "CUDA",
            },
            "step 4: validation ran out of memory; it is made with loss_chunk None -> 1024 from now on, and training as before",
        ),
        (
            {"event": "validation_left_out", "step": 4, "found": "CUDA"},
            "step 4: validation does not fit even row by row with every exact lever pulled; it is left out, and training goes on",
        ),
        (
            {"event": "spike", "step": 4, "found": 9.5, "usual": 1.25},
            "step 4: loss 9.5000 leaps out of the steps before it, whose median is 1.2500",
        ),
        (
            {"event": "stalled", "seconds": 612.3, "allowed_seconds": 600.0, "since": "step 4"},
            "nothing has gone on for 612 s since step 4; the stacks of all threads are in the log",
        ),
        (
            {"event": "tracker_failed", "tracker": "mlflow", "found": "mlflow is not installed: pip install mlflow"},
            "mlflow failed; mlflow is not installed: pip install mlflow; the run's own metrics are whole",
        ),
        (
            {
                "event": "tracker_failed",
                "tracker": "wandb",
                "lost_lines": 1200,
                "found": "its process ended with 1",
                "log": "logs/tracker-wandb.log",
            },
            "wandb did not get 1,200 lines; its process ended with 1; see logs/tracker-wandb.log; the run's own metrics are whole",
        ),
        (
            {
                "event": "tracker_failed",
                "tracker": "wandb",
                "lost_lines": 2,
                "found": "",
                "log": "logs/tracker-wandb.log",
            },
            "wandb did not get 2 lines; see logs/tracker-wandb.log; the run's own metrics are whole",
        ),
        (
            {
                "event": "audited",
                "step": 2,
                "tensors": 9,
                "reached": 8,
                "zero": ["a", "b", "c", "d", "e"],
                "idle": ["x.experts.{0,3}.up"],
            },
            "step 2: the gradient is exactly zero for a, b, c and 2 more; it is missing, since no row came to these experts, for x.experts.{0,3}.up",
        ),
        (
            {"event": "audited", "step": 2, "tensors": 9, "reached": 9, "faint": ["a", "b", "c"]},
            "step 2: the gradient is rounding for a, b, c",
        ),
        (
            {"event": "loss_scale", "step": 4, "scale": 32768.0},
            "step 4 overflowed in fp16 and is made again with loss scale 32768",
        ),
        (
            {"event": "dpo_start", "found": 0.6931471824645996, "allowed": 1e-5},
            "before the first step the DPO loss is 0.693147, and ln 2 is 0.693147",
        ),
        (
            {"event": "dpo_start", "found": "nan", "allowed": 1e-5},
            "before the first step the DPO loss is nan, and ln 2 is 0.693147",
        ),
        (
            {"event": "measured", "step": 1, "measured_bytes": 11 << 30, "foretold_bytes": 10 << 30, "error": -0.0909},
            "memory is not as planned: 11.00 GiB reserved with the longest rows, 10.00 GiB foretold (-9.1%); please report it",
        ),
        (
            {"event": "amended", "step": 3, "changes": ["save.keep: 2 -> 3"], "note": ""},
            "after step 3: save.keep: 2 -> 3",
        ),
    ],
)
def test_an_event_is_told_once_in_words(run: RunDir, line: dict[str, object], words: str) -> None:
    follower = Follower(run)
    note(run, **line)
    assert follower.news() == [words]
    assert follower.news() == []


@pytest.mark.parametrize(
    "line",
    [
        {"event": "audited", "step": 1, "tensors": 9, "reached": 9, "waiting": ["layers.{0..3}.lora_A"]},
        {"event": "measured", "step": 1, "measured_bytes": 10 << 30, "foretold_bytes": 10 << 30, "error": 0.0},
        {"event": "environment", "variables": {}, "threads": 2, "ranks": []},
    ],
)
def test_what_is_as_it_should_be_is_no_news(run: RunDir, line: dict[str, object]) -> None:
    follower = Follower(run)
    note(run, **line)
    assert follower.news() == []


@pytest.mark.parametrize("event", ["audited", "rescued", "loss_scale"])
def test_a_step_that_is_still_in_hand_is_not_shown_as_done(run: RunDir, event: str) -> None:
    follower = Follower(run)
    step(run, 3)
    note(run, event=event, step=4, before={}, after={}, scale=2.0)
    follower.news()
    assert _training(follower).step == 3


def test_what_happened_before_the_first_look_is_known_and_no_news(run: RunDir) -> None:
    step(run, 1)
    note(run, event="validated", step=1, validation_loss=5.5)
    follower = Follower(run)
    assert follower.news() == []
    assert _training(follower).step == 1


def test_a_step_that_was_not_applied_has_no_loss(run: RunDir) -> None:
    follower = Follower(run)
    step(run, 1)
    note(run, event="not_finite", step=2, found="loss inf")
    follower.news()
    assert _training(follower).loss is None


def test_a_resumed_run_stands_where_its_checkpoint_stands(run: RunDir) -> None:
    for number in range(1, 6):
        step(run, number)
    note(run, event="resumed", step=3, checkpoint="checkpoint-3")
    now = _training(Follower(run))
    assert (now.step, now.checkpoint) == (3, "checkpoint-3")


def test_a_run_that_starts_over_has_nothing_saved(run: RunDir) -> None:
    step(run, 1)
    note(run, event="saved", step=1, checkpoint="checkpoint-1")
    note(run, event="started", step=0)
    assert str(Follower(run).training()).startswith("step 0/12  loss -")
    assert str(Follower(run).training()).endswith("nothing saved yet")


def test_an_evaluation_in_hand_counts_its_answers(run: RunDir) -> None:
    step(run, 12)
    ask(run, "base")
    answer(run, "base", 2)
    assert str(Follower(run).answering()) == "evaluating base on json_match: 2/5 answers"


def test_a_sample_of_answers_that_are_there_is_never_more_than_whole(run: RunDir) -> None:
    answer(run, "base", 5)
    ask(run, "base", limit=3)
    assert str(Follower(run).answering()) == "evaluating base on json_match: 3/3 answers"


def test_of_a_run_that_only_evaluates_no_training_is_told(run: RunDir) -> None:
    stage_of(run).stage.unlink()
    assert Follower(run).training() is None


def test_an_evaluation_with_a_result_is_over(run: RunDir) -> None:
    ask(run, "base")
    stage_of(run).evaluation("json_match", "base").result.write_text("{}")
    assert Follower(run).answering() is None


def test_an_evaluation_that_was_stopped_does_not_hide_the_training_that_goes_on(run: RunDir) -> None:
    request = ask(run, "base")
    os.utime(request, ns=(0, 0))
    step(run, 1)
    assert Follower(run).answering() is None


def test_a_line_that_is_still_being_written_waits_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert tail.lines() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\n{"torn\n{"step": 3}\n')
    assert tail.lines() == [{"step": 2}, {"step": 3}]
