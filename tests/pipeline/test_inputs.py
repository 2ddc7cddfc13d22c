import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finefit.errors import DataError
from finefit.pipeline.inputs import between, open_inputs, relocate
from finefit.spec.load import load_spec
from tests.conftest import make_model_folder, make_rows, write_jsonl


def _digest(spec_path: Path, *overrides: str) -> str:
    return open_inputs(load_spec(spec_path, overrides), spec_path.parent, spec_path.parent / "runs" / "tiny").digest


def test_where_files_lie_does_not_matter(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(project.parent, moved)
    (moved / "train.jsonl").rename(moved / "rows.jsonl")
    assert _digest(moved / "spec.yaml", "data.train.0.path=rows.jsonl") == _digest(project)


def test_a_comment_in_the_spec_does_not_matter(project: Path) -> None:
    before = _digest(project)
    project.write_text("# a comment\n" + project.read_text())
    assert _digest(project) == before


def _other_rows(folder: Path) -> None:
    write_jsonl(folder / "test.jsonl", make_rows(5, seed=3))


def _other_weights(folder: Path) -> None:
    make_model_folder(folder / "model", seed=1, dropout=0.1)


def _other_template(folder: Path) -> None:
    template = folder / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", "<|end|> "))


@pytest.mark.parametrize("change", [_other_rows, _other_weights, _other_template])
def test_what_files_hold_does_matter(project: Path, change: Callable[[Path], None]) -> None:
    before = _digest(project)
    change(project.parent)
    assert _digest(project) != before


@pytest.mark.parametrize("override", ["seed=8", "global_batch=8", "schedule.epochs=3", "save.keep=3", "evaluate=[]"])
def test_what_is_asked_does_matter(project: Path, override: str) -> None:
    assert _digest(project, override) != _digest(project)


@pytest.mark.parametrize(
    "override", ["trackers=[{kind: tensorboard}]", "launcher={kind: slurm, partition: long, minutes: 9}"]
)
def test_who_starts_it_and_who_is_told_does_not_matter(project: Path, override: str) -> None:
    assert _digest(project, override) == _digest(project)


def test_on_how_many_nodes_does_matter_whoever_starts_them(project: Path) -> None:
    started = open_inputs(load_spec(project), project.parent, project.parent / "runs" / "tiny", nodes=2).digest
    assert started == _digest(project, "launcher={kind: slurm, nodes: 2}") != _digest(project)


def test_all_that_is_wrong_with_the_files_is_told_at_once(project: Path) -> None:
    (project.parent / "validation.jsonl").unlink()
    (project.parent / "test.jsonl").rename(project.parent / "test.doc")
    with pytest.raises(DataError) as caught:
        _digest(project, "data.test.path=test.doc")
    assert "validation.jsonl does not exist" in caught.value.problem
    assert "test.doc has no known extension" in caught.value.problem
    assert len(caught.value.remedy.splitlines()) == 2


def test_all_that_is_wrong_with_the_records_is_told_at_once(project: Path) -> None:
    (project.parent / "train.jsonl").write_text('{"question": "Why?"}\n')
    (project.parent / "test.jsonl").write_text("")
    with pytest.raises(DataError) as caught:
        _digest(project)
    assert "train.jsonl: the shape of its records is not recognised" in caught.value.problem
    assert "test.jsonl holds no rows" in caught.value.problem
    assert len(caught.value.remedy.splitlines()) == 2


def test_a_moved_path_names_the_same_file(tmp_path: Path) -> None:
    move = between(tmp_path / "a", tmp_path / "b" / "c")
    assert move("rows.jsonl") == "../../a/rows.jsonl"
    assert move(str(tmp_path / "b" / "x")) == "../x"


def test_relocation_changes_paths_and_nothing_else(project: Path) -> None:
    spec = load_spec(project)
    moved = relocate(spec, lambda path: f"../{path}")
    assert moved.data.train[0].path == "../train.jsonl"
    assert relocate(moved, lambda path: path.removeprefix("../")) == spec


def test_relocation_moves_every_test_source_and_the_roots_of_images(project: Path) -> None:
    tests = "data.test=[{path: a.json, images_root: pictures}, {path: b.json, fields: {join: c.json}}]"
    spec = load_spec(project, (tests, "data.validation={path: v.json, images_root: held}"))
    moved = relocate(spec, lambda path: f"../{path}")
    first, second = moved.data.test_sources()
    assert (first.path, first.images_root, second.path, second.images_root) == (
        "../a.json",
        "../pictures",
        "../b.json",
        None,
    )
    assert second.fields.join == "../c.json"
    assert [source.images_root for source in moved.data.sources()["validation"]] == ["../held"]
    assert [source.label for source in moved.data.test_sources()] == ["a", "b"]


def test_a_file_that_moves_to_another_source_makes_another_run(project: Path) -> None:
    """Its rows are weighed differently, though all files are the same."""
    folder = project.parent
    for name, seed in (("x/a", 3), ("x/b", 4), ("y/c", 5)):
        (folder / name).parent.mkdir(exist_ok=True)
        write_jsonl(folder / f"{name}.jsonl", make_rows(3, seed=seed))
    train = "data.train=[{path: 'x/*.jsonl'}, {path: 'y/*.jsonl', weight: 3}]"
    before = _digest(project, train)
    (folder / "x" / "b.jsonl").rename(folder / "y" / "b.jsonl")
    assert _digest(project, train) != before
