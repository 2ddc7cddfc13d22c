"""DPO end to end: it starts at ln 2, learns what is preferred, and whatever strikes it, its reference stays where
training started."""

import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from finefit.artifacts.atomic import Journal, read_steps
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator
from finefit.data.examples import ExamplePairs, open_examples
from finefit.errors import FindingError, Interrupted
from finefit.model.load import load_base, make_trainable
from finefit.objective.batch import Batch, Forward
from finefit.step.forward import bind
from finefit.train import loop, reference, worker
from finefit.train.context import StopRequest
from finefit.train.reference import ReferencedPairs, ReferencePass
from finefit.train.saver import Saver
from tests.faults import (
    KILLS,
    Job,
    Reference,
    assert_only_whole_checkpoints,
    at_operation,
    at_step,
    events,
    failure_of,
    finish,
    make_job,
    make_reference,
    outcome,
    run_to_end,
    send_self,
    start,
    words,
)
from tests.pairs import DPO, make_pairs_project

FULL = DPO.replace("tuning: {kind: lora, rank: 4, alpha: 8, dropout: 0.1}", "tuning: {kind: full}").replace(
    "lr: 1e-2", "lr: 1e-3"
)
GOES_ON = DPO.replace("dropout: 0.1}", "dropout: 0.1, adapter: before}")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(make_job(tmp_path_factory.mktemp("dpo"), spec=DPO, project=make_pairs_project))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(make_job(tmp_path_factory.mktemp("dpo-full"), spec=FULL, project=make_pairs_project))


