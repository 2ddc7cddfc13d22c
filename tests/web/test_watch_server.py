"""The server of the page that follows runs: what it says of a run, and that it says it to our own page alone."""

import gzip
import hashlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.checkpoint import MANIFEST
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import PipelineState, StageState, write_record
from finefit.errors import RunError
from finefit.web.linked_pages import LinkedPages
from finefit.web.runs import Runs
from finefit.web.series import Columns, TrainingSeries
from finefit.web.server import Token
from finefit.web.watch import watch_app
from tests.clients import ORIGIN, Client, client_of
from tests.runs import make_run
from tests.watched import Watched, make_watched, make_watched_pipeline

APIS = ("state", "series", "items", "plan", "log")
MADE = ("/api/run/orders-1/rows", "/api/page/report?run=orders-1", "/api/page/compare?run=orders-1")
"""What a process of its own answers."""
PAGES = ("/", "/run/orders-1", "/files/run.js", "/files/runs.js", "/files/uplot.min.js", "/files/watch.css")


@pytest.fixture(autouse=True)
def _every_request_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.web.runs.TICK_SECONDS", 0.0)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@contextmanager
def _client_of(target: Path, token: Token | None = None) -> Iterator[Client]:
    with (
        LinkedPages("127.0.0.1") as pages,
        client_of(watch_app(Runs(target), pages, token=token), token=token) as client,
    ):
        yield client


@pytest.fixture
def watched(runs: Path) -> Watched:
    found = make_watched(runs / "orders-1", results={"base": [0, 1], "checkpoint-20": [1, 1, 0]})
    found.steps(45)
    return found


@pytest.fixture
def client(watched: Watched, runs: Path) -> Iterator[Client]:
    assert watched.step == 45
    with _client_of(runs) as client:
        yield client


def _get(client: Client, what: str, name: str = "orders-1", status: int = 200, **query: Any) -> Any:
    response = client.get(f"/api/run/{name}/{what}", params=query)
    assert response.status_code == status, response.text
    return response.json()


def test_the_page_says_whether_it_learns_fits_ends_and_which_checkpoint_is_best(
    client: Client, watched: Watched
) -> None:
    with run_lock(watched.run.lock):
        found = _get(client, "state")
    answers = found["training"]["answers"]
    assert found["status"] == "running"
    assert answers["learning"]["text"] == "Yes: validation is at its lowest"
    assert answers["memory"]["text"] == "20.18 GiB of 23.53 GiB"
    assert re.fullmatch(r"In 2 min 30 s, at \d\d:\d\d", answers["end"]["text"])
    assert answers["best"]["text"].startswith("checkpoint-20: 50.0%")
    assert found["training"]["next"][:2] == ["save at step 60", "validation at step 60"]


def test_a_killed_run_is_interrupted_and_says_how_it_goes_on(client: Client, runs: Path) -> None:
    found = _get(client, "state")
    assert found["status"] == "interrupted"
    assert found["note"].endswith(f"finefit run {runs / 'orders-1'}")
    assert found["training"]["answers"]["end"]["text"] == "It does not run"


def test_a_validation_that_rises_is_a_warning(client: Client, watched: Watched) -> None:
    watched.event("validated", step=45, validation_loss=9.0)
    answer = _get(client, "state")["training"]["answers"]["learning"]
    assert (answer["level"], answer["text"]) == ("warn", "Validation no longer falls")


def test_curves_hold_every_step_with_validations_memory_and_marks(client: Client) -> None:
    found = _get(client, "series")
    assert found["steps"]["step"] == list(range(1, 46))
    assert {"loss", "smoothed_loss", "learning_rate", "grad_norm", "supervised"} <= found["steps"]["columns"].keys()
    assert found["validations"]["step"] == [20, 40]
    assert found["memory"]["columns"]["reserved_bytes"][-1] == pytest.approx(20.18 * 2**30, rel=1e-4)
    assert [mark for mark in found["marks"] if mark[1] == "saved"] == [[20, "saved"], [40, "saved"]]


