import errno
import json
import shutil
from pathlib import Path

import pytest

from finefit.artifacts.forecasts import Plan
from finefit.artifacts.journal import read_lines
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.trainings import Stage
from finefit.errors import DataError, DiskFull, RunError
from finefit.facts.files import read_file
from finefit.pipeline.create import create_run, stage_of
from finefit.pipeline.execute import execute
from finefit.pipeline.inputs import open_inputs
from finefit.spec.load import load_spec
from finefit.spec.schema import Parallel
from tests.conftest import make_rows, write_jsonl
from tests.pipeline.conftest import prepared


def test_a_prepared_run_is_whole_and_waits(project: Path) -> None:
    run = prepared(project, "seed=9")
    record = read_record(run.run, Run)
    assert (run.path.name, record.status, record.overrides) == ("tiny-1", "prepared", ("seed=9",))
    assert run.path.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in run.path.parent.iterdir()] == ["tiny-1"]


def test_runs_of_one_name_are_numbered_by_the_highest(project: Path) -> None:
    prepared(project).path.rename(project.parent / "runs" / "tiny-9")
    assert prepared(project).path.name == "tiny-10"


def test_a_number_that_something_else_has_is_passed_over(project: Path) -> None:
    (project.parent / "runs" / "tiny-1").mkdir(parents=True)
    assert prepared(project).path.name == "tiny-2"


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

    monkeypatch.setattr("finefit.pipeline.create.shutil.copyfile", full)
    with pytest.raises(DiskFull, match=r"the disk is full: .*tiny needs [\d,]+ bytes, [\d,]+ are free"):
        prepared(project)
    assert list((project.parent / "runs").iterdir()) == []


def test_a_number_that_another_process_takes_first_is_left_to_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(project)
    numbers = iter([1, 1, 2])
    monkeypatch.setattr("finefit.pipeline.create.next_number", lambda *_: next(numbers))
    assert prepared(project).path.name == "tiny-2"
    assert read_record(first.run, Run).status == "prepared"


def test_what_fails_leaves_no_staging_folder_behind(project: Path) -> None:
    write_jsonl(project.parent / "test.jsonl", [{"prompt": "one and one", "completion": "two"}])
    with pytest.raises(DataError, match=r"test\.jsonl:1 cannot be a reference of json_match: the answer is no JSON"):
        prepared(project)
    assert list((project.parent / "runs").iterdir()) == []


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
    assert stage.prepared == {p.name: read_file(p, where.path).sha256 for p in (where.path / "data").iterdir()}
    assert (stage.num_rows, stage.total_steps, stage.warmup_steps, stage.levers.micro_batch) == (22, 12, 2, 2)


def test_paths_are_recorded_relative_to_the_run(project: Path) -> None:
    run = prepared(project)
    assert json.loads(run.spec_json.read_text())["model"]["path"] == "../../model"
    facts = json.loads(run.facts.read_text())
    assert facts["inputs"]["data"]["train"][0][0]["path"] == "../../train.jsonl"
    assert (run.path / "../../train.jsonl").resolve() == project.parent / "train.jsonl"


def test_two_nodes_of_two_ranks_are_planned_as_four(project: Path) -> None:
    spec = load_spec(project, ("engine={kind: ddp, devices: 2}",))
    opened = open_inputs(spec, project.parent, project.parent / "runs" / spec.name, nodes=2)
    run = create_run(
        opened,
        spec_text=project.read_text(),
        overrides=("engine={kind: ddp, devices: 2}",),
        base=project.parent,
        runs=project.parent,
    )
    stage, plan = read_record(stage_of(run).stage, Stage), read_record(run.plan, Plan)
    assert (stage.num_ranks, stage.engine) == (4, Parallel(kind="ddp", devices=2))
    assert plan.forecasts["sft"].devices == 4
    with pytest.raises(RunError, match="was planned for 4 ranks on several nodes, and this command starts 2"):
        execute(run, tick=lambda: None, warn=lambda _: None)
