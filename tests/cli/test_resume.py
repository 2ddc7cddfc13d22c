"""`finefit run RUN_DIR`: what may change is changed, stated and recorded; everything else is refused with a diff."""

import json
import os
import shutil
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_steps
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import RunError, SpecError
from finefit.facts.files import finefit_cache
from finefit.run.create import between
from finefit.run.resume import amend, follow
from finefit.spec.load import load_spec
from finefit.spec.models import FolderModel
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask, Summary
from tests.cli.conftest import STAGE, Finefit, files_with_times, rewrite
from tests.conftest import make_model_folder, make_rows, write_jsonl
from tests.run.conftest import prepared

RUN = "runs/tiny-1"


def _plan(run: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())["stages"]["sft"]
    return plan


def _train(path: str, **changes: object) -> list[dict[str, object]]:
    """As a plan has it, in the order of the spec's keys."""
    known = {"path": path, "fields": {}, "weight": 1.0} | changes
    return [known | {"where": {}}]


def _untouched_but_the_lock(before: dict[str, int], after: dict[str, int]) -> bool:
    return {k: v for k, v in before.items() if not k.endswith("run.lock")} == {
        k: v for k, v in after.items() if not k.endswith("run.lock")
    }


OTHER_SPEC = "tiny-1 cannot resume with another spec:\n  "
ROWS = "../../train.jsonl"
REFUSED = {
    "global_batch=8": f"{OTHER_SPEC}global_batch: 4 -> 8\n",
    "optimizer.lr=0.02": f"{OTHER_SPEC}optimizer.lr: 0.01 -> 0.02\n",
    "tuning.targets=[q_proj]": f"{OTHER_SPEC}tuning.targets: all-linear -> ['q_proj']\n",
    "schedule.warmup=0.2": f"{OTHER_SPEC}schedule.warmup: 0.1 -> 0.2\n",
    "data.max_tokens=99": f"{OTHER_SPEC}data.max_tokens: 2048 -> 99\n",
    "data.validation=null": "  data.validation.path: ../../validation.jsonl -> (none)\n",
    "data.test=null": "  data.test.path: ../../test.jsonl -> (none)\n",
    "data.train=[{path: train.jsonl}, {path: validation.jsonl}]": f"  data.train: {_train(ROWS)} -> ",
    # the prepared rows would stay as they are, whatever the spec says of them then
    "data.train.0.weight=2.0": f"  data.train: {_train(ROWS)} -> {_train(ROWS, weight=2.0)}\n",
    "data.train.0.limit=9": f"  data.train: {_train(ROWS)} -> {_train(ROWS, limit=9)}\n",
    'data.train.0.fields={"messages": "messages"}': (
        f"  data.train: {_train(ROWS)} -> {_train(ROWS, fields={'messages': 'messages'})}\n"
    ),
    "schedule.epochs=1": "tiny-1 has done 12 steps, but 6 are requested now",
}


@pytest.mark.parametrize(("override", "told"), REFUSED.items(), ids=REFUSED)
def test_an_override_that_would_change_the_steps_done_is_refused_with_the_diff(
    finished: Path, finefit: Finefit, override: str, told: str
) -> None:
    before = files_with_times(finished / "runs")
    answer = finefit("run", RUN, "--set", override)
    assert answer.code == 2
    assert told in answer.err
    assert OTHER_SPEC not in answer.err or "may change" in answer.err
    assert _untouched_but_the_lock(before, files_with_times(finished / "runs"))


@pytest.mark.parametrize(
    ("old", "new", "diff"),
    [
        ("global_batch: 4", "global_batch: 2", "global_batch: 4 -> 2"),
        ("kind: lora, rank: 4, alpha: 8, dropout: 0.1", "kind: full", "tuning.kind: lora -> full"),
        ("path: train.jsonl", "path: other.jsonl", f"data.train: {_train('train.jsonl')} -> {_train('other.jsonl')}"),
        ("path: model", "path: other", "model.path: model -> other"),
    ],
)
def test_an_edited_spec_in_the_run_directory_is_refused_with_the_diff(
    finished: Path, finefit: Finefit, old: str, new: str, diff: str
) -> None:
    rewrite(finished / RUN / "spec.yaml", (old, new))
    answer = finefit("run", RUN)
    assert answer.code == 2
    assert f"  {diff}\n" in answer.err