def test_steps_that_a_resumed_run_repeats_are_shown_once(client: Client, watched: Watched) -> None:
    assert _get(client, "series")["steps"]["step"][-1] == 45
    watched.event("resumed", step=40, checkpoint="checkpoint-40")
    watched.step = 40
    watched.steps(42, loss=7.0)
    found = _get(client, "series")
    assert found["steps"]["step"] == list(range(1, 43))
    assert found["steps"]["columns"]["loss"][-3:] == [pytest.approx(found["steps"]["columns"]["loss"][39]), 7.0, 7.0]


def test_a_window_is_thinned_to_its_least_and_greatest_values(runs: Path) -> None:
    watched = make_watched(runs / "long-1", total_steps=3000)
    watched.save_every = 10_000
    watched.steps(999)
    watched.steps(1000, loss=50.0)
    watched.steps(3000)
    with _client_of(runs) as client:
        _get(client, "state", "long-1")
        found = _get(client, "series", "long-1", points=100)
        losses = found["steps"]["columns"]["loss"]
        assert len(losses) <= 102
        assert max(losses) == 50.0
        near = _get(client, "series", "long-1", first=995, last=1004, points=100)
    assert near["steps"]["step"] == list(range(995, 1005))
    assert near["steps"]["columns"]["loss"][5] == 50.0


def test_a_long_run_is_kept_in_little_memory_without_losing_a_spike_and_its_end_step_by_step() -> None:
    columns, steps = Columns(), range(1, 1_500_001)
    columns.add(0, {"loss": 1.0})
    for first in range(1, len(steps), 2000):
        part = range(first, first + 2000)
        columns.extend(part, {"loss": [50.0 if step in (777_777, 1_499_999) else 1.0 for step in part]})
    assert len(columns) < 400_000
    assert list(columns.steps[-60_000:]) == list(range(1_440_001, 1_500_001))
    assert list(columns.steps) == sorted(columns.steps)
    shown, values = columns.thinned(0, 2**31 - 1, 1000)
    spikes = [step for step, value in zip(shown, values["loss"], strict=True) if value == 50.0]
    assert [round(step, -4) for step in spikes] == [780_000, 1_500_000]
    columns.keep_until(700_000)
    columns.add(700_001, {"loss": 2.0})
    assert (columns.steps[-1], columns.last("loss")) == (700_001, 2.0)


def test_lines_that_are_taken_together_give_what_they_give_one_by_one(watched: Watched) -> None:
    where = watched.run.stages()[0]
    watched.steps(60, loss=None)
    watched.event("resumed", step=50, checkpoint="checkpoint-40")
    watched.step = 50
    watched.steps(55, card_watts="high")
    watched.steps(70, margin=0.5)
    for without in ({"loss": None}, {"tokens": None}, {"tokens": 0}, {"time": None}, {"supervised_tokens": None}):
        watched.event("spike", step=watched.step, found=1.0, usual=1.0)
        watched.steps(watched.step + 3, **without)
    together, alone = (TrainingSeries(where.metrics, where.memory) for _ in range(2))
    alone.steps.can_extend = alone.memory.can_extend = lambda *_: False  # type: ignore[method-assign]
    assert not together.read()
    assert not alone.read()
    assert together.thinned(0, 100, 1000) == alone.thinned(0, 100, 1000)
    assert together.events == alone.events
    assert (together.instants, together.first_loss, together.recent) == (
        alone.instants,
        alone.first_loss,
        alone.recent,
    )


def test_a_line_that_is_damaged_or_has_no_end_hides_no_other(client: Client, watched: Watched) -> None:
    metrics = watched.run.stages()[0].metrics
    with metrics.open("ab") as file:
        file.write(b'{"step": "x", "loss": 1}\n\xff\xfe\n[1]\n{"step": 1e99, "loss": NaN}\n{"step": 46, "loss"')
    found = _get(client, "series")
    assert found["steps"]["step"][-1] == 45
    assert any(event["kind"] == "damaged" for event in _get(client, "state")["training"]["events"])
    with metrics.open("ab") as file:
        file.write(b': NaN, "seconds": 1, "tokens": 5}\n')
    after = _get(client, "series")
    assert (after["steps"]["step"][-1], after["steps"]["columns"]["loss"][-1]) == (46, None)


