"""DPO as a user meets it."""

from pathlib import Path

import pytest

from finefit.artifacts.atomic import read_steps
from finefit.artifacts.rundir import RunDir
from tests.cli.conftest import Finefit
from tests.conftest import make_rows, write_jsonl
from tests.pairs import make_pairs_project

DEMO = Path(__file__).resolve().parents[3] / "shared" / "data" / "llamafactory" / "dpo_en_demo.json"


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_pairs_project(tmp_path / "project").parent
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("pairs")
def test_a_check_shows_both_sides_and_what_it_proved(finefit: Finefit) -> None:
    answer = finefit("check", "spec.yaml", "--show", "1")
    assert answer.code == 0, answer.out
    assert "22 records; 22 used" in answer.out
    assert (
        answer.out.index("example 1, preferred")
        < answer.out.index("⟦7")
        < answer.out.index("example 1, rejected")
        < answer.out.index("⟦2")
    )
    assert "gradients   all 28 trained tensors get a gradient" in answer.out


def test_rows_without_a_rejected_answer_are_refused(pairs: Path, finefit: Finefit) -> None:
    write_jsonl(pairs / "train.jsonl", make_rows(22))
    answer = finefit("check", "spec.yaml")
    assert answer.code == 2
    assert "train.jsonl holds single answers, and objective dpo learns from pairs" in answer.err
    assert "fields: {prompt: ..., chosen: ..., rejected: ...}" in answer.err


def test_a_run_ends_with_accuracy_and_margin(pairs: Path, finefit: Finefit) -> None:
    answer = finefit("run", "spec.yaml")
    assert answer.code == 0, answer.err
    assert "accuracy 100.0%, margin" in answer.out
    (where,) = RunDir(pairs / "runs" / "tiny-1").stages()
    assert where.path.name == "1-dpo"
    assert len(read_steps(where.metrics)) == 18


@pytest.mark.skipif(not DEMO.exists(), reason="the shared data are not beside the repository")
def test_a_public_file_of_pairs_is_understood(pairs: Path, finefit: Finefit) -> None:
    (pairs / "pairs.json").symlink_to(DEMO)
    sources = ("--set", "data={train: [{path: pairs.json}], too_long: drop, drop_at_most: 0.9}")
    answer = finefit("check", "spec.yaml", *sources, "--json")
    assert answer.code == 0, answer.out
    (source,) = answer.document["ledger"]["sources"]
    assert (source["shape"], source["read"]) == ("preference pairs", 300)
    assert source["used"] + sum(source["dropped"].values()) == 300
