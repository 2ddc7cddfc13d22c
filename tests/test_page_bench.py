"""The benchmark of the page of runs: its committed result, and its small form."""

import json
import shutil
from pathlib import Path

import pytest

from bench.page import PARTS, SMALL, goals_met, measure, table

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench/results/page.json"


def test_the_committed_result_is_what_the_document_says_and_meets_the_goals_that_other_work_does_not_touch() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert table(found) in (ROOT / "docs/watch.md").read_text(encoding="utf-8")
    assert found["goals_met"] == goals_met(found)
    assert found["goals_met"]["server_mib"]
    assert found["goals_met"]["first_paint_ms"]
    assert found["goals_met"]["viewers_share_of_processors"]
    assert found["list"]["later"]["median_ms"] < found["goals"]["list_ms"]
    assert found["list"]["first_processor_ms"] < found["goals"]["list_ms"]
    assert found["machine"]
    assert {"starlette", "uvicorn", "playwright"} <= found["versions"].keys()
    assert all(found[part]["date"] for part in PARTS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_the_small_form_runs_and_leaves_parts_that_were_not_asked_for_as_they_were(tmp_path: Path) -> None:
    out = tmp_path / "page.json"
    out.write_text(json.dumps({"viewers": {"server_peak_mib": 1.0, "server_share_of_processors": 0.001}}))
    measure(out, SMALL, ["long", "list"])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["viewers"] == {"server_peak_mib": 1.0, "server_share_of_processors": 0.001}
    assert found["long"]["metric_lines"] == SMALL.steps
    assert found["long"]["refresh"]["read_bytes"] < 4 * found["long"]["refresh"]["appended_bytes"]
    assert found["list"]["runs"] == SMALL.runs
    assert found["long"]["server_peak_mib"] < 150
