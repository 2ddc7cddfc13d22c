"""The rows of legal-200k-twin are long, grounded, disjoint, and reproducible byte for byte."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "src" / "finefit" / "recipes" / "legal-200k-twin"
NUM_ROWS = {"train": 12, "validation": 2, "test": 3}


@cache
def rows(split: str) -> tuple[dict[str, str], ...]:
    return tuple(json.loads(line) for line in (ROWS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())


def every_row() -> list[dict[str, str]]:
    return [row for split in NUM_ROWS for row in rows(split)]


def test_every_file_is_long_and_its_summary_short() -> None:
    assert {split: len(rows(split)) for split in NUM_ROWS} == NUM_ROWS
    assert all(set(row) == {"input", "output"} for row in every_row())
    assert min(len(row["input"]) for row in every_row()) > 4_000
    assert max(len(row["output"]) for row in every_row()) < 400


@pytest.mark.parametrize("split", NUM_ROWS)
def test_a_summary_says_only_what_its_file_says(split: str) -> None:
    for row in rows(split):
        parties, outcome = row["output"].split(". ", 1)
        claimant, rest = parties.split(" sued ", 1)
        respondent = rest.split(" over ", 1)[0]
        assert f"{claimant.lower()}, claimant, against {respondent.lower()}, respondent" in row["input"].lower()
        assert outcome.split(", because ", 1)[1].rstrip(".") in row["input"]
        for amount in re.findall(r"\d[\d,]*", outcome):
            assert amount in row["input"]


def test_every_way_to_end_is_taught_and_no_file_is_like_another() -> None:
    endings = {
        re.search(r"The decision\n(The claim is (?:allowed in part|allowed|dismissed))", row["input"])
        for row in rows("train")
    }
    assert {found[1] for found in endings if found} == {
        "The claim is allowed",
        "The claim is allowed in part",
        "The claim is dismissed",
    }
    assert len({row["input"] for row in every_row()}) == len(every_row())


def test_the_splits_share_no_party_and_no_dispute() -> None:
    def told(split: str, pattern: str) -> set[str]:
        return {found for row in rows(split) for found in re.findall(pattern, row["output"])}

    for pattern in (r"^(.*?) sued", r"sued (.*?) over", r"over (.*?)\."):
        assert told("train", pattern).isdisjoint(told("validation", pattern) | told("test", pattern))
        assert told("validation", pattern).isdisjoint(told("test", pattern))
