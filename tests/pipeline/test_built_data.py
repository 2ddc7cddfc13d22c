"""What rows are built with is a part of what a preparation is known by: another method, and another text of the user's own file, make another one."""

from pathlib import Path

import pytest

from finefit.data.items import read_items
from finefit.errors import SpecError
from finefit.pipeline.data import prepare_data
from finefit.spec.load import load_spec
from tests.conftest import make_project

GRAPHS = "#::snt {a}\n(a / b :quant 3)\n\n#::snt {b}\n(c / d)\n"
FORM = """\
METRICS = {"same": "rate"}
def build(prompt, answer): return f"PREFIX {prompt}", answer
def extract(answer): return answer
def score(found, reference): return {"same": found == reference}
"""
OWN = "data.task={kind: python, path: form.py}"


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of graphs, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = make_project(tmp_path / "project")
    for split in ("train", "validation", "test"):
        (spec.parent / f"{split}.txt").write_text(GRAPHS.format(a=f"one {split}", b=f"two {split}"))
    spec.write_text(spec.read_text().replace(".jsonl", ".txt"))
    (spec.parent / "form.py").write_text(FORM)
    return spec


def prepared(spec: Path, *overrides: str) -> Path:
    return prepare_data(load_spec(spec, overrides), spec.parent, spec.parent / "model").folder


def test_another_method_makes_another_preparation(graphs: Path) -> None:
    methods = ("null", "amr", "{kind: amr, method: mtup2}", "{kind: amr, repair_gold: true}")
    assert len({prepared(graphs, f"data.task={method}") for method in methods}) == len(methods)
    assert prepared(graphs, "data.task=amr") == prepared(graphs, "data.task={kind: amr, method: baseline}")


def test_a_file_of_the_users_own_builds_every_split_and_is_known_by_its_content(graphs: Path) -> None:
    before = prepared(graphs, OWN)
    assert [row.prompt[-1].content for row in read_items(before / "test.jsonl")] == [
        "PREFIX one test",
        "PREFIX two test",
    ]
    assert prepared(graphs, OWN) == before
    (graphs.parent / "form.py").write_text(FORM.replace("PREFIX", "OTHER"))
    after = prepared(graphs, OWN)
    assert after != before
    assert read_items(after / "test.jsonl")[0].prompt[-1].content == "OTHER one test"


def test_a_file_of_the_users_own_that_is_not_there_is_told(graphs: Path) -> None:
    (graphs.parent / "form.py").unlink()
    with pytest.raises(SpecError, match=r"data\.task: form\.py cannot be read: No such file"):
        prepared(graphs, OWN)