def test_only_what_was_appended_is_read_again(watched: Watched) -> None:
    where = watched.run.stages()[0]
    series = TrainingSeries(where.metrics, where.memory)
    series.read()
    before = series.num_lines
    watched.steps(47)
    where.metrics.write_bytes(where.metrics.read_bytes().replace(b'"step": 1,', b'"step": 9,', 1))  # is not seen
    series.read()
    assert series.num_lines - before == 4
    assert list(series.steps.steps) == list(range(1, 48))


def test_items_come_with_prompt_answer_and_reference_and_can_be_only_the_wrong_ones(client: Client) -> None:
    found = _get(client, "items", task="exact_match", checkpoint="checkpoint-20")
    assert found["total"] == 3
    assert {"prompt", "answer", "reference", "scores"} <= found["items"][0].keys()
    wrong = _get(client, "items", task="exact_match", checkpoint="checkpoint-20", wrong=1)
    assert [item["item"] for item in wrong["items"]] == [2]
    assert _get(client, "items", task="../exact_match", checkpoint="checkpoint-20")["total"] == 0


def test_settings_come_with_their_sources_and_the_differences_from_another_run(client: Client, runs: Path) -> None:
    make_watched(runs / "orders-2")
    spec = runs / "orders-2" / "spec.json"
    spec.write_text(spec.read_text().replace('"rank": 4', '"rank": 8'))
    found = _get(client, "plan", against="orders-2")
    assert {"key": "device", "value": "cpu", "source": "auto"} in found["values"]
    assert found["differences"] == [{"key": "tuning.rank", "here": 4, "there": 8}]


def test_a_comparison_and_a_report_are_pages_without_a_script(client: Client, runs: Path) -> None:
    make_run(runs / "done-1", results={"base": [0, 1], "checkpoint-6": [1, 1]})
    for path in ("compare?run=done-1", "report?run=done-1"):
        response = client.get(f"/api/page/{path}")
        assert response.status_code == 200, response.text
        assert "done-1" in response.text
        assert "script-src" not in response.headers["content-security-policy"]
        assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline';")
        assert "<script" not in response.text


def test_only_pages_of_runs_that_are_there_are_made_and_a_failure_says_why(client: Client, runs: Path) -> None:
    for path in (
        "run?run=orders-1",
        "compare",
        "report?run=orders-1&run=orders-1",
        "compare?run=../x",
        "compare?run=x",
    ):
        assert client.get(f"/api/page/{path}").status_code == 404
    response = client.get("/api/page/compare?run=orders-1")
    assert (response.status_code, response.headers["content-type"]) == (422, "text/plain; charset=utf-8")
    assert f"{runs / 'orders-1'} has no checkpoint final" in response.text


def test_a_review_is_opened_once_recorded_and_ends_with_its_server(runs: Path) -> None:
    done = make_run(runs / "done-1", results={"base": [0, 1], "checkpoint-6": [1, 1]})
    with _client_of(runs) as client:
        for body in ({"runs": ["done-1"]}, {"runs": [], "is_sure": True}, {"runs": ["done-1"], "is_sure": False}):
            assert client.post("/api/review", json=body, headers=ORIGIN).status_code == 400
        asked = {"runs": ["done-1:final"], "is_sure": True}
        assert client.post("/api/review", json=asked, headers=ORIGIN).status_code == 404
        asked = {"runs": ["done-1"], "is_sure": True}
        first, again = (client.post("/api/review", json=asked, headers=ORIGIN).json() for _ in range(2))
        assert first == again
        assert first["url"].startswith("http://127.0.0.1:")
        assert httpx.get(first["url"]).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(first["url"])
    actions = [line["action"] for line in read_lines(done.path / "logs" / "actions.jsonl")]
    assert actions == ["review", "review"]


def test_stages_have_a_place_in_the_graph_of_what_they_need_with_time_and_memory(tmp_path: Path) -> None:
    runs = make_watched_pipeline(tmp_path / "runs" / "medical-1").path.parent
    with _client_of(runs) as client:
        stages = {stage["name"]: stage for stage in _get(client, "state", "medical-1")["stages"]}
        assert {name: stage["depth"] for name, stage in stages.items()} == {"sft": 0, "pairs": 0, "dpo": 1, "scores": 2}
        assert set(stages["dpo"]["needs"]) == {"sft", "pairs"}
        assert (stages["sft"]["time"], stages["sft"]["peak_bytes"]) == ("45 min 13 s", 20 * 2**30)
        assert _get(client, "state", "medical-1", stage="sft")["training"]["step"] == 120
        assert client.get("/api/run/medical-1/state?stage=sfx").status_code == 404