@pytest.fixture(scope="module")
def goes_on(lora: Reference, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Trains on the adapter that the first run has left."""

    def project(folder: Path, *, spec: str) -> Path:
        path = make_pairs_project(folder, spec=spec)
        shutil.copytree(_end_of(lora.job) / "final", folder / "before")
        return path

    return make_reference(make_job(tmp_path_factory.mktemp("dpo-goes-on"), spec=GOES_ON, project=project))


def _end_of(job: Job) -> Path:
    return next(job.pristine.parent.glob("attempt-1/stages/*/checkpoints"))


def _first_run(found: Reference) -> StageDir:
    return StageDir(_end_of(found.job).parent)


def _resumed(where: StageDir) -> None:
    assert finish(start(where)) == 0, words(where)


# learning


@pytest.mark.parametrize("kind", ["lora", "full", "goes_on"])
def test_a_run_starts_at_ln_2_and_learns_what_is_preferred(kind: str, request: pytest.FixtureRequest) -> None:
    where = _first_run(request.getfixturevalue(kind))
    (at_start,) = events(where, "dpo_start")
    assert at_start["found"] == pytest.approx(math.log(2), abs=1e-6)
    validated = events(where, "validated")
    losses, margins = ([line[name] for line in validated] for name in ("validation_loss", "margin"))
    assert losses[-1] < losses[0] < math.log(2)
    assert margins[-1] > margins[0] > 0
    assert validated[-1]["accuracy"] == 1
    assert "perplexity" not in validated[0]
    steps = read_steps(where.metrics)
    assert len(steps) == 18
    assert all(
        step["margin"] == pytest.approx(step["rewards_chosen"] - step["rewards_rejected"], abs=1e-5) for step in steps
    )
    assert sum(step["rows"] for step in steps) == 3 * 22


def test_the_check_of_the_start_leaves_no_trace_in_the_run(lora: Reference) -> None:
    """Not in the random numbers either: dropout is on."""

    def leave_out() -> None:
        setattr(loop, "require_dpo_start", lambda _: None)  # noqa: B010 a name that the loop imports

    where = run_to_end(lora.job, leave_out)
    assert events(where, "dpo_start") == []
    assert outcome(where) == lora.outcome


def test_a_reference_from_kept_numbers_trains_as_one_from_the_model(lora: Reference, tmp_path: Path) -> None:
    kept = make_reference(
        make_job(tmp_path, spec=DPO.replace("kind: dpo}", "kind: dpo, reference: cached}"), project=make_pairs_project)
    )
    ours, theirs = ([loss for _, loss, _, _ in found.outcome.steps] for found in (kept, lora))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert _first_run(kept).reference.exists()
    assert not _first_run(lora).reference.exists()


# what strikes it


@pytest.mark.parametrize("kind", ["lora", "full", "goes_on"])
def test_runs_killed_at_random_times_end_bit_identical(
    kind: str, request: pytest.FixtureRequest, count: Callable[[str], None]
) -> None:
    found: Reference = request.getfixturevalue(kind)
    chance, kills = random.Random(kind), max(2, KILLS // 7)
    where = found.job.fresh()
    for _ in range(kills):
        if finish(start(where), kill_after=chance.uniform(0, found.seconds)) == 0:
            assert outcome(where) == found.outcome
            where = found.job.fresh()
        else:
            assert_only_whole_checkpoints(where)
    _resumed(where)
    assert outcome(where) == found.outcome
    count(f"F1  DPO, {kind}: {kills} kills at random times, all bit-identical")


def _stopped_at(found: Reference, step: int) -> StageDir:
    where = found.job.fresh()
    assert finish(start(where, lambda: at_step(step, partial(send_self, signal.SIGTERM)))) == 3, words(where)
    return where


def test_a_reference_that_is_gone_is_made_anew_from_the_starting_weights(full: Reference) -> None:
    """The checkpoint that the run goes on from has others."""
    where = _stopped_at(full, 7)
    where.reference.unlink()
    _resumed(where)
    assert outcome(where) == full.outcome


def test_a_reference_that_is_there_is_not_computed_again(full: Reference) -> None:
    where = _stopped_at(full, 7)
    before = where.reference.stat().st_mtime_ns
    _resumed(where)
    assert where.reference.stat().st_mtime_ns == before
    assert len(events(where, "reference")) == 1


@pytest.mark.parametrize("place", [-3, 3])
def test_a_damaged_reference_is_found_and_made_anew(full: Reference, place: int) -> None:
    where = _stopped_at(full, 4)
    content = bytearray(where.reference.read_bytes())
    content[place] ^= 0x55
    where.reference.write_bytes(content)
    _resumed(where)
    assert "made again" in words(where)
    assert outcome(where) == full.outcome


def test_a_run_killed_before_its_reference_is_visible_ends_bit_identical(full: Reference) -> None:
    where = full.job.fresh()
    kill = partial(send_self, signal.SIGKILL)
    assert finish(start(where, lambda: at_operation(where.path, "fsync", r"\.reference.*", kill))) == -signal.SIGKILL
    assert not where.reference.exists()
    _resumed(where)
    assert outcome(where) == full.outcome


def test_a_reference_of_another_model_stops_the_run_before_its_first_step(full: Reference) -> None:
    where = _stopped_at(full, 1)
    shutil.rmtree(where.checkpoints)
    _bend(where.reference, lambda values: values * np.array([1.2, 1.0], np.float32))
    assert finish(start(where)) == FindingError.exit_code
    failure = failure_of(where)
    assert "and not ln 2 = 0.693147" in failure.problem
    assert "reference.safetensors" in failure.remedy
    assert read_steps(where.metrics) == []
    where.reference.unlink()
    _resumed(where)
    assert outcome(where) == full.outcome


def _bend(path: Path, bend: Callable[[Any], Any]) -> None:
    """Other numbers under the same name, in a file that is whole."""
    values = {name: bend(found) for name, found in load_file(path).items()}
    with path.open("rb") as file:
        header = file.read(4096).decode("latin-1")
    key = header.split('"key":"')[1].split('"')[0]
    save_file(values, path, metadata={"key": key, "sha256": reference._digest(values)})


def test_a_policy_under_no_grad_stops_the_run_with_its_cause(lora: Reference) -> None:
    def blind() -> None:
        really: Callable[..., Forward] = getattr(worker, "bind")  # noqa: B009 a name that the worker imports

        def bound(*given: Any, **named: Any) -> Forward:
            forward = really(*given, **named)

            def without_gradients(batch: Batch) -> Tensor:
                with torch.no_grad():
                    return forward(batch)

            return without_gradients

        setattr(worker, "bind", bound)  # noqa: B010

    where = lora.job.fresh()
    assert finish(start(where, blind)) == FindingError.exit_code, words(where)
    failure = failure_of(where)
    assert "no_grad" in failure.problem + failure.remedy
    assert read_steps(where.metrics) == []


# the numbers that are kept


class _Counting:
    """A forward that counts its calls, and asks to stop after some."""

    def __init__(self, forward: Forward, stop: StopRequest, *, stop_after: int | None = None) -> None:
        self._forward, self._stop, self._stop_after = forward, stop, stop_after
        self.calls = 0

    def __call__(self, batch: Batch) -> Tensor:
        self.calls += 1
        if self.calls == self._stop_after:
            self._stop.reason = "SIGTERM"
        return self._forward(batch)


Begin = Callable[..., tuple[ReferencePass, _Counting, dict[str, ExamplePairs]]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    with ExitStack() as journals:
        yield partial(_begin, journals)


def _begin(
    journals: ExitStack, where: StageDir, *, stop_after: int | None = None
) -> tuple[ReferencePass, _Counting, dict[str, ExamplePairs]]:
    stage, stop = read_record(where.stage, Stage), StopRequest()
    model = make_trainable(
        load_base(where.run / stage.model.path, device="cpu", dtype=torch.float32),  # type: ignore[union-attr]
        stage.tuning,
        name="tiny",
        base=where.run,
    )
    forward = _Counting(bind(model), stop, stop_after=stop_after)
    metrics = journals.enter_context(Journal(where.metrics))
    rows = {name: open_examples(where.prepared(name)) for name in ("train.safetensors", "validation.safetensors")}
    pairs = {name: found for name, found in rows.items() if isinstance(found, ExamplePairs)}
    begun = ReferencePass(
        saver=Saver(where=where, stage=stage, model=model, optimizer=torch.optim.SGD(model.parameters())),
        forward=forward,
        collator=Collator(pad=1),
        workers=journals.enter_context(BatchWorkers(1)),
        stop=stop,
        metrics=metrics,
    )
    return begun, forward, pairs


def test_a_computation_that_was_stopped_goes_on_and_comes_to_the_same_bits(full: Reference, begin: Begin) -> None:
    whole, stopped = full.job.fresh(), full.job.fresh()
    start_whole, calls, pairs = begin(whole)
    wanted = start_whole.rows(pairs)
    assert calls.calls == 13  # 22 and 4 pairs, two at a time
    start_stopped, _, _ = begin(stopped, stop_after=4)
    with pytest.raises(Interrupted, match="the reference of 8 of 26 pairs is kept"):
        start_stopped.rows(pairs)
    assert int(np.isnan(load_file(stopped.reference)["train.safetensors"]).any(axis=1).sum()) == 14
    start_again, calls, _ = begin(stopped)
    found = start_again.rows(pairs)
    assert calls.calls == 9
    for name in pairs:
        assert [pair.reference for pair in found[name]] == [pair.reference for pair in wanted[name]]  # type: ignore[union-attr]


def test_numbers_of_other_rows_are_not_taken(full: Reference, begin: Begin) -> None:
    where = full.job.fresh()
    begun, _, pairs = begin(where)
    begun.rows(pairs)
    values = load_file(where.reference)
    save_file(values, where.reference, metadata={"key": "another", "sha256": reference._digest(values)})
    again, calls, _ = begin(where)
    again.rows(pairs)
    assert calls.calls == 13


def test_a_pair_that_is_seen_twice_is_computed_once_and_brings_its_own_numbers(tmp_path: Path, begin: Begin) -> None:
    spec = FULL.replace("{path: train.jsonl}", "{path: train.jsonl, weight: 1.5}")
    where = make_job(tmp_path, spec=spec, project=make_pairs_project).fresh()
    begun, calls, pairs = begin(where)
    found = begun.rows(pairs)["train.safetensors"]
    assert isinstance(found, ReferencedPairs)
    assert (len(found), calls.calls) == (33, 13)
    by_pair: dict[Any, set[Any]] = {}
    for pair in found:
        by_pair.setdefault((pair.chosen, pair.rejected), set()).add(pair.reference)
    assert len(by_pair) == 22
    assert all(len(numbers) == 1 for numbers in by_pair.values())
    assert len(set().union(*by_pair.values())) == 22


def test_a_log_probability_that_is_no_number_stops_the_run(full: Reference, begin: Begin) -> None:
    where = full.job.fresh()
    begun, _, pairs = begin(where)
    with torch.no_grad():
        next(begun.saver.model.parameters()).fill_(torch.inf)
    with pytest.raises(FindingError, match="the starting model gives a pair of train"):
        begun.rows(pairs)


@pytest.mark.parametrize("place", ["a folder", "a pipe"])
def test_a_reference_that_is_not_a_file_is_none(tmp_path: Path, place: str) -> None:
    path = tmp_path / "reference.safetensors"
    path.mkdir() if place == "a folder" else os.mkfifo(path)
    reasons: list[str] = []
    assert reference._read(path, "key", {}, reasons.append) is None
    assert len(reasons) == 1
