"""F19: a tracker that raises, blocks, dies or answers 500. Training is unaffected, and the metrics are complete
here."""

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import Journal, read_steps
from finefit.artifacts.rundir import StageDir
from finefit.spec.schema import Tracker
from finefit.train import trackers
from finefit.train.trackers import Tracking, metric_points, tracker_log
from tests.faults import TRAINING, Job, Reference, events, finish, make_job, outcome, run_to_end, start, words
from tests.slow_cases import slow_but

FAKE = """
import json, os, time, urllib.request
def _do(place, **values):
    fault = os.environ.get("FAKE_FAULT", "")
    if fault == f"raises in {place}":
        raise ValueError("no such project: token=hunter2")
    if fault == f"blocks in {place}":
        time.sleep(3600)
    if fault == f"dies in {place}":
        os.kill(os.getpid(), 11)
    if fault == f"exits in {place}":
        raise SystemExit("not logged in")
    if address := os.environ.get("FAKE_SERVER"):
        urllib.request.urlopen(urllib.request.Request(address, data=json.dumps(values).encode(), method="POST"), timeout=5)
    with open(os.environ["FAKE_SEEN"], "a") as seen:
        seen.write(json.dumps({"place": place, **values}) + "\\n")
def init(project, name, **rest): _do("init", project=project, name=name)
def log(metrics, step): _do("log", step=step, metrics=metrics)
def finish(): _do("finish")
"""  # noqa: E501
"""trackio's three calls."""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "trackio.py").write_text(FAKE)
    return folder


class Refusing(BaseHTTPRequestHandler):
    asked: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        type(self).asked.append(self.path)
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """Answers 500 to everything."""
    handler = type("Handler", (Refusing,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}", handler.asked  # type: ignore[attr-defined]
        http.shutdown()


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("tracked"), spec=TRAINING + "trackers: [{kind: trackio, project: sums}]\n")


def with_fake(fakes: Path, seen: Path, **environment: str) -> Callable[[], None]:
    """In the worker: the package is there, and its process gets this environment."""

    def prepare() -> None:
        sys.path.insert(0, str(fakes))
        os.environ.update(environment, PYTHONPATH=str(fakes), FAKE_SEEN=str(seen))
        trackers._LAST_SECONDS = 4.0

    return prepare


def failures(where: StageDir) -> list[dict[str, Any]]:
    return events(where, "tracker_failed")


def test_a_tracker_gets_the_numbers_of_every_step_and_validation_and_nothing_else(
    tracked: Job, lora: Reference, fakes: Path, tmp_path: Path
) -> None:
    where, seen = tracked.fresh(), tmp_path / "seen"
    assert finish(start(where, with_fake(fakes, seen))) == 0, words(where)
    assert outcome(where) == lora.outcome
    calls = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [calls[0]["place"], calls[-1]["place"]] == ["init", "finish"]
    assert calls[0]["project"] == "sums"
    assert calls[0]["name"].startswith(where.run.name)
    steps = [c["step"] for c in calls if "loss" in c.get("metrics", {})]
    assert steps == list(range(1, 19))
    assert sum("validation_loss" in c.get("metrics", {}) for c in calls) == 6
    assert all(isinstance(value, float) for c in calls for value in c.get("metrics", {}).values())
    assert failures(where) == []


FAULTS = (
    *("raises in init", "raises in log", "blocks in init", "blocks in log", "blocks in finish"),
    *("dies in log", "exits in init"),
)


@pytest.mark.parametrize("fault", slow_but(["raises in log", "blocks in init"], FAULTS))
def test_whatever_a_tracker_does_the_run_ends_bit_identical_with_all_its_metrics(
    tracked: Job, lora: Reference, fakes: Path, tmp_path: Path, fault: str
) -> None:
    where = run_to_end(tracked, with_fake(fakes, tmp_path / "seen", FAKE_FAULT=fault))
    assert outcome(where) == lora.outcome
    assert len(read_steps(where.metrics)) == 18
    (told,) = failures(where)
    assert told["tracker"] == "trackio"
    assert told["lost_lines"] == (0 if fault == "blocks in finish" else 24)
    assert told["found"]


def test_a_secret_of_the_environment_is_not_told_by_a_tracker_s_error(
    tracked: Job, fakes: Path, tmp_path: Path
) -> None:
    where = tracked.fresh()
    fault = with_fake(fakes, tmp_path / "seen", FAKE_FAULT="raises in log", FAKE_API_TOKEN="hunter2")
    assert finish(start(where, fault)) == 0, words(where)
    assert "hunter2" not in where.metrics.read_text() + words(where)
    assert "token=$FAKE_API_TOKEN" in where.metrics.read_text()