def test_the_newest_checkpoint_that_is_as_it_was_written_is_named(client: Client, watched: Watched) -> None:
    assert _get(client, "state")["training"]["saved"] | {"time": 0} == {
        "name": "checkpoint-40",
        "how": "verified",
        "time": 0,
    }
    watched.steps(60)
    weights = watched.run.stages()[0].checkpoints / "checkpoint-60" / "adapter_model.safetensors"
    weights.write_bytes(b"x" * weights.stat().st_size)
    assert _get(client, "state")["training"]["saved"]["name"] == "checkpoint-40"
    (weights.parent / MANIFEST).unlink()
    assert _get(client, "state")["training"]["checkpoints"][-1]["problem"].endswith("is missing")


def test_runs_are_listed_with_state_progress_and_best_score(client: Client, runs: Path) -> None:
    other = make_watched(runs / "orders-2")
    other.steps(120)
    other.end()
    (runs / "broken-1").mkdir()
    (runs / "broken-1" / "run.json").write_text("{")
    (runs / "not-a-run").mkdir()
    listed = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert listed.keys() == {"orders-1", "orders-2", "broken-1"}
    assert (listed["orders-2"]["status"], listed["orders-2"]["step"], listed["orders-2"]["best"]) == (
        "finished",
        120,
        "checkpoint-120",
    )
    assert (listed["orders-1"]["status"], listed["broken-1"]["status"]) == ("interrupted", "damaged")


def test_a_run_whose_lock_cannot_be_read_hides_no_other(client: Client, runs: Path) -> None:
    other = make_watched(runs / "orders-2")
    other.run.lock.unlink(missing_ok=True)
    other.run.lock.mkdir()
    listed = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert "run.lock is a folder" in listed["orders-2"]["note"]
    assert (listed["orders-1"]["status"], listed["orders-1"]["step"]) == ("interrupted", 45)


def test_one_run_has_its_page_at_the_address_that_it_has_among_others(watched: Watched) -> None:
    with _client_of(watched.run.path) as client:
        assert client.get("/").headers["location"] == "/run/orders-1"
        assert _get(client, "state")["name"] == "orders-1"


def test_numbers_that_json_cannot_hold_hide_neither_a_run_nor_the_list(client: Client, watched: Watched) -> None:
    watched.event("validated", step=40, validation_loss=float("inf"))
    watched.steps(46, loss=float("inf"), tokens_per_second=float("nan"))
    found = _get(client, "state")["training"]
    assert found["loss"] is None
    assert found["checkpoints"][-1]["validation_loss"] is None
    (line,) = client.get("/api/runs").json()["runs"]
    assert line["step"] == 46
    assert line["loss"] is None


def test_a_long_list_closes_no_run_that_somebody_looks_at(watched: Watched, runs: Path) -> None:
    for number in range(2, 65):
        shutil.copytree(watched.run.path, runs / f"orders-{number}", symlinks=True)
    found = Runs(runs)
    shown = found.open("orders-1")
    assert len(found.listed()) == 64
    assert found.open("orders-1") is shown


def test_a_folder_that_is_gone_is_an_error_of_the_user(client: Client, runs: Path) -> None:
    shutil.rmtree(runs)
    assert client.get("/api/runs").status_code == 422


def test_a_folder_without_runs_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run directory"):
        Runs(tmp_path)


