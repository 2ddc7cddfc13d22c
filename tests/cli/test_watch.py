"""`finefit watch`: what anybody sees of a run from its records alone."""

import json
import signal
import time
from pathlib import Path

import pytest

from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.web.linked_pages import LinkedPages
from finefit.web.runs import Runs
from finefit.web.watch import watch_app
from tests.cli.conftest import Finefit, process, rewrite, started
from tests.clients import client_of


@pytest.mark.usefixtures("finished")
def test_where_a_finished_run_stands_is_one_document(finefit: Finefit) -> None:
    document = finefit("watch", "runs/tiny-1", "--json").document
    assert (document["status"], document["pid"], document["result"]["step"]) == ("finished", None, 12)
    assert Path(document["checkpoints"]).is_dir()


@pytest.mark.usefixtures("finished")
def test_a_finished_run_shows_its_scores_and_where_its_model_lies(finefit: Finefit) -> None:
    shown = finefit("watch", "runs/tiny-1").out.splitlines()
    assert any(line.startswith("json_match, 95 %") for line in shown)
    model = next(line.split()[1] for line in shown if line.startswith("model "))
    assert (Path(model) / "adapter_config.json").is_file()
    assert "an adapter of model: load it with peft" in "\n".join(shown)
    assert shown[-1] == "runs/tiny-1 is finished"


def test_a_run_that_was_killed_is_stopped_and_says_how_to_go_on(finished: Path, finefit: Finefit) -> None:
    rewrite(finished / "runs/tiny-1/run.json", ('"finished"', '"running"'))
    assert finefit("watch", "runs/tiny-1").out.endswith("runs/tiny-1 is stopped\nnext     finefit run runs/tiny-1\n")
    assert finefit("watch", "runs/tiny-1", "--json").document["status"] == "stopped"


@pytest.mark.slow
def test_a_detached_run_can_be_followed_at_once_and_to_its_end(folder: Path, finefit: Finefit) -> None:
    rewrite(folder / "spec.yaml", ("evaluate:", "# evaluate:"))
    detached = process("run", "spec.yaml", "--detach", "--json", cwd=folder)
    assert detached.code == 0
    assert detached.document["status"] == "running"
    now = finefit("watch", "runs/tiny-1", "--json").document
    assert (now["status"], now["pid"]) == ("running", detached.document["pid"])
    shown = finefit("watch", "runs/tiny-1").out
    assert "step 12: validation loss" in shown
    assert "step 12/12" in shown
    assert shown.endswith("runs/tiny-1 is finished\n")
    assert "step 12/12" in (folder / "runs/tiny-1/logs/detached.log").read_text()


def test_ctrl_c_leaves_the_run_alone(finished: Path) -> None:
    """A holder of the lock stands for the run that goes on."""
    rewrite(finished / "runs/tiny-1/run.json", ('"finished"', '"running"'))
    with run_lock(finished / "runs/tiny-1/run.lock"), started("watch", "runs/tiny-1", cwd=finished) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith("step 12/12")
        time.sleep(0.2)
        watcher.send_signal(signal.SIGINT)
        out, err = watcher.communicate(timeout=30)
    assert (watcher.returncode, out, err) == (0, "runs/tiny-1 continues\n", "")
    assert json.loads((finished / "runs/tiny-1/run.json").read_text())["status"] == "running"


def test_the_page_shows_training_rows_as_the_model_sees_them_and_which_text_is_supervised(finished: Path) -> None:
    where = stage_of(RunDir(finished / "runs" / "tiny-1"))
    with LinkedPages("127.0.0.1") as pages, client_of(watch_app(Runs(where.run), pages)) as client:
        response = client.get("/api/run/tiny-1/rows?from=1")
        assert client.get("/api/run/tiny-1/rows?from=x").status_code == 400
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["total"] == read_record(where.stage, Stage).num_rows
    assert [row["title"] for row in found["rows"]] == [f"example {number}" for number in range(2, 7)]
    for row in found["rows"]:
        (prompt, is_prompt_supervised), *rest = row["pieces"]
        assert prompt
        assert not is_prompt_supervised
        assert [text for text, is_supervised in rest if is_supervised]
