import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import Facts, Run, read_record
from finefit.artifacts.rundir import stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import DataError, DiskFull, ModelError, RunError
from finefit.facts.files import sha256_of
from finefit.model.family import save_weights
from finefit.model.load import load_base, make_trainable
from finefit.run.create import between, read_request
from finefit.run.resume import amend
from finefit.run.run_stages import train_run
from finefit.spec.load import load_pipeline, load_spec
from finefit.spec.models import Lora
from finefit.spec.schema import Ddp
from finefit.spec.stages import moved
from tests.conftest import SPEC, make_model_folder, make_project, make_rows, write_jsonl
from tests.run.conftest import prepared


def test_a_prepared_run_is_whole_and_waits(project: Path) -> None:
    run = prepared(project, "seed=9")
    record = read_record(run.run, Run)
    assert (run.path.name, record.status, record.overrides) == ("tiny-1", "prepared", ("seed=9",))
    assert run.path.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in run.path.parent.iterdir()] == ["tiny-1"]


def test_runs_of_one_name_are_numbered_by_the_highest_whatever_has_the_number(project: Path) -> None:
    prepared(project).path.rename(project.parent / "runs" / "tiny-9")
    (project.parent / "runs" / "tiny-10").mkdir()
    assert prepared(project).path.name == "tiny-11"


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_row_that_is_trained_on_is_refused_in_the_other_splits(project: Path, split: str) -> None:
    write_jsonl(project.parent / f"{split}.jsonl", [*make_rows(2, seed=5), make_rows(22)[7]])
    with pytest.raises(DataError, match=rf"train\.jsonl:8 \(train\) is {split}\.jsonl:3 \({split}\): the same row"):
        prepared(project)


@pytest.mark.parametrize(("new", "told"), [("2-dpo", "holds 1-sft, 2-dpo"), (None, "holds none")])
def test_a_run_whose_stage_is_not_to_be_told_says_so(project: Path, new: str | None, told: str) -> None:
    run = prepared(project)
    (run.path / "stages" / "notes.txt").write_text("not a stage")
    (run.path / "stages" / "2-notes.txt").write_text("not one either")
    assert stage_of(run).path.name == "1-sft"
    if new is None:
        shutil.rmtree(run.path / "stages")
    else:
        (run.path / "stages" / new).mkdir()
    with pytest.raises(RunError, match=told):
        stage_of(run)


def test_a_full_disk_while_a_run_is_made_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("finefit.run.create.shutil.copyfile", full)
    with pytest.raises(DiskFull, match=r"the disk is full: .*tiny needs [\d,]+ bytes, [\d,]+ are free"):
        prepared(project)
    assert list((project.parent / "runs").iterdir()) == []


def test_a_number_that_another_process_takes_first_is_left_to_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(project)
    numbers = iter([1, 1, 2])
    monkeypatch.setattr("finefit.artifacts.rundir.next_number", lambda *_: next(numbers))
    assert prepared(project).path.name == "tiny-2"
    assert read_record(first.run, Run).status == "prepared"


def test_what_is_refused_leaves_nothing_behind(project: Path) -> None:
    write_jsonl(project.parent / "test.jsonl", [{"prompt": "one and one", "completion": "two"}])
    with pytest.raises(DataError, match=r"test\.jsonl:1 cannot be a reference of json_match: the answer is not JSON"):
        prepared(project)
    assert not (project.parent / "runs").exists()


def test_every_row_is_in_the_ledger_used_or_dropped_with_its_reason(project: Path) -> None:
    rows = make_rows(6)
    rows[2]["messages"][0]["content"] = "add " * 60
    write_jsonl(project.parent / "train.jsonl", rows)
    lines = list(
        read_lines(
            stage_of(prepared(project, "data.too_long=drop", "data.max_tokens=120", "data.drop_at_most=0.2")).ledger
        )
    )
    (train,) = [line for line in lines if line["split"] == "train" and "read" in line]
    assert (train["read"], train["used"], train["dropped"]) == (6, 5, {"too long": 1})
    (dropped,) = [line for line in lines if "reason" in line]
    assert (dropped["source"], dropped["row"], dropped["what"]) == ("train.jsonl", 3, "dropped")
    assert dropped["reason"].startswith("too long: ")