def test_a_changed_data_file_is_refused_with_the_diff(finished: Path, finefit: Finefit) -> None:
    write_jsonl(finished / "train.jsonl", make_rows(23))
    answer = finefit("run", RUN)
    assert answer.code == 2
    assert "the inputs of tiny-1 have changed since it began:\n  data.train.0.path (../../train.jsonl): " in answer.err
    assert "restore them, or give the spec file: it starts another run" in answer.err


def test_a_file_that_lies_elsewhere_now_is_the_same_file(finished: Path, finefit: Finefit) -> None:
    (finished / "train.jsonl").rename(finished / "moved.jsonl")
    assert finefit("run", RUN, "--set", "data.train.0.path=moved.jsonl").code == 0
    write_jsonl(finished / "moved.jsonl", make_rows(23))
    answer = finefit("run", RUN)
    assert answer.code == 2
    assert "  data.train.0.path (../../moved.jsonl): " in answer.err


def test_a_changed_model_is_refused_with_the_diff(finished: Path, finefit: Finefit) -> None:
    shutil.rmtree(finished / "model")
    make_model_folder(finished / "model", seed=1)
    answer = finefit("run", RUN)
    assert answer.code == 2
    assert "  model.path (../../model): " in answer.err


def test_a_model_that_is_gone_is_asked_for_by_its_option(finished: Path, finefit: Finefit) -> None:
    (finished / "model").rename(finished / "elsewhere")
    answer = finefit("run", RUN)
    assert answer.code == 2
    assert "does not exist" in answer.err
    assert "--set model.path=FOLDER" in answer.err


def test_more_epochs_go_on_from_the_last_checkpoint_and_are_recorded(finished: Path, finefit: Finefit) -> None:
    answer = finefit("run", RUN, "--set", "schedule.epochs=3")
    assert answer.code == 0
    extension = (
        "the cosine schedule now spans 18 steps instead of 12, warm-up not repeated: step 12 was taken at "
        "0.000245, step 13 is taken at 0.00309"
    )
    assert answer.out.startswith(f"schedule.epochs: 2 -> 3\n{extension}\n")
    assert answer.out.count("schedule.epochs: 2 -> 3") == 1
    assert "resumed from checkpoint-12" in answer.out
    assert "step 18/18" in answer.out
    record = read_record(finished / RUN / "run.json", Run)
    assert (record.status, record.overrides) == ("finished", ("schedule.epochs=3",))
    assert [(a.after_step, a.changes, a.note) for a in record.amendments] == [
        (12, ("schedule.epochs: 2 -> 3",), extension)
    ]
    plan = _plan(finished / RUN)
    assert plan["schedule.epochs"] == {"value": 3, "source": "amended after step 12"}
    assert plan["total_steps"] == {"value": 18, "source": "3 epochs x 6 steps, amended after step 12"}
    assert plan["warmup_steps"]["value"] == 2
    rates = [line["learning_rate"] for line in read_steps(finished / RUN / STAGE / "metrics.jsonl")]
    assert (len(rates), f"{rates[12]:.3g}") == (18, "0.00309")


def test_a_change_that_leaves_the_length_alone_leaves_its_source_alone(finished: Path, finefit: Finefit) -> None:
    before = _plan(finished / RUN)
    answer = finefit("run", RUN, "--set", "save.keep=5", "--set", "on_nan={kind: skip, at_most: 2}")
    assert answer.code == 0
    after = _plan(finished / RUN)
    assert {key for key in after if after[key] != before.get(key)} == {"save.keep", "on_nan.kind", "on_nan.at_most"}
    assert finefit("run", RUN, "--set", "on_nan={kind: stop}").code == 0
    assert "on_nan.at_most" not in _plan(finished / RUN)


