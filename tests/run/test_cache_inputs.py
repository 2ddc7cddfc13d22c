"""The images that rows name are a part of what a stage stands on, by content, wherever they lie; where they start is a
path like any other."""

import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finefit.data.images import ImageLocation, content_at
from finefit.run import cache_inputs
from finefit.run.cache_inputs import outside_inputs, stage_inputs
from finefit.run.create import create_run, find_stages, read_request
from finefit.run.staleness import decide_all
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import TrainStage, moved
from tests.conftest import write_jsonl
from tests.custom_models import SPEC, make_custom_project
from tests.data.image_rows import asked, draw
from tests.pipelines import carry_out
from tests.run.test_custom_inputs import SEEING
from tests.vision_models import digit_image

TRAIN = {
    "kind": "train",
    "model": {"kind": "shape", "config": {"model_type": "llava"}},
    "tuning": {"kind": "full"},
    "optimizer": {"lr": 1e-4},
}
BESIDE, SHOWN = "data.train.0.images", {"images_root": "shown"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "shown").mkdir(parents=True)
    for at in (1, 2):
        draw(folder / "shown", f"{at}.png", at)
    write_jsonl(folder / "rows.jsonl", [asked(1, "1.png"), asked(2, "1.png"), asked(1, "2.png")])
    return folder


def pipeline_of(**stages: Any) -> Pipeline:
    return Pipeline.model_validate_json(json.dumps({"name": "seeing", "stages": stages}))


def training(**source: Any) -> Pipeline:
    return pipeline_of(first=TRAIN | {"data": {"train": [{"path": "rows.jsonl", **source}]}})


def inputs(folder: Path, pipeline: Pipeline | None = None, name: str = "first") -> dict[str, str]:
    return stage_inputs(pipeline or training(), name, folder, lambda name: folder / name, lambda name: name).inputs


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def png(digit: int) -> bytes:
    digit_image(digit, size=(32, 32), seed=0).save(content := io.BytesIO(), "PNG")
    return content.getvalue()


