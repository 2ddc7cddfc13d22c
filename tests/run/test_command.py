"""`plan --measure`: what it measures, and what it says where nothing can be measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import FindingError, UserError
from finefit.run.command import _ONE_STEP, measured, require_measurable
from finefit.spec.load import load_spec
from finefit.spec.schema import Ddp

FOUND = {"event": "measured", "step": 1, "predicted_bytes": 10, "measured_bytes": 9, "error": 0.11111}


def test_what_training_has_measured_is_found_among_its_events() -> None:
    assert measured([{"event": "started", "step": 0}, {"step": 1, "loss": 2.0}, FOUND]) == FOUND


def test_rows_that_do_not_fit_are_a_finding_with_the_predicted_size() -> None:
    with pytest.raises(FindingError, match="24,000 bytes were predicted") as caught:
        measured([{"event": "worst_does_not_fit", "step": 1, "predicted_bytes": 24000}])
    assert "levers.micro_batch" in caught.value.remedy


def test_several_ranks_and_an_update_inside_backward_are_refused_before_anything_is_loaded(run: RunDir) -> None:
    stage = read_record(stage_of(run).stage, Stage)
    require_measurable(stage)
    require_measurable(replace(stage, num_ranks=None))
    with pytest.raises(UserError, match="planned for 4 ranks"):
        require_measurable(replace(stage, engine=Ddp(kind="ddp", devices=2), num_ranks=4))
    with pytest.raises(UserError, match=r"levers\.update: inside"):
        require_measurable(replace(stage, levers=replace(stage.levers, update="inside")))


def test_a_long_warm_up_does_not_keep_one_step_from_being_measured(project: Path) -> None:
    asked = load_spec(project, ("schedule.warmup=100", *_ONE_STEP))
    assert (asked.schedule.steps, asked.schedule.warmup) == (1, 0)
