"""Smatch on published graphs, and on files with the quirks of real annotators; skipped where they are not there."""

import random
from pathlib import Path

import pytest

from finefit.data.tasks.amr.files import read_graphs
from finefit.data.tasks.amr.notation import parse
from finefit.data.tasks.amr.task import smatch_of_files
from finefit.errors import DataError
from finefit.spec.tasks import Amr
from tests.data.amr.perturbed import perturbed
from tests.data.amr.test_smatch import corpus_f1, matched, of_the_package

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
TRAIN, TEST = DATA / "amr_qald9" / "qald-9-amr-train.txt", DATA / "amr_qald9" / "qald-9-amr-test.txt"
pytestmark = pytest.mark.skipif(not TEST.exists(), reason="the published graphs are not here")


@pytest.mark.parametrize(("path", "count"), [(TEST, 150), (TRAIN, 408)])
def test_every_published_graph_matches_itself_wholly(path: Path, count: int) -> None:
    found = smatch_of_files(path, path, Amr(kind="amr"))
    assert len(found) == count
    assert all(one.counts["matched"] == one.counts["predicted"] == one.counts["gold"] > 0 for _, one in found)


@pytest.mark.parametrize("name", ["vlsp_test_ground_truth.txt", "vlsp_train.txt"])
def test_quirky_files_match_themselves_once_a_recorded_repair_is_on(name: str) -> None:
    path = DATA / "seed_shapes" / name
    found = smatch_of_files(path, path, Amr(kind="amr", repair_gold=True))
    assert len(found) == path.read_text(encoding="utf-8").count("::snt")
    assert all(one.counts["matched"] == one.counts["predicted"] == one.counts["gold"] > 0 for _, one in found)
    if name == "vlsp_train.txt":
        with pytest.raises(DataError, match="twice"):
            smatch_of_files(path, path, Amr(kind="amr"))


def test_a_dropped_graph_raises(tmp_path: Path) -> None:
    blocks = TEST.read_text(encoding="utf-8").split("\n\n")
    (tmp_path / "short.txt").write_text("\n\n".join(blocks[:50] + blocks[51:]), encoding="utf-8")
    with pytest.raises(DataError):
        smatch_of_files(tmp_path / "short.txt", TEST, Amr(kind="amr"))


def test_a_hundred_perturbed_graphs_score_as_the_package_scores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    drawn = [
        (perturbed(gold, chance), gold)
        for gold in chance.sample([parse(block.graph) for block in read_graphs(TRAIN)], 100)
    ]
    theirs = [of_the_package(predicted, gold, monkeypatch) for predicted, gold in drawn]
    ours = [(one.matched, one.predicted, one.gold) for one in (matched(predicted, gold) for predicted, gold in drawn)]
    print(f"\nSmatch of 100 perturbed graphs: {corpus_f1(ours):.3f}, by the package {corpus_f1(theirs):.3f}")
    assert corpus_f1(ours) == pytest.approx(corpus_f1(theirs), abs=5e-4)
    assert 0.6 < corpus_f1(ours) < 0.95
