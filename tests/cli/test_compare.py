"""`finefit compare` on real runs of the tiny model, and on what is none."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import STAGE, Finefit, process, rewrite
from tests.runs import make_run

RUN = "runs/tiny-1"


@pytest.mark.usefixtures("finished")
def test_a_run_alone_is_compared_with_what_it_started_from(finefit: Finefit) -> None:
    answer = finefit("compare", RUN, "--json")
    assert answer.code == 0, answer.err
    found = answer.document
    assert [side["name"] for side in found["sides"]] == ["tiny-1:base", "tiny-1:final"]
    assert found["verdict"] == "one setting differs: checkpoint"
    (task,) = found["tasks"]
    assert (task["task"], task["pairings"][0]["n"]) == ("json_match", 5)
    assert [change["metric"] for change in task["pairings"][0]["changes"]] == ["all_fields", "fields"]
    assert {row["what"] for row in found["foretold"]} >= {"peak memory", "time per step", "training time"}


def test_two_real_runs_give_a_page_a_table_and_a_document(finished: Path, finefit: Finefit) -> None:
    done = process(
        "run", "spec.yaml", "--new", "--set", "tuning.rank=2", "--set", "save.every=4 steps", "--json", cwd=finished
    )
    assert done.code == 0, done.err
    answer = finefit(
        "compare", RUN, "runs/tiny-2", "--varies", "tuning.rank", "--html", "page.html", "--markdown", "table.md"
    )
    assert answer.code == 0, answer.err
    assert "only what was declared differs: tuning.rank" in answer.out
    assert "without effect on a score: save.every" in answer.out
    assert "page     page.html" in answer.out
    assert (finished / "page.html").read_text(encoding="utf-8").count("<svg") == 5
    assert "| tuning.rank | 4 | 2 |" in (finished / "table.md").read_text(encoding="utf-8")
    found = finefit("compare", RUN, "runs/tiny-2", "--json").document
    assert [row["key"] for row in found["differing"]] == ["tuning.rank"]


def test_a_copied_run_is_compared_where_it_lies(finished: Path, finefit: Finefit) -> None:
    shutil.copytree(finished / RUN, finished / "elsewhere" / "tiny-1", symlinks=True)
    assert (
        finefit("compare", RUN, "elsewhere/tiny-1", "--json").document["verdict"]
        == "nothing that can change a score differs but chance"
    )


@pytest.mark.usefixtures("finished")
def test_mistakes_are_the_users_to_mend(finefit: Finefit) -> None:
    for arguments, words in (
        ((".", RUN), "is no run directory"),
        ((RUN, RUN), "named twice"),
        ((RUN, "--task", "rouge"), "no two of them were scored on rouge"),
        ((f"{RUN}:7",), f"{RUN} has no checkpoint 7"),
        ((RUN, "--html", "no/such/page.html"), "there is no folder"),
    ):
        answer = finefit("compare", *arguments)
        assert (answer.code, answer.out) == (2, ""), arguments
        assert words in answer.err


def test_an_error_is_a_document_too(tmp_path: Path, finefit: Finefit) -> None:
    answer = finefit("compare", tmp_path, "--json")
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "RunError"


def test_a_damaged_record_is_named(finished: Path, finefit: Finefit) -> None:
    rewrite(finished / RUN / STAGE / "stage.json", ('"version": 1', '"version": 99'))
    answer = finefit("compare", RUN)
    assert answer.code == 2
    assert "is no Stage record of this version" in answer.err


def test_comparing_loads_no_torch(tmp_path: Path) -> None:
    """Nor does it write anything into the runs."""
    runs = [make_run(tmp_path / name, results={"checkpoint-6": (1, 0, 1)}) for name in ("a-1", "b-1")]
    before = {path: path.lstat().st_mtime_ns for run in runs for path in run.path.rglob("*")}
    code = (
        "import sys\nfrom finefit.cli import app\n"
        f"app(['compare', {str(runs[0].path)!r}, {str(runs[1].path)!r}, '--html', 'p.html', '--json'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 1
    assert {path: path.lstat().st_mtime_ns for run in runs for path in run.path.rglob("*")} == before
