"""The stages of a pipeline: what runs, what is left alone, and why. Stages are scripts, in processes of their own as
ever."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import CacheInputs, Finding, FinishedStage, PipelineState, Run, read_record, write_record
from finefit.artifacts.rundir import StageDir, find_run, open_run
from finefit.errors import FindingError, RunError, SpecError
from finefit.run.check_stages import CheckedPipeline, CheckedStage
from finefit.run.staleness import above, is_finished, is_half_done, open_stages
from finefit.spec.load import spec_to_json
from finefit.spec.pipeline import Pipeline
from tests.conftest import make_model_folder
from tests.forecasts import make_forecast
from tests.pipelines import Heard, calls, carry_out, decisions, make_scripts, open_pipeline

COPIES = """\
  moe:
    kind: build_moe
    base: {kind: folder, path: model}
    experts: {one: {kind: folder, path: model}, other: {kind: folder, path: model}}
    router: {kind: random}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return make_scripts(tmp_path / "project")


@pytest.fixture(scope="module")
def _first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run once; not to be changed."""
    spec = make_scripts(tmp_path_factory.mktemp("first") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finefit.run.launch._command", lambda: None)
        carry_out(open_pipeline(spec))
    return spec


@pytest.fixture
def finished(_first: Path, tmp_path: Path) -> Path:
    """The spec of a project whose run chain-1 is finished."""
    shutil.copytree(_first.parent, tmp_path / "project")
    calls(tmp_path / "project")
    return tmp_path / "project" / "spec.yaml"


def test_stages_run_in_their_order_and_each_finds_what_the_one_before_has_made(spec: Path) -> None:
    run, heard = open_pipeline(spec), Heard()
    assert carry_out(run, heard).status == "finished"
    assert calls(spec.parent) == heard.begun == ["first", "second", "third"]
    assert (run.stage(3, "third").output / "third.txt").read_text() == "raw\none\ntwo\nthree\n"
    assert [state.status for state in read_record(run.state, PipelineState).stages] == ["done"] * 3
    assert not [path for path in (run.path / "stages").iterdir() if path.name.startswith(".")]


def test_a_second_run_finds_everything_done(finished: Path) -> None:
    run, heard = open_pipeline(finished), Heard()
    assert run.path.name == "chain-1"
    assert is_finished(run)
    carry_out(run, heard)
    assert calls(finished.parent) == heard.begun == []
    assert heard.ended == [("first", "done"), ("second", "done"), ("third", "done")]


def test_what_a_stage_held_is_recorded_and_given_back(finished: Path) -> None:
    memory = read_record(open_pipeline(finished).stage(1, "first").done, FinishedStage).memory
    assert memory is not None
    assert (memory.device, memory.before_bytes, memory.after_bytes, memory.loaded_bytes) == ("cpu", 0, 0, None)
    assert memory.peak_bytes is not None
    assert 2**20 < memory.peak_bytes < 2**31


def test_a_changed_stage_starts_another_run_that_takes_over_what_stands_before_it(finished: Path) -> None:
    change = 'stages.second.arguments=["{before}", "{output}/second.txt", "2"]'
    assert decisions(finished, change)["first"] == ("reused", "made by chain-1")
    action, reason = decisions(finished, change)["second"]
    assert (action, reason) == ("run", 'arguments.2: "two" -> "2"')
    assert decisions(finished, change)["third"] == ("run", "because second runs")
    run = open_pipeline(finished, change)
    carry_out(run)
    assert run.path.name == "chain-2"
    assert calls(finished.parent) == ["second", "third"]
    assert [state.place for state in read_record(run.state, PipelineState).stages] == [
        "../chain-1/stages/1-first",
        "stages/2-second",
        "stages/3-third",
    ]
    assert find_run(run.path / "first").samefile(finished.parent / "runs" / "chain-1" / "stages" / "1-first")
    assert (run.stage(3, "third").output / "third.txt").read_text() == "raw\none\n2\nthree\n"


@pytest.mark.parametrize(("file", "reason"), [("raw.txt", "inputs.raw has changed"), ("add.py", "script has changed")])
def test_a_changed_file_runs_what_stands_on_it_and_says_which_it_was(finished: Path, file: str, reason: str) -> None:
    changed = finished.parent / file
    changed.write_text(changed.read_text() + "\n# changed\n")
    assert decisions(finished)["first"] == ("run", reason)
    run = open_pipeline(finished)
    carry_out(run)
    assert (run.path.name, calls(finished.parent)) == ("chain-2", ["first", "second", "third"])


def test_what_came_out_the_same_is_not_stood_on_again(finished: Path) -> None:
    """The script changed, and what it wrote did not: nothing behind it has another input."""
    (finished.parent / "other.py").write_text((finished.parent / "add.py").read_text() + "\n")
    carry_out(open_pipeline(finished, "stages.first.script=other.py"))
    assert calls(finished.parent) == ["first"]


def test_another_version_of_finefit_makes_everything_anew(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.run.cache_inputs.__version__", "99")
    action, reason = decisions(finished)["first"]
    assert action == "run"
    assert reason.startswith("finefit ")
    assert reason.endswith(" -> 99")
    assert not is_finished(open_pipeline(finished))


def test_where_files_lie_does_not_matter(finished: Path) -> None:
    finished.parent.rename(finished.parent.with_name("moved"))
    moved = finished.parent.with_name("moved") / "spec.yaml"
    assert {action for action, _ in decisions(moved).values()} == {"done"}


def test_a_stage_that_another_run_made_and_lost_is_made_again(finished: Path) -> None:
    change = 'stages.third.arguments=["{before}", "{output}/third.txt"]'
    run = open_pipeline(finished, change)
    carry_out(run)
    assert calls(finished.parent) == ["third"]
    shutil.rmtree(finished.parent / "runs" / "chain-1")
    assert not is_finished(run)
    carry_out(run)
    assert calls(finished.parent) == ["first", "second"]  # what they wrote is the same, so the third stands
    assert is_finished(run)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("")])
def test_a_file_that_was_taken_from_what_a_stage_made_makes_it_run_again(
    finished: Path, harm: Callable[[Path], object]
) -> None:
    run = open_pipeline(finished)
    harm(run.stage(1, "first").output / "first.txt")
    assert decisions(finished)["first"] == ("run", "some or all files of chain-1/stages/1-first are gone")
    assert not is_finished(run)
    carry_out(run)
    assert calls(finished.parent) == ["first"]
    assert is_finished(run)


def test_what_a_script_is_given_beside_its_own_files_is_no_loss(finished: Path) -> None:
    (open_pipeline(finished).stage(1, "first").output / "notes.txt").write_text("by hand")
    assert decisions(finished)["first"] == ("done", "nothing has changed")


def test_a_stage_that_alone_runs_leaves_the_others_as_they_are(finished: Path) -> None:
    run = open_pipeline(finished)
    carry_out(run, only="third", forced={"first", "third"})
    assert calls(finished.parent) == ["third"]
    assert [state.status for state in read_record(run.state, PipelineState).stages] == ["done"] * 3


def test_what_has_yet_to_begin_is_planned_at_every_start(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def forecast(pipeline: Pipeline, *_: object, names: set[str], **__: object) -> CheckedPipeline:
        asked.append([name for name in pipeline.order() if name in names])
        forecast = make_forecast(disk_bytes=1, total_steps=len(asked))
        stages = {name: CheckedStage(kind="train", forecast=forecast) for name in asked[-1]}
        return CheckedPipeline(is_flat=False, stages=stages, findings=(), disk_bytes=0, free_disk_bytes=0)

    monkeypatch.setattr("finefit.run.staleness.check_pipeline", forecast)
    run = open_pipeline(spec, only="first")
    carry_out(run, only="first")
    assert asked == [["first"], ["first"]]
    assert list(read_record(run.plan, Plan).forecasts) == ["first"]
    carry_out(open_pipeline(spec))
    assert asked[2:] == [["second", "third"]]
    carry_out(run)
    assert len(asked) == 3  # nothing was left to do
    carry_out(run, forced={"third"})
    assert asked[3:] == [["third"]]
    steps = {name: found.total_steps for name, found in read_record(run.plan, Plan).forecasts.items()}
    assert steps == {"first": 2, "second": 3, "third": 4}


def test_what_speaks_against_a_stage_is_told_before_a_run_exists_or_goes_on(spec: Path) -> None:
    make_model_folder(spec.parent / "model")
    spec.write_text(spec.read_text() + COPIES)
    with pytest.raises(FindingError, match="stage moe: 2 slots hold 1 distinct models, so the build will refuse them"):
        open_pipeline(spec)
    assert not (spec.parent / "runs").exists()
    run = open_pipeline(spec, only="first")
    assert run.path.name == "chain-1"
    with pytest.raises(FindingError, match="stage moe: 2 slots hold 1 distinct models"):
        carry_out(run)
    assert calls(spec.parent) == []
    assert read_record(run.run, Run).status == "failed"


def test_what_is_doubtful_is_told_and_the_run_goes_on(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        ("second", Finding(level="warning", problem="tight", remedy="close it")),
        (None, Finding(level="note", problem="well", remedy="")),
    )
    checked = CheckedPipeline(is_flat=False, stages={}, findings=found, disk_bytes=0, free_disk_bytes=0)
    monkeypatch.setattr("finefit.run.staleness.check_pipeline", lambda *_, **__: checked)
    heard = Heard()
    carry_out(open_pipeline(spec), heard)
    assert heard.said == ["warning: stage second: tight\n  close it"]
    assert heard.begun == ["first", "second", "third"]


def test_stages_may_be_named_in_another_order(spec: Path) -> None:
    text = spec.read_text(encoding="utf-8").replace(
        "stage://second/second.txt", "raw.txt"
    )  # third no longer stands on the others
    spec.write_text(text, encoding="utf-8")
    run = open_pipeline(spec)
    assert carry_out(run).status == "finished"
    calls(spec.parent)
    head, first, second, third = re.split(r"(?m)^(?=  (?:first|second|third):)", text)
    spec.write_text(head + third + first + second, encoding="utf-8")
    assert {action for action, _ in decisions(spec).values()} == {"done"}
    again = open_pipeline(spec)
    assert again.path == run.path
    assert is_finished(again)
    assert carry_out(again).status == "finished"
    assert calls(spec.parent) == []
    assert sorted(path.name for path in (run.path / "stages").iterdir()) == ["1-first", "2-second", "3-third"]


def test_a_stage_is_forced_alone_or_with_all_that_stand_on_it(finished: Path) -> None:
    run = open_pipeline(finished)
    carry_out(run, forced={"second"})
    assert calls(finished.parent) == ["second"]
    carry_out(run, forced=above(open_stages(run).pipeline, "second"))
    assert calls(finished.parent) == ["second", "third"]


@pytest.mark.parametrize(
    ("begun_by", "asked_by", "goes_on"),
    [("", "", True), ("a", "a", True), ("a", "", True), ("", "a", False), ("a", "b", False)],
)
def test_half_done_work_is_gone_on_with_by_the_command_that_began_it(
    tmp_path: Path, begun_by: str, asked_by: str, *, goes_on: bool
) -> None:
    """Checkpoints of a training that a killed `--from` left are not thrown away by the same command."""
    begun = CacheInputs(inputs={"spec": "1", "finefit": "1"}, document={}, command=begun_by)
    write_record(StageDir(tmp_path).begun, begun)
    assert is_half_done(StageDir(tmp_path), replace(begun, command=asked_by)) is goes_on


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("sys.exit(4)", "add.py ended with 4"),
        ("Path(target).unlink()", "has not written first.txt; its folder holds nothing"),
        ("sys.exit('out of ideas')", "add.py ended with out of ideas"),
    ],
)
def test_a_script_is_held_to_what_it_declares(spec: Path, ending: str, told: str) -> None:
    script = spec.parent / "add.py"
    script.write_text(script.read_text() + ending + "\n")
    with pytest.raises(SpecError, match=told):
        carry_out(open_pipeline(spec))


def test_a_script_writes_into_its_own_folder_where_it_names_none(spec: Path) -> None:
    (spec.parent / "add.py").write_text("open('first.txt', 'w').write('here')\n")
    run = open_pipeline(spec)
    carry_out(run, only="first")
    assert (run.stage(1, "first").output / "first.txt").read_text() == "here"


def test_a_missing_input_is_told_with_its_stage_before_anything_is_created(spec: Path) -> None:
    (spec.parent / "raw.txt").unlink()
    with pytest.raises(SpecError, match=r"stage first: .*raw\.txt cannot be read"):
        open_pipeline(spec)
    assert not (spec.parent / "runs").exists()


def test_the_records_hold_no_path_of_this_machine_but_in_orders(finished: Path) -> None:
    run = open_pipeline(finished)
    for path in (run.spec_json, run.state, run.run, run.plan, run.stage(1, "first").begun, run.stage(1, "first").done):
        assert str(finished.parent) not in path.read_text()


def test_a_stage_is_found_by_its_name(finished: Path) -> None:
    run = open_pipeline(finished)
    assert find_run(run.path / "second") == run.path / "stages" / "2-second"
    assert find_run(run.path / "second" / "output") == run.path / "stages" / "2-second" / "output"
    assert find_run(finished.parent / "nowhere") == finished.parent / "nowhere"
    with pytest.raises(RunError, match=r"has no stage fourth"):
        find_run(run.path / "fourth")
    with pytest.raises(RunError, match="is a pipeline"):
        open_run(run.path)


def test_new_starts_another_run_and_still_takes_over_what_is_made(finished: Path) -> None:
    run, heard = open_pipeline(finished, new=True), Heard()
    carry_out(run, heard)
    assert (run.path.name, calls(finished.parent)) == ("chain-2", [])
    assert {action for _, action in heard.ended} == {"reused"}


def test_spec_json_of_a_run_is_the_pipeline_with_paths_that_start_there(finished: Path) -> None:
    run = open_pipeline(finished)
    stages = open_stages(run)
    stage = stages.pipeline.stages["first"]
    assert stage.kind == "python"
    assert (stages.base / stage.script).samefile(finished.parent / "add.py")
    assert spec_to_json(stages.pipeline) + "\n" == run.spec_json.read_text()


def test_one_stage_alone_needs_what_it_depends_on(spec: Path) -> None:
    run = open_pipeline(spec)
    assert carry_out(run, only="first").status == "stopped"
    with pytest.raises(RunError, match="stage third depends on second"):
        carry_out(run, only="third")
    carry_out(run, only="second")
    assert carry_out(run, only="third").status == "finished"
    assert calls(spec.parent) == ["first", "second", "third"]


def test_a_failed_stage_ends_the_run_and_is_named(spec: Path) -> None:
    script = spec.parent / "add.py"
    text = script.read_text()
    script.write_text(text + "if 'two' in words:\n    raise ValueError('no such word')\n")
    run = open_pipeline(spec)
    with pytest.raises(SpecError, match=r"stage second: add\.py \(line 9\): ValueError: no such word"):
        carry_out(run)
    record, states = read_record(run.run, Run), read_record(run.state, PipelineState).stages
    assert (record.status, [state.status for state in states]) == ("failed", ["done", "failed", "waiting"])
    assert record.failure is not None
    assert record.failure.exit_code == 2
    assert "Traceback" in (run.path / "logs" / "second.log").read_text()
    assert not run.stage(2, "second").path.exists()
    script.write_text(text)
    calls(spec.parent)
    carry_out(open_pipeline(spec))
    assert calls(spec.parent) == ["first", "second", "third"]  # the script is an input of all three