def test_the_stage_knows_its_prepared_rows_by_content(project: Path) -> None:
    where = stage_of(prepared(project))
    stage = read_record(where.stage, Stage)
    assert stage.prepared == {p.name: sha256_of(p) for p in (where.path / "data").iterdir()}
    assert (stage.num_rows, stage.total_steps, stage.warmup_steps, stage.levers.micro_batch) == (22, 12, 2, 2)


def test_paths_are_recorded_relative_to_the_run(project: Path) -> None:
    run = prepared(project)
    assert json.loads(run.spec_json.read_text())["model"]["path"] == "../../model"
    facts = json.loads(run.facts.read_text())
    assert facts["inputs"]["data"]["train"][0][0]["path"] == "../../train.jsonl"
    assert (run.path / "../../train.jsonl").resolve() == project.parent / "train.jsonl"


def test_two_nodes_of_two_ranks_are_planned_as_four(project: Path) -> None:
    run = prepared(project, "engine={kind: ddp, devices: 2}", nodes=2)
    stage, plan = read_record(stage_of(run).stage, Stage), read_record(run.plan, Plan)
    assert (stage.num_ranks, stage.engine) == (4, Ddp(kind="ddp", devices=2))
    assert plan.forecasts["sft"].devices == 4
    with pytest.raises(RunError, match="was planned for 4 ranks on several nodes, but this command starts 2"):
        train_run(run)


def _digest(spec_path: Path, *overrides: str, nodes: int | None = None) -> str:
    return read_request(load_pipeline(spec_path, overrides), spec_path.parent, spec_text="", nodes=nodes).digest