@pytest.mark.parametrize("name", ["other", "..", "%2e%2e", "..%2f..%2fetc", ".", "orders-1%00", "%ff", "orders-1%2f.."])
@pytest.mark.parametrize("what", APIS)
def test_a_run_that_is_not_among_them_is_not_there(client: Client, name: str, what: str) -> None:
    assert client.get(f"/api/run/{name}/{what}").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/files/../server.py", "/files/%2e%2e/server.py", "/files/run.html", "/files/vendor/README.md", "/server.py"],
)
def test_no_other_file_is_served(client: Client, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "path", [*PAGES, "/api/runs", *(f"/api/run/orders-1/{what}" for what in (*APIS, "live")), *MADE]
)
def test_a_foreign_host_or_site_is_refused_everywhere(client: Client, path: str) -> None:
    assert client.get(path, headers={"Host": "evil.example:8000"}).status_code == 421
    assert client.get(path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.post(path, json={}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post(path, json={}, headers=ORIGIN).status_code == 405


def test_with_a_token_nothing_of_a_run_is_told_before_it_was_given(watched: Watched) -> None:
    token = Token(secret="a-token-of-some-length", port=8000)
    with _client_of(watched.run.path, token) as client:
        for what in (*APIS, "live"):
            assert client.get(f"/api/run/orders-1/{what}").status_code == 401
        for path in MADE:
            assert client.get(path).status_code == 401
        asked = {"runs": ["orders-1"], "is_sure": True}
        assert client.post("/api/review", json=asked, headers=ORIGIN).status_code == 401
        assert client.get("/api/runs").status_code == 401
        assert client.post("/api/login", json={"token": token.secret}, headers=ORIGIN).status_code == 204
        assert _get(client, "state")["name"] == "orders-1"


def test_a_link_in_place_of_a_log_is_not_followed(client: Client, watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    watched.run.log.unlink()
    watched.run.log.symlink_to(tmp_path / "secret")
    response = client.get("/api/run/orders-1/log")
    assert (response.status_code, "is a link" in response.text, response.text.count("secret")) == (422, True, 1)


def _fuzzed(seed: int) -> tuple[str, str, dict[str, str]]:
    """A method, an address and headers, most of them almost right."""
    draw = random.Random(seed)
    odd = ["..", "%2e%2e", "\x00", "%00", "é", "'", '"><script>', "-1", "1e9", "9" * 40, "٣", "", "a" * 300, "[", "{}"]
    names = ["orders-1", "x", *odd]
    path = draw.choice(
        ["/", "/run/{n}", "/api/run/{n}/{w}", "/files/{n}", "/api/{n}", "/{n}/{n}", "/api/run/{n}/series"]
    )
    path = path.replace("{n}", draw.choice(names)).replace("{w}", draw.choice([*APIS, *odd]))
    query = "&".join(
        f"{draw.choice(['stage', 'first', 'last', 'points', 'from', 'task', 'checkpoint', 'against', 'wrong', 'x'])}"
        f"={draw.choice([*odd, '5', 'orders-1'])}"
        for _ in range(draw.randrange(4))
    )
    headers = {"Host": draw.choice(["127.0.0.1:8000"] * 9 + ["evil.example"])}
    if draw.random() < 0.2:
        headers[draw.choice(["Origin", "Cookie", "Accept", "Sec-Fetch-Site"])] = draw.choice(
            ["http://x", "a=b", "é=", "*"]
        )
    return (
        draw.choice(["GET"] * 8 + ["POST", "HEAD"]),
        f"{path}?{query}",
        {k: v.encode().decode("latin-1") for k, v in headers.items()},
    )


def _fuzz(client: Client, seeds: range) -> None:
    for seed in seeds:
        method, path, headers = _fuzzed(seed)
        try:
            response = client.request(method, path, headers={k: v.encode("latin-1") for k, v in headers.items()})
        except httpx.InvalidURL:
            continue
        assert response.status_code < 500, (method, path, headers, response.text)
        assert "Traceback" not in response.text
        assert "/etc/" not in response.text


def test_no_request_makes_the_server_fail(client: Client) -> None:
    _fuzz(client, range(400))


@pytest.mark.slow
def test_no_request_of_ten_thousand_makes_the_server_fail(client: Client) -> None:
    _fuzz(client, range(10_000))


def test_the_front_end_is_small_asks_for_nothing_elsewhere_and_builds_no_markup_from_text() -> None:
    pages = files("finefit.web").joinpath("pages")
    own = ["run.html", "runs.html", "run.js", "runs.js", "charts.js", "page.js", "panels.js", "watch.css"]
    vendored = ["vendor/uplot.min.js", "vendor/uplot.min.css"]
    texts = {name: pages.joinpath(name).read_bytes() for name in (*own, *vendored)}
    assert sum(len(gzip.compress(text)) for text in texts.values()) < 60_000
    for name in own:
        assert not re.search(rb"https?://|innerHTML|outerHTML|insertAdjacent|style=|eval\(", texts[name]), name
    for name in vendored:
        assert not re.search(rb"innerHTML|outerHTML|insertAdjacent|eval\(|new Function", texts[name]), name


def test_vendored_files_are_those_that_were_recorded() -> None:
    vendor = files("finefit.web").joinpath("pages", "vendor")
    recorded = dict(re.findall(r"\| (uplot\S+) \|.*\| ([0-9a-f]{64}) \|", vendor.joinpath("README.md").read_text()))
    assert recorded.keys() == {"uplot.min.js", "uplot.min.css"}
    for name, sha256 in recorded.items():
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == sha256
    assert "MIT" in vendor.joinpath("uplot.LICENSE").read_text()


def _act(client: Client, asked: str, status: int, **more: Any) -> str:
    body = {"action": asked, "is_sure": True} | more
    response = client.post("/api/run/orders-1/act", json=body, headers=ORIGIN)
    assert response.status_code == status, response.text
    return response.text


def test_only_what_a_run_understands_can_be_asked_and_only_after_confirmation(client: Client, watched: Watched) -> None:
    with run_lock(watched.run.lock):
        for more in ({"is_sure": False}, {"action": "delete"}, {"action": "../save"}, {"more": 1}):
            _act(client, "save", 400, **more)
        assert client.get("/api/run/orders-1/act").status_code == 405
        assert client.post("/api/run/orders-1/act", json={}, headers={"Origin": "http://x"}).status_code == 403
        assert not watched.run.stages()[0].requests.exists()
        _act(client, "validate", 204)
    assert [path.name for path in watched.run.stages()[0].requests.iterdir()] == ["validate"]
    assert [line["action"] for line in read_lines(watched.run.path / "logs" / "actions.jsonl")] == ["validate"]


@pytest.mark.parametrize("action", ["stop", "save", "validate"])
def test_nothing_is_asked_of_a_run_that_does_not_run(client: Client, watched: Watched, action: str) -> None:
    assert "does not train now" in _act(client, action, 422)
    assert not watched.run.stages()[0].requests.exists()


def test_stop_asks_the_process_that_holds_the_run(client: Client, watched: Watched) -> None:
    holds = f"""
import signal, sys
from pathlib import Path
from finefit.artifacts.atomic import read_lines
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import PipelineState, StageState, write_record
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with run_lock(Path({str(watched.run.lock)!r})):
    print("held", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        _act(client, "stop", 204)
        assert holder.wait(timeout=20) == 3


def test_stop_ends_no_program_that_trains_in_a_thread(client: Client, watched: Watched) -> None:
    holds = f"""
import sys, threading
from pathlib import Path
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import PipelineState, StageState, write_record

def hold():
    with run_lock(Path({str(watched.run.lock)!r})):
        print("held", flush=True)
        sys.stdin.read()

threading.Thread(target=hold).start()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", holds], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"in a thread of process {holder.pid}" in _act(client, "stop", 422)
        holder.communicate()
        assert holder.returncode == 0


def test_a_stage_that_is_not_in_progress_is_asked_for_nothing(runs: Path) -> None:
    folder, other = runs / "medical-2", make_watched(runs / "medical-1")
    pipeline = make_watched(folder).run
    reused = StageState(name="sft", kind="train", place="../medical-1", status="done")
    own = StageState(name="dpo", kind="train", place="stages/1-sft", status="running")
    write_record(pipeline.state, PipelineState(stages=(reused, own)))
    with _client_of(runs) as client, run_lock(pipeline.lock):
        body = {"action": "save", "is_sure": True, "stage": "sft"}
        response = client.post("/api/run/medical-2/act", json=body, headers=ORIGIN)
    assert response.status_code == 422, response.text
    assert not other.run.stages()[0].requests.exists()