def test_a_run_that_is_being_worked_on_is_refused_before_anything_is_changed(finished: Path, finefit: Finefit) -> None:
    before = files_with_times(finished / "runs")
    with run_lock(finished / RUN / "run.lock"):
        amended = finefit("run", RUN, "--set", "schedule.epochs=3")
        again = finefit("run", RUN, "--set", "save.keep=4", "--detach")
    for answer in (amended, again):
        assert answer.code == 2
        assert answer.out == ""
        assert "is already being worked on by process" in answer.err
    assert _untouched_but_the_lock(before, files_with_times(finished / "runs"))


@pytest.mark.usefixtures("finished")
def test_new_wants_a_spec_file(finefit: Finefit) -> None:
    answer = finefit("run", RUN, "--new")
    assert answer.code == 2
    assert "--new starts from a spec file" in answer.err


def test_a_run_directory_copied_away_alone_goes_on_once_its_model_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finefit: Finefit
) -> None:
    """It was prepared and never started; its data files and what was prepared from them are gone, for the rows travel
    with it."""
    folder, away = project.parent, tmp_path / "away" / "copied"
    monkeypatch.chdir(tmp_path)
    rewrite(project, ("evaluate:", "# evaluate:"))
    shutil.copytree(prepared(project).path, away, symlinks=True)
    (folder / "model").rename(tmp_path / "weights")
    shutil.rmtree(folder)
    shutil.rmtree(finefit_cache() / "prepared")
    lost = finefit("run", away)
    assert lost.code == 2
    assert "--set model.path=FOLDER" in lost.err

    answer = finefit("run", away, "--set", f"model.path={tmp_path / 'weights'}", "--json")
    assert (answer.code, answer.document["result"]["step"]) == (0, 12), answer.err
    assert json.loads((away / "spec.json").read_text())["model"]["path"] == "../../weights"
    assert _plan(away)["model.path"] == {"value": str(tmp_path / "weights"), "source": "amended after step 0"}
    again = finefit("run", away, "--json")
    assert (again.code, again.document["status"]) == (0, "finished"), again.err


def test_a_run_whose_data_files_are_gone_is_still_accepted(finished: Path, finefit: Finefit) -> None:
    for name in ("train", "validation", "test"):
        (finished / f"{name}.jsonl").unlink()
    assert finefit("run", RUN).code == 0


def test_who_is_told_of_a_run_may_change_and_is_recorded(finished: Path, finefit: Finefit) -> None:
    answer = finefit("run", RUN, "--set", "trackers=[{kind: tensorboard}]")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("trackers: [] -> [{'kind': 'tensorboard'}]\n")
    assert [tracker.kind for tracker in read_record(finished / RUN / STAGE / "stage.json", Stage).trackers] == [
        "tensorboard"
    ]
    assert _plan(finished / RUN)["trackers"] == {"value": [{"kind": "tensorboard"}], "source": "amended after step 12"}


OWN = """\
METRICS = {"right": "rate"}


def extract(answer):
    return answer


def score(found, reference):
    return {"right": found == reference}
"""


def _own(path: str) -> str:
    return f"evaluate=[{{task: {{kind: python, path: {path}}}}}]"