def later(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("pipeline", [training(), training(**SHOWN)], ids=["beside the rows", "below images_root"])
def test_an_image_that_changes_changes_what_a_stage_stands_on(pipeline: Pipeline, project: Path) -> None:
    before = inputs(project, pipeline)
    assert inputs(project, pipeline) == before
    draw(project / "shown", "2.png", 7)
    assert changed(before, inputs(project, pipeline)) == [BESIDE]
    draw(project / "shown", "2.png", 2)
    assert inputs(project, pipeline) == before


def test_an_image_of_the_same_content_is_the_same_and_is_read_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(found: ImageLocation, name: str) -> bytes:
        read.append(name)
        return content_at(found, name)

    monkeypatch.setattr(cache_inputs, "content_at", noted)
    before = inputs(project)
    assert read == ["1.png", "2.png"]
    later(project / "shown" / "1.png")
    for _ in range(2):
        assert inputs(project) == before
    assert read == ["1.png", "2.png", "1.png"]


def test_only_images_that_rows_name_count_and_one_that_comes_or_goes_does(project: Path) -> None:
    before = inputs(project)
    draw(project / "shown", "3.png", 3)
    assert inputs(project) == before
    (project / "shown" / "2.png").rename(project / "shown" / "away.png")
    without = inputs(project)
    assert changed(before, without) == [BESIDE]
    (project / "shown" / "away.png").rename(project / "shown" / "2.png")
    assert inputs(project) == before


def test_an_image_in_a_zip_counts_by_its_own_content(project: Path) -> None:
    def pack(*digits: int) -> None:
        with zipfile.ZipFile(project / "shown.zip", "w") as archive:
            for at, digit in enumerate(digits, 1):
                archive.writestr(f"inside/{at}.png", png(digit))

    shutil.rmtree(project / "shown")
    pack(1, 2)
    before = inputs(project)
    pack(1, 2, 3)
    assert inputs(project) == before
    pack(1, 4)
    assert changed(before, inputs(project)) == [BESIDE]


def test_images_in_parquet_are_a_part_of_their_file(project: Path) -> None:
    def write(digit: int) -> dict[str, str]:
        rows = [{"image": {"bytes": png(digit), "path": "1.png"}, "question": "Which?", "answer": "1"}]
        pq.write_table(pa.Table.from_pylist(rows), project / "rows.parquet")
        return inputs(project, pipeline)

    pipeline = pipeline_of(first=TRAIN | {"data": {"train": [{"path": "rows.parquet"}]}})
    first = write(1)
    assert BESIDE not in first
    assert changed(first, write(2)) == ["data.train.0.path"]


def test_a_copy_of_rows_with_their_images_is_the_same(project: Path) -> None:
    copy = project.parent / "copy"
    shutil.copytree(project, copy)
    assert inputs(copy) == inputs(project)
    draw(copy / "shown", "1.png", 5)
    assert changed(inputs(project), inputs(copy)) == [BESIDE]


def test_images_count_for_whoever_reads_the_rows_and_as_what_a_stage_has_made(project: Path) -> None:
    drawn = {"kind": "python", "script": "draw.py", "outputs": ["rows.jsonl", "shown"]}
    source = {"path": "stage://drawn/rows.jsonl"}
    scores = {
        "kind": "evaluate",
        "models": {"own": SPEC["model"]},
        "data": {"test": source},
        "evaluate": [{"task": "exact_match"}],
    }
    pairs = {"kind": "make_pairs", "train": [source], "validation": {"path": "rows.jsonl", **SHOWN}}
    pipeline = pipeline_of(
        drawn=drawn, first=TRAIN | {"data": {"train": [source], "validation": source}}, scores=scores, pairs=pairs
    )
    shutil.copytree(project, project / "drawn")
    make_custom_project(project / "own")
    for name in ("my_model.py", "tokenizer"):
        (project / "own" / name).rename(project / name)
    before = {name: inputs(project, pipeline, name) for name in ("first", "scores", "pairs")}
    draw(project / "drawn" / "shown", "1.png", 6)
    found = {name: changed(told, inputs(project, pipeline, name)) for name, told in before.items()}
    assert found == {
        "first": [BESIDE, "data.validation.images"],
        "scores": ["data.test.images"],
        "pairs": ["train.0.images"],
    }
    (project / "draw.py").write_text("", encoding="utf-8")
    outside = outside_inputs(pipeline, project)
    assert [key for key in outside if key.endswith("images")] == ["pairs.validation.images"]


def test_rows_that_cannot_be_read_are_left_to_whoever_examines_them(project: Path) -> None:
    (project / "rows.jsonl").write_text('{"neither": 1, "nor": 2}\n', encoding="utf-8")
    assert BESIDE not in inputs(project)


def test_a_folder_of_several_splits_counts_by_the_split_that_is_read(project: Path) -> None:
    (project / "set").mkdir()
    for split in ("train", "test"):
        shutil.copy(project / "rows.jsonl", project / "set" / f"{split}.jsonl")
    pipeline = pipeline_of(first=TRAIN | {"data": {"train": [{"path": "set"}], "test": {"path": "set"}}})
    before = inputs(project, pipeline)
    write_jsonl(project / "set" / "test.jsonl", [asked(2, "2.png", question="Which is it?")])
    assert changed(before, inputs(project, pipeline)) == ["data.test.path", "data.test.images"]


def test_where_images_start_moves_with_the_stage() -> None:
    stage = moved(training(**SHOWN).stages["first"], lambda path: f"elsewhere/{path}")
    assert isinstance(stage, TrainStage)
    (source,) = stage.data.train
    assert (source.path, source.images_root) == ("elsewhere/rows.jsonl", "elsewhere/shown")


@pytest.mark.slow
def test_a_stage_and_those_after_it_are_made_anew_when_an_image_beside_its_rows_has_changed_and_only_then(
    tmp_path: Path,
) -> None:
    folder = make_custom_project(tmp_path / "own", code=SEEING).parent
    draw(folder, "a.png", 1)
    write_jsonl(folder / "test.jsonl", [asked(1, "a.png")])
    models = {"own": SPEC["model"], "wide": SPEC["model"] | {"config": SPEC["model"]["config"] | {"width": 24}}}
    evaluations = [{"task": "exact_match", "max_new_tokens": 2}]
    scores = {"kind": "evaluate", "models": models, "data": {"test": {"path": "test.jsonl"}}, "evaluate": evaluations}
    pipeline = pipeline_of(scores=scores, table={"kind": "compare", "of": ["scores"]}).model_copy(
        update={"device": "cpu"}
    )

    def told() -> list[tuple[str, str]]:
        stages = find_stages(read_request(pipeline, folder, spec_text=""), runs=folder / "runs", new=False)
        return [(choice.action, choice.reason) for choice in decide_all(stages)]

    carry_out(create_run(read_request(pipeline, folder, spec_text=""), runs=folder / "runs"))
    later(folder / "a.png")
    assert told() == [("done", "nothing has changed")] * 2
    draw(folder, "a.png", 8)
    assert told() == [("run", "data.test.images has changed"), ("run", "because scores runs")]
