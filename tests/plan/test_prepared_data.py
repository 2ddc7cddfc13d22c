"""The data of a spec is prepared once and kept by content; what only judges the result does not make another one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Preparation
from finefit.data.examples import Examples
from finefit.data.prepare import prepare
from finefit.data.rows import read_items
from finefit.errors import DataError, RunError, SpecError
from finefit.facts.files import finefit_cache, sha256_of
from finefit.plan import prepared_data
from finefit.plan.prepared_data import RECORD, PreparedData, find_sources, missing, prepare_data, present
from finefit.spec.data import Data
from finefit.spec.load import load_spec
from finefit.spec.models import FolderModel, Full
from finefit.spec.schema import AdamW, Spec
from tests.conftest import make_project, make_rows, write_jsonl
from tests.data.image_rows import asked, draw
from tests.pairs import make_pairs_project
from tests.vision_models import make_vlm


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with every preparation; the cache is empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders: list[Path] = []

    def counted(*arguments: Any, folder: Path, **named: Any) -> Preparation:
        folders.append(folder)
        return prepare(*arguments, folder=folder, **named)

    monkeypatch.setattr("finefit.data.prepare.prepare", counted)
    return folders


def _prepare(spec_path: Path, *overrides: str) -> PreparedData:
    return prepare_data(load_spec(spec_path, overrides), spec_path.parent, spec_path.parent / "model")


def _kept() -> list[Path]:
    """Hidden ones too: nothing half-made may stay."""
    root = finefit_cache() / "prepared"
    return sorted(root.iterdir()) if root.exists() else []


def test_a_preparation_is_made_once_and_read_again(project: Path, made: list[Path]) -> None:
    first, second = _prepare(project), _prepare(project)
    assert len(made) == 1
    assert second == first
    assert _kept() == [first.folder]
    assert {name: sha256_of(first.path(name)) for name in first.record.files} == first.record.files


def test_an_equal_project_elsewhere_shares_it(project: Path, tmp_path: Path, made: list[Path]) -> None:
    moved = shutil.copytree(project.parent, tmp_path / "moved")
    assert _prepare(moved / "spec.yaml").folder == _prepare(project).folder
    assert len(made) == 1


@pytest.mark.parametrize(
    "override",
    [
        "data.bad_rows=drop",
        "data.drop_at_most=0.5",
        "data.cut_at_most=0.9",
        "data.packing=none",
        "optimizer.lr=0.01",
        "global_batch=2",
        "name=other",
    ],
)
def test_what_only_judges_or_comes_later_makes_no_other(project: Path, made: list[Path], override: str) -> None:
    assert _prepare(project, override).folder == _prepare(project).folder
    assert len(made) == 1


@pytest.mark.parametrize(
    "override",
    [
        "seed=8",
        "data.max_tokens=1000",
        "data.too_long=drop",
        "data.turns=last",
        "data.overlap=drop",
        "data.template=plain",
        "data.template_options={style: brief}",
        "data.train.0.weight=2",
        "data.train.0.limit=9",
        "data.validation={share: 0.2}",
        "data.test=null",
    ],
)
def test_every_setting_that_a_row_depends_on_makes_another(project: Path, made: list[Path], override: str) -> None:
    assert _prepare(project, override).folder != _prepare(project).folder
    assert len(made) == 2


def _another_row(folder: Path) -> None:
    write_jsonl(folder / "validation.jsonl", make_rows(4, seed=3))


def _another_template(folder: Path) -> None:
    template = folder / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", "<|end|> "))


def _another_vocabulary(folder: Path) -> None:
    tokenizer = folder / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|system|>", "<|sys|>"))


@pytest.mark.parametrize("change", [_another_row, _another_template, _another_vocabulary])
def test_other_content_makes_another(project: Path, made: list[Path], change: Callable[[Path], None]) -> None:
    before = _prepare(project)
    change(project.parent)
    assert _prepare(project).folder != before.folder
    assert len(made) == 2


def _flip(folder: Path) -> None:
    content = bytearray((folder / "train.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "train.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [lambda folder: (folder / RECORD).write_text("{"), lambda folder: (folder / "train.safetensors").unlink(), _flip],
)
def test_a_damaged_preparation_is_made_again(project: Path, made: list[Path], spoil: Callable[[Path], object]) -> None:
    first = _prepare(project)
    spoil(first.folder)
    assert _prepare(project) == _prepare(project) == first
    assert len(made) == 2


def test_a_preparation_that_fails_leaves_nothing_behind(project: Path, made: list[Path]) -> None:
    write_jsonl(project.parent / "train.jsonl", [{"question": "Why?", "answer": "So.", "response": "Because."}])
    with pytest.raises(
        DataError, match=r"train\.jsonl may have its prompt in question and its answer in answer or response"
    ):
        _prepare(project)
    assert len(made) == 1
    assert _kept() == []


@pytest.mark.usefixtures("made")
def test_only_the_last_used_are_kept(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_data, "_MAX_ENTRIES", 2)
    first, second = _prepare(project, "seed=1"), _prepare(project, "seed=2")
    _prepare(project, "seed=1")
    third = _prepare(project, "seed=3")
    assert set(_kept()) == {first.folder, third.folder} != {second.folder}


def test_files_that_are_not_there_are_told_all_at_once(project: Path) -> None:
    for name in ("train", "test"):
        (project.parent / f"{name}.jsonl").unlink()
    spec = load_spec(project)
    assert missing(spec.data, project.parent) == ("train.jsonl", "test.jsonl")
    assert present(spec.data, project.parent).test is None
    assert present(spec.data, project.parent).validation == spec.data.validation
    with pytest.raises(DataError, match=r"train\.jsonl does not exist (.|\n)*test\.jsonl does not exist"):
        find_sources(spec.data, project.parent)


def test_a_joined_file_is_one_of_the_sources_own(project: Path) -> None:
    write_jsonl(project.parent / "answers.jsonl", [{"question_id": 1, "answer": "4"}])
    spec = load_spec(project, ("data.train.0.fields={prompt: question, answer: answer, join: answers.jsonl}",))
    (files,) = find_sources(spec.data, project.parent)["train"]
    assert [path.name for path in files] == ["train.jsonl", "answers.jsonl"]
    (project.parent / "answers.jsonl").unlink()
    with pytest.raises(DataError, match=r"answers\.jsonl does not exist"):
        find_sources(spec.data, project.parent)


@pytest.mark.usefixtures("made")
def test_what_a_killed_process_left_is_removed_after_a_day_and_not_before(project: Path) -> None:
    root = finefit_cache() / "prepared"
    old, young = root / ".staging-old", root / ".staging-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    found = _prepare(project)
    assert _kept() == sorted([young, found.folder])


def test_a_cache_that_cannot_be_written_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RunError, match="cannot be written") as caught:
        _prepare(project)
    assert "XDG_CACHE_HOME" in caught.value.remedy


def test_a_file_that_changes_while_it_is_read_is_not_kept_under_its_old_name(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def changing(*arguments: Any, **named: Any) -> Preparation:
        found = prepare(*arguments, **named)
        write_jsonl(project.parent / "train.jsonl", make_rows(3))
        return found

    monkeypatch.setattr("finefit.data.prepare.prepare", changing)
    with pytest.raises(DataError, match="changed while it was read"):
        _prepare(project)
    assert _kept() == []


def test_a_name_that_is_no_path_and_a_glob_without_files_are_missing(project: Path) -> None:
    train = f"data.train=[{{path: {'x' * 300}.jsonl}}, {{path: 'parts/*.jsonl'}}]"
    assert missing(load_spec(project, (train,)).data, project.parent) == ("x" * 300 + ".jsonl", "parts/*.jsonl")


def test_pairs_for_dpo_are_another_preparation_than_their_preferred_answers(tmp_path: Path, made: list[Path]) -> None:
    project = make_pairs_project(tmp_path / "project")
    fields = "data={train: [{path: train.jsonl, fields: {prompt: prompt, answer: chosen}}]}"
    both, single = _prepare(project), _prepare(project, "objective={kind: sft}", fields)
    assert len(made) == 2
    assert both.record.lengths is not None
    assert single.record.lengths is not None
    assert (both.record.lengths.sides, single.record.lengths.sides) == (2, 1)
    found = both.efficiency(load_spec(project, ()), Levers(micro_batch=2, packing=True))
    assert found is not None
    assert found.own == 1
    with pytest.raises(DataError, match="objective dpo learns from pairs"):
        _prepare(project, fields)


# Prepared rows with images are used again while every image is what it was, and prepared anew when one is not.


@pytest.fixture
def image_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_vlm("llava", tmp_path / "model")
    draw(tmp_path, "a.png", 1)
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png"), asked(1, "b.png")])
    return tmp_path


def prepared(folder: Path) -> PreparedData:
    spec = Spec(
        name="seeing",
        model=FolderModel(kind="folder", path="model"),
        tuning=Full(kind="full"),
        data=Data.model_validate({"train": [{"path": "a.jsonl"}]}, strict=False),
        optimizer=AdamW(lr=1e-3),
    )
    return prepare_data(spec, folder, folder / "model")


def shown(found: PreparedData) -> list[str]:
    return [ref.sha256 for example in Examples(found.path("train.safetensors")) for ref in example.images]


def stamp(found: PreparedData) -> int:
    """Other where the folder was filled anew."""
    return found.path("train.safetensors").stat().st_ino


def test_rows_are_prepared_anew_when_an_image_was_changed_or_mended_and_only_then(image_project: Path) -> None:
    first = prepared(image_project)
    assert [fault.count for fault in first.record.problems] == [1]
    assert stamp(prepared(image_project)) == stamp(first)
    (old,) = shown(first)
    draw(image_project, "a.png", 2)
    (changed,) = shown(prepared(image_project))
    assert changed != old
    draw(image_project, "b.png", 3)
    mended = prepared(image_project)
    assert (mended.record.problems, len(shown(mended))) == ((), 2)
    assert len({first.record.images_sha256, mended.record.images_sha256}) == 2


def test_a_copy_of_a_project_is_prepared_from_its_own_images(image_project: Path) -> None:
    prepared(image_project)
    copy = image_project / "copy"
    copy.mkdir()
    for name in ("a.jsonl", "a.png"):
        (copy / name).write_bytes((image_project / name).read_bytes())
    (copy / "model").symlink_to(image_project / "model")
    (ref,) = [ref for example in Examples(prepared(copy).path("train.safetensors")) for ref in example.images]
    assert ref.path == str(copy / "a.png")


# What rows are built with is a part of what a preparation is known by: another method, and another text of the user's
# own file, make another one.

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


def prepared_built(spec: Path, *overrides: str) -> Path:
    return prepare_data(load_spec(spec, overrides), spec.parent, spec.parent / "model").folder


def test_another_method_makes_another_preparation(graphs: Path) -> None:
    methods = ("null", "amr", "{kind: amr, method: mtup2}", "{kind: amr, repair_gold: true}")
    assert len({prepared_built(graphs, f"data.task={method}") for method in methods}) == len(methods)
    assert prepared_built(graphs, "data.task=amr") == prepared_built(graphs, "data.task={kind: amr, method: baseline}")


def test_a_file_of_the_users_own_builds_every_split_and_is_known_by_its_content(graphs: Path) -> None:
    before = prepared_built(graphs, OWN)
    assert [row.prompt[-1].content for row in read_items(before / "test.jsonl")] == [
        "PREFIX one test",
        "PREFIX two test",
    ]
    assert prepared_built(graphs, OWN) == before
    (graphs.parent / "form.py").write_text(FORM.replace("PREFIX", "OTHER"))
    after = prepared_built(graphs, OWN)
    assert after != before
    assert read_items(after / "test.jsonl")[0].prompt[-1].content == "OTHER one test"


def test_a_file_of_the_users_own_that_is_not_there_is_told(graphs: Path) -> None:
    (graphs.parent / "form.py").unlink()
    with pytest.raises(SpecError, match=r"data\.task: form\.py cannot be read: No such file"):
        prepared_built(graphs, OWN)
