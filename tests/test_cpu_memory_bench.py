"""Memory on a CPU is as predicted: real runs, and the committed results of `bench/cpu_memory.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu_memory import CASES, make_spec, measure
from finefit.artifacts.atomic import read_lines
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.processes import chosen_variables
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import stage_of
from finefit.artifacts.stage_records import StageResult
from finefit.run.create import create_run, read_request
from finefit.spec.load import load_pipeline

RESULTS = Path(__file__).resolve().parents[1] / "bench/results/cpu_memory.json"
QUICK = "bytes-20m-full-2x128"
OFF = 0.10


def test_a_training_process_takes_the_predicted_memory(tmp_path: Path) -> None:
    """Beyond what it holds at its start, since this test's own process has made the plan."""
    spec = make_spec(tmp_path, CASES[QUICK])
    request = read_request(load_pipeline(spec, ()), tmp_path, spec_text=spec.read_text(), overrides=())
    run = create_run(request, runs=tmp_path / "runs")
    where, environment = stage_of(run), os.environ | chosen_variables(os.environ, deterministic=False)
    words = [sys.executable, "-P", "-m", "finefit.train.worker", str(where.path)]
    subprocess.run(words, check=True, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    result = read_record(where.result, StageResult)
    (forecast,) = read_record(run.plan, Plan).forecasts.values()
    at_start = next(iter(read_lines(where.memory)))["resident_bytes"]
    assert result.predicted_bytes == forecast.training_bytes
    predicted = forecast.predicted_bytes("cpu") - forecast.context_bytes + at_start
    assert abs(predicted / result.peak_bytes - 1) < OFF


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("name", CASES)
def test_every_case_takes_the_predicted_memory_in_training_and_in_evaluation(name: str) -> None:
    found = {what: held["error"] for what, held in measure(CASES[name]).items()}
    assert max(map(abs, found.values())) < OFF, found


def test_every_case_of_the_committed_results_was_within_ten_per_cent() -> None:
    cases = json.loads(RESULTS.read_text())["cases"]
    assert [*cases] == [*CASES]
    assert len([case for case in cases.values() if "evaluation" in case]) >= 8
    errors = {(name, what): held["error"] for name, case in cases.items() for what, held in case.items()}
    assert {case: error for case, error in errors.items() if abs(error) >= OFF} == {}