def test_a_tracker_whose_server_answers_500_loses_its_lines_and_the_run_none(
    tracked: Job, lora: Reference, fakes: Path, tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    address, asked = server
    where = run_to_end(tracked, with_fake(fakes, tmp_path / "seen", FAKE_SERVER=address))
    assert outcome(where) == lora.outcome
    (told,) = failures(where)
    assert "HTTP Error 500" in told["found"]
    assert told["lost_lines"] == 24
    assert asked


def test_a_tracker_that_is_not_installed_is_told_and_the_run_goes_on(tracked: Job, lora: Reference) -> None:
    if importlib.util.find_spec("trackio"):
        pytest.skip("trackio is installed here")
    where = run_to_end(tracked)
    assert outcome(where) == lora.outcome
    (told,) = failures(where)
    assert told["found"] == "trackio is not installed: pip install trackio"


def make_stage(folder: Path) -> StageDir:
    where = StageDir(folder / "runs" / "sums-1" / "stages" / "1-sft")
    where.path.mkdir(parents=True)
    return where


def fed(where: StageDir, kind: str, **rest: Any) -> list[dict[str, Any]]:
    """Two steps and a validation, written while the tracker is fed; what is told of it."""
    told: list[dict[str, Any]] = []
    with (
        Journal(where.metrics) as metrics,
        Tracking(where, [Tracker.model_validate({"kind": kind})], lambda **event: told.append(event), **rest),
    ):
        metrics.write(step=1, loss=2.5, learning_rate=0.1, batch="0af3", time=1.0)
        metrics.write(event="validated", step=1, validation_loss=2.0)
        metrics.write(event="saved", step=1, checkpoint="checkpoint-1")
        metrics.write(step=2, loss=1.5, learning_rate=0.2, batch="0af4", time=2.0)
    return told


def test_only_numbers_leave_the_machine(tmp_path: Path) -> None:
    with Journal(tmp_path / "m") as metrics:
        metrics.write(step=1, loss=2.5, batch="0af3", note="hf_secret", is_best=True, time=1.0, odd=float("nan"))
        metrics.write(event="rejected", step=1, note="x", bytes=7)
    with (tmp_path / "m").open("ab") as file:
        file.write(b'{"step": 2, "loss": 1.')  # being written
    found = list(metric_points(tmp_path / "m", 0))
    assert [(point.step, point.values) for point in found] == [(1, {"loss": 2.5})]


def test_a_run_that_goes_on_sends_only_what_is_new(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, seen = make_stage(tmp_path), tmp_path / "seen"
    monkeypatch.syspath_prepend(fakes)
    for name, value in {"PYTHONPATH": str(fakes), "FAKE_SEEN": str(seen)}.items():
        monkeypatch.setenv(name, value)
    assert fed(where, "trackio") == []
    assert fed(where, "trackio") == []
    steps = [line["step"] for line in map(json.loads, seen.read_text().splitlines()) if line["place"] == "log"]
    assert steps == [1, 1, 2, 1, 1, 2]


def test_a_tracker_ends_by_itself_when_nobody_is_left_to_end_it(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = make_stage(tmp_path)
    monkeypatch.syspath_prepend(fakes)
    for name, value in {
        "PYTHONPATH": str(fakes),
        "FAKE_SEEN": str(tmp_path / "seen"),
        "FAKE_FAULT": "blocks in log",
    }.items():
        monkeypatch.setenv(name, value)
    with Journal(where.metrics) as metrics:
        left = Tracking(where, [Tracker(kind="trackio")], lambda **_: None, last_seconds=0.5)
        left.__enter__()
        metrics.write(step=1, loss=2.5)
        ((_, process, _),) = left._fed
        time.sleep(2)
        assert process.poll() is None
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(timeout=20) == 1


def test_the_real_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    where = make_stage(tmp_path)
    assert fed(where, "tensorboard") == [], tracker_log(where, "tensorboard").read_text()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(where.path / "tensorboard"))
    events.Reload()
    values = {
        name: [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    assert values["loss"] == [(1, 2.5), (2, 1.5)]
    assert values["validation_loss"] == [(1, 2.0)]


def test_the_real_mlflow_keeps_what_was_sent_and_survives_a_server_that_answers_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    address, asked = server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    (told,) = fed(make_stage(tmp_path / "refused"), "mlflow", last_seconds=15)
    assert told["lost_lines"] == 3
    assert asked
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = make_stage(tmp_path / "taken")
    assert fed(where, "mlflow", last_seconds=60) == [], tracker_log(where, "mlflow").read_text()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [(1, 2.5), (2, 1.5)]


def test_the_real_wandb_takes_what_is_sent_and_survives_a_server_that_answers_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    where = make_stage(tmp_path / "offline")
    assert fed(where, "wandb", last_seconds=60) == [], tracker_log(where, "wandb").read_text()
    assert list((where.path / "wandb").glob("offline-run-*"))
    address, asked = server
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    (told,) = fed(make_stage(tmp_path / "refused"), "wandb", last_seconds=8)
    assert told["lost_lines"] == 3
    assert asked
    assert "0" * 40 not in json.dumps(told)


def test_the_real_trackio_takes_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    where = make_stage(tmp_path)
    assert fed(where, "trackio", last_seconds=60) == [], tracker_log(where, "trackio").read_text()
    assert list((tmp_path / "trackio").rglob("*.db"))
