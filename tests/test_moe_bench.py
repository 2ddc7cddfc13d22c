"""Rows of the benchmark of mixtures, measured again one by one."""

import json
from pathlib import Path
from typing import Any

from bench.moe import CASES, renewed

RESULT = Path(__file__).parents[1] / "bench/results/moe.json"


def _row(at: int, card: str) -> dict[str, Any]:
    return {
        "config": CASES[at].name,
        "date": "2026-01-01",
        "card": card,
        "versions": {"torch": card},
        "even": {"loss": at},
    }


def test_a_row_that_is_measured_again_says_on_which_card_and_the_others_stay_as_they_were() -> None:
    before = [_row(0, "old"), _row(2, "old"), {**_row(1, "old"), "config": "no more"}]
    assert renewed(before, _row(2, "new")) == [_row(0, "old"), _row(2, "new")]
    assert renewed(before, _row(1, "new")) == [_row(0, "old"), _row(1, "new"), _row(2, "old")]


def test_every_committed_row_says_what_it_was_measured_with() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert list(result) == ["cases"]
    assert [row["config"] for row in result["cases"]] == [case.name for case in CASES]
    for row in result["cases"]:
        assert row["card"]
        assert row["date"]
        assert set(row["versions"]) == {"torch", "transformers", "peft"}