def test_another_task_file_that_is_given_now_takes_the_place_of_the_runs_copy(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project.parent
    monkeypatch.chdir(folder)
    (folder / "new").mkdir()
    (folder / "mine.py").write_text(OWN)
    (folder / "new" / "mine.py").write_text(f"# other\n{OWN}")
    run = prepared(project, _own("mine.py"))
    assert amend(run, (_own("mine.py"),)) == []
    (line,) = amend(run, (_own("new/mine.py"),))
    assert "new/mine.py" in line
    (evaluation,) = read_record(stage_of(run).stage, Stage).evaluate
    assert isinstance(evaluation.task, CustomTask)
    assert (run.path / evaluation.task.path).read_text().startswith("# other\n")
    assert (evaluation.task.path, amend(run, ())) == ("tasks/mine.py", [])
    with pytest.raises(SpecError, match=r"gone/mine\.py does not exist"):
        amend(run, (_own("gone/mine.py"),))


def test_another_model_that_a_task_judges_with_is_taken_when_it_is_given_now(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    run = prepared(project, "evaluate=[{task: {kind: summary, nli: {kind: folder, path: model}}}]")
    amend(run, ("evaluate.0.task.nli.path=better",))
    amend(run, ("evaluate.0.max_new_tokens=9",))
    (evaluation,) = read_record(stage_of(run).stage, Stage).evaluate
    assert isinstance(evaluation.task, Summary)
    assert (evaluation.task.nli, evaluation.max_new_tokens) == (FolderModel(kind="folder", path="../../better"), 9)


def test_a_run_that_was_for_a_scheduler_goes_on_here_when_asked_to(
    finished: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    amend(RunDir(finished / RUN), ("launcher.kind=slurm",))
    assert _plan(finished / RUN)["launcher.partition"] == {"value": None, "source": "amended after step 12"}
    monkeypatch.setenv("PATH", str(finished))
    assert "there is no sbatch" in finefit("run", RUN).err
    assert finefit("run", RUN, "--set", "launcher.kind=local").code == 0
    assert finefit("run", RUN).code == 0
    assert "launcher.partition" not in _plan(finished / RUN)


@pytest.mark.usefixtures("finished")
def test_another_number_of_nodes_is_refused() -> None:
    with pytest.raises(
        RunError, match=r":\n  launcher\.nodes: \(none\) -> 2\nonly .* may change, except launcher\.nodes"
    ):
        amend(RunDir(Path(RUN)), ("launcher={kind: slurm, nodes: 2}",))


def test_a_spec_that_only_says_otherwise_who_is_told_goes_on_in_the_same_run(project: Path) -> None:
    run = prepared(project)
    here = partial(moved, move=between(project.parent, run.path))
    assert follow(run, here(load_spec(project))) == []
    (line,) = follow(run, here(load_spec(project, ("trackers=[{kind: tensorboard}]",))))
    assert line == "trackers: [] -> [{'kind': 'tensorboard'}]"
    assert len(read_record(stage_of(run).stage, Stage).trackers) == 1
    write_record(run.run, replace(read_record(run.run, Run), status="finished"))
    assert follow(run, here(load_spec(project))) == []


def test_what_is_queued_is_compared_first_and_the_job_is_given_the_run_directory(
    finished: Path, finefit: Finefit, scheduler: Path
) -> None:
    write_jsonl(finished / "train.jsonl", make_rows(23))
    answer = finefit("run", RUN, "--set", "launcher={kind: slurm, partition: long}")
    assert answer.code == 2
    assert "the inputs of tiny-1 have changed" in answer.err
    refused = finefit("run", "spec.yaml", "--set", "launcher={kind: slurm}", "--set", "data.train.0.path=gone.jsonl")
    assert refused.code == 2
    assert "gone.jsonl does not exist" in refused.err
    assert not (scheduler / "submitted.sh").exists()
    (finished / "train.jsonl").unlink()
    answer = finefit("run", RUN, "--set", "launcher={kind: slurm, partition: long}", "--json")
    assert (answer.code, answer.document["job"]) == (0, "4711"), answer.err
    assert "#SBATCH --partition=long" in (scheduler / "submitted.sh").read_text()


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs with the names of SLURM's; what sbatch is given stands beside them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {
        "sbatch": f'cp "$1" {programs}/submitted.sh; echo Submitted batch job 4711',
        "srun": "exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def test_a_file_of_deepspeeds_may_be_gone_once_the_stage_has_its_own_and_may_not_change(project: Path) -> None:
    own = project.parent / "own.json"
    own.write_text("{}")
    run = prepared(project, "engine={kind: deepspeed, devices: 2, config: own.json}")
    assert amend(run, ()) == []
    own.write_text('{"steps_per_print": 9}')
    with pytest.raises(RunError, match=r"engine\.config \(\.\./\.\./own\.json\): "):
        amend(run, ())
    own.unlink()
    with pytest.raises(SpecError, match=r"own\.json cannot be read"):
        amend(run, ())
    (stage_of(run).path / "deepspeed.json").write_text("{}")
    assert amend(run, ()) == []
