"""Where a step's time goes."""

import time

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.train.step_clock import StepClock
from tests.faults import Reference, run_to_end


def test_phases_that_come_again_are_added_up_and_an_attempt_that_did_not_end_is_forgotten() -> None:
    clock = StepClock("cpu")
    clock.mark("forward")
    time.sleep(0.05)
    clock.begin()
    for phase in ("forward", "backward", "forward", "backward", "update", "end"):
        clock.mark(phase)
        time.sleep(0.005)
    taken = clock.taken()
    assert list(taken) == ["forward_seconds", "backward_seconds", "update_seconds"]
    assert 0.01 <= taken["forward_seconds"] < 0.05
    assert taken["update_seconds"] >= 0.005
    assert clock.taken() == {}


def test_a_trainings_lines_say_how_its_steps_are_split_and_what_the_machine_has_left(lora: Reference) -> None:
    where = run_to_end(lora.job)
    for line in read_steps(where.metrics):
        parts = [line[f"{phase}_seconds"] for phase in ("forward", "backward", "update")]
        assert min(parts) >= 0
        assert sum(parts) + line["wait_seconds"] <= line["seconds"] + 0.001
        assert sum(parts) > line["seconds"] / 3
    for line in read_lines(where.memory):
        assert line["host_free_bytes"] > 0
        assert line["disk_free_bytes"] > 0