def test_where_files_lie_and_comments_do_not_matter(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(project.parent, moved)
    (moved / "train.jsonl").rename(moved / "rows.jsonl")
    (moved / "spec.yaml").write_text("# a comment\n" + project.read_text())
    assert _digest(moved / "spec.yaml", "data.train.0.path=rows.jsonl") == _digest(project)


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


@pytest.mark.parametrize(
    ("override", "matters"),
    [
        *(
            (override, True)
            for override in ("seed=8", "global_batch=8", "schedule.epochs=3", "save.keep=3", "evaluate=[]")
        ),
        ("trackers=[{kind: tensorboard}]", False),
        ("launcher={kind: slurm, partition: long, minutes: 9}", False),
    ],
)
def test_what_is_asked_does_matter_and_who_starts_it_does_not(project: Path, override: str, *, matters: bool) -> None:
    assert (_digest(project, override) != _digest(project)) is matters


def test_on_how_many_nodes_does_matter_whoever_starts_them(project: Path) -> None:
    assert _digest(project, nodes=2) == _digest(project, "launcher={kind: slurm, nodes: 2}") != _digest(project)


def test_all_that_is_wrong_with_files_or_records_is_told_at_once(project: Path) -> None:
    (project.parent / "train.jsonl").write_text('{"question": "Why?"}\n')
    test = project.parent / "test.jsonl"
    test.write_text("")
    with pytest.raises(DataError) as records:
        prepared(project)
    assert "train.jsonl: the shape of its records is not recognised" in records.value.problem
    assert "test.jsonl holds no rows" in records.value.problem
    (project.parent / "validation.jsonl").unlink()
    test.rename(test.with_suffix(".doc"))
    with pytest.raises(DataError) as files:
        _digest(project, "data.test.path=test.doc")
    assert "validation.jsonl does not exist" in files.value.problem
    assert "test.doc has no known extension" in files.value.problem
    assert [len(caught.value.remedy.splitlines()) for caught in (records, files)] == [2, 2]


def test_a_moved_path_names_the_same_file(tmp_path: Path) -> None:
    move = between(tmp_path / "a", tmp_path / "b" / "c")
    assert move("rows.jsonl") == "../../a/rows.jsonl"
    assert move(str(tmp_path / "b" / "x")) == "../x"


def test_relocation_changes_paths_and_nothing_else(project: Path) -> None:
    spec = load_spec(project)
    found = moved(spec, lambda path: f"../{path}")
    assert found.data.train[0].path == "../train.jsonl"
    assert moved(found, lambda path: path.removeprefix("../")) == spec


def test_relocation_moves_every_test_source_and_the_roots_of_images(project: Path) -> None:
    tests = "data.test=[{path: a.json, images_root: pictures}, {path: b.json, fields: {join: c.json}}]"
    spec = load_spec(project, (tests, "data.validation={path: v.json, images_root: held}"))
    found = moved(spec, lambda path: f"../{path}")
    first, second = found.data.test_sources()
    assert (first.path, first.images_root, second.path, second.images_root) == (
        "../a.json",
        "../pictures",
        "../b.json",
        None,
    )
    assert second.fields.join == "../c.json"
    assert [source.images_root for source in found.data.sources()["validation"]] == ["../held"]
    assert [source.label for source in found.data.test_sources()] == ["a", "b"]


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


# An adapter that training goes on from is an input like the model: by content, wherever it lies.

GOING_ON = re.sub(r"tuning: .*\n", "tuning: {kind: lora, rank: 4, alpha: 8, adapter: adapters/first}\n", SPEC)


def make_adapter(folder: Path, model: Path, *, seed: int) -> None:
    torch.manual_seed(seed)
    base = load_base(model, device="cpu", dtype=torch.float32)
    save_weights(make_trainable(base, Lora(kind="lora", rank=4, alpha=8), name="model"), folder)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = make_project(tmp_path / "project", spec=GOING_ON)
    make_adapter(path.parent / "adapters" / "first", path.parent / "model", seed=1)
    return path


def test_another_adapter_is_another_run_and_the_same_one_elsewhere_is_not(spec: Path) -> None:
    first = _digest(spec)
    shutil.copytree(spec.parent / "adapters" / "first", spec.parent / "moved")
    assert _digest(spec, "tuning.adapter=moved") == first
    make_adapter(spec.parent / "other", spec.parent / "model", seed=2)
    assert _digest(spec, "tuning.adapter=other") != first
    assert _digest(spec, "tuning.adapter=null") != first


def test_the_stage_names_it_from_the_run_directory_and_knows_its_content(spec: Path) -> None:
    run = prepared(spec)
    stage = read_record(stage_of(run).stage, Stage)
    assert isinstance(stage.tuning, Lora)
    assert stage.tuning.adapter == "../../adapters/first"
    assert stage.model_fingerprint == read_record(run.facts, Facts).inputs.model_fingerprint
    bare = prepared(spec, "tuning.adapter=null")
    assert stage.model_fingerprint != read_record(bare.facts, Facts).inputs.model_fingerprint


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_run_whose_adapter_has_changed_is_refused(spec: Path, file: str) -> None:
    run = prepared(spec)
    changed = spec.parent / "adapters" / "first" / file
    if file == "adapter_config.json":
        changed.write_text(json.dumps(json.loads(changed.read_text()) | {"revision": "x"}))
    else:
        make_adapter(changed.parent, spec.parent / "model", seed=2)
    with pytest.raises(RunError, match=r"the inputs of tiny-1 have changed since it began:\n  tuning.adapter "):
        amend(run, ())


def test_an_adapter_that_is_gone_is_named_with_what_to_do(spec: Path) -> None:
    run = prepared(spec)
    shutil.rmtree(spec.parent / "adapters")
    with pytest.raises(
        ModelError,
        match=(
            r"adapters/first/adapter_config.json cannot be read: No such file or directory\nname a folder with "
            r"adapter_config.json"
        ),
    ):
        amend(run, ())


def test_a_run_goes_on_from_where_its_adapter_lies_now_and_never_without_it(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(spec)
    with pytest.raises(RunError, match=r"cannot resume with another spec:\n.*tuning.adapter"):
        amend(run, ("tuning.adapter=null",))
    (spec.parent / "adapters").rename(spec.parent / "elsewhere")
    monkeypatch.chdir(spec.parent)
    amend(run, ("tuning.adapter=elsewhere/first",))
    stage = read_record(stage_of(run).stage, Stage)
    assert isinstance(stage.tuning, Lora)
    assert stage.tuning.adapter == "../../elsewhere/first"
    assert amend(run, ()) == []
